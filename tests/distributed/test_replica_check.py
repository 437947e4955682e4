"""Replicas that a user's code makes unequal are found; equal ones, and those that differ by design, train as before."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import ClassVar, final

import pytest
import torch
from torch import nn

from tests.distributed.pool import shared_pool
from tests.laws import tiny
from tests.laws.train import make_job, on_real_runtimes
from workbench.algorithms import LayerwiseSGD, LocalSGD, PipeSGD, SynchronousSGD
from workbench.errors import RankMismatch
from workbench.ops import AllReduce, Apply, Backward, EndStep, Program
from workbench.program import Algorithm, Card, Context
from workbench.runtimes.rank.main import run_rank
from workbench.runtimes.user_loop.trainer import Trainer
from workbench.settings import Settings

P = 2
SPOILED_AT = 5  # step
NUM_STEPS = 10


def trained(algorithm: Algorithm, change: float, check_replicas: int | None) -> tuple[list[float], list[str]]:
    """Train on a rank; before step 5, add a number to the second layer's bias on rank 1. Return weights and warnings."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = {} if check_replicas is None else {"check_replicas": check_replicas}
    with warnings.catch_warnings(record=True) as shown, Trainer(model, optimizer, algorithm, **options) as trainer:
        warnings.simplefilter("always")
        for step in range(NUM_STEPS):
            if step == SPOILED_AT and trainer.rank == 1:
                with torch.no_grad():
                    model[2].bias += change
            x = torch.full((2, 3), 0.1 * (1 + step + trainer.rank))
            trainer.step(lambda x=x: model(x).square().mean())
    weights = torch.cat([param.detach().reshape(-1) for param in model.parameters()]).tolist()
    return weights, [str(one.message) for one in shown]


@on_real_runtimes
@pytest.mark.parametrize(("check_replicas", "step", "before"), [(None, 7, 3), (1, 5, 4), (6, 5, 3)])
def test_a_change_of_one_rank_alone_is_found(runtime: str, check_replicas: int | None, step: int, before: int) -> None:
    calls = [(trained, (SynchronousSGD(), 0.05, check_replicas))] * P
    for outcome in shared_pool(runtime, P).outcomes(calls):
        assert isinstance(outcome.error, RankMismatch), outcome.error
        text = str(outcome.error)
        assert f"after step {step}, 2.bias of rank 1 differs from rank 0's by up to 0.05. " in text
        assert f"They were equal after step {before}, and SynchronousSGD keeps them so" in text


def test_without_the_check_it_is_not_seen() -> None:
    (first, _), (second, _) = shared_pool("torch", P).run(trained, SynchronousSGD(), 0.05, 0)
    assert first != second


@pytest.mark.parametrize(
    "algorithm", [SynchronousSGD(), PipeSGD(width=2), LayerwiseSGD(bucket_bytes=0), LocalSGD(every=1)], ids=str
)
def test_equal_replicas_train_as_without_it(algorithm: Algorithm) -> None:
    checked = shared_pool("torch", P).run(trained, algorithm, 0.0, 1)
    assert checked == shared_pool("torch", P).run(trained, algorithm, 0.0, 0)
    assert all(shown == [] for _, shown in checked)


def test_replicas_that_differ_by_design_are_compared_at_the_end_only() -> None:
    """A change between two averages is averaged too."""
    (first, _), (second, _) = shared_pool("torch", P).run(trained, LocalSGD(every=4), 0.05, 1)
    assert first == second


def test_rounding_is_a_warning() -> None:
    (_, shown), (_, other) = shared_pool("torch", P).run(trained, SynchronousSGD(), 1e-7, None)
    assert other == [] and len(shown) == 1, "rank 0 warns once"
    assert "2.bias of rank 1 differs from rank 0's by up to" in shown[0] and "the run continues" in shown[0]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class UnequalSGD(Algorithm):
    """w_r[t+1] = w_r[t] - (1 + r/10) lr * mean_i g_i(w[t]),   though it declares equal replicas"""

    card: ClassVar[Card] = Card(paper="", staleness="0", bytes_per_step="", memory="none")

    def worker(self, ctx: Context) -> Program:
        for step in ctx.steps():
            total = yield AllReduce((yield Backward(step)))
            yield Apply(total, lr_scale=1 + ctx.rank / 10)
            yield EndStep(step)


@on_real_runtimes
def test_an_algorithm_that_declares_what_is_not_so(runtime: str) -> None:
    how = Settings(steps=4, batch_size=3, timeout_s=30)
    job = make_job(runtime, P, UnequalSGD(), tiny.problem(), how)
    for outcome in shared_pool(runtime, P).outcomes([(run_rank, (job,))] * P):
        assert isinstance(outcome.error, RankMismatch), outcome.error
        assert "after step 0, " in str(outcome.error) and "equal at the start" in str(outcome.error)
    unchecked = make_job(runtime, P, UnequalSGD(), tiny.problem(), replace(how, check_replicas=0))
    shared_pool(runtime, P).run(run_rank, unchecked)
