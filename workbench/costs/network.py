"""The cost model of communication: latency, bandwidth, summation (the alpha-beta-gamma model)."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
        library_latency_s, library_sum_s_per_byte: alpha and gamma of the library's own collectives, if they differ from
            those of messages that an algorithm sends itself; None: they do not.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    sum_s_per_byte: float = 0.0
    encode_s_per_byte: float = 0.0
    decode_s_per_byte: float = 0.0
    fair: bool = False
    name: str = "network"
    library_latency_s: float | None = None
    library_sum_s_per_byte: float | None = None

    def __post_init__(self) -> None:
        check_flag("fair", self.fair)
        own = (self.latency_s, self.sum_s_per_byte, self.encode_s_per_byte, self.decode_s_per_byte)
        seconds = (*own, *self._of_library)
        if not (all(isfinite(item) and item >= 0 for item in seconds) and self.bandwidth_bytes_per_s > 0):
            raise ConfigError(
                f"{self}: latency_s and seconds per byte must be 0 or more, bandwidth_bytes_per_s more than 0"
            )

    def __str__(self) -> str:
        rate = f"{self.bandwidth_bytes_per_s / GBIT_PER_S:g} Gbit/s"
        latency = f"{self.latency_s * 1e3:g} ms" if self.latency_s >= MILLISECOND else f"{self.latency_s * 1e6:.3g} µs"
        parts = [latency, rate, f"{self.sum_s_per_byte * 1e9:.3g} ns a summed byte"]
        if self.encode_s_per_byte or self.decode_s_per_byte:
            parts.append(f"codec {self.encode_s_per_byte * 1e9:.3g} + {self.decode_s_per_byte * 1e9:.3g} ns a byte")
        parts += ["fair"] if self.fair else []
        if (self.library_latency_s, self.library_sum_s_per_byte) != (None, None):
            alpha, gamma = self._of_library
            parts.append(f"the library's own sums {alpha * 1e6:.3g} µs and {gamma * 1e9:.3g} ns")
        return f"{self.name} ({', '.join(parts)})"

    @property
    def of_messages(self) -> Network:
        """This network, where the library's collectives cost as much as messages."""
        return replace(self, library_latency_s=None, library_sum_s_per_byte=None)

    @property
    def without_latency(self) -> Network:
        """This network, where no message and no collective has a latency."""
        return replace(self, latency_s=0.0, library_latency_s=None if self.library_latency_s is None else 0.0)

    @property
    def _of_library(self) -> tuple[float, float]:
        """alpha and gamma of the library's collectives."""
        alpha, gamma = self.library_latency_s, self.library_sum_s_per_byte
        return self.latency_s if alpha is None else alpha, self.sum_s_per_byte if gamma is None else gamma

    def route(self, sender: int, receiver: int) -> Route:
        """Return the route out of the sender's interface and into the receiver's; each is full duplex."""
        per_byte = 1 / self.bandwidth_bytes_per_s
        return Route(self.latency_s, ((2 * sender, per_byte), (2 * receiver + 1, per_byte)))

    def all_reduce_s(self, num_bytes: float, num_workers: int) -> float:
        """Return the seconds of a ring: 2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma (thakur2005optimization)."""
        p, (alpha, gamma) = num_workers, self._of_library
        wire = 2 * (p - 1) / p * num_bytes / self.bandwidth_bytes_per_s
        return 2 * (p - 1) * alpha + wire + (p - 1) / p * num_bytes * gamma

    def reduce_scatter_s(self, num_bytes: float, num_workers: int) -> float:
        """Return the seconds of a ring: (p-1) alpha + (p-1)/p n (beta + gamma)."""
        p, (alpha, gamma) = num_workers, self._of_library
        return (p - 1) * alpha + (p - 1) / p * num_bytes * (1 / self.bandwidth_bytes_per_s + gamma)

    def all_gather_s(self, num_bytes: float, num_workers: int) -> float:
        """Return the seconds of a ring: (p-1) alpha + (p-1)/p n beta."""
        p, (alpha, _) = num_workers, self._of_library
        return (p - 1) * alpha + (p - 1) / p * num_bytes / self.bandwidth_bytes_per_s

    def local_s(self, kind: str, num_bytes: float) -> float:
        """Return the seconds to encode, decode or sum this number of bytes."""
        per_byte = {"sum": self.sum_s_per_byte, "encode": self.encode_s_per_byte, "decode": self.decode_s_per_byte}
        return per_byte.get(kind, 0.0) * num_bytes

    def broadcast_s(self, num_bytes: float, num_workers: int) -> float:
        """Return the seconds of a binomial tree: ceil(log2 p) (alpha + n beta)."""
        alpha, _ = self._of_library
        return (num_workers - 1).bit_length() * (alpha + num_bytes / self.bandwidth_bytes_per_s)

    def barrier_s(self, num_workers: int) -> float:
        """Return the seconds of a dissemination barrier: ceil(log2 p) alpha."""
        return (num_workers - 1).bit_length() * self._of_library[0]

    def send_s(self, num_bytes: float) -> float:
        """Return alpha + n beta."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s
