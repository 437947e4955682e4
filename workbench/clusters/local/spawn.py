"""Ranks for one run from a shell: processes on this machine that run the same command line and end with the command."""

from __future__ import annotations

import contextlib
import os
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from workbench.clusters.emulated.placement import Placement
from workbench.clusters.local.fork_server import Forked, RankForkServer, die_with_parent
from workbench.clusters.local.mpi_install import check_num_ranks, find_mpi, mpiexec_command
from workbench.clusters.supervision.exit_status import describe_exit, parse_exit_statuses, ranks_by_pid, signal_of
from workbench.clusters.supervision.sigterm import terminated_as_exit
from workbench.errors import LaunchError, WorkbenchError
from workbench.logs import LOG
from workbench.machine import environment, num_cores
from workbench.runtimes.control.commands import STOP, write_command
from workbench.runtimes.liveness.failure_detector import CONNECTION
from workbench.runtimes.liveness.membership import tolerates_loss
from workbench.trace.read import read_failures
from workbench.trace.store import update_run

FOLDER_VARIABLE = "WORKBENCH_RUN_FOLDER"  # a rank's run
PLACE_VARIABLE = "WORKBENCH_TAKES_PLACE"  # set for a rank that replaces a killed one
THREADS = "OMP_NUM_THREADS"
GRACE_S = 10.0
Process = subprocess.Popen[bytes] | Forked
NUM_SPARES = 2  # spare processes of a run on MPI; each waits with the memory of a rank, but computes nothing
MAX_REPLACEMENTS = 3  # of one rank: after that, another replacement would be killed too


class RankFailed(WorkbenchError):
    """A rank ended with an error that the caller cannot fix."""

    exit_code = 1


def fork_server_for(num_ranks: int) -> RankForkServer | None:
    """Return a fork server for ranks of torch. A command calls this before it computes anything.

    None if each rank has to be started as a new process: on hosts of an emulated network, if torch is imported or
    threads exist already, or on a system other than Linux.
    """
    if (
        Placement.here() is not None
        or "torch" in sys.modules
        or threading.active_count() > 1
        or sys.platform != "linux"
    ):
        return None
    with environment({THREADS: _threads(num_ranks)}):  # libraries read it when they are loaded
        return RankForkServer(_be_rank, _load)


def _load() -> None:
    from workbench import algorithms, problems  # noqa: F401 - for the ranks


def _be_rank(arguments: list[str]) -> NoReturn:
    """Run `python -m workbench ARGUMENTS` in this process."""
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
    outlives: bool = False,
    fork_server: RankForkServer | None = None,
) -> None:
    """Run `python -m workbench ARGUMENTS` as every rank, and wait for all of them.

    On an emulated network the ranks run on its hosts. The first Ctrl-C asks the run to write a checkpoint and
    stop at the end of a step. The second one ends it at once.

    Args:
        runtime: "mpi": one mpiexec starts the ranks. "torch": each rank is a process.
        num_ranks: number of ranks.
        arguments: of the command line.
        folder: the run's folder.
        watch: called five times a second.
        replaced: ranks whose place another process takes if they are killed while the others continue. On torch it is a
            new process. On MPI it is one of `NUM_SPARES`, which mpiexec starts with the ranks.
        outlives: whether the other ranks continue without a lost one; mpiexec is asked to allow it.
        fork_server: forks ranks of torch; None: each rank is a new process.

    Raises:
        LaunchError: the ranks did not start, or ended without an error message.
        WorkbenchError: the error of a rank.
    """
    placement = Placement.here()
    if placement is not None:
        placement.check_num_ranks(num_ranks)
    record_end = partial(update_run, folder, status="failed", error="terminated")  # batch systems send SIGTERM
    with terminated_as_exit(record_end), (folder / "ranks.log").open("wb") as log:
        if runtime == "mpi":
            how: dict[str, Any] = {"outlives": outlives, "num_spares": NUM_SPARES if replaced else 0}
            command, env = mpiexec_command(find_mpi(), num_ranks, _command(arguments), **how)
            processes: list[Process] = [_start(command, {**env, FOLDER_VARIABLE: str(folder)}, log)]
            replaced = ()  # its ranks are no processes of this one
        else:
            start = _starter(num_ranks, arguments, folder, placement, fork_server, log)
            processes = [start(rank) for rank in range(num_ranks)]
        died: dict[int, int] = {}  # rank -> exit status, before this process ended any

        def start_again(rank: int) -> None:
            processes[rank] = start(rank, **{PLACE_VARIABLE: "1"})

        try:
            _wait(processes, folder, watch, {rank: partial(start_again, rank) for rank in replaced})
            ends = {rank: process.poll() for rank, process in enumerate(processes)}
            died = {rank: status for rank, status in ends.items() if status is not None and signal_of(status)}
        finally:
            _end(processes)
    if any(process.returncode for process in processes) and not tolerates_loss(folder, over=True):
        if runtime == "mpi":
            log_text = (folder / "ranks.log").read_text(errors="replace")
            died = parse_exit_statuses(log_text, ranks_by_pid(folder))
        raise _cause(folder, processes, died)


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "workbench", *arguments]


def _starter(
    num_ranks: int,
    arguments: Sequence[str],
    folder: Path,
    placement: Placement | None,
    fork_server: RankForkServer | None,
    log: Any,
) -> Callable[..., Process]:
    """Return a function that starts a rank of torch, with more variables in its environment."""
    check_num_ranks(num_ranks)
    world = {**os.environ, FOLDER_VARIABLE: str(folder), "WORLD_SIZE": str(num_ranks), THREADS: _threads(num_ranks)}
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        world.pop(name, None)
    local: Callable[[int], int] = placement.local_rank if placement else int

    def start(rank: int, **more: str) -> Process:
        variables = {**world, "RANK": str(rank), "LOCAL_RANK": str(local(rank)), **more}
        if fork_server is not None:
            return fork_server.start(arguments, variables, folder / "ranks.log")
        command = _command(arguments)
        return _start(placement.command(rank, command) if placement else command, variables, log)

    return start


def _start(command: Sequence[str], env: dict[str, str], log: Any) -> subprocess.Popen[bytes]:
    LOG.debug("starts: %s", shlex.join(command))
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def _wait(
    processes: list[Process], folder: Path, watch: Callable[[], None], replace: Mapping[int, Callable[[], None]]
) -> None:
    """Wait until all ranks have ended, or one without which the others cannot continue.

    Args:
        replace: rank -> starts its replacement. The end of a replacement does not end the run.
    """
    stopping, replacements, reported = False, Counter[int](), set[Process]()
    while any(process.poll() is None for process in processes):
        try:
            watch()
            statuses = {rank: process.poll() for rank, process in enumerate(processes)}
            ended = {rank: status for rank, status in statuses.items() if status not in (None, 0)}
            lost = {rank: status for rank, status in ended.items() if not replacements[rank]}
            if lost and not (tolerates_loss(folder, over=False) and all(map(signal_of, lost.values()))):
                _give_grace(processes)  # the others detect the loss themselves
                return
            for rank, status in ended.items():
                if processes[rank] not in reported and len(processes) > 1:  # else it is mpiexec
                    LOG.warning("rank %d's process is gone: %s", rank, describe_exit(folder, rank, status))
                    reported.add(processes[rank])
            for rank, status in ended.items():
                if rank in replace and signal_of(status) and replacements[rank] < MAX_REPLACEMENTS:
                    replacements[rank] += 1
                    replace[rank]()
            time.sleep(0.2)
        except KeyboardInterrupt:
            if stopping:
                update_run(folder, status="failed", error="interrupted")
                raise
            stopping = True
            write_command(folder, STOP)
            LOG.warning("stopping at the end of a step, with a checkpoint (Ctrl-C again: at once)")
    watch()


def _give_grace(processes: list[Process]) -> None:
    deadline = time.monotonic() + GRACE_S
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


def _end(processes: list[Process]) -> None:
    """End the ranks' process groups, so that no process is left."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # it has ended a moment ago
                    os.killpg(process.pid, sign)
        _give_grace(processes)


def _cause(folder: Path, processes: list[Process], died: dict[int, int]) -> WorkbenchError:
    """The error to raise: a rank's own report, else how a rank was killed, else the last lines of the ranks' output."""
    reports = [report for report in read_failures(folder).values() if report.keys() >= {"rank", "error"}]
    reports = [report for report in reports if not (died and CONNECTION.search(report["error"]))]
    log = folder / "ranks.log"
    error: WorkbenchError
    if reports:
        message = reports[0]["error"]
        kind = WorkbenchError if reports[0].get("exit_code") == WorkbenchError.exit_code else RankFailed
        details = folder / f"failed-{reports[0]['rank']:05d}.json"
        error = kind(f"{message}\n(traceback: {details})")
    elif died:
        rank = min(died, key=lambda rank: (died[rank] == -signal.SIGABRT, rank))  # a rank that lost a peer may abort
        message = f"rank {rank}'s process is gone: {describe_exit(folder, rank, died[rank])}"
        error = RankFailed(f"{message}. The ranks' output: {log}")
    else:
        codes = ", ".join(str(process.returncode) for process in processes)
        lines = "\n".join(log.read_text(errors="replace").strip().splitlines()[-12:])
        message = f"the ranks ended (exit status {codes}) without an error message. Last lines of {log}:\n{lines}"
        error = LaunchError(message)
    update_run(folder, status="failed", error=message)
    return error
