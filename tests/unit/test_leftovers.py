"""A test that changes its process is found, and the message says what it changed."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.leftovers import Definitions, Picture, peak_bytes
from workbench import rng
from workbench.trace.recorder import MemoryRecorder

Undo = Callable[[], object]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not end is not waited for."""
    monkeypatch.setattr("tests.leftovers.ENDS_S", 0.0)


def a_variable(folder: Path) -> Undo:
    os.environ["LEFT_BEHIND"] = "1"
    return lambda: os.environ.pop("LEFT_BEHIND")


def a_folder(folder: Path) -> Undo:
    was = os.getcwd()
    os.chdir(folder)
    return lambda: os.chdir(was)


def a_path(folder: Path) -> Undo:
    sys.path.append(str(folder))
    return lambda: sys.path.remove(str(folder))


def a_type(folder: Path) -> Undo:
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


def determinism(folder: Path) -> Undo:
    torch.use_deterministic_algorithms(True)
    return lambda: torch.use_deterministic_algorithms(False)


def a_handler(folder: Path) -> Undo:
    was = signal.signal(signal.SIGUSR1, lambda *_: None)
    return lambda: signal.signal(signal.SIGUSR1, was)


def a_level(folder: Path) -> Undo:
    was = logging.root.level
    logging.root.setLevel(1)
    return lambda: logging.root.setLevel(was)


def a_thread(folder: Path) -> Undo:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, args=(60,), name="of a test")
    thread.start()
    return lambda: (end.set(), thread.join())


def a_file(folder: Path) -> Undo:
    return (folder / "open").open("w").close


def a_group(folder: Path) -> Undo:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    return torch.distributed.destroy_process_group


LEAVES = {
    "environment variable LEFT_BEHIND: None became '1'": a_variable,
    "working directory: ": a_folder,
    "sys.path: ": a_path,
    "torch.get_default_dtype: torch.float32 became torch.float64": a_type,
    "torch.are_deterministic_algorithms_enabled: False became True": determinism,
    "what SIGUSR1 does: ": a_handler,
    "logging.root.level: ": a_level,
    "thread of a test runs": a_thread,
    "/open is open": a_file,
    "default process group: None became ": a_group,
}


@pytest.mark.parametrize("words", LEAVES)
def test_what_is_left_is_named(words: str, tmp_path: Path, quick: None) -> None:
    before = Picture()
    assert before.differences() == []
    undo = LEAVES[words](tmp_path)
    try:
        (line,) = before.differences()
    finally:
        undo()
    assert words in line
    assert before.differences() == []


@pytest.mark.parametrize("leave", [a_variable, a_folder, a_path, a_type, determinism, a_group])
def test_what_can_be_put_back_is(leave: Callable[[Path], Undo], tmp_path: Path, quick: None) -> None:
    before = Picture()
    leave(tmp_path)
    before.restore()
    assert before.differences() == []


@pytest.fixture
def replaced() -> Iterator[list[tuple[object, str]]]:
    """Names that are given back what they stood for."""
    names = [(time, "sleep"), (rng, "generator"), (MemoryRecorder, "end_step")]
    was = [(owner, name, getattr(owner, name)) for owner, name in names]
    yield names  # type: ignore[misc]
    for owner, name, value in was:
        setattr(owner, name, value)


def test_what_is_replaced_is_named_once(replaced: list[tuple[object, str]]) -> None:
    definitions = Definitions()
    assert definitions.changes() == []
    for owner, name in replaced:
        setattr(owner, name, lambda *_: None)
    assert sorted(line.partition(":")[0] for line in definitions.changes()) == [
        "time.sleep",
        "workbench.rng.generator",
        "workbench.trace.recorder.MemoryRecorder.end_step",
    ]
    assert definitions.changes() == []


def test_a_thread_that_is_about_to_end_is_waited_for() -> None:
    before = Picture()
    threading.Thread(target=time.sleep, args=(0.2,)).start()
    assert before.differences() == []


def test_peak_memory_counts_what_was_given_back() -> None:
    was = peak_bytes()
    torch.ones(100 << 18).sum()  # 100 MB
    assert was == 0 or peak_bytes() >= 100 << 20
