"""All-reduce over a root: rank 0 sums everything and sends the sum back."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from workbench.codecs.base import Codec
from workbench.collectives.base import Collective, Link
from workbench.collectives.wire import check_codec, message_bytes
from workbench.ops import Program, Value
from workbench.program import Context

SUMMING, SPREADING = 0, 1  # hops


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Rooted(Collective):
    """Reduce to rank 0, then broadcast from it: two halves that `Hierarchical` also uses separately.

    With a codec each rank encodes its partial sum once. Rank 0 encodes the whole sum once, and that message is
    forwarded.

    Attributes:
        codec: compression of each message; none: values are sent as they are.
    """

    codec: Codec | None = None

    def __post_init__(self) -> None:
        check_codec(self.codec)

    @property
    def fixed_schedule(self) -> bool:
        return True

    def all_reduce(self, ctx: Context, value: Value) -> Program:
        if ctx.num_workers > 1:
            yield from self.reduce(ctx, value)
            yield from self.broadcast(ctx, value)
        return value

    @abstractmethod
    def reduce(self, ctx: Context, value: Value) -> Program:
        """Sum at rank 0. The values of the other ranks are then undefined."""

    @abstractmethod
    def broadcast(self, ctx: Context, value: Value) -> Program:
        """Give every rank the values that rank 0's message decodes to. Rank 0 decodes too, even if it is alone."""

    @abstractmethod
    def num_broadcast(self, rank: int, num_workers: int) -> int:
        """Return the number of ranks to which `rank` sends the sum."""

    @abstractmethod
    def reduce_s(self, num_bytes: float, num_workers: int, link: Link) -> float:
        """Seconds of `reduce` (see `seconds`)."""

    @abstractmethod
    def broadcast_s(self, num_bytes: float, num_workers: int, link: Link) -> float:
        """Seconds of `broadcast` (see `seconds`)."""

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        messages = (rank > 0) + self.num_broadcast(rank, num_workers)
        return messages * message_bytes(self.codec, 0, numel, numel - tail, itemsize)

    def seconds(self, num_bytes: float, num_workers: int, link: Link) -> float:
        """Return the seconds of `reduce` plus those of `broadcast`."""
        return self.reduce_s(num_bytes, num_workers, link) + self.broadcast_s(num_bytes, num_workers, link)
