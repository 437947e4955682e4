"""What a named study takes for the same question: every field counts, by content."""

from __future__ import annotations

import threading
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.unit.test_study import calibration
from workbench import costs
from workbench.errors import ConfigError
from workbench.problems.base import Problem
from workbench.trace.store import list_runs
from workbench.what_if.question import EXTENDED, SETTINGS, Question, make_question
from workbench.what_if.recipe import recipe_of

X = torch.arange(12.0).reshape(6, 2)
Y = torch.tensor([0, 1, 0, 1, 1, 0])


def optimizer(lr: float) -> Any:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


def schedule(gamma: float) -> Any:
    return lambda made: torch.optim.lr_scheduler.ExponentialLR(made, gamma)


def scaled(factor: float) -> Any:
    return lambda *given: factor * torch.nn.functional.cross_entropy(*given)


def counted(label: int) -> Any:
    return lambda model, batch: ((model(batch[0]).argmax(1) == label).sum(), len(batch[0]))


def model(width: int) -> Any:
    return lambda: torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Linear(width, 2))


def problem(**changes: Any) -> Problem:
    given = {
        "model": model(3),
        "loss": scaled(1.0),
        "train": (X, Y),
        "test": (X, Y),
        "correct": counted(0),
        "metrics": {"own": scaled(1.0)},
        "optimizer": optimizer(0.1),
    }
    return Problem(**{**given, **changes})


CHANGES_OF_THE_PROBLEM: dict[str, Any] = {
    "model": model(4),
    "loss": scaled(2.0),
    "train": (X + 1, Y),
    "test": (X, 1 - Y),
    "name": "another",
    "whole_batch": True,
    "correct": counted(1),
    "metrics": {"own": scaled(2.0)},
    "batch_size": 3,
    "optimizer": optimizer(0.2),
    "note": "another",
    "loss_weight": lambda batch: 2 * len(batch[0]),
}
CHANGES: dict[str, Any] = {
    "batch_size": 3,
    "calibrated": calibration(0.2, shapes=(("0.weight", (3, 2)), ("0.bias", (3,)), ("1.weight", (2, 3)), ("1.bias", (2,)))),
    "target": ("accuracy", 0.8),
    "search": 2,
    "stragglers": [costs.Lognormal(sigma=0.1)],
    "threads": 2,
    "settings": {"lr": 0.1},
}  # fmt: skip
SETTINGS_AND_CHANGES: dict[str, tuple[Any, Any]] = {
    "optimizer": (optimizer(0.1), optimizer(0.2)),
    "lr": (0.1, 0.2),
    "schedule": (schedule(0.9), schedule(0.8)),
    "clip_norm": (1.0, 2.0),
    "ema_decay": (0.9, 0.99),
    "num_micro": (1, 2),
}


def asked(given: Problem | None = None, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "algorithms": None,
        "calibrated": None,
        "networks": "1gbit",
        "workers": 4,
        "target": ("accuracy", 0.9),
        "seeds": 2,
        "batch_size": None,
        "search": 0,
        "stragglers": (),
        "threads": None,
        "settings": {},
    }
    return make_question(given or problem(), **{**arguments, **changes}).as_record()


def test_the_same_question_has_the_same_record() -> None:
    assert asked() == asked(problem())
    assert asked(settings={"optimizer": optimizer(0.1)}) == asked(settings={"optimizer": optimizer(0.1)})


def test_every_field_of_a_problem_counts() -> None:
    assert set(CHANGES_OF_THE_PROBLEM) == {item.name for item in fields(Problem)}, "a new field needs a change here"
    for name, value in CHANGES_OF_THE_PROBLEM.items():
        assert asked(problem(**{name: value})) != asked(), name


def test_every_argument_counts_or_is_in_the_key_of_a_training() -> None:
    assert {*CHANGES, *EXTENDED, "problem"} == {item.name for item in fields(Question)}, "a new one needs a change here"
    small = {"calibrated": {"batch_size": 8}}
    for name, value in CHANGES.items():
        other = small.get(name, {})
        assert asked(**{name: value, **other}) != asked(**other), name
    assert set(SETTINGS_AND_CHANGES) == set(SETTINGS)
    for name, values in SETTINGS_AND_CHANGES.items():
        one, other = (asked(settings={name: value}) for value in values)
        assert one != other != asked(), name


def test_algorithms_and_workers_are_in_the_key_of_a_training() -> None:
    keys = [recipe_of(wb.LocalSGD(every=every), workers, 8).key for every in (2, 4) for workers in (2, 4)]
    assert len(set(keys)) == 4


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"optimizer": optimizer(0.5)}, r"settings\.optimizer"),
        ({"schedule": schedule(0.1)}, r"settings\.schedule"),
        ({"problem": replace(wb.problems.digits_softmax(), correct=counted(3))}, r"problem\.correct"),
    ],
)
def test_a_named_study_does_not_answer_a_changed_question(
    changed: Any, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path))
    first = {"optimizer": optimizer(0.1), "schedule": schedule(0.99)}
    how = study_arguments(name="mine", **first)
    wb.study(**how)
    num_runs = len(list_runs())
    wb.study(**how)
    assert len(list_runs()) == num_runs > 0, "the same question uses the same trainings"
    with pytest.raises(ConfigError, match=f"other values of {named}"):
        wb.study(**{**how, **changed})


def test_a_question_that_cannot_be_read_is_not_kept_and_the_answer_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path))
    lock = threading.Lock()

    def guarded(parameters: Any) -> torch.optim.Optimizer:
        with lock:
            return torch.optim.SGD(parameters, lr=0.1)

    found = wb.study(**study_arguments(name="mine", optimizer=guarded))
    assert "nothing was kept or reused under the name mine" in found.answer and "lock" in found.answer
    assert not list(tmp_path.iterdir())


def study_arguments(**more: Any) -> dict[str, Any]:
    given = wb.problems.digits_softmax()
    compute = costs.Compute(forward_s=1e-3, backward_s=2e-3)
    measured = wb.simulate(wb.SynchronousSGD(), given, workers=2, steps=12, network="wan-100m", compute=compute)
    shown: dict[str, Any] = {
        "problem": given,
        "algorithms": [wb.SynchronousSGD()],
        "calibrated": measured,
        "networks": "10mbit",
        "workers": 2,
        "target": ("accuracy", 0.5),
        "seeds": 1,
        "quiet": True,
    }
    return {**shown, **more}


def test_a_partial_counts_by_its_arguments() -> None:
    one, other = (partial(torch.optim.SGD, lr=lr, momentum=0.9) for lr in (0.1, 0.2))
    same = partial(torch.optim.SGD, momentum=0.9, lr=0.1)
    assert (
        asked(settings={"optimizer": one})
        == asked(settings={"optimizer": same})
        != asked(settings={"optimizer": other})
    )
