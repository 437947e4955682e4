"""Records and messages about clusters and the ends of their trainings, without ranks."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.cli.main import main
from workbench.clusters.local.mpi_install import OPEN_MPI, MPIInstall
from workbench.clusters.slurm.request import Slurm
from workbench.errors import ConfigError, LaunchError, WorkbenchError
from workbench.machine import num_cores
from workbench.trace.store import new_run, read_info, update_run

pytestmark = pytest.mark.notebooks

INSTALL = MPIInstall(name=OPEN_MPI, version="5.0.11", mpiexec="mpiexec")


@pytest.fixture
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where clusters keep their records, for this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "workbench" / "clusters"


def recorded(clusters: Path, name: str, detached: dict[str, Any] | None = None, **words: Any) -> Path:
    """The folder of a cluster on this machine that no process holds."""
    from workbench.clusters.supervision.rank_output import write_whole
    from workbench.clusters.supervision.registry import RECORD, mark_detached, this_owner

    folder = clusters / name
    folder.mkdir(parents=True)
    facts = {
        "id": name,
        "mark": "WORKBENCH_CLUSTER_OF_A_TEST",
        "num_ranks": 1,
        "title": "a test",
        "started_s": time.time(),
    }
    write_whole(folder / RECORD, {**facts, **this_owner(), "owner": 2**22 + 1, "runtime": "torch", **words})
    if detached is not None:
        mark_detached(folder, **detached)
    return folder


# ---------------------------------------------------------------- from another machine


def test_only_a_controller_in_a_job_is_in_reach_of_other_machines() -> None:
    from workbench.clusters.launchers.processes import ProcessLauncher
    from workbench.clusters.launchers.slurm_launcher import SlurmLauncher
    from workbench.clusters.launchers.ssh import SSHLauncher

    assert SlurmLauncher(INSTALL, Slurm(controller="job")).reachable
    assert not SlurmLauncher(INSTALL, Slurm()).reachable
    assert not SSHLauncher(INSTALL, (("a", 1),)).reachable
    assert not ProcessLauncher().reachable


@pytest.mark.parametrize(
    ("words", "detached", "message"),
    [
        ({"reachable": False}, {}, "is on host elsewhere: stop it there"),
        ({"reachable": True}, None, "was not detached on host elsewhere"),
    ],
)
def test_a_cluster_of_another_machine_is_not_removed_under_its_processes(
    clusters: Path,
    capsys: pytest.CaptureFixture[str],
    words: dict[str, Any],
    detached: dict[str, Any] | None,
    message: str,
) -> None:
    folder = recorded(clusters, "far-1", detached, host="elsewhere", **words)
    assert main(["cluster", "stop", "far-1"]) == 2
    assert message in capsys.readouterr().err
    assert json.loads((folder / "cluster.json").read_text())["host"] == "elsewhere"


def test_force_ends_what_was_not_detached_elsewhere(clusters: Path, tmp_path: Path) -> None:
    folder = recorded(clusters, "far-2", host="elsewhere", reachable=True)
    (folder / "at-end.json").write_text(json.dumps(["touch", str(tmp_path / "cancelled")]))
    assert main(["cluster", "stop", "far-2", "--force"]) == 0
    assert (tmp_path / "cancelled").exists() and not folder.exists()


# ---------------------------------------------------------------- a training whose ranks are ended


@pytest.mark.parametrize(
    ("before", "after"), [("starting", "failed"), ("running", "failed"), ("paused", "failed"), ("stopped", "stopped")]
)
def test_a_training_ends_on_record_with_its_cluster(clusters: Path, runs: Path, before: str, after: str) -> None:
    folder = new_run({"algorithm": {"name": "PipeSGD"}}, runs)
    update_run(folder, status=before)
    recorded(clusters, "near-1", run=str(folder))
    assert main(["cluster", "stop", "near-1"]) == 0
    assert read_info(folder)["status"] == after


def test_the_list_says_of_a_killed_training_that_it_is_killed(
    clusters: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed training cannot record its end: its record says that it runs."""
    nobody = {"host": socket.gethostname(), "pid": 2**22 + 1, "process_started": 1.0}
    folder = new_run({"algorithm": {"name": "PipeSGD"}}, runs)
    update_run(folder, status="running", process=nobody)
    for path in folder.iterdir():
        os.utime(path, (time.time() - 60,) * 2)
    recorded(clusters, "near-6", run=str(folder))
    assert main(["cluster", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == f"{folder.name}: killed"


ELSEWHERE = {"host": "elsewhere", "pid": 1}
ENDED = {"host": socket.gethostname(), "pid": 2**22 + 1}  # more than any process's number


def let_go_of(folder: Path, ranks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The handle of a training whose cluster was detached: it reads the folder, and asks no process."""
    from workbench.clusters import folder_results
    from workbench.clusters.run_handle import RunHandle

    monkeypatch.setattr(folder_results, "LAST_S", 0.05)
    return RunHandle(folder, folder_results.follow_ends(folder, None, ranks), None)  # type: ignore[arg-type]


def test_a_handle_that_was_let_go_of_ends_as_the_record_says(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_run({"algorithm": {"name": "PipeSGD"}}, runs)
    handle = let_go_of(folder, [ELSEWHERE, ELSEWHERE], monkeypatch)
    with pytest.raises(TimeoutError):
        handle.wait(0.3)
    (folder / "ended-00000.json").write_text('{"summary": {}}')
    update_run(folder, status="failed", error="the cluster was stopped while it trained")
    with pytest.raises(WorkbenchError, match="rank 1: the cluster was stopped while it trained"):
        handle.wait(10)
    assert handle._over.wait(10)


def test_a_handle_that_was_let_go_of_believes_a_good_end(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_run({"algorithm": {"name": "PipeSGD"}}, runs)
    handle = let_go_of(folder, [ELSEWHERE], monkeypatch)
    update_run(folder, status="finished")
    assert handle.wait(10).status == "finished"


def test_a_handle_that_was_let_go_of_sees_processes_of_this_machine_end(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new_run({"algorithm": {"name": "PipeSGD"}}, runs)
    handle = let_go_of(folder, [ENDED], monkeypatch)
    with pytest.raises(WorkbenchError, match="rank 0's process is gone"):
        handle.wait(10)
    assert handle._over.wait(10)
    assert read_info(folder)["status"] == "failed"


def test_a_handle_that_was_let_go_of_does_not_wait_for_a_run_that_was_removed(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new_run({"algorithm": {"name": "PipeSGD"}}, runs)
    handle = let_go_of(folder, [ELSEWHERE], monkeypatch)
    shutil.rmtree(folder)
    with pytest.raises(WorkbenchError, match="the run's folder was removed"):
        handle.wait(10)


# ---------------------------------------------------------------- what status() says


class Answering(dict[int, Any]):
    """A client of engines that answer at once."""

    ids = property(list)

    def __missing__(self, rank: int) -> Any:
        raise AssertionError(f"rank {rank} is not there to be asked")


class Answer:
    """An engine, and its answer."""

    def apply_async(self, _: Any) -> Any:
        return self

    def wait(self, _: float) -> None: ...

    def done(self) -> bool:
        return True

    def result(self, _: float) -> dict[str, Any]:
        return {"device": "cpu"}


def states(
    there: list[int], num_ranks: int, run: Path | None, *, alive: bool = True, is_mpi: bool = False
) -> list[str]:
    """What the table says of each rank of engines of which some are there."""
    from workbench.clusters.status import status_table

    client = Answering({rank: Answer() for rank in there})
    engines: Any = SimpleNamespace(
        client=client,
        alive=alive,
        detached=False,
        launcher=SimpleNamespace(is_mpi=is_mpi),
        why_silent=lambda: None,
    )
    return [row["state"] for row in status_table(engines, [ELSEWHERE] * num_ranks, run, "")]


def test_new_ranks_do_not_train_in_a_run_that_lost_its_own(runs: Path, clusters: Path) -> None:
    from workbench.clusters.status import entry_table
    from workbench.clusters.supervision.registry import find_entry

    run = new_run({"algorithm": {"name": "PipeSGD"}}, runs)
    (run / "ended-00000.json").write_text("{}")  # and none of the rank that was killed
    recorded(clusters, "near-2", run=str(run), ranks=[ELSEWHERE, ELSEWHERE])
    assert states([0, 1], 2, run) == ["ready", "training"]
    assert [row["state"] for row in entry_table(find_entry("near-2"))] == ["ready", "training"]
    update_run(run, status="failed")
    assert states([0, 1], 2, run) == ["ready", "ready"]
    assert [row["state"] for row in entry_table(find_entry("near-2"))] == ["ready", "ready"]


def test_who_let_a_cluster_go_is_told_of_it_as_it_is(clusters: Path, runs: Path) -> None:
    from workbench.clusters.status import status_table

    run = new_run({"algorithm": {"name": "PipeSGD"}}, runs)
    recorded(clusters, "near-3", {"ranks": [ELSEWHERE], "run": str(run)}, run=str(run))
    engines: Any = SimpleNamespace(id="near-3", client=None, detached=True)
    table = status_table(engines, [ELSEWHERE], run, "")
    assert [row["state"] for row in table] == ["training"]


def test_only_a_world_of_mpi_ends_as_one() -> None:
    assert states([0], 2, None, alive=False, is_mpi=False) == ["ready", "gone"]
    assert states([0], 2, None, alive=False, is_mpi=True) == ["gone", "gone"]


# ---------------------------------------------------------------- let go of


def test_what_could_not_be_taken_up_whole_is_let_go_of_again(clusters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.clusters import Cluster
    from workbench.clusters.engines.engines import Engines

    done: list[Any] = []
    engines = SimpleNamespace(
        num_ranks=1, detach=lambda **words: done.append(words), stop=lambda: done.append("stopped")
    )
    monkeypatch.setattr(Engines, "attach", lambda entry: engines)
    monkeypatch.setattr(Cluster, "__repr__", lambda self: 1 / 0)
    recorded(clusters, "near-4", {"run": None, "ranks": [ELSEWHERE]})
    with pytest.raises(ZeroDivisionError):
        Cluster.attach("near-4")
    assert (done[0]["run"], done[0]["ranks"]) == (None, [ELSEWHERE])


def let_go(engines: Any) -> None:
    """Detach engines of which no process is there."""
    engines.client = SimpleNamespace(close=lambda: None)
    engines._cluster = SimpleNamespace(controller=SimpleNamespace(), engine_set=SimpleNamespace(), cluster_file="")
    engines.detach(run=None, ranks=[ELSEWHERE])


def test_a_cluster_can_be_attached_to_whatever_the_umask_is(clusters: Path) -> None:
    """Many systems let the group of a user, who is its only member, write the user's files."""
    from workbench.clusters.engines.engines import Engines
    from workbench.clusters.launchers.processes import ProcessLauncher
    from workbench.clusters.supervision import registry

    engines = Engines(ProcessLauncher(), 1, "near")
    recorded(clusters, engines.id)
    before = os.umask(0o002)
    try:
        let_go(engines)
    finally:
        os.umask(before)
    path = engines.folder / registry.LAUNCHER
    assert registry.check_trusted(path) == path and path.stat().st_mode & 0o777 == 0o600


def test_a_cluster_stays_detached_if_what_it_left_is_not_trusted(clusters: Path) -> None:
    from workbench.clusters import Cluster
    from workbench.clusters.supervision import registry

    folder = recorded(clusters, "near-5", {"run": None, "ranks": [ELSEWHERE]})
    (folder / registry.AT_END).write_text("[]")  # as if its ranks were in a job
    (folder / registry.LAUNCHER).write_bytes(b"")
    (folder / registry.LAUNCHER).chmod(0o666)
    with pytest.raises(LaunchError, match=r"^\S+ is not trusted.*chmod go-w"):
        Cluster.attach("near-5")
    entry = registry.find_entry("near-5")
    assert entry.detached is not None and entry.detached["ranks"] == [ELSEWHERE]


def test_who_detached_a_cluster_leaves_its_logs_alone_when_its_processes_end(
    clusters: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from ipyparallel.cluster.launcher import LocalControllerLauncher, LocalEngineLauncher

    from workbench.clusters.engines.engines import Engines
    from workbench.clusters.launchers.processes import ProcessLauncher, ProcessSet

    def of(kind: Any, name: str) -> Any:
        (log := tmp_path / name).write_text("words")
        return kind(output_file=str(log), profile_dir=str(tmp_path), cluster_id="a")

    controller, rank, ranks = (
        of(LocalControllerLauncher, "controller"),
        of(LocalEngineLauncher, "rank"),
        ProcessSet(profile_dir=str(tmp_path)),
    )
    ranks.launchers["0"] = rank
    engines = Engines(ProcessLauncher(), 1, "near")
    recorded(clusters, engines.id)
    engines.client = SimpleNamespace(close=lambda: None)
    engines._cluster = SimpleNamespace(controller=controller, engine_set=ranks, cluster_file="")
    engines.detach()
    for part in (controller, rank):
        part.notify_stop({"exit_code": -15})
    assert [(tmp_path / name).read_text() for name in ("controller", "rank")] == ["words", "words"]
    assert caplog.records == []


# ---------------------------------------------------------------- scaled


@pytest.mark.parametrize("taken_up", [False, True])
def test_a_cluster_that_may_not_outnumber_the_cores_may_not_when_it_is_scaled(taken_up: bool) -> None:
    from workbench.clusters.launchers.choose import check_places, choose_launcher

    launcher = choose_launcher("torch", 1, None, oversubscribe=False)
    if taken_up:
        launcher = pickle.loads(pickle.dumps(launcher))
    with pytest.raises(ConfigError, match="oversubscribe is off"):
        check_places(launcher, num_cores() + 1)
    check_places(choose_launcher("torch", 1, None, oversubscribe=True), num_cores() + 1)
