"""`EmulatedNetwork`: hosts of their own on this machine, joined by a network of a known rate."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from workbench.clusters.emulated.enter import BETWEEN
from workbench.clusters.emulated.placement import ENTER, Placement
from workbench.clusters.emulated.rates import parse_rate, parse_seconds, rate_text
from workbench.clusters.emulated.spec import BURST_S, Host, described, shape
from workbench.errors import ConfigError, LaunchError

MOST_HOSTS = 64
START_S = 30.0
KEEPER = str(Path(__file__).with_name("namespaces.py"))
INTERFACE = "eth0"
PLACE = "/dev/shm/.workbench"


@final
class EmulatedNetwork:
    """Linux network namespaces with real TCP between them, and `tc tbf` on each interface: a true limit of the rate.

    Each host has a network and a host name of its own; they share this machine's cores, memory and files. It ends with
    `close()`, with the `with` block, when it is no longer referred to, and with this process, however that ends: the
    kernel then ends all processes on the hosts, and removes the interfaces with the last of them.

    The rate is a limit: this machine's cores carry the bytes, and where they are busy, or the rates high, there may be less;
    `workbench emulate --check` measures. After a pause, what the rate carries in `burst_s` leaves at once.
    Latency is kept by a process that handles every frame: a core of it carries about 1 Gbit/s, and TCP's own start is slow then.

    Args:
        hosts: how many.
        rate: of every interface, in both directions: "1gbit", "100mbit", or bits per second; of whole Ethernet frames,
            of which TCP's payload is 95.6 %.
        ranks_per_host: how many ranks the launchers place on a host before they go on to the next.
        latency_s: seconds ("5ms") that every frame takes from host to host, beside its time on the wire.
        slow: host number -> its rate, in place of `rate`.
        up, down: rates from a host and to a host, in place of `rate`, where they differ.
        burst_s: what leaves at once after a pause, in seconds of the rate ("1ms"). The wire stands still where a timer of this machine is
            later than that, as those of virtual machines are: more makes up for it, and lets a message that is no longer through.

    Raises:
        ConfigError: a rate, time or number that cannot be.
        LaunchError: the kernel or the machine does not allow it; says what is missing.

    Example:
        with EmulatedNetwork(4, rate="1gbit") as network:
            network.run(0, ["ping", "-c", "1", "host1"]).wait()
    """

    def __init__(
        self,
        hosts: int,
        *,
        rate: str | float = "1gbit",
        ranks_per_host: int = 1,
        latency_s: str | float = 0.0,
        slow: Mapping[int, str | float] | None = None,
        up: str | float | None = None,
        down: str | float | None = None,
        burst_s: str | float = BURST_S,
    ) -> None:
        for name, number, most in (("hosts", hosts, MOST_HOSTS), ("ranks_per_host", ranks_per_host, 1024)):
            if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= most:
                raise ConfigError(f"{name}={number!r}: a whole number from 1 to {most}")
        for host in slow or {}:
            if host not in range(hosts):
                raise ConfigError(f"slow host {host!r}: hosts are numbered from 0 to {hosts - 1}")
        if Placement.here() is not None:
            raise ConfigError("this process is on an emulated network already, and there is none inside another: use that one")
        from_host, to_host = (parse_rate(rate if its is None else its) for its in (up, down))
        slower = {host: parse_rate(its) for host, its in (slow or {}).items()}
        rates = [(slower.get(host, from_host), slower.get(host, to_host)) for host in range(hosts)]
        both = rate_text(from_host) if from_host == to_host else f"{rate_text(from_host)} up, {rate_text(to_host)} down"
        self._rates = ", ".join([both, *(f"host{host} at {rate_text(its)}" for host, its in sorted(slower.items()))])
        self.latency_s, self.burst_s = parse_seconds(latency_s), parse_seconds(burst_s)
        self.ranks_per_host = ranks_per_host
        self.hosts = tuple(
            Host(name=f"host{index}", address=f"10.87.0.{index + 1}", up=up, down=down) for index, (up, down) in enumerate(rates)
        )
        self._keeper = self._start()
        self._finalizer = weakref.finalize(self, _end, self._keeper, os.getpid())
        try:
            self._first = self._answer()
        except BaseException:
            self.close()
            raise

    @property
    def description(self) -> str:
        """One line, for a run's record."""
        latency = f", {self.latency_s * 1e3:.4g} ms of latency" if self.latency_s else ""
        burst = f", bursts of {self.burst_s * 1e3:.4g} ms" if self.burst_s != BURST_S else ""
        ranks = f" of {self.ranks_per_host} ranks" if self.ranks_per_host > 1 else ""
        return f"emulated network: {len(self.hosts)} hosts{ranks} at {self._rates}{latency}{burst}"

    @property
    def environment(self) -> dict[str, str]:
        """What launchers find the hosts by: this package's, Open MPI's and MPICH's, gloo and NCCL."""
        agent = f"{PLACE}/agent"
        interfaces = (
            *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
            *("OMPI_MCA_btl_tcp_if_include", "UCX_NET_DEVICES", "FI_TCP_IFACE"),
        )
        return {
            **self.placement.environment,
            "WORKBENCH_NETWORK": self.description,
            "WORKBENCH_MACHINE": platform.node(),
            **dict.fromkeys(interfaces, INTERFACE),
            # UCX and libfabric would see by the boot that all hosts are one machine, and go round the network by its memory.
            "OMPI_MCA_pml": "ob1",
            "UCX_TLS": "tcp,self",
            "FI_PROVIDER": "tcp",
            "PRTE_MCA_plm_ssh_agent": agent,
            "PRTE_MCA_prte_default_hostfile": f"{PLACE}/hostfile",
            "PRTE_MCA_prte_tmpdir_base": PLACE,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",  # as all are on the hosts, whoever they are outside
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_plm_rsh_agent": agent,
            "OMPI_MCA_orte_default_hostfile": f"{PLACE}/hostfile",
            "OMPI_MCA_orte_tmpdir_base": PLACE,
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": agent,
            "HYDRA_HOST_FILE": f"{PLACE}/hydra",
        }

    def command(self, host: int | str, argv: Sequence[str]) -> list[str]:
        """The command line, for this process or a child of it, that runs `argv` on a host."""
        if not self._finalizer.alive:
            raise LaunchError("this network was closed: make a new EmulatedNetwork")
        return [*ENTER, str(self._first), self._name(host), *argv]

    def run(self, host: int | str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
        """Start `argv` on a host.

        Args:
            host: its number or name.
            env: added to this process's environment and the network's.
            options: of `subprocess.Popen`.

        Returns:
            A process that hands signals on, ends as the command does, and takes it with it when killed.

        Raises:
            ConfigError: no such host.
            LaunchError: the network was closed.
        """
        return subprocess.Popen(self.command(host, argv), env={**os.environ, **self.environment, **(env or {})}, **options)

    def cut(self, host: int | str) -> None:
        """Pull a host's cable: no frame leaves or reaches it until `mend`. Its processes go on; TCP sends again what was lost, for minutes.

        Raises:
            ConfigError: no such host.
            LaunchError: the network was closed.
        """
        self._at_switch("ip", "link", "set", self._port(host), "down")

    def mend(self, host: int | str) -> None:
        """Put it in again. TCP sends when its timer says so: after a second at first, later the longer the cut was."""
        self._at_switch("ip", "link", "set", self._port(host), "up")

    def set_rate(self, host: int | str, rate: str | float) -> None:
        """From now on another rate for a host, in both directions; what `description` says is that of the beginning."""
        queue = shape(parse_rate(rate), self.burst_s)
        words = ["tbf", "rate", f"{queue['rate']}bit", "burst", str(queue["burst"]), "limit", str(queue["limit"])]
        self._at_switch("tc", "qdisc", "change", "dev", self._port(host), "root", *words)
        self._done(self._name(host), ["tc", "qdisc", "change", "dev", INTERFACE, "root", *words])

    def _port(self, host: int | str) -> str:
        return f"port{[each.name for each in self.hosts].index(self._name(host))}"

    def _at_switch(self, *words: str) -> None:
        self._done(BETWEEN, list(words))

    def _done(self, where: str, argv: list[str]) -> None:
        """Do that on a host, or between them."""
        if not self._finalizer.alive:
            raise LaunchError("this network was closed: make a new EmulatedNetwork")
        tools = {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
        done = subprocess.run([*ENTER, str(self._first), where, *argv], env=tools, capture_output=True, text=True, timeout=START_S)
        if done.returncode != 0:
            raise LaunchError(f"{' '.join(argv)} on {where}: {done.stderr.strip()}")

    @property
    def placement(self) -> Placement:
        """Which rank is on which host."""
        return Placement(hosts=tuple(host.name for host in self.hosts), ranks_per_host=self.ranks_per_host)

    def pid_here(self, pid: int) -> int | None:
        """The number that a process of the hosts has outside of the network; None if it has ended."""
        space = os.readlink(f"/proc/{self._first}/ns/pid")
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):  # ended meanwhile
                numbers = next(line for line in status.read_text().splitlines() if line.startswith("NSpid:")).split()
                if numbers[-1] == str(pid) and os.readlink(status.with_name("ns") / "pid") == space:
                    return int(status.parent.name)
        return None

    @property
    def alive(self) -> bool:
        """Whether it is there."""
        return self._finalizer.alive and self._keeper.poll() is None

    def close(self) -> None:
        """End all processes on the hosts and remove the network; once is enough."""
        self._finalizer()

    def _name(self, host: int | str) -> str:
        names = [each.name for each in self.hosts]
        if isinstance(host, int) and not isinstance(host, bool) and 0 <= host < len(names):
            return names[host]
        if host not in names:
            raise ConfigError(f"no host {host!r}: there are {', '.join(names)}, or their numbers from 0")
        return str(host)

    def _start(self) -> subprocess.Popen[bytes]:
        if sys.platform != "linux":
            raise LaunchError(f"an emulated network is made of Linux network namespaces, and this is {platform.system()}")
        command = [sys.executable, "-I", "-S", KEEPER]
        keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0)
        assert keeper.stdin is not None
        spec = described(self.hosts, self.ranks_per_host, self.latency_s, self.burst_s)
        keeper.stdin.write(json.dumps(spec).encode() + b"\n")  # left open: its end is how the keeper learns of ours
        return keeper

    def _answer(self) -> int:
        """The number of the first process of the network's process namespace, when the network is there."""
        said: dict[str, Any] = {}
        assert self._keeper.stdout is not None
        while "pid" not in said or "users" not in said:
            ready, _, _ = select.select([self._keeper.stdout], [], [], START_S)
            line = self._keeper.stdout.readline() if ready else b""
            if not line:
                raise LaunchError(
                    "no emulated network: " + ("what makes it ended without a word" if ready else f"not made in {START_S:.0f} s")
                )
            said |= json.loads(line)
            if "error" in said:
                raise LaunchError(f"no emulated network: {said['error']}")
        return int(said["pid"])

    def __enter__(self) -> EmulatedNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.description}{'' if self.alive else ', closed'}>"


def _end(keeper: subprocess.Popen[bytes], owner: int) -> None:
    """End the keeper, and with it everything on the hosts; a fork of the process that made the network must not."""
    if os.getpid() != owner:
        return
    for pipe in (keeper.stdin, keeper.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
    try:
        keeper.wait(5.0)
    except subprocess.TimeoutExpired:
        keeper.kill()
        keeper.wait()
