"""No gradient in flight is ever written, and no algorithm keeps more gradients than its definition needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, final
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.laws import tiny
from tests.laws.covering import covering, pairs_of
from tests.laws.train import COMPUTE, NETWORK, REAL, Wrapper, make_job, on_all_runtimes, run_job, run_on_ranks
from tests.laws.variants import COLLECTIVES, name_of, representatives, variants
from workbench.algorithms import DeAR, LayerwiseSGD, PartialAllReduce, PipeSGD, SynchronousSGD
from workbench.collectives import Collective, Native, Ring, flat_of
from workbench.collectives.algorithm import CollectiveAlgorithm
from workbench.gradients import BufferPool, Gradient
from workbench.ops import Apply, Backward, EndStep, Program, Start, Ticket, Value, Wait, WaitAny
from workbench.program import Algorithm, Context, perform, settings_of
from workbench.runtimes.rank.main import Job
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings

NOT_SEALED = (DeAR, PartialAllReduce)  # they take a sum's halves apart; a rank without a gradient sums one of no owner
HOW = Settings(steps=6, batch_size=3, timeout_s=30)


class Overwritten(AssertionError):
    pass


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded(Collective):
    """Sums elsewhere, and so can see whether somebody else wrote the value between the request for the sum and the sum."""

    inner: Collective

    def all_reduce(self, ctx: Context, value: Value) -> Program:
        return self._sum(ctx, value, flat_of(value).clone())  # cloned now; the rest runs when the lane gets to it

    def _sum(self, ctx: Context, value: Value, before: Tensor) -> Program:
        flat = flat_of(value)
        total = before.clone()
        unchanged(flat, before)
        yield from perform(self.inner.all_reduce(ctx, total))
        unchanged(flat, before)
        flat.copy_(total)
        return value

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int) -> float:
        return self.inner.bytes_sent(rank, num_workers, numel, itemsize)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed(Wrapper):
    """Another algorithm with guarded sums; what it waited for must still hold the sum when it is applied."""

    def worker(self, ctx: Context) -> Program:
        program, answer = replace(self.inner, collective=Guarded(inner=self.inner.collective)).worker(ctx), None
        sums: list[tuple[Gradient, Tensor]] = []  # waited for, not yet applied
        while True:
            try:
                request = program.send(answer)
            except StopIteration:
                return
            for gradient, total in sums:
                unchanged(gradient.flat, total)
            if isinstance(request, Apply):
                sums = [
                    item
                    for item in sums
                    if owner_of(item[0]) is not owner_of(request.gradient) or other_bucket(item[0], request.gradient)
                ]
            answer = yield request
            value = answer[1] if isinstance(request, WaitAny) else answer if isinstance(request, Wait) else None
            if isinstance(value, Gradient):
                sums.append((value, value.flat.clone()))


def owner_of(gradient: Gradient) -> Gradient:
    return gradient.owner or gradient


def other_bucket(held: Gradient, applied: Gradient) -> bool:
    return applied.bucket is not None and held.bucket != applied.bucket


def unchanged(flat: Tensor, before: Tensor) -> None:
    if not torch.equal(flat, before):
        raise Overwritten("a gradient in flight was overwritten")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Careless(CollectiveAlgorithm):
    """A planted bug: gives the gradient's buffer away while its sum is under way."""

    collective: Collective = Native()

    def worker(self, ctx: Context) -> Program:
        tickets: list[Ticket] = []
        for step in ctx.steps():
            gradient = yield Backward(step)
            tickets.append((yield Start(self.collective.all_reduce(ctx, gradient))))
            yield Apply(gradient)
            yield EndStep(step)
        for ticket in tickets:
            yield Wait(ticket)


def one_buffer(pool: BufferPool) -> Tensor:
    """A planted bug: the same buffer for every backward."""
    if not pool._all:
        pool._all.append(torch.empty(pool._layout.numel, dtype=pool._layout.dtype))
    pool._out.add(id(pool._all[0]))
    return pool._all[0]


@contextmanager
def one_buffer_for_all() -> Iterator[None]:
    with patch.object(BufferPool, "take", one_buffer), patch.object(BufferPool, "give_back", lambda pool, flat: None):
        yield


def run_planted(job: Job, num_ranks: int) -> None:
    with one_buffer_for_all():
        run_job(job, num_ranks)


def simulate(algorithm: Algorithm, num_workers: int, check_in_flight: bool = True) -> Simulation:
    simulation = Simulation(
        algorithm, tiny.problem(), HOW, num_workers, network=NETWORK, compute=COMPUTE, check_in_flight=check_in_flight
    )
    simulation.run()
    return simulation


SUMMING = [
    item
    for item in variants()
    if settings_of(item).get("collective") in COLLECTIVES and not isinstance(item, NOT_SEALED)
]


def how_sums(algorithm: Algorithm) -> tuple[Any, ...]:
    """What decides which buffers are in flight at once."""
    settings = settings_of(algorithm)
    return (
        type(algorithm),
        settings["collective"],
        algorithm.requires.num_lanes,
        algorithm.max_staleness,
        settings.get("apply"),
        settings.get("order"),
    )


IN_FLIGHT = [item for item in SUMMING if isinstance(item, PipeSGD | LayerwiseSGD)]
ON_REAL_RANKS = {*representatives(), *covering(IN_FLIGHT, lambda item: pairs_of(how_sums(item)))}


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", SUMMING, ids=name_of)
def test_no_gradient_in_flight_is_written(algorithm: Algorithm) -> None:
    """With codecs too this is so, but what they sum is not what they were given."""
    sealed = Sealed(inner=algorithm)
    simulate(sealed, 3)
    for runtime in REAL if algorithm in ON_REAL_RANKS else ():
        run_on_ranks(run_job, make_job(runtime, 3, sealed, tiny.problem(), HOW), 3)


@on_all_runtimes
@pytest.mark.parametrize("inner", [PipeSGD(width=2), PipeSGD(width=3, collective=Ring())], ids=name_of)
def test_a_pool_that_hands_out_a_buffer_in_flight_is_caught(inner: Algorithm, runtime: str) -> None:
    sealed = Sealed(inner=inner)
    if runtime == "simulated":
        with one_buffer_for_all(), pytest.raises(Overwritten):
            simulate(sealed, 3)
        return
    job = make_job(runtime, 3, sealed, tiny.problem(), HOW)
    with pytest.raises(Overwritten):
        run_on_ranks(run_planted, job, 3)


@pytest.mark.parametrize("collective", [Native(), Ring()], ids=["native", "ring"])
def test_an_algorithm_that_gives_a_buffer_away_too_early_is_caught(collective: Collective) -> None:
    simulate(Careless(collective=collective), 3, check_in_flight=False)  # no other rank sees it
    with pytest.raises(Overwritten):
        simulate(Careless(collective=Guarded(inner=collective)), 3)


def test_the_simulator_checks_native_sums_itself() -> None:
    with pytest.raises(AssertionError, match="in flight was overwritten"):
        simulate(Careless(), 3)
    with one_buffer_for_all(), pytest.raises(AssertionError, match="in flight was overwritten"):
        simulate(PipeSGD(width=2), 3)


@pytest.mark.parametrize(
    ("algorithm", "num_buffers"),
    [
        (SynchronousSGD(), 1),
        (LayerwiseSGD(bucket_bytes=0), 1),
        *((PipeSGD(width=width), width) for width in (1, 2, 3, 4)),
    ],
    ids=lambda value: name_of(value) if isinstance(value, Algorithm) else str(value),
)
def test_an_algorithm_holds_as_many_gradients_as_it_has_steps_in_flight(algorithm: Algorithm, num_buffers: int) -> None:
    simulation = simulate(algorithm, 2)
    assert [worker.replica.pool.num_allocated for worker in simulation.workers] == [num_buffers] * 2
