"""Ranks that are killed: one error that names the rank and the cause, within seconds; a run that continues; stopped is not dead."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.killing import Dies, DyingCodec, Place, Slow, SlowUntil
from tests.distributed.pool import ROOT, shared_pool
from tests.forked import forked
from tests.laws import tiny
from tests.laws.train import MPI, make_job
from tests.waiting import within
from workbench.algorithms import BackupSGD, LayerwiseSGD, PipeSGD, SynchronousSGD
from workbench.analysis.runs_table import runs_table
from workbench.cli.main import main
from workbench.clusters import Cluster
from workbench.clusters.local.mpi_install import find_mpi, mpiexec_command
from workbench.collectives import Ring
from workbench.errors import PeerFailed, WorkbenchError
from workbench.plots.live.header import header
from workbench.program import Algorithm
from workbench.runtimes.control.commands import PAUSE, RESUME, read_commands, write_command
from workbench.runtimes.liveness import failure_detector as detector
from workbench.runtimes.liveness.failure_detector import FailureDetector, heartbeat_name
from workbench.runtimes.rank.main import run_rank
from workbench.settings import Settings
from workbench.trace.run import Run

NUM_RANKS = 3
KILLED, STEP = 1, 3
SOON_S = 8.0  # from the beginning of a run of some steps to its end on the survivors; the rest is a busy machine
HOW = Settings(steps=20, batch_size=1, timeout_s=60)
NATIVE, CODED = SynchronousSGD(), SynchronousSGD(collective=Ring(codec=DyingCodec()))
LAYERWISE, PIPE = LayerwiseSGD(bucket_bytes=200.0), PipeSGD(width=2)


# ---------------------------------------------------------------- on the survivors


@pytest.mark.parametrize(
    ("algorithm", "place"),
    [
        (NATIVE, "forward"),
        (NATIVE, "collective"),
        (NATIVE, "record"),
        (NATIVE, "checkpoint"),
        (CODED, "collective"),
        (CODED, "codec"),
        (LAYERWISE, "forward"),
        (LAYERWISE, "collective"),
        (PIPE, "forward"),
        (PipeSGD(width=2, collective=Ring(codec=DyingCodec())), "codec"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_survivors_name_the_rank_that_is_gone(algorithm: Algorithm, place: Place) -> None:
    """On gloo, where a rank sees only that some connection ended."""
    job = make_job("torch", NUM_RANKS, algorithm, tiny.problem(Dies(place, KILLED, STEP)), HOW, stop_after=STEP)
    found = shared_pool("torch", NUM_RANKS).outcomes([(run_rank, (job,))] * NUM_RANKS, may_die=True)
    assert isinstance(found[KILLED].error, EOFError | OSError), "it was to be killed"
    for rank in (0, 2):
        assert isinstance(found[rank].error, PeerFailed), found[rank].trace
        assert f"rank {KILLED}'s process is gone at step " in str(found[rank].error)
        assert found[rank].seconds < SOON_S
    folder = Path(job.folder)
    info = json.loads((folder / "run.json").read_text())
    assert (info["status"], f"rank {KILLED}'s process is gone" in info["error"]) == ("failed", True)
    assert list(folder.glob("failed-*")) == [], "nobody but the killed rank is to blame"
    assert [path.name for path in folder.glob("present-*")] == [heartbeat_name(KILLED)]
    assert max(row["step"] for row in Run.load(folder).metrics[0]) >= STEP - 1 - algorithm.max_staleness


def test_the_record_is_kept_without_rank_0() -> None:
    job = make_job("torch", NUM_RANKS, NATIVE, tiny.problem(Dies("forward", 0, STEP)), HOW)
    found = shared_pool("torch", NUM_RANKS).outcomes([(run_rank, (job,))] * NUM_RANKS, may_die=True)
    assert all(isinstance(found[rank].error, PeerFailed) for rank in (1, 2)), found[1].trace
    info = json.loads((Path(job.folder) / "run.json").read_text())
    assert (info["status"], f"rank 0's process is gone at step {STEP}" in info["error"]) == ("failed", True)


def elsewhere(folder: Path, rank: int, host: str = "far") -> Path:
    """A rank of another machine, as it is seen from here."""
    path = folder / heartbeat_name(rank)
    path.write_text(json.dumps({"rank": rank, "host": host, "place": host, "pid": 1, "started_s": 0.0}))
    return path


def test_a_host_that_went_away_is_found_by_its_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no exit status, and no connection ends.

    If one of its ranks is heard, or this rank takes a step, the host is not gone.
    """
    monkeypatch.setattr(detector, "HEARTBEAT_S", 0.05)
    paths = [elsewhere(tmp_path, rank) for rank in (1, 2)]
    said: list[str] = []
    step = [7]
    with FailureDetector(tmp_path, 0, 3, said.append, lambda: step[0], lost_s=0.6):
        for _ in range(20):
            os.utime(paths[1])
            time.sleep(0.05)
        assert said == [], "rank 1 is silent, rank 2 beside it is not"
        for _ in range(20):
            step[0] += 1
            time.sleep(0.05)
        assert said == [], "who takes steps has heard of all"
        assert within(5, lambda: bool(said))
    assert re.match("rank [12] is gone at step 0: no rank on far has reported for ", said[0]), (
        "whichever is looked at when the time is up"
    )
    assert not (tmp_path / heartbeat_name(0)).exists()


# ---------------------------------------------------------------- from a notebook


@pytest.fixture(scope="module", params=["torch", pytest.param("local", marks=pytest.mark.mpi)])
def cluster(
    forked_starts: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Ranks that are processes of gloo, or of one MPI world."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with Cluster(NUM_RANKS, launcher=request.param, quiet=True) as cluster:
            yield cluster


def weights(run: Any) -> dict[str, Any]:
    found: dict[str, Any] = load_file(run.folder / "model.safetensors")
    return found


@pytest.mark.notebooks
@pytest.mark.timeout(240)
def test_a_killed_rank_is_named_and_a_healed_cluster_goes_on_to_the_same_weights(
    cluster: Cluster, runs: Path, tmp_path: Path
) -> None:
    algorithm, plain, slow = (
        PipeSGD(width=2, collective=Ring()),
        tiny.problem(partial(tiny.FailsAt, None, 0)),
        tiny.problem(partial(Slow, 0.1)),
    )
    whole = cluster.train(algorithm, plain, steps=40, batch_size=2).wait(120)
    begun = cluster.train(algorithm, slow, steps=40, batch_size=2)
    assert within(60, lambda: len(begun.run.curve()[0]) > 3)
    assert begun.stop().wait(120).status == "stopped"
    victim = Dies("collective", 2, 5, once=str(tmp_path / "once"))
    run = cluster.train(algorithm, tiny.problem(victim), steps=40, batch_size=2, resume=begun)
    begin = time.monotonic()
    with pytest.raises(WorkbenchError, match=r"rank 2's process is gone: killed by signal 9 \(SIGKILL\) at step \d+"):
        run.wait(120)
    assert within(10, lambda: run.done), "the others come back, or end with it"
    assert time.monotonic() - begin < 20
    assert "rank 2's process is gone: killed by signal 9" in run.run.info["error"]
    cluster.heal()
    assert cluster.state == "ready"
    again = cluster.train(algorithm, plain, steps=40, batch_size=2, resume=begun).wait(120)
    assert again.status == "finished"
    for name, value in weights(whole).items():
        assert torch.equal(weights(again)[name], value), name


@pytest.mark.notebooks
@pytest.mark.timeout(240)
def test_a_stopped_rank_is_told_from_a_dead_one_and_goes_on_to_the_same_weights(cluster: Cluster, runs: Path) -> None:
    algorithm = SynchronousSGD()
    whole = cluster.train(algorithm, tiny.problem(partial(tiny.FailsAt, None, 0)), steps=40, batch_size=2).wait(120)
    run = cluster.train(algorithm, tiny.problem(Slow), steps=40, batch_size=2)
    assert within(60, lambda: len(run.run.curve()[0]) > 3)
    pid = cluster.ranks[1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert within(10, lambda: cluster.status()[1]["state"] == "stopped"), cluster.status()
        assert [row["state"] for row in cluster.status()] == ["training", "stopped", "training"]
        with pytest.raises(
            TimeoutError, match=rf"rank 1 is stopped \(SIGSTOP: kill -CONT {pid} on .*; rank 2 is alive at step \d+"
        ):
            run.wait(0.5)
        assert cluster.state == "training"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert run.wait(120).status == "finished"
    assert all(torch.equal(weights(run)[name], value) for name, value in weights(whole).items())


@pytest.mark.notebooks
@pytest.mark.timeout(240)
def test_servers_go_on_without_a_worker_and_say_so_at_once(cluster: Cluster, runs: Path, tmp_path: Path) -> None:
    ends = tmp_path / "ends"
    run = cluster.train(BackupSGD(backups=1), tiny.problem(partial(SlowUntil, 0.1, ends)), steps=60, batch_size=2)
    assert within(60, lambda: len(run.run.curve()[0]) > 3)
    os.kill(cluster.ranks[2]["pid"], signal.SIGKILL)
    left = re.compile(r"2 of 3 ranks: rank 2 left at step \d+ \(its process has ended\)")
    assert within(10, lambda: left.search(repr(run)) is not None), repr(run)
    assert left.search(header([run.run]))
    assert left.search(str(runs_table(root=run.folder.parent)))
    assert within(10, lambda: "2 of 3 ranks" in repr(cluster)), repr(cluster)
    assert (cluster.state, cluster.status()[2]["state"]) == ("training", "gone")
    ends.touch()
    assert run.wait(120).status == "finished"
    info = run.run.info
    assert (info["status"], [row["rank"] for row in info["departures"]], info.get("error")) == ("finished", [2], None)
    assert info["result"]["last_step"] == 59
    assert (run.summary()["workers"], run.summary()["remaining"]) == (3, 2)
    assert (cluster.state, cluster.status()[2]["state"]) == ("lost", "gone")
    cluster.heal()
    assert cluster.state == "ready"


# ---------------------------------------------------------------- from a shell


def train_and_kill(runs: Path, *arguments: str, python: Sequence[str] = ()) -> tuple[Path, int, str]:
    """`workbench train` on three ranks, of which the last is killed after its first steps: run folder, exit status, output."""
    command = ("-m", "workbench", "train", *arguments, "--workers", "3", "--json")
    process = subprocess.Popen(
        [*python, *command] if python else forked(*command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert within(
            90,
            lambda: (
                list(runs.glob("2*/metrics-00002.jsonl")) and next(runs.glob("2*/metrics-00002.jsonl")).stat().st_size
            ),
        )
        folder = next(runs.glob("2*"))
        os.kill(json.loads((folder / heartbeat_name(2)).read_text())["pid"], signal.SIGKILL)
        _, said = process.communicate(timeout=90)
    finally:
        process.kill()
        process.communicate()
    return folder, process.returncode, said


@pytest.mark.parametrize("runtime", ["torch", MPI])
def test_the_command_line_names_the_rank_and_the_signal(runtime: str, runs: Path, no_process_left: None) -> None:
    """On MPI with a new interpreter, as a user starts it."""
    python = [sys.executable] if runtime == "mpi" else []
    folder, status, said = train_and_kill(
        runs, "synchronous-sgd", "--runtime", runtime, "--steps", "1000000", python=python
    )
    assert status == 1
    assert said.startswith("workbench: rank 2's process is gone: killed by signal 9 (SIGKILL) at step "), said
    info = json.loads((folder / "run.json").read_text())
    assert (info["status"], info["error"][:52]) == ("failed", "rank 2's process is gone: killed by signal 9 (SIGKIL")


# Few long steps: what follows a kill needs time.
STEPS, LONG_STEPS = 20, ("--steps", "20", "--compute", "backward_s=0.1", "--evaluate-every", "0")
SHRINK = ("--on-failure", "shrink")
GOING_ON: list[Any] = [
    ("torch", "async-sgd"),
    ("torch", "partial-all-reduce"),
    ("torch", "local-sgd", *SHRINK),
    pytest.param(("mpi", "backup-sgd", "--backups", "1"), marks=pytest.mark.mpi),
    pytest.param(("mpi", "partial-all-reduce"), marks=pytest.mark.mpi),
    pytest.param(("mpi", "pipe-sgd", "--set", "collective=ring:linear8", *SHRINK), marks=pytest.mark.mpi),
]


@pytest.mark.parametrize("how", GOING_ON, ids=" ".join)
def test_the_command_line_goes_on_without_a_rank(how: tuple[str, ...], runs: Path, no_process_left: None) -> None:
    folder, status, said = train_and_kill(runs, *how[1:], "--runtime", how[0], *LONG_STEPS)
    assert status == 0, said
    info = json.loads((folder / "run.json").read_text())
    assert (info["status"], info["result"]["steps"], [row["rank"] for row in info["departures"]]) == (
        "finished",
        STEPS,
        [2],
    )
    assert re.search(r"the run continues with 2 of 3 ranks: rank 2 left at step \d+ \(its process has ended\)", said)
    assert how[0] == "mpi" or re.search(r"rank 2's process is gone: killed by signal 9 \(SIGKILL\) at step \d+", said)


@pytest.mark.mpi
def test_a_launcher_that_is_asked_for_half_is_told_the_whole(runs: Path, no_process_left: None) -> None:
    """With `--with-ft ulfm` alone, ranks may wait for the dead one forever when they end."""
    train = forked(
        "-m", "workbench", "train", "local-sgd", "--runtime", "mpi", "--steps", "5", "--on-failure", "shrink"
    )
    command, env = mpiexec_command(find_mpi(), 2, train, outlives=True)
    end = command.index("ulfm") + 1
    assert command[end : end + 3] == ["--mca", "async_mpi_finalize", "1"]
    half = subprocess.run(
        [*command[:end], *command[end + 3 :]], env=env, capture_output=True, text=True, timeout=90, check=False
    )
    assert half.returncode != 0
    assert "Open MPI 5 under `mpiexec --with-ft ulfm --mca async_mpi_finalize 1`" in half.stderr
    whole = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert whole.returncode == 0, whole.stderr


@pytest.mark.parametrize(
    ("algorithm", "victim", "runtime"),
    [
        (("async-sgd",), 2, "torch"),
        (("pipe-sgd", *SHRINK), 0, "torch"),
        (("partial-all-reduce",), 1, "torch"),
        (("ad-psgd", *SHRINK), 2, "torch"),
        pytest.param(("pipe-sgd", *SHRINK), 0, "mpi", marks=pytest.mark.mpi),
    ],
    ids=str,
)
def test_the_command_line_starts_another_process_in_its_place(
    algorithm: tuple[str, ...], victim: int, runtime: str, runs: Path, no_process_left: None
) -> None:
    """The run is paused until it has come, so that it cannot be over before."""
    command = forked("-m", "workbench", "train", *algorithm, "--replace", "--runtime", runtime, *LONG_STEPS)
    process = subprocess.Popen([*command, "--workers", "3", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert within(90, lambda: any(path.stat().st_size for path in runs.glob("2*/metrics-00002.jsonl")))
        folder = next(runs.glob("2*"))
        write_command(folder, PAUSE)
        os.kill(json.loads((folder / heartbeat_name(victim)).read_text())["pid"], signal.SIGKILL)
        assert within(60, lambda: {"join": victim} in read_commands(folder))
        write_command(folder, RESUME)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, said
    info = json.loads((folder / "run.json").read_text())
    assert info["status"] == "finished"
    assert [row["rank"] for row in info["departures"]] == [row["rank"] for row in info["joined"]] == [victim]
    assert Run.load(folder).metrics[victim][-1]["step"] == STEPS - 1


# ---------------------------------------------------------------- evaluations that a killed run left


def test_evaluations_that_a_killed_rank_left_are_told_and_made_by_one_command(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluations of a run whose ranks are at different steps: rank 0 would have made them at the end."""
    words = [
        "train",
        "async-sgd",
        "--workers",
        "2",
        "--runtime",
        "torch",
        "--steps",
        "1000000",
        "--evaluate-every",
        "20",
    ]
    process = subprocess.Popen(forked("-m", "workbench", *words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert within(60, lambda: len(list(runs.glob("*/evaluations/step-*.pt"))) >= 3)
        (folder,) = runs.iterdir()
        os.kill(json.loads((folder / heartbeat_name(0)).read_text())["pid"], signal.SIGKILL)
        assert process.wait(60) != 0
    finally:
        process.kill()
        process.wait()
    num_left = len(list(folder.glob("evaluations/step-*.pt")))
    assert main(["show", "last"]) == 0
    assert (
        f"{num_left} evaluations wait in evaluations/: `workbench evaluate {folder.name}` makes them"
        in capsys.readouterr().out
    )
    assert main(["evaluate", folder.name]) == 0
    assert f"evaluations made: {num_left}" in capsys.readouterr().out
    found = Run.load(folder).evaluations()
    assert [row["step"] for row in found] == list(range(19, 20 * num_left, 20))
    assert found[-1]["accuracy"] > found[0]["accuracy"]
    assert main(["show", "last"]) == 0
    assert "workbench evaluate" not in capsys.readouterr().out
