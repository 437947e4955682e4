"""The cost model of communication: latency, bandwidth, summation (the alpha-beta-gamma model)."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import final

from workbench.arguments import check_flag
from workbench.errors import ConfigError
from workbench.units import GBIT_PER_S, MILLISECOND


@final
@dataclass(frozen=True, slots=True)
class Route:
    """The route of a message from one worker to another.

    Attributes:
        latency_s: alpha, from the last byte sent to the last byte received.
        stages: (number, seconds per byte) of each interface and switch port on the route. Routes that contain the same
            number share that stage.
    """

    latency_s: float
    stages: tuple[tuple[int, float], ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Equal full-duplex links, one network interface for each worker.

    Attributes:
        latency_s: alpha, of one message.
        bandwidth_bytes_per_s: 1 / beta, of one interface in one direction.
        sum_s_per_byte: gamma, to add a received byte.
        encode_s_per_byte, decode_s_per_byte: of a codec, for a byte of uncompressed values.
        fair: True: concurrent connections share an interface's rate (max-min fair), as TCP connections tend to. False:
            messages are served in order of arrival. In both cases the messages of one connection are sent one after
            another.
        name: name in tables.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    sum_s_per_byte: float = 0.0
    encode_s_per_byte: float = 0.0
    decode_s_per_byte: float = 0.0
    fair: bool = False
    name: str = "network"

    def __post_init__(self) -> None:
        check_flag("fair", self.fair)
        seconds = (self.latency_s, self.sum_s_per_byte, self.encode_s_per_byte, self.decode_s_per_byte)
        if not (all(isfinite(item) and item >= 0 for item in seconds) and self.bandwidth_bytes_per_s > 0):
            raise ConfigError(
                f"{self}: latency_s and seconds per byte must be 0 or more, bandwidth_bytes_per_s more than 0"
            )

    def __str__(self) -> str:
        rate = f"{self.bandwidth_bytes_per_s / GBIT_PER_S:g} Gbit/s"
        latency = f"{self.latency_s * 1e3:g} ms" if self.latency_s >= MILLISECOND else f"{self.latency_s * 1e6:.3g} µs"
        return f"{self.name} ({latency}, {rate}, {self.sum_s_per_byte * 1e9:.3g} ns a summed byte)"

    def route(self, sender: int, receiver: int) -> Route:
        """Return the route out of the sender's interface and into the receiver's; each is full duplex."""
        per_byte = 1 / self.bandwidth_bytes_per_s
        return Route(self.latency_s, ((2 * sender, per_byte), (2 * receiver + 1, per_byte)))

    def all_reduce_s(self, num_bytes: float, num_workers: int) -> float:
        """Return the seconds of a ring: 2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma (thakur2005optimization)."""
        p = num_workers
        wire = 2 * (p - 1) / p * num_bytes / self.bandwidth_bytes_per_s
        return 2 * (p - 1) * self.latency_s + wire + (p - 1) / p * num_bytes * self.sum_s_per_byte

    def reduce_scatter_s(self, num_bytes: float, num_workers: int) -> float:
        """Return the seconds of a ring: (p-1) alpha + (p-1)/p n (beta + gamma)."""
        p = num_workers
        return (p - 1) * self.latency_s + (p - 1) / p * num_bytes * (
            1 / self.bandwidth_bytes_per_s + self.sum_s_per_byte
        )

    def all_gather_s(self, num_bytes: float, num_workers: int) -> float:
        """Return the seconds of a ring: (p-1) alpha + (p-1)/p n beta."""
        p = num_workers
        return (p - 1) * self.latency_s + (p - 1) / p * num_bytes / self.bandwidth_bytes_per_s

    def local_s(self, kind: str, num_bytes: float) -> float:
        """Return the seconds to encode, decode or sum this number of bytes."""
        per_byte = {"sum": self.sum_s_per_byte, "encode": self.encode_s_per_byte, "decode": self.decode_s_per_byte}
        return per_byte.get(kind, 0.0) * num_bytes

    def broadcast_s(self, num_bytes: float, num_workers: int) -> float:
        """Return the seconds of a binomial tree: ceil(log2 p) (alpha + n beta)."""
        return (num_workers - 1).bit_length() * self.send_s(num_bytes)

    def barrier_s(self, num_workers: int) -> float:
        """Return the seconds of a dissemination barrier: ceil(log2 p) alpha."""
        return (num_workers - 1).bit_length() * self.latency_s

    def send_s(self, num_bytes: float) -> float:
        """Return alpha + n beta."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s
