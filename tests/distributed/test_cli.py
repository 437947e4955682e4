"""The command line as a user types it: exit status, output, and files and processes that it leaves.

Ranks are always separate processes. The command is one too in tests of signals, launchers, the exit status, and a
library that does not load; other tests call `main` here. Most processes are forked from one that has imported torch.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.commands import process, train, workbench
from tests.forked import forked
from tests.own_algorithm import write_own_algorithm
from tests.unit.chakra_graphs import communication_us, read, replay
from workbench.cli.main import main
from workbench.trace.kinds import COMPUTE_KINDS
from workbench.trace.run import Run

COMMAND = [sys.executable, "-m", "workbench"]
pytestmark = pytest.mark.usefixtures("forked_starts", "runs", "no_process_left")


@pytest.mark.parametrize("runtime", [pytest.param("mpi", marks=pytest.mark.mpi), "torch", "simulated"])
def test_train_prints_one_object_that_agrees_with_the_record(runtime: str) -> None:
    arguments = (
        "pipe-sgd",
        "--problem",
        "digits-mlp",
        "--runtime",
        runtime,
        "--workers",
        "2",
        "--epochs",
        "2",
        "--set",
        "width=2",
        "--seed",
        "0",
    )
    found = train(*arguments)
    assert {
        key: found[key] for key in ("algorithm", "problem", "runtime", "workers", "steps", "staleness_max", "status")
    } == {
        "algorithm": "PipeSGD",
        "problem": "digits-mlp",
        "runtime": runtime,
        "workers": 2,
        "steps": 46,
        "staleness_max": 1,
        "status": "finished",
    }
    assert found["accuracy"] > 0.85
    run = Run.load(found["folder"])
    assert found["bytes_sent"] == 2 * 46 * run.info["model"]["message_bytes"]
    assert 0 <= found["overlap"] <= 1
    assert 0 < found["step_seconds_median"] < found["seconds"]
    trace = json.loads(run.export_chrome(Path(found["folder"]) / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {1, 2}  # rank + 1: Perfetto does not like a process 0


def test_the_same_seed_gives_the_same_numbers_on_torch_and_in_the_simulator() -> None:
    arguments = ("synchronous-sgd", "--workers", "2", "--steps", "20", "--option", "dtype=float64", "--seed", "3")
    real, simulated = (train(*arguments, "--runtime", runtime) for runtime in ("torch", "simulated"))
    assert real["loss"] == pytest.approx(simulated["loss"], rel=1e-12)
    assert real["accuracy"] == simulated["accuracy"]


def test_runs_show_and_export_find_what_train_left() -> None:
    first = train("synchronous-sgd", "--runtime", "simulated", "--steps", "3")
    second = train("pipe-sgd", "--runtime", "simulated", "--steps", "3", "--timing-only", "--workers", "64")
    listed = workbench("runs").stdout
    assert first["run"] in listed
    assert second["run"] in listed
    assert "SynchronousSGD" in workbench("show", first["run"], "last").stdout
    path = Path(first["folder"]).parent / "trace.json"
    assert str(path) in workbench("export", "last", "--output", str(path)).stdout
    assert json.loads(path.read_text())["traceEvents"]
    page = path.with_name("both.html")
    printed = workbench("timeline", first["run"], "last", "--output", str(page)).stdout
    assert str(page) in printed and "computation alone" in printed and "95 % interval" in printed
    assert "</html>" in page.read_text()
    workbench("timeline", "last", "--steps", "5-8", status=2)
    workbench("timeline", "last", "--ranks", "first", status=2)
    refused = workbench("timeline", "last", "--ranks", "0,99", status=2)
    assert "traces of ranks 0 to 63" in refused.stderr


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("synchronous-sgd", ()),
        ("pipe-sgd", ("--set", "width=2", "--set", "collective=ring")),
        ("layerwise-sgd", ("--set", "bucket_bytes=10000")),
        ("async-sgd", ()),
    ],
)
def test_graphs_of_ranks_replay_to_the_recorded_time(algorithm: str, options: tuple[str, ...], runs: Path) -> None:
    pytest.importorskip("google.protobuf", reason="needs the chakra extra: pip install 'sgd-workbench[chakra]'")
    found = train(
        algorithm, "--runtime", "torch", "--workers", "2", "--steps", "12", "--problem", "digits-mlp", *options
    )
    printed = workbench("export", "last", "--format", "chakra", "--output", str(runs / "graph")).stdout
    assert f"--workload-configuration={runs / 'graph'}" in printed
    graphs = read([runs / f"graph.{rank}.et" for rank in range(2)])
    spans = Run.load(found["folder"]).spans
    for rank, nodes in graphs.items():
        assert all(other < node["id"] for node in nodes for other in node["data_deps"])
        computed = [node for node in nodes if node["name"] in COMPUTE_KINDS]
        chosen = spans.of_rank(rank).select(kinds=COMPUTE_KINDS).table
        seconds = float((chosen["end_s"] - chosen["start_s"]).sum())
        assert sum(node["duration_micros"] for node in computed) == pytest.approx(seconds * 1e6, abs=len(chosen))
    lasted_s = float(spans.table["end_s"].max() - spans.table["start_s"].min())
    ends = replay(graphs, communication_us(graphs))
    assert max(map(max, ends.values())) == pytest.approx(lasted_s * 1e6, rel=0.02)


def test_progress_of_real_ranks_has_the_number_of_steps_and_the_loss(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.progress.LINE_S", 0.0)
    arguments = ("train", "pipe-sgd", "--runtime", "torch", "--steps", "60", "--evaluate-every", "0")
    lines = workbench(*arguments).stderr.splitlines()
    steps = [re.fullmatch(r"(\d+) of 60 steps after [\d:]+, [\d:?]+ left(, loss \d.*)?", line) for line in lines]
    assert all(steps) and lines[-1].startswith("60 of 60 steps ") and "loss" in lines[-1], lines
    assert workbench(*arguments, "--quiet").stderr == ""


@pytest.mark.timeout(300)
def test_ctrl_c_stops_at_a_step_with_a_checkpoint_and_resume_goes_on(runs: Path) -> None:
    command = [
        *COMMAND,
        "train",
        "pipe-sgd",
        "--runtime",
        "torch",
        "--steps",
        "100000",
        "--option",
        "dtype=float64",
        "--evaluate-every",
        "0",
    ]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size > 5000 for path in runs.glob("*/metrics-00001.jsonl")):
        assert time.monotonic() < deadline
        assert running.poll() is None, running.communicate()
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, told = running.communicate(timeout=30)
    assert running.returncode == 0, told
    assert "checkpoint" in told
    (folder,) = (path.parent for path in runs.glob("*/run.json"))
    stopped = Run.load(folder)
    assert stopped.info["status"] == "stopped"
    lasts = {rows[-1]["step"] for rows in stopped.metrics.values()}
    assert len(lasts) == 1, "all ranks stop at one step"
    steps = lasts.pop() + 11
    same = ("--runtime", "torch", "--steps", str(steps), "--option", "dtype=float64", "--resume", folder.name[:-2])
    resumed = train("pipe-sgd", *same)
    unbroken = train("pipe-sgd", "--runtime", "simulated", "--steps", str(steps), "--option", "dtype=float64")
    assert resumed["steps"] == 10
    assert resumed["loss"] == pytest.approx(unbroken["loss"], rel=1e-9)  # bit-identical: the laws of resuming


@pytest.mark.parametrize("runtime", [pytest.param("mpi", marks=pytest.mark.mpi), "torch"])
def test_real_ranks_train_and_resume_an_algorithm_of_the_users_file(runtime: str, runs: Path, tmp_path: Path) -> None:
    name = f"{write_own_algorithm(tmp_path)}:WarmStart"
    same = ("--set", "warm_steps=4", "--option", "dtype=float64", "--workers", "2")
    real = ("--runtime", runtime, *same)
    first = train(name, *real, "--steps", "4", "--checkpoint-every", "2")
    assert (first["workers"], first["steps"], first["settings"]) == (2, 4, {"warm_steps": 4})
    resumed = train(name, *real, "--steps", "7", "--resume", first["run"])
    unbroken = train(name, "--runtime", "simulated", *same, "--steps", "7")
    assert resumed["steps"] == 5, "the newest checkpoint has 2 steps"
    assert resumed["loss"] == pytest.approx(unbroken["loss"], rel=1e-9)
    said = workbench("train", "synchronous-sgd", "--runtime", runtime, "--resume", first["run"], status=2).stderr
    assert "WarmStart" in said


def test_joins_the_ranks_of_torchrun(runs: Path) -> None:
    # The runtime is the launcher's
    inner = forked("-m", "workbench", "train", "layerwise-sgd", "--steps", "4", "--json")
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "--no-python",
    ]
    done = subprocess.run([*launcher, *inner], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert (found["workers"], found["steps"]) == (2, 4)
    assert len(list(runs.glob("*/run.json"))) == 1


def test_a_rank_of_torchrun_does_not_train_alone_on_mpi() -> None:
    world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = process("train", "pipe-sgd", "--runtime", "mpi", status=2, **world)
    assert "use --runtime torch" in done.stderr


@pytest.mark.mpi
def test_joins_the_ranks_of_mpiexec(runs: Path) -> None:
    from workbench.clusters.local.mpi_install import find_mpi, mpiexec_command

    command, env = mpiexec_command(
        find_mpi(), 3, forked("-m", "workbench", "train", "layerwise-sgd", "--runtime", "mpi", "--steps", "4", "--json")
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.strip().splitlines()[-1])["workers"] == 3
    assert len(list(runs.glob("*/run.json"))) == 1


@pytest.mark.mpi
def test_ranks_that_cannot_outlive_one_are_refused_and_the_record_says_so(runs: Path, mpich: dict[str, str]) -> None:
    said = process("train", "pipe-sgd", "--runtime", "mpi", "--on-failure", "shrink", status=2, **mpich).stderr
    assert "MPICH" in said and "ends all ranks when one ends" in said and "--runtime torch" in said
    (path,) = runs.glob("2*/run.json")
    info = json.loads(path.read_text())
    assert info["status"] == "failed" and "ends all ranks when one ends" in info["error"]


@pytest.mark.mpi
def test_trains_on_mpich_too(mpich: dict[str, str]) -> None:
    found = json.loads(process("train", "pipe-sgd", "--runtime", "mpi", "--steps", "5", "--json", **mpich).stdout)
    assert "MPICH" in Run.load(found["folder"]).info["library"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "pipe-sdg"], "did you mean pipe-sgd"),
        (["train", "pipe-sgd", "--problem", "digit-mlp"], "did you mean digits-mlp"),
        (["train", "pipe-sgd", "--runtime", "mip"], "did you mean mpi"),
        (["train", "pipe-sgd", "--set", "width=0"], "width=0: give a whole number, 1 or more"),
        (["train", "pipe-sgd", "--set", "wdth=2"], "did you mean width?"),
        (["train", "pipe-sgd", "--set", "width"], "name=value"),
        (["train", "pipe-sgd", "--set", "width=abc"], "give a whole number"),
        (["train", "pipe-sgd", "--set", "width=2.5"], "give a whole number"),
        (["train", "pipe-sgd", "--set", "collective=3"], "Ring()"),
        (["train", "layerwise-sgd", "--set", "bucket_bytes=abc"], "give a number, or auto, or none"),
        (["train", "pipe-sgd", "--trace-steps", "-1"], "the number of steps to trace"),
        (["train", "pipe-sgd", "--optimizer", "SGD", "--optimizer-set", "lr=-1"], "Invalid learning rate"),
        (["train", "pipe-sgd", "--set", "collective=rign"], "did you mean ring?"),
        (["train", "layerwise-sgd", "--set", "apply=some"], "all, or backward, or any"),
        (["train", "pipe-sgd", "--workers", "0"], "give 1 or more"),
        (["train", "pipe-sgd", "--workers", "1000"], "simulated runtime has no such limit"),
        (["train", "pipe-sgd", "--problem", "cifar10-resnet18", "--option", "folder=/nowhere"], "/nowhere"),
        (["train", "pipe-sgd", "--epochs", "2", "--steps", "2"], "not both"),
        (["train", "pipe-sgd", "--optimizer", "Adma"], "did you mean Adam"),
        (["train", "pipe-sgd", "--optimizer", "SGD", "--optimizer-set", "momentun=0.9"], "did you mean momentum?"),
        (["train", "pipe-sgd", "--runtime", "simulated", "--network", "ethernet-9g"], "ethernet-1g"),
        (["train", "pipe-sgd", "--runtime", "torch", "--network", "free"], "--runtime simulated"),
        (["train", "pipe-sgd", "--lr", "inf"], "a finite number"),
        (["train", "pipe-sgd", "--runtime", "simulated", "--stragglers", "slow-machines:2=4"], "there is no rank 2"),
        (["train", "pipe-sgd", "--on-failure", "shirnk"], "choose stop or shrink"),
        (
            ["train", "async-sgd", "--on-failure", "shrink"],
            "does not shrink: it continues without a killed worker that serves nothing",
        ),
        (["train", "pipe-sgd", "--on-failure", "shrink", "--runtime", "simulated"], "for real ranks"),
        (["train", "ad-psgd", "--runtime", "torch", "--replace"], "with --on-failure shrink all of the algorithms"),
        (
            ["train", "pipe-sgd", "--runtime", "mpi", "--replace"],
            "--replace with --runtime mpi needs --on-failure shrink",
        ),
        (["show", "nothing"], "no run"),
        (["notebook", "01-tour"], "did you mean 00-tour"),
        (["notebook", "00-tour", "-p", "worker=3"], "worker"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_clear_error_and_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: what is refused starts no other. The next test sees a whole process refuse."""
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.startswith("workbench: ")
    assert "Traceback" not in told


def test_bad_input_is_the_exit_status_of_the_process() -> None:
    done = process("show", "nothing", status=2)
    assert "no run" in done.stderr
    assert done.stderr.startswith("workbench: ")
    assert done.stdout == ""


@pytest.mark.parametrize("runtime", [pytest.param("mpi", marks=pytest.mark.mpi), "torch", "simulated"])
def test_a_diverging_run_ends_on_all_ranks_with_the_cause(runtime: str) -> None:
    done = workbench("train", "synchronous-sgd", "--runtime", runtime, "--lr", "1e12", "--steps", "50", status=2)
    assert "Training diverged" in done.stderr
    assert "learning rate" in done.stderr


def test_clipping_cannot_be_combined_with_single_buckets() -> None:
    """Refused where a replica is made, on every runtime. Tests above check the report of ranks."""
    done = workbench(
        "train",
        "layerwise-sgd",
        "--set",
        "apply=any",
        "--clip-norm",
        "1",
        "--runtime",
        "simulated",
        "--steps",
        "2",
        status=2,
    )
    assert "apply='all'" in done.stderr


def test_no_mpi_is_one_clear_error(tmp_path: Path) -> None:
    """With an mpi4py whose library cannot be loaded."""
    done = process(
        "train", "pipe-sgd", "--runtime", "mpi", status=2, MPI4PY_LIBMPI=str(tmp_path / "libmpi.so"), PATH=str(tmp_path)
    )
    assert "MPI" in done.stderr
    assert "pip install" in done.stderr


def test_a_store_that_cannot_be_written_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "file"))
    done = workbench("train", "pipe-sgd", "--runtime", "simulated", status=2)
    assert "WORKBENCH_RUNS" in done.stderr


def test_help_is_quick_because_nothing_heavy_is_imported() -> None:
    heavy = ("torch", "plotly", "ipyparallel", "numpy")
    code = f"import sys, workbench.cli.main; print([name for name in {heavy} if name in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
