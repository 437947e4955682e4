"""Pipe-SGD: the all-reduce of one step runs under the next steps' compute; gradients arrive K - 1 updates late."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import final

from workbench.collectives import Collective, Native, check_collective
from workbench.errors import ConfigError
from workbench.ops import Apply, Backward, EndStep, Program, Start, Ticket, Wait
from workbench.program import Algorithm, Context


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PipeSGD(Algorithm):
    """w[t] = w[t-1] - lr * mean_i g_i(w[t-K])

    The gradient of index s is taken at w[s], and nothing is applied while the pipeline fills, so K = 1 is
    `SynchronousSGD` and the staleness is K - 1. K gradient buffers. After the last step the K - 1 gradients still
    in flight are applied, so every gradient is used once.

    Paper: li2018pipesgd, Alg. 1 (K = 2 recommended); daily2016leveraging, section 4.3, calls K = d + 1 AGD(d): `DelayedSGD`.
    """

    width: int = 2  # K, iterations in flight
    collective: Collective = Native()

    def __post_init__(self) -> None:
        check_collective(self.collective)
        if not isinstance(self.width, int) or self.width < 1:
            raise ConfigError(f"width={self.width}: Pipe-SGD needs a whole width of at least 1 (1 is synchronous, 2 is the paper's choice)")

    @property
    def max_staleness(self) -> int:
        return self.width - 1

    def worker(self, ctx: Context) -> Program:
        in_flight: deque[Ticket] = deque(ctx.resumed or ())
        for step in ctx.steps():
            gradient = yield Backward(step)
            in_flight.append((yield Start(self.collective.all_reduce(ctx, gradient))))
            while len(in_flight) >= self.width:  # `while`, not `if`: resumed with a smaller width, more than one is due
                yield Apply((yield Wait(in_flight.popleft())))
            yield EndStep(step, state=tuple(in_flight))
        while in_flight:
            yield Apply((yield Wait(in_flight.popleft())))


def DelayedSGD(*, delay: int = 1, collective: Collective | None = None) -> PipeSGD:  # noqa: N802 - the paper's other name of a class
    """w[t+1] = w[t] - lr * mean_i g_i(w[t-d]): AGD with a fixed delay d, which is `PipeSGD(width=d + 1)`.

    Paper: daily2016leveraging, section 4.3.

    >>> DelayedSGD(delay=1).width
    2
    """
    if not isinstance(delay, int) or delay < 0:
        raise ConfigError(f"delay={delay}: a number of steps, 0 (synchronous) or more")
    return PipeSGD(width=delay + 1, collective=collective or Native())
