"""The run store with many runs and many writers: the cache is used only while it is valid, nothing is lost, damaged files are named."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.forked import forked
from workbench import algorithms
from workbench.analysis import runs_table
from workbench.analysis.export import METRICS, export_runs
from workbench.analysis.runs_table import Condition, _in_order
from workbench.cli.main import main
from workbench.errors import ConfigError, RunNotFound
from workbench.trace import FileRecorder, list_runs, new_run, update_run
from workbench.trace.store import FORMAT, INDEX_NAME, find_run, read_info, remove_run

HEADER = {"host": "node-1", "pid": 7, "device": "cpu", "origin_s": 12.5, "unix_s": 1.7e9}


def make(
    root: Path,
    algorithm: str = "PipeSGD",
    *,
    width: int = 2,
    workers: int = 2,
    accuracy: float = 0.5,
    old: bool = True,
    **more: Any,
) -> Path:
    info = {
        "algorithm": {"name": algorithm, "settings": {"width": width}},
        "problem": {"name": "digits-mlp"},
        "num_workers": workers,
    }
    folder = new_run({**info, "runtime": "torch", "settings": {"seed": 0, "lr": 0.1, "steps": 99}, **more}, root)
    for rank in range(2):
        recorder = FileRecorder(folder, rank, HEADER)
        for step in range(4):
            usual = {
                "step": step,
                "seconds": 0.1 * (step + 1),
                "samples": 8 * (step + 1),
                "bytes_sent": 100 * (step + 1),
            }
            recorder.metrics({**usual, "staleness": 1, "lr": 0.1, "loss": 4.0 - step, "num_samples": 4})
        shares = {"loss_sum": 5.0, "correct": int(100 * accuracy), "judged": 100, "count": 100}
        recorder.metrics({**usual, "evaluation": shares})
        recorder.close()
    update_run(folder, status="finished")
    if old:
        age(folder)
    return folder


def age(folder: Path) -> None:
    """As if the files had been written a minute ago: only then does the cache keep them."""
    then = time.time() - 60
    for path in folder.iterdir():
        os.utime(path, (then, then))


# ---------------------------------------------------------------- the cache


def test_a_run_that_has_not_changed_is_not_read_again(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [make(runs) for _ in range(3)]
    before = [run.info for run in list_runs()]
    reads: list[Path] = []
    monkeypatch.setattr("workbench.trace.store.read_info", lambda folder: reads.append(folder) or read_info(folder))
    assert [run.info for run in list_runs()] == before
    assert reads == []
    update_run(folders[1], note="changed")
    assert {run.folder: run.info.get("note") for run in list_runs()}[folders[1]] == "changed"
    (runs / INDEX_NAME).unlink()
    assert len(list_runs()) == 3, "it can always be made anew"


@pytest.mark.parametrize("same", ["size", "time", "size and time"])
def test_the_cache_is_not_trusted_when_the_file_says_otherwise(runs: Path, same: str) -> None:
    """The same length, the same time stamp, or both, as on a file system with a coarse clock."""
    folder = make(runs, note="a" * 8)
    list_runs()
    path = folder / "run.json"
    then = path.stat().st_mtime_ns
    update_run(folder, note="b" * (8 if "size" in same else 9))
    if "time" in same:
        os.utime(path, ns=(then, then))
    assert list_runs().runs[0].info["note"].startswith("b")


def test_what_is_young_or_runs_is_read_each_time(runs: Path) -> None:
    make(runs, old=False)
    running = make(runs)
    update_run(running, status="running")
    age(running)
    list_runs()
    assert not (runs / INDEX_NAME).exists()


def test_a_damaged_cache_is_named_and_mended_and_hides_nothing(runs: Path) -> None:
    folders = [make(runs) for _ in range(3)]
    list_runs()
    index = runs / INDEX_NAME
    lines = index.read_text().splitlines()
    version = json.loads(lines[1])[0]
    cut = [
        lines[0][:40],
        json.dumps([version, ["x"], 2, 3]),
        "\0\0",
        json.dumps([version, folders[1].name, *json.loads(lines[1])[2:3], "no object"]),
        lines[2],
    ]
    index.write_text("\n".join(cut))
    found = list_runs()
    assert [run.folder for run in found] == sorted(folders)
    assert all(run.info["status"] == "finished" for run in found)
    assert any("3 lines" in words and "cache" in words for words in found.damaged)
    assert list_runs().damaged == ()


def test_a_damaged_run_is_skipped_with_a_word(runs: Path) -> None:
    good, bad = make(runs), make(runs)
    (bad / "run.json").write_text("{")
    found = list_runs()
    assert [run.folder for run in found] == [good]
    assert bad.name in found.damaged[0]
    done = subprocess.run(
        [sys.executable, "-m", "workbench", "runs"], capture_output=True, text=True, timeout=60, check=True
    )
    assert good.name in done.stdout
    assert f"skipped: {runs / bad.name}" in done.stderr


WRITER = """
import sys
from workbench.trace import list_runs, new_run, update_run
for number in range(20):
    folder = new_run({"algorithm": {"name": "M"}, "writer": int(sys.argv[1]), "number": number})
    update_run(folder, status="running")
    update_run(folder, status="finished", result={"number": number})
    listing = list_runs()
    assert not listing.damaged, listing.damaged
    assert folder.name in {run.folder.name for run in listing}
"""


def test_writers_and_readers_at_once_lose_nothing(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes, each making runs and listing all: every listing holds what its process has made so far."""
    # The cache is written at every listing
    code = "import workbench.trace.index as index; index.YOUNG_S = -1.0\n" + WRITER
    processes = [
        subprocess.Popen(forked("-c", code, str(number)), stderr=subprocess.PIPE, text=True) for number in range(4)
    ]
    for process in processes:
        _, told = process.communicate(timeout=100)
        assert process.returncode == 0, told
    found = list_runs()
    assert sorted((run.info["writer"], run.info["result"]["number"]) for run in found) == [
        (w, n) for w in range(4) for n in range(20)
    ]
    assert {run.status for run in found} == {"finished"}
    assert not [path for path in runs.iterdir() if path.name.endswith(".tmp") or path.name.startswith(".new-")]


# ---------------------------------------------------------------- the table


@pytest.fixture
def some(runs: Path) -> list[Path]:
    made = [
        make(runs, "SynchronousSGD", width=1, accuracy=0.7),
        make(runs, width=2, accuracy=0.8),
        make(runs, width=3, workers=4, accuracy=0.9, sweep={"id": "widths", "cell": "abc"}),
        make(runs, width=3, workers=8, accuracy=0.6, created="2020-01-01T00:00:00+00:00"),
    ]
    update_run(made[3], created="2020-01-01T00:00:00+00:00", status="failed")
    return made


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (["algorithm=pipe-sgd"], [1, 2, 3]),
        (["algorithm=PipeSGD", "status=finished"], [1, 2]),
        (["algorithm!=pipe-sgd"], [0]),
        (["workers>=4"], [2, 3]),
        (["set.width=3", "workers<8"], [2]),
        (["accuracy>0.75"], [1, 2]),
        (["problem~digits", "sweep=none", "accuracy<=0.7"], [0, 3]),
        (["run~sgd", "workers>100"], []),
    ],
)
def test_conditions_choose_runs(some: list[Path], where: list[str], expected: list[int]) -> None:
    for _ in range(2):  # read, and from the caches
        assert {row["run"] for row in runs_table(where=where)} == {some[number].name for number in expected}


@pytest.mark.parametrize("name", [name for name in algorithms.names() if isinstance(algorithms.find(name), type)])
def test_an_algorithm_is_found_by_the_name_it_is_asked_for_by(name: str) -> None:
    row = {"algorithm": type(algorithms.get(name)).__name__}
    assert [other for other in algorithms.names() if Condition("algorithm", "=", other).holds(row)] == [name]
    assert Condition("algorithm", "=", row["algorithm"]).holds(row)


def test_since_sweep_sort_and_limit(some: list[Path]) -> None:
    names = [folder.name for folder in some]
    assert {row["run"] for row in runs_table(since="1d")} == set(names[:3])
    assert {row["run"] for row in runs_table(since="2019-12-31")} == set(names)
    assert [row["run"] for row in runs_table(sweep="widths")] == [names[2]]
    assert [row["run"] for row in runs_table(sort="-accuracy", limit=2)] == [names[2], names[1]]
    assert [row["run"] for row in runs_table(sort="accuracy")] == [names[3], names[0], names[1], names[2]]
    info = {"algorithm": {"name": "PipeSGD", "settings": {}}, "problem": {"name": "digits-mlp"}, "num_workers": 2}
    bare = new_run({**info, "created": "2021-01-01T00:00:00+00:00"}, some[0].parent).name  # no step and no evaluation
    assert [row["run"] for row in runs_table(sort="-accuracy", limit=2)] == [names[2], names[1]], (
        "nothing is not the greatest"
    )
    assert [row["run"] for row in runs_table(sort="accuracy", limit=2)] == [names[1], names[2]]
    assert [row["run"] for row in runs_table(sort="-accuracy")] == [names[2], names[1], names[0], names[3], bare]
    assert [row["run"] for row in runs_table(sort="accuracy", limit=5)][-1] == bare
    assert len(runs_table(sort="accuracy", limit=0)) == 0
    assert [row["x"] for row in _in_order([{"x": math.nan}, {"x": 1.0}, {"x": "a"}], "x", True, 2)] == ["a", 1.0]
    assert runs_table(columns=["run", "set.width"]).cells()[0] == [names[3], "3"], "the oldest first"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"where": ["algorthm=x"]}, "did you mean algorithm"),
        ({"where": ["algorithm"]}, "key=value"),
        ({"sort": "acuracy"}, "did you mean accuracy"),
        ({"columns": ["sed"]}, "did you mean seed"),
        ({"since": "yesterday"}, "2d"),
    ],
)
def test_what_cannot_be_asked_is_refused(some: list[Path], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        runs_table(**options)


def test_results_are_kept_and_made_anew_when_metrics_change(runs: Path) -> None:
    folder = make(runs, accuracy=0.5)
    row = runs_table()[0]
    assert (row["steps"], row["accuracy"], row["loss"], row["train_loss"], row["bytes_sent"]) == (
        4,
        0.5,
        0.05,
        1.0,
        800,
    )
    for rank in range(2):
        path = folder / f"metrics-{rank:05d}.jsonl"
        path.write_text(re.sub(r'"correct": ?50', '"correct":75', path.read_text()))
        os.utime(path, (1e9, 1e9))
    assert runs_table()[0]["accuracy"] == 0.75


@pytest.mark.parametrize("text", ["a=1", "a==1", " a = 1 "])
def test_a_condition_is_read_as_written(text: str) -> None:
    assert Condition.parse(text) == Condition("a", "=", 1)


def test_a_thousand_runs_are_listed_from_one_file(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.dumps({"format": FORMAT, "algorithm": {"name": "M"}, "status": "finished"})
    for number in range(1000):
        folder = runs / f"run-{number:04d}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(content)
        os.utime(folder / "run.json", (1e9, 1e9))
    assert len(list_runs()) == 1000
    monkeypatch.setattr("workbench.trace.store.read_info", None)
    assert len(list_runs()) == 1000


# ---------------------------------------------------------------- removal and export


def test_remove_asks_and_leaves_what_runs(some: list[Path], runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    update_run(some[1], status="running")

    def remove(*words: str, status: int) -> str:
        assert main(["runs", "remove", *words]) == status
        return capsys.readouterr().err

    assert "select runs by name" in remove("--yes", status=2)
    shutil.copytree(some[0], runs.parent / "elsewhere" / some[0].name)
    assert "is not in the store" in remove(str(runs.parent / "elsewhere" / some[0].name), "--yes", status=2)
    assert "no such runs" in remove("--where", "status=finished", "workers=77", "--yes", status=2)
    assert "still running" in remove("--where", "status!=finished", "--yes", status=2), "no word that it is meant"
    assert "still running" in remove(some[0].name, some[1].name, "--yes", status=2)
    assert "--yes" in remove("--where", "status=failed", status=2)
    assert len(list_runs()) == 4
    remove("--where", "status=failed", "--yes", status=0)
    assert {run.folder for run in list_runs()} == set(some[:3])
    with pytest.raises(RunNotFound, match="not a run's folder"):
        remove_run(runs)
    assert find_run("last") == some[2]


def test_the_refusal_to_remove_a_lost_run_says_how_to_select_it(
    some: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    update_run(some[1], status="running", process={"host": "elsewhere", "pid": 1})
    for path in some[1].iterdir():
        os.utime(path, (1e9, 1e9))
    assert main(["runs", "remove", some[1].name, "--yes"]) == 2
    assert "select it with --where status=lost" in capsys.readouterr().err
    assert main(["runs", "remove", some[1].name, "--where", "status=lost", "--yes"]) == 0
    assert not some[1].exists()


def test_a_limit_means_the_last_runs_also_of_those_that_are_named(
    some: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    names = [folder.name for folder in some[:3]]
    for sort, last in (("created", names[2]), ("-created", names[2])):
        assert main(["runs", "remove", *names, "--limit", "1", f"--sort={sort}"]) == 2
        assert capsys.readouterr().out.split()[0] == last


def test_a_loss_that_is_no_number_is_null_in_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has no NaN, and most of its readers refuse it."""
    folder = make(runs)
    row = {"step": 4, "seconds": 0.5, "samples": 40, "bytes_sent": 500, "loss": math.nan, "num_samples": 4}
    with (folder / "metrics-00000.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    for command in (["runs"], ["show", folder.name]):
        assert main([*command, "--json"]) == 0
        found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        assert found["steps"] == 5 and found["train_loss"] is None and found["accuracy"] == 0.5


def test_csv_holds_every_row(some: list[Path], tmp_path: Path) -> None:
    paths = export_runs(runs_table().rows, tmp_path / "out", "csv")
    with paths[0].open() as file:
        table = list(csv.DictReader(file))
    assert {row["run"]: row["accuracy"] for row in table}[some[2].name] == "0.9"
    with paths[1].open() as file:
        metrics = list(csv.DictReader(file))
    assert len(metrics) == 4 * 2 * 5
    assert tuple(metrics[0]) == tuple(METRICS)
    assert [row["loss"] for row in metrics[:5]] == ["4.0", "3.0", "2.0", "1.0", "0.05"]


def test_parquet_holds_the_same_with_types(some: list[Path], tmp_path: Path) -> None:
    parquet = pytest.importorskip(
        "pyarrow.parquet", reason="needs the export extra: pip install 'sgd-workbench[export]'"
    )
    paths = export_runs(runs_table().rows, tmp_path / "out", "parquet")
    assert [row["accuracy"] for row in parquet.read_table(paths[0]).to_pylist()] == [
        row["accuracy"] for row in runs_table()
    ]
    metrics = parquet.read_table(paths[1])
    assert metrics.num_rows == 4 * 2 * 5
    assert metrics.schema.field("bytes_sent").type == "int64"
    assert metrics.column("correct").to_pylist()[:5] == [None] * 4 + [60]


def test_parquet_holds_seeds_of_more_than_63_bits_as_text(runs: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra export")
    make(runs, settings={"seed": 1, "lr": 1})
    make(runs, settings={"seed": 2**63, "lr": 2**64})
    path, _ = export_runs(runs_table().rows, tmp_path / "out", "parquet")
    read = parquet.read_table(path)
    assert sorted(read.column("seed").to_pylist()) == ["1", str(2**63)]


def test_tensorboard_reads_the_event_files(some: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the export extra: pip install 'sgd-workbench[export]'")
    for _ in range(2):  # a second export replaces the first
        export_runs(runs_table().rows, tmp_path, "tensorboard")
    code = f"""
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator({str(tmp_path / some[2].name)!r}).Reload()
print([(event.step, event.value) for event in events.Scalars("train/loss")], round(events.Scalars("test/accuracy")[0].value, 6))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.strip() == "[(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0)] 0.9", done.stderr


@pytest.mark.parametrize(("format", "package"), [("parquet", "pyarrow"), ("tensorboard", "tensorboard")])
def test_a_missing_package_is_named_with_the_command(
    some: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: Any, package: str
) -> None:
    for name in [*sys.modules, package]:
        if name == package or name.startswith(f"{package}."):
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"needs {package}.*pip install 'sgd-workbench\[export\]'"):
        export_runs(runs_table().rows, tmp_path, format)


@pytest.mark.parametrize(
    "command", [["runs"], ["runs", "--columns", "run,algorithm,workers"], ["show", "last"]], ids=" ".join
)
def test_what_a_person_reads_calls_it_an_algorithm(
    some: list[Path], command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "algorithm" in text and not re.search(r"\bmethods?\b", text)


@pytest.mark.parametrize("option", ["runs", "show", "train", "sweep", "predict"])
def test_help_calls_it_an_algorithm(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([option, "--help"])
    assert not re.search(r"\bmethods?\b", capsys.readouterr().out)


# ---------------------------------------------------------------- a figure of many


@pytest.mark.notebooks
def test_parallel_coordinates_show_what_varies_and_the_results(some: list[Path]) -> None:
    from workbench import plots

    figure = plots.parallel(runs_table())
    shown = {axis.label: axis for axis in figure.data[0].dimensions}
    assert {"algorithm", "workers", "set.width", "accuracy"} <= set(shown)
    assert "seed" not in shown and "runtime" not in shown, "the same in all"
    assert list(shown["accuracy"].values) == [row["accuracy"] for row in runs_table()]
    words = dict(zip(shown["algorithm"].tickvals, shown["algorithm"].ticktext, strict=True))
    assert [words[value] for value in shown["algorithm"].values] == [row["algorithm"] for row in runs_table()]
    assert len(plots.parallel(list_runs()).data[0].dimensions) == len(shown)
    with pytest.raises(ConfigError, match="no run has 'acc'"):
        plots.parallel(runs_table(), axes=["acc"])
    with pytest.raises(ConfigError, match="no runs"):
        plots.parallel([])


@pytest.mark.notebooks
def test_parallel_coordinates_have_one_place_for_equal_numbers(some: list[Path]) -> None:
    from workbench import plots

    for folder, settings in zip(some, ({"lr": 1}, {"lr": 1.0}, {}, {"lr": 0.5}), strict=True):
        update_run(folder, settings=settings)
    (axis,) = plots.parallel(runs_table(sort="run"), axes=["lr"]).data[0].dimensions
    words = [axis.ticktext[place] for place in axis.values]
    found = dict(zip((row["folder"] for row in runs_table(sort="run")), words, strict=True))
    one, same, missing, half = (found[str(folder)] for folder in some)
    assert one == same and float(one) == 1.0 and missing == "\N{EN DASH}" and half == "0.5"


def test_a_simulated_run_is_listed_once_it_is_saved(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import workbench as wb

    run = wb.simulate(wb.PipeSGD(), wb.problems.digits_softmax(), workers=2, network="ethernet-1g", steps=4)
    assert wb.list_runs().runs == () and run.id == "memory"
    folder = run.save()
    (found,) = wb.list_runs().runs
    assert found.folder == folder and found.info["status"] == "finished" and not (folder / ".reserve").exists()
    read = wb.Run.load(folder)
    assert (
        read.metrics == run.metrics
        and wb.summary(read)["step_seconds_median"] == wb.summary(run)["step_seconds_median"]
    )
    assert main(["runs"]) == 0
    assert folder.name in capsys.readouterr().out
    assert read.save() != folder and len(wb.list_runs().runs) == 2, "a copy is a run of its own"
