"""A notebook's training gets other settings, is paused and interrupted; its ranks stay usable."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.waiting import within
from workbench.algorithms import AsyncSGD, PipeSGD, SynchronousSGD
from workbench.clusters import Cluster
from workbench.clusters.run_handle import RunHandle
from workbench.clusters.supervision.reaper import marked
from workbench.codecs import Truncate16
from workbench.collectives import Ring
from workbench.errors import ConfigError, WorkbenchError
from workbench.problems.base import Problem
from workbench.program import Algorithm

pytestmark = [pytest.mark.notebooks, pytest.mark.mpi, pytest.mark.usefixtures("forked_starts")]

NUM_RANKS = 2
SOON_S = 30.0  # on a machine that does much else; a second or two on a quiet one


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two ranks that all tests of this file share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        cluster = Cluster(NUM_RANKS, quiet=True)
    yield cluster
    cluster.stop()
    assert marked(cluster.mark) == []


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Takes 10 ms, so that a run of some steps can be seen running."""
    time.sleep(0.01)
    return torch.nn.functional.mse_loss(output, target)


def plane(loss: Any = slow_loss) -> Problem:
    """Least squares in three dimensions, defined here: the ranks cannot import it."""
    x = torch.linspace(-1, 1, 192, dtype=torch.float64).reshape(64, 3).sin()
    y = x @ torch.tensor([[1.0], [2.0], [-1.0]], dtype=torch.float64)
    return Problem(
        model=lambda: torch.nn.Linear(3, 1, dtype=torch.float64),
        loss=loss,
        train=(x, y),
        name="plane",
        batch_size=8,
        correct=None,
    )


def begun(cluster: Cluster, algorithm: Algorithm, problem: Problem | None = None) -> RunHandle:
    """A training of very many steps that has taken some."""
    run = cluster.train(algorithm, problem or plane(), steps=100_000, lr=0.1, evaluate_every=0)
    assert within(60, lambda: num_rows(run) > 3), run
    return run


def num_rows(run: RunHandle) -> int:
    return min((len(rows) for rows in run.run.metrics.values()), default=0) if len(run.run.metrics) == NUM_RANKS else 0


def steering(run: RunHandle) -> list[dict[str, Any]]:
    return list(run.run.info.get("steering", []))


def usable(cluster: Cluster) -> bool:
    """Whether the same processes train again."""
    pids = [rank["pid"] for rank in cluster.ranks]
    assert cluster.train(SynchronousSGD(), plane(), steps=2).wait(60).status == "finished"
    return pids == [rank["pid"] for rank in cluster.ranks] and all(map(psutil.pid_exists, pids))


def test_set_takes_effect_at_one_step_on_all_ranks(cluster: Cluster, runs: Path) -> None:
    run = begun(cluster, PipeSGD(width=2, collective=Ring()))
    run.set(width=3, lr=0.05)
    assert within(30, lambda: len(steering(run)) == 1)
    run.set(codec=Truncate16()).set(delay=0)
    assert within(30, lambda: len(steering(run)) == 3)
    with pytest.raises(ConfigError, match="did you mean width"):
        run.set(widht=3)
    run.stop().wait(30)
    assert run.status == "stopped"
    told = [
        [(row["steer"], row["step"]) for row in rows if "steer" in row] for _, rows in sorted(run.run.events.items())
    ]
    assert told[0] == told[1]
    assert [number for number, _ in told[0]] == [1, 2, 3, 4]
    first = told[0][0][1]
    rows = [row for row in run.run.metrics[1] if "evaluation" not in row]
    rates = [
        row["lr"] for row in rows
    ]  # of the last update; step 0 has none, nor has the step that widens the pipeline
    assert rates == [None, *[0.1] * first, *[0.05] * (len(rows) - first - 1)]
    assert {row["staleness"] for row in rows[told[0][2][1] + 3 :]} <= {0}, (
        "delay 0 is synchronous, when what was in flight is applied"
    )


@pytest.mark.parametrize("algorithm", [PipeSGD(width=2), AsyncSGD()], ids=["PipeSGD", "AsyncSGD"])
def test_paused_it_holds_until_it_is_told_to_go_on(cluster: Cluster, runs: Path, algorithm: Algorithm) -> None:
    run = begun(cluster, algorithm)
    run.pause()
    assert within(30, lambda: run.status == "paused")
    assert "paused, step" in repr(run)
    held = num_rows(run)
    run.set(lr=0.02)
    assert within(30, lambda: len(steering(run)) == 2)  # a beat of the hold or more
    assert num_rows(run) == held
    assert run.status == "paused"
    run.resume()
    assert within(30, lambda: num_rows(run) > held)
    assert run.status == "running"
    run.pause().stop().wait(30)
    assert run.status == "stopped"
    ends = [rows[-1]["step"] for rows in run.run.metrics.values()]
    assert algorithm.asynchronous or ends[0] == ends[1]


@pytest.mark.parametrize("rank", [0, 1, None])
@pytest.mark.parametrize("algorithm", [SynchronousSGD(), AsyncSGD()], ids=["SynchronousSGD", "AsyncSGD"])
def test_an_interrupt_ends_the_run_and_leaves_the_ranks_usable(
    cluster: Cluster, runs: Path, algorithm: Algorithm, rank: int | None
) -> None:
    run = begun(cluster, algorithm)
    run.interrupt(rank)
    with pytest.raises(WorkbenchError, match="interrupted" if rank is None else f"rank {rank} was interrupted"):
        run.wait(30)
    assert within(SOON_S, lambda: run.done)
    assert run.status == "failed"
    assert "interrupted" in run.run.info["error"]
    run.interrupt()  # no rank is left to be interrupted
    assert usable(cluster)


def test_an_interrupt_reaches_ranks_that_are_held(cluster: Cluster, runs: Path) -> None:
    run = begun(cluster, PipeSGD(width=2)).pause()
    assert within(30, lambda: run.status == "paused")
    run.interrupt(1)
    with pytest.raises(WorkbenchError, match="rank 1 was interrupted"):
        run.wait(30)
    assert within(SOON_S, lambda: run.done)
    assert usable(cluster)


def test_an_error_after_a_pause_comes_at_once_from_where_it_was_raised(cluster: Cluster, runs: Path) -> None:
    folder = str(runs)

    def fails_when_asked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        here = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
        if here == "1" and os.path.exists(folder + "/fail"):
            raise KeyError("the cat ate it")
        return slow_loss(output, target)

    run = begun(cluster, SynchronousSGD(), plane(fails_when_asked)).pause()
    assert within(30, lambda: run.status == "paused")
    (runs / "fail").touch()
    run.resume()
    with pytest.raises(WorkbenchError, match=r"rank 1 failed: KeyError: .*the cat ate it") as caught:
        run.wait(30)
    assert "fails_when_asked" in caught.value.__notes__[0]
    assert within(SOON_S, lambda: run.done)
    assert json.loads((run.folder / "run.json").read_text())["status"] == "failed"
    assert usable(cluster)
