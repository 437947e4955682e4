"""A problem whose gradients do not depend on the parameters: NumPy adds up in advance what a run must apply.

The loss of a batch is the mean over its samples of <wide, a> + <bias, b> + flag * <rare, c>, so a sample's gradient is
(a, b, flag c). With plain SGD of learning rate 1, the parameters at the begin minus those at the end are the sum of all
that was applied.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from workbench.algorithms.outer_optimizer import OuterAlgorithm
from workbench.costs import Compute, Lognormal, Network
from workbench.problems.base import Problem, Sampler
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings

Array = NDArray[np.float64]
WIDE, BIAS, RARE = (6, 5), (7,), (4, 4)
SIZES = (30, 7, 16)
NETWORK = Network(latency_s=0.4, bandwidth_bytes_per_s=2e3)  # sums take about as long as steps
COMPUTE = Compute(forward_s=0.3, backward_s=0.7, stragglers=(Lognormal(sigma=0.8),))


class Linear(nn.Module):
    """Three parameters, of which `rare` is used only by a batch with a flagged sample."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.bias, self.rare = (
            nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in (WIDE, BIAS, RARE)
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, flag = x.split([*SIZES, 1], dim=1)
        out = a @ self.wide.view(-1) + b @ self.bias
        return out + flag[:, 0] * (c @ self.rare.view(-1)) if bool((flag > 0).any()) else out


def mean_loss(out: Tensor, _: Tensor) -> Tensor:
    return out.mean()


@final
@dataclass(frozen=True, slots=True)
class Situation:
    """The samples, and those that spoil their batch.

    Attributes:
        flagged: one sample in this many uses `rare`; 0: none.
        spoilt: these samples are NaN, and their rank's gradient of that step is left out.
        constant: all samples are ones.
    """

    num_samples: int
    num_ranks: int = 4
    batch_size: int = 8
    flagged: int = 1
    spoilt: tuple[int, ...] = ()
    constant: bool = False

    def samples(self) -> Array:
        """(N, 54): (a, b, flag c, flag) of each sample, with a mean that is not zero, so that what is lost adds up."""
        if self.constant:
            return np.ones((self.num_samples, sum(SIZES) + 1))
        rng = np.random.default_rng(3)
        values = rng.standard_normal((self.num_samples, sum(SIZES) + 1)) + np.linspace(-1, 1, sum(SIZES) + 1)
        values[:, -1] = [self.flagged > 0 and number % self.flagged == 0 for number in range(self.num_samples)]
        values[list(self.spoilt)] = np.nan
        return values

    def problem(self) -> Problem:
        x = torch.from_numpy(self.samples())
        return Problem(
            model=Linear,
            loss=mean_loss,
            train=(x, torch.zeros(len(x))),
            test=None,
            name="owed",
            batch_size=self.batch_size,
        )

    def settings(self, steps: int, seed: int) -> Settings:
        sgd = partial(torch.optim.SGD, lr=1.0)
        return Settings(
            steps=steps,
            batch_size=self.batch_size,
            optimizer=sgd,
            seed=seed,
            on_bad_gradient="skip" if self.spoilt else "stop",
        )

    def owed(self, algorithm: Algorithm, steps: int, seed: int) -> Array:
        """(53,): the sum over steps of the mean gradient over all samples of ranks that are not left out.

        Where ranks step alone, the mean over ranks of the sum of their own.
        """
        samples, sampler = self.samples(), Sampler(self.num_samples, self.batch_size, self.num_ranks, seed)
        gradients = np.concatenate(
            [samples[:, : SIZES[0] + SIZES[1]], samples[:, SIZES[0] + SIZES[1] : -1] * samples[:, -1:]], axis=1
        )
        total = np.zeros(sum(SIZES))
        for step in range(steps):
            batches = [gradients[sampler.share(step, rank).numpy()] for rank in range(self.num_ranks)]
            good = [batch for batch in batches if len(batch) and np.isfinite(batch).all()]
            if isinstance(algorithm, OuterAlgorithm):
                total += sum((batch.mean(axis=0) for batch in good), np.zeros(sum(SIZES))) / self.num_ranks
            elif good:
                total += np.concatenate(good).mean(axis=0)
        return total


@final
@dataclass(frozen=True, slots=True)
class Ended:
    """What a run has applied on each rank, and what ranks have left over, (53,) each."""

    applied: list[Array]
    left: Array


def run(algorithm: Algorithm, situation: Situation, steps: int, seed: int = 0) -> Ended:
    """On the simulator, with workers of which some are late now and then."""
    simulation = Simulation(
        algorithm,
        situation.problem(),
        situation.settings(steps, seed),
        situation.num_ranks,
        network=NETWORK,
        compute=COMPUTE,
    )
    simulation.run()
    return ended(simulation)


def ended(simulation: Simulation) -> Ended:
    """Of a simulation that is over."""
    layout = simulation.workers[0].trained.layout
    left = np.zeros(sum(SIZES))
    starts = np.cumsum([0, *SIZES])
    owners: dict[tuple[str, str], list[Array]] = {}
    for ctx in simulation.contexts:
        for name, value in ctx.memory.items():
            *lane, kind, of = name.split("/")
            if kind == "low-rank.residual":
                number = int(of)
                left[starts[number] : starts[number + 1]] += value.numpy().reshape(-1)
            elif kind == "once.residual":
                left += _spread(layout, int(of.removeprefix("bucket-")), value.numpy())
            elif kind == "once.owner":
                owners.setdefault(("/".join(lane), of), []).append(value.numpy())
    for (_, of), blocks in owners.items():
        left += _spread(layout, int(of.removeprefix("bucket-")), np.concatenate(blocks))
    ends = [worker.trained.read_parameters().numpy() for worker in simulation.workers]
    return Ended([-end for end in ends], left)


def _spread(layout: object, bucket: int, values: Array) -> Array:
    """A bucket's values where the parameters lie in order of registration; parameters lie in a bucket in reverse order."""
    found, starts, place = np.zeros(sum(SIZES)), np.cumsum([0, *SIZES]), 0
    for slot in layout.buckets[bucket].slots:  # type: ignore[attr-defined]
        found[starts[slot.index] : starts[slot.index + 1]] = values[place : place + slot.numel]
        place += slot.numel
    return found
