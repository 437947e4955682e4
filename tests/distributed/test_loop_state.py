"""State of each rank in a user's loop, for every algorithm: an unbroken loop, and one that is saved, loaded and ended within a period."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from tests.distributed.pool import shared_pool
from tests.laws import tiny
from tests.laws.test_state import OPTIMIZERS
from tests.laws.variants import in_step, name_of, representatives, variants
from workbench.algorithms import PartialAllReduce, SlowMo
from workbench.program import Algorithm, Replicas
from workbench.runtimes.user_loop.trainer import Trainer

NUM_STEPS, SAVED = 5, 3  # neither is a multiple of a period of the laws' variants with every=2
WRAPPED = [item for item in variants(2) if isinstance(item, SlowMo)]
ALGORITHMS = [
    *(item for item in in_step(representatives(2)) if item not in WRAPPED),
    *(item for item in variants(2) if item.replicas == Replicas.PARAMETERS and item not in WRAPPED),
    *WRAPPED,
    SlowMo(every=3, inner=PartialAllReduce(quorum="all")),
    SlowMo(every=2, inner=PartialAllReduce()),
]


def train(algorithm: Algorithm, optimizer: str, folder: str, first: int, last: int) -> torch.Tensor:
    """A loop from one step to another: it begins from the folder's checkpoint, or leaves one there if it is not the last."""
    from workbench.runtimes.rank.main import world_here

    rank, num_ranks = world_here()
    torch.manual_seed(rank)
    model = tiny.mlp()
    x, y = tiny.data(200)
    with Trainer(model, OPTIMIZERS[optimizer](list(model.parameters())), algorithm, timeout_s=20) as trainer:
        if first:
            assert trainer.load(folder)[0] == first
        for step in range(first, last):
            begin = 3 * (step * num_ranks + rank)
            part = slice(begin, begin + 3)
            trainer.step(partial(lambda part: nn.functional.cross_entropy(model(x[part]), y[part]), part))
        if folder and not first:
            trainer.save(folder)
    return parameters_to_vector(model.parameters()).detach()


def train_in_two_ways(rows: list[tuple[Algorithm, str]], folder: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each row the parameters at the end of an unbroken loop, and of one that continues from a checkpoint."""
    ends = []
    for number, (algorithm, optimizer) in enumerate(rows):
        kept = f"{folder}/{number}"
        whole = train(algorithm, optimizer, "", 0, NUM_STEPS)
        train(algorithm, optimizer, kept, 0, SAVED)
        ends.append((whole, train(algorithm, optimizer, kept, SAVED, NUM_STEPS)))
    return ends


@pytest.mark.parametrize("optimizer", ["adam", "groups"])
def test_a_loaded_loop_is_the_unbroken_one_for_every_algorithm(optimizer: str, tmp_path: Path) -> None:
    rows = [(item, optimizer) for item in ALGORITHMS]
    found = shared_pool("torch", 2, compiler=True).run(train_in_two_ways, rows, str(tmp_path))
    wrong = [
        f"{name_of(algorithm)} on rank {rank}"
        for rank, ends in enumerate(found)
        for (algorithm, _), (whole, loaded) in zip(rows, ends, strict=True)
        if not (loaded.isfinite().all() if algorithm.depends_on_timing else torch.equal(whole, loaded))
    ]
    assert not wrong
