"""Run a collective without a training, in the foreground, as a synchronous algorithm does."""

from __future__ import annotations

from types import TracebackType
from typing import Self, final

import torch
from torch import Tensor

from workbench.collectives import Collective
from workbench.ops import AllReduce, Program
from workbench.program import Context, lower
from workbench.replica.replica import Replica
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.transport.base import Transport
from workbench.runtimes.transport.measure_link import LONG_BYTES, measure_link
from workbench.trace.recorder import NullRecorder

TIMEOUT_S = 120.0


@final
class Sums:
    """Runs collectives on one rank, with the interpreter of a training.

    Args:
        num_bytes: size of the longest sum.
    """

    def __init__(self, transport: Transport, num_bytes: float = LONG_BYTES) -> None:
        model = torch.nn.Linear(1, 1)
        replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.0))
        self._interpreter = Interpreter(transport, replica, NullRecorder(), lambda _: (), timeout_s=TIMEOUT_S)
        self._ctx = Context(transport.rank, transport.num_workers, layout=replica.layout)
        self._ctx.link = measure_link(transport, self._interpreter.clock.deadline, num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._interpreter.close()

    def all_reduce(self, collective: Collective, value: Tensor) -> None:
        """Sum a tensor in place; all ranks call it."""
        self.repeat(collective, value, 1)

    def repeat(self, collective: Collective, value: Tensor, times: int) -> None:
        """Repeat the same sum, in one program."""
        self._interpreter.advance(lower(self._ctx, _sums(collective, value, times)))


def _sums(collective: Collective, value: Tensor, times: int) -> Program:
    for _ in range(times):
        yield AllReduce(value, collective)
