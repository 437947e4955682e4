"""One training of a study: the same in virtual time and on any real ranks."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

import workbench as wb
from workbench.costs import Compute
from workbench.papers.studies import training

COMPUTE = Compute(forward_s=0.01, backward_s=0.02)


def test_without_a_launcher_workers_are_simulated() -> None:
    run = training.train(wb.SynchronousSGD(), wb.problems.digits_softmax(), workers=2, compute=COMPUTE, steps=2, seed=1)
    assert run.info["runtime"] == "simulated" and len(run.steps()) == 2


def test_with_one_they_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    handle = SimpleNamespace(wait=lambda: told.append("waited"), run="the run")

    @contextmanager
    def lent(num_workers: int, launcher: str):  # type: ignore[no-untyped-def]
        told.append((num_workers, launcher))
        yield SimpleNamespace(train=lambda *what, **settings: told.append(settings) or handle)

    monkeypatch.setattr(training, "ranks", lent)
    found = training.train(
        wb.SynchronousSGD(), wb.problems.digits_softmax(), workers=2, launcher="torch", compute=COMPUTE, steps=2
    )
    assert found == "the run" and told == [(2, "torch"), {"steps": 2}, "waited"]
