"""Engines that are forked from the cluster's engine server, as a user's are: the tests of clusters fork theirs otherwise."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from tests.waiting import within
from workbench.algorithms import SynchronousSGD
from workbench.clusters import Cluster
from workbench.clusters.engines import engines
from workbench.clusters.engines.engine_server import forked_command, start_engine_server
from workbench.errors import WorkbenchError
from workbench.machine import is_running
from workbench.problems import digits_softmax

pytestmark = [pytest.mark.notebooks, pytest.mark.usefixtures("no_process_left")]


def facts() -> dict[str, Any]:
    import random

    import numpy
    import torch

    return {
        "pid": os.getpid(),
        "server": os.getppid(),
        "draws": (random.random(), float(numpy.random.rand())),  # noqa: NPY002 - what users draw from
        "threads": torch.get_num_threads(),
        "folder": os.getcwd(),
        "cores": os.sched_getaffinity(0),
        "session": os.getsid(0),
    }


@pytest.fixture(params=["local", "torch"])
def launcher(request: pytest.FixtureRequest) -> str:
    if request.param == "local":
        pytest.importorskip("mpi4py")
    return str(request.param)


def asked(cluster: Cluster) -> list[dict[str, Any]]:
    return list(cluster.client[:].apply_async(facts).get(60))


def test_engines_are_forks_of_one_server(launcher: Literal["local", "torch"], tmp_path: Path) -> None:
    with Cluster(2, launcher=launcher, quiet=True) as cluster:
        found = asked(cluster)
        (server,) = {one["server"] for one in found}
        assert "workbench.clusters.engines.engine_server" in psutil.Process(server).cmdline()
        assert [one["pid"] for one in found] == [rank["pid"] for rank in cluster.ranks]
        assert len({one["draws"] for one in found}) == 2, "each has random numbers of its own"
        assert all(one["session"] == one["pid"] for one in found)
        assert {one["folder"] for one in found} == {os.getcwd()}
        assert all(one["cores"] == os.sched_getaffinity(0) for one in found)
        run = cluster.train(SynchronousSGD(), digits_softmax(), steps=3).wait()
        assert run.status == "finished"
    assert within(10, lambda: not psutil.pid_exists(server))


def test_an_engine_that_is_killed_is_named_and_the_cluster_heals(launcher: Literal["local", "torch"]) -> None:
    with Cluster(2, launcher=launcher, quiet=True) as cluster:
        run = cluster.train(SynchronousSGD(), digits_softmax(), steps=100_000)
        assert within(
            60, lambda: (run.status, run.done) == ("running", False) and bool(cluster.status().rows[1].get("step"))
        )
        os.kill(cluster.ranks[1]["pid"], signal.SIGKILL)
        with pytest.raises(WorkbenchError, match=r"rank 1.*killed by signal 9 \(SIGKILL\)"):
            run.wait()
        assert within(30, lambda: cluster.state == "lost")
        cluster.heal()
        assert len(asked(cluster)) == 2


@pytest.mark.parametrize("victim", ["server", "stand-in"])
def test_no_engine_outlives_its_server_or_what_stands_for_it(victim: str) -> None:
    with Cluster(2, launcher="torch", quiet=True) as cluster:
        found = asked(cluster)
        server = psutil.Process(found[0]["server"])
        engine = psutil.Process(found[0]["pid"])
        if victim == "server":
            server.kill()
            assert within(30, lambda: not any(psutil.pid_exists(one["pid"]) for one in found))
        else:
            standing = next(iter(cluster._engines.engine_set.launchers.values())).process
            assert any(word.endswith("forked_engine.py") for word in standing.cmdline())
            standing.kill()
            assert within(30, lambda: not engine.is_running())
        assert within(30, lambda: cluster.state == "lost")


def test_the_others_continue_if_an_engine_and_what_stands_for_it_end_at_once() -> None:
    with Cluster(2, launcher="torch", quiet=True) as cluster:
        first, second = asked(cluster)
        server = psutil.Process(first["server"])
        server.suspend()
        standing = psutil.Process(cluster._engines.engine_set.launchers["0"].process.pid)
        for process in (psutil.Process(first["pid"]), standing):  # one after the other, before the server sees either
            process.kill()
            assert within(10, lambda process=process: not is_running(process))
        server.resume()
        assert within(30, lambda: not psutil.pid_exists(first["pid"]))
        assert not within(2, lambda: not is_running(server)), "it has other engines"
        assert cluster.client[1].apply_async(os.getpid).get(30) == second["pid"]


def test_without_a_server_engines_import_everything_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("AF_UNIX path too long")

    monkeypatch.setattr(engines, "start_engine_server", refuse)
    with Cluster(1, launcher="torch", quiet=True) as cluster:
        (found,) = asked(cluster)
        assert "workbench.clusters.engines.engine_process" in psutil.Process(found["pid"]).cmdline()


AGAIN = "import os; print('imported again', flush=True); os._exit(0)"  # of an interpreter that starts with this folder


def started(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*forked_command(path), "--version"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


def test_libraries_loaded_under_other_variables_are_not_shared(tmp_path: Path) -> None:
    """What stands for an engine then becomes the engine, and another one is still forked."""
    path = tmp_path / "socket"
    folders = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    start_engine_server(path, variables)
    (tmp_path / "sitecustomize.py").write_text(AGAIN)  # after the server's interpreter has started
    assert started(path, **{**variables, "OMP_NUM_THREADS": "2"}).stdout == "imported again\n"
    assert "imported again" not in started(path, **variables).stdout


def test_a_server_that_ended_before_it_was_asked_leaves_the_engine_to_itself(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "socket"))  # and does not listen
        (tmp_path / "sitecustomize.py").write_text(AGAIN)
        assert started(tmp_path / "socket", PYTHONPATH=str(tmp_path)).stdout == "imported again\n"


def test_exit_status_and_output_are_those_of_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    start_engine_server(path, {})
    ended = subprocess.run([*forked_command(path), "--no-such-option"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "unrecognized arguments: --no-such-option" in ended.stderr
