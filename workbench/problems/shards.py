"""Data that stay where they are: each worker samples from a shard of its own, never from another's."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import torch

from workbench.errors import ConfigError
from workbench.problems.base import Problem, Sampler, fetch
from workbench.rng import generator

Cut = Literal["random", "class"]


def with_shards(problem: Problem, cut: Cut, *, workers: int, epochs: int, seed: int, batch_size: int | None = None) -> Problem:
    """The problem with its training data dealt to workers once: a run of one epoch of it is `epochs` of the shards.

    Each worker passes over its shard again and again, each time in a new order; all shards have as many samples, the few left
    over are nowhere. What a run takes at a step follows from its seed, so the samples can be laid in that order: train with the
    same `workers`, `batch_size` and `seed`, and `epochs=1`.

    Args:
        cut: "random", or "class": sorted by label, so that a worker has samples of few classes.

    Raises:
        ConfigError: another cut; fewer samples than workers.

    Paper: daily2016leveraging, section 3 (partitioned once, nothing exchanged).
    """
    if cut not in get_args(Cut):
        raise ConfigError(f"cut={cut!r}: choose {' or '.join(get_args(Cut))}")
    size = problem.num_samples() // workers
    if size < 1:
        raise ConfigError(f"workers={workers}: at most one for each of the {problem.num_samples()} samples")
    inputs, labels = fetch(problem.train_data(), list(range(problem.num_samples())))
    draws = generator(seed, "shards")
    order = draws.permutation(len(labels))
    if cut == "class":
        order = order[np.argsort(labels.numpy()[order], kind="stable")]
    shards = order[: size * workers].reshape(workers, size)
    passes = [np.concatenate([draws.permutation(shard) for _ in range(epochs)]) for shard in shards]
    sampler = Sampler(epochs * size * workers, batch_size or problem.batch_size, workers, seed)
    laid, taken = np.empty(sampler.num_samples, dtype=np.int64), [0] * workers
    for step, worker in ((step, worker) for step in range(sampler.steps_per_epoch) for worker in range(workers)):
        places = sampler.share(step, worker).numpy()
        laid[places] = passes[worker][taken[worker] : taken[worker] + len(places)]
        taken[worker] += len(places)
    index = torch.from_numpy(laid)
    return replace(problem, train=(inputs[index], labels[index]), name=f"{problem.name}, shards by {cut}")
