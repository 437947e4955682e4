"""The `lr` of a row is the rate with which the optimizer stepped: read in `step()` of an optimizer of the user's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import workbench as wb
from tests.laws import tiny
from workbench import costs
from workbench.program import Algorithm
from workbench.runtimes.user_loop.trainer import Trainer
from workbench.trace.store import list_runs

STEPS = 8
compute = costs.Compute(forward_s=1e-3, backward_s=1e-3)
used: dict[int, list[float]] = {}  # optimizer, in the order in which they were made -> rates of its steps


class Noting(torch.optim.SGD):
    """SGD that notes the rate of each of its steps."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.rates = used.setdefault(len(used), [])

    def step(self, closure: Any = None) -> Any:
        self.rates.append(self.param_groups[0]["lr"])
        return super().step(closure)


schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)


@pytest.mark.parametrize(
    ("algorithm", "late"),
    [
        (wb.SynchronousSGD(), 0),
        (wb.PipeSGD(width=2), 1),
        (wb.PipeSGD(width=3), 2),
        (wb.LocalSGD(every=3), 0),
        (wb.DPSGD(), 0),
        (wb.DiLoCo(every=3), 0),
    ],
    ids=str,
)
def test_a_row_has_the_rate_of_its_update(algorithm: Algorithm, late: int) -> None:
    """A schedule has advanced when the row is written. A gradient that is late is applied with the present rate."""
    used.clear()
    problem = tiny.problem()
    run = wb.simulate(
        algorithm,
        problem,
        workers=2,
        steps=STEPS,
        optimizer=partial(Noting, lr=0.4),
        schedule=schedule,
        compute=compute,
        detail="messages",
        evaluate_every=0,
    )
    for rank in range(2):
        told = [row["lr"] for row in run.metrics[rank] if "evaluation" not in row]
        expected = [None] * late + [0.4 * 0.5 ** (update // 2) for update in range(STEPS - late)]
        assert told == pytest.approx(expected)
        assert any(rates[: STEPS - late] == pytest.approx(expected[late:]) for rates in used.values())


def test_with_a_scale() -> None:
    """A server scales the rate of a late gradient."""
    used.clear()
    run = wb.simulate(
        wb.StaleSGD(staleness=wb.algorithms.Constant(updates=2)),
        tiny.problem(),
        workers=2,
        steps=STEPS,
        optimizer=partial(Noting, lr=0.4),
        compute=compute,
        detail="messages",
        evaluate_every=0,
    )
    told = [row["lr"] for row in run.metrics[0] if "evaluation" not in row]
    rates = max(used.values(), key=len)
    assert [rate for rate in told if rate is not None] == pytest.approx(rates[-len(told) :][: len(told)])


def test_servers_have_the_rate_of_their_update() -> None:
    used.clear()
    run = wb.simulate(
        wb.BackupSGD(backups=0),
        tiny.problem(),
        workers=2,
        steps=STEPS,
        optimizer=partial(Noting, lr=0.4),
        schedule=schedule,
        compute=compute,
        evaluate_every=0,
    )
    told = [row["lr"] for row in run.metrics[0] if "evaluation" not in row]
    assert told == pytest.approx([0.4 * 0.5 ** (update // 2) for update in range(STEPS)])


def test_a_trainer_writes_the_rate_that_it_used(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's own schedule may advance before or after the update of a late gradient."""
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    steps = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    with Trainer(model, optimizer, wb.SynchronousSGD(), record=True) as trainer:
        for _ in range(6):
            trainer.step(lambda: model(torch.ones(3, 2)).square().mean())
            steps.step()
    (stored,) = list_runs()
    rows = wb.Run.load(stored.folder).metrics[0]
    assert [row["lr"] for row in rows if "evaluation" not in row] == pytest.approx([0.4, 0.4, 0.2, 0.2, 0.1, 0.1])
