"""What every collective has in common: it is a request of the library, or a sub-program over `Send` and `Recv`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from torch import Tensor

from workbench.gradients import Gradient
from workbench.ops import AllReduce, Program, Request, Value
from workbench.program import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(ABC):
    """A way to sum a value over all ranks."""

    @abstractmethod
    def all_reduce(self, ctx: Context, value: Value) -> Request | Program:
        """Sum `value` over all ranks, in place; the answer is `value`. Start it in the same order on every rank."""

    @abstractmethod
    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int) -> float:
        """Bytes that `rank` puts on the wire for a value of `numel` elements: the closed form."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Native(Collective):
    """The library's own all-reduce (gloo, NCCL, MPI).

    Its bytes are those of a bandwidth-optimal algorithm, 2 (p-1)/p n a rank; the library may send more.
    """

    def all_reduce(self, ctx: Context, value: Value) -> Request | Program:
        return AllReduce(value)

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int) -> float:
        return native_bytes(num_workers, numel * itemsize)


def native_bytes(num_workers: int, message_bytes: float) -> float:
    """2 (p-1)/p n: what each rank must send at least in an all-reduce of n bytes over p ranks (Patarasuk and Yuan 2009)."""
    return 2 * (num_workers - 1) / num_workers * message_bytes


def flat_of(value: Value) -> Tensor:
    """The 1-D tensor of a gradient or tensor; shares memory."""
    return value.flat if isinstance(value, Gradient) else value.view(-1)
