"""Hosts with several ranks that share network interfaces, on switches that may be oversubscribed."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import final

from workbench.arguments import is_whole
from workbench.costs.network import Network, Route
from workbench.errors import ConfigError

_KINDS = 6  # kinds of stages: interface out, in; a rank's port inside its host out, in; a switch's port up, down


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Hosts of neighbouring ranks: rank r is on host r // ranks_per_host.

    Every stage is full duplex: each direction has its own capacity.

    Attributes:
        between: one network interface of a host, and alpha between hosts.
        inside: one rank's port to the other ranks of the host, and alpha inside the host; needed if a host has several
            ranks.
        ranks_per_host: ranks that share the host's interfaces.
        hosts_per_switch: neighbouring hosts on one leaf switch; None: one switch for all.
        oversubscription: bandwidth of a leaf's hosts, divided by that of its uplinks: 4 for "4:1".
        nics_per_host: interfaces of a host; neighbouring ranks share one.
        rates: (host, factor) or (host, factor out, factor in): interfaces of this host have the rate of `between` times
            the factor.
        name: name in tables.

    Example:
        >>> from workbench.costs import ethernet_10g, nvlink_3
        >>> cluster = Topology(between=ethernet_10g, inside=nvlink_3, ranks_per_host=8)
        >>> round(cluster.all_reduce_s(100e6, 8) * 1e3, 2), round(cluster.all_reduce_s(100e6, 16) * 1e3, 2)
        (0.61, 80.64)
    """

    between: Network
    inside: Network | None = None
    ranks_per_host: int = 1
    hosts_per_switch: int | None = None
    oversubscription: float = 1.0
    nics_per_host: int = 1
    rates: tuple[tuple[float, ...], ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        for what in ("between", "inside"):
            if not isinstance(getattr(self, what), Network) and (what == "between" or self.inside is not None):
                raise ConfigError(
                    f"Topology({what}={getattr(self, what)!r}): give a Network, such as costs.get('ethernet-10g')"
                )
        for what in ("ranks_per_host", "nics_per_host", "hosts_per_switch"):
            value = getattr(self, what)
            if not (value is None and what == "hosts_per_switch") and (not is_whole(value) or value < 1):
                raise ConfigError(f"Topology({what}={value!r}): give a whole number, 1 or more")
        if self.ranks_per_host > 1 and self.inside is None:
            raise ConfigError(
                f"Topology: {self.ranks_per_host} ranks share a host: give the network between them, inside=, "
                "such as workbench.costs.nvlink_3 or workbench.costs.shared_memory"
            )
        if self.ranks_per_host % self.nics_per_host:
            raise ConfigError(
                f"Topology: {self.nics_per_host} interfaces cannot be shared evenly by {self.ranks_per_host} ranks: "
                "give a number of interfaces, nics_per_host, that divides ranks_per_host"
            )
        if not (isfinite(self.oversubscription) and self.oversubscription > 0):
            raise ConfigError(f"Topology(oversubscription={self.oversubscription!r}): give a number above 0, 4 for 4:1")
        if self.oversubscription != 1 and self.hosts_per_switch is None:
            raise ConfigError("Topology: oversubscription is of a leaf switch's uplinks: set hosts_per_switch")
        object.__setattr__(self, "rates", _factors_by_direction(self.rates))
        object.__setattr__(self, "name", self.name or self._described())

    def _described(self) -> str:
        between = f"{self.nics_per_host}x {self.between.name}" if self.nics_per_host > 1 else self.between.name
        inside = f"{self.ranks_per_host}x {self.inside.name} + " if self.inside and self.ranks_per_host > 1 else ""
        switch = f" / {self.hosts_per_switch} hosts {self.oversubscription:g}:1" if self.hosts_per_switch else ""
        slow = "".join(
            f", host {host:g} at {out:g}" + (f" out, {into:g} in" if into != out else "") + " of the rate"
            for host, out, into in self.rates
        )
        return f"{inside}{between}{switch}{slow}"

    def __str__(self) -> str:
        inside = f", inside {self.inside}" if self.inside and self.ranks_per_host > 1 else ""
        return f"{self.name} (between {self.between}{inside})"

    # -- as one link, for formulas that need a single link -----------------------------------------------------

    @property
    def latency_s(self) -> float:
        """alpha, between hosts."""
        return self.between.latency_s

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """1 / beta, if one message at a time goes from a host to the next: the slowest interface on the way."""
        slowest = min((rate for _, *both in self.rates for rate in both), default=1.0)
        return self.between.bandwidth_bytes_per_s * min(1.0, slowest)

    @property
    def sum_s_per_byte(self) -> float:
        """gamma, of `between`."""
        return self.between.sum_s_per_byte

    @property
    def fair(self) -> bool:
        """Return True if connections share stages fairly, as `between` says."""
        return self.between.fair

    def local_s(self, kind: str, num_bytes: float) -> float:
        """Return the seconds to encode, decode or sum this number of bytes, with the costs of `between`."""
        return self.between.local_s(kind, num_bytes)

    # -- messages --------------------------------------------------------------------------------------------------

    def host_of(self, rank: int) -> int:
        """Return the host of a rank."""
        return rank // self.ranks_per_host

    def route(self, sender: int, receiver: int) -> Route:
        """Return the route: two ports inside a host, else two interfaces, with two uplinks if the leaves differ."""
        here, there = self.host_of(sender), self.host_of(receiver)
        if here == there:
            inside = self.inside or self.between  # without `inside`, a rank sends to itself
            per_byte = 1 / inside.bandwidth_bytes_per_s
            return Route(inside.latency_s, ((_KINDS * sender + 2, per_byte), (_KINDS * receiver + 3, per_byte)))
        stages = [
            (_KINDS * self._nic_of(sender), self._per_byte(here, 0)),
            (_KINDS * self._nic_of(receiver) + 1, self._per_byte(there, 1)),
        ]
        if self.hosts_per_switch is not None:
            leaf, other = here // self.hosts_per_switch, there // self.hosts_per_switch
            if leaf != other:
                stages[1:1] = [(_KINDS * leaf + 4, self._uplink_per_byte), (_KINDS * other + 5, self._uplink_per_byte)]
        return Route(self.between.latency_s, tuple(stages))

    def _nic_of(self, rank: int) -> int:
        return rank // (self.ranks_per_host // self.nics_per_host)

    def _per_byte(self, host: int, way: int) -> float:
        """Return the seconds per byte of one interface of a host; way 0 is out, 1 is in."""
        rate = next((both[way] for number, *both in self.rates if number == host), 1.0)
        return 1 / (self.between.bandwidth_bytes_per_s * rate)

    @property
    def _uplink_per_byte(self) -> float:
        """Return the seconds per byte of all uplinks of a leaf together."""
        assert self.hosts_per_switch is not None
        return self.oversubscription / (self.hosts_per_switch * self.nics_per_host * self.between.bandwidth_bytes_per_s)

    # -- the library's own collectives -----------------------------------------------------------------------------

    def all_reduce_s(self, num_bytes: float, num_workers: int) -> float:
        """Return the seconds of the faster of two all-reduces: a ring through all ranks, or two levels.

        The two levels are a reduce-scatter inside each host, rings between the hosts, and an all-gather inside (full
        hosts only). There are p ranks on H hosts, with g = p / H ranks each, n bytes, and m = n / p. alpha and beta are
        of the slowest route from a host to the next: over its interfaces, or over an uplink if leaves differ. alpha'
        and beta' are of the network inside a host::

            ring        2 (p-1) max(alpha + m beta, alpha' + m beta') + (p-1) m gamma
            two levels  2 (g-1) (alpha' + n/g beta') + (g-1) n/g gamma,   and between hosts, where k ranks share an interface,
                        with a = alpha + m beta:   (H-1) max(a + m gamma, k m beta) + (H-2) max(a, k m beta) + a + (k-1) m beta

        The ring takes as long as `Ring()` by messages. Two levels take as long as their halves inside and between
        hosts. Sums on fast links are counted, although in messages they run while slow links still send.

        Source: thakur2005optimization (the cost model). Two levels are common on hosts with several GPUs.
        """
        return self._fastest_s(num_bytes, num_workers, (True, False))

    def reduce_scatter_s(self, num_bytes: float, num_workers: int) -> float:
        """Return the seconds of the half that sums."""
        return self._fastest_s(num_bytes, num_workers, (True,))

    def all_gather_s(self, num_bytes: float, num_workers: int) -> float:
        """Return the seconds of the half that distributes the sums."""
        return self._fastest_s(num_bytes, num_workers, (False,))

    def broadcast_s(self, num_bytes: float, num_workers: int) -> float:
        """Return the seconds of trees over leaf switches, hosts and ranks: ceil(log2 k) (alpha + n beta) of each."""
        within, hosts = min(self.ranks_per_host, num_workers), self._num_hosts(num_workers)
        leaves, each = (
            (-(-hosts // self.hosts_per_switch), min(hosts, self.hosts_per_switch))
            if self.hosts_per_switch
            else (1, hosts)
        )
        seconds = _rounds(leaves) * (self.between.latency_s + num_bytes * self._host_to_host(hosts))
        seconds += _rounds(each) * (self.between.latency_s + num_bytes * self._interface(hosts))
        return seconds + (self.inside.broadcast_s(num_bytes, within) if self.inside else 0.0)

    def barrier_s(self, num_workers: int) -> float:
        """Return the seconds of dissemination among hosts, and among ranks of a host: ceil(log2 k) alpha for each."""
        inside_s = self.inside.barrier_s(min(self.ranks_per_host, num_workers)) if self.inside else 0.0
        return inside_s + _rounds(self._num_hosts(num_workers)) * self.between.latency_s

    def _fastest_s(self, num_bytes: float, num_workers: int, halves: tuple[bool, ...]) -> float:
        """Return the seconds of the faster of ring and two levels. `halves`: for each half, whether the half sums."""
        if num_workers == 1:
            return 0.0
        seconds = self._ring_s(num_bytes, num_workers, halves)
        if self.ranks_per_host > 1 and num_workers > self.ranks_per_host and num_workers % self.ranks_per_host == 0:
            seconds = min(seconds, self._two_levels_s(num_bytes, num_workers, halves))
        return seconds

    def _ring_s(self, num_bytes: float, p: int, halves: tuple[bool, ...]) -> float:
        """Return the seconds of the ring.

        All hops take the time of the slowest link, because a late receiver delays the receivers after it.
        """
        block, hosts = num_bytes / p, self._num_hosts(p)
        hop_s = self.between.latency_s + block * self._host_to_host(hosts) if hosts > 1 else 0.0
        if self.inside and self.ranks_per_host > 1:
            hop_s = max(hop_s, self.inside.send_s(block))
        return (p - 1) * sum(hop_s + sums * block * self.sum_s_per_byte for sums in halves)

    def _two_levels_s(self, num_bytes: float, p: int, halves: tuple[bool, ...]) -> float:
        """Return the seconds of two levels: between hosts, one ring for each position of a rank in its host.

        Rings that share a stage use the stage one after another.
        """
        assert self.inside is not None
        group, hosts = self.ranks_per_host, p // self.ranks_per_host
        part, block, gamma = num_bytes / group, num_bytes / p, self.sum_s_per_byte
        inside_s = (group - 1) * sum(self.inside.send_s(part) + sums * part * gamma for sums in halves)
        sharing = group // self.nics_per_host
        one_s = self.between.latency_s + block * self._host_to_host(hosts)
        busy_s = block * self._host_to_host(hosts, sharing, group)
        hops = [sums for sums in halves for _ in range(hosts - 1)]
        between_s = sum(max(one_s + sums * block * gamma, busy_s) for sums in hops[:-1])
        last_s = one_s + busy_s - block * self._host_to_host(hosts) + hops[-1] * block * gamma
        return inside_s + between_s + last_s

    def _num_hosts(self, num_workers: int) -> int:
        return -(-num_workers // self.ranks_per_host)

    def _interface(self, hosts: int) -> float:
        """Return the seconds per byte of the slowest interface of the first hosts."""
        slow = [self._per_byte(int(host), way) for host, *_ in self.rates if host < hosts for way in (0, 1)]
        usual = [] if len(slow) == 2 * hosts else [1 / self.between.bandwidth_bytes_per_s]
        return max(slow + usual)

    def _host_to_host(self, hosts: int, sharing: int = 1, crossing: int = 1) -> float:
        """Return a flow's seconds per byte between hosts; `sharing` flows use an interface, `crossing` an uplink."""
        per_byte = sharing * self._interface(hosts)
        if self.hosts_per_switch is not None and hosts > self.hosts_per_switch:
            per_byte = max(per_byte, crossing * self._uplink_per_byte)
        return per_byte


def _rounds(num: int) -> int:
    """Return ceil(log2 num), the rounds of a binomial tree."""
    return (num - 1).bit_length()


def _factors_by_direction(rates: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
    """Return (host, factor out, factor in) of each rate."""
    for rate in rates:
        if (
            len(rate) not in (2, 3)
            or int(rate[0]) != rate[0]
            or rate[0] < 0
            or not all(isfinite(item) and item > 0 for item in rate[1:])
        ):
            raise ConfigError(
                f"Topology(rates={rates!r}): give (host, factor) or (host, factor out, factor in), factors above 0"
            )
    if len({rate[0] for rate in rates}) < len(rates):
        raise ConfigError(f"Topology(rates={rates!r}): a host is named twice: give it one rate")
    return tuple(sorted((rate[0], rate[1], rate[-1]) for rate in rates))


AnyNetwork = Network | Topology
