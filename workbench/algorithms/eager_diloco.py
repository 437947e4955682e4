"""DiLoCo with eager updates: an outer step uses the rank's own difference of this turn and the others' of the turn before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from workbench.algorithms.outer_optimizer import OuterAlgorithm, OuterOptimizer, average, check_whole, sum_flat
from workbench.collectives import Collective, Native
from workbench.ops import Apply, Backward, EndStep, Program, Start, State, Ticket, Wait
from workbench.program import Card, Context, Replicas


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EagerState(State):
    """Of each fragment; `summing` is None before its first turn."""

    anchors: tuple[Tensor, ...]
    momenta: tuple[Tensor, ...]
    own: tuple[Tensor, ...]
    summing: tuple[Ticket | None, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EagerDiLoCo(OuterAlgorithm):
    """Every rank i steps alone; at its n-th turn, every H steps, its own difference is new and the others' are one turn old:

        D_i[n] = a_i - w_i,   D = D_i[n] / p + (mean_j D_j[n-1] - D_i[n-1] / p),   D_j[0] = 0
        m_i <- mu m_i + D,   a_i <- a_i - outer_lr (D + mu m_i),   w_i <- a_i

    (`nesterov=False`: a_i <- a_i - outer_lr m_i.) So a sum has a whole period, under whose local steps it is hidden, and
    anchors differ between ranks. The parameters can be cut into P fragments: fragment f has its turn after t steps,
    t mod H = floor(f H / P). Staleness 0 (of a rank's own updates); others' differences are one period old.

    Sums that come a period late bear less momentum, as any late gradient does. On the digits the default outer step ends at a
    test loss of 0.76, and outer_lr=0.5, outer_momentum=0.3 at 0.11; `DiLoCo` ends at 0.09 (records/digits-margins.json).

    The end of a run discards the sum in flight and averages the parameters: without loss, whatever the collective, which
    compresses differences only.

    Paper: kale2025eager.
    """

    every: int = 30  # H
    outer_lr: float = 0.7
    outer_momentum: float = 0.9  # mu
    nesterov: bool = True
    fragments: int = 1  # P
    collective: Collective = Native()

    card: ClassVar[Card] = Card(
        paper="kale2025eager",
        staleness="0; outer steps of the others by one period",
        bytes_per_step="2 (p-1)/p n / H",
        memory="4 parameter vectors",
    )

    def __post_init__(self) -> None:
        OuterAlgorithm.__post_init__(self)
        check_whole("fragments", self.fragments, 1)

    @property
    def state_type(self) -> type[EagerState]:
        return EagerState

    @property
    def num_buckets(self) -> int:
        return self.fragments

    @property
    def replicas(self) -> Replicas:
        return Replicas.AT_END

    def worker(self, ctx: Context) -> Program:
        fragments: list[_Fragment] = yield from self._fragments(ctx)
        num_done = ctx.first_step
        for step in ctx.steps():
            yield Apply((yield Backward(step)), local=True)
            num_done = step + 1
            for number, fragment in enumerate(fragments):
                if num_done % self.every == number * self.every // len(fragments):
                    yield from self._take_turn(ctx, fragment, step)
            yield EndStep(step, state=_state_of(fragments))
        for fragment in fragments:
            if fragment.summing is not None:
                yield Wait(fragment.summing)
        if num_done:
            yield from average(self.collective, num_done)

    def _take_turn(self, ctx: Context, fragment: _Fragment, step: int) -> Program:
        """An outer step with the sum of the turn before; its own sum is for the next."""
        outer = fragment.outer
        difference = yield from outer.pack_difference(step)
        own = outer.values(difference.flat) / ctx.num_workers
        mean, before = own.clone(), None
        if fragment.summing is not None:
            before = yield Wait(fragment.summing)
            mean.add_(outer.mean(before) - fragment.own)
        fragment.own = own
        fragment.summing = yield Start(sum_flat(difference, self.collective))
        outer.step(mean)
        yield from outer.unpack(before)

    def _fragments(self, ctx: Context) -> Program:
        """One for each bucket: fewer than P where there are fewer parameters."""
        assert ctx.layout is not None
        resumed: EagerState | None = ctx.resumed
        found = []
        for number in range(len(ctx.layout.buckets)):
            outer: OuterOptimizer = yield from OuterOptimizer.begin(self, number)
            fragment = _Fragment(outer, torch.zeros_like(outer.anchor))
            if resumed is not None:
                outer.load(resumed.anchors[number], resumed.momenta[number])
                fragment.own.copy_(resumed.own[number])
                fragment.summing = outer.load_sum(resumed.summing[number])
            found.append(fragment)
        return found


@final
@dataclass(slots=True)
class _Fragment:
    """A bucket of the parameters between two steps."""

    outer: OuterOptimizer
    own: Tensor  # D_i / p of the turn before
    summing: Ticket | None = None


def _state_of(fragments: list[_Fragment]) -> EagerState:
    return EagerState(
        anchors=tuple(fragment.outer.anchor for fragment in fragments),
        momenta=tuple(fragment.outer.momentum for fragment in fragments),
        own=tuple(fragment.own for fragment in fragments),
        summing=tuple(fragment.summing for fragment in fragments),
    )
