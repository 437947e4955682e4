"""The script that a Slurm job runs: ends, warnings, and the reaper's work after a cluster's end. Needs no Slurm."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import within
from workbench.clusters.slurm import batch_job as slurm_job
from workbench.clusters.supervision.reaper import AT_END, run_last


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
trap 'echo "run: {run}"; test $# = 0 && exit 0' INT  # resumed, it takes its time
touch {folder}/runs
while true; do sleep 0.1; done
"""


def test_a_command_line_is_interrupted_and_its_run_goes_on_in_the_next_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run, told = tmp_path / "job", tmp_path / "the run", tmp_path / "told"
    run.mkdir()
    (run / "checkpoint-00000.pt").touch()
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $* > {told}\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (tmp_path / "train.sh").write_text(TRAINS.format(run=run, folder=tmp_path))
    command = ["sh", str(tmp_path / "train.sh")]
    with job(folder, command, on_warning="interrupt", requeue=True) as process:
        assert within(20, (tmp_path / "runs").exists)
        process.send_signal(signal.SIGUSR1)
        assert "back into the queue, to continue with the run" in process.communicate(timeout=30)[0]
    assert told.read_text() == "requeue 7\n"
    told.unlink()
    with job(folder, command, on_warning="interrupt", requeue=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"started --resume {run}\n"
        process.send_signal(signal.SIGUSR1)  # the warning, and the end before the command is done with it
        assert "the time limit is near" in process.stdout.readline()
        assert process.stdout.readline() == f"run: {run}\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert not told.exists()  # a cancelled job is not requeued


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
