"""The run's record: written and read back, complete or cut off, on one clock."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.forked import forked
from workbench.errors import ConfigError, RunNotFound
from workbench.trace import (
    KINDS,
    FileRecorder,
    MemoryRecorder,
    Run,
    Spans,
    find_run,
    list_runs,
    new_run,
    runs_root,
    update_run,
)
from workbench.trace.follow import Follower
from workbench.trace.read import parse_lines
from workbench.trace.recorder import Rows, metrics_name, trace_name, watched_rows
from workbench.trace.rows import sublanes
from workbench.trace.store import FORMAT, RESERVE_NAME, read_info, write_info
from workbench.trace.weights import WEIGHTS, read_weights, write_weights

HEADER = {"host": "node-1", "pid": 7, "device": "cpu", "origin_s": 12.5, "unix_s": 1.7e9}
INFO = {"algorithm": {"name": "PipeSGD", "settings": {"width": 2}}, "problem": {"name": "digits-mlp"}, "num_workers": 2}


def row(step: int, **changes: Any) -> dict[str, Any]:
    usual = {
        "seconds": 0.1 * (step + 1),
        "samples": 64 * (step + 1),
        "bytes_sent": 1000 * (step + 1),
        "staleness": 1,
        "lr": 0.1,
    }
    return {"step": step, **usual, "loss": 1.0, "num_samples": 32, **changes}


def evaluation(
    step: int, loss_sum: float, correct: int | None, judged: int | None, count: int, **changes: Any
) -> dict[str, Any]:
    numbers = {"loss_sum": loss_sum, "correct": correct, "judged": judged, "count": count}
    return {
        key: value for key, value in row(step, **changes).items() if key in ("step", "seconds", "samples", "bytes_sent")
    } | {"evaluation": numbers}


def stored(folder: Path, recorders: dict[int, MemoryRecorder]) -> Path:
    """What the recorders hold, written through `FileRecorder`s."""
    for rank, memory in recorders.items():
        file = FileRecorder(folder, rank, HEADER)
        for clock in memory.clocks:
            file.clock(*clock)
        for span in memory.spans:
            file.span(*span)
        for line in memory.rows:
            file.metrics(line)
        file.close()
    write_info(folder, INFO)
    return folder


times = st.floats(0, 1e5).map(lambda value: round(value, 7))
spans = st.builds(
    lambda kind, lane, start, length, *numbers: (kind, lane, start, round(start + length, 7), *numbers),
    st.sampled_from(KINDS),
    st.sampled_from(["compute", "comm", "comm.1", 'a "quoted" lane\n']),
    times,
    st.floats(0, 10),
    st.integers(0, 10**6),
    st.integers(-1, 300),
    st.integers(0, 10**12),
    st.integers(-1, 4000),
)


# ---------------------------------------------------------------- recorders and reader


@settings(max_examples=40, deadline=None)
@given(
    recorded=st.dictionaries(st.integers(0, 5), st.lists(spans, max_size=8), max_size=3),
    offsets=st.lists(st.floats(-0.4, 0.4), max_size=3),
)
def test_files_hold_what_memory_holds(
    tmp_path_factory: pytest.TempPathFactory, recorded: dict[int, list[Any]], offsets: list[float]
) -> None:
    recorders = {}
    for rank, rows in recorded.items():
        recorders[rank] = memory = MemoryRecorder(rank)
        for span in rows:
            memory.span(*span)
        for at_s, offset_s in enumerate(offsets):
            memory.clock(float(at_s), offset_s)
        memory.metrics(row(0, loss=None, staleness=None))
    folder = stored(tmp_path_factory.mktemp("run"), recorders)
    read, kept = Run.load(folder), Run.from_memory(INFO, list(recorders.values()))
    again = Run.load(read.save(folder / "copy"))
    for run in (kept, again):
        assert read.metrics == run.metrics
        assert read.spans.kind_names.tolist() == run.spans.kind_names.tolist()
        assert read.spans.lane_names.tolist() == run.spans.lane_names.tolist()
        for column in ("rank", "step", "bucket", "bytes", "peer"):
            assert read.spans.table[column].tolist() == run.spans.table[column].tolist()
        for column in ("start_s", "end_s"):  # the files round to 1e-7 s
            np.testing.assert_allclose(read.spans.table[column], run.spans.table[column], atol=1.01e-7, rtol=0)
    assert read.damaged == ()


def test_clocks_are_interpolated_between_measurements_and_constant_beyond(tmp_path: Path) -> None:
    memory = MemoryRecorder(1)
    memory.clock(20.0, 7.0)  # recorded late
    memory.clock(10.0, 5.0)
    for start in (0.0, 15.0, 30.0):
        memory.span("send", "comm", start, start + 1.0, 0)
    starts = Run.load(stored(tmp_path, {1: memory})).spans.table["start_s"]
    assert starts.tolist() == [5.0, 21.0, 37.0]
    assert Run.from_memory(INFO, [memory]).spans.table["end_s"].tolist() == [6.0, 22.2, 38.0]


def test_a_cut_last_line_is_left_out_and_a_damaged_one_inside_is_named(tmp_path: Path) -> None:
    memory = MemoryRecorder(0)
    for step in range(4):
        memory.metrics(row(step))
        memory.span("forward", "compute", step, step + 0.5, step)
    stored(tmp_path, {0: memory})
    metrics, trace = tmp_path / metrics_name(0), tmp_path / trace_name(0)
    lines = metrics.read_text().splitlines(keepends=True)
    lines[1] = lines[1][:20] + "\n"
    metrics.write_text("".join(lines)[:-9])
    lines = trace.read_text().splitlines(keepends=True)
    lines[2:3] = ["17\n", "\0\0\n"]
    trace.write_text("".join(lines) + '["backward","compute",4.0')
    run = Run.load(tmp_path)
    assert [line["step"] for line in run.metrics[0]] == [0, 2]
    assert run.spans.table["step"].tolist() == [0, 2, 3]
    assert run.damaged == (f"{metrics.name}, line 2", *(f"{trace.name}, line {number}" for number in (3, 4)))


def test_two_damaged_lines_that_are_whole_together_do_not_count(tmp_path: Path) -> None:
    memory = MemoryRecorder(0)
    memory.span("forward", "compute", 0.0, 0.5, 0)
    path = stored(tmp_path, {0: memory}) / trace_name(0)
    with path.open("a") as file:
        file.write('["forward","compute",4.0,4.5\n4,-1,0,-1]\n')
    run = Run.load(tmp_path)
    assert run.spans.table["step"].tolist() == [0] and run.damaged == (f"{path.name}, line 3", f"{path.name}, line 4")


CRASH = """
import os, signal, sys, time
from pathlib import Path
from workbench.trace.recorder import FLUSH_S, FileRecorder

recorder = FileRecorder(Path(sys.argv[1]), 0, {"host": "node-1"})
for step in range(3):
    recorder.span("forward", "compute", step, step + 0.5, step)
    recorder.metrics({"step": step, "seconds": 0.1, "samples": 1, "bytes_sent": 0, "loss": 1.0, "num_samples": 1})
    recorder.end_step()
recorder.span("forward", "compute", 3.0, 3.5, 3)
time.sleep(FLUSH_S + 0.05)
recorder.span("send", "comm", 3.0, 3.5, 3)  # writes both: the one before has waited for longer than FLUSH_S
recorder.span("recv", "comm", 3.5, 3.6, 3)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_loses_less_than_a_second(tmp_path: Path) -> None:
    process = subprocess.run(forked("-c", CRASH, str(tmp_path)), timeout=60, check=False)
    write_info(tmp_path, INFO)
    run = Run.load(tmp_path)
    assert process.returncode == -signal.SIGKILL
    assert len(run.metrics[0]) == 3 and run.damaged == ()
    assert run.spans.table["step"].tolist() == [0, 1, 2, 3, 3]
    assert run.headers[0] == {"host": "node-1", "rank": 0}


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads take turns after every few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_threads_may_record_while_the_program_writes(tmp_path: Path, eager_threads: None) -> None:
    recorder = FileRecorder(tmp_path, 0, HEADER)
    each, num_threads = 3000, 3

    def record(thread: int) -> None:
        for position in range(each):
            recorder.span("all_reduce", f"comm.{thread}", position, position + 0.5, position)

    threads = [threading.Thread(target=record, args=(thread,)) for thread in range(num_threads)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        recorder.end_step()
    recorder.close()
    recorder.close()
    recorder.span("send", "comm", 0, 1, 0)  # a background thread that outlived the run
    recorder.end_step()
    write_info(tmp_path, INFO)
    run = Run.load(tmp_path)
    assert run.damaged == () and len(run.spans) == each * num_threads
    for lane in range(num_threads):
        chosen = run.spans.table[run.spans.lane_names == f"comm.{lane}"]
        assert chosen["step"].tolist() == list(range(each))


def test_numpy_numbers_are_written_and_objects_refused(tmp_path: Path) -> None:
    recorder = FileRecorder(tmp_path, 0, HEADER)
    recorder.metrics(row(0, loss=np.float32(0.5), num_samples=np.int64(3)))
    with pytest.raises(TypeError, match="Path cannot be written"):
        recorder.metrics(row(1, loss=tmp_path))
    recorder.close()
    write_info(tmp_path, INFO)
    assert Run.load(tmp_path).metrics[0][0]["loss"] == 0.5


def test_a_record_is_never_written_over(tmp_path: Path) -> None:
    FileRecorder(tmp_path, 0, HEADER).close()
    with pytest.raises(ConfigError, match="separate folder"):
        FileRecorder(tmp_path, 0, HEADER)
    write_info(tmp_path, INFO)
    with pytest.raises(ConfigError, match="another folder"):
        Run.load(tmp_path).save(tmp_path)


# ---------------------------------------------------------------- curves


def test_rows_in_memory_are_those_that_were_given():
    given = [row(0), row(1, dropped=True), {"step": 2, "sources": [1], "staleness": [0, 2], "dropped": []}, {"step": 3}]
    seen: list[dict[str, Any]] = []
    with watched_rows(seen.append):
        recorder = MemoryRecorder()
    for one in given:
        recorder.rows.append(one)
    assert list(recorder.rows) == given == seen and recorder.rows == given and len(recorder.rows) == 4
    assert recorder.rows[2] == given[2] and recorder.rows[-1] == given[3] and recorder.rows[1:3] == given[1:3]
    assert [one["step"] for one in reversed(recorder.rows[:2])] == [1, 0] and str(recorder.rows) == str(given)
    assert recorder.rows != given[:3] and recorder.rows != "rows"
    recorder.rows[0]["loss"] = 7.0
    assert recorder.rows[0] == given[0], "a row that is read is a copy"
    run = Run.from_memory(INFO, [recorder])
    recorder.rows.append(row(2))
    assert run.metrics == {0: given} and run.rows()[0][0]["loss"] == 1.0, "it does not grow with its recorder"
    assert cloudpickle.loads(cloudpickle.dumps(run)).metrics == run.metrics


def test_a_row_of_metrics_can_be_completed_after_it_was_recorded():
    recorder, late = MemoryRecorder(), row(0, bytes_sent=0)
    recorder.metrics(late)
    late["bytes_sent"] = 5
    assert recorder.rows[0]["bytes_sent"] == 5


def test_rows_in_memory_take_half_of_the_bytes_of_dictionaries():
    def kept(rows: Any) -> int:
        tracemalloc.start()
        for _ in range(1000):
            rows.append(dict.fromkeys(row(0), 0))
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return size

    assert kept(Rows()) < 0.5 * kept([])


def two_ranks() -> list[MemoryRecorder]:
    first, second = MemoryRecorder(0), MemoryRecorder(1)
    first.rows = [
        row(0, loss=1.0, num_samples=30, seconds=0.5, samples=40),
        evaluation(0, 20.0, 8, 10, 10, seconds=0.5, samples=40),
        row(1, loss=3.0, num_samples=10, seconds=1.0, samples=50),
        row(2, loss=None, num_samples=0, seconds=1.5, samples=50),
        evaluation(2, 10.0, None, None, 10),
    ]
    second.rows = [
        row(0, loss=5.0, num_samples=10, seconds=0.6, samples=40),
        evaluation(0, 40.0, 1, 20, 20, seconds=0.6, samples=40, bytes_sent=500),
        row(1, loss=None, num_samples=0, seconds=0.9, samples=50),
    ]
    return [first, second]


def test_curves_weigh_losses_by_samples_and_sum_over_ranks() -> None:
    run = Run.from_memory({**INFO, "status": "running"}, two_ranks())
    assert [axis.tolist() for axis in run.curve("steps", "loss")] == [[0, 1], [2.0, 3.0]]
    assert run.curve("seconds", "loss")[0].tolist() == [0.6, 1.0]
    assert run.curve("samples", "loss")[0].tolist() == [40, 50]
    assert run.curve("bytes", "loss")[0].tolist() == [2000, 4000]
    assert run.steps()[2]["bytes_sent"] == 5000, (
        "rank 1 has not reported step 2: it counts with what it had sent before"
    )
    assert [axis.tolist() for axis in run.curve("seconds", "test_loss")] == [[0.6], [2.0]]
    assert [axis.tolist() for axis in run.curve("bytes", "accuracy")] == [[1500], [0.3]]


def test_an_evaluation_of_replicas_that_have_diverged_is_read(tmp_path: Path) -> None:
    """Gossip and local algorithms record how far replicas are apart, which is NaN if one of them overflowed."""
    nan = float("nan")
    written = {"loss_sum": nan, "correct": 1, "judged": 4, "count": 4, "distance_squared": [nan, 2]}
    recorder = FileRecorder(tmp_path, 0, HEADER)
    recorder.metrics({"step": 0, "seconds": 1.0, "samples": 4, "bytes_sent": 0, "evaluation": written})
    recorder.close()
    write_info(tmp_path, {"status": "finished"})
    run = Run.load(tmp_path)
    (found,) = run.evaluations()
    assert run.damaged_metrics == () and found["accuracy"] == 0.25
    assert np.isnan(found["test_loss"]) and np.isnan(found["consensus_distance"])


def test_an_evaluation_waits_for_every_rank_unless_the_run_is_over() -> None:
    recorders = two_ranks()
    first = recorders[0].rows.pop(1)
    running = Run.from_memory({**INFO, "status": "running"}, recorders)
    assert running.evaluations() == []
    recorders[1].rows.pop(1)
    recorders[0].rows.insert(1, first)
    assert Run.from_memory({**INFO, "status": "running"}, recorders).evaluations() == []
    finished = Run.from_memory({**INFO, "status": "finished"}, recorders)
    assert [found["accuracy"] for found in finished.evaluations()] == [0.8, None]
    assert [found["test_loss"] for found in finished.evaluations()] == [2.0, 1.0]


def test_an_evaluation_is_of_the_ranks_that_were_there() -> None:
    """Rank 2 left after step 0, and another process took its place with step 3."""
    recorders = [MemoryRecorder(rank) for rank in range(3)]
    for rank, recorder in enumerate(recorders):
        recorder.rows = [row(0, bytes_sent=10), *(() if rank == 2 else (row(1, bytes_sent=20), row(2, bytes_sent=30)))]
    for recorder in recorders[:2]:
        recorder.rows.append(evaluation(2, 10.0, 5, 10, 10, bytes_sent=30))
    fewer = {**INFO, "status": "running", "shrunk": [{"step": 1, "ranks": [0, 1], "weights_of": 0}]}
    assert [(found["step"], found["bytes_sent"]) for found in Run.from_memory(fewer, recorders).evaluations()] == [
        (2, 70)
    ]
    again = {**fewer, "joined": [{"rank": 2, "step": 3, "seconds": 1.0}]}
    for recorder in recorders[:2]:
        recorder.rows.append(evaluation(3, 10.0, 5, 10, 10, bytes_sent=40))
    assert [found["step"] for found in Run.from_memory(again, recorders).evaluations()] == [2], (
        "the newcomer's share is not there"
    )
    recorders[2].rows.append(evaluation(3, 10.0, 5, 10, 10, bytes_sent=20))
    assert [(found["step"], found["bytes_sent"]) for found in Run.from_memory(again, recorders).evaluations()] == [
        (2, 70),
        (3, 100),
    ]
    at_once = {**again, "shrunk": [*fewer["shrunk"], {"step": 3, "ranks": [0, 1], "weights_of": 0}]}
    recorders[2].rows.pop()
    found = [row["step"] for row in Run.from_memory(at_once, recorders).evaluations()]
    assert found == [2, 3], "who came had left again before its first step"


def test_an_unknown_axis_is_refused_with_the_choices() -> None:
    run = Run.from_memory(INFO, two_ranks())
    with pytest.raises(ConfigError, match="x='hours': choose one of steps, epochs, seconds, samples, bytes"):
        run.curve("hours", "loss")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="y='acc': choose one of loss, test_loss, accuracy"):
        run.curve("steps", "acc")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "known",
    [
        {"steps_per_epoch": 4},
        {"num_steps": 8, "settings": {"epochs": 2}},
        {"status": "finished", "settings": {"epochs": 1}},  # simulated: it has four steps
    ],
)
def test_epochs_are_passes_over_the_training_data(known: dict[str, Any]) -> None:
    rows = [
        {"step": step, "seconds": 1.0, "samples": 8, "bytes_sent": 0, "loss": 1.0, "num_samples": 8}
        for step in range(4)
    ]
    run = Run({**INFO, **known}, {0: rows})
    assert run.curve("epochs", "loss")[0].tolist() == [0.25, 0.5, 0.75, 1.0]


def test_epochs_of_a_run_that_does_not_know_them_are_refused() -> None:
    run = Run.from_memory({**INFO, "settings": {"steps": 4}}, two_ranks())
    with pytest.raises(ConfigError, match="does not record the length of an epoch: choose x='steps' or 'samples'"):
        run.curve("epochs", "loss")


def test_who_follows_a_run_with_another_thread_sees_what_that_one_is_about_to_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new_run(INFO, tmp_path)
    recorder = FileRecorder(folder, 0, HEADER)
    for step in range(3):
        recorder.metrics(row(step))
    recorder.close()
    midway, seen = threading.Event(), threading.Event()

    def slowly(*given: Any) -> Any:
        if not midway.is_set():
            midway.set()
            seen.wait(0.5)  # until the other one has checked, if it runs at the same time
        return parse_lines(*given)

    monkeypatch.setattr("workbench.trace.read.parse_lines", slowly)
    follower = Follower(folder)
    first = threading.Thread(target=follower.poll)
    first.start()
    assert midway.wait(10)
    assert len(follower.poll().metrics.get(0, [])) == 3
    seen.set()
    first.join(10)
    assert [one["step"] for one in follower.poll().metrics[0]] == [0, 1, 2]


def test_the_poll_after_the_end_reads_all_that_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view that sees the end polls no more."""
    monkeypatch.setattr("workbench.trace.read.BLOCK_BYTES", 1000)
    folder = new_run(INFO, tmp_path)
    recorder = FileRecorder(folder, 0, HEADER)
    for step in range(50):
        recorder.metrics(row(step))
    recorder.close()
    follower, bounded = Follower(folder), Follower(folder, most_rows=2)
    assert 0 < len(follower.poll().metrics[0]) < 50, "a part at a time while it trains"
    assert len(bounded.poll().metrics[0]) == 2
    update_run(folder, status="finished")
    assert follower.poll().metrics == Run.load(folder).metrics
    assert bounded.poll().metrics == {0: follower.poll().metrics[0][-2:]}, "its memory does not grow with the run"


def test_following_a_run_sees_what_a_reader_sees(tmp_path: Path) -> None:
    folder = new_run(INFO, tmp_path)
    follower = Follower(folder)
    assert follower.poll().metrics == {}
    recorders = [FileRecorder(folder, rank, HEADER) for rank in range(2)]
    for step in range(5):
        for recorder in recorders:
            recorder.metrics(row(step))
            recorder.end_step()
        assert follower.poll().metrics == Run.load(folder).metrics
    text = json.dumps(row(5)) + "\n"
    with (folder / metrics_name(0)).open("a") as file:
        file.write(text[:30])
        file.flush()
        assert len(follower.poll().metrics[0]) == 5
        file.write(text[30:])
    assert follower.poll().metrics[0][-1] == row(5)
    for recorder in recorders:
        recorder.close()
    update_run(folder, status="finished")
    (folder / "failed-00001.json").write_text(json.dumps({"rank": 1, "error": "KeyError: 3", "traceback": "..."}))
    assert follower.poll().info["status"] == "finished"
    assert follower.poll().failures[1]["error"] == "KeyError: 3"


# ---------------------------------------------------------------- the store


def test_runs_get_folders_of_their_own_named_after_algorithm_and_problem(tmp_path: Path) -> None:
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.extend(new_run(INFO, tmp_path) for _ in range(20))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 80
    assert all(re.fullmatch(r"\d{8}-\d{6}-pipesgd-digits-mlp-[0-9a-f]{4}", folder.name) for folder in folders)
    listing = list_runs(tmp_path)
    assert {run.folder for run in listing} == set(folders) and listing.damaged == ()
    assert {run.id for run in listing} == {folder.name for folder in folders}
    assert all(run.status == "starting" and run.info["format"] == FORMAT for run in listing)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_an_awkward_name_makes_a_plain_folder(tmp_path: Path) -> None:
    folder = new_run({"algorithm": {"name": "../../etc"}, "problem": {"name": "Größe <b>"}}, tmp_path)
    assert folder.parent == tmp_path and re.fullmatch(r"\d{8}-\d{6}-etc-gr-e-b-[0-9a-f]{4}", folder.name)


def test_run_json_is_whole_at_any_moment(tmp_path: Path) -> None:
    folder = new_run(INFO, tmp_path)
    done = threading.Event()
    seen = []

    def watch() -> None:
        while not done.is_set():
            seen.append(read_info(folder)["notes"])

    update_run(folder, notes=["start"] * 500)
    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(200):
        update_run(folder, notes=[str(number)] * 500)
    done.set()
    watcher.join()
    assert len(seen) > 20 and all(len(notes) == 500 and len(set(notes)) == 1 for notes in seen)
    assert read_info(folder)["algorithm"] == INFO["algorithm"]
    assert {path.name for path in folder.iterdir()} == {"run.json", RESERVE_NAME}


def test_damaged_folders_are_skipped_and_named(tmp_path: Path) -> None:
    good = new_run(INFO, tmp_path)
    for name, text in (("cut", '{"format": 1, "id"'), ("list", "[1]"), ("newer", '{"format": 99}'), ("empty", None)):
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "run.json").write_text(text)
    (tmp_path / "notes.txt").write_text("not a folder")
    listing = list_runs(tmp_path)
    assert [run.folder for run in listing] == [good]
    assert len(listing.damaged) == 3  # an empty folder is no run at all
    assert all(name in " ".join(listing.damaged) for name in ("cut", "list", "newer", "update workbench"))
    assert list_runs(tmp_path / "nowhere").runs == ()


def test_a_run_is_found_by_a_piece_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path))
    assert runs_root() == tmp_path
    with pytest.raises(RunNotFound, match="is empty"):
        find_run("latest")
    first = new_run(INFO)
    second = new_run({**INFO, "algorithm": {"name": "AlphaSGD"}})  # the newest, though its name sorts before
    assert find_run(first.name) == find_run(first.name[:-1]) == find_run(first) == find_run(str(first)) == first
    assert find_run("latest") == find_run("alphasgd") == second
    with pytest.raises(RunNotFound, match="2 runs match"):
        find_run(first.name[:8])
    with pytest.raises(RunNotFound, match=f"did you mean {first.name}"):
        find_run(first.name.replace("pipesgd", "pipegsd"))
    with pytest.raises(RunNotFound, match=r"no run\.json"):
        Run.load(tmp_path / "nowhere")


def test_a_renamed_run_is_found_by_both_names(tmp_path: Path) -> None:
    """`workbench runs` shows the recorded name."""
    folder = new_run(INFO, tmp_path)
    renamed = folder.rename(tmp_path / "baseline")
    assert [run.id for run in list_runs(tmp_path)] == [folder.name]
    assert find_run(folder.name, tmp_path) == find_run("baseline", tmp_path) == find_run("base", tmp_path) == renamed


def test_a_copy_of_a_stored_run_has_its_weights_and_another_name(tmp_path: Path) -> None:
    folder = new_run(INFO, tmp_path)
    FileRecorder(folder, 0, HEADER).close()
    write_weights(folder, {WEIGHTS: {"weight": torch.ones(2)}})
    update_run(folder, status="finished")
    copy = Run.load(Run.load(folder).save(tmp_path / "copy"))
    assert copy.id == "copy" and copy.info["created"] == read_info(folder)["created"]
    assert torch.equal((read_weights(tmp_path / "copy") or {})["weight"], torch.ones(2))


# ---------------------------------------------------------------- rows and Chrome trace


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from("ab"), st.integers(0, 30), st.integers(0, 6)), max_size=25)
)
def test_spans_in_one_row_never_overlap_and_rows_are_as_few_as_can_be(drawn: list[tuple[int, str, int, int]]) -> None:
    by_rank: dict[int, list[Any]] = defaultdict(list)
    for rank, lane, start, length in drawn:
        by_rank[rank].append(("send", lane, start, start + length, 0, -1, 0, -1))
    table = Spans.concatenate(Spans.from_rows(rank, rows) for rank, rows in by_rank.items()).table
    rows = sublanes(table)
    for rank, lane in {(span["rank"], span["lane"]) for span in table}:
        mine = (table["rank"] == rank) & (table["lane"] == lane)
        lane_spans = table[mine]
        most = max(
            sum((s["start_s"] <= t) & (t < s["end_s"]) | (s["start_s"] == t) for s in lane_spans)
            for t in lane_spans["start_s"]
        )
        assert rows[mine].max() < most
        for row_number in range(rows[mine].max() + 1):
            chosen = lane_spans[rows[mine] == row_number]
            assert np.all(chosen["start_s"][1:] >= chosen["end_s"][:-1])


def test_chrome_trace_has_every_required_key_nests_and_lines_ranks_up(tmp_path: Path) -> None:
    recorders = []
    for rank, offset_s in ((0, 0.0), (1, 100.0)):
        memory = MemoryRecorder(rank)
        memory.clock(0.0, -offset_s)
        for step in range(3):
            start = 50.0 + offset_s + step
            memory.span("forward", "compute", start, start + 0.25, step)
            memory.span("all_reduce", 'comm "<0>"', start + 0.1, start + 0.6, step, 2, 4000)
            memory.span("all_reduce", 'comm "<0>"', start + 0.2, start + 0.7, step, 3, 4000, 1 - rank)
        recorders.append(memory)
    path = Run.from_memory(INFO, recorders).export_chrome(tmp_path / "trace.json")
    content = json.loads(path.read_text())
    assert content["displayTimeUnit"] == "ms" and [item.name for item in tmp_path.iterdir()] == ["trace.json"]
    events = content["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["ph"] in "XM" and {"name", "pid", "tid"} <= event.keys() for event in events)
    assert len(spans) == 18 and all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    named = {(event["name"], event["pid"], event["tid"]): event["args"] for event in events if event["ph"] == "M"}
    assert named["process_name", 2, 1] == {"name": "rank 1"}, (
        "numbers begin at 1: Perfetto gives 0 a meaning of its own"
    )
    assert [named["thread_name", 1, thread]["name"] for thread in (1, 2, 3)] == [
        "compute",
        'comm "<0>"',
        'comm "<0>" (2)',
    ]
    threads = defaultdict(list)
    for event in spans:
        assert ("thread_name", event["pid"], event["tid"]) in named
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for intervals in threads.values():
        intervals.sort()
        assert all(later[0] >= earlier[1] - 1e-3 for earlier, later in pairwise(intervals))
    times = [
        [(e["ts"], e["dur"], e["name"], e["args"]["step"]) for e in spans if e["pid"] == rank + 1] for rank in range(2)
    ]
    assert times[0] == times[1], "ranks that did the same at the same time, on clocks 100 s apart"
    assert times[0][0] == (0.0, 250000.0, "forward", 0)
    assert spans[2]["args"] == {"step": 0, "bucket": 3, "peer": 1, "bytes": 4000} and spans[2]["name"] == "all_reduce 3"


def test_messages_are_arrows_of_the_chrome_trace_that_begin_and_end_inside_their_spans(tmp_path: Path) -> None:
    """Rules of the format: "s" and "f" of one id and category, times inside a span of that process and thread, never back in time."""
    problem = wb.problems.get("digits-mlp")
    costs = {"network": wb.costs.ethernet_10g, "compute": wb.costs.Compute(forward_s=0.001, backward_s=0.002)}
    algorithm = wb.LayerwiseSGD(bucket_bytes=1e4, lanes=2, collective=wb.collectives.Ring())
    run = wb.simulate(algorithm, problem, workers=3, timing_only=True, steps=3, **costs)
    events = json.loads(run.export_chrome(tmp_path / "trace.json").read_text())["traceEvents"]
    spans = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append(event)
    flows = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            assert event["ph"] not in flows[event["id"]] and event["cat"] == event["name"] == "message"
            flows[event["id"]][event["ph"]] = event
    sends = [event for event in events if event["ph"] == "X" and event["cat"] == "send"]
    assert len(flows) == len(sends) > 100
    for flow in flows.values():
        ends = []
        for phase, cat in (("s", "send"), ("f", "recv")):
            at = flow[phase]["ts"]
            around = [
                e
                for e in spans[flow[phase]["pid"], flow[phase]["tid"]]
                if e["ts"] - 1e-6 <= at < e["ts"] + e["dur"] - 1e-6
            ]
            assert [e["cat"] for e in around] == [cat]
            ends += around
        assert flow["f"]["bp"] == "e" and "bp" not in flow["s"] and flow["s"]["ts"] <= flow["f"]["ts"]
        assert ends[0]["args"]["peer"] == ends[1]["pid"] - 1 and ends[1]["args"]["peer"] == ends[0]["pid"] - 1
        assert ends[0]["args"]["bytes"] == ends[1]["args"]["bytes"]


def test_an_arrow_that_would_go_back_in_time_is_left_out(tmp_path: Path) -> None:
    recorders = [MemoryRecorder(rank) for rank in range(2)]
    for begin, late in ((0.0, 0.0), (10.0, 5.0)):  # of the second message the receiver's clock is wrong
        recorders[0].span("send", "comm", begin + late, begin + late + 1, 0, -1, 8, 1)
        recorders[1].span("recv", "comm", begin, begin + 1, 0, -1, 8, 0)
    exported = Run.from_memory(INFO, recorders).export_chrome(tmp_path / "trace.json")
    events = json.loads(exported.read_text())["traceEvents"]
    assert [event["ts"] for event in events if event["ph"] in "sf"] == [0, 999_999.999]


def test_an_empty_run_exports_an_empty_trace(tmp_path: Path) -> None:
    run = Run.from_memory(INFO, [])
    assert json.loads(run.export_chrome(tmp_path / "trace.json").read_text())["traceEvents"] == []
    assert len(run.spans) == 0 and run.curve("steps", "loss")[0].tolist() == []


def test_selecting_spans() -> None:
    memory = MemoryRecorder(0)
    for step in range(6):
        memory.span("forward", "compute", step, step + 0.5, step)
        memory.span("send", "comm", step, step + 0.5, step, num_bytes=8)
    spans = Run.from_memory(INFO, [memory, MemoryRecorder(1)]).spans
    assert spans.select(steps=slice(2, 4)).table["step"].tolist() == [2, 2, 3, 3]
    assert spans.select(steps=slice(4, None), kinds=["send"]).table["bytes"].tolist() == [8, 8]
    assert len(spans.select(ranks=[1])) == 0 and len(spans.of_rank(0)) == 12
    with pytest.raises(ValueError, match="a range of step numbers"):
        spans.select(steps=slice(-3, None))


def test_an_evaluation_by_one_rank_has_the_bytes_that_all_had_sent_by_then() -> None:
    def step(number: int, seconds: float, sent: int) -> dict[str, Any]:
        row = {"step": number, "seconds": seconds, "samples": 8, "bytes_sent": sent, "loss": 1.0, "num_samples": 4}
        return {**row, "staleness": 0, "lr": 0.1}

    judged = {"loss_sum": 4.0, "count": 4, "correct": 2, "judged": 4, "shares": 1}
    seen = {"step": 1, "seconds": 2.0, "samples": 16, "bytes_sent": 200, "evaluation": judged}
    metrics = {
        0: [step(0, 1.0, 100), step(1, 2.0, 200), seen, step(2, 3.0, 300)],
        1: [step(0, 0.5, 50), step(1, 1.0, 60), step(2, 1.5, 70), step(3, 2.5, 80)],
        2: [step(0, 2.2, 900)],  # its first step was later
    }
    info = {"status": "running", "algorithm": {"name": "AsyncSGD"}}
    (real,) = Run({**info, "clock": "wall"}, metrics).evaluations()
    assert real["bytes_sent"] == 200 + 70 and real["accuracy"] == 0.5
    (simulated,) = Run({**info, "clock": "virtual"}, metrics).evaluations()
    assert simulated["bytes_sent"] == 200, "the simulator has summed"
