"""Networks by name.

Bandwidths are nominal rates of one interface in one direction, from the standard or the vendor's data sheet, without
protocol overhead. Latencies are typical values for one small message from program to program, to one digit. They are
a starting point for a study; `workbench calibrate` measures a real network. Sums, encoding and decoding cost nothing.

| profile | bandwidth | latency |
|---|---|---|
| ethernet | IEEE 802.3 line rates | 30 µs of TCP between programs of two hosts behind one switch, 10 µs from 100 Gbit/s on |
| infiniband | InfiniBand Trade Association's roadmap, 4 lanes: HDR 200, NDR 400 Gbit/s | 1 µs of MPI over verbs |
| nvlink | NVIDIA's data sheets, half of the total of both directions: V100 6 x 25 GB/s, A100 12 x 25, H100 18 x 25 | 2 µs a hop (below) |
| pcie | PCI-SIG, x16: generation 3 8 GT/s, 4 16 GT/s, 5 32 GT/s, all of 128b/130b | 2.5 µs a hop (below) |
| wan | assumed: a rented line | 50 ms one way, as between continents |
| shared-memory | assumed: a copy at 10 GB/s | 1 µs |
| free | all costs are 0 | |

The hops inside a host are those of a ring in NCCL's own cost model (`hwLat` in its tuning tables, ring, LL128).
"""

from __future__ import annotations

import re

from workbench.costs.network import Network
from workbench.costs.topology import AnyNetwork, Topology
from workbench.errors import ConfigError
from workbench.naming import unknown
from workbench.units import GB, GBIT_PER_S, MBIT_PER_S, MICROSECOND, MILLISECOND


def ethernet(gbit_per_s: float, latency_s: float = 30 * MICROSECOND) -> Network:
    """Return TCP over Ethernet with this line rate.

    >>> round(ethernet(1).all_reduce_s(25e6, 2), 3)
    0.2
    """
    return Network(
        latency_s=latency_s, bandwidth_bytes_per_s=gbit_per_s * GBIT_PER_S, name=f"{gbit_per_s:g} Gbit/s Ethernet"
    )


def _nvlink(generation: int, num_links: int) -> Network:
    return Network(latency_s=2 * MICROSECOND, bandwidth_bytes_per_s=num_links * 25 * GB, name=f"NVLink {generation}")


def _pcie(generation: int, transfers_per_s: float) -> Network:
    lanes = 16 * transfers_per_s * 128 / 130 / 8
    return Network(latency_s=2.5 * MICROSECOND, bandwidth_bytes_per_s=lanes, name=f"PCIe {generation} x16")


ethernet_1g = ethernet(1)
ethernet_10g = ethernet(10)
ethernet_25g = ethernet(25)
ethernet_100g = ethernet(100, latency_s=10 * MICROSECOND)
ethernet_200g = ethernet(200, latency_s=10 * MICROSECOND)
ethernet_400g = ethernet(400, latency_s=10 * MICROSECOND)
infiniband_hdr = Network(latency_s=1 * MICROSECOND, bandwidth_bytes_per_s=200 * GBIT_PER_S, name="InfiniBand HDR")
infiniband_ndr = Network(latency_s=1 * MICROSECOND, bandwidth_bytes_per_s=400 * GBIT_PER_S, name="InfiniBand NDR")
nvlink_2 = _nvlink(2, 6)
nvlink_3 = _nvlink(3, 12)
nvlink_4 = _nvlink(4, 18)
pcie_3 = _pcie(3, 8e9)
pcie_4 = _pcie(4, 16e9)
pcie_5 = _pcie(5, 32e9)
shared_memory = Network(latency_s=1 * MICROSECOND, bandwidth_bytes_per_s=10 * GB, name="shared memory")
wan_100m = Network(latency_s=50 * MILLISECOND, bandwidth_bytes_per_s=100 * MBIT_PER_S, name="100 Mbit/s WAN")
wan_1g = Network(latency_s=50 * MILLISECOND, bandwidth_bytes_per_s=1 * GBIT_PER_S, name="1 Gbit/s WAN")
free = Network(latency_s=0.0, bandwidth_bytes_per_s=float("inf"), name="no communication cost")

_NETWORKS = {
    "ethernet-1g": ethernet_1g,
    "ethernet-10g": ethernet_10g,
    "ethernet-25g": ethernet_25g,
    "ethernet-100g": ethernet_100g,
    "ethernet-200g": ethernet_200g,
    "ethernet-400g": ethernet_400g,
    "infiniband-hdr": infiniband_hdr,
    "infiniband-ndr": infiniband_ndr,
    "nvlink-2": nvlink_2,
    "nvlink-3": nvlink_3,
    "nvlink-4": nvlink_4,
    "pcie-3": pcie_3,
    "pcie-4": pcie_4,
    "pcie-5": pcie_5,
    "shared-memory": shared_memory,
    "wan-100m": wan_100m,
    "wan-1g": wan_1g,
    "free": free,
}

_SPELLING = (
    "[RANKS x INSIDE +] [NICS x] BETWEEN [/ HOSTS hosts OVER:1], such as '8x nvlink-3 + 4x infiniband-ndr / 16 "
    "hosts 4:1'"
)


def names() -> tuple[str, ...]:
    """Return the names of networks that `get` accepts, also in topologies.

    >>> names()[:2]
    ('ethernet-1g', 'ethernet-10g')
    """
    return tuple(_NETWORKS)


def get(text: str) -> AnyNetwork:
    """Return a network by name, or a topology.

    A topology has up to three parts. The first is the number of ranks of a host and the network between them. The part
    after "+" is the number of interfaces of a host and their network. The part after "/" is the number of hosts on a
    leaf switch and its oversubscription. Blanks and capitals do not matter.

    >>> get("ethernet-10g").name
    '10 Gbit/s Ethernet'
    >>> get("8x nvlink-3 + 4x infiniband-ndr / 16 hosts 4:1").name
    '8x NVLink 3 + 4x InfiniBand NDR / 16 hosts 4:1'
    >>> get("4xshared-memory+ethernet-1g").ranks_per_host
    4

    Raises:
        ConfigError: there is no such name, or the text has another form.
    """
    plain = re.sub(r"\s+", "", text.lower())
    if plain in _NETWORKS:
        return _NETWORKS[plain]
    if not any(sign in plain for sign in "+/") and not re.match(r"\d+x", plain):
        raise unknown("network", text, _NETWORKS)
    networks, slash, leaf = plain.partition("/")
    inside, plus, between = networks.rpartition("+")
    switch = re.fullmatch(r"(\d+)hosts?,?(?:(\d+\.?\d*):1)?", leaf)
    if (slash and switch is None) or "+" in inside or not between:
        raise ConfigError(f"network {text!r}: write {_SPELLING}")
    ranks, inner = _parse_multiple(inside) if plus else (1, None)
    nics, outer = _parse_multiple(between)
    hosts, over = (int(switch[1]), float(switch[2] or 1)) if switch else (None, 1.0)
    return Topology(
        between=outer,
        inside=inner,
        ranks_per_host=ranks,
        nics_per_host=nics,
        hosts_per_switch=hosts,
        oversubscription=over,
    )


def _parse_multiple(text: str) -> tuple[int, Network]:
    """Parse a number and a network: "8xnvlink-3"; without a number, one."""
    times = re.fullmatch(r"(?:(\d+)x)?(.*)", text)
    assert times is not None
    if times[2] not in _NETWORKS:
        raise unknown("network", times[2], _NETWORKS)
    return int(times[1] or 1), _NETWORKS[times[2]]
