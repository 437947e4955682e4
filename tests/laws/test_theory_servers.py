"""Closed forms of parameter servers and of what chance does to their steps, and the simulator, say the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import numpy as np
import pytest

from tests.laws.timing import FREE_NETWORK, NETWORK, exactly, simulate
from workbench import theory
from workbench.algorithms import (
    AsyncSGD,
    BackupSGD,
    ParameterServerSGD,
)
from workbench.costs import Compute, SlowMachines, Stragglers
from workbench.rng import generator


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_parameter_servers(workers: int, shards: int) -> None:
    """From a common start gather and scatter do not overlap; in the long run who is answered first comes first, and they do."""
    network, compute = replace(NETWORK, sum_s_per_byte=0.0), Compute(forward_s=0.1, backward_s=0.0, update_s=0.03)
    ran = simulate(
        ParameterServerSGD(shards=shards, dedicated=True),
        workers + shards,
        network=network,
        compute=compute,
        sizes=(400,) * shards,
    )
    num_bytes = ran.layout.message_bytes + 8 * shards  # a stamp each
    for staggered, found in (
        (False, max(ran.steps_s(rank)[0] for rank in range(workers))),
        (True, ran.step_s()),
    ):
        communication_s = theory.parameter_server_s(num_bytes, workers, network, shards, staggered=staggered)
        assert found == exactly(theory.parameter_server_step_s(0.1, 0.03 / shards, communication_s))


def test_servers_sum_between_two_pushes() -> None:
    """p - 1 sums, of the gradient without its stamp."""
    ran = simulate(ParameterServerSGD(dedicated=True), 5)
    num_bytes = ran.layout.message_bytes
    stamps_s = 8 / NETWORK.bandwidth_bytes_per_s * (4 + 1)
    assert ran.step_s() == exactly(theory.parameter_server_s(num_bytes, 4, NETWORK, staggered=True) + stamps_s)


@pytest.mark.parametrize("workers", [1, 3, 5, 9])
@pytest.mark.parametrize("compute_s", [0.004, 0.03])
def test_asynchronous(workers: int, compute_s: float) -> None:
    """Seconds between updates, where workers are too few to keep the server busy and where they are too many; and staleness."""
    network, steps = replace(NETWORK, sum_s_per_byte=0.0), 40
    compute = Compute(forward_s=compute_s, backward_s=0.0, update_s=0.001)
    ran = simulate(AsyncSGD(dedicated=True), workers + 1, network=network, compute=compute, sizes=(500,), steps=steps)
    num_bytes = ran.layout.message_bytes + 8
    service_s = theory.service_s(num_bytes, 0.001, network)
    cycle_s = theory.cycle_s(compute_s, num_bytes, 0.001, network)
    updates = ran.run.updates()
    seconds = [row["seconds"] for row in updates]
    first, last = 10 * workers, 35 * workers  # all workers are there, and are equally often
    assert (seconds[last] - seconds[first]) / (last - first) == pytest.approx(
        theory.update_interval_s(cycle_s, workers, service_s), rel=1e-6
    )
    assert np.mean([row["staleness"][0] for row in updates[first:last]]) == theory.mean_staleness(workers)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn(Stragglers):
    """A law of arrival as a law of slowness, anew each step; up to a millionth more, so that no two things end at the same time."""

    arrival: theory.Arrival

    def factors(self, seed: int, step: int, num_workers: int) -> np.ndarray:
        drawn = generator(seed, "drawn", 0, step).random((num_workers, 2))
        return self.arrival.quantile(drawn[:, 0]) + 1e-6 * drawn[:, 1]


LAWS: dict[str, theory.Arrival] = {
    "constant": theory.ConstantTime(seconds=2.0),
    "shifted-exponential": theory.ShiftedExponentialTime(shift_s=1.0, scale_s=0.3),
    "lognormal": theory.LognormalTime.of_mean(1.0, 0.5),
    "pareto": theory.ParetoTime(minimum_s=1.0, shape=2.5),
    "uniform": theory.UniformTime(low_s=0.5, high_s=2.0),
    "normal": theory.NormalTime(mean_s=3.0, deviation_s=0.4),
    "bimodal": theory.BimodalTime(usual_s=1.0, slow_s=3.0, probability=0.3),
    "empirical": theory.EmpiricalTime(values_s=(1.0, 1.1, 1.2, 1.2, 1.9, 4.0)),
}
EACH = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())


def backup_steps(
    law: theory.Arrival, num_gradients: int, backups: int, steps: int = 120
) -> tuple[np.ndarray, np.ndarray]:
    """(steps,) simulated seconds of each step, on a network that costs nothing, and the (steps, N + b) seconds that were drawn."""
    total = num_gradients + backups
    compute = Compute(forward_s=0.5, backward_s=0.5, stragglers=(Drawn(arrival=law),))
    ran = simulate(
        BackupSGD(backups=backups, dedicated=True),
        total + 1,
        network=FREE_NETWORK,
        compute=compute,
        sizes=(10,),
        steps=steps,
    )
    seconds = [row["seconds"] for row in ran.run.updates()]
    return np.diff([0.0, *seconds]), np.array([compute.factors(0, step, total) for step in range(steps)])


def error_of(seconds: np.ndarray) -> float:
    """Four standard errors of the mean, and a millionth (`Drawn`)."""
    return float(4 * seconds.std() / len(seconds) ** 0.5) + 1e-6


@EACH
def test_without_backups_a_step_is_the_slowest_s(law: theory.Arrival) -> None:
    steps_s, draws = backup_steps(law, 6, 0)
    assert steps_s == exactly(draws.max(1))
    assert steps_s.mean() == pytest.approx(law.expected_order_statistic(6, 6), abs=error_of(steps_s))


@EACH
@pytest.mark.parametrize(("num_gradients", "backups"), [(7, 1), (6, 3)])
def test_with_backups_a_step_is_the_recurrence_of_carried_stragglers(
    law: theory.Arrival, num_gradients: int, backups: int
) -> None:
    """Step by step. The order statistic, which has all begin afresh, is what the first step takes, and a bound from below of the others."""
    steps_s, draws = backup_steps(law, num_gradients, backups)
    assert steps_s == exactly(theory.backlog_steps(draws, num_gradients))
    fresh = np.sort(draws, 1)[:, num_gradients - 1]
    assert steps_s[0] == exactly(fresh[0])
    assert fresh.mean() == pytest.approx(
        law.expected_order_statistic(num_gradients, num_gradients + backups), abs=error_of(fresh)
    )
    assert fresh.mean() <= steps_s.mean() * (1 + 1e-9) <= draws.max(1).mean() * (1 + 2e-9)
    carried = theory.Backlog(arrival=law)
    predicted, its_error = (
        ask(num_gradients, num_gradients + backups)
        for ask in (carried.expected_order_statistic, carried.standard_error)
    )
    assert steps_s.mean() == pytest.approx(predicted, abs=error_of(steps_s) + 4 * its_error)


@pytest.mark.parametrize("timeout_s", [0.25, 0.5])
def test_an_update_ends_so_long_after_its_first_gradient(timeout_s: float) -> None:
    """Two workers take 1 s, the third 100 s."""
    compute = Compute(forward_s=0.5, backward_s=0.5, stragglers=(SlowMachines(factor_of=((2, 100.0),)),))
    algorithm = BackupSGD(backups=0, timeout_s=timeout_s, dedicated=True)
    updates = simulate(algorithm, 4, network=FREE_NETWORK, compute=compute, sizes=(10,), steps=5).run.updates()
    assert [row["seconds"] for row in updates] == exactly([count * (1 + timeout_s) for count in range(1, 6)])
    assert [sorted(row["sources"]) for row in updates] == [[0, 1]] * 5


@pytest.mark.parametrize("law", [LAWS["lognormal"], LAWS["pareto"], LAWS["bimodal"]], ids=str)
def test_asynchronous_with_random_times(law: theory.Arrival) -> None:
    """E[X] / p, and p - 1 updates stale, on a network that costs nothing."""
    workers, steps = 6, 150
    compute = Compute(forward_s=0.5, backward_s=0.5, stragglers=(Drawn(arrival=law),))
    ran = simulate(
        AsyncSGD(dedicated=True), workers + 1, network=FREE_NETWORK, compute=compute, sizes=(10,), steps=steps
    )
    updates = ran.run.updates()
    kept = updates[: workers * steps // 2]  # until then all workers are at work
    draws = np.array([compute.factors(0, step, workers) for step in range(steps)])
    interval_s = kept[-1]["seconds"] / len(kept)
    error = 4 * draws.std() / len(kept) ** 0.5 / workers + law.mean_s / len(kept)
    assert interval_s == pytest.approx(theory.update_interval_s(law.mean_s, workers), abs=error)
    read = dict.fromkeys(range(workers), 0) | {row["sources"][0]: row["update"] for row in kept}
    in_flight = sum(len(kept) - version for version in read.values())
    assert sum(row["staleness"][0] for row in kept) + in_flight == theory.mean_staleness(workers) * len(kept), "exactly"
