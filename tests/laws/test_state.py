"""State of each rank: what an algorithm declares as equal is equal, optimizer included, and the rest is saved for each rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.laws import tiny
from tests.laws.train import assert_same, train
from tests.laws.variants import in_step, name_of, variants
from workbench.laws.sentences import assert_near
from workbench.program import Replicas, Update
from workbench.runtimes.checkpoint.reader import leaves
from workbench.settings import Settings

STEPS, STOP = 6, 2


def groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups with their own rates and momenta."""
    first, second = parameters[:3], parameters[3:]
    return torch.optim.SGD([{"params": first, "momentum": 0.5}, {"params": second, "lr": 0.02}], lr=0.05, momentum=0.9)


OPTIMIZERS = {"momentum": tiny.momentum, "adam": tiny.adam, "groups": groups}
settings = partial(Settings, steps=STEPS, batch_size=3, timeout_s=30, seed=3, evaluate_every=0)
PARAMETERS_ONLY = [item for item in variants() if item.replicas == Replicas.PARAMETERS]


def optimizers_equal(saved: list[dict[str, Any]]) -> bool:
    """Whether the optimizers of all ranks have equal state."""
    first, *others = ([*leaves(one["replica"]["optimizer"])] for one in saved)
    return all(len(other) == len(first) and all(map(equal_leaves, other, first)) for other in others)


def equal_leaves(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_equal_replicas_have_equal_optimizers(optimizer: Any) -> None:
    """`EVERY_STEP` is of the whole replica. `PARAMETERS` is not, or the algorithm could promise more."""
    for algorithm in in_step(variants()):
        if not algorithm.replicas.equal_parameters:
            continue
        saved = train(
            "simulated", 3, algorithm, tiny.problem(), settings(optimizer=optimizer), stop_after=STOP
        ).checkpoint
        parameters = [torch.cat([value.reshape(-1) for value in one["replica"]["model"].values()]) for one in saved]
        for rank, other in enumerate(parameters):
            assert_near(f"{name_of(algorithm)}: parameters are equal", other, parameters[0], 0.0, f"on rank {rank}")
        assert optimizers_equal(saved) == (algorithm.replicas == Replicas.EVERY_STEP), name_of(algorithm)


def test_some_algorithms_declare_equal_parameters_only() -> None:
    assert {type(item).__name__ for item in PARAMETERS_ONLY} >= {"LocalSGD", "DiLoCo", "FedAvg", "SPARTA", "SlowMo"}
    assert all(item.update == Update.OWN for item in PARAMETERS_ONLY)
    assert not [item for item in variants() if item.replicas == Replicas.EVERY_STEP and item.update == Update.OWN]


def test_resumed_from_files_with_the_state_of_each_rank() -> None:
    """Ranks with equal parameters and different momenta, in the files of real ranks."""
    for number, algorithm in enumerate(PARAMETERS_ONLY):
        how = settings(optimizer=list(OPTIMIZERS.values())[number % len(OPTIMIZERS)])
        unbroken = train("simulated", 3, algorithm, tiny.problem(), how)
        first = train("torch", 3, algorithm, tiny.problem(), how, stop_after=STOP)
        second = train("torch", 3, algorithm, tiny.problem(), how, resume=first.checkpoint)
        for rank in range(3):
            law = f"{name_of(algorithm)}: a resumed run is the unbroken one, rank {rank}"
            joined = [*first.parameters[rank], *second.parameters[rank]]
            assert_same(joined, unbroken.parameters[rank], 1e-12, law)
