"""Processes that are forked from a server: each ends alone, or with the server or its parent, with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.waiting import within
from workbench.clusters.local import fork_server
from workbench.clusters.local.fork_server import Forked, ForkServer
from workbench.clusters.local.spawn import _cause, _end
from workbench.experiments.fork_cells import start_fork_server
from workbench.trace.store import read_info, write_info

SERVER = """
import os, signal, subprocess, sys, time
from multiprocessing.connection import Connection
from workbench.clusters.local.fork_server import serve

fork, forks = os.fork, iter(range(4))

def few():
    if next(forks, None) is None:
        raise BlockingIOError("no more")
    return fork()

os.fork = few
exec(*serve(Connection(os.dup(0))))
"""
STARTS_ANOTHER = "print(subprocess.Popen(['sleep', '1000']).pid, flush=True); time.sleep(1000)"
pytestmark = pytest.mark.usefixtures("no_process_left")


@pytest.fixture
def server(no_process_left: None) -> Iterator[ForkServer]:
    """One whose children do what their argument says; it can fork four times."""
    found = start_fork_server(dict(os.environ), [sys.executable, "-c", SERVER])
    yield found
    found.close()


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def begin(server: ForkServer, output: Path) -> tuple[Forked, int]:
    """A child that continues, and the process that it started."""
    child = server.start([STARTS_ANOTHER], os.environ, output)
    assert within(30, lambda: output.exists() and output.read_text().endswith("\n")), child.poll()
    assert child.poll() is None and child.pid
    return child, int(output.read_text())


def test_children_end_as_they_do_and_one_that_cannot_be_forked_says_so(server: ForkServer, tmp_path: Path) -> None:
    ignores = "sys.exit(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    asked = [ignores, "sys.exit(3 + len(sys.stdin.read()))", "os.kill(os.getpid(), 9)", "1 / 0", "sys.exit(0)"]
    children = [server.start([code], os.environ, tmp_path / str(number)) for number, code in enumerate(asked)]
    assert within(30, lambda: all(child.poll() is not None for child in children))
    assert [child.returncode for child in children] == [0, 3, -signal.SIGKILL, 1, 1]
    assert "ZeroDivisionError" in (tmp_path / "3").read_text()
    assert (tmp_path / "4").read_text() == "workbench: the fork of a process failed: no more\n"


def test_a_child_that_is_killed_ends_with_what_it_started_and_no_other_does(server: ForkServer, tmp_path: Path) -> None:
    (first, its), (other, _) = begin(server, tmp_path / "0"), begin(server, tmp_path / "1")
    os.kill(server._process.pid, signal.SIGINT)  # which is not for it
    first.kill()
    assert within(30, lambda: first.poll() == -signal.SIGKILL and is_gone(its))
    assert other.poll() is None


def test_a_server_that_is_closed_ends_its_children_and_what_they_started(server: ForkServer, tmp_path: Path) -> None:
    child, its = begin(server, tmp_path / "0")
    server.close()
    assert within(30, lambda: is_gone(child.pid) and is_gone(its))
    assert server.has_ended and within(30, lambda: child.poll() == -signal.SIGTERM)


def test_a_server_hears_of_its_parents_end(server: ForkServer, tmp_path: Path) -> None:
    child, its = begin(server, tmp_path / "0")
    server._channel.close()  # as the system does it
    assert within(30, lambda: server.returncode == 0 and is_gone(child.pid) and is_gone(its))


@pytest.mark.skipif(sys.platform != "linux", reason="a process hears of its parent's end on Linux")
def test_with_a_server_that_is_killed_its_children_end_and_later_ones_do_not_begin(
    server: ForkServer, tmp_path: Path
) -> None:
    child = server.start(["time.sleep(1000)"], os.environ, tmp_path / "0")
    assert within(30, lambda: child.poll() is None and child.pid > 0)
    os.kill(server._process.pid, signal.SIGKILL)
    assert within(30, lambda: child.poll() == -signal.SIGTERM)
    later = server.start(["sys.exit(0)"], os.environ, tmp_path / "1")
    assert within(30, lambda: later.poll() == -signal.SIGKILL), "the server's"
    assert server.has_ended and not later.pid


def test_a_server_that_does_not_listen_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "END_S", 0.1)
    server = start_fork_server(dict(os.environ), ["sh", "-c", "exec sleep 1000"])
    server.close()
    assert server.returncode == -signal.SIGKILL


def test_a_child_that_no_process_collects_has_ended() -> None:
    """As in a container whose first process collects no orphans: a zombie keeps its number."""

    class Gone:
        has_ended, returncode = True, 0

    with subprocess.Popen([sys.executable, "-c", ""]) as zombie:
        within(10, lambda: psutil.Process(zombie.pid).status() == psutil.STATUS_ZOMBIE)
        child = Forked(Gone(), 0)  # type: ignore[arg-type]
        child.pid = zombie.pid
        assert child.poll() == -signal.SIGTERM


# ---------------------------------------------------------------- the ranks of a command


class JustEnded:
    """A rank that its server has reaped, as its command is about to learn."""

    pid, returncode = 2**22 + 1, 1

    def __init__(self) -> None:
        self.statuses = iter([None])

    def poll(self) -> int | None:
        return next(self.statuses, self.returncode)


def test_a_rank_may_end_while_the_ranks_are_ended() -> None:
    _end([JustEnded()])  # type: ignore[list-item]


def test_the_cause_is_told_though_a_report_was_cut_off(tmp_path: Path) -> None:
    """A full disk cuts a rank's report off."""
    write_info(tmp_path, {"status": "running"})
    (tmp_path / "failed-00000.json").write_text("")
    (tmp_path / "failed-00001.json").write_text('{"rank": 1, "error": "ValueError: no", "exit_code": 1}')
    assert "ValueError: no" in str(_cause(tmp_path, [JustEnded()], {}))  # type: ignore[list-item]
    assert read_info(tmp_path)["status"] == "failed"
