"""Shards of a skewed problem: each worker's batches are of its own shard, in every step."""

from __future__ import annotations

import pytest
import torch

from workbench.errors import ConfigError
from workbench.problems import Problem, get
from workbench.problems.base import Sampler
from workbench.problems.loading import fetch
from workbench.problems.shards import sharded, shards_by_label


@pytest.mark.parametrize("as_list", [False, True])
def test_each_worker_draws_from_its_shard(as_list: bool) -> None:
    labels = [place % 3 for place in range(20)]
    train = [(torch.tensor([float(place)]), label) for place, label in enumerate(labels)]
    data = train if as_list else (torch.arange(20.0).unsqueeze(1), torch.tensor(labels))
    problem = Problem(model=lambda: torch.nn.Linear(1, 3), loss=torch.nn.functional.cross_entropy, train=data)
    shards = shards_by_label(labels, 4)
    skewed = sharded(problem, shards, batch_size=3, steps=5, seed=7)
    sampler = Sampler(skewed.num_samples(), 3, 4, 7)
    assert sampler.steps_per_epoch == 5
    for rank, shard in enumerate(shards):
        drawn = [
            int(value)
            for step in range(5)
            for value in fetch(skewed.train_data(), sampler.share(step, rank))[0].flatten()
        ]
        assert set(drawn) == set(shard) and len(drawn) == 15, "all of it, and nothing else"


def test_shards_of_digits_are_classes() -> None:
    labels = get("digits-softmax").train_data().tensors[1].tolist()  # type: ignore[attr-defined]
    for worker, shard in enumerate(shards_by_label(labels, 10)):
        assert sum(labels[place] == worker for place in shard) > 0.9 * len(shard)


def test_an_empty_shard_is_refused() -> None:
    with pytest.raises(ConfigError, match="none of them empty"):
        sharded(get("digits-softmax"), [[0], []], batch_size=1, steps=1, seed=0)
    with pytest.raises(ConfigError, match="give 1 to the number of samples"):
        shards_by_label([0, 1], 3)
