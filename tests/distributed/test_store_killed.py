"""The run store when writers end: SIGKILL at any moment, a full disk, another writer.

Nothing earlier is lost, and all of it is reported.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.distributed.pool import shared_pool
from tests.laws import tiny
from tests.laws.train import make_job
from tests.waiting import within
from workbench.algorithms import SynchronousSGD
from workbench.cli.main import main
from workbench.errors import WorkbenchError
from workbench.runtimes.rank.main import Job, run_rank
from workbench.settings import Settings
from workbench.trace import FileRecorder, Run, list_runs, new_run, update_run
from workbench.trace.processes import SILENT_S, YOUNG_S
from workbench.trace.store import DRAFT_LIFETIME_S, RESERVE_NAME, read_info, write_info

NUM_KILLS = 40
NUM_STEPS = 8
WRITER = f"""
import os, sys
from workbench.trace import FileRecorder, new_run, update_run
HEADER = {{"host": __import__("socket").gethostname(), "pid": os.getpid(), "unix_s": __import__("time").time()}}

def write(ledger):
    while True:
        folder = new_run({{"algorithm": {{"name": "M"}}, "num_workers": 2}})
        recorders = [FileRecorder(folder, rank, {{**HEADER, "pid": os.getpid()}}) for rank in range(2)]
        update_run(folder, status="running")
        for step in range({NUM_STEPS}):
            for recorder in recorders:
                recorder.span("forward", "compute", step, step + 0.5, step)
                recorder.metrics({{"step": step, "seconds": 0.1, "samples": 8, "bytes_sent": 9, "loss": 1.0, "num_samples": 4}})
                recorder.end_step()
        for recorder in recorders:
            recorder.close()
        update_run(folder, status="finished", result={{"steps": {NUM_STEPS}}})
        os.write(ledger, (folder.name + "\\n").encode())  # from here on, nothing of it may be lost

for _ in sys.stdin:  # a fresh writer each time, without the imports
    pid = os.fork()
    if pid == 0:
        write(os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT))
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("gone", flush=True)
"""


def age(folder: Path, seconds: float) -> None:
    """As if nothing had been written there for that long."""
    then = time.time() - seconds
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (then, then), follow_symlinks=False)


# ---------------------------------------------------------------- SIGKILL


def test_writers_that_are_killed_at_any_moment_lose_nothing_that_was_done(runs: Path, tmp_path: Path) -> None:
    """Forty SIGKILLs: finished runs are complete; unfinished ones are readable, with the status "killed"."""
    clock, chance = tmp_path / "ledger", random.Random(8)
    command = [sys.executable, "-c", WRITER, str(clock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as fork_server:
        assert fork_server.stdin and fork_server.stdout
        for number in range(NUM_KILLS):
            fork_server.stdin.write("\n")
            fork_server.stdin.flush()
            pid, before = int(fork_server.stdout.readline()), len(os.listdir(runs)) if runs.is_dir() else 0
            assert within(20, lambda before=before: runs.is_dir() and len(os.listdir(runs)) > before), "it writes a run"
            time.sleep(chance.uniform(0.0, 0.03))
            os.kill(pid, signal.SIGKILL)
            assert fork_server.stdout.readline() == "gone\n"
            if number % 8 == 0:
                assert list_runs().damaged == (), "a reader at any moment sees whole runs"
        fork_server.stdin.close()
        assert fork_server.wait(20) == 0
    done = set(clock.read_text().split())
    age(runs, YOUNG_S + 5)
    listing = list_runs()
    assert listing.damaged == ()
    status = {run.id: run.status for run in listing}
    assert done and {name for name, word in status.items() if word == "finished"} >= done
    cut = {name for name in status if name not in done and status[name] != "finished"}
    assert len(cut) >= NUM_KILLS / 8, "or no kill hit a run in the midst of it"
    assert {status[name] for name in cut} == {"killed"}
    for name in done:
        run = Run.load(runs / name)
        assert (
            [len(rows) for rows in run.metrics.values()] == [NUM_STEPS] * 2
            and run.damaged == ()
            and len(run.spans) == 2 * NUM_STEPS
        )
    for name in cut:
        run = Run.load(runs / name)
        assert run.damaged == () and run.info["status"] == "killed" and "ended without a report" in run.info["error"]
        run.steps(), run.spans


@pytest.mark.slow  # torch is imported by three processes
def test_a_training_that_is_killed_is_told_by_its_processes(
    runs: Path, no_process_left: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Outside of a sweep: the command line and both its ranks are killed in the midst of a run."""
    words = ["train", "synchronous-sgd", "--runtime", "torch", "--workers", "2", "--epochs", "100000", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "workbench", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 90
    while not (found := list(list_runs())) or len(Run.load(found[0].folder).metrics.get(1, ())) < 20:
        assert process.poll() is None and time.monotonic() < deadline, "it does not train"
        time.sleep(0.1)
    folder = found[0].folder
    assert found[0].status == "running"
    victims = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for victim in victims:
        victim.suspend()  # all first: none can hear of another's death and say so
    for victim in victims[::-1]:
        victim.kill()
    process.wait(20)
    psutil.wait_procs(victims, timeout=20)
    assert [run.status for run in list_runs()] == ["running"], "a moment later it might still be ending"
    age(folder, YOUNG_S + 1)
    assert json.loads((folder / "run.json").read_text())["status"] == "running", "nobody could write it"
    assert main(["runs"]) == 0
    said = capsys.readouterr().out
    assert "killed" in said and "running" not in said
    assert main(["steer", "last", "pause"]) == 2
    assert "has ended (killed)" in capsys.readouterr().err
    assert main(["runs", "remove", "--where", "status=killed", "--yes"]) == 0
    assert len(list_runs()) == 0


def test_who_made_a_run_and_who_writes_it_tell_whether_it_lives(runs: Path) -> None:
    folder = new_run({"algorithm": {"name": "M"}, "status": "running"})
    mine = read_info(folder)["process"]
    header = {"host": mine["host"], "pid": mine["pid"], "unix_s": time.time()}

    def word(**process: object) -> str:
        update_run(folder, process={**mine, **process})
        age(folder, YOUNG_S + 1)
        return next(iter(list_runs())).status

    assert word() == "running", "this process is there"
    assert word(process_started=1.0, process_begun=["an earlier start of the machine", 1.0]) == "killed", (
        "another process has its number"
    )
    assert word(pid=2**22 + 1) == "killed"
    update_run(folder, process={**mine, "pid": 2**22 + 1})
    assert next(iter(list_runs())).status == "running", "it was written a moment ago"
    assert word(host="elsewhere") == "running", "of a process on another machine nobody knows so soon"
    age(folder, SILENT_S + 1)
    assert next(iter(list_runs())).status == "lost"
    FileRecorder(folder, 0, header).close()
    assert word(pid=2**22 + 1) == "running", "its rank lives, though who made it was detached"
    path = folder / "trace-00000.jsonl"
    path.write_text(json.dumps({**header, "rank": 0, "unix_s": 1.0}) + "\n")
    assert word(pid=2**22 + 1) == "killed", "that rank's number is another process's"
    update_run(folder, status="finished")
    assert next(iter(list_runs())).status == "finished"


def test_what_killed_writers_leave_beside_the_runs_is_removed_by_the_next(runs: Path) -> None:
    kept = new_run({"algorithm": {"name": "M"}})
    for name in (".new-abc", ".removed-run-12"):
        (runs / name).mkdir()
        (runs / name / "run.json").write_text("{}")
        age(runs / name, DRAFT_LIFETIME_S + 60)
    (runs / ".index.jsonl.12ab.tmp").write_text("")
    age(runs / ".index.jsonl.12ab.tmp", DRAFT_LIFETIME_S + 60)
    (runs / ".new-young").mkdir()
    other = new_run({"algorithm": {"name": "M"}})
    assert {path.name for path in runs.iterdir()} == {kept.name, other.name, ".new-young"}


# ---------------------------------------------------------------- a full disk


def limited(job: Job, num_bytes: int) -> str:
    """A rank that can write no file of more than that many bytes; its output."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        run_rank(job)
    except WorkbenchError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "nothing"


def test_a_rank_that_can_write_no_more_ends_the_run_with_one_error(runs: Path) -> None:
    before = new_run({"algorithm": {"name": "M"}, "status": "finished"})
    kept = (before / "run.json").read_bytes()
    job = make_job("torch", 2, SynchronousSGD(), tiny.problem(), Settings(steps=5000, batch_size=1, timeout_s=30))
    job = replace(job, folder=str(new_run(json.loads((Path(job.folder) / "run.json").read_text()))))
    pool = shared_pool("torch", 2)
    pool.close()  # in a world of its own: the file by which ranks meet grows from run to run, and is limited too
    said = pool.run(limited, job, 40_000)
    own = [words for words in said if not words.startswith("PeerFailed")]
    assert own, said
    for words in own:
        assert (
            f"{job.folder} cannot be written (File too large)" in words
            and "free some space there, or name another run store" in words
        )
    info = read_info(Path(job.folder))
    assert info["status"] == "failed" and "cannot be written" in info["error"]
    run = Run.load(job.folder)
    assert run.damaged == () and min(len(rows) for rows in run.metrics.values()) > 10
    for path in Path(job.folder).glob("*.jsonl"):
        assert path.read_bytes().endswith(b"\n"), f"{path.name} ends in a part of a line"
    assert (before / "run.json").read_bytes() == kept


@contextmanager
def small_disk(folder: Path, num_kb: int) -> Iterator[None]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_kb}k", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=20)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


def record_for_ever(recorder: FileRecorder) -> None:
    for step in range(10**9):
        recorder.metrics({"step": step, "seconds": 0.1, "samples": 8, "bytes_sent": 9, "loss": 1.0, "num_samples": 4})
        recorder.end_step()


def fill(path: Path) -> None:
    """Until the last block of the disk is taken."""
    with suppress(OSError), path.open("ab", buffering=0) as file:
        while True:
            file.write(b"x" * 512)


@pytest.mark.root
def test_on_a_full_disk_a_run_is_marked_and_what_was_there_is_whole(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    with small_disk(root, 512):
        first = new_run({"algorithm": {"name": "M"}, "status": "running"}, root)
        update_run(first, status="finished")
        assert not (first / RESERVE_NAME).exists(), "only a run that goes on needs it"
        kept = (first / "run.json").read_bytes()
        second = new_run({"algorithm": {"name": "M"}}, root)
        recorder = FileRecorder(second, 0, {})
        with pytest.raises(WorkbenchError, match=r"cannot be written \(No space left on device\): free some space"):
            record_for_ever(recorder)
        fill(root / "filler")
        update_run(second, status="failed", error="the disk is full")
        recorder.close()
        assert {run.id: run.status for run in list_runs(root)} == {first.name: "finished", second.name: "failed"}
        assert list_runs(root).damaged == ()
        run = Run.load(second)
        assert (
            run.damaged == () and len(run.metrics[0]) > 1000 and run.metrics[0][-1]["step"] == len(run.metrics[0]) - 1
        )
        assert (first / "run.json").read_bytes() == kept
        fill(root / "filler")
        with pytest.raises(WorkbenchError, match=r"cannot be written.*name another"):
            new_run({"algorithm": {"name": "M"}}, root)
        with pytest.raises(WorkbenchError, match="cannot be written"):
            write_info(first, {**read_info(first), "note": "x" * 10_000})
        assert (first / "run.json").read_bytes() == kept
        assert not list(root.glob(".new-*")) and not list(root.glob("*/.run-*"))


# ---------------------------------------------------------------- two writers

ADDS = """
import sys
from pathlib import Path
from workbench.trace import update_run
for number in range(40):
    update_run(Path(sys.argv[1]), **{f"of_{sys.argv[2]}_{number}": number})
"""

HOLDS = """
import sys
from pathlib import Path
from workbench.trace.files.lock import locked
with locked(Path(sys.argv[1])):
    print("has it", flush=True)
    input()
"""


def test_two_writers_of_one_run_lose_nothing_of_each_other(runs: Path) -> None:
    folder = new_run({"algorithm": {"name": "M"}})
    writers = [subprocess.Popen([sys.executable, "-c", ADDS, str(folder), str(number)]) for number in range(2)]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    info = read_info(folder)
    assert [info.get(f"of_{writer}_{number}") for writer in range(2) for number in range(40)] == [
        *range(40),
        *range(40),
    ]


def test_a_writer_that_is_stopped_with_the_lock_holds_nobody_for_ever(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.trace.files.lock.LOCK_S", 0.2)
    folder = new_run({"algorithm": {"name": "M"}})
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout and holder.stdout.readline() == "has it\n"
        holder.send_signal(signal.SIGSTOP)
        update_run(folder, status="failed")
        holder.kill()
    assert read_info(folder)["status"] == "failed"
