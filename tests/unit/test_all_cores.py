"""Simulations on all cores have the results of a loop."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from tests.laws import tiny
from workbench.algorithms import AsyncSGD, PipeSGD
from workbench.costs import Lognormal
from workbench.experiments.side_by_side import CORES_VARIABLE
from workbench.papers.studies.all_cores import each
from workbench.papers.studies.paired_runs import simulated
from workbench.papers.studies.training import compute_cost


@pytest.mark.parametrize("cores", [1, 2])
def test_results_have_the_order_of_the_items(cores: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first item of two processes ends last: it waits for the last one. On one core nothing is forked."""
    monkeypatch.setenv(CORES_VARIABLE, str(cores))

    def work(item: int) -> tuple[int, int]:
        while cores == 2 and item == 0 and not (tmp_path / "2").exists():
            time.sleep(1e-3)
        (tmp_path / str(item)).touch()
        return item, os.getpid()

    found = each(work, range(3))
    assert [item for item, _ in found] == [0, 1, 2]
    processes = {process for _, process in found}
    assert len(processes) == cores
    assert (os.getpid() in processes) == (cores == 1)


def test_the_first_error_in_order_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORES_VARIABLE, "2")
    with pytest.raises(ZeroDivisionError):
        each(lambda item: 1 // (item - 1), range(3))


@pytest.mark.timeout(60)
def test_a_process_does_not_wait_for_threads_that_it_has_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORES_VARIABLE, "2")
    many = torch.ones(1 << 20)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        many.double()  # begins this process's threads
        assert each(lambda item: int(many.double()[item]), range(2)) == [1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_simulations_on_two_cores_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithms = {"pipe": PipeSGD(width=2), "asynchronous": AsyncSGD()}
    compute = compute_cost(1.0, Lognormal(sigma=0.3))
    rows = []
    for cores in ("1", "2"):
        monkeypatch.setenv(CORES_VARIABLE, cores)
        runs = simulated(
            algorithms, tiny.problem(), [0, 1], rates={}, workers=3, compute=compute, steps=6, batch_size=3
        )
        rows.append({name: [(run.metrics, run.evaluations()) for run in found if run] for name, found in runs.items()})
    assert rows[0] == rows[1]
    assert [len(found) for found in rows[0].values()] == [2, 2]
