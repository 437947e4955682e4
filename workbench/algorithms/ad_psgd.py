"""AD-PSGD: a rank averages with one neighbour at a time, and no rank waits for all of its neighbours."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import ClassVar, final

import torch
from torch import Tensor

from workbench.algorithms.gossip import GossipAlgorithm, average
from workbench.errors import ConfigError
from workbench.gradients import CONTROL, Gradient, Layout
from workbench.ops import (
    ANY,
    FREE,
    Apply,
    Backward,
    EndStep,
    Local,
    Message,
    PackParameters,
    Program,
    Recv,
    Send,
    Start,
    Ticket,
    UnpackParameters,
    Wait,
)
from workbench.program import Card, Context, Elasticity, Restart
from workbench.rng import generator
from workbench.topologies import Graph, Ring

VALUE, MEAN = 910, 911  # tags
DONE = (1 << 40) - 1  # stamp of a rank that takes no more steps


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ADPSGD(GossipAlgorithm):
    """An active rank i, with a neighbour j that it draws in each step:

        w_i, w_j <- (w_i + w_j) / 2,   then   w_i <- w_i - lr * g_i(w_i before)

    A passive rank j takes its own steps meanwhile: w_j <- w_j - lr * g_j(w_j when it began the step). A rank is passive
    if it is an even number of hops from rank 0, and active otherwise. An active rank exchanges with passive ones only,
    and a passive one answers at any time, so no two ranks wait for each other. Edges between two ranks of one kind are
    not used.

    Each exchange and each step moves the mean over ranks as SGD with 1/p of the rate does. A passive rank's parameters
    belong to a task next to its worker, which answers others and its own worker in the order of arrival. So a gradient
    of a passive rank is late by the exchanges during its backward pass: without a bound. Each rank takes every step of
    the run. Evaluations take rank 0's replica. The run ends with the mean of all ranks; so does each part of it between
    two checkpoints, or before and after a changed setting.

    Paper: lian2018asynchronous, Alg. 1.
    """

    topology: Graph = Ring()

    card: ClassVar[Card] = Card(
        paper="lian2018asynchronous, Alg. 1",
        staleness="exchanges during a backward pass, unbounded",
        bytes_per_step="n",
        memory="3 parameter vectors; answers in flight",
    )

    def check(self, num_ranks: int) -> None:
        """Raise `ConfigError` unless the graph exists, reaches all ranks, is undirected and does not change."""
        GossipAlgorithm.check(self, num_ranks)
        if self.topology.period(num_ranks) > 1 or not self.topology.is_undirected(num_ranks):
            raise ConfigError(
                f"{self.topology} is directed or changes from step to step, and ADPSGD averages pairs: use Ring(), "
                "Torus(), Star(), RandomRegular() or Complete()"
            )

    @property
    def asynchronous(self) -> bool:
        return True

    @property
    def max_staleness(self) -> None:
        """None: no bound."""
        return

    @property
    def restart(self) -> Restart:
        """What is in flight between two ranks is not saved."""
        return Restart.FROM_PARAMETERS

    @property
    def elasticity(self) -> Elasticity:
        """The remaining ranks begin again with the mean of their parameters. What is in flight is lost."""
        return Elasticity.SHRINKS

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> None:
        """Return None: how often a passive rank answers is chance."""

    def partners(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """Return the neighbours of the other kind."""
        passive = _passive(self.topology, num_ranks)
        return tuple(other for other in self.topology.neighbours(rank, num_ranks) if passive[other] != passive[rank])

    def pull(self, ctx: Context) -> Program:
        """Take over a passive rank's parameters from their owner. An active rank has its own."""
        if self.partners(ctx.rank, ctx.num_workers) and _passive(self.topology, ctx.num_workers)[ctx.rank]:
            packed: Gradient = yield PackParameters()
            packed.body().zero_()  # no change
            yield from _exchange_with_owner(ctx, packed, stamp=0)

    def conclude(self, ctx: Context) -> Program:
        """Take the mean of the owners' parameters. A second program may not use the tags of the one that pauses."""
        yield from self.pull(ctx)
        yield from average()

    def worker(self, ctx: Context) -> Program:
        partners = self.partners(ctx.rank, ctx.num_workers)
        if not partners:  # one rank
            for step in ctx.steps():
                yield Apply((yield Backward(step)), local=True)
                yield EndStep(step)
        elif _passive(self.topology, ctx.num_workers)[ctx.rank]:
            yield from _answer_and_train(ctx, len(partners))
        else:
            yield from _ask_and_train(ctx, partners)
        yield from average()


def _ask_and_train(ctx: Context, partners: tuple[int, ...]) -> Program:
    """An active rank: the exchange runs during the backward pass."""
    for step in ctx.steps():
        packed: Gradient = yield PackParameters()
        partner = partners[int(generator(ctx.seed, "ad-psgd", ctx.rank, step).integers(len(partners)))]
        sending = yield Start(Send(partner, packed.flat, tag=VALUE, stamp=step))
        gradient = yield Backward(step)
        mean: Message = yield Recv(partner, like=packed.flat, tag=MEAN)
        yield Wait(sending)
        yield UnpackParameters(replace(packed, flat=mean.value))
        yield Apply(gradient, local=True)
        yield EndStep(step)
    packed = yield PackParameters()
    for partner in partners:
        yield Send(partner, packed.flat, tag=VALUE, stamp=DONE)


def _answer_and_train(ctx: Context, num_partners: int) -> Program:
    """A passive rank's worker. It sends the change of a step to the owner of the parameters, and takes them over."""
    packed: Gradient = yield PackParameters()
    owner = yield Start(_own(ctx, packed.copy(), num_partners), lane=FREE, shares_tags=True)
    for step in ctx.steps():
        before: Gradient = yield PackParameters()
        yield Apply((yield Backward(step)), local=True)
        packed = yield PackParameters()
        packed.body().sub_(before.body())
        yield from _exchange_with_owner(ctx, packed, stamp=step)
        yield EndStep(step)
    yield Send(ctx.rank, packed.flat, tag=VALUE, stamp=DONE)
    yield UnpackParameters((yield Wait(owner)))


def _exchange_with_owner(ctx: Context, change: Gradient, stamp: int) -> Program:
    """Send a change of the parameters to their owner on this rank, and take over what they are then."""
    yield Send(ctx.rank, change.flat, tag=VALUE, stamp=stamp)
    newest: Message = yield Recv(ctx.rank, like=change.flat, tag=MEAN)
    yield UnpackParameters(replace(change, flat=newest.value))


def _own(ctx: Context, model: Gradient, num_partners: int) -> Program:
    """The owner of a passive rank's parameters: one message after the other, until all that may send have ended."""
    answers: deque[Ticket] = deque()
    num_bytes = model.message_bytes
    num_ended = 0
    while num_ended < num_partners + 1:
        message: Message = yield Recv(ANY, like=model.flat, tag=VALUE, stamped=True)
        if message.stamp == DONE:
            num_ended += 1
            continue
        yield Local("sum", num_bytes, partial(_take, model, message.value, own=message.source == ctx.rank))
        answers.append((yield Start(Send(message.source, model.flat.clone(), tag=MEAN))))
        while len(answers) > 1 and answers[0].done:
            answers.popleft()
    for ticket in answers:
        yield Wait(ticket)
    return model


def _take(model: Gradient, received: Tensor, *, own: bool) -> None:
    """Add the own worker's change, or average with another rank's parameters. A command of either is kept."""
    theirs = replace(model, flat=received)
    model.body().add_(theirs.body())
    if not own:
        model.body().mul_(0.5)
    model.tail()[CONTROL] = torch.maximum(model.tail()[CONTROL], theirs.tail()[CONTROL])


@cache
def _passive(graph: Graph, num_ranks: int) -> tuple[bool, ...]:
    """Return for each rank whether it is an even number of hops from rank 0."""
    hops = {0: 0}
    reached = deque([0])
    while reached:
        rank = reached.popleft()
        for other in graph.neighbours(rank, num_ranks):
            if other not in hops:
                hops[other] = hops[rank] + 1
                reached.append(other)
    return tuple(hops[rank] % 2 == 0 for rank in range(num_ranks))
