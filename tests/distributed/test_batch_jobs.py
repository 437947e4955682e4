"""Clusters in jobs of PBS, LSF, SGE and HTCondor: here stand-ins for their commands, which run the job on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import stand_in_scheduler
from tests.waiting import within
from workbench.algorithms import SynchronousSGD
from workbench.clusters import Cluster, attach
from workbench.clusters.emulated import EmulatedNetwork
from workbench.clusters.schedulers.dialects import DIALECTS
from workbench.clusters.supervision.registry import state_folder
from workbench.errors import LaunchError
from workbench.problems import digits_mlp

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.notebooks,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("forked_starts", "no_process_left", "runs"),
]
HERE = ",address=127.0.0.1"  # the job runs on this machine
OPTIONS = {"pbs": ":nodes=1", "lsf": ":nodes=1", "sge": ":pe=mpi", "htcondor": ":account=physics"}


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A function that puts a scheduler's commands first on PATH, and returns the folder of its jobs."""

    def begin(name: str) -> Path:
        folder = tmp_path / name
        bin_folder = stand_in_scheduler.install(folder, name)
        monkeypatch.setenv("PATH", f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("OMPI_MCA_mpi_yield_when_idle", "1")  # jobs know nothing of this machine's cores
        return folder

    return begin


def trained(cluster: Cluster) -> tuple[str, int]:
    run = cluster.train(SynchronousSGD(), digits_mlp(), steps=5, evaluate_every=0).wait(90)
    return run.status, run.run.info["result"]["steps"]


@pytest.mark.parametrize("name", DIALECTS)
def test_a_cluster_trains_in_a_job_and_its_stop_cancels_the_job(scheduler: Callable[[str], Path], name: str) -> None:
    folder = scheduler(name)
    submit, _, cancel = stand_in_scheduler.COMMANDS[name]
    with Cluster(2, launcher=f"{name}{OPTIONS[name]}{HERE},walltime=01:00:00", quiet=True) as cluster:
        assert [(rank["rank"], rank["size"]) for rank in cluster.ranks] == [(0, 2), (1, 2)]
        assert trained(cluster) == ("finished", 5)
        assert cluster.state == "ready" and stand_in_scheduler.alive(folder, "1")
        assert cluster.client[:].apply_sync(os.getcwd) == [os.getcwd()] * 2
        state = state_folder() / cluster.id
        assert json.loads((state / "job.json").read_text())["warn_after_s"] == 3540
        at_end = json.loads((state / "at-end.json").read_text())
        job = at_end[1]
        assert (at_end, job.partition(".")[0]) == ([cancel, job], "1"), "a killed notebook's job is cancelled, too"
    assert within(10, lambda: not stand_in_scheduler.alive(folder, "1"))
    calls = (folder / "calls").read_text().splitlines()
    assert calls[0].split()[0] == submit and f"{cancel} {job}" in calls


def test_a_job_that_waits_is_told_and_starts_later(scheduler: Callable[[str], Path]) -> None:
    folder = scheduler("pbs")
    (folder / "hold").touch()
    cluster = Cluster(1, launcher="pbs:address=127.0.0.1", quiet=True, wait=False, timeout_s=60)
    try:
        launcher = cluster._engines.launcher
        assert within(20, lambda: (folder / "1.script").exists())
        waits = within(20, lambda: launcher.waits(cluster._engines.engine_set))
        assert waits == "pending: Not Running: no node is free"
        (folder / "hold").unlink()
        assert [rank["rank"] for rank in cluster.wait(90).ranks] == [0]
    finally:
        cluster.stop()


def test_a_detached_cluster_is_found_in_its_job(scheduler: Callable[[str], Path]) -> None:
    folder = scheduler("lsf")
    cluster = Cluster(1, launcher=f"lsf:nodes=1{HERE}", quiet=True)
    with attach(cluster.detach(), quiet=True) as found:
        assert trained(found) == ("finished", 5)
        assert (folder / "calls").read_text().count("bsub") == 1
    assert "bkill 1" in (folder / "calls").read_text()


def test_the_controller_may_run_in_the_job(scheduler: Callable[[str], Path]) -> None:
    folder = scheduler("sge")
    with Cluster(1, launcher="sge:pe=mpi,controller=job", quiet=True) as cluster:
        log = (state_folder() / cluster.id / "job.log").read_text()
        assert log.startswith("[job 1] controller on ")
        assert len(cluster.client.ids) == 1
    assert (folder / "calls").read_text().count("qsub") == 1


@pytest.mark.parametrize("name", DIALECTS)
def test_a_refused_job_is_told_with_the_schedulers_message(scheduler: Callable[[str], Path], name: str) -> None:
    scheduler(name)
    with pytest.raises(LaunchError) as error:
        Cluster(1, launcher=f"{name}{OPTIONS[name]}{HERE},extra=closed", quiet=True)
    assert str(error.value) == f"{DIALECTS[name].name} refused the job: {stand_in_scheduler.REFUSED[name]}"


def test_a_job_that_fails_says_why(scheduler: Callable[[str], Path], tmp_path: Path) -> None:
    scheduler("pbs")
    path = tmp_path / "job.sh"
    path.write_text(
        "#PBS -l select={nodes}:ncpus={ranks_per_node}:mpiprocs={ranks_per_node}\n"
        "exec > {log} 2>&1\necho no such module\nexit 3\nexec {command}\n"
    )
    with pytest.raises(LaunchError) as error:
        Cluster(1, launcher=f"pbs:template={path}{HERE}", quiet=True)
    for words in ("PBS's job ended before its 1 ranks were ready", "no such module", "PBS's job 1.stand-in: UNKNOWN"):
        assert words in str(error.value)


def test_without_an_address_the_fix_is_named(scheduler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler("pbs")
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    with pytest.raises(
        LaunchError, match=r"only its loopback address; give its address, 'pbs:address=.*controller=job"
    ):
        Cluster(1, launcher="pbs", quiet=True)


SCRIPT = """
import json
import workbench as wb
with wb.Cluster(3, launcher="pbs:nodes=2", quiet=True) as cluster:
    run = cluster.train(wb.SynchronousSGD(), wb.problems.digits_mlp(), steps=5, evaluate_every=0).wait(120)
    ranks = [(rank["host"], rank["rank"], rank["size"]) for rank in cluster.ranks]
    print(json.dumps({"ranks": ranks, "status": run.status, "steps": run.run.info["result"]["steps"]}))
"""


@pytest.mark.root
def test_ranks_of_a_job_on_two_hosts_are_one_world(tmp_path: Path) -> None:
    """The hosts are those of an emulated network; they are reached as by ssh, which passes no environment."""
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\nexec env -i PATH="$PATH" HOME="$HOME" /dev/shm/.workbench/agent "$@"\n')
    agent.chmod(0o755)
    bin_folder = stand_in_scheduler.install(tmp_path / "pbs", "pbs", ["host0", "host1"])
    with EmulatedNetwork(2, rate="1gbit") as network:
        own = {
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            "PRTE_MCA_plm_ssh_agent": str(agent),
            "OMPI_MCA_plm_rsh_agent": str(agent),
            "XDG_CACHE_HOME": str(tmp_path),
        }
        env: dict[str, Any] = {**os.environ, **network.environment, **own}
        for name in (
            "WORKBENCH_EMULATED",
            "PRTE_MCA_prte_default_hostfile",
            "OMPI_MCA_orte_default_hostfile",
            "HYDRA_HOST_FILE",
        ):
            del env[name]  # what our launchers find the hosts by: here the job names them
        command = network.command(0, [sys.executable, "-c", SCRIPT])
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ranks"] == [["host0", 0, 3], ["host0", 1, 3], ["host1", 2, 3]]
    assert (found["status"], found["steps"]) == ("finished", 5)
