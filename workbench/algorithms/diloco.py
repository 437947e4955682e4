"""DiLoCo: local steps, and an outer optimizer that steps with the mean of how far the ranks went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from workbench.collectives import Collective, Native, check_collective
from workbench.collectives.algorithm import CollectiveAlgorithm
from workbench.errors import ConfigError
from workbench.gradients import CONTROL, WEIGHT, Gradient, Layout
from workbench.ops import AllReduce, Apply, Backward, EndStep, PackParameters, Program, Start, State, Ticket, UnpackParameters, Wait
from workbench.program import Buckets, Card, Context, Elasticity, Replicas, Requirements


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCoState(State):
    """Between two steps, by fragment: see `_Fragment`."""

    anchors: tuple[Tensor, ...]
    momenta: tuple[Tensor, ...]
    own: tuple[Tensor, ...]
    due: tuple[int, ...]
    summing: tuple[Ticket | None, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCo(CollectiveAlgorithm):
    """Every rank i steps alone; every H steps, for anchor a (the parameters all ranks share) and outer momentum m:

        D_i = a - w_i,   D = mean_i D_i,   m <- mu m + D,   a <- a - outer_lr (D + mu m),   w_i <- a

    (`nesterov=False`: a <- a - outer_lr m.) With every=1, outer_lr=1, outer_momentum=0 and plain SGD it is `SynchronousSGD`
    up to rounding; with outer_lr=1, outer_momentum=0 it is `LocalSGD`.

    Streaming: the parameters are cut into `fragments`, fragment f of P is due f H / P steps after the others' turn, so that
    a P-th is sent at a time. With `delay` > 0 its sum is used so many steps later, under whose compute it is hidden; what was
    learned meanwhile is kept by a share: w_i <- mix w_i + (1 - mix) a.

    Eager: the sum has a whole period. At its n-th turn a rank steps with its own new D_i and the others' last ones,
    D = D_i[n] / p + (mean_j D_j[n-1] - D_i[n-1] / p); D[0] = 0.
    Anchors then differ between ranks. Sums that come a period late bear less momentum, as any late gradient does: on the
    digits eager updates go astray with the default outer step, and not with outer_lr=0.5, outer_momentum=0.3
    (records/digits-margins.json).

    At the end of a run outer steps in flight are taken (eager ones were), and the parameters averaged unless they are equal:
    without loss, whatever the collective, which compresses differences alone.
    Staleness 0 (of a rank's own updates). Memory: anchor and outer momentum, and a fragment for each sum in flight.

    Paper: douillard2023diloco, Alg. 1; douillard2025streaming, Alg. 2; kale2025eager (eager updates).
    """

    every: int = 30  # H
    outer_lr: float = 0.7
    outer_momentum: float = 0.9  # mu
    nesterov: bool = True
    fragments: int = 1  # P
    delay: int = 0
    mix: float = 0.0  # alpha, the share of the rank's own parameters
    eager: bool = False
    collective: Collective = Native()

    card: ClassVar[Card] = Card(
        paper="douillard2023diloco, Alg. 1; douillard2025streaming, Alg. 2; kale2025eager",
        staleness="0; outer steps by `delay` steps, or one period",
        bytes_per_step="2 (p-1)/p n / H",
        memory="2 parameter vectors, 1 / P of one for each sum in flight",
    )

    def __post_init__(self) -> None:
        check_collective(self.collective)
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value}: a whole number, {least} or more")
        if self.delay > self.every:
            raise ConfigError(f"delay={self.delay}: an outer step must be over before the next one begins, so at most every={self.every}")
        if not (self.outer_lr > 0 and 0 <= self.outer_momentum < 1 and 0 <= self.mix <= 1):
            raise ConfigError(
                f"outer_lr={self.outer_lr}, outer_momentum={self.outer_momentum}, mix={self.mix}: above 0, in [0, 1), in [0, 1]"
            )
        if self.eager and (self.delay or self.mix):
            raise ConfigError(f"delay={self.delay}, mix={self.mix} with eager=True, which has delays of its own: leave both at 0")

    @property
    def requires(self) -> Requirements:
        return Requirements(buckets=Buckets(count=self.fragments), state=DiLoCoState, link=self.collective.needs_link)

    @property
    def replicas(self) -> Replicas:
        always = self.every == self.fragments == 1 and not (self.delay or self.mix or self.eager)
        return Replicas.EVERY_STEP if always else Replicas.AT_END

    @property
    def elasticity(self) -> Elasticity:
        """To the mean of those that remain, which is the new anchor; the outer momentum begins at 0 again."""
        return Elasticity.SHRINKS

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> None:
        """Most steps send nothing."""

    def worker(self, ctx: Context) -> Program:
        assert ctx.layout is not None
        num_fragments = len(ctx.layout.buckets)
        parts: list[_Fragment] = []
        resumed: DiLoCoState | None = ctx.resumed
        for number in range(num_fragments):
            if resumed is None:
                parts.append(_Fragment.begin(number, (yield PackParameters(bucket=number))))
            else:
                parts.append(_Fragment.load(number, resumed))
        num_done = ctx.first_step
        for step in ctx.steps():
            yield Apply((yield Backward(step)), local=True)
            num_done = step + 1
            for part in parts:
                if part.summing is not None and num_done >= part.due and not self.eager:
                    yield from self._arrive(part, (yield Wait(part.summing)))
            for part in parts:
                if num_done % self.every == part.number * self.every // num_fragments:
                    yield from (self._step_eagerly(ctx, part, step) if self.eager else self._begin(part, num_done))
            yield EndStep(step, state=_state_of(parts))
        yield from self._end(parts, num_done)

    def _begin(self, part: _Fragment, num_done: int) -> Program:
        """A fragment's turn: sum how far the ranks went."""
        packed = yield PackParameters(bucket=part.number, step=num_done - 1)
        part.set_off(packed)
        work = _flat_sum(AllReduce(packed, self.collective))
        if self.delay:
            part.summing, part.due = (yield Start(work)), num_done + self.delay
        else:
            yield from self._arrive(part, (yield from work))

    def _arrive(self, part: _Fragment, total: Tensor) -> Program:
        """The sum has arrived: take the outer step, and set the rank's parameters by it."""
        part.summing = None
        values, tail = part.split(total)
        self._outer_step(part, values / tail[WEIGHT])
        yield from self._set_parameters(part, tail[CONTROL])

    def _step_eagerly(self, ctx: Context, part: _Fragment, step: int) -> Program:
        """The same with this rank's own part new and the others' of one turn ago."""
        packed = yield PackParameters(bucket=part.number, step=step)
        own = part.set_off(packed).clone() / ctx.num_workers
        mean, word = own.clone(), torch.zeros_like(own[:1]).sum()
        if part.summing is not None:
            values, tail = part.split((yield Wait(part.summing)))
            mean.add_(values / tail[WEIGHT] - part.own)
            word = tail[CONTROL]
        part.own = own
        part.summing = yield Start(_flat_sum(AllReduce(packed, self.collective)))
        self._outer_step(part, mean)
        yield from self._set_parameters(part, word)

    def _outer_step(self, part: _Fragment, mean: Tensor) -> None:
        part.momentum.mul_(self.outer_momentum).add_(mean)
        step = mean + self.outer_momentum * part.momentum if self.nesterov else part.momentum
        part.anchor.sub_(step, alpha=self.outer_lr)

    def _set_parameters(self, part: _Fragment, word: Tensor) -> Program:
        """From the anchor, and from a share of where the rank is. `word`: of control, which all ranks have now heard."""
        packed = yield PackParameters(bucket=part.number)
        values, tail = part.split(packed.flat)
        values.mul_(self.mix).add_(part.anchor, alpha=1 - self.mix)
        tail[CONTROL] = word
        yield UnpackParameters(packed)

    def _end(self, parts: list[_Fragment], num_done: int) -> Program:
        """Take the outer steps in flight (eager ones were taken), and make all ranks equal."""
        for part in parts:
            if part.summing is not None:
                total = yield Wait(part.summing)
                if not self.eager:
                    yield from self._arrive(part, total)
        late = self.eager or self.delay or self.mix or len(parts) > 1
        if num_done and (late or num_done % self.every):
            packed = yield PackParameters(step=num_done)
            yield UnpackParameters((yield AllReduce(packed, self.collective.exact)))


@final
@dataclass(slots=True)
class _Fragment:
    """One bucket of the parameters, with its part of the outer optimizer. Tensors are (n,), n its number of parameters."""

    number: int
    anchor: Tensor
    momentum: Tensor
    own: Tensor  # D_i / p of the last turn; used by eager updates alone
    due: int = 0  # the number of steps after which the sum in flight is used
    summing: Ticket | None = None

    @classmethod
    def begin(cls, number: int, packed: Gradient) -> _Fragment:
        piece = packed.layout.buckets[number]
        anchor = packed.flat[: piece.tail - piece.start].clone()
        return cls(number, anchor, torch.zeros_like(anchor), torch.zeros_like(anchor))

    @classmethod
    def load(cls, number: int, state: DiLoCoState) -> _Fragment:
        """Its part of a state, whose tensors may be read again by another run."""
        anchor, momentum, own = state.anchors[number], state.momenta[number], state.own[number]
        part = cls(number, anchor.clone(), momentum.clone(), own.clone(), state.due[number])
        summing = state.summing[number]
        if summing is not None:
            total = summing.value.clone()
            part.split(total)[1][CONTROL] = 0.0  # the word that stopped that run is not for this one
            part.summing = Ticket.completed(total)
        return part

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """A packed fragment's values and its tail; they share its memory."""
        return flat[: self.anchor.numel()], flat[self.anchor.numel() :]

    def set_off(self, packed: Gradient) -> Tensor:
        """Packed parameters become D_i, in place."""
        values, _ = self.split(packed.flat)
        torch.sub(self.anchor, values, out=values)
        return values


def _state_of(parts: list[_Fragment]) -> DiLoCoState:
    return DiLoCoState(
        anchors=tuple(part.anchor for part in parts),
        momenta=tuple(part.momentum for part in parts),
        own=tuple(part.own for part in parts),
        due=tuple(part.due for part in parts),
        summing=tuple(part.summing for part in parts),
    )


def _flat_sum(request: AllReduce) -> Program:
    """The sum as a plain tensor, which a checkpoint can hold."""
    return (yield request).flat
