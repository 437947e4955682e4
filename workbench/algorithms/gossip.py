"""Gossip: ranks exchange with their neighbours on a graph, and no sum is taken over all of them.

What D-PSGD, gradient tracking, SGP and Choco-SGD share. `Exchange` is one rank's messages of a step. A message is a
flat tensor, the same for all neighbours; each receiver weights it by the graph's mixing matrix.

A gradient's sum brings rank 0's control value to all ranks in the same step. Gossip has no such sum, and all ranks must
act on a value after the same step. So rank 0's value begins its way at multiples of `num_hops`, each rank passes on
what it has heard, and all act on it `num_hops` steps later.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, field
from functools import partial
from typing import final

import torch
from torch import Tensor

from workbench.errors import ConfigError
from workbench.gradients import CONTROL, Gradient, Layout
from workbench.ops import AllReduce, Local, PackParameters, Program, Recv, Send, Start, Ticket, UnpackParameters, Wait
from workbench.program import Algorithm, Context, Elasticity, Replicas, Update
from workbench.topologies import Graph, check_graph

TAG = 900  # tags of a collective's hops are below


class GossipAlgorithm(Algorithm, ABC):
    """An algorithm whose ranks exchange on a graph. Each algorithm declares `topology` itself, with its default.

    Attributes:
        topology: graph of the ranks, such as ring or random-regular:3; a rank exchanges with its neighbours only.
    """

    __slots__ = ()
    topology: Graph

    def __post_init__(self) -> None:
        check_graph(self.topology)

    def check(self, num_ranks: int) -> None:
        """Raise `ConfigError` unless the graph exists, reaches all ranks, and its weights suit the algorithm."""
        self.topology.num_hops(num_ranks)
        if not self.topology.is_balanced(num_ranks):
            raise ConfigError(
                f"{self.topology}: the weights with which some rank receives do not sum to 1, so "
                f"{type(self).__name__} would not find the mean: use StochasticGradientPush, or a graph in which every "
                "rank receives from as many ranks as it sends to"
            )

    @property
    def update(self) -> Update:
        return Update.OWN

    @property
    def replicas(self) -> Replicas:
        """Replicas differ between steps. The run ends with their mean."""
        return Replicas.AT_END

    @property
    def elasticity(self) -> Elasticity:
        """The remaining ranks continue from their mean, on the graph of fewer ranks."""
        return Elasticity.SHRINKS

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> float | None:
        """Return the bytes of one message for each neighbour; None if their number changes from step to step."""
        counts = {
            len(self.topology.neighbours(rank, num_ranks, step)) for step in range(self.topology.period(num_ranks))
        }
        return float(counts.pop() * self.message_bytes(layout)) if len(counts) == 1 else None

    def message_bytes(self, layout: Layout) -> int:
        """Return the bytes of one message: the parameters with their tail."""
        return layout.message_bytes


@final
@dataclass(slots=True)
class Exchange:
    """One rank's exchanges with its neighbours. A local variable of its program.

    Attributes:
        ctx: the context of the run.
        graph: who exchanges with whom.
        heard: the control value that this rank passes on, (); None before the first step.
        sent: the message of the step.
        sending: a ticket for each neighbour.
        receiving: (source, ticket) for each rank that sends to this one.
    """

    ctx: Context
    graph: Graph
    heard: Tensor | None = None
    sent: Tensor | None = None
    sending: list[Ticket] = field(default_factory=list)
    receiving: list[tuple[int, Ticket]] = field(default_factory=list)

    def send_packed(self, packed: Gradient, step: int, *more: Tensor) -> Program:
        """Begin the exchange of packed parameters, followed by other values."""
        self.load_control(packed, step)
        yield from self.start(torch.cat([packed.flat, *more]), step)

    def receive_packed(self, packed: Gradient, step: int) -> Program:
        """Finish it: `packed` becomes the weighted sum. The answer is the messages by rank."""
        messages: dict[int, Tensor] = yield from self.finish()
        yield from self.mix(messages, packed.flat, step)
        where = packed.layout.buckets[0].tail + CONTROL
        self.hear([message[where] for message in messages.values()], packed, step)
        return messages

    def start(self, message: Tensor, step: int) -> Program:
        """Begin to send a message to each neighbour, and to receive those of the others. `message` must not change."""
        rank, num_ranks = self.ctx.rank, self.ctx.num_workers
        self.sent = message
        for source in self.graph.sources(rank, num_ranks, step):
            self.receiving.append((source, (yield Start(Recv(source, like=message, tag=TAG)))))
        for to in self.graph.neighbours(rank, num_ranks, step):
            self.sending.append((yield Start(Send(to, message, tag=TAG))))

    def finish(self) -> Program:
        """The messages of the step by rank, in rising order, with this rank's own."""
        assert self.sent is not None
        found = {self.ctx.rank: self.sent}
        for source, ticket in self.receiving:
            found[source] = (yield Wait(ticket)).value
        for ticket in self.sending:
            yield Wait(ticket)
        self.sending, self.receiving, self.sent = [], [], None
        return dict(sorted(found.items()))

    def mix(self, messages: dict[int, Tensor], out: Tensor, step: int) -> Program:
        """out <- sum_j W_ij m_j, over the first elements of the messages, in the order of ranks."""
        weights = self.graph.mixing(self.ctx.num_workers, step)[self.ctx.rank]
        terms = [(float(weights[source]), message[: out.numel()]) for source, message in messages.items()]
        if len(terms) == 1 and terms[0][0] == 1.0:  # `out` has this rank's own value
            return
        num_bytes = out.numel() * out.element_size() * (len(terms) - 1)
        yield Local("sum", num_bytes, partial(_weighted_sum, terms, out))

    def load_control(self, packed: Gradient, step: int) -> None:
        """Replace the control value of packed parameters by the one that this rank passes on."""
        own = packed.tail()[CONTROL]
        if self._hop(step) == 0:
            self.heard = own.clone()
        elif self.heard is None:  # the program begins between two of those steps
            self.heard = torch.zeros_like(own)
        own.copy_(self.heard)

    def hear(self, values: list[Tensor], packed: Gradient, step: int) -> None:
        """Take the largest of the received control values. All ranks act on it after the same step."""
        assert self.heard is not None
        for value in values:
            self.heard = torch.maximum(self.heard, value)
        last = self._hop(step) + 1 >= self._num_hops
        packed.tail()[CONTROL] = self.heard if last else 0.0

    def _hop(self, step: int) -> int:
        return step % max(1, self._num_hops)

    @property
    def _num_hops(self) -> int:
        return self.graph.num_hops(self.ctx.num_workers)


def _weighted_sum(terms: list[tuple[float, Tensor]], out: Tensor) -> None:
    out.zero_()
    for weight, message in terms:
        out.add_(message, alpha=weight)


def average() -> Program:
    """The mean of all ranks' parameters, at the end of a run."""
    packed = yield PackParameters()
    yield UnpackParameters((yield AllReduce(packed)))
