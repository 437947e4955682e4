"""`record`: an ordinary run folder from a training loop that does not know the package."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import torch
import torch.distributed as dist

from workbench.errors import ConfigError, WorkbenchError
from workbench.machine import num_cores
from workbench.runtimes.liveness.deadline import Deadline
from workbench.runtimes.rank.main import make_transport
from workbench.runtimes.transport.base import HOST_TIMES, SoloTransport, Transport, offset_to_rank0
from workbench.runtimes.transport.torch_distributed import TorchTransport
from workbench.runtimes.user_loop.loop_phases import LoopPhases, Step
from workbench.runtimes.user_loop.torch_events import Call, TorchEvents
from workbench.trace.info import FORMAT
from workbench.trace.kinds import COMMUNICATION_KINDS
from workbench.trace.processes import this_process, when_begun
from workbench.trace.recorder import FileRecorder
from workbench.trace.run import Run
from workbench.trace.store import new_run, read_info, remove_run, update_run, write_info

WRITE_S = 0.25  # between two writes of complete steps
LAST_CALLS_S = 1.0  # how long the end of a recording waits for calls in flight
SPAN_KINDS = ("load", "barrier", *COMMUNICATION_KINDS)  # kinds of `Recording.span`
NO_STEP = (
    "no optimizer took a step in the recording, so nothing was recorded. Call optimizer.step() of a torch.optim "
    "optimizer inside it, on the thread that began it"
)
_active: list[Recording] = []  # at most one: the hooks are torch's, and so of the process


@final
class Recording:
    """A recording of this rank's training loop: see `record`.

    Attributes:
        folder: the run's folder.
        rank, num_workers: this rank, and the number of ranks in the run.
    """

    def __init__(self, where: str | Path | None, steps: int | None, timeout_s: float) -> None:
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise ConfigError(f"steps={steps!r}: give the number of steps to record, 1 or more; None records all")
        self._where, self._limit, self._timeout_s = where, steps, timeout_s
        self._bytes_sent, self._num_steps, self._seconds, self._written_s = 0, 0, 0.0, 0.0
        self._ended = False

    # -- the recording's life --------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if _active:
            raise ConfigError(
                "a recording is active in this process: leave its block first. Under `workbench record` the script "
                "does not need its own record()"
            )
        if hasattr(self, "folder"):
            raise ConfigError("this recording has ended: call record() again")
        transport = _transport(self._timeout_s)
        try:
            self.rank, self.num_workers = transport.rank, transport.num_workers
            self._is_among_ranks = transport.num_workers > 1
            self._open(transport)
        finally:
            transport.close()
        self._phases = LoopPhases(self._span_of_loop, self._end_step, self._now())
        self._events = TorchEvents(self._phases, self._span_of_call, self._now, self._between_steps)
        self._events.install()
        _active.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, SystemExit) and not error.code:
            error = None
        self.finish(error, meets=True)
        if error is None and not self._num_steps:
            raise ConfigError(NO_STEP)

    def finish(self, error: BaseException | None, *, meets: bool) -> None:
        """Remove the hooks and end this rank's record.

        Args:
            error: what ended the loop; None if it ended as it should.
            meets: wait for the other ranks, so that the run is complete when this returns.
        """
        if self._ended:
            return
        self._ended = True
        self._stop()
        _active.remove(self)
        try:
            if error is None and meets and self._is_among_ranks:
                with suppress(WorkbenchError, RuntimeError):  # a rank that failed says so in the folder
                    self._meet()
        finally:
            self._recorder.close()
        self._write_end(error)

    def _stop(self) -> None:
        """Stop to observe the loop; what was seen is kept."""
        if self._events.installed:
            self._events.remove()
            self._events.complete(LAST_CALLS_S)
            self._events.replay()
            self._phases.close(self._now())

    def _meet(self) -> None:
        """Compare the clocks again, and wait until all ranks have written."""
        transport = _transport(self._timeout_s, self._failure)
        try:
            deadline = Deadline("all ranks to end the recording", self._failure, self._timeout_s)
            offset_s = offset_to_rank0(transport, deadline)
            self._recorder.clock(self._now(), offset_s + self._origin_s - self._origin_of_rank0_s)
            self._recorder.end_step()
            transport.gather_texts("written", deadline)
        finally:
            transport.close()

    def _failure(self) -> str | None:
        """Return the error of a rank that has failed."""
        found = read_info(self.folder)
        return str(found.get("error")) if found.get("status") == "failed" else None

    def _write_end(self, error: BaseException | None) -> None:
        if error is not None:
            reason = f"rank {self.rank} failed at step {self._num_steps}: {type(error).__name__}: {error}"
            text = "".join(traceback.format_exception(error))
            with suppress(OSError, WorkbenchError):
                path = self.folder / f"failed-{self.rank:05d}.json"
                path.write_text(json.dumps({"rank": self.rank, "error": reason, "traceback": text}))
                if self._failure() is None:  # the first failure is the cause of the others
                    update_run(self.folder, status="failed", error=reason)
        elif self.rank == 0 and not self._num_steps:
            with suppress(WorkbenchError):
                remove_run(self.folder)
        elif self.rank == 0:
            update_run(self.folder, **self._facts(), **({} if self._failure() else {"status": "finished"}))

    def _facts(self) -> dict[str, Any]:
        """Return what is known of the loop at its end."""
        found: dict[str, Any] = {"result": {"steps": self._num_steps, "seconds": self._seconds}}
        info, parameters = read_info(self.folder), self._events.parameters
        if parameters:
            found["model"] = {
                "parameters": sum(prod(shape) for _, shape, _ in parameters),
                "message_bytes": sum(prod(shape) * itemsize for _, shape, itemsize in parameters),
                "buckets": self._events.num_buckets,
                "itemsize": max(itemsize for *_, itemsize in parameters),
                "shapes": [[name, shape] for name, shape, _ in parameters],
            }
        if self._events.has_ddp and not self._name:
            found["algorithm"] = {"name": "torch DDP", "settings": {}}
        if self._events.has_gpu:
            found["notes"] = [*(info.get("notes") or ()), HOST_TIMES]
        return found

    # -- the record ----------------------------------------------------------------------------------------------------

    def _open(self, transport: Transport) -> None:
        """Make the folder and this rank's files, and compare the clocks. Every rank must call it."""
        deadline = Deadline("all ranks to begin the recording", transport.peer_failure, self._timeout_s)
        is_path = isinstance(self._where, Path) or os.sep in str(self._where or "")
        self._name = "" if is_path or self._where is None else str(self._where)
        answer = {"folder": "", "error": ""}
        if transport.rank == 0:
            try:
                answer["folder"] = str(self._make_folder(transport, is_path=is_path).resolve())
            except WorkbenchError as error:
                answer["error"] = str(error)
        self._origin_s = time.perf_counter()
        mine = json.dumps({**answer, "origin_s": self._origin_s})
        texts = [json.loads(text) for text in transport.gather_texts(mine, deadline)]
        if texts[0]["error"]:
            raise ConfigError(texts[0]["error"])
        self.folder = Path(texts[0]["folder"])
        self._origin_of_rank0_s = float(texts[0]["origin_s"])
        offset_s = offset_to_rank0(transport, deadline)
        header: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), **when_begun()}
        header |= {"threads": torch.get_num_threads(), "cores": num_cores()}
        unix_s = time.time() - (time.perf_counter() - self._origin_s)
        self._recorder = FileRecorder(self.folder, self.rank, {**header, "origin_s": self._origin_s, "unix_s": unix_s})
        self._recorder.clock(0.0, offset_s + self._origin_s - self._origin_of_rank0_s)

    def _make_folder(self, transport: Transport, *, is_path: bool) -> Path:
        script = "" if sys.argv[0].startswith("-") else Path(sys.argv[0]).stem  # "-c"
        info: dict[str, Any] = {
            "status": "running",
            "clock": "wall",
            "algorithm": {"name": self._name or "loop", "settings": {}},
            "problem": {"name": script, "note": ""},
            "runtime": transport.library,
            "num_workers": transport.num_workers,
        }
        if not is_path:
            return new_run(info)
        folder = Path(self._where or "")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} exists and is not an empty folder: give a new folder to record to, or a name")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be made ({error.strerror}): give another folder") from error
        write_info(folder, {"format": FORMAT, "id": folder.name, "process": this_process(), **info})
        return folder

    def _now(self) -> float:
        return time.perf_counter() - self._origin_s

    def _span_of_loop(self, kind: str, start_s: float, end_s: float, step: int) -> None:
        self._recorder.span(kind, "compute", start_s, end_s, step)

    def _span_of_call(self, call: Call) -> None:
        assert call.end_s is not None
        self._bytes_sent += call.num_bytes if call.kind != "recv" else 0
        self._recorder.span(
            call.kind, "comm", call.start_s, call.end_s, call.step, call.bucket, call.num_bytes, call.peer
        )

    def _end_step(self, step: Step) -> None:
        self._num_steps, self._seconds = step.number + 1, step.end_s - step.evaluated_s
        self._recorder.metrics(
            {
                "step": step.number,
                "seconds": self._seconds,
                "samples": 0,
                "bytes_sent": self._bytes_sent,
                "loss": step.loss,
                "num_samples": 1,
                "lr": step.lr,
            }
        )

    def _between_steps(self, now_s: float) -> None:
        """Write the steps since the last write together."""
        if self._limit is None and now_s - self._written_s <= WRITE_S:
            return
        self._events.replay()
        if now_s - self._written_s > WRITE_S:
            self._written_s = now_s
            self._recorder.end_step()
        if self._num_steps == self._limit:
            self._stop()

    # -- for the user --------------------------------------------------------------------------------------------------

    def span(self, kind: str, num_bytes: int = 0) -> _OwnSpan:
        """Record the block as a span that torch does not show, such as a loader or your own communication library.

        Args:
            kind: "load" for reading data, or a kind of communication such as "all_reduce". The loop's thread waits
                during the block.
            num_bytes: bytes that this rank sends.

        Raises:
            ConfigError: unknown kind.
        """
        if kind not in SPAN_KINDS:
            raise ConfigError(f"kind={kind!r}: choose one of {', '.join(SPAN_KINDS)}")
        return _OwnSpan(self, kind, num_bytes)

    def add_span(self, kind: str, start_s: float, end_s: float, num_bytes: int) -> None:
        """Record a span of `span`, in seconds of `time.perf_counter`."""
        if self._ended or not self._events.installed:
            return
        begin_s, end_s = start_s - self._origin_s, end_s - self._origin_s
        if kind == "load":
            self._events.note(self._phases.load, begin_s, end_s)
        else:
            self._events.note_call(Call(kind, -1, num_bytes, begin_s, end_s))
            self._events.note(self._phases.wait, begin_s, end_s)

    @property
    def run(self) -> Run:
        """The run, after the block. It holds all ranks that can see this folder.

        Raises:
            ConfigError: the recording has not ended.
        """
        if not self._ended:
            raise ConfigError("the recording has not ended: read .run after its block")
        return Run.load(self.folder)


@final
class _OwnSpan:
    """A block that is recorded as one span."""

    def __init__(self, recording: Recording, kind: str, num_bytes: int) -> None:
        self._recording, self._kind, self._num_bytes = recording, kind, num_bytes

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._recording.add_span(self._kind, self._start_s, time.perf_counter(), self._num_bytes)


def record(where: str | Path | None = None, *, steps: int | None = None, timeout_s: float = 120.0) -> Recording:
    """Record a plain torch training loop as a run: a context manager around the loop, on every rank.

    The run holds, for each rank and on one clock: reading data (`load`), `forward`, `backward`, each all-reduce of
    DDP's buckets and every other call of torch.distributed, the time in which the loop `wait`s for them, the update
    (`apply`), and evaluations. `timeline`, `overlap`, `critical_path` and `compare` work on it. The loop computes the
    same numbers, bit for bit, and nothing stays in torch after the block.

    - A step ends with an optimizer's step. Optimizers that step without a forward between them end one step together;
      with a forward between them (a GAN), each ends a step. Before an update there may be several backward passes
      (gradient accumulation, DDP's `no_sync`). If a `GradScaler` skips an update, the step continues.
    - Forward lasts from the call of the model to the call of backward, so it includes the loss. Models are seen from
      the first update on; before, forward begins at the end of the phase before it.
    - A bucket's all-reduce lasts from the call, when the bucket is ready, to its completion. Its bytes are what a rank
      must send at least, 2 (p - 1) / p of the bucket.
    - `load` is the time in `next()` of a `torch.utils.data.DataLoader`. For another loader or another communication
      library, such as mpi4py, use `with recording.span("load")` and `recording.span("all_reduce")`.
    - The loss of a step is the number on which backward was called, summed over the calls of the step. Of an optimizer
      that calls a closure several times (L-BFGS), it is the loss of the first call.
    - On a GPU the times are the host's: when it asked for the work. Use torch.profiler and
      `workbench.trace.from_profiler` for the times of the device.
    - An exception in the block is kept in the record, which is marked as failed, and passes on.

    Args:
        where: a name for the run, as its label; or the path of a new folder. None: a new run in the store.
        steps: how many steps to record; after that the loop runs without hooks. None: all.
        timeout_s: how long to wait for the other ranks at the begin and at the end.

    Raises:
        ConfigError: a recording is active, ranks have no process group yet, or no optimizer took a step in the block.

    Example:
        >>> import tempfile
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with tempfile.TemporaryDirectory() as folder, record(Path(folder) / "run") as recording:
        ...     for _ in range(4):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(5, 3)).square().mean().backward()
        ...         optimizer.step()
        ...     recording.rank
        0
    """
    return Recording(where, steps, timeout_s)


def _transport(timeout_s: float, failure: Callable[[], str | None] = lambda: None) -> Transport:
    """Return a transport between the ranks of this loop: of torch's group, of mpi4py, or none.

    Args:
        timeout_s: how long to wait for the other ranks.
        failure: describes a rank that has failed, and so will not come; None if none has.

    Raises:
        ConfigError: a launcher started several ranks, and they have no process group.
    """
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() == 1:
            return SoloTransport()
        return TorchTransport(torch.device("cpu"), timeout_s, failure=failure)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and "RANK" in os.environ:
        raise ConfigError(
            f"this is one of {os.environ['WORLD_SIZE']} ranks, and they have no process group: call "
            "torch.distributed.init_process_group before record()"
        )
    mpi = sys.modules.get("mpi4py.MPI")  # not imported here: the import would initialise MPI
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1:
        return make_transport("mpi", timeout_s)
    return SoloTransport()
