"""Skewed data: every worker draws from its own shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset, TensorDataset

from workbench.errors import ConfigError
from workbench.problems.base import Problem, Sampler
from workbench.rng import generator


def shards_by_label(labels: Sequence[int], num_workers: int) -> list[list[int]]:
    """Sort samples by label and cut them into nearly equal shards, so that each worker has one class or few.

    >>> shards_by_label([1, 0, 1, 0], 2)
    [[1, 3], [0, 2]]

    Raises:
        ConfigError: there are fewer samples than workers.
    """
    order = np.argsort(np.asarray(labels), kind="stable")
    if not 1 <= num_workers <= len(order):
        raise ConfigError(f"num_workers={num_workers} of {len(order)} samples: give 1 to the number of samples")
    return [part.tolist() for part in np.array_split(order, num_workers)]


def shuffled_shards(num_samples: int, num_workers: int, seed: int) -> list[list[int]]:
    """Distribute samples in a random order to the workers, in turn.

    >>> sorted(sum(shuffled_shards(5, 2, seed=0), []))
    [0, 1, 2, 3, 4]
    """
    order = np.random.default_rng(seed).permutation(num_samples).tolist()
    return [order[rank::num_workers] for rank in range(num_workers)]


def main_classes(labels: Sequence[int], shards: Sequence[Sequence[int]], share: float = 0.4) -> list[int]:
    """Return the classes that are more than a `share` of one of these shards, ascending.

    >>> main_classes([0, 0, 1, 2], [[0, 1, 2], [3]])
    [0, 2]
    """
    counted = np.asarray(labels)
    held = {int(label) for shard in shards for label in set(labels) if np.mean(counted[list(shard)] == label) > share}
    return sorted(held)


def of_classes(problem: Problem, classes: Sequence[int]) -> Problem:
    """Return the same problem, evaluated only on the test samples of these classes.

    Raises:
        ConfigError: the problem has no test set.
    """
    data: Any = problem.test_data()
    if data is None:
        raise ConfigError(f"{problem.name} has no test set: give a problem with one")
    places = [place for place, (_, label) in enumerate(data) if int(label) in {*classes}]
    return replace(problem, test=partial(Subset, data, places))


def sharded(problem: Problem, shards: Sequence[Sequence[int]], *, batch_size: int, steps: int, seed: int) -> Problem:
    """Return the same problem, where worker r draws from `shards[r]` only.

    The sampler shuffles all samples and gives each worker its share (`problems.base.Sampler`). The returned
    problem's training set has the samples that a run of `steps` steps draws in its only epoch. Their order puts the
    share of rank r at any step in shard r. Train it with the same number of workers, batch size, steps and seed;
    otherwise the shards mix.

    Args:
        problem: the problem with the samples.
        shards: for each worker, the indices of its samples in the training set. Each shard is repeated in random order.
        batch_size, steps, seed: as in the run's `Settings`.

    Raises:
        ConfigError: a shard is empty.
    """
    if not shards or not all(len(shard) for shard in shards):
        raise ConfigError("shards: give a list of samples for each worker, none of them empty")
    num_workers = len(shards)
    sampler = Sampler(steps * batch_size * num_workers, batch_size, num_workers, seed)
    places = np.empty(sampler.num_samples, dtype=np.int64)
    for rank, shard in enumerate(shards):
        rounds = -(-steps * batch_size // len(shard))
        drawn = np.concatenate(
            [generator(seed, "shard-order", rank, number).permutation(shard) for number in range(rounds)]
        )
        for step in range(steps):
            places[sampler.share(step, rank).numpy()] = drawn[step * batch_size : (step + 1) * batch_size]
    return replace(problem, train=partial(_subset, problem, places), name=f"{problem.name}, {num_workers} shards")


def _subset(problem: Problem, places: np.ndarray) -> Dataset[Any]:
    data = problem.train_data()
    if isinstance(data, TensorDataset):
        return TensorDataset(*(tensor[places] for tensor in data.tensors))
    return Subset(data, places.tolist())
