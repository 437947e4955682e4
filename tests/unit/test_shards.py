"""Shards: who takes what."""

from __future__ import annotations

import pytest
import torch

from workbench.errors import ConfigError
from workbench.problems.base import Problem, Sampler, fetch
from workbench.problems.shards import with_shards

SAMPLES, WORKERS, EPOCHS, BATCH = 41, 4, 3, 3
LABELS = torch.arange(SAMPLES) % 4


def numbered() -> Problem:
    """Samples that say their number."""
    numbers = torch.arange(SAMPLES, dtype=torch.float32).unsqueeze(1)
    return Problem(model=lambda: torch.nn.Linear(1, 4), loss=torch.nn.functional.cross_entropy, train=(numbers, LABELS))


def taken(cut: str) -> list[list[int]]:
    """By worker, the numbers of the samples of a run of one epoch."""
    problem = with_shards(numbered(), cut, workers=WORKERS, epochs=EPOCHS, seed=5, batch_size=BATCH)  # type: ignore[arg-type]  # one is wrong
    sampler = Sampler(problem.num_samples(), BATCH, WORKERS, 5)
    data = problem.train_data()
    shares = [torch.cat([sampler.share(step, worker) for step in range(sampler.steps_per_epoch)]) for worker in range(WORKERS)]
    return [fetch(data, share)[0].flatten().int().tolist() for share in shares]


@pytest.mark.parametrize("cut", ["random", "class"])
def test_a_worker_passes_over_its_own_shard_and_no_other(cut: str) -> None:
    found = taken(cut)
    size = SAMPLES // WORKERS
    shards = [set(numbers[:size]) for numbers in found]
    assert [len(shard) for shard in shards] == [size] * WORKERS
    assert len(set().union(*shards)) == size * WORKERS
    for numbers, shard in zip(found, shards, strict=True):
        passes = [numbers[start : start + size] for start in range(0, EPOCHS * size, size)]
        assert all(set(one) == shard for one in passes)
        assert passes[0] != passes[1]


def test_shards_by_class_hold_few_classes() -> None:
    classes = [len({int(LABELS[number]) for number in numbers}) for numbers in taken("class")]
    assert max(classes) <= 2
    assert min(len({int(LABELS[number]) for number in numbers}) for numbers in taken("random")) > 2


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="random or class"):
        taken("size")
    with pytest.raises(ConfigError, match="at most one for each"):
        with_shards(numbered(), "random", workers=SAMPLES + 1, epochs=1, seed=0)
