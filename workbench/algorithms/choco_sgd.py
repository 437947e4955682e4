"""Choco-SGD: gossip with compressed messages. Each rank sends the change of a public copy of its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

import torch
from torch import Generator, Tensor

from workbench.algorithms.gossip import Exchange, GossipAlgorithm, average
from workbench.arguments import is_number
from workbench.codecs import Codec, ErrorFeedback, Linear8, check_codec
from workbench.errors import ConfigError
from workbench.gradients import CONTROL, Gradient, Layout
from workbench.ops import Apply, Backward, EndStep, Local, PackParameters, Program, State, UnpackParameters
from workbench.program import Card, Context, Requirements
from workbench.rng import derive_seed
from workbench.topologies import Graph, Ring


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChocoState(State):
    """The state between two steps.

    Attributes:
        copy: c_i, (n,).
        mixed: sum_j W_ij c_j, (n,).
        graph: a number for the topology of these weights.
    """

    copy: Tensor
    mixed: Tensor
    graph: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChocoSGD(GossipAlgorithm):
    """Every rank i, with a public copy c_i of its parameters that its neighbours know:

        v_i = w_i - lr * g_i(w_i),   q_i = C(v_i - c_i),   c_j <- c_j + q_j for each neighbour j and for i itself,
        w_i <- v_i + consensus_lr * sum_j W_ij (c_j - c_i)

    Only q_i is sent. What the codec C loses stays in v_i - c_i and is sent later: that is the error feedback. The mean
    over ranks moves as SGD moves it, for any codec. A lossless codec with consensus_lr=1 makes it
    `DPSGD(overlap=False)`. The more a codec loses, the smaller `consensus_lr` must be, or the replicas diverge.

    The copies begin at the parameters that all ranks share. A rank keeps one vector for all neighbours, sum_j W_ij c_j;
    so the topology must not change from step to step. The run ends with the mean of all ranks. Staleness 0.

    Attributes:
        codec: C, compression of the messages, without ErrorFeedback.
        consensus_lr: gamma, step towards the neighbours' copies, above 0 and up to 1; a lossier codec needs a smaller
            one.

    Paper: koloskova2019decentralized, Alg. 2, and its form that saves memory.
    """

    topology: Graph = Ring()
    codec: Codec = Linear8()
    consensus_lr: float = 0.5

    card: ClassVar[Card] = Card(
        paper="koloskova2019decentralized, Alg. 2",
        staleness="0",
        bytes_per_step="2 n / 4",
        memory="4 parameter vectors",
    )

    def __post_init__(self) -> None:
        GossipAlgorithm.__post_init__(self)
        given: object = self.codec
        if isinstance(given, ErrorFeedback):
            raise ConfigError(f"ChocoSGD has its own error feedback: use codec={given.codec!r}")
        if given is None:
            raise ConfigError("codec=None: give a codec, such as Linear8(), or use DPSGD")
        check_codec(self.codec)
        if not self.codec.contracts:
            raise ConfigError(
                f"errors of {self.codec!r} can be larger than the values, so the copies would diverge: use it with a "
                "smaller group, more levels, or rounding to nearest"
            )
        if not (is_number(self.consensus_lr) and 0 < self.consensus_lr <= 1):
            raise ConfigError(f"consensus_lr={self.consensus_lr!r}: give a number above 0 and up to 1")

    @property
    def requires(self) -> Requirements:
        return Requirements(state=ChocoState)

    def check(self, num_ranks: int) -> None:
        """Raise `ConfigError` unless the graph exists, reaches all ranks, is undirected and does not change."""
        GossipAlgorithm.check(self, num_ranks)
        if self.topology.period(num_ranks) > 1 or not self.topology.is_undirected(num_ranks):
            raise ConfigError(
                f"{self.topology} is directed or changes from step to step, and ChocoSGD keeps a copy for fixed "
                "neighbours: use Ring(), Torus(), RandomRegular() or Complete()"
            )

    def message_bytes(self, layout: Layout) -> int:
        """Return the bytes of one message: the encoded parameters, and the control value."""
        return self.codec.wire_bytes(layout.parameter_numel) + layout.itemsize

    def worker(self, ctx: Context) -> Program:
        exchange = Exchange(ctx, self.topology)
        graph = derive_seed(0, repr(self.topology), step=ctx.num_workers)
        copies: _Copies = yield from _begin(exchange, graph)
        for step in ctx.steps():
            yield Apply((yield Backward(step)), local=True)
            packed = yield PackParameters()
            values = packed.body()  # v_i
            exchange.load_control(packed, step)
            size = values.numel() * values.element_size()
            wire = yield Local("encode", size, partial(self._encode, ctx, step, values - copies.copy))
            control = packed.tail()[CONTROL : CONTROL + 1].clone()
            yield from exchange.start(torch.cat([wire, control.view(torch.uint8)]), step)
            messages = yield from exchange.finish()
            weights = self.topology.mixing(ctx.num_workers)[ctx.rank]
            for source, message in messages.items():
                change = yield Local("decode", size, partial(self.codec.decode, message[: wire.numel()], values))
                copies.mixed.add_(change, alpha=float(weights[source]))
                if source == ctx.rank:
                    copies.copy.add_(change)
            values.add_(copies.mixed - copies.copy, alpha=self.consensus_lr)
            heard = [message[wire.numel() :].clone().view(control.dtype)[0] for message in messages.values()]
            exchange.hear(heard, packed, step)
            yield UnpackParameters(packed)
            yield EndStep(step, state=ChocoState(copy=copies.copy, mixed=copies.mixed, graph=graph))
        yield from average()

    def _encode(self, ctx: Context, step: int, values: Tensor) -> Tensor:
        noise = None
        if self.codec.stochastic and not values.is_meta:
            noise = Generator(values.device).manual_seed(derive_seed(ctx.seed, "choco", ctx.rank, step))
        return self.codec.encode(values, noise)


@final
@dataclass(slots=True, kw_only=True)
class _Copies:
    """The tensors of `ChocoState` while a program runs. They change in place."""

    copy: Tensor
    mixed: Tensor


def _begin(exchange: Exchange, graph: int) -> Program:
    """The copies of the resumed state; at first the parameters that all ranks share.

    If the state is of another topology, the ranks send their copies once more, uncompressed.
    """
    ctx = exchange.ctx
    resumed: ChocoState | None = ctx.resumed
    if resumed is None:
        packed: Gradient = yield PackParameters()
        return _Copies(copy=packed.body().clone(), mixed=packed.body().clone())
    copies = _Copies(copy=resumed.copy.clone(), mixed=resumed.mixed.clone())  # another run may read the same state
    if resumed.graph != graph:
        copies.mixed.copy_(copies.copy)
        yield from exchange.start(copies.copy.clone(), ctx.first_step)
        messages = yield from exchange.finish()
        yield from exchange.mix(messages, copies.mixed, ctx.first_step)
    return copies
