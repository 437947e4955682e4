"""SlowMo: a slow momentum over the blocks of another algorithm."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from workbench.algorithms.gossip import average
from workbench.algorithms.no_communication import NoCommunication
from workbench.arguments import check_whole, is_number
from workbench.errors import ConfigError
from workbench.gradients import Gradient, Layout
from workbench.ops import EndStep, Program, ReadParameters, Request, State, WriteParameters
from workbench.program import (
    LOOP_ENDED,
    Algorithm,
    Card,
    Context,
    Elasticity,
    Replicas,
    Requirements,
    Restart,
    Update,
    map_leaves,
    replace_requests,
)

ANCHOR, MOMENTUM = "slow.anchor", "slow.momentum"  # in `Context.memory`


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SlowMo(Algorithm):
    """Every H steps of an inner algorithm, with the mean w of the ranks' parameters, and a from which the H steps began:

        u <- beta u + (a - w) / lr,   a <- a - alpha lr u,   w_i <- a

    The default inner algorithm communicates nothing: this is slow momentum over local SGD. With a constant learning rate
    it is `DiLoCo(outer_lr=alpha, outer_momentum=beta, nesterov=False)`, which can also compress, and whose momentum m is
    lr u. If a schedule changes the learning rate, m stays as it is, where the paper's lr u changes with it.

    A block of H steps is a whole run of the inner algorithm: at its end gradients in flight are applied, and parameters
    that differ are averaged. The next block begins from a without gradients in flight. What the inner algorithm keeps
    for the whole run stays: optimizer states, residuals of error feedback, momenta (`SignSGD`, `DeMo`), and late
    gradients that are in no sum (`PartialAllReduce`). So alpha=1 with beta=0 is the inner algorithm, if its replicas
    are equal at a block's end and nothing is in flight. The measured delay of `AdaptiveDelaySGD` begins again in each
    block. A run that ends within a block ends as the inner algorithm does.

    Attributes:
        every: H, the paper's tau, number of steps between two slow steps.
        inner: algorithm that takes the H steps, such as d-psgd; its ranks must wait for each other, so it has no servers.
        slow_lr: alpha, step size of the slow update; 1, without momentum, moves to the mean of the replicas.
        slow_momentum: beta, share of the last slow update that is added to the next one.

    Paper: wang2019slowmo, Alg. 1.
    """

    every: int = 12  # H
    inner: Algorithm = NoCommunication()
    slow_lr: float = 1.0  # alpha
    slow_momentum: float = 0.7  # beta

    card: ClassVar[Card] = Card(
        paper="wang2019slowmo, Alg. 1",
        staleness="0",
        bytes_per_step="2 (p-1)/p n / H",
        memory="2 parameter vectors, and 1 during a sum",
    )

    def __post_init__(self) -> None:
        check_whole("every", self.every, 1, "the number of steps between two slow steps, 1 or more")
        if not (is_number(self.slow_lr) and 0 < self.slow_lr < math.inf):
            raise ConfigError(f"slow_lr={self.slow_lr!r}: give a finite number above 0")
        if not (is_number(self.slow_momentum) and 0 <= self.slow_momentum < 1):
            raise ConfigError(f"slow_momentum={self.slow_momentum!r}: give a number from 0 to below 1")
        if not isinstance(self.inner, Algorithm):
            raise ConfigError(f"inner={self.inner!r}: give an algorithm, such as DPSGD()")
        if isinstance(self.inner, SlowMo) or (self.inner.asynchronous and not self._is_alone):
            raise ConfigError(
                f"inner={self.inner}: a block ends with the mean of all ranks, so give an algorithm without servers "
                "whose ranks take their steps together, such as DPSGD() or LocalSGD()"
            )

    @property
    def _is_alone(self) -> bool:
        """Return True if the inner algorithm communicates nothing. Then the mean at a block's end is taken here."""
        return isinstance(self.inner, NoCommunication)

    @property
    def requires(self) -> Requirements:
        return self.inner.requires

    @property
    def period(self) -> int:
        return self.every

    @property
    def codec(self) -> Any:
        return self.inner.codec

    def messages_per_step(self, num_ranks: int, num_buckets: float) -> float | None:
        return self.inner.messages_per_step(num_ranks, num_buckets)

    @property
    def update(self) -> Update:
        return self.inner.update

    @property
    def replicas(self) -> Replicas:
        if self.inner.replicas.equal_parameters:
            return self.inner.replicas
        return Replicas.PARAMETERS if self.every == 1 else Replicas.AT_END

    @property
    def max_staleness(self) -> int | None:
        return self.inner.max_staleness

    @property
    def complete_after_step(self) -> bool:
        return self.replicas.equal_parameters and self.inner.complete_after_step

    @property
    def depends_on_timing(self) -> bool:
        return self.inner.depends_on_timing

    @property
    def restart(self) -> Restart:
        return self.inner.restart

    @property
    def elasticity(self) -> Elasticity:
        """The remaining ranks continue within the block from their mean. Anchor and slow momentum stay."""
        kind = self.inner.requires.state
        keeps_gradients = kind is not None and kind.unused is not State.unused
        can = self._is_alone or (self.inner.elasticity.shrinks and not keeps_gradients)
        return Elasticity.SHRINKS if can else Elasticity.NONE

    def check(self, num_ranks: int) -> None:
        """Raise `ConfigError` unless the inner algorithm can run on that many ranks."""
        self.inner.check(num_ranks)

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> float | None:
        """Return the inner algorithm's bytes if its replicas are equal at all times; None if a block ends with a sum."""
        in_step = self.inner.replicas.equal_parameters
        return self.inner.bytes_per_step(rank, num_ranks, layout) if in_step else None

    def worker(self, ctx: Context) -> Program:
        slow: _SlowMomentum = yield from _SlowMomentum.begin(self, ctx)
        block = replace(ctx)
        while True:
            last: EndStep | None = yield from self._take_block(ctx, block)
            if self._is_alone:
                yield from average()
            if last is None:
                return
            yield from slow.step()
            yield last
            if ctx.is_last(last.step):
                return
            block = replace(ctx, first_step=last.step + 1, resumed=last.state)

    def _take_block(self, ctx: Context, block: Context) -> Program:
        """Run the inner algorithm to the end of the block, or of the run if that is earlier.

        The answer is the `EndStep` of the block's last step, which is left out here: it follows the slow step. None: the
        run has ended within the block.
        """
        end = (block.first_step // self.every + 1) * self.every
        last: EndStep | None = None

        def new(request: Request) -> Request | Program:
            return end_step(request) if isinstance(request, EndStep) else request

        def end_step(request: EndStep) -> Program:
            nonlocal last
            if request.step + 1 == end:
                last = replace(request, state=_unused(request))
                if block.num_steps is None:
                    block.num_steps = LOOP_ENDED
                return
            yield request
            block.num_steps = _earlier(ctx.num_steps, end)

        block.num_steps = _earlier(ctx.num_steps, end)
        yield from replace_requests(self.inner.worker(block), new)
        return last


@final
@dataclass(slots=True)
class _SlowMomentum:
    """The slow momentum. Its tensors are in `Context.memory`, equal on all ranks.

    Attributes:
        algorithm: the settings.
        anchor: a, (n,).
        momentum: lr u, (n,).
    """

    algorithm: SlowMo
    anchor: Tensor
    momentum: Tensor

    @classmethod
    def begin(cls, algorithm: SlowMo, ctx: Context) -> Program:
        """Begin with the rank's parameters, or with what the run has kept."""
        if ANCHOR not in ctx.memory:
            ctx.memory[ANCHOR] = yield ReadParameters()
            ctx.memory[MOMENTUM] = torch.zeros_like(ctx.memory[ANCHOR])
        return cls(algorithm, ctx.memory[ANCHOR], ctx.memory[MOMENTUM])

    def step(self) -> Program:
        """Take a slow step from the mean of the ranks, which all have as their parameters."""
        mean = yield ReadParameters()
        self.momentum.mul_(self.algorithm.slow_momentum).add_(self.anchor - mean)
        self.anchor.sub_(self.momentum, alpha=self.algorithm.slow_lr)
        yield WriteParameters(self.anchor)


def _earlier(num_steps: int | None, end: int) -> int | None:
    """The end of a block's program. If the caller ends the loop, the program must not expect the block's end either."""
    return None if num_steps is None else min(num_steps, end)


def _unused(end: EndStep) -> State | None:
    """This rank's gradients that are in no sum, copied: the inner algorithm's program ends and frees them."""
    unused = None if end.state is None else end.state.unused(end.step)
    return map_leaves(unused, lambda leaf: leaf.copy() if isinstance(leaf, Gradient) else leaf)
