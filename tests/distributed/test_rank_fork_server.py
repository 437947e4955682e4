"""Ranks that are forked from a process that has imported their modules: what they are, and how all processes end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tests.waiting import within
from workbench.clusters.local.spawn import fork_server_for
from workbench.runtimes.liveness.failure_detector import heartbeat_name

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux")

ALONE = """
    import json, os, sys, time
    from pathlib import Path
    from workbench.clusters.local.fork_server import RankForkServer
    from workbench.errors import LaunchError

    LOADED = []

    def rank(arguments):
        what = arguments[0]
        own = os.getsid(0) == os.getpid()
        line = f"rank {what} {os.environ.get('SOME')} {os.environ.get('HOME')} {LOADED} {own} {sys.stdin.read()}\\n"
        os.write(1, os.fsencode(line))  # at once, for four ranks write here
        if what == "killed":
            os.kill(os.getpid(), 9)
        if what == "sleeps":
            time.sleep(60)
        sys.exit({"ends": 0, "fails": 3}[what])

    def end(process):
        while process.poll() is None:
            time.sleep(0.01)
        return process.returncode

    fork_server = RankForkServer(rank, lambda: LOADED.append("torch"))
    LOADED.append("computed")
    output = Path(sys.argv[1])
    ranks = {what: fork_server.start([what], {"SOME": "\\udcff " + what}, output) for what in ("ends", "fails", "killed", "sleeps")}
    ends = {what: end(process) for what, process in ranks.items() if what != "sleeps"}
    print(json.dumps({"ends": ends, "sleeps": ranks["sleeps"].pid, "still": ranks["sleeps"].poll()}), flush=True)
    sys.stdin.readline()
    print(json.dumps({"after": end(ranks["sleeps"])}), flush=True)
    try:
        fork_server.start(["ends"], {}, output)
    except LaunchError as error:
        print(json.dumps({"error": str(error)}), flush=True)
"""


def test_ranks_of_a_fork_server_and_their_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(ALONE), str(tmp_path / "log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        told = json.loads(process.stdout.readline())
        assert (told["ends"], told["still"]) == ({"ends": 0, "fails": 3, "killed": -signal.SIGKILL}, None)
        deadline = time.monotonic() + 20
        while (
            len(lines := (tmp_path / "log").read_text(errors="surrogateescape").splitlines()) < 4
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)  # the one that sleeps may not have printed
        assert sorted(lines) == [
            f"rank {what} \udcff {what} None ['torch'] True " for what in ("ends", "fails", "killed", "sleeps")
        ]
        rank = psutil.Process(told["sleeps"])
        fork_server = rank.parent()
        assert fork_server is not None and fork_server.ppid() == process.pid
        fork_server.kill()
        process.stdin.write("\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == {"after": -signal.SIGTERM}
        assert "ranks are forked from is gone" in json.loads(process.stdout.readline())["error"]
        assert process.wait(20) == 0
    # In a container nobody may collect a process whose parent was killed.
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE


def test_there_is_none_where_something_may_have_been_computed() -> None:
    assert "torch" in sys.modules
    assert fork_server_for(2) is None


def training(runs: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """`workbench train` on two ranks that would train for long; and the ranks, once they take steps."""
    command = [
        sys.executable,
        "-m",
        "workbench",
        "train",
        "pipe-sgd",
        "--runtime",
        "torch",
        "--workers",
        "2",
        "--steps",
        "1000000",
    ]
    process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert within(60, lambda: len([path for path in runs.glob("2*/metrics-*.jsonl") if path.stat().st_size]) == 2)
    folder = next(runs.glob("2*"))
    return process, [
        psutil.Process(json.loads((folder / heartbeat_name(rank)).read_text())["pid"]) for rank in range(2)
    ]


@pytest.mark.parametrize("victim", ["the command", "the fork_server"])
def test_with_the_command_or_the_fork_server_all_ranks_end(victim: str, runs: Path, no_process_left: None) -> None:
    process, ranks = training(runs)
    servers = {rank.ppid() for rank in ranks}
    assert len(servers) == 1
    fork_server = psutil.Process(servers.pop())
    assert fork_server.ppid() == process.pid
    try:
        os.kill(process.pid if victim == "the command" else fork_server.pid, signal.SIGKILL)
        _, said = process.communicate(timeout=60)
        assert within(
            20,
            lambda: (
                not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in (fork_server, *ranks))
            ),
        )
    finally:
        process.kill()
    if victim == "the fork_server":
        assert process.returncode == 1
        assert "process is gone: killed by signal 15" in said, said
        info = json.loads((next(runs.glob("2*")) / "run.json").read_text())
        assert info["status"] == "failed"
