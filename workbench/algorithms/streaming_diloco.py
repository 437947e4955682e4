"""Streaming DiLoCo: outer steps of one fragment of the parameters after another, with sums hidden under local steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

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
from workbench.arguments import check_whole, is_number
from workbench.collectives import Collective, Native
from workbench.errors import ConfigError
from workbench.ops import Apply, Backward, EndStep, Program, Start, Wait
from workbench.program import Buckets, Card, Context, Replicas, Requirements


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingState(FragmentState):
    """The state of each fragment."""

    due: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingDiLoCo(OuterAlgorithm):
    """Ranks step alone. Fragment f has its turn after t steps, t mod H = floor(f H / P), and its outer step at t + d:

        t:      D_i = a - w_i
        t + d:  D = mean_i D_i,   m <- mu m + D,   a <- a - outer_lr (D + mu m),   w_i <- mix w_i + (1 - mix) a

    (`nesterov=False`: a <- a - outer_lr m.) A turn sends 1 / P of the parameters. If d = `delay` is above 0, the sum is
    hidden under d local steps. With `mix` above 0 a rank keeps a part of these steps; the paper uses mix=0.5. With
    fragments=1, delay=0, mix=0 it is `DiLoCo`. Staleness 0 (of a rank's own updates).

    At the end of a run the outer steps in flight are taken. Then the parameters are averaged, unless they are equal.
    That sum is exact for any collective: only differences are compressed.

    Attributes:
        fragments: P, number of parts of the parameters, which are summed in turn.
        delay: d, number of local steps under which a part's sum is hidden.
        mix: alpha, share of its own parameters that a rank keeps in an outer step.

    Paper: douillard2025streaming, Alg. 2.
    """

    every: int = 30  # H
    outer_lr: float = 0.7
    outer_momentum: float = 0.9  # mu
    nesterov: bool = True
    fragments: int = 4  # P
    delay: int = 0  # d
    mix: float = 0.0  # alpha, the share of the rank's own parameters
    collective: Collective = Native()

    card: ClassVar[Card] = Card(
        paper="douillard2025streaming, Alg. 2",
        staleness="0; outer steps `delay` steps late",
        bytes_per_step="2 (p-1)/p n / H",
        memory="2 parameter vectors, 1 / P of one for each sum in flight",
    )

    def __post_init__(self) -> None:
        OuterAlgorithm.__post_init__(self)
        check_whole("fragments", self.fragments, 1)
        check_whole("delay", self.delay, 0)
        if self.delay > self.every:
            raise ConfigError(
                f"delay={self.delay}: a fragment's outer step must end before its next turn: use at most "
                f"every={self.every}"
            )
        if not (is_number(self.mix) and 0 <= self.mix <= 1):
            raise ConfigError(f"mix={self.mix!r}: give the share of a rank's own parameters, from 0 to 1")

    @property
    def requires(self) -> Requirements:
        return Requirements(
            buckets=Buckets(count=self.fragments), state=StreamingState, link=self.collective.needs_link
        )

    @property
    def replicas(self) -> Replicas:
        always = self.every == self.fragments == 1 and not (self.delay or self.mix)
        return Replicas.PARAMETERS if always else Replicas.AT_END

    def worker(self, ctx: Context) -> Program:
        fragments: list[_Fragment] = yield from self._fragments(ctx)
        num_done = ctx.first_step
        for step in ctx.steps():
            yield Apply((yield Backward(step)), local=True)
            num_done = step + 1
            for fragment in fragments:
                if fragment.summing is not None and num_done >= fragment.due:
                    yield from self._finish_turn(fragment)
            for number, fragment in enumerate(fragments):
                if is_due(number, len(fragments), self.every, num_done):
                    yield from self._begin_turn(fragment, step)
            yield EndStep(step, state=StreamingState.of(fragments, due=tuple(fragment.due for fragment in fragments)))
        for fragment in fragments:
            if fragment.summing is not None:
                yield from self._finish_turn(fragment)
        differ = self.delay or self.mix or len(fragments) > 1 or num_done % self.every
        if num_done and differ:
            yield from average(self.collective, num_done)

    def _begin_turn(self, fragment: _Fragment, step: int) -> Program:
        """Start the sum of the differences. Without a delay, take the outer step too."""
        difference = yield from fragment.outer.pack_difference(step)
        work = sum_flat(difference, self.collective)
        if self.delay:
            fragment.summing, fragment.due = (yield Start(work)), step + 1 + self.delay
        else:
            yield from self._outer_step(fragment.outer, (yield from work))

    def _finish_turn(self, fragment: _Fragment) -> Program:
        """Take the outer step with the sum in flight."""
        assert fragment.summing is not None
        total = yield Wait(fragment.summing)
        fragment.summing = None
        yield from self._outer_step(fragment.outer, total)

    def _outer_step(self, outer: OuterOptimizer, total: Tensor) -> Program:
        outer.step(outer.mean(total))
        yield from outer.unpack(total, self.mix)

    def _fragments(self, ctx: Context) -> Program:
        """Return a fragment for each bucket: P, or fewer if there are fewer parameters."""
        outers: list[OuterOptimizer] = yield from OuterOptimizer.begin_each(self, ctx)
        resumed: StreamingState | None = ctx.resumed
        if resumed is None:
            return [_Fragment(outer=outer) for outer in outers]
        known = zip(outers, resumed.due, resumed.summing, strict=True)
        return [_Fragment(outer=outer, summing=outer.load_sum(summing), due=due) for outer, due, summing in known]


@final
@dataclass(slots=True, kw_only=True)
class _Fragment(Fragment):
    """A fragment with the number of steps after which its sum in flight is used."""

    due: int = 0
