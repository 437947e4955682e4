"""Clusters that come and go, also by a kill, leave nothing: no process, port, shared memory, folder, thread or network namespace."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.distributed.leaks import Snapshot
from tests.distributed.test_cluster import plane
from tests.waiting import within
from workbench.algorithms import SynchronousSGD
from workbench.clusters import Cluster
from workbench.clusters.supervision.reaper import marked

NUM_CYCLES = int(os.environ.get("WORKBENCH_CYCLES", "3"))  # `make soak` takes a hundred
pytestmark = [
    pytest.mark.notebooks,
    pytest.mark.mpi,
    pytest.mark.timeout(120 + 60 * NUM_CYCLES),
    pytest.mark.usefixtures("forked_starts"),  # not of ranks whose notebook is killed: that is a new interpreter
]

HOLDER = """
    import time
    from workbench.clusters import Cluster
    cluster = Cluster(2, launcher={launcher!r}, quiet=True)
    print(cluster.mark, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for temporary files, here and in what is started; its name is short, for there will be sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="wb-"))
    monkeypatch.setenv("TMPDIR", str(folder))
    # A cache of torch's own, which is to stay
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "cache" / "inductor"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def stopped(launcher: str) -> None:
    """A cluster that trains and is stopped."""
    with Cluster(2, launcher=launcher, quiet=True) as cluster:
        assert cluster.train(SynchronousSGD(), plane(), steps=2).wait(60).status == "finished"


def rank_killed(launcher: str) -> None:
    """One whose rank is killed, and which is then stopped."""
    with Cluster(2, launcher=launcher, quiet=True) as cluster:
        run = cluster.train(SynchronousSGD(), plane(), steps=100_000)
        psutil.Process(cluster.ranks[1]["pid"]).kill()
        assert within(30, lambda: run.status == "failed")


def holder_killed(launcher: str) -> None:
    """One whose notebook is killed."""
    code = textwrap.dedent(HOLDER.format(launcher=launcher))
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    mark = holder.stdout.readline().strip()
    assert marked(mark)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert within(20, lambda: marked(mark) == [])


def test_cycles_of_starts_and_ends_leave_nothing(runs: Path, temporary: Path, no_process_left: None) -> None:
    before = Snapshot.now()
    for number in range(NUM_CYCLES):
        launcher = ("local", "torch")[number // 3 % 2] if NUM_CYCLES > 3 else ("local", "torch", "local")[number]
        (stopped, rank_killed, holder_killed)[number % 3](launcher)
        assert within(10, lambda: os.listdir(temporary / "cache" / "workbench" / "clusters") == [])
        shutil.rmtree(temporary / "cache")
        assert before.left(temporary, more_files=8 if number else 64) == [], f"after cycle {number}"
        before = before if number else Snapshot.now()  # what is imported and opened at the first time is no leak


@pytest.mark.root
@pytest.mark.skipif(NUM_CYCLES < 4, reason="make soak starts emulated networks over and over; one is in test_emulated")
def test_cycles_of_emulated_networks_leave_nothing(runs: Path, temporary: Path, no_process_left: None) -> None:
    before = Snapshot.now()
    for number in range(max(1, NUM_CYCLES // 4)):
        (stopped, rank_killed, holder_killed)[number % 3]("emulated:1gbit")
        assert within(10, lambda: os.listdir(temporary / "cache" / "workbench" / "clusters") == [])
        shutil.rmtree(temporary / "cache")
        assert before.left(temporary, more_files=64) == [], f"after cycle {number}"
