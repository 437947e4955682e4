"""The papers' learning-rate rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.laws import tiny
from tests.laws.train import train
from workbench import schedules
from workbench.algorithms import AsyncSGD, SynchronousSGD
from workbench.errors import ConfigError
from workbench.settings import Settings


def rates(lr: float, schedule: Any, num_updates: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    stepped = schedule(optimizer)
    found = []
    for _ in range(num_updates):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        stepped.step()
    return found


def test_synchronous_starts_n_times_higher_and_falls_by_the_decay_every_two_epochs() -> None:
    """4 workers of batch 5 on 100 samples: 5 updates an epoch, so 10 updates make the learning rate 0.94 of itself."""
    found = rates(*schedules.synchronous(4, 100, 5), 21)
    assert found[0] == pytest.approx(0.18)
    assert found[10] / found[0] == pytest.approx(0.94)
    assert found[20] / found[0] == pytest.approx(0.94**2)


def test_asynchronous_falls_as_much_in_as_many_epochs() -> None:
    """With 20 updates an epoch, on the same data."""
    found = rates(*schedules.asynchronous(100, 5), 41)
    assert found[0] == pytest.approx(0.045)
    assert found[40] / found[0] == pytest.approx(0.94)


@pytest.mark.parametrize(("algorithm", "rule"), [(SynchronousSGD(), "synchronous"), (AsyncSGD(), "asynchronous")])
def test_after_the_same_epochs_both_rules_have_fallen_alike(algorithm: Any, rule: str) -> None:
    """In a run: 24 samples, 3 workers, batch 2, so 4 steps an epoch; 8 steps are two epochs."""
    lr, schedule = schedules.synchronous(3, 24, 2) if rule == "synchronous" else schedules.asynchronous(24, 2)
    how = Settings(steps=8, batch_size=2, lr=lr, schedule=schedule)
    trained = train("simulated", 3, algorithm, tiny.problem(num_samples=24), how)
    last = [row["lr"] for rank in range(3) for row in trained.rows(rank) if row["lr"] is not None]
    assert min(last) == pytest.approx(lr * 0.94, rel=0.02)


def test_a_line_to_zero() -> None:
    assert rates(0.1, schedules.linear_to_zero(5, 4), 6) == pytest.approx([0.1, 0.1, 0.075, 0.05, 0.025, 0.0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: schedules.synchronous(0, 10, 1),
        lambda: schedules.asynchronous(10, -1),
        lambda: schedules.linear_to_zero(3, 4),
        lambda: schedules.synchronous(2, 10, 1, decay=float("nan")),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError):
        make()
