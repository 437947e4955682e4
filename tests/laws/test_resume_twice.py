"""A checkpoint is not changed by the run that resumes from it, and is refused by a run of another kind."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.laws import tiny
from workbench.algorithms import LayerwiseSGD, PipeSGD, SynchronousSGD
from workbench.costs import Compute, free
from workbench.errors import ConfigError
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings

SETTINGS = Settings(steps=6, batch_size=3, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))


def simulation(algorithm: Algorithm, workers: int = 2) -> Simulation:
    compute = Compute(forward_s=1.0, backward_s=2.0)
    return Simulation(algorithm, tiny.problem(tiny.mlp), SETTINGS, workers, network=free, compute=compute)


def test_two_runs_from_one_checkpoint_are_equal() -> None:
    first = simulation(PipeSGD(width=2))
    first.run(stop_after=2)
    ends = []
    for _ in range(2):
        again = simulation(PipeSGD(width=2))
        again.run(resume=first.checkpoints.at_stop)
        ends.append(again.workers[0].replica.read_parameters())
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    ("algorithm", "workers", "words"),
    [
        (SynchronousSGD(), 2, "another algorithm"),
        (LayerwiseSGD(), 2, "another algorithm"),
        (PipeSGD(width=2), 3, "number of ranks: 2, and not 3"),
    ],
    ids=str,
)
def test_another_kind_of_run_is_refused(algorithm: Algorithm, workers: int, words: str) -> None:
    first = simulation(PipeSGD(width=2))
    first.run(stop_after=2)
    with pytest.raises(ConfigError, match=words):
        simulation(algorithm, workers).run(resume=[first.checkpoints.at_stop[0]] * workers)


def test_another_width_goes_on() -> None:
    first = simulation(PipeSGD(width=3))
    first.run(stop_after=2)
    narrower = simulation(PipeSGD(width=1))
    narrower.run(resume=first.checkpoints.at_stop)
    assert min(narrower.workers[0].replica.updates) == 6, "every gradient is used once"


def test_timing_only_charges_short_batches_what_they_take() -> None:
    times = []
    for timing_only in (False, True):
        compute = Compute(forward_s=1.0, backward_s=2.0)
        settings = Settings(epochs=2, batch_size=8)
        made = Simulation(
            SynchronousSGD(),
            tiny.problem(tiny.mlp),
            settings,
            2,
            network=free,
            compute=compute,
            timing_only=timing_only,
        )
        times.append(made.run().info["result"]["seconds"])
    assert times[0] == times[1]
