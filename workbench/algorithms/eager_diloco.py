"""DiLoCo with eager updates: an outer step uses the rank's new difference, and the other ranks' previous ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from workbench.algorithms.outer_optimizer import (
    Fragment,
    FragmentState,
    OuterAlgorithm,
    OuterOptimizer,
    average,
    is_due,
    sum_flat,
)
from workbench.arguments import check_whole
from workbench.collectives import Collective, Native
from workbench.collectives.memory import OWN
from workbench.gradients import CONTROL
from workbench.ops import (
    Apply,
    Backward,
    EndStep,
    PackParameters,
    Program,
    Start,
    UnpackParameters,
    Wait,
)
from workbench.program import Buckets, Card, Context, Replicas, Requirements


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EagerState(FragmentState):
    """The state of each fragment."""

    own: tuple[Tensor, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EagerDiLoCo(OuterAlgorithm):
    """Every rank i steps alone. At its n-th turn, every H steps, the other ranks' differences are one turn old:

        D_i[n] = a_i - w_i,   D = D_i[n] / p + (mean_j D_j[n-1] - D_i[n-1] / p),   D_j[0] = 0
        m_i <- mu m_i + D,   a_i <- a_i - outer_lr (D + mu m_i),   w_i <- a_i

    (`nesterov=False`: a_i <- a_i - outer_lr m_i.) So a sum is hidden under the local steps of a whole period, and
    anchors differ between ranks. The parameters can be cut into P fragments: fragment f has its turn after t steps, t
    mod H = floor(f H / P). Staleness 0 (of a rank's own updates); the other ranks' differences are one period old.

    Late sums need less momentum, as late gradients do. On the digits the test loss ends at 1.12 with the default outer
    step, and at 0.10 with outer_lr=0.5, outer_momentum=0.3. With `DiLoCo` it ends at 0.09
    (records/digits-margins.json).

    At the end of a run a last outer step uses the other ranks' differences of the last turn. Then the parameters are
    averaged. That sum is exact for any collective: only differences are compressed.

    Attributes:
        fragments: P, number of parts of the parameters, which are summed in turn.

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
        staleness="0; the others' differences one period late",
        bytes_per_step="2 (p-1)/p n / H",
        memory="4 parameter vectors",
    )

    def __post_init__(self) -> None:
        OuterAlgorithm.__post_init__(self)
        check_whole("fragments", self.fragments, 1)

    @property
    def requires(self) -> Requirements:
        return Requirements(buckets=Buckets(count=self.fragments), state=EagerState, link=self.collective.needs_link)

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
                if is_due(number, len(fragments), self.every, num_done):
                    yield from self._take_turn(ctx, fragment, step)
            yield EndStep(step, state=EagerState.of(fragments, own=tuple(fragment.own for fragment in fragments)))
        for fragment in fragments:
            if fragment.summing is not None:
                yield from self._take_last_turn(fragment)
        if num_done:
            yield from average(self.collective, num_done)

    def _take_turn(self, ctx: Context, fragment: _Fragment, step: int) -> Program:
        """Take an outer step with the sum of the turn before, and start the sum for the next turn."""
        outer = fragment.outer
        difference = yield from outer.pack_difference(step)
        own = difference.body() / ctx.num_workers
        mean, before = own.clone(), None
        if fragment.summing is not None:
            before = yield Wait(fragment.summing)
            mean.add_(outer.mean(before) - fragment.own)
        fragment.own = own
        fragment.summing = yield Start(sum_flat(difference, self.collective))
        outer.step(mean)
        yield from outer.unpack(before)

    def _take_last_turn(self, fragment: _Fragment) -> Program:
        """Take an outer step with the other ranks' differences of the last turn. Keep the local steps since then."""
        assert fragment.summing is not None
        outer = fragment.outer
        total = yield Wait(fragment.summing)
        packed = yield PackParameters(bucket=outer.bucket)
        parameters = packed.body().sub_(outer.anchor)
        outer.step(outer.mean(total) - fragment.own)
        parameters.add_(outer.anchor)
        packed.tail()[CONTROL] = outer.tail(total)[CONTROL]
        yield UnpackParameters(packed)

    def _fragments(self, ctx: Context) -> Program:
        """Return a fragment for each bucket: P, or fewer if there are fewer parameters."""
        outers: list[OuterOptimizer] = yield from OuterOptimizer.begin_each(self, ctx, OWN)
        resumed: EagerState | None = ctx.resumed
        if resumed is None:
            return [_Fragment(outer=outer, own=torch.zeros_like(outer.anchor)) for outer in outers]
        known = zip(outers, resumed.own, resumed.summing, strict=True)
        return [
            _Fragment(outer=outer, summing=outer.load_sum(summing), own=own.clone()) for outer, own, summing in known
        ]


@final
@dataclass(slots=True, kw_only=True)
class _Fragment(Fragment):
    """A fragment with D_i / p of the turn before."""

    own: Tensor
