"""Ranks for one run from a shell: processes of this machine that run the same command line, and end with it."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from workbench.clusters.emulated.placement import Placement
from workbench.clusters.local.fork_ranks import Nursery
from workbench.clusters.local.fork_server import Forked, die_with_parent
from workbench.clusters.local.mpi_install import check_num_ranks, find_mpi, mpiexec_command
from workbench.clusters.supervision.exit_status import end_words, ends_told, pids_of, signalled
from workbench.errors import LaunchError, WorkbenchError
from workbench.machine import num_cores
from workbench.runtimes.control.commands import STOP, write_command
from workbench.runtimes.liveness.failure_detector import CONNECTION
from workbench.runtimes.liveness.membership import tolerates_loss
from workbench.trace.store import update_run

FOLDER_VARIABLE = "WORKBENCH_RUN_FOLDER"  # tells a rank which run it belongs to
PLACE_VARIABLE = "WORKBENCH_TAKES_PLACE"  # tells it that it comes later, in the place of a rank that was killed
THREADS = "OMP_NUM_THREADS"
GRACE_S = 10.0
Process = subprocess.Popen[bytes] | Forked
MOST_PLACES = 3  # so often a rank's place is taken; who is killed again and again will be once more


class RankFailed(WorkbenchError):
    """A rank ended with an error that is not the caller's to mend."""

    exit_code = 1


def nursery_for(num_ranks: int) -> Nursery | None:
    """To be asked for before anything is computed, in a process that runs a command: where ranks of torch are forked from.

    None where each is to be started on its own: on hosts of an emulated network, where torch may have threads already, or not on Linux.
    """
    if Placement.here() is not None or "torch" in sys.modules or threading.active_count() > 1 or sys.platform != "linux":
        return None
    told = os.environ.get(THREADS)
    os.environ[THREADS] = _threads(num_ranks)  # read when libraries are loaded
    try:
        return Nursery(_be_rank, _load)
    finally:
        if told is None:
            del os.environ[THREADS]
        else:
            os.environ[THREADS] = told


def _load() -> None:
    from workbench import algorithms, problems  # noqa: F401 - for the ranks


def _be_rank(arguments: list[str]) -> NoReturn:
    """As `python -m workbench ARGUMENTS`."""
    sys.argv = ["workbench", *arguments]
    runpy.run_module("workbench", run_name="__main__", alter_sys=True)
    raise SystemExit(0)


def _threads(num_ranks: int) -> str:
    return str(max(1, num_cores() // num_ranks))


def spawn_ranks(
    runtime: Literal["mpi", "torch"],
    num_ranks: int,
    arguments: Sequence[str],
    folder: Path,
    watch: Callable[[], None],
    replaced: Collection[int] = (),
    *,
    shrinks: bool = False,
    nursery: Nursery | None = None,
) -> None:
    """Run `python -m workbench ARGUMENTS` as every rank and wait for all of them; `watch` is called five times a second.

    Another process is started in the place of one of `replaced` that is killed while the others go on (torch). Where the run `shrinks`,
    an mpiexec is asked to let the others go on.

    On an emulated network the ranks are on its hosts; elsewhere those of torch are forked off a nursery, where there is one.

    The first Ctrl-C asks the run to stop at the end of a step and keep a checkpoint, the second ends it at once.

    Raises:
        LaunchError: the ranks could not be started, or ended without a word.
        WorkbenchError: what a rank reported.
    """
    placement = Placement.here()
    if placement is not None:
        placement.check(num_ranks)
    with _told_when_terminated(folder), (folder / "ranks.log").open("wb") as log:
        if runtime == "mpi":
            command, env = mpiexec_command(find_mpi(), num_ranks, _command(arguments), outlives=shrinks)
            processes: list[Process] = [_start(command, {**env, FOLDER_VARIABLE: str(folder)}, log)]
        else:
            start = _starter(num_ranks, arguments, folder, placement, nursery, log)
            processes = [start(rank) for rank in range(num_ranks)]
        died: dict[int, int] = {}  # before we ended any

        def start_again(rank: int) -> None:
            processes[rank] = start(rank, **{PLACE_VARIABLE: "1"})

        try:
            _wait(processes, folder, watch, {rank: partial(start_again, rank) for rank in replaced})
            ends = {rank: process.poll() for rank, process in enumerate(processes)}
            died = {rank: status for rank, status in ends.items() if status is not None and signalled(status)}
        finally:
            _end(processes)
    if any(process.returncode for process in processes) and not tolerates_loss(folder, over=True):
        told = ends_told((folder / "ranks.log").read_text(errors="replace"), pids_of(folder)) if runtime == "mpi" else died
        raise _cause(folder, processes, told)


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "workbench", *arguments]


def _starter(
    num_ranks: int, arguments: Sequence[str], folder: Path, placement: Placement | None, nursery: Nursery | None, log: Any
) -> Callable[..., Process]:
    """Starts a rank of torch, with more variables."""
    check_num_ranks(num_ranks)
    world = {**os.environ, FOLDER_VARIABLE: str(folder), "WORLD_SIZE": str(num_ranks), THREADS: _threads(num_ranks)}
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        world.pop(name, None)
    local: Callable[[int], int] = placement.local_rank if placement else int

    def start(rank: int, **more: str) -> Process:
        variables = {**world, "RANK": str(rank), "LOCAL_RANK": str(local(rank)), **more}
        if nursery is not None:
            return nursery.start(arguments, variables, folder / "ranks.log")
        command = _command(arguments)
        return _start(placement.command(rank, command) if placement else command, variables, log)

    return start


def _start(command: Sequence[str], env: dict[str, str], log: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=die_with_parent
    )


@contextlib.contextmanager
def _told_when_terminated(folder: Path) -> Iterator[None]:
    """Who ends us, as a batch system does, ends the run: its record says so."""

    def terminated(*_: object) -> None:
        update_run(folder, status="failed", error="terminated")
        sys.exit(128 + signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(processes: list[Process], folder: Path, watch: Callable[[], None], again: Mapping[int, Callable[[], None]]) -> None:
    """Until all have ended, or one has without which the others cannot go on.

    Args:
        again: rank -> starts another process in its place; how that one ends is its own affair.
    """
    asked, times = False, Counter[int]()
    while any(process.poll() is None for process in processes):
        try:
            watch()
            ends = {rank: status for rank, process in enumerate(processes) if (status := process.poll()) not in (None, 0)}
            lost = {rank: status for rank, status in ends.items() if not times[rank]}
            if lost and not (tolerates_loss(folder, over=False) and all(map(signalled, lost.values()))):
                _give_grace(processes)  # the others hear of it out of band
                return
            for rank in [rank for rank, status in ends.items() if rank in again and signalled(status) and times[rank] < MOST_PLACES]:
                times[rank] += 1
                again[rank]()
            time.sleep(0.2)
        except KeyboardInterrupt:
            if asked:
                update_run(folder, status="failed", error="interrupted")
                raise
            asked = True
            write_command(folder, STOP)
            print("\nstopping at the end of a step, with a checkpoint (Ctrl-C again: at once)", file=sys.stderr)
    watch()


def _give_grace(processes: list[Process]) -> None:
    deadline = time.monotonic() + GRACE_S
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


def _end(processes: list[Process]) -> None:
    """Leave no process behind: the ranks' whole process groups end."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, sign)
        _give_grace(processes)


def _cause(folder: Path, processes: list[Process], died: dict[int, int]) -> WorkbenchError:
    """The error to show: what a rank wrote before it left, else how one was killed, else the last lines of the ranks' output."""
    told = [json.loads(path.read_text()) for path in sorted(folder.glob("failed-*.json"))]
    told = [one for one in told if not (died and CONNECTION.search(one["error"]))]
    lines = "\n".join((folder / "ranks.log").read_text(errors="replace").strip().splitlines()[-12:])
    error: WorkbenchError
    if told:
        words = told[0]["error"]
        kind = WorkbenchError if told[0].get("exit_code") == WorkbenchError.exit_code else RankFailed
        details = folder / f"failed-{told[0]['rank']:05d}.json"
        error = kind(f"{words}\n(traceback: {details})")
    elif died:
        rank = min(died, key=lambda rank: (died[rank] == -signal.SIGABRT, rank))  # who lost a peer may abort as it ends
        words = f"rank {rank}'s process is gone: {end_words(folder, rank, died[rank])}"
        error = RankFailed(f"{words}. The ranks' output: {folder / 'ranks.log'}")
    else:
        codes = ", ".join(str(process.returncode) for process in processes)
        words = f"the ranks ended (exit status {codes}) before they could say why. Last lines of {folder / 'ranks.log'}:\n{lines}"
        error = LaunchError(words)
    update_run(folder, status="failed", error=words)
    return error
