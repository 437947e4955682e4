"""A process takes the place of a rank that has left a run: it asks to be admitted, meets the others and trains."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from workbench.errors import ConfigError, PeerFailed
from workbench.program import Context, can_lose
from workbench.replica.local_training import LocalTraining, share_cores
from workbench.runtimes.checkpoint.rank_state import begin_average, unpack_state
from workbench.runtimes.control.commands import write_command
from workbench.runtimes.control.controller import RETRY_JOIN, RunController
from workbench.runtimes.control.generations import Generation, first_sync_point
from workbench.runtimes.elastic.admission import COUNTS, JoinState, all_have_met, num_join_requests, place_of
from workbench.runtimes.elastic.grow import begin_joined
from workbench.runtimes.elastic.policy import can_be_replaced
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.execution.slept_compute import SleptCompute
from workbench.runtimes.liveness.deadline import Deadline
from workbench.runtimes.liveness.failure_detector import FailureDetector, read_heartbeat, state_of
from workbench.runtimes.liveness.interrupts import single_interrupt
from workbench.runtimes.liveness.membership import FOLDER, Membership, left_name
from workbench.runtimes.rank.callback_thread import CallbackThread
from workbench.runtimes.rank.main import as_rank, progress_of, record_departures
from workbench.runtimes.rank.training_loop import TrainingLoop
from workbench.runtimes.transport.base import Transport, pick_device
from workbench.trace.recorder import FileRecorder, metrics_name
from workbench.trace.store import read_info
from workbench.trace.tail import last_step_row


def rejoin(job: Any, rank: int) -> dict[str, Any]:
    """Train as that rank, which has left the run in `job.folder`, from the run's position to its end.

    Args:
        job: the same job as that of the other ranks (`rank.main.Job`).

    Returns:
        As `run_rank`.

    Raises:
        ConfigError: the run still has that rank, cannot continue without it, or has ended.
        Stalled: its ranks did not meet in time.
    """
    folder, timeout_s, step = Path(job.folder), job.settings.timeout_s, [-1]
    num_ranks = int(read_info(folder)["num_workers"])
    if not can_be_replaced(job.algorithm, job.settings.on_failure, rank, num_ranks):
        raise ConfigError(
            f"{job.algorithm} on {num_ranks} ranks of {job.runtime} cannot continue without rank {rank}: resume "
            "the run from its checkpoint instead"
        )
    device = pick_device(rank) if job.runtime == "mpi" else torch.device("cpu")
    worker = LocalTraining(job.algorithm, job.problem, job.settings, rank, num_ranks, device)
    times = _wait_until_left(folder, rank, timeout_s)
    others = [
        row
        for other in range(num_ranks)
        if other != rank and (row := read_heartbeat(folder, other)) and state_of(row) != "gone"
    ]
    share_cores(job.settings.threads, sum(row["host"] == socket.gethostname() for row in others) + 1)
    with (
        single_interrupt() as leave,
        CallbackThread(folder, job.settings.callbacks) as callbacks,
        FailureDetector(folder, rank, num_ranks, step=lambda: step[0]) as detector,
    ):
        number, saved = _ask(folder, rank, timeout_s)
        ranks, shrinks = saved["ranks"], saved["shrinks"]
        transport = _unconnected(job, rank, num_ranks, saved["num_lanes"])
        members = Membership(detector, lambda other: can_lose(job.algorithm, other, num_ranks), shrinks=shrinks)
        transport.members = members
        for name in COUNTS:
            setattr(members, name, saved[name])
        members.num_taken[rank] = times
        members.adopt_history(saved["departures"], saved["welcome"]["seconds"])
        if shrinks:
            members.accept(ranks)
        if not all_have_met(transport, (rank, number), ranks, timeout_s):
            raise PeerFailed(
                f"rank {rank} was not admitted: one of ranks {ranks} left during the admission, or did not arrive. Try "
                "again"
            )
        train = partial(_train, job, worker, transport, detector, callbacks, saved, step)
        return as_rank(transport, detector, step, leave, train)


def _unconnected(job: Any, rank: int, num_ranks: int, num_lanes: int) -> Transport:
    """Return the transport of a process that has not met the others yet."""
    if job.runtime == "mpi":
        from workbench.runtimes.elastic.mpi_admission import spare_transport

        return spare_transport(rank, job.settings.timeout_s)
    from workbench.runtimes.transport.torch_distributed import TorchTransport

    return TorchTransport.join_later(rank, num_ranks, num_lanes, job.settings.timeout_s)


def _train(
    job: Any,
    worker: LocalTraining,
    transport: Transport,
    detector: FailureDetector,
    callbacks: CallbackThread,
    written: dict[str, Any],
    at: list[int],
) -> dict[str, Any]:
    folder, settings = detector.folder, job.settings
    header = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": str(transport.device),
        "threads": torch.get_num_threads(),
    }
    header |= {"origin_s": time.perf_counter(), "unix_s": time.time()}
    recorder = FileRecorder(folder, detector.rank, header, settings.trace_steps, extends=True)
    progress = progress_of(job.algorithm, settings.progress, transport)
    how: dict[str, Any] = {"timeout_s": settings.timeout_s, "progress": progress, "detector": detector}
    slept = SleptCompute.of(worker, detector.rank)
    interpreter = Interpreter(transport, worker.replica, recorder, worker.minibatch, **how, slept=slept)
    if (before := last_step_row(folder / metrics_name(detector.rank))) is not None:
        interpreter.clock.bytes_sent = float(before["bytes_sent"])  # counted for the rank, over all its processes
    try:
        ctx = Context(
            transport.rank,
            transport.num_workers,
            num_steps=worker.num_steps,
            layout=worker.replica.layout,
            seed=settings.seed,
        )
        if "saved" in written:
            begin_joined(worker, ctx, written["saved"], job.algorithm, interpreter)
            late = replace(JoinState.of(written), sync_point=_next_sync_point(job, ctx))
        else:
            worker.replica.model.load_state_dict(written["model"])
            begin_average(worker.replica)
            late = JoinState.of(written)
            ctx.first_step, ctx.resumed = late.step + 1, unpack_state(late.state, job.algorithm, worker.replica)
        controller = RunController(job.algorithm, settings, interpreter, recorder, folder)
        loop = TrainingLoop(controller, worker, interpreter, recorder, folder, callbacks, stop_after=job.stop_after)
        summary = loop.run(ctx, at, late)
        record_departures(folder, transport)
        return summary
    finally:
        worker.close_readers()
        interpreter.close()
        worker.replica.close()
        recorder.close()


def _next_sync_point(job: Any, ctx: Context) -> int:
    """Return the step before which all programs end next. The other ranks find the same when this one has joined."""
    assert ctx.num_steps is not None
    generation = Generation(
        algorithm=job.algorithm,
        num_ranks=ctx.num_workers,
        first_step=ctx.first_step,
        end_step=ctx.num_steps,
        num_steps=ctx.num_steps,
        sync_point=ctx.num_steps,
        stop_after=job.stop_after,
        checkpoint_every=job.settings.checkpoint_every,
    )
    return first_sync_point(generation, ctx.first_step)


def _wait_until_left(folder: Path, rank: int, timeout_s: float) -> int:
    """Wait until the other ranks know that this one has left. Return the number of its departures."""
    deadline = Deadline(f"the run {folder.name} to continue without rank {rank}", lambda: _over(folder), timeout_s)
    while True:
        row, times = read_heartbeat(folder, rank), 0
        while (folder / FOLDER / left_name(rank, times)).exists():
            times += 1
        if row is not None and state_of(row) != "gone":
            raise ConfigError(
                f"rank {rank} of the run {folder.name} is alive (process {row['pid']} on {row['host']}): no process "
                "can take its place"
            )
        if times:
            return times
        deadline.pause()


def _ask(folder: Path, rank: int, timeout_s: float) -> tuple[int, dict[str, Any]]:
    """Ask to be admitted until the run answers. Return the number of earlier requests for the place, and the answer.

    Raises:
        ConfigError: the run admits no process, with the reason.
    """
    deadline = Deadline("the run to reach a sync point", lambda: _over(folder), timeout_s)
    number = -1
    while number < 0 or not (path := folder / FOLDER / f"{place_of(rank, number)}.pt").exists():
        if number < 0 or (refused := _answer(folder, rank, number)) == RETRY_JOIN:
            number = num_join_requests(folder, rank)
            write_command(folder, {"join": rank})
        elif refused:
            raise ConfigError(f"the run {folder.name} did not admit rank {rank}: {refused}")
        deadline.pause()
    written: dict[str, Any] = torch.load(path, weights_only=True)
    return number, written


def _answer(folder: Path, rank: int, number: int) -> str:
    """Return why that request was refused, as the run's record says; "" if it was not."""
    rows = [row for row in read_info(folder).get("steering", ()) if row.get("join") == rank]
    return str(rows[number].get("refused", "")) if number < len(rows) else ""


def _over(folder: Path) -> str | None:
    return (
        None
        if (folder / FOLDER).is_dir()
        else f"the run {folder.name} has ended, or its ranks do not continue without each other"
    )
