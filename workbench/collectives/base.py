"""What every collective has in common: it is a request of the library, or a sub-program over `Send` and `Recv`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from torch import Tensor

from workbench.gradients import Gradient, Layout
from workbench.ops import AllReduce, Program, Request, Value
from workbench.program import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(ABC):
    """A way to sum a value over all ranks."""

    @abstractmethod
    def all_reduce(self, ctx: Context, value: Value) -> Request | Program:
        """Sum `value` over all ranks, in place; the answer is `value`. Start it in the same order on every rank."""

    @abstractmethod
    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        """Bytes that `rank` puts on the wire for a value of `numel` elements, of which the last `tail` travel raw: the closed form."""

    def bytes_of(self, rank: int, num_workers: int, layout: Layout) -> float:
        """The same for a whole gradient: bucket by bucket."""
        return sum(
            self.bytes_sent(rank, num_workers, piece.stop - piece.start, layout.itemsize, tail=piece.stop - piece.tail)
            for piece in layout.buckets
        )

    @property
    def lossy(self) -> bool:
        """Whether what comes out is not quite the sum: then it cannot carry what another compression has left to be summed exactly."""
        return getattr(self, "codec", None) is not None

    def check(self, num_workers: int) -> None:  # noqa: B027 - most run on any number
        """Raise `ConfigError` unless so many ranks can be summed over."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Native(Collective):
    """The library's own all-reduce (gloo, NCCL, MPI).

    Its bytes are those of a bandwidth-optimal algorithm, 2 (p-1)/p n a rank; the library may send more.
    """

    def all_reduce(self, ctx: Context, value: Value) -> Request | Program:
        return AllReduce(value)

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        return native_bytes(num_workers, numel * itemsize)


def native_bytes(num_workers: int, message_bytes: float) -> float:
    """2 (p-1)/p n: what each rank must send at least in an all-reduce of n bytes over p ranks (Patarasuk and Yuan 2009)."""
    return 2 * (num_workers - 1) / num_workers * message_bytes


def flat_of(value: Value) -> Tensor:
    """The 1-D tensor of a gradient or tensor; shares memory."""
    return value.flat if isinstance(value, Gradient) else value.view(-1)
