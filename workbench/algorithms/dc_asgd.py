"""Delay-compensated asynchronous SGD: corrects a late gradient for the change of the parameters since its computation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

from torch import Tensor

from workbench.algorithms.parameter_server import (
    FINAL,
    LAST,
    NO_GRADIENT,
    ServerAlgorithm,
    ServerPort,
    take_steps,
)
from workbench.arguments import check_number
from workbench.gradients import WEIGHT, Gradient
from workbench.ops import Apply, Local, PackParameters, Program
from workbench.program import Card, Context


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DelayCompensatedSGD(ServerAlgorithm):
    """w <- w - lr * (g + strength * g * g * (w - w_read)),   elementwise, on any gradient

    The second term is the first-order change of the gradient from the parameters that were read to the present ones.
    The diagonal of the Hessian is approximated by g * g. The server keeps what it last sent to each worker: p copies of
    its shard. `strength=0` is `AsyncSGD`; one worker is serial SGD.

    Attributes:
        strength: lambda, weight of the correction for staleness; 0: no correction.

    Paper: zheng2017dcasgd, eq. 10 with a constant lambda (DC-ASGD-c).
    """

    card: ClassVar[Card] = Card(
        paper="zheng2017dcasgd, eq. 10",
        staleness="p - 1 on average, unbounded, compensated",
        bytes_per_step="n + 8M; server (p+M-2) (n/M + 8)",
        memory="(p + 1) n on servers",
        roles="p workers, M servers",
    )

    strength: float = 0.04  # lambda

    def __post_init__(self) -> None:
        ServerAlgorithm.__post_init__(self)
        check_number("strength", self.strength, 0, "lambda, 0 (no compensation) or more")

    def serve(self, ctx: Context, shard: int) -> Program:
        port, last = ServerPort(self, ctx, shard), list[int]()
        first: Gradient = yield from port.parameters()
        version = first.version
        read: dict[int, Gradient] = dict.fromkeys(range(port.num_workers), first)
        while len(last) < port.num_workers:
            message = yield from port.next_push()
            if port.departed(message, last):
                read.pop(message.rank)
                continue
            gradient, flags = port.read(message)
            if flags & NO_GRADIENT:
                last.append(message.source)
                continue
            present = yield PackParameters(shard, server_copy=True)
            moved = partial(self._compensate, gradient, present.body(), read[message.source].body())
            yield Local("sum", gradient.message_bytes, moved)
            yield Apply(gradient, server_copy=True, of=((message.source, gradient.version),))
            version += 1
            if flags & LAST:
                last.append(message.source)
            else:
                read[message.source] = yield from port.reply(message.source, version)
        for source in last:
            yield from port.reply(source, version, FINAL)
        yield from port.close()

    def _compensate(self, gradient: Gradient, present: Tensor, read: Tensor) -> None:
        """Compensate the mean over the worker's samples; the gradient is this worker's share of a mean."""
        body, weight = gradient.body(), gradient.tail()[WEIGHT].clamp_min(1e-30)  # a rank may have no samples
        body.add_(body * body * (present - read) * (self.strength / weight))  # share s g: s g + s strength g g d

    def work(self, ctx: Context) -> Program:
        yield from take_steps(self, ctx)
