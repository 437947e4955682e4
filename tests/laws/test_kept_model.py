"""The model that was evaluated is the model that is kept, and the record says which it is, for runs that ended and that were stopped."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.laws import tiny
from tests.laws.test_averages import loss_at
from tests.laws.train import by_turns, train
from tests.laws.variants import in_step, name_of, representatives
from workbench.algorithms import ADPSGD, DPSGD, SPARTA, LocalSGD, NoCommunication, PipeSGD, SlowMo
from workbench.laws.sentences import assert_holds
from workbench.program import Algorithm
from workbench.settings import Settings
from workbench.trace.run import Run

STEPS, STOP = 6, 3
settings = partial(Settings, steps=STEPS, batch_size=4, optimizer=tiny.momentum, evaluate_every=1, timeout_s=30)
STOPPED = [LocalSGD(every=3), DPSGD(), SPARTA(), SlowMo(every=3, inner=DPSGD()), PipeSGD(), ADPSGD()]


def loss_of_kept(run: Run, *, average: bool = False) -> float:
    """Test loss of the model that the run has kept."""
    problem = tiny.problem()
    model = run.model(problem, average=average)
    x, y = problem.test_data().tensors  # type: ignore[union-attr]
    with torch.no_grad():
        return float(cross_entropy(model(x), y))


def check(algorithm: Algorithm, runtime: str, *, stop: bool, ema_decay: float | None) -> None:
    """The kept weights, or their moving average, have the loss of the last evaluation."""
    how = settings(ema_decay=ema_decay)
    run = train(runtime, 3, algorithm, tiny.problem(), how, stop_after=STOP if stop else None).run
    last = run.evaluations()[-1]
    law = f"{name_of(algorithm)}: the model that was evaluated is kept"
    where = f"{'stopped' if stop else 'finished'} on {runtime}, moving average {ema_decay}"
    kept = loss_of_kept(run, average=ema_decay is not None)
    same = kept == pytest.approx(last["test_loss"], rel=1e-12)
    assert_holds(law, same, f"{where}: {kept} is kept, and {last['test_loss']} was evaluated after step {last['step']}")


@pytest.mark.parametrize("algorithm", representatives(), ids=name_of)
def test_the_evaluated_model_is_kept(algorithm: Algorithm) -> None:
    for stop in (False, True):
        for ema_decay in (None, 0.7):
            check(algorithm, "simulated", stop=stop, ema_decay=ema_decay)


@by_turns(STOPPED, turn=0)
def test_real_ranks_keep_it_too(algorithm: Algorithm, runtime: str) -> None:
    check(algorithm, runtime, stop=True, ema_decay=None)
    check(algorithm, runtime, stop=False, ema_decay=0.7)
    check(algorithm, runtime, stop=True, ema_decay=0.7)


@pytest.mark.parametrize(
    "algorithm",
    [item for item in representatives() if not item.replicas.equal_parameters and not item.requires.servers],
    ids=name_of,
)
def test_the_record_says_what_was_evaluated(algorithm: Algorithm) -> None:
    """The mean of all replicas, or rank 0's: after a step within a period their losses differ."""
    found = train("simulated", 3, algorithm, tiny.problem(), settings())
    losses = [row["test_loss"] for row in found.run.evaluations()]

    def losses_at(ends: list[Tensor]) -> list[float]:
        return [loss_at(tiny.problem(), end) for end in ends]

    means = losses_at([torch.stack(replicas).mean(0) for replicas in zip(*found.parameters, strict=True)][: STEPS - 1])
    first = losses_at(found.parameters[0][: STEPS - 1])
    assert means != pytest.approx(first, rel=1e-6)
    expected = {"the mean of all replicas": means, "rank 0's replica": first, "rank 0's replica alone": first}
    assert losses[: STEPS - 1] == pytest.approx(expected[found.run.info["evaluated"]], rel=1e-9)


def test_only_ranks_that_wait_for_each_other_evaluate_their_mean() -> None:
    for algorithm in (ADPSGD(), NoCommunication()):
        assert algorithm not in in_step([algorithm])
        run = train("simulated", 3, algorithm, tiny.problem(), settings()).run
        assert run.evaluated.startswith("accuracy is of rank 0's replica")
