"""Processes of `tests/forked.py` begin, receive signals and end as interpreters do."""

from __future__ import annotations

import marshal
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.distributed.pool import fork_server
from tests.forked import forked
from tests.waiting import within

Start = Callable[[str], list[str]]
SAYS_ITS_NUMBER = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def interpreter(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def stand_in(code: str) -> list[str]:
    return forked("-c", code)


@pytest.mark.parametrize("start", [interpreter, stand_in])
@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("print('said')", 0, "said\n"),
        ("import sys; print(sys.stdin.read(), end=''); sys.exit(3)", 3, "asked"),
        ("import os; print(os.environ['GIVEN'], os.getcwd())", 0, "é {folder}\n"),
        ("import atexit; atexit.register(print, 'at the end'); 1 / 0", 1, "at the end\n"),
        ("raise SystemExit('for this reason')", 1, ""),
        ("import os; os.kill(os.getpid(), 15)", -15, ""),
        ("raise KeyboardInterrupt", -2, ""),
        (
            "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
            0,
            "late\n",
        ),
    ],
)
def test_it_does_and_ends_as_an_interpreter(start: Start, code: str, status: int, said: str, tmp_path: Path) -> None:
    environment = {**os.environ, "GIVEN": "é"}
    done = subprocess.run(
        start(code), env=environment, cwd=tmp_path, input="asked", capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (status, said.format(folder=tmp_path)), done.stderr
    assert ("Traceback" in done.stderr) == ("1 / 0" in code or "Keyboard" in code)


def begin(code: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    """The stand-in, and the forked process."""
    process = subprocess.Popen(forked("-c", code), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    return process, psutil.Process(int(process.stdout.readline()))


def address() -> str:
    """Of the process that forks."""
    return str(Path(fork_server().python).with_name("socket"))


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on(sign: signal.Signals) -> None:
    hears = f"import os, signal, sys; signal.signal({int(sign)}, lambda *_: sys.exit(7)); {SAYS_ITS_NUMBER}"
    process, _ = begin(hears)
    process.send_signal(sign)
    process.communicate(timeout=60)
    assert process.returncode == 7


@pytest.mark.parametrize("victim", ["the stand-in", "the process"])
def test_when_one_is_killed_so_is_the_other(victim: str) -> None:
    process, there = begin(SAYS_ITS_NUMBER)
    os.kill(process.pid if victim == "the stand-in" else there.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert within(20, lambda: not there.is_running())


def test_a_stand_in_that_is_killed_as_it_asks_ends_no_other() -> None:
    process, there = begin(SAYS_ITS_NUMBER)
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(address())
    try:
        assert subprocess.run(stand_in(""), timeout=60).returncode == 0
        assert there.is_running()
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_a_process_ends_whose_stand_in_is_killed_before_it_has_read() -> None:
    asked = {
        "command": interpreter(SAYS_ITS_NUMBER),
        "streams": [0, 1, 2],
        "folder": os.getcwd(),
        "environment": dict(os.environ),
    }
    read, write = os.pipe()
    with (
        open(read) as said,
        open(write, "w") as stream,
        socket.socket(socket.AF_UNIX) as caller,
        open(os.devnull, "r+") as nothing,
    ):
        caller.connect(address())
        socket.send_fds(caller, [b"!"], [nothing.fileno(), stream.fileno(), nothing.fileno()])
        caller.sendall(marshal.dumps(asked))
        there = psutil.Process(int(said.readline()))
        caller.recv(1, socket.MSG_PEEK)  # its number is here
    assert within(20, lambda: not there.is_running())
