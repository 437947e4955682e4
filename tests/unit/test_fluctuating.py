"""Steps that change: the recurrence beside the simulator, and beside the closed form where nothing changes."""

from dataclasses import replace

import numpy as np
import pytest

import workbench as wb
from workbench import theory
from workbench.costs import Compute, Lognormal, Network
from workbench.errors import ConfigError

STEPS, WORKERS = 30, 4


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_it_ends_when_the_simulator_does(width: int) -> None:
    task = replace(wb.problems.digits_mlp(), train=range(10**6), test=None)
    network = Network(latency_s=1e-4, bandwidth_bytes_per_s=1e8)
    compute = Compute(forward_s=0.5e-3, backward_s=1e-3, stragglers=(Lognormal(sigma=0.5),))
    run = wb.simulate(
        wb.PipeSGD(width=width),
        task,
        workers=WORKERS,
        network=network,
        compute=compute,
        timing_only=True,
        steps=STEPS,
        batch_size=1,
        seed=3,
    )
    seconds = 1.5e-3 * np.array([compute.factors(3, step, WORKERS) for step in range(STEPS)])
    ends = theory.pipe_ends_s(seconds, [_sum_s(network)] * STEPS, width)
    assert run.info["result"]["seconds"] == pytest.approx(ends[-1], rel=1e-9)


def _sum_s(network: Network) -> float:
    """Of a gradient of the digits' network, with the simulator's own formula: one step, no compute."""
    task = replace(wb.problems.digits_mlp(), train=range(10**6), test=None)
    free = Compute(forward_s=0.0, backward_s=0.0)
    run = wb.simulate(
        wb.SynchronousSGD(),
        task,
        workers=WORKERS,
        network=network,
        compute=free,
        timing_only=True,
        steps=1,
        batch_size=1,
    )
    return float(run.info["result"]["seconds"])


@pytest.mark.parametrize(("compute_s", "sum_s"), [(1.0, 0.3), (1.0, 1.0), (0.3, 1.0)])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_constant_steps_are_the_closed_form(compute_s: float, sum_s: float, width: int) -> None:
    ends = theory.pipe_ends_s(np.full((40, 3), compute_s), [sum_s] * 40, width)
    assert np.diff(ends)[10:].mean() == pytest.approx(theory.pipe_s(compute_s, sum_s, width))


def test_a_wider_pipeline_is_never_slower() -> None:
    draws = np.random.default_rng(0)
    compute, sums = draws.lognormal(0, 0.5, (200, 4)), draws.lognormal(0, 0.5, 200)
    last = [theory.pipe_ends_s(compute, sums, width)[-1] for width in (1, 2, 3, 4, 8)]
    assert last == sorted(last, reverse=True)
    assert last[1] > last[-1]


def test_what_it_cannot_be_given() -> None:
    with pytest.raises(ConfigError, match="steps, workers"):
        theory.pipe_ends_s([1.0, 2.0], [1.0, 2.0], 2)
    with pytest.raises(ConfigError, match="width=0"):
        theory.pipe_ends_s([[1.0]], [1.0], 0)
