"""How many gradients an online quorum waits for: the same as by averaging every round that counts, at a fraction of the cost."""

from __future__ import annotations

import random
import tracemalloc
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from workbench.algorithms import BackupSGD, OnlineBackupSGD
from workbench.algorithms.quorum import MEMORY, ArrivalTimes, FixedQuorum, NoiseScale, OnlineQuorum, best_quorum
from workbench.errors import ConfigError
from workbench.gradients import WEIGHT, Gradient, build_layout


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
    assert (
        best_quorum([1 + growth * count for count in range(1, 65)], noise_scale)
        == best
        == round((noise_scale / growth) ** 0.5)
    )


def test_the_noise_scale_is_that_of_the_law_that_gradients_come_from() -> None:
    """Means and covariances are given: S = tr(covariance) / |mean|^2 = 0.8 * 50 / (50 * 0.4^2) = 5, for any update size."""
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


def gradient_of(values: list[float]) -> Gradient:
    """One bucket of a gradient of weight 1."""
    layout = build_layout([("w", nn.Parameter(torch.zeros(len(values))))])
    gradient = Gradient(torch.zeros(layout.numel), layout, step=0, version=0, bucket=0)
    gradient.flat[: len(values)] = torch.tensor(values)
    gradient.tail()[WEIGHT] = 1.0
    return gradient


def report(quorum: FixedQuorum | OnlineQuorum, seconds: list[float], values: list[list[float]], now_s: float) -> None:
    """An update that begins at `now_s`: worker k arrives after `seconds[k]` with a gradient, all are used, and all are answered."""
    total = gradient_of([sum(column) for column in zip(*values, strict=True)])
    for worker, (took, value) in enumerate(zip(seconds, values, strict=True)):
        quorum.arrived(worker, now_s + took)
        for request in quorum.accepted(gradient_of(value)):
            request.action()
    quorum.complete(total, len(seconds))
    for worker in range(len(seconds)):
        quorum.answered(worker, now_s + max(seconds))


SAME = [[1.0, 2.0]] * 3


def test_a_fixed_quorum_stays() -> None:
    quorum = FixedQuorum(2)
    report(quorum, [1.0, 1.1, 9.0], SAME, now_s=0.0)
    quorum.left(1)
    assert quorum.size == 2


def test_an_online_quorum_is_chosen_from_the_times_since_the_answers() -> None:
    """S = 1: of t = 1, 1.1, 9 the products t (1 + 1/N) are 2, 1.65, 12.

    Then all are equally quick, and more gradients are better. Late in the run the times of the beginning give 2 again:
    times since the beginning of the run would differ little by then.
    """
    quorum = OnlineQuorum(3, 1.0, now_s=5.0)
    assert quorum.size == 3, "nothing is known"
    report(quorum, [1.0, 1.1, 9.0], SAME, now_s=5.0)
    assert quorum.size == 2
    now_s = 14.0
    for _ in range(3 * MEMORY):
        report(quorum, [1.0, 1.0, 1.0], SAME, now_s)
        now_s += 1.0
    assert quorum.size == 3
    now_s = 1000.0
    for worker in range(3):
        quorum.answered(worker, now_s)
    for _ in range(3 * MEMORY):
        report(quorum, [1.0, 1.1, 9.0], SAME, now_s)
        now_s += 9.0
    assert quorum.size == 2
    quorum.left(2)
    report(quorum, [1.0, 1.0], SAME[:2], now_s)
    assert quorum.size == 2


def test_an_online_quorum_that_measures_noise_waits_for_two() -> None:
    """Equal gradients have no noise: one would do, and would be the last to be measured. A given S of 0 takes one."""
    for noise_scale, size in ((None, 2), (0.0, 1)):
        quorum = OnlineBackupSGD(noise_scale=noise_scale).quorum(3, now_s=0.0)
        report(quorum, [1.0, 2.0, 3.0], [[1.0, 2.0], [1.0, 2.0], [1.0, 2.1]], now_s=0.0)
        assert quorum.size == size


def test_backups_chosen_online_is_an_algorithm_of_its_own() -> None:
    with pytest.raises(ConfigError, match="OnlineBackupSGD chooses b itself"):
        BackupSGD(backups="online")  # type: ignore[arg-type]  # what an older script says
