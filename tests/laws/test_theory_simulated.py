"""Closed forms of sums and of steps of one gradient agree with the simulator, to the last digits."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import pytest
import torch
from torch import nn

from tests.laws.timing import EITHER_DETAIL, FREE_NETWORK, LAYERS, NETWORK, NOTHING, Bare, exactly, scaled, simulate
from workbench import theory
from workbench.algorithms import (
    AdaptiveDelaySGD,
    PipeSGD,
    SynchronousSGD,
)
from workbench.codecs import Truncate16
from workbench.collectives import Collective, HalvingDoubling, Linear, Native, Ring, Tree
from workbench.costs import Network
from workbench.ops import FREE, Apply, Backward, EndStep, Local, Program, Start, Ticket, Wait
from workbench.problems.base import Problem
from workbench.program import Buckets, Context, Requirements, perform
from workbench.runtimes.simulator.simulate import Detail
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings

# ---------------------------------------------------------------- collectives


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sums(Bare):
    """Nothing but a sum a step."""

    collective: Collective
    numel: int

    def worker(self, ctx: Context) -> Program:
        for step in ctx.steps():
            yield from perform(self.collective.all_reduce(ctx, torch.empty(self.numel, device="meta")))
            yield EndStep(step)


COLLECTIVES = (Ring, HalvingDoubling, Linear, Tree)
CODED = replace(NETWORK, encode_s_per_byte=3e-7, decode_s_per_byte=5e-7)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("codec", [None, Truncate16()], ids=str)
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_collectives(kind: type[Any], codec: Truncate16 | None, workers: int) -> None:
    """Until the last rank is done. A tree of other than 2^k ranks is quicker than its formula, which rounds up."""
    collective, numel = kind(codec=codec), 24 * 20
    ran = simulate(Sums(collective=collective, numel=numel), workers, network=CODED, steps=1)
    seconds, expected = (
        max(ran.steps_s(rank)[0] for rank in range(workers)),
        theory.all_reduce_s(collective, 4 * numel, workers, CODED),
    )
    if kind is Tree and workers in (3, 6):
        assert 0.75 * expected < seconds <= expected * (1 + 1e-9)
    else:
        assert seconds == exactly(expected)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_a_codec_breaks_even_where_its_formula_says(workers: int) -> None:
    rate = theory.ring_break_even_bandwidth(workers, 2.0, CODED.encode_s_per_byte, CODED.decode_s_per_byte)
    times = {}
    for share in (0.8, 1.0, 1.25):
        network = replace(CODED, bandwidth_bytes_per_s=share * rate, latency_s=0.0)
        raw, coded = (
            simulate(Sums(collective=Ring(codec=codec), numel=960), workers, network=network, steps=1).steps_s()[0]
            for codec in (None, Truncate16())
        )
        times[share] = coded / raw
    assert times[0.8] < 1 < times[1.25]
    assert times[1.0] == exactly(1.0)


def test_the_smallest_useful_ratio_is_the_first_that_hides() -> None:
    """Compute that takes as long as the ring of half the bytes, with its codec: truncation to 16 bits is just enough."""
    num_bytes, quick = 960 * 4, replace(CODED, encode_s_per_byte=1e-8, decode_s_per_byte=1e-8)
    raw, coded = (
        simulate(Sums(collective=Ring(codec=codec), numel=960), 4, network=quick, steps=1).steps_s()[0]
        for codec in (None, Truncate16())
    )
    codec_s = theory.codec_s(Ring(codec=Truncate16()), num_bytes, 4, quick)
    assert theory.smallest_useful_ratio(coded, num_bytes, 4, quick, codec_s) == exactly(2.0)
    assert theory.smallest_useful_ratio(raw * (1 + 1e-9), num_bytes, 4, quick, codec_s) == 1.0
    assert theory.smallest_useful_ratio(coded * 0.99, num_bytes, 4, quick, codec_s) > 2.0


# ---------------------------------------------------------------- one gradient a step


@pytest.mark.parametrize("collective", [Native(), Ring(), HalvingDoubling(), Linear()], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 4])
@EITHER_DETAIL
def test_synchronous(detail: Detail, collective: Collective, workers: int) -> None:
    ran = simulate(SynchronousSGD(collective=collective), workers, compute=scaled(0.02), steps=3, detail=detail)
    expected = theory.synchronous_s(
        0.02, collective.seconds(ran.layout.message_bytes, workers, NETWORK) if workers > 1 else 0.0
    )
    assert ran.steps_s() == exactly(expected)


@pytest.mark.parametrize("share", [0.4, 1.0, 2.5], ids=["bound by communication", "balanced", "bound by compute"])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("collective", [Native(), Ring()], ids=str)
@EITHER_DETAIL
def test_pipe_on_one_processor_and_one_interface(
    detail: Detail, collective: Collective, width: int, share: float
) -> None:
    communication_s = collective.seconds(8000, 4, NETWORK)
    ran = simulate(
        PipeSGD(width=width, collective=collective), 4, compute=scaled(share * communication_s), detail=detail
    )
    assert ran.layout.message_bytes == 8000
    assert ran.step_s(last=4) == exactly(theory.pipe_s(share * communication_s, communication_s, width))


@pytest.mark.parametrize("share", [0.5, 1.0, 3.0])
def test_pipe_s_speedup_over_synchronous(share: float) -> None:
    communication_s = Ring().seconds(8000, 4, NETWORK)
    compute = scaled(share * communication_s)
    slow, quick = (simulate(PipeSGD(width=width, collective=Ring()), 4, compute=compute).step_s(4) for width in (1, 2))
    assert slow / quick == exactly(theory.pipe_speedup(share * communication_s, communication_s))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Unlimited(Bare):
    """Pipe-SGD on K processors: step t computes on one of its own once step t - K is summed.

    Its rings are nothing but latency.
    """

    width: int
    compute_bytes: int

    def worker(self, ctx: Context) -> Program:
        in_flight: deque[Ticket] = deque()
        for step in ctx.steps():
            if len(in_flight) == self.width:
                yield Wait(in_flight.popleft())
            in_flight.append((yield Start(self._step(ctx), lane=FREE)))
            yield EndStep(step)
        while in_flight:
            yield Wait(in_flight.popleft())

    def _step(self, ctx: Context) -> Program:
        yield Local("encode", self.compute_bytes, lambda: None)
        yield from perform(Ring().all_reduce(ctx, torch.empty(8, device="meta")))


@pytest.mark.parametrize("width", [1, 2, 3])
def test_pipe_on_many_processors_and_interfaces(width: int) -> None:
    """Interfaces with infinite bandwidth are any number of interfaces; a separate program has its own processor."""
    network = Network(latency_s=1e-3, bandwidth_bytes_per_s=math.inf, encode_s_per_byte=1e-6)
    ran = simulate(Unlimited(width=width, compute_bytes=4000), 4, network=network, steps=8 * width)
    communication_s = Ring().seconds(32, 4, network)
    assert ran.step_s(6 * width) == exactly(theory.pipe_unlimited_s(4e-3, communication_s, width))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredPipe(Bare):
    """Pipe-SGD of width 2 whose gradient goes in one ring a layer, from under backward on."""

    @property
    def requires(self) -> Requirements:
        return Requirements(buckets=Buckets(max_bytes=0, applied_singly=True))

    @property
    def max_staleness(self) -> int:
        return 1

    def worker(self, ctx: Context) -> Program:
        before: tuple[Ticket, ...] = ()
        for step in ctx.steps():
            tickets = yield Backward(step, on_bucket=partial(Ring().all_reduce, ctx))
            for ticket in before:
                yield Apply((yield Wait(ticket)))
            before = tickets
            yield EndStep(step)
        for ticket in before:
            yield Apply((yield Wait(ticket)))


@pytest.mark.parametrize("share", [0.3, 3.0])
def test_pipe_layer_by_layer(share: float) -> None:
    """Slower than one all-reduce by 2 (L-1) (p-1) alpha where communication bounds; equal where compute does."""
    num_bytes = [4 * (size + 3) for size in reversed(LAYERS)]
    times = [Ring().seconds(size, 4, NETWORK) for size in num_bytes]
    compute_s = share * sum(times)
    ran = simulate(LayeredPipe(), 4, compute=scaled(compute_s), sizes=LAYERS)
    assert [ran.layout.bucket_bytes(bucket) for bucket in range(4)] == num_bytes
    assert ran.step_s(4) == exactly(theory.per_layer_pipe_s(compute_s, times))
    if share < 1:
        whole = Ring().seconds(sum(num_bytes), 4, NETWORK)
        assert ran.step_s(4) - theory.pipe_s(compute_s, whole) == exactly(2 * 3 * 3 * NETWORK.latency_s)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Delayed(Bare):
    """AGD(d) as its authors have it: d threads, here lanes, each with an all-reduce of its own."""

    delay: int

    @property
    def max_staleness(self) -> int:
        return self.delay

    def worker(self, ctx: Context) -> Program:
        in_flight: deque[Ticket] = deque()
        for step in ctx.steps():
            gradient = yield Backward(step)
            in_flight.append((yield Start(Ring().all_reduce(ctx, gradient), lane=step % self.delay)))
            if len(in_flight) > self.delay:
                yield Apply((yield Wait(in_flight.popleft())))
            yield EndStep(step)
        while in_flight:
            yield Apply((yield Wait(in_flight.popleft())))


@pytest.mark.parametrize("delay", [1, 2, 3, 4])
@pytest.mark.parametrize("share", [0.05, 0.3, 2.0])
def test_delayed_bound_by_latency(delay: int, share: float) -> None:
    """Threads hide latency: a step takes t_c / d, until compute takes longest."""
    network = Network(latency_s=2e-3, bandwidth_bytes_per_s=math.inf)
    communication_s = Ring().seconds(160, 4, network)
    ran = simulate(
        Delayed(delay=delay), 4, network=network, compute=scaled(share * communication_s), sizes=(37,), steps=36
    )
    assert ran.step_s(last=12) == exactly(theory.delayed_s(share * communication_s, communication_s, 0.0, delay))


@pytest.mark.parametrize("delay", [1, 2, 3, 4, 8])
def test_delayed_bound_by_bandwidth(delay: int) -> None:
    """But not bytes."""
    network = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e5)
    communication_s, wire_s = Ring().seconds(4000, 4, network), theory.wire_s(4000, 4, network)
    ran = simulate(Delayed(delay=delay), 4, network=network, compute=scaled(0.01), sizes=(997,), steps=48)
    assert ran.step_s(last=24) == exactly(theory.delayed_s(0.01, communication_s, wire_s, delay))


@pytest.mark.parametrize("hidden_by", [1, 2, 3])
def test_the_smallest_useful_delay(hidden_by: int) -> None:
    """The adaptive algorithm reaches it.

    A longer delay makes no step shorter; a shorter one does not hide all communication.
    """
    network = Network(latency_s=2e-3, bandwidth_bytes_per_s=1e9)
    communication_s, wire_s = Ring().seconds(160, 4, network), theory.wire_s(160, 4, network)
    compute_s = communication_s / (hidden_by - 0.4)
    assert theory.smallest_useful_delay(compute_s, communication_s, wire_s) == hidden_by
    run = partial(simulate, workers=4, network=network, compute=scaled(compute_s), sizes=(37,))
    times = {delay: run(Delayed(delay=delay), steps=24).step_s() for delay in range(1, hidden_by + 2)}
    assert times[hidden_by] == exactly(compute_s) and times[hidden_by + 1] == exactly(compute_s)
    assert hidden_by == 1 or times[hidden_by - 1] > 1.1 * compute_s
    # Reports are in the way too
    adaptive = run(AdaptiveDelaySGD(max_delay=hidden_by + 1, adapt_every=12, collective=Ring()), steps=44)
    assert [row["staleness"] for row in adaptive.run.metrics[0][-8:]] == [hidden_by] * 8


# ---------------------------------------------------------------- stability


class Mode(nn.Module):
    """One parameter at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_delayed_steps_are_stable_up_to_their_limit(width: int, momentum: float) -> None:
    """Pipe-SGD on a quadratic of curvature 3, really trained: parameters shrink or grow by what the largest root says."""
    ones, curvature, steps = torch.ones(64, 1, dtype=torch.float64), 3.0, 240
    problem = Problem(
        model=Mode,
        loss=lambda out, target: curvature / 2 * out.square().mean(),
        train=(ones, ones),
        name="mode",
        batch_size=1,
    )
    limit = theory.stability_limit(width - 1, momentum)
    for share in (0.8, 1.2):
        optimizer = partial(torch.optim.SGD, lr=share * limit / curvature, momentum=momentum)
        how = Settings(steps=steps, optimizer=optimizer)
        simulation = Simulation(PipeSGD(width=width), problem, how, 2, network=FREE_NETWORK, compute=NOTHING)
        losses = [row["loss"] for row in simulation.run().metrics[0] if row.get("loss") is not None]
        # The largest of a few swings
        late, end = (math.sqrt(max(losses[at : at + 40])) for at in (steps // 2, steps - 40))
        grown = (end / late) ** (1 / (steps // 2 - 40))
        assert (grown < 1) == (share < 1)
        assert grown == pytest.approx(theory.spectral_radius(share * limit, width - 1, momentum), rel=0.01)
