"""The specification of an emulated network, for the process that makes it (`namespaces.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from workbench.clusters.emulated.placement import ENTER

MTU = 1500
HEADER_BYTES = 14  # of Ethernet, which `tc` counts
BURST_S = 250e-6  # bytes that may leave at once after a pause, in seconds of the rate: a timer may be late by this time
MIN_BURST = 4 * (MTU + HEADER_BYTES)  # in bytes
CHUNKS = 3  # TCP segments per burst: a segment as large as the burst would wait for the whole burst
LARGEST_CHUNK = 65536
QUEUE_S, MIN_QUEUE = 40e-3, 128 * 1024  # size of a port's queue, in seconds of the rate, and at least in bytes
SUBNET = "10.87.0.0/16"
SWITCH = str(Path(__file__).with_name("switch.py"))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host of an emulated network.

    Attributes:
        name: its host name, by which the other hosts reach it.
        address: IPv4 address of its only interface.
        up, down: bits per second from the host and to the host.
    """

    name: str
    address: str
    up: float
    down: float


def shape(rate: float, burst_s: float) -> dict[str, int]:
    """Return the settings of a queue: rate in bits per second, burst and queue limit in bytes."""
    bytes_per_s = rate / 8
    return {
        "rate": round(rate),
        "burst": round(max(MIN_BURST, burst_s * bytes_per_s)),
        "limit": round(max(MIN_QUEUE, QUEUE_S * bytes_per_s)),
    }


def described(hosts: Sequence[Host], ranks_per_host: int, latency_s: float, burst_s: float) -> dict[str, Any]:
    """Return the whole specification as plain values."""

    def of_host(index: int, host: Host) -> dict[str, Any]:
        up, down = shape(host.up, burst_s), shape(host.down, burst_s)
        return {
            "name": host.name,
            "address": host.address,
            "mac": f"02:57:42:00:00:{index + 1:02x}",
            "up": up,
            "down": down,
            "chunk": min(LARGEST_CHUNK, max(MTU, min(up["burst"], down["burst"]) // CHUNKS)),
        }

    return {
        "hosts": [of_host(index, host) for index, host in enumerate(hosts)],
        "ranks_per_host": ranks_per_host,
        "latency_s": latency_s,
        "mtu": MTU,
        "subnet": SUBNET,
        "switch": SWITCH,
        "enter": ENTER[-1],
    }
