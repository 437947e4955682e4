"""Servers in fp16: each worker scales its own loss, and a gradient that overflows counts nothing.

The expected numbers come from a plain loop over the recorded order of updates, with torch alone.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn

from tests.laws import tiny
from tests.laws.train import COMPUTE, NETWORK, assert_same, relative_error, train
from tests.laws.variants import name_of, variants
from workbench.algorithms import (
    AsyncSGD,
    DelayCompensatedSGD,
    ParameterServerSGD,
    SoftsyncSGD,
    StaleSynchronousSGD,
    SynchronousSGD,
)
from workbench.algorithms.parameter_server import ServerAlgorithm
from workbench.problems.base import Problem
from workbench.problems.loading import fetch
from workbench.replica.local_training import sampler_of
from workbench.rng import derive_seed
from workbench.runtimes.checkpoint.files import complete_checkpoints
from workbench.runtimes.checkpoint.reader import read_rank_file
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings

STEPS, STOP, BATCH, LR, MOMENTUM = 12, 5, 3, 0.05, 0.5
SCALE = 2.0**16  # at the start
LARGE = {3: 40.0, 17: 40.0, 20: 150.0}  # sample -> factor of its features: their gradients overflow
ROUNDING = 1e-5  # of float32, over 36 updates

settings = partial(
    Settings,
    steps=STEPS,
    batch_size=BATCH,
    precision="fp16",
    seed=3,
    timeout_s=30,
    optimizer=partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM),
)


def linear() -> nn.Module:
    """Two layers without a bound, so a sample with large features has a large gradient."""
    return nn.Sequential(nn.Linear(tiny.NUM_FEATURES, 4), nn.Linear(4, tiny.NUM_CLASSES))


def problem(large: dict[int, float]) -> Problem:
    x, y = tiny.data(dtype=torch.float32)
    for sample, factor in large.items():
        x[sample] *= factor
    return tiny.problem(linear, train=(x, y), test=tiny.data(9, seed=1, dtype=torch.float32))


@final
class PlainLoop:
    """The updates of a recorded run with one shard, from their order, sources and staleness alone.

    Attributes:
        versions: the parameters after each update, flat.
        scales: of each worker. 1 forever with `scaled=False`, which is autocast alone.
        num_overflows: the gradients of each worker that were left out.
    """

    def __init__(
        self, algorithm: ServerAlgorithm, data: Problem, how: Settings, workers: int, *, scaled: bool = True
    ) -> None:
        self._algorithm, self._data = algorithm, data.train_data()
        self._sampler = sampler_of(data.train_source(), BATCH, workers, how.seed)
        torch.manual_seed(derive_seed(how.seed, "initial-weights"))
        self._model = data.model()
        self._velocity: Tensor | None = None
        self._taken = Counter[int]()
        self.versions = [torch.cat([param.detach().reshape(-1) for param in self._model.parameters()])]
        self.scales = dict.fromkeys(range(workers), SCALE if scaled else 1.0)
        self.num_overflows = Counter[int]()

    def _gradient(self, rank: int, version: int) -> tuple[Tensor, int] | None:
        """A worker's next gradient, at that version, and its number of samples; None if it overflows."""
        share = self._sampler.share(self._taken[rank], rank)
        self._taken[rank] += 1
        if not len(share):
            return None
        nn.utils.vector_to_parameters(self.versions[version].clone(), self._model.parameters())
        x, y = fetch(self._data, share)
        self._model.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(self._model(x), y)
        (loss * self.scales[rank]).backward()
        flat = torch.cat([param.grad.reshape(-1) for param in self._model.parameters()])  # type: ignore[union-attr]
        if not flat.isfinite().all():
            self.num_overflows[rank] += 1
            self.scales[rank] /= 2
            return None
        return flat / self.scales[rank], len(share)

    def update(self, update: dict[str, Any]) -> None:
        number, now = update["update"], self.versions[-1]
        assert number == len(self.versions)
        for rank, version in update["dropped"]:
            self._gradient(rank, version)
        parts, weights = [], []
        for rank, late in zip(update["sources"], update["staleness"], strict=True):
            found = self._gradient(rank, number - 1 - late)
            if found is None:
                continue
            g, weight = found
            if isinstance(self._algorithm, SoftsyncSGD):
                g = g / max(1, late)
            if isinstance(self._algorithm, DelayCompensatedSGD):
                g = g + self._algorithm.strength * g * g * (now - self.versions[number - 1 - late])
            parts.append(g * weight)
            weights.append(weight)
        if parts:
            mean = torch.stack(parts).sum(0) / sum(weights)
            self._velocity = mean if self._velocity is None else MOMENTUM * self._velocity + mean
            now = now - LR * self._velocity
        self.versions.append(now)


def scales_of(checkpoint: Any, workers: int) -> dict[int, float]:
    """The loss scale of each worker in a checkpoint."""
    if not isinstance(checkpoint, list):  # the folder of a run on real ranks
        newest = complete_checkpoints(Path(checkpoint))[0]
        checkpoint = [read_rank_file(newest.rank_file(rank)) for rank in range(workers)]
    return {rank: checkpoint[rank]["replica"]["loss_scale"][0] for rank in range(workers)}


SERVED = [
    ParameterServerSGD(),
    AsyncSGD(),
    AsyncSGD(dedicated=True, cutoff=1),
    SoftsyncSGD(splits=2),
    StaleSynchronousSGD(bound=1),
    DelayCompensatedSGD(strength=0.5),
]


@pytest.mark.parametrize(
    ("runtime", "algorithm"),
    [
        *[pytest.param("simulated", item, id=f"simulated-{item}") for item in SERVED],
        pytest.param("torch", AsyncSGD(dedicated=True), id="gloo, two workers and a server"),
        pytest.param("torch", ParameterServerSGD(), id="gloo, a server next to a worker"),
        pytest.param("mpi", AsyncSGD(dedicated=True), id="mpi, two workers and a server", marks=pytest.mark.mpi),
    ],
)
def test_an_overflow_counts_nothing_and_halves_its_workers_scale_alone(
    runtime: str, algorithm: ServerAlgorithm
) -> None:
    """Also across a stop: the scales continue from the checkpoint, or the large samples would overflow again."""
    workers, data, how = algorithm.roles(3).num_computing, problem(LARGE), settings()
    first = train(runtime, 3, algorithm, data, how, stop_after=STOP)
    second = train(runtime, 3, algorithm, data, how, resume=first.checkpoint)
    expected = PlainLoop(algorithm, data, how, workers)
    overflows = []
    for part in (first, second):
        for update in part.run.updates():
            expected.update(update)
        for rank in range(workers):
            assert_same(part.parameters[rank][-1:], expected.versions[-1:], ROUNDING)
        if part is first:
            assert scales_of(first.checkpoint, workers) == expected.scales
        overflows.append(expected.num_overflows.total())
    assert 0 < overflows[0] < overflows[1], "overflows before and after the stop"
    assert len(set(expected.scales.values())) > 1, "each worker has its own scale"


@pytest.mark.parametrize("runtime", ["simulated", "torch"])
@pytest.mark.parametrize("algorithm", [AsyncSGD(dedicated=True), ParameterServerSGD(dedicated=True)], ids=str)
def test_without_an_overflow_it_is_autocast_alone(algorithm: ServerAlgorithm, runtime: str) -> None:
    """The scale is a power of two, so it changes only gradients that are too small for 16 bits."""
    data, how = problem({}), settings()
    found = train(runtime, 3, algorithm, data, how)
    expected = PlainLoop(algorithm, data, how, 2, scaled=False)
    for update in found.run.updates():
        expected.update(update)
    assert not expected.num_overflows
    assert_same(found.parameters[0][-1:], expected.versions[-1:], 1e-4)
    single = train("simulated", 3, algorithm, data, settings(precision="fp32"))
    assert relative_error(found.final, single.final) > ROUNDING, "it computed in 16 bits"


ONE_WORKER = [item for item in variants(1) if item.requires.servers and getattr(item, "clip_norm", None) is None]


@pytest.mark.parametrize("algorithm", ONE_WORKER, ids=name_of)
def test_one_worker_is_synchronous_sgd_in_fp16(algorithm: ServerAlgorithm) -> None:
    """That checks the sum of gradients; with one worker it is the worker's own."""
    data, how = problem(LARGE), settings()
    expected = train("simulated", 1, SynchronousSGD(), data, how)
    found = train("simulated", 1, algorithm, data, how)
    assert_same(found.parameters[0], expected.parameters[0], ROUNDING)
    steps = expected.parameters[0]
    assert any(torch.equal(one, two) for one, two in pairwise(steps[:-1])), "no gradient overflowed"


def test_a_push_waits_for_the_end_of_backward() -> None:
    """A shard cannot be pushed before the others are known to be finite: as with a limit of the norm."""
    seconds = {}
    for name, how in {
        "fp16": settings(),
        "bf16": settings(precision="bf16"),
        "limit": settings(precision="fp32", max_grad_norm=1e9),
    }.items():
        simulation = Simulation(
            AsyncSGD(shards=3), problem({}), how, 3, network=NETWORK, compute=COMPUTE, timing_only=True
        )
        simulation.run()
        seconds[name] = simulation.seconds
    assert seconds["bf16"] < seconds["fp16"] == seconds["limit"]
