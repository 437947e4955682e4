"""`lr=` with parameter groups, against a loop in plain torch: groups keep their proportion in a training and a study."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import workbench as wb
from workbench import costs
from workbench.errors import ConfigError

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = torch.randn(12, 1, generator=torch.Generator().manual_seed(1))
RATES = (0.01, 0.2)  # of the weight, and of the bias


def model() -> nn.Module:
    made = nn.Linear(3, 1)
    with torch.no_grad():
        made.weight.fill_(0.5)
        made.bias.fill_(-0.5)
    return made


def grouped(parameters: Iterable[nn.Parameter], first: float = RATES[0]) -> torch.optim.Optimizer:
    weight, bias = parameters
    return torch.optim.SGD(
        [{"params": [weight], "lr": first}, {"params": [bias], "lr": RATES[1] / RATES[0] * first}], momentum=0.5
    )


def problem() -> wb.problems.Problem:
    return wb.problems.Problem(
        model=model,
        loss=nn.functional.mse_loss,
        train=(X, Y),
        test=(X, Y),
        correct=None,
        batch_size=6,
        optimizer=grouped,
    )


def serial(first: float, steps: int, late: int = 0) -> list[torch.Tensor]:
    """Train on all samples; with `late`, a gradient is applied that many updates after it was computed."""
    trained = model()
    optimizer = grouped(trained.parameters(), first)
    waiting: list[list[torch.Tensor]] = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(trained(X), Y)
        waiting.append(list(torch.autograd.grad(loss, list(trained.parameters()))))
        if len(waiting) > late:
            for parameter, gradient in zip(trained.parameters(), waiting.pop(0), strict=True):
                parameter.grad = gradient
            optimizer.step()
    return [parameter.detach() for parameter in trained.parameters()]


def losses(run: wb.Run) -> list[float]:
    return [row["test_loss"] for row in run.evaluations()]


def loss_of(parameters: list[torch.Tensor]) -> float:
    return float(nn.functional.mse_loss(X @ parameters[0].T + parameters[1], Y))


compute = costs.Compute(forward_s=1e-3, backward_s=1e-3)


@pytest.mark.parametrize("algorithm", [wb.SynchronousSGD(), wb.LayerwiseSGD(bucket_bytes=4)])
def test_a_rate_is_of_the_first_group_and_others_keep_their_proportion(algorithm: wb.Algorithm) -> None:
    run = wb.simulate(algorithm, problem(), workers=2, steps=5, lr=0.03, evaluate_every=1, compute=compute)
    for step, loss in enumerate(losses(run), 1):
        assert loss == pytest.approx(loss_of(serial(0.03, step)), rel=1e-5)


def test_servers_too() -> None:
    run = wb.simulate(
        wb.BackupSGD(backups=0), problem(), workers=2, steps=5, lr=0.03, evaluate_every=1, compute=compute
    )
    assert losses(run)[-1] == pytest.approx(loss_of(serial(0.03, 5)), rel=1e-5)


def test_a_study_trains_late_gradients_with_the_groups() -> None:
    """The rates of the rule are lr and lr / 2 of the first group."""
    measured = wb.simulate(wb.SynchronousSGD(), problem(), workers=2, steps=12, network="wan-100m", compute=compute)
    target = loss_of(serial(RATES[0], 12))
    found = wb.study(
        problem(),
        algorithms=[wb.SynchronousSGD(), wb.PipeSGD(width=2)],
        calibrated=measured,
        networks="1mbit",
        workers=2,
        target=("loss", target * 1.05),
        seeds=1,
        quiet=True,
    )
    (late,) = (trained for trained in found.trainings if trained.recipe.staleness)
    assert late.lr in (RATES[0], RATES[0] / 2)
    (run,) = late.runs
    assert run is not None
    last = run.evaluations()[-1]
    # The gradients in flight are applied before the last evaluation.
    expected = loss_of(serial(late.lr, last["step"] + 2, late=1))
    assert last["test_loss"] == pytest.approx(expected, rel=1e-4)


def test_a_first_group_without_a_rate_is_refused() -> None:
    optimizer = partial(grouped, first=1e-30)

    def zero(parameters: Any) -> torch.optim.Optimizer:
        made = optimizer(parameters)
        made.param_groups[0]["lr"] = 0.0
        return made

    with pytest.raises(ConfigError, match="the first group has lr=0"):
        wb.simulate(wb.SynchronousSGD(), problem(), workers=2, steps=1, lr=0.1, optimizer=zero, compute=compute)


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=50)


def test_a_rate_that_the_schedule_replaces_is_refused() -> None:
    """It had no effect: the first rate of this schedule is 0.02, whatever lr= says."""
    how: dict[str, Any] = {"workers": 2, "steps": 2, "schedule": one_cycle, "compute": compute}
    wb.simulate(wb.SynchronousSGD(), problem(), **how)
    with pytest.raises(ConfigError, match="has no effect, because the schedule sets its own rates"):
        wb.simulate(wb.SynchronousSGD(), problem(), lr=0.1, **how)
    factor = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.5**step)
    wb.simulate(wb.SynchronousSGD(), problem(), lr=0.1, **{**how, "schedule": factor})
