"""How many gradients an online quorum waits for: the same as by averaging every round that counts, at a fraction of the cost."""

from __future__ import annotations

import random
import tracemalloc
from collections import deque

import numpy as np
import pytest
import torch

from workbench.algorithms.quorum import MEMORY, ArrivalTimes, NoiseScale, best_quorum


class Readable:
    """Every round kept as a sorted list, and averaged when asked."""

    def __init__(self, num_workers: int) -> None:
        self.last: dict[int, float | None] = dict.fromkeys(range(num_workers))
        self.rounds: deque[list[float]] = deque(maxlen=MEMORY * num_workers)

    def add(self, worker: int, seconds: float) -> None:
        self.last[worker] = seconds
        known = [value for value in self.last.values() if value is not None]
        if len(known) == len(self.last):
            self.rounds.append(sorted(known))

    def forget(self, worker: int) -> None:
        del self.last[worker]
        self.rounds.clear()

    def means(self) -> list[float] | None:
        return [sum(column) / len(self.rounds) for column in zip(*self.rounds, strict=True)] if self.rounds else None


def seconds_of(kind: str, worker: int, chance: random.Random) -> float:
    if kind == "equal":
        return 0.1
    if kind == "two speeds":
        return 0.5 if worker == 0 else 0.1
    return chance.lognormvariate(-2.0, 0.4) * (5 if worker % 7 == 3 else 1)


@pytest.mark.parametrize("kind", ["drawn", "equal", "two speeds"])
@pytest.mark.parametrize("noise_scale", [0.0, 3.0, 40.0, float("inf")])
def test_the_choices_are_those_of_every_round_averaged(kind: str, noise_scale: float) -> None:
    """More than two full windows, one worker that leaves in the middle, one that leaves before it has come."""
    chance, num_workers = random.Random(5), 9
    fast, slow, workers = ArrivalTimes(num_workers), Readable(num_workers), list(range(num_workers))
    chosen = []
    for number in range(3 * MEMORY * num_workers):
        if number in (40, 300):
            gone = workers.pop(0 if number == 300 else -1)
            fast.forget(gone)
            slow.forget(gone)
        worker = chance.choice(workers if number > 40 else workers[:-1])
        took = seconds_of(kind, worker, chance)
        fast.add(worker, took)
        slow.add(worker, took)
        found, right = fast.means(), slow.means()
        assert (found is None) == (right is None)
        if found is not None and right is not None:
            assert found == pytest.approx(right, rel=1e-12)
            assert best_quorum(found, noise_scale) == best_quorum(right, noise_scale)
            chosen.append(best_quorum(found, noise_scale))
    assert len(chosen) > 2 * MEMORY * num_workers
    assert kind != "drawn" or noise_scale != 3.0 or len(set(chosen)) > 1, "the choice depends on the times"


def test_a_full_window_holds_a_few_numbers_for_each_arrival() -> None:
    """And not p numbers: of 400 workers every round would be 3,200 bytes."""
    num_workers, chance = 400, random.Random(0)
    tracemalloc.start()
    times = ArrivalTimes(num_workers)
    for number in range((MEMORY + 2) * num_workers):
        times.add(number % num_workers, chance.random())
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert times.means() is not None
    assert held / (MEMORY * num_workers) < 300


@pytest.mark.parametrize(("growth", "noise_scale", "best"), [(0.01, 4.0, 20), (0.04, 9.0, 15), (0.25, 16.0, 8)])
def test_the_best_quorum_of_times_on_a_line_is_that_of_calculus(growth: float, noise_scale: float, best: int) -> None:
    """t(N) = 1 + a N: the derivative of t(N) (1 + S/N) is zero at N = sqrt(S/a)."""
    assert best_quorum([1 + growth * count for count in range(1, 65)], noise_scale) == best == round((noise_scale / growth) ** 0.5)


def test_the_noise_scale_is_that_of_the_law_that_gradients_come_from() -> None:
    """Means and covariances are given: S = tr(covariance) / |mean|^2 = 0.8 * 50 / (50 * 0.4^2) = 5, whatever the number in an update."""
    chance, of_counts = np.random.default_rng(0), {}
    for count in (2, 3, 8):
        scale = NoiseScale(decay=0.999)
        for _ in range(8_000 // count):
            gradients = [torch.from_numpy(0.4 + chance.normal(0.0, 0.8**0.5, 50)) for _ in range(count)]
            for gradient in gradients:
                scale.add(gradient)
            scale.close(torch.stack(gradients).sum(0), count)
        of_counts[count] = scale.value()
    assert of_counts == {count: pytest.approx(5.0, rel=0.1) for count in of_counts}
