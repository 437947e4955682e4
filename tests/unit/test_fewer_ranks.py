"""A rank that has another number, since ranks have left or come: what it began with counts on, data are dealt anew."""

from __future__ import annotations

import pytest
import torch

from tests.laws import tiny
from workbench.algorithms import SynchronousSGD
from workbench.errors import Diverged
from workbench.replica.local_training import LocalTraining
from workbench.settings import Settings


def test_a_loss_is_compared_with_what_the_rank_began_with() -> None:
    """Under its old number: one that has grown before ranks left is no new beginning."""
    how = Settings(steps=20, batch_size=2, divergence_ratio=10.0)
    worker = LocalTraining(SynchronousSGD(), tiny.problem(), how, 2, 3, torch.device("cpu"))
    worker.loss_watch.check(0.5, 0, 2)
    worker.set_rank(0, 2, (5, 30))
    worker.loss_watch.check(4.0, 5, 0)
    with pytest.raises(Diverged, match=r"the loss of rank 0 is 6 at step 6, more than 10 times its first loss 0\.5"):
        worker.loss_watch.check(6.0, 6, 0)
    assert worker.rank == 0
    assert [worker.sampler.samples_before(step) for step in (5, 6)] == [30, 34], (
        "two ranks with two samples each, behind what was dealt"
    )
