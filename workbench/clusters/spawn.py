"""Ranks for one run from a shell: processes of this machine that run the same command line, and end with it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from workbench.clusters.emulated.placement import Placement
from workbench.clusters.mpi_install import check_num_ranks, find_mpi, mpiexec_command, num_cores
from workbench.errors import LaunchError, WorkbenchError
from workbench.runtimes.words import STOP, write_word
from workbench.trace.store import read_info, update_run

FOLDER_VARIABLE = "WORKBENCH_RUN_FOLDER"  # tells a rank which run it belongs to
GRACE_S = 10.0


class RankFailed(WorkbenchError):
    """A rank ended with an error that is not the caller's to mend."""

    exit_code = 1


def spawn_ranks(
    runtime: Literal["mpi", "torch"], num_ranks: int, arguments: Sequence[str], folder: Path, watch: Callable[[], None]
) -> None:
    """Run `python -m workbench ARGUMENTS` as every rank and wait for all of them; `watch` is called five times a second.

    On an emulated network the ranks are on its hosts.

    The first Ctrl-C asks the run to stop at the end of a step and keep a checkpoint, the second ends it at once.

    Raises:
        LaunchError: the ranks could not be started, or ended without a word.
        WorkbenchError: what a rank reported.
    """
    argv = [sys.executable, "-m", "workbench", *arguments]
    placement = Placement.here()
    if placement is not None:
        placement.check(num_ranks)
    env = {FOLDER_VARIABLE: str(folder)}
    with (folder / "ranks.log").open("wb") as log:
        if runtime == "mpi":
            command, mpi_env = mpiexec_command(find_mpi(), num_ranks, argv)
            processes = [_start(command, {**mpi_env, **env}, log)]
        else:
            check_num_ranks(num_ranks)
            threads = str(max(1, num_cores() // num_ranks))
            world = {**os.environ, **env, "WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": threads}
            for name in ("MASTER_ADDR", "MASTER_PORT"):
                world.pop(name, None)
            local = placement.local_rank if placement else int
            commands = [placement.command(rank, argv) if placement else argv for rank in range(num_ranks)]
            processes = [
                _start(command, {**world, "RANK": str(rank), "LOCAL_RANK": str(local(rank))}, log) for rank, command in enumerate(commands)
            ]
        try:
            _wait(processes, folder, watch)
        finally:
            _end(processes)
    if any(process.returncode for process in processes):
        raise _cause(folder, processes)


def _start(command: Sequence[str], env: dict[str, str], log: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=_die_with_parent
    )


def _die_with_parent() -> None:
    """In the new process: be told when the starter is gone, however it ended (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, watch: Callable[[], None]) -> None:
    asked = False
    while any(process.poll() is None for process in processes):
        try:
            watch()
            if any(process.poll() not in (None, 0) for process in processes):
                _give_grace(processes)  # the others hear of it out of band
                return
            time.sleep(0.2)
        except KeyboardInterrupt:
            if asked:
                update_run(folder, status="failed", error="interrupted")
                raise
            asked = True
            write_word(folder, STOP)
            print("\nstopping at the end of a step, with a checkpoint (Ctrl-C again: at once)", file=sys.stderr)
    watch()


def _give_grace(processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + GRACE_S
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Leave no process behind: the ranks' whole process groups end."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, sign)
        _give_grace(processes)


def _cause(folder: Path, processes: list[subprocess.Popen[bytes]]) -> WorkbenchError:
    """The error to show: what a rank wrote before it left, else the last lines of the ranks' output."""
    if read_info(folder).get("status") != "failed":
        update_run(folder, status="failed")
    told = [json.loads(path.read_text()) for path in sorted(folder.glob("failed-*.json"))]
    if told:
        update_run(folder, error=told[0]["error"])
        kind = WorkbenchError if told[0].get("exit_code") == WorkbenchError.exit_code else RankFailed
        details = folder / f"failed-{told[0]['rank']:05d}.json"
        return kind(f"{told[0]['error']}\n(traceback: {details})")
    lines = (folder / "ranks.log").read_text(errors="replace").strip().splitlines()
    codes = ", ".join(str(process.returncode) for process in processes)
    error = LaunchError(
        f"the ranks ended (exit status {codes}) before they could say why. Last lines of {folder / 'ranks.log'}:\n" + "\n".join(lines[-12:])
    )
    update_run(folder, error=str(error))
    return error
