"""The time of day may be set at any time, by hand or by a time server: no duration and no decision depends on it."""

from __future__ import annotations

import ast
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.unit.test_style import PACKAGE, ROOT
from workbench.runtimes.liveness.membership import FOLDER, Membership
from workbench.trace.processes import process_is_alive, status_by_processes, this_process, when_begun, writer_is_alive

NAMES = {
    "time": ("time", "time_ns", "localtime", "gmtime", "ctime"),
    "datetime": ("now", "utcnow", "today"),
    "date": ("today",),
}

# Where the time of day is read, how often, and why a jump of it does no harm. A duration is `time.monotonic` or
# `perf_counter`.
ALLOWED: dict[str, tuple[int, str]] = {
    "analysis/runs_table.py": (1, "runs since a day that the user names"),
    "bench/records.py": (1, "the date of a record"),
    "cli/cluster.py": (1, "shown: since when a cluster is there"),
    "clusters/emulated/switch.py": (
        1,
        "beside the kernel's time of arrival, and within the latency: a jump is worth no more",
    ),
    "clusters/engines/engines.py": (1, "shown: when a cluster was started"),
    "clusters/supervision/registry.py": (1, "shown: when a cluster was let go"),
    "experiments/cell_states.py": (2, "shown: when an attempt began and ended"),
    "experiments/execution_record.py": (2, "shown: when a notebook began and ended"),
    "papers/reproduction.py": (1, "the date of a record"),
    "plots/live/curves.py": (1, "shown: how old a row is"),
    "runtimes/rank/main.py": (1, "an entry of a trace's header that nothing is reckoned from"),
    "runtimes/liveness/membership.py": (1, "shown: when a rank left"),
    "runtimes/liveness/failure_detector.py": (
        1,
        "words: who is gone is decided by processes, and by changes of files on our own clock",
    ),
    "runtimes/elastic/admission.py": (
        2,
        "where a newcomer's curve begins, which a jump moves and nothing is decided by",
    ),
    "runtimes/rank/join.py": (1, "an entry of a trace's header that nothing is reckoned from"),
    "trace/processes.py": (
        1,
        "with files' times: a run that goes on is heard of again within a second, and processes are looked for",
    ),
    "lab/rank_rows.py": (1, "with files' times: how long ago a rank took its newest step, for its bytes in a second"),
    "lab/run_rows.py": (
        1,
        "a number above those of an earlier server; after a jump back, an open page misses changes until it is loaded again",
    ),
    "trace/index.py": (1, "whether a file is kept in an index is a question of speed"),
    "trace/store.py": (2, "the name of a run; and a draft lives for milliseconds, not for an hour"),
    "runtimes/user_loop/record.py": (1, "an entry of a trace's header that nothing is reckoned from"),
    "runtimes/user_loop/loop_checkpoints.py": (1, "an entry of a trace's header that nothing is reckoned from"),
}


def readings(source: str) -> Iterator[str]:
    """Every call or name in a source that reads the time of day, also one that was imported by itself."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.attr in NAMES.get(node.value.id, ())
        ):
            yield f"{node.value.id}.{node.attr}"
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (f"from time import {item.name}" for item in node.names if item.name in NAMES["time"])


def test_the_time_of_day_is_read_where_a_jump_does_no_harm() -> None:
    found = {str(path.relative_to(ROOT / "workbench")): len(list(readings(path.read_text()))) for path in PACKAGE}
    expected = {name: number for name, (number, _) in ALLOWED.items()}
    assert {name: number for name, number in found.items() if number} == expected


def test_a_reading_would_be_found() -> None:
    source = "import time\nfrom time import time as now, monotonic\nbegin = time.time()\nlater = datetime.now(UTC)\nfine = time.monotonic()"
    assert sorted(readings(source)) == ["datetime.now", "from time import time", "time.time"]


@pytest.fixture
def jumped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of day has been set an hour ahead: also of what reckons with it, such as when a process began."""
    began, now = psutil.Process.create_time, time.time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: began(process) + 3600.0)
    monkeypatch.setattr(time, "time", lambda: now() + 3600.0)


def test_a_process_is_known_again(request: pytest.FixtureRequest) -> None:
    mine, header = this_process(), {"pid": os.getpid(), "unix_s": time.time(), **when_begun()}
    if "process_begun" not in mine:
        pytest.skip("this system does not tell when a process began but by the time of day")
    request.getfixturevalue("jumped")
    assert process_is_alive(mine) and writer_is_alive(header)
    boot, begun = mine["process_begun"]
    assert not process_is_alive({**mine, "process_begun": [boot, begun - 1.0]}), "its number is another process's now"
    assert not writer_is_alive({**header, "process_begun": ["another start of the machine", begun]})
    older = {name: value for name, value in mine.items() if name != "process_begun"}
    assert not process_is_alive(older), "of an older record only the time of day is known"


def test_a_run_that_was_killed_is_seen_though_its_files_are_of_the_future(tmp_path: Path) -> None:
    """Its files' times lie ahead where the clock was set back since."""
    info: dict[str, Any] = {"process": {"host": socket.gethostname(), "pid": 2**22 + 1, "process_started": 1.0}}
    (tmp_path / "metrics-00000.jsonl").write_text("")
    assert status_by_processes(tmp_path, info) is None, "its processes need a while from one another's end to their own"
    for jump_s, word in ((3600.0, "killed"), (-3600.0, "killed"), (1.0, None)):
        os.utime(tmp_path / "metrics-00000.jsonl", (time.time() + jump_s,) * 2)
        assert status_by_processes(tmp_path, info) == word
    elsewhere = {"process": {**info["process"], "host": "another"}}
    os.utime(tmp_path / "metrics-00000.jsonl", (time.time() + 3600.0,) * 2)
    assert status_by_processes(tmp_path, elsewhere) is None, "another machine's clock may be ahead"


@pytest.mark.parametrize("name", ["timeline.html", "trace.json", "chakra.3.et", "calibration.json"])
def test_what_a_reader_writes_is_no_sign_of_life(tmp_path: Path, name: str) -> None:
    """`workbench timeline` and others write into the run's folder: a killed run stays killed."""
    info: dict[str, Any] = {"process": {"host": socket.gethostname(), "pid": 2**22 + 1, "process_started": 1.0}}
    (tmp_path / "metrics-00000.jsonl").write_text("")
    os.utime(tmp_path / "metrics-00000.jsonl", (time.time() - 3600.0,) * 2)
    (tmp_path / name).write_text("")
    assert status_by_processes(tmp_path, info) == "killed"
    assert status_by_processes(tmp_path, {"process": {**info["process"], "host": "another"}}) == "lost"


def test_when_a_rank_left_is_counted_from_the_runs_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detector: Any = SimpleNamespace(
        rank=0,
        num_ranks=3,
        folder=tmp_path,
        announce=None,
        step_of=lambda rank: 5,
        end_of=lambda rank: "its process has ended" if rank else None,
    )
    members = Membership(detector, lambda rank: True)
    now, times = time.time, iter((-7200.0, 7200.0))
    monkeypatch.setattr(time, "time", lambda: now() + next(times, 0.0))
    rows = members.record()
    assert [row["rank"] for row in rows] == [1, 2] and all(0 <= row["seconds"] < 5 for row in rows)
    assert json.loads((tmp_path / FOLDER / "left-00001.json").read_text())["unix_s"] < now() - 3600
