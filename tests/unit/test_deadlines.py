"""Every wait has an end: calls that could block forever, found in the sources; and the line that a caller's wait prints."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ipyparallel", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from workbench import units
from workbench.clusters import waiting
from workbench.clusters.folder_results import follow_ends
from workbench.clusters.run_handle import RunHandle
from workbench.clusters.start import Start
from workbench.clusters.supervision.start_progress import Progress
from workbench.clusters.waiting import Waiting, interrupt_ranks, silent_ranks
from workbench.errors import LaunchError
from workbench.kernel.execution import Execution
from workbench.runtimes.liveness.failure_detector import heartbeat_name
from workbench.trace.store import new_run

PACKAGE = Path(waiting.__file__).parents[1]
ELSEWHERE = {"host": "elsewhere", "pid": 1}

# How many waits without a time-out of their own there are in a file, and what ends them.
ENDLESS = {
    "codecs/kernels.py": (2, "a context variable, whose value is there"),
    "cli/record.py": (1, "the user's command, which ends by itself or by a signal"),
    "clusters/cluster.py": (
        3,
        "a start, which has a deadline or a place in a queue: it says what it waits for, and can be interrupted",
    ),
    "clusters/emulated/network.py": (1, "an example, and a process that was killed"),
    "clusters/engines/engines.py": (2, "a start, which has a deadline and hears of the end; a reaper that was killed"),
    "clusters/local/fork_server.py": (1, "a server that was killed"),
    "clusters/waiting.py": (1, "on a thread that nobody waits for longer than SIGNAL_S"),
    "dashboard/session.py": (
        2,
        "a thread of its own: it goes on when the user says so, or when the training has ended",
    ),
    "doctor/ranks.py": (1, "processes that were killed"),
    "clusters/supervision/reaper.py": (1, "a reaper that was killed"),
    "experiments/sweeper.py": (1, "a cell's process, and a reaper, that were killed"),
    "papers/rank_pool.py": (2, "reapers that were killed"),
    "papers/studies/paired_runs.py": (2, "as `papers/studies/training.py`"),
    "papers/studies/ratio_sweep.py": (1, "as `papers/studies/training.py`"),
    "papers/studies/training.py": (
        1,
        "a training in a notebook, whose cells have a limit: it says what it waits for, and can be interrupted",
    ),
    "runtimes/execution/tasks.py": (1, "a lane's own thread, which waits for work until it is closed"),
    "runtimes/transport/torch_handles.py": (3, "a waiter's own thread, for which nobody waits without a deadline"),
}


def endless(tree: ast.AST) -> Iterator[int]:
    """Lines of calls that block until something happens, however long that takes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, words = node.func.attr, {item.arg for item in node.keywords}
        bounded = bool(node.args) or bool(words & {"timeout", "timeout_s"})
        runs = name in ("run", "check_call", "check_output", "call") and ast.unparse(node.func.value) == "subprocess"
        blocks = any(item.arg == "block" and ast.unparse(item.value) == "True" for item in node.keywords)
        if (
            (name in ("wait", "join", "result", "get", "communicate") and not bounded)
            or (runs and "timeout" not in words)
            or name in ("apply_sync", "map_sync")
            or blocks
        ):
            yield node.lineno


def test_what_waits_without_an_end_is_known() -> None:
    found = {
        str(path.relative_to(PACKAGE)): [*endless(ast.parse(path.read_text()))]
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    known = {place: number for place, (number, _) in ENDLESS.items()}
    assert {place: lines for place, lines in found.items() if len(lines) > known.get(place, 0)} == {}, (
        "give it a deadline, or a reason"
    )
    assert {place: number for place, number in known.items() if len(found[place]) < number} == {}, (
        "fewer now: let the list say so"
    )


@pytest.mark.parametrize(
    "call",
    ["future.result()", "thread.join()", "subprocess.run(['x'])", "view.apply_sync(f)", "view.pull('a', block=True)"],
)
def test_a_wait_without_an_end_would_be_found(call: str) -> None:
    assert [*endless(ast.parse(call))] == [1]


@pytest.mark.parametrize(
    "call", ["future.result(3)", "thread.join(timeout=3)", "subprocess.run(['x'], timeout=3)", "', '.join(words)"]
)
def test_a_wait_with_an_end_is_none(call: str) -> None:
    assert [*endless(ast.parse(call))] == []


# ---------------------------------------------------------------- what is said


class Terminal(io.StringIO):
    """A terminal, or a pipe."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.looks = looks

    def isatty(self) -> bool:
        return self.looks


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "WAIT_REPORT_S", 0.2)
    monkeypatch.setattr(waiting, "SHOWN_S", 0.1)


def never(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@pytest.mark.parametrize(("looks", "silent", "lines"), [(False, False, 3), (True, False, 1), (False, True, 0)])
def test_a_wait_says_for_what_on_the_command_line(
    soon: None, monkeypatch: pytest.MonkeyPatch, looks: bool, silent: bool, lines: int
) -> None:
    monkeypatch.setattr(sys, "stderr", said := Terminal(looks))
    with Waiting(lambda: "a bus", silent=silent) as wait:
        assert not wait.until(never, 1.2)
        before = said.getvalue()
    assert len(before.strip().splitlines()) == lines or looks, before
    if looks:
        shown = before.split("\r")
        assert shown[0] == "" and len(shown) > 4 and all(line.rstrip().endswith("s for a bus") for line in shown[1:])
        assert "\n" not in said.getvalue() and said.getvalue().endswith(" \r"), "the line goes with the wait"


def test_a_wait_in_a_notebook_is_one_line_that_is_replaced(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    display = pytest.importorskip("IPython.display")
    shown: list[str] = []
    handle = SimpleNamespace(update=lambda line: shown.append(repr(line)))
    monkeypatch.setattr(waiting, "in_notebook", lambda: True)
    monkeypatch.setattr(display, "display", lambda line, display_id: shown.append(f"new: {line!r}") or handle)
    with Waiting("a bus") as wait:
        assert not wait.until(never, 0.8)
    assert shown[0] == "new: waiting 0 s for a bus"
    assert len(shown) > 3 and not any(line.startswith("new") for line in shown[1:])
    assert shown[-1] == ""


def test_a_short_wait_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Waiting("a bus") as wait:
        assert wait.until(lambda seconds: time.sleep(seconds) or True, 5)
    assert capsys.readouterr().err == ""


def test_who_waits_for_a_training_is_told_where_it_is_and_who_is_silent(
    soon: None, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = new_run({"algorithm": {"name": "PipeSGD"}, "num_workers": 2}, runs)
    for rank, age_s in enumerate((0.0, 30.0)):
        beat = folder / heartbeat_name(rank)
        beat.write_text(json.dumps({"host": "elsewhere", "place": "there", "pid": 1, "started_s": 0.0}))
        os.utime(beat, (time.time() - age_s, time.time() - age_s))
    handle = RunHandle(folder, follow_ends(folder, None, [ELSEWHERE, ELSEWHERE]), None)  # type: ignore[arg-type]
    with pytest.raises(TimeoutError, match=r"still training after 0.5 s: .*Wait again, or end it with .stop\(\)"):
        handle.wait(0.5)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("waiting 0 s for PipeSGD on ?, 2 ranks: starting (")
    assert re.search(r"; last heartbeat: rank 1 3\d s ago$", said[0])
    handle.quiet = True
    with pytest.raises(TimeoutError):
        handle.wait(0.5)
    assert capsys.readouterr().err == ""
    handle.abandon("enough")
    assert silent_ranks(folder, 5).count("rank") == 1


def test_who_waits_for_ranks_to_start_is_told_so(soon: None, capsys: pytest.CaptureFixture[str]) -> None:
    go = threading.Event()

    def work() -> None:
        assert go.wait(10)
        raise LaunchError("enough")

    engines: Any = SimpleNamespace(num_ranks=2, launcher=SimpleNamespace(title="a launcher"), stop=lambda: None)
    start = Start(engines, Progress(2, "a launcher", silent=False), 1.0, work)
    with pytest.raises(TimeoutError, match="the start continues"):
        start.wait(0.5)
    assert capsys.readouterr().err.splitlines()[0] == "waiting 0 s for 2 ranks to start (a launcher)"
    go.set()
    with pytest.raises(LaunchError, match="enough"):
        start.wait(10)


def test_an_interrupt_that_no_nanny_takes_is_an_error_and_no_hang(
    soon: None, capsys: pytest.CaptureFixture[str]
) -> None:
    over = threading.Event()
    client = SimpleNamespace(send_signal=lambda *_, **__: over.wait(60))
    with pytest.raises(LaunchError, match=r"did not reach all of ranks 0, 1 in 0.5 s: heal\(\) the cluster"):
        interrupt_ranks(client, [0, 1], 0.5)
    over.set()
    assert "waiting 0 s for ranks 0, 1 to be interrupted" in capsys.readouterr().err


def test_an_error_of_the_client_is_the_callers() -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise IndexError("no such engine")

    with pytest.raises(IndexError, match="no such engine"):
        interrupt_ranks(SimpleNamespace(send_signal=refuses), [7])


def test_a_cell_that_lasts_says_whom_it_waits_for() -> None:
    cell = Execution(None, [0, 1, 2], 3)
    cell._results = {rank: SimpleNamespace(done=lambda rank=rank: rank == 1) for rank in range(3)}
    assert cell._describe_busy() == "ranks 0,2 to return from this cell; returned: 1"
