"""The script that a Slurm job runs: ends, warnings, and the reaper's work after a cluster's end. Needs no Slurm."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.waiting import within
from workbench.clusters.local import spawn
from workbench.clusters.slurm import batch_job as slurm_job
from workbench.clusters.supervision.reaper import AT_END, run_last
from workbench.runtimes.control.job import JOB_VARIABLE, RECORD_NAME, STOP_NAME, job_stops, record_run


@contextmanager
def job(folder: Path, command: list[str], **words: Any) -> Iterator[subprocess.Popen[str]]:
    """The script at work, with its output in a pipe."""
    folder.mkdir(exist_ok=True)
    fixed = {"environment": {"FROM_SPEC": "yes"}, "folder": str(folder), "controller": None, "connection": None}
    spec = {**fixed, "on_warning": "command", "requeue": False, "command": command, **words}
    (folder / "job.json").write_text(json.dumps(spec))
    argv = [sys.executable, "-P", slurm_job.__file__, str(folder / "job.json")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_what_is_submitted_exists() -> None:
    from workbench.clusters.launchers import job_launcher

    assert Path(job_launcher.SCRIPT).samefile(slurm_job.__file__)


def ranks_that_wait(folder: Path) -> list[str]:
    """A command that says that it runs, and waits."""
    return ["sh", "-c", f"touch {folder}/runs; exec sleep 600"]


def test_a_job_ends_as_its_ranks_do(tmp_path: Path) -> None:
    with job(tmp_path / "a", ["sh", "-c", "echo $FROM_SPEC; exit 3"]) as process:
        assert process.communicate(timeout=20)[0] == "yes\n"
        assert process.returncode == 3


def test_a_job_whose_cluster_is_gone_ends_its_ranks(tmp_path: Path, no_process_left: None) -> None:
    folder = tmp_path / "cluster"
    with job(folder, ranks_that_wait(tmp_path)) as process:
        assert within(20, (tmp_path / "runs").exists)
        shutil.rmtree(folder)
        assert "the cluster's folder was removed" in process.communicate(timeout=30)[0]
        assert process.returncode == 1


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_a_job_that_is_ended_leaves_nothing(tmp_path: Path, no_process_left: None, sign: signal.Signals) -> None:
    with job(tmp_path / "cluster", ranks_that_wait(tmp_path)) as process:
        assert within(20, (tmp_path / "runs").exists)
        process.send_signal(sign)
        process.communicate(timeout=20)


def test_ranks_have_the_time_to_save_that_their_launcher_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = f"trap 'until test -e {tmp_path}/late; do sleep 0.01; done; touch {tmp_path}/saved; exit 0' TERM"
    waits = f"{saves}; touch {tmp_path}/runs; while true; do sleep 0.01; done"
    ended = object.__new__(slurm_job.Job)  # without its signal handlers
    with subprocess.Popen(["sh", "-c", waits], start_new_session=True) as ranks:
        assert within(20, (tmp_path / "runs").exists)
        passed_s = 0.0

        def sleep(seconds: float) -> None:
            nonlocal passed_s
            passed_s += seconds
            if passed_s >= spawn.GRACE_S and not (tmp_path / "late").exists():
                (tmp_path / "late").touch()
                ranks.wait(20)

        monkeypatch.setattr(slurm_job, "time", SimpleNamespace(monotonic=lambda: passed_s, sleep=sleep))
        ended.processes = [ranks]
        ended.close()
    assert (tmp_path / "saved").exists() and ranks.returncode == 0


def test_the_warning_becomes_a_stop_word_of_the_training_that_runs(tmp_path: Path) -> None:
    folder, run = tmp_path / "cluster", tmp_path / "run"
    run.mkdir()
    with job(folder, ranks_that_wait(tmp_path)) as process:
        (folder / "cluster.json").write_text(json.dumps({"run": str(run)}))
        assert within(20, (tmp_path / "runs").exists)
        process.send_signal(signal.SIGUSR1)
        assert within(20, (run / "control.jsonl").exists)
        assert within(5, lambda: json.loads((run / "control.jsonl").read_text() or "{}") == {"stop": True})
        assert process.poll() is None  # the ranks continue: their owner decides
        (late := tmp_path / "late").mkdir()
        (folder / "cluster.json").write_text(json.dumps({"run": str(late)}))
        assert within(20, (late / "control.jsonl").exists), (
            "a training that begins after the warning ends with a checkpoint, too"
        )
        time.sleep(3 * slurm_job.POLL_S)
    assert [(run / "control.jsonl").read_text().count("stop") for run in (run, late)] == [1, 1]


def test_a_job_warns_itself_before_its_time_limit(tmp_path: Path) -> None:
    folder, run = tmp_path / "cluster", tmp_path / "run"
    run.mkdir()
    folder.mkdir()
    (folder / "cluster.json").write_text(json.dumps({"run": str(run)}))
    with job(folder, ranks_that_wait(tmp_path), warn_after_s=0.1) as process:
        assert within(20, (run / "control.jsonl").exists)
        assert process.poll() is None


def test_a_warning_before_any_training_does_no_harm(tmp_path: Path) -> None:
    with job(tmp_path / "cluster", ranks_that_wait(tmp_path)) as process:
        assert within(20, (tmp_path / "runs").exists)
        process.send_signal(signal.SIGUSR1)
        assert process.stdout is not None
        assert "the time limit is near" in process.stdout.readline()
        assert process.poll() is None


TRAINS = """
echo started $*
echo '{{"run": "{run}"}}' > {folder}/cluster.json
until grep -q stop "{run}/control.jsonl" 2>/dev/null; do sleep 0.1; done
echo '{{"status": "{status}"}}' > "{run}/run.json"
test $# = 0 && exit 0
echo stopped
sleep 600 # resumed, it takes its time
"""


@pytest.fixture
def requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the arguments of `scontrol`, which does nothing else; in Slurm's job 7."""
    told, scontrol = tmp_path / "told", tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $* > {told}\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return told


def test_a_stopped_training_goes_on_in_the_next_turn(tmp_path: Path, requeued: Path) -> None:
    folder, run = tmp_path / "job", tmp_path / "the run"
    run.mkdir()
    (run / "checkpoint-00000.pt").touch()
    (tmp_path / "train.sh").write_text(TRAINS.format(run=run, folder=folder, status="stopped"))
    command = ["sh", str(tmp_path / "train.sh")]
    with job(folder, command, requeue="checkpoint") as process:
        assert within(20, (folder / "cluster.json").exists)
        process.send_signal(signal.SIGUSR1)
        assert "back into the queue, to continue" in process.communicate(timeout=30)[0]
    assert requeued.read_text() == "requeue 7\n"
    requeued.unlink()
    (run / "control.jsonl").unlink()
    with job(folder, command, requeue="checkpoint") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"started --resume {run}\n"
        process.send_signal(signal.SIGUSR1)  # the warning, and the end before the command is done with it
        assert "the time limit is near" in process.stdout.readline()
        assert process.stdout.readline() == "stopped\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert not requeued.exists()  # a cancelled job is not requeued


@pytest.mark.parametrize(("status", "checkpoint"), [("finished", True), ("stopped", False)])
def test_a_training_that_cannot_go_on_is_not_requeued(
    tmp_path: Path, requeued: Path, status: str, checkpoint: bool
) -> None:
    folder, run = tmp_path / "job", tmp_path / "run"
    run.mkdir()
    if checkpoint:
        (run / "checkpoint-00000.pt").touch()
    (tmp_path / "train.sh").write_text(TRAINS.format(run=run, folder=folder, status=status))
    with job(folder, ["sh", str(tmp_path / "train.sh")], requeue="checkpoint") as process:
        assert within(20, (folder / "cluster.json").exists)
        process.send_signal(signal.SIGUSR1)
        process.communicate(timeout=30)
        assert process.returncode == 0
    assert not requeued.exists() and not (folder / "resume").exists()


@pytest.mark.parametrize(("status", "told"), [(0, "back into the queue"), (3, "ended with status 3")])
def test_an_own_command_gets_the_signal_and_starts_again_as_it_is(
    tmp_path: Path, requeued: Path, monkeypatch: pytest.MonkeyPatch, status: int, told: str
) -> None:
    folder = tmp_path / "job"
    script = f"trap 'cat {folder}/stop; exit {status}' USR1; touch {tmp_path}/runs; while true; do sleep 0.1; done"
    for _ in range(2):
        with job(folder, ["sh", "-c", script, "x"], on_warning="signal", requeue="again") as process:
            assert within(20, (tmp_path / "runs").exists)
            (tmp_path / "runs").unlink()
            monkeypatch.setenv(JOB_VARIABLE, str(folder))
            assert not job_stops(), "the file of an earlier turn"
            process.send_signal(signal.SIGUSR1)
            said = process.communicate(timeout=30)[0]
            assert process.returncode == status and told in said and job_stops()
        assert requeued.exists() == (status == 0)
    assert not (folder / "resume").exists()


def test_a_command_is_interrupted(tmp_path: Path) -> None:
    script = f"trap 'echo interrupted; exit 0' INT; touch {tmp_path}/runs; while true; do sleep 0.1; done"
    with job(tmp_path / "job", ["sh", "-c", script], on_warning="interrupt") as process:
        assert within(20, (tmp_path / "runs").exists)
        process.send_signal(signal.SIGUSR1)
        assert process.communicate(timeout=30)[0].endswith("interrupted\n")


def test_jobs_of_one_node_get_different_free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    def port_of(number: int) -> int:
        found = slurm_job.rendezvous({"SLURM_JOB_ID": str(number), "SLURMD_NODENAME": "n1"})
        assert found["MASTER_ADDR"] == "n1"
        return int(found["MASTER_PORT"])

    first = port_of(4711)
    assert 10_000 <= first < 30_000 and port_of(4711) == first != port_of(4712)
    with socket.socket() as other:
        other.bind(("", first))
        other.listen()
        assert port_of(4711) not in (first, port_of(4711 - 1))


def test_ranks_meet_where_their_job_says(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo ${MASTER_ADDR-none} ${MASTER_PORT-none}"]
    with job(tmp_path / "a", command) as process:
        assert process.communicate(timeout=20)[0] == "none none\n"
    with job(tmp_path / "b", command, rendezvous=True) as process:
        address, port = process.communicate(timeout=20)[0].split()
        assert address == (os.environ.get("SLURMD_NODENAME") or os.uname().nodename) and int(port) >= 10_000


def test_the_package_and_the_job_agree_on_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (RECORD_NAME, STOP_NAME) == (slurm_job.RECORD, slurm_job.STOP)
    monkeypatch.delenv(JOB_VARIABLE, raising=False)
    record_run(tmp_path / "run")  # outside of a job
    assert not job_stops()
    monkeypatch.setenv(JOB_VARIABLE, str(tmp_path))
    record_run(tmp_path / "run")
    assert json.loads((tmp_path / slurm_job.RECORD).read_text()) == {"run": str(tmp_path / "run")}


def test_a_controller_that_does_not_start_is_told(tmp_path: Path) -> None:
    argv = {"controller": ["sh", "-c", "echo no port; exit 4"], "connection": str(tmp_path / "never")}
    with job(tmp_path / "cluster", ["sleep", "600"], **argv) as process:
        assert "no port" in process.communicate(timeout=20)[0]
        assert process.returncode == 1


def test_ranks_end_with_their_controller(tmp_path: Path, no_process_left: None) -> None:
    connection = tmp_path / "there"
    argv = {"controller": ["sh", "-c", f"touch {connection}; exec sleep 601"], "connection": str(connection)}
    with job(tmp_path / "cluster", ranks_that_wait(tmp_path), **argv) as process:
        assert within(20, (tmp_path / "runs").exists)
        controller = next(child for child in psutil.Process(process.pid).children() if "601" in child.cmdline())
        controller.kill()
        process.communicate(timeout=20)
        assert process.returncode == 1


def test_what_a_cluster_leaves_for_its_end_is_run(tmp_path: Path) -> None:
    run_last(str(tmp_path))
    (tmp_path / AT_END).write_text(json.dumps(["touch", str(tmp_path / "cancelled")]))
    run_last(str(tmp_path))
    assert (tmp_path / "cancelled").exists()
