"""Interrupts at random moments: the ranks train again, or an error says that they must be healed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ipyparallel import DirectView

from tests.distributed.test_cluster import plane
from workbench.algorithms import AsyncSGD, LayerwiseSGD, PipeSGD, SynchronousSGD
from workbench.clusters import Cluster, RunHandle
from workbench.clusters import cluster as cluster_module
from workbench.clusters.supervision.reaper import marked
from workbench.collectives import Ring
from workbench.errors import LaunchError, WorkbenchError

NUM_RANKS = 2
HOW_MANY = int(os.environ.get("WORKBENCH_INTERRUPTS", "6"))  # of both runtimes together; `make soak` takes a thousand
pytestmark = [pytest.mark.notebooks, pytest.mark.timeout(600 + 5 * HOW_MANY)]

SEED = int(os.environ.get("WORKBENCH_INTERRUPTS_SEED", "8"))
WITHIN_S = 0.8  # a training of these begins, takes its steps and ends in about that
COME_BACK_S = 20.0
ALGORITHMS = [
    SynchronousSGD(),
    PipeSGD(width=2),
    LayerwiseSGD(bucket_bytes=200.0),
    SynchronousSGD(collective=Ring()),
    AsyncSGD(),
]


@pytest.fixture(scope="module", params=["torch", pytest.param("local", marks=pytest.mark.mpi)])
def start(
    forked_starts: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Cluster]]:
    """Two ranks of a runtime: the cluster that the test before used, or a new one if an interrupt has made that unusable."""
    clusters: list[Cluster] = []

    def start_or_find() -> Cluster:
        if not clusters or clusters[-1].state == "stopped":
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
                clusters.append(Cluster(NUM_RANKS, launcher=request.param, quiet=True))
        return clusters[-1]

    yield start_or_find
    for cluster in clusters:
        cluster.stop()
        assert marked(cluster.mark) == []


@pytest.fixture
def cluster(start: Callable[[], Cluster]) -> Cluster:
    return start()


@dataclass
class Tally:
    """The outcomes of interrupts."""

    usable: int = 0
    healed: list[str] = field(default_factory=list)  # those after which the cluster said that it must be, and was


def interrupted_cell(cluster: Cluster, after_s: float) -> bool:
    """A cell of a notebook that trains and waits, and is interrupted at that moment; whether the interrupt was before its end."""
    timer = threading.Timer(after_s, signal.raise_signal, [signal.SIGINT])
    try:
        timer.start()
        run = cluster.train(SynchronousSGD(), plane(), steps=30, evaluate_every=0)
        run.wait(60)
        timer.join()
        time.sleep(0.01)
    except KeyboardInterrupt:
        return True
    finally:
        timer.cancel()
    return False


def interrupted_ranks(cluster: Cluster, chance: random.Random) -> None:
    """A training whose ranks, one or all, are interrupted at some moment."""
    run = cluster.train(
        chance.choice(ALGORITHMS),
        plane(),
        steps=1 + int(chance.expovariate(1 / 60)),
        evaluate_every=chance.choice([0, 5]),
    )
    time.sleep(chance.uniform(0, WITHIN_S))
    run.interrupt(chance.choice([0, 1, None]))
    with suppress(WorkbenchError):
        run.wait(COME_BACK_S)


def usable(cluster: Cluster) -> str:
    """ "" if a training of two steps works with the same processes; else the cluster's error, which must name heal()."""
    before = [rank["pid"] for rank in cluster.ranks]
    deadline = time.monotonic() + COME_BACK_S
    if cluster.run is not None and not cluster.run.done:  # the cell was interrupted, and not the training
        cluster.run.stop()
        while not cluster.run.done and time.monotonic() < deadline:
            time.sleep(0.02)
    try:
        run = cluster.train(SynchronousSGD(), plane(), steps=2, timeout_s=COME_BACK_S)
    except LaunchError as error:
        words = str(error)
    else:
        words = ""
    if words:
        assert "heal()" in words
        return words
    assert run.wait(60).status == "finished"
    assert before == [rank["pid"] for rank in cluster.ranks]
    return ""


# An interrupt may come between a library's `open` and its `with`.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io:pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_random_moments_leave_ranks_that_train_again(cluster: Cluster, runs: Path) -> None:
    chance, tally = random.Random(f"{SEED} {cluster.runtime}"), Tally()
    cluster.train(SynchronousSGD(), plane(), steps=2).wait(60)  # imports what a first training imports
    for _ in range(HOW_MANY // 2):
        if chance.random() < 0.5:
            interrupted_cell(cluster, chance.uniform(0, WITHIN_S))
        else:
            interrupted_ranks(cluster, chance)
        words = usable(cluster)
        tally.usable += not words
        if words:
            tally.healed.append(words)
            assert cluster.heal().train(SynchronousSGD(), plane(), steps=2).wait(60).status == "finished"
    print(f"{cluster.runtime}: {tally}")
    assert tally.usable >= 0.95 * (HOW_MANY // 2), tally


def test_an_interrupt_while_ranks_are_given_their_work_waits_until_all_have_it(
    cluster: Cluster, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one rank would wait for the other, and the notebook would see no error."""
    before, send = cluster.run, DirectView.apply_async

    def interrupted(self: DirectView, *args: Any, **more: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(DirectView, "apply_async", send)
        return send(self, *args, **more)

    monkeypatch.setattr(DirectView, "apply_async", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"continues: it is `cluster.run`, end it with .stop\(\)"):
        cluster.train(SynchronousSGD(), plane(), steps=3)
    assert cluster.run is not None and cluster.run is not before
    assert cluster.run.wait(60).status == "finished"
    assert usable(cluster) == ""


def test_an_answer_that_was_lost_is_told_with_the_way_out(
    cluster: Cluster, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunHandle, "_on_result", lambda self, result: None)
    monkeypatch.setattr(cluster_module, "RETURN_S", 1.0)
    run = cluster.heal().train(SynchronousSGD(), plane(), steps=2)
    deadline = time.monotonic() + COME_BACK_S
    while run.status != "finished" and time.monotonic() < deadline:
        time.sleep(0.02)
    with pytest.raises(LaunchError, match=r"have not returned from .* \(status: finished\): heal\(\)"):
        cluster.train(SynchronousSGD(), plane(), steps=2)
    monkeypatch.undo()
    old = [rank["pid"] for rank in cluster.ranks]
    monkeypatch.setattr(cluster_module, "RETURN_S", 1.0)
    assert cluster.heal().state == "ready"
    assert not set(old) & {rank["pid"] for rank in cluster.ranks}
    assert usable(cluster) == ""


def test_an_interrupt_behind_a_ranks_work_does_not_lose_its_answer(cluster: Cluster, runs: Path) -> None:
    """The interrupt comes when the rank has finished, before its engine reports it."""

    def late() -> int:
        from workbench.clusters.engines import remote

        with suppress(BaseException):
            remote.run_job(b"no job", "nowhere")
        signal.raise_signal(signal.SIGINT)
        return 7

    assert cluster.client[:].apply_async(late).get(COME_BACK_S) == [7] * NUM_RANKS
    assert usable(cluster) == ""


def test_an_interrupt_in_the_midst_of_heal_leaves_a_cluster_that_heals(cluster: Cluster, runs: Path) -> None:
    chance = random.Random(SEED)
    for _ in range(max(1, HOW_MANY // 20)):
        if cluster.state == "stopped":  # by the interrupt before, and permanently
            break
        os.kill(cluster.ranks[1]["pid"], signal.SIGKILL)
        timer = threading.Timer(chance.uniform(0.1, 3.0), signal.raise_signal, [signal.SIGINT])
        interrupted: Any = None
        try:
            while cluster.state != "lost":
                time.sleep(0.02)
            timer.start()
            cluster.heal()
            timer.join()
        except KeyboardInterrupt as error:
            interrupted = error
        finally:
            timer.cancel()
        if interrupted is not None:
            assert cluster.state in ("lost", "stopped", "ready"), "it says how it is"
        assert marked(cluster.mark) == [] if cluster.state == "stopped" else cluster.heal().state == "ready"
