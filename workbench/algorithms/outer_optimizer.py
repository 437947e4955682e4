"""Local steps with an outer optimizer: what DiLoCo, StreamingDiLoCo and EagerDiLoCo share.

A rank's parameters w_i start from an anchor a. Every H steps the outer optimizer moves the anchor by the mean of
a - w_i over the ranks. The ranks continue from the new anchor.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self, final

import torch
from torch import Tensor

from workbench.arguments import check_flag, check_whole, is_number
from workbench.collectives import Collective, check_collective
from workbench.collectives.algorithm import CollectiveAlgorithm
from workbench.errors import ConfigError
from workbench.gradients import CONTROL, WEIGHT, Gradient, Layout
from workbench.ops import AllReduce, PackParameters, Program, State, Ticket, UnpackParameters
from workbench.program import Context, Elasticity, Update

CLASS_OF = MappingProxyType(
    {"fragments": "StreamingDiLoCo", "delay": "StreamingDiLoCo", "mix": "StreamingDiLoCo", "eager": "EagerDiLoCo"}
)


class OuterAlgorithm(CollectiveAlgorithm, ABC):
    """An algorithm with an outer optimizer. Each algorithm declares these settings, with its own defaults.

    Attributes:
        every: H, number of local steps between two outer steps.
        outer_lr: step size of the outer optimizer; 1, without momentum, moves to the mean of the replicas.
        outer_momentum: mu, share of the last outer step that is added to the next one.
        nesterov: use Nesterov's form of the outer momentum.
        collective: all-reduce that sums the ranks' changes, such as ring; ring:truncate16 also compresses its messages.
    """

    __slots__ = ()
    every: int
    outer_lr: float
    outer_momentum: float
    nesterov: bool

    def __new__(cls, **settings: Any) -> Self:
        """Refuse a setting of another of these algorithms, and name that algorithm."""
        for name in settings:
            if name in CLASS_OF and name not in cls.__dataclass_fields__:
                raise ConfigError(f"{cls.__name__} has no setting {name}: use {CLASS_OF[name]}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_collective(self.collective)
        check_whole("every", self.every, 1)
        check_flag("nesterov", self.nesterov)
        if not (is_number(self.outer_lr) and self.outer_lr > 0):
            raise ConfigError(f"outer_lr={self.outer_lr!r}: give a number above 0")
        if not (is_number(self.outer_momentum) and 0 <= self.outer_momentum < 1):
            raise ConfigError(f"outer_momentum={self.outer_momentum!r}: give a number from 0 to below 1")

    @property
    def period(self) -> int:
        return self.every

    @property
    def update(self) -> Update:
        return Update.OWN

    @property
    def elasticity(self) -> Elasticity:
        """The mean of the ranks that remain is the new anchor. The outer momentum stays."""
        return Elasticity.SHRINKS

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> None:
        """Return None: most steps send nothing."""


@final
@dataclass(slots=True)
class OuterOptimizer:
    """SGD with momentum on one bucket of n parameters, with the mean difference D in place of a gradient:

        D_i = a - w_i,   D = mean_i D_i,   m <- mu m + D,   a <- a - outer_lr (D + mu m)

    (`nesterov=False`: a <- a - outer_lr m.) A local variable of a rank's program.

    Attributes:
        algorithm: the settings.
        bucket: the bucket's number.
        anchor: a, (n,).
        momentum: m, (n,), which `Context.memory` holds.
    """

    algorithm: OuterAlgorithm
    bucket: int
    anchor: Tensor
    momentum: Tensor

    @classmethod
    def begin(cls, algorithm: OuterAlgorithm, ctx: Context, bucket: int = 0, prefix: str = "") -> Program:
        """An outer optimizer with the rank's parameters as its anchor, and with the run's momentum if there is one.

        Args:
            prefix: of the momentum's name in the memory; `OWN` if ranks have different ones.
        """
        packed: Gradient = yield PackParameters(bucket=bucket)
        anchor = packed.body().clone()
        momentum = ctx.memory.setdefault(f"{prefix}outer.momentum/bucket-{bucket}", torch.zeros_like(anchor))
        return cls(algorithm, bucket, anchor, momentum)

    @classmethod
    def begin_each(cls, algorithm: OuterAlgorithm, ctx: Context, prefix: str = "") -> Program:
        """One outer optimizer for each bucket, in the resumed state if there is one."""
        assert ctx.layout is not None
        found: list[OuterOptimizer] = []
        for number in range(len(ctx.layout.buckets)):
            outer: OuterOptimizer = yield from cls.begin(algorithm, ctx, number, prefix)
            if ctx.resumed is not None:
                outer.anchor.copy_(ctx.resumed.anchors[number])  # another run may read the same state
            found.append(outer)
        return found

    def tail(self, total: Tensor) -> Tensor:
        """The tail of a sum over ranks; shares memory."""
        return total[self.anchor.numel() :]

    def pack_difference(self, step: int) -> Program:
        """D_i, packed as a gradient."""
        packed: Gradient = yield PackParameters(bucket=self.bucket, step=step)
        parameters = packed.body()
        torch.sub(self.anchor, parameters, out=parameters)
        return packed

    def mean(self, total: Tensor) -> Tensor:
        """D, (n,), from a sum over ranks."""
        return total[: self.anchor.numel()] / self.tail(total)[WEIGHT]

    def step(self, mean: Tensor) -> None:
        """Move the anchor."""
        mu = self.algorithm.outer_momentum
        self.momentum.mul_(mu).add_(mean)
        direction = mean + mu * self.momentum if self.algorithm.nesterov else self.momentum
        self.anchor.sub_(direction, alpha=self.algorithm.outer_lr)

    def unpack(self, total: Tensor | None, mix: float = 0.0) -> Program:
        """Set the rank's parameters: w_i <- mix w_i + (1 - mix) a.

        Args:
            total: the sum of this outer step; None before the first. All ranks learn its control value here.
            mix: share of the rank's own parameters.
        """
        packed: Gradient = yield PackParameters(bucket=self.bucket)
        packed.body().mul_(mix).add_(self.anchor, alpha=1 - mix)
        packed.tail()[CONTROL] = 0.0 if total is None else self.tail(total)[CONTROL]
        yield UnpackParameters(packed)

    def load_sum(self, ticket: Ticket | None) -> Ticket | None:
        """Continue a sum that was in flight when a run stopped, without the command that stopped that run."""
        if ticket is None:
            return None
        total = ticket.value.clone()
        self.tail(total)[CONTROL] = 0.0
        return Ticket.completed(total)


@dataclass(slots=True, kw_only=True)
class Fragment:
    """A bucket of the parameters between two steps, and its sum in flight (None: there is none)."""

    outer: OuterOptimizer
    summing: Ticket | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentState(State):
    """The state of each fragment."""

    anchors: tuple[Tensor, ...]
    summing: tuple[Ticket | None, ...]

    @classmethod
    def of(cls, fragments: Sequence[Fragment], **more: Any) -> Self:
        """The state of these fragments. `more` are the fields of the subclass."""
        return cls(
            anchors=tuple(fragment.outer.anchor for fragment in fragments),
            summing=tuple(fragment.summing for fragment in fragments),
            **more,
        )


def is_due(fragment: int, num_fragments: int, every: int, num_done: int) -> bool:
    """Return True if a fragment has its turn after that many steps: t mod H = floor(f H / P).

    >>> [[f for f in range(3) if is_due(f, 3, 6, num_done)] for num_done in range(1, 7)]
    [[], [1], [], [2], [], [0]]
    """
    return num_done % every == fragment * every // num_fragments


def sum_flat(value: Gradient, collective: Collective) -> Program:
    """The sum as a plain tensor, which a checkpoint can hold."""
    return (yield AllReduce(value, collective)).flat


def average(collective: Collective, step: int) -> Program:
    """Average the parameters over ranks at the end of a run. The sum is exact: only differences are compressed."""
    packed = yield PackParameters(step=step)
    yield UnpackParameters((yield AllReduce(packed, collective.exact)))
