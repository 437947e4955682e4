"""Decentralised algorithms: limiting cases, resume from a checkpoint, convergence, and the limit of stability."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.laws import tiny
from tests.laws.reference import serial
from tests.laws.train import COMPUTE, NETWORK, assert_same, relative_error, train
from workbench.algorithms import (
    DPSGD,
    SPARTA,
    AdaptiveDelaySGD,
    ChocoSGD,
    Constant,
    DeAR,
    DeMo,
    DiLoCo,
    EagerDiLoCo,
    FirstSteps,
    GradientTracking,
    LayerwiseSGD,
    LocalSGD,
    NoCommunication,
    NoLoCo,
    PartialAllReduce,
    PipeSGD,
    SendOrder,
    SerialSGD,
    StaleSGD,
    StochasticGradientPush,
    StreamingDiLoCo,
    SynchronousSGD,
    Uniform,
)
from workbench.codecs import TopK
from workbench.collectives import Linear, Native, Ring
from workbench.laws.sentences import assert_equal_ranks, assert_near
from workbench.problems.base import Problem, Sampler
from workbench.problems.loading import fetch
from workbench.program import Algorithm
from workbench.rng import derive_seed
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings
from workbench.topologies import Complete, FromAdjacency, OnePeerExponential

ROUNDING = 1e-12
STEPS = 8
settings = partial(Settings, steps=STEPS, timeout_s=30, seed=3)
FULL = tiny.problem(num_samples=24, batch_size=2)  # every rank has as many samples in every step


def simulate(
    algorithm: Algorithm, how: Settings, problem: Problem = FULL, num_ranks: int = 3, **more: Any
) -> Simulation:
    simulation = Simulation(algorithm, problem, how, num_ranks, network=NETWORK, compute=COMPUTE, check_in_flight=True)
    simulation.run(**more)
    return simulation


def final(simulation: Simulation) -> list[Tensor]:
    return [worker.trained.read_parameters() for worker in simulation.workers]


def of(kind: str) -> list[Any]:
    """The algorithms that equal `SynchronousSGD` for plain SGD and full batches; "momentum": for any optimizer and batches."""
    same: list[Any] = [
        StaleSGD(staleness=Constant(0)),
        AdaptiveDelaySGD(max_delay=0),
        PipeSGD(width=4, warmup_steps=STEPS),
        PartialAllReduce(quorum="all"),
        PartialAllReduce(quorum=1.0, collective=Linear()),
        LayerwiseSGD(bucket_bytes=200.0, lanes=2),
        LayerwiseSGD(bucket_bytes=0, lanes=3, collective=Linear()),
        LayerwiseSGD(bucket_bytes=200.0, order=SendOrder.PRIORITY, collective=Ring()),
        *(DeAR(bucket_bytes=size) for size in (0, 200.0, None)),
        DeAR(bucket_bytes=200.0, collective=Native()),
    ]
    plain: list[Any] = [
        LocalSGD(every=1),
        LocalSGD(every=4, after=STEPS),
        DiLoCo(every=1, outer_lr=1.0, outer_momentum=0.0),
        StreamingDiLoCo(every=1, outer_lr=1.0, outer_momentum=0.0, fragments=3),
        DPSGD(overlap=False, topology=Complete()),
        StochasticGradientPush(topology=Complete()),
        NoLoCo(topology=Complete(), every=1, outer_lr=1.0, outer_momentum=0.0),
        SPARTA(fraction=1.0),
    ]
    return [*same, *plain] if kind == "sgd" else same


@cache
def synchronous(optimizer: str) -> Tensor:
    return final(simulate(SynchronousSGD(), settings(optimizer=getattr(tiny, optimizer))))[0]


@pytest.mark.parametrize("algorithm", of("sgd"), ids=str)
def test_synchronous_in_its_limit(algorithm: Algorithm) -> None:
    for found in final(simulate(algorithm, settings(optimizer=tiny.sgd))):
        assert relative_error(found, synchronous("sgd")) <= ROUNDING


@pytest.mark.parametrize("algorithm", of("momentum"), ids=str)
def test_synchronous_in_its_limit_with_momentum_and_short_batches(algorithm: Algorithm) -> None:
    how, problem = settings(optimizer=tiny.momentum, batch_size=3), tiny.problem()
    expected = serial(problem, how, 3)[-1]
    for found in final(simulate(algorithm, how, problem)):
        assert relative_error(found, expected) <= ROUNDING


def test_an_adaptive_delay_that_stays_is_a_width() -> None:
    """An all-reduce of the tiny model takes about a step: the delay stays 1 from first to last."""
    how = settings(optimizer=tiny.momentum, steps=20)
    adaptive = train("simulated", 3, AdaptiveDelaySGD(max_delay=1, adapt_every=3), FULL, how)
    assert_same(adaptive.parameters[0], train("simulated", 3, PipeSGD(width=2), FULL, how).parameters[0], 0)


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_serial_is_the_reference(delay: int) -> None:
    how = settings(optimizer=tiny.momentum, schedule=tiny.step_lr)
    trained = train("simulated", 1, SerialSGD(delay=delay), tiny.problem(), how)
    assert_same(trained.parameters[0], serial(tiny.problem(), how, 1, delay=delay), ROUNDING)


def stale_in_one_process(how: Settings, staleness: list[int], num_workers: int) -> list[Tensor]:
    """w[t+1] = w[t] - lr g_t(w[t - s_t]) with the whole batch, written from the formula."""
    torch.manual_seed(derive_seed(how.seed, "initial-weights"))
    model = FULL.model()
    vectors = [nn.utils.parameters_to_vector(model.parameters()).detach()]
    sampler = Sampler(FULL.num_samples(), how.batch_size or FULL.batch_size, num_workers, how.seed)
    for step in range(how.steps or 0):
        nn.utils.vector_to_parameters(vectors[step - min(staleness[step], step)].clone(), model.parameters())
        model.zero_grad()
        rows = np.concatenate([sampler.share(step, rank) for rank in range(num_workers)])
        FULL.batch_loss(model, fetch(FULL.train_data(), rows)).backward()
        vectors.append(vectors[-1] - 0.1 * torch.cat([param.grad.reshape(-1) for param in model.parameters()]))
    return vectors[1:]


@pytest.mark.parametrize("kind", [Constant(1), Constant(3), Uniform(0, 4)], ids=str)
def test_injected_staleness_is_what_the_formula_says(kind: Any) -> None:
    algorithm, how = StaleSGD(staleness=kind, ramp_steps=3), settings(optimizer=tiny.sgd)
    trained = train("simulated", 3, algorithm, FULL, how)
    drawn = [algorithm.drawn(how.seed, step) for step in range(STEPS)]
    expected = stale_in_one_process(how, drawn, 3)
    assert_same(trained.parameters[1][:-1], expected, ROUNDING)
    assert [row["staleness"] for row in trained.rows(2)] == [min(late, step) for step, late in enumerate(drawn)]


DIRECTED = FromAdjacency(lists=((1, 2), (2,), (0,)))  # its ranks receive from other numbers than they send to
RESUMABLE = [  # in settings that `test_resume.py` does not stop at each step
    PipeSGD(width=3, warmup_steps=2, first=FirstSteps.DUPLICATE),
    AdaptiveDelaySGD(max_delay=1, adapt_every=2),
    LayerwiseSGD(bucket_bytes=200.0, lanes=2),
    NoCommunication(),
    LocalSGD(every=3, after=1),
    DiLoCo(every=3),
    StreamingDiLoCo(every=4, fragments=3, delay=2, mix=0.5),
    EagerDiLoCo(every=2, fragments=2),
    PartialAllReduce(quorum="all"),
    DPSGD(topology=OnePeerExponential()),
    StochasticGradientPush(topology=DIRECTED),
    ChocoSGD(codec=TopK(k=20)),
]


@pytest.mark.parametrize("algorithm", RESUMABLE, ids=str)
def test_resumed_at_any_step_is_unbroken(algorithm: Algorithm) -> None:
    how = settings(optimizer=tiny.momentum, schedule=tiny.step_lr)
    unbroken = final(simulate(algorithm, how))
    for stop in range(STEPS):
        first = simulate(algorithm, how, stop_after=stop)
        second = simulate(algorithm, how, resume=first.checkpoints.at_stop)
        for rank, (found, expected) in enumerate(zip(final(second), unbroken, strict=True)):
            law = f"{algorithm}: a resumed run is the unbroken one"
            assert_near(law, found, expected, 0.0, f"stopped after step {stop}, rank {rank} at the end")


@pytest.mark.parametrize("quorum", ["solo", "majority"])
def test_partial_sums_leave_ranks_equal_and_no_buffer_out(quorum: str) -> None:
    simulation = simulate(PartialAllReduce(quorum=quorum), settings(optimizer=tiny.momentum, steps=20), tiny.problem())
    found = final(simulation)
    assert_equal_ranks(f"PartialAllReduce, {quorum}: replicas are equal at the end", found, "at the end")
    for worker in simulation.workers:
        assert not worker.trained.pool._out
    again = final(
        simulate(PartialAllReduce(quorum=quorum), settings(optimizer=tiny.momentum, steps=20), tiny.problem())
    )
    assert torch.equal(found[0], again[0]), "a simulation is a function of its inputs"


def test_partial_sums_go_on_from_a_checkpoint() -> None:
    how = settings(optimizer=tiny.momentum, steps=12)
    for stop in range(0, 12, 3):
        first = simulate(PartialAllReduce(quorum="solo"), how, stop_after=stop)
        second = simulate(PartialAllReduce(quorum="solo"), how, resume=first.checkpoints.at_stop)
        found = final(second)
        assert_equal_ranks(
            "PartialAllReduce: replicas are equal where a run is resumed",
            found,
            f"at the end, stopped after step {stop}",
        )
        assert [worker.last_step for worker in second.workers] == [11] * 3


TIMED: list[Any] = [*RESUMABLE, PartialAllReduce(quorum="solo"), AdaptiveDelaySGD(adapt_every=2)]


@pytest.mark.parametrize("algorithm", TIMED, ids=str)
def test_timing_alone_takes_as_long_as_training(algorithm: Algorithm) -> None:
    """No decision of an algorithm may hang on what its tensors hold."""
    how = settings()
    runs = []
    for timing_only in (False, True):
        simulation = Simulation(algorithm, FULL, how, 3, network=NETWORK, compute=COMPUTE, timing_only=timing_only)
        metrics = simulation.run().metrics
        rows = [row for rank in range(3) for row in metrics[rank] if "loss" in row]
        runs.append([(row["step"], round(row["seconds"], 6), row["bytes_sent"]) for row in rows])
    assert runs[0] == runs[1]


# -- convergence and stability ---------------------------------------------------------------------------------------


class Point(nn.Module):
    """Four coordinates, in two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Parameter(torch.full((3,), 5.0, dtype=torch.float64))
        self.far = nn.Parameter(torch.full((1,), -5.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.near, self.far]) - x


def cloud() -> Problem:
    """Half the mean squared distance to 96 points about the origin: equal on every rank, up to noise of 0.1."""
    points = 0.1 * torch.randn(96, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Problem(
        model=Point,
        loss=lambda away, _: 0.5 * away.square().sum(1).mean(),
        train=(points, torch.zeros(96)),
        correct=None,
    )


CONVERGING: list[Any] = [
    SynchronousSGD(),
    PipeSGD(width=4),
    PipeSGD(width=4, first=FirstSteps.DUPLICATE),
    AdaptiveDelaySGD(adapt_every=3),
    LayerwiseSGD(bucket_bytes=0, lanes=2),
    NoCommunication(),
    StaleSGD(staleness=Uniform(0, 6), ramp_steps=10),
    LocalSGD(every=5, after=10),
    DiLoCo(every=5),
    StreamingDiLoCo(every=6, fragments=2, delay=3, mix=0.5),
    EagerDiLoCo(every=5, fragments=2),
    PartialAllReduce(quorum="solo"),
    PartialAllReduce(),
    DeAR(bucket_bytes=0),
    DPSGD(),
    DPSGD(overlap=False, topology=OnePeerExponential()),
    GradientTracking(),
    StochasticGradientPush(topology=DIRECTED),
    ChocoSGD(codec=TopK(k=2), consensus_lr=0.3),
    NoLoCo(every=5),
    SPARTA(fraction=0.25),
    DeMo(chunk=4, top_k=1, sign=False),
]


@pytest.mark.parametrize("algorithm", CONVERGING, ids=str)
def test_every_algorithm_finds_the_mean(algorithm: Algorithm) -> None:
    """From 10 away to the noise of one batch: 0.1 / sqrt(4) times what the steps add, an order of magnitude below 0.3."""
    how = Settings(steps=200, batch_size=4, seed=1, optimizer=partial(torch.optim.SGD, lr=0.05))
    for found in final(simulate(algorithm, how, cloud())):
        assert float(found.norm()) < 0.3


def test_serial_finds_the_mean() -> None:
    how = Settings(steps=200, batch_size=4, seed=1, optimizer=partial(torch.optim.SGD, lr=0.05))
    assert float(final(simulate(SerialSGD(delay=3), how, cloud(), 1))[0].norm()) < 0.3


def largest_stable(delay: int, momentum: float) -> float:
    """eta lambda at which a root of the delayed recursion's characteristic polynomial leaves the unit circle, by bisection.

    w[t+1] - (1 + mu) w[t] + mu w[t-1] + eta lambda w[t-delay] = 0.
    """
    low, high = 0.0, 4.0
    for _ in range(60):
        middle = (low + high) / 2
        coefficients = np.zeros(max(delay, 1) + 2)
        coefficients[:3] = 1.0, -(1.0 + momentum), momentum
        coefficients[1 + delay] += middle
        low, high = (middle, high) if np.abs(np.roots(coefficients)).max() <= 1 + 1e-12 else (low, middle)
    return low


def test_limits_of_the_polynomial_are_the_closed_forms() -> None:
    for delay in range(5):
        assert largest_stable(delay, 0.0) == pytest.approx(2 * np.sin(np.pi / (2 * (2 * delay + 1))), rel=1e-6)
    for momentum in (0.5, 0.9):
        assert largest_stable(0, momentum) == pytest.approx(2 * (1 + momentum), rel=1e-6)
        assert largest_stable(1, momentum) == pytest.approx(1 - momentum, rel=1e-6)


class Bowl(nn.Module):
    """One coordinate for each curvature, so one run has that many values of eta lambda."""

    def __init__(self, curvatures: Tensor) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.ones_like(curvatures))
        self.register_buffer("curvatures", curvatures)


def bowl_loss(model: Bowl, batch: Any) -> Tensor:
    return 0.5 * (model.curvatures * model.point.square()).sum()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("delay", range(5))
def test_pipe_is_stable_up_to_the_limit_of_its_delay(delay: int, momentum: float) -> None:
    """The largest stable eta lambda, found by bisection among curvatures 0.05 % apart, is the polynomial's to 1 %."""
    limit = largest_stable(delay, momentum)
    curvatures = limit * torch.arange(0.99, 1.0101, 0.0005, dtype=torch.float64)
    problem = Problem(
        model=partial(Bowl, curvatures),
        loss=bowl_loss,
        train=(torch.zeros(4, 1), torch.zeros(4)),
        whole_batch=True,
        correct=None,
    )
    how = Settings(
        steps=1000, batch_size=1, seed=0, optimizer=partial(torch.optim.SGD, lr=1.0, momentum=momentum), trace_steps=1
    )
    seen = torch.stack(train("simulated", 1, PipeSGD(width=delay + 1), problem, how).parameters[0])
    grows = seen[900:1000].abs().amax(0) > seen[400:500].abs().amax(0)
    low, high = 0, len(curvatures) - 1
    assert not grows[low] and grows[high]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if grows[middle] else (middle, high)
    assert float(curvatures[low]) == pytest.approx(limit, rel=0.01)
