"""Any PyTorch loop with any method: the program runs inside the user's own `for`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from workbench.backward import Micro
from workbench.errors import ConfigError, Diverged, PeerFailed
from workbench.program import Algorithm, Context
from workbench.replica import Replica
from workbench.runtimes.agreement import check_agreement, share_tensors
from workbench.runtimes.background import check_lanes
from workbench.runtimes.helper import start_helper
from workbench.runtimes.interpreter import Interpreter
from workbench.runtimes.launch import transport_here
from workbench.runtimes.link import measure_link
from workbench.settings import PROGRESS, describe
from workbench.trace.recorder import FileRecorder, NullRecorder, Recorder
from workbench.trace.run import Run
from workbench.trace.store import new_run, update_run


@final
class Trainer:
    """Drives a method from the user's own loop, under torchrun, mpiexec, in an engine, or alone.

    Rank 0's weights are sent to all ranks at the start. Each `step` gives this rank's loss to the method, which updates
    the model when it sees fit: a delayed method updates with an earlier step's gradients. `finish` (or leaving the `with`)
    applies what is still in flight, K - 1 gradients for Pipe-SGD, and takes the hooks off the model.

    Unequal batches: without `num_samples` every rank counts the same, as in torch DDP. With it, ranks are weighted by their
    samples, so that the update is the mean over all of them; a rank without any says `step(None)` and still takes part.

    One rank's exception ends the run on all: the others raise `PeerFailed`, which names the rank and its error.

    Args:
        model, optimizer: yours, the optimizer over the model's parameters; the model on this rank's device.
        algorithm: which method.
        clip_norm: global norm to clip the mean gradient to before an update.
        precision: "fp32", "bf16" or "fp16": autocast around the closure.
        progress: how communication goes on while you compute (see `runtimes.background`).
        record: write metrics and trace to a run folder, which `finish` returns as a `Run`.
        timeout_s: how long to wait for the other ranks.

    Example:
        >>> from workbench.algorithms import PipeSGD
        >>> model = nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with Trainer(model, optimizer, PipeSGD(width=2)) as trainer:
        ...     for _ in range(4):
        ...         loss = trainer.step(lambda: model(torch.ones(5, 3)).square().mean())
        >>> trainer.num_updates
        4
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        algorithm: Algorithm,
        *,
        clip_norm: float | None = None,
        precision: str = "fp32",
        progress: str = "auto",
        record: bool = False,
        timeout_s: float = 120.0,
    ) -> None:
        if progress not in PROGRESS:
            raise ConfigError(f"progress={progress!r}: choose one of {', '.join(PROGRESS)}")
        if algorithm.has_servers:
            raise ConfigError(
                f"{type(algorithm).__name__} keeps parameters on servers, and a Trainer steps your model on all ranks together: "
                "use `workbench train`, Cluster.train or simulate for it"
            )
        self._transport = transport_here(timeout_s)
        self.rank, self.num_workers = self._transport.rank, self._transport.num_workers
        self._recorder: Recorder = NullRecorder()
        self._folder: Path | None = None
        self._next: list[Micro] = []
        self._unit: int | None = None  # samples of a batch of weight 1 / p; 0: not counted
        self._samples = 0
        self._finished = False
        try:
            options: dict[str, Any] = {"clip_norm": clip_norm, "precision": precision, "applies_buckets": algorithm.applies_buckets}
            options["num_buckets"] = algorithm.num_buckets
            self.replica = Replica(model, optimizer, bucket_bytes=algorithm.bucket_bytes, **options)
            helper = start_helper(self._transport, None, timeout_s) if progress == "process" else None
            more: dict[str, Any] = {"timeout_s": timeout_s, "progress": progress, "helper": helper}
            self._interpreter = Interpreter(self._transport, self.replica, self._recorder, self._micros, **more)
            self._patience = self._interpreter.ledger.patience
            algorithm.check(self.num_workers)
            check_lanes(algorithm, progress)
            self._transport.open_lanes(algorithm.num_lanes)
            check_agreement([f"method {algorithm}", *self.replica.layout.describe()], self._transport, self._interpreter)
            share_tensors(self.replica.shared_tensors(), self._transport, self._interpreter)
            if record:
                self._open_record(algorithm, optimizer)
        except BaseException as error:
            self._fail(error)
            raise
        self._ctx = Context(self.rank, self.num_workers, layout=self.replica.layout)
        if algorithm.needs_link:
            self._ctx.link = measure_link(self._transport, self._patience)
        self._program = algorithm.worker(self._ctx)
        self._interpreter.ledger.origin_s = time.perf_counter()

    @property
    def num_updates(self) -> int:
        """Optimizer steps taken so far."""
        return min(self.replica.updates)

    def step(self, closure: Callable[[], Tensor] | None, num_samples: int | None = None) -> Tensor | None:
        """One step of the method with this rank's loss.

        Args:
            closure: runs forward and returns the mean loss, a scalar with a graph; None where this rank has no samples.
            num_samples: in this rank's batch. Give it on every rank and step, or never.

        Returns:
            The loss, detached; None without a closure.

        Raises:
            PeerFailed: another rank failed.
            ConfigError: after `finish`, or a loss that is not one number.
        """
        if self._finished:
            raise ConfigError("this Trainer is finished: make a new one to train on")
        try:
            self._next = self._weigh(closure, num_samples)
            end = self._interpreter.advance(self._program)
            assert end is not None, "a program ended that was not told to"
            self._book(end.step, self._interpreter.loss)
        except BaseException as error:
            self._fail(error)
            raise
        return self._interpreter.loss

    def finish(self) -> Run | None:
        """Apply what is in flight and let the model go; returns the run if it was recorded. Every rank must call it.

        The model's buffers (BatchNorm's statistics) are rank 0's then, on all ranks.
        """
        if self._finished:
            return None
        self._finished = True
        self._ctx.num_steps = 0
        try:
            self._interpreter.advance(self._program)
            share_tensors(self.replica.float_buffers(), self._transport, self._interpreter)
            self._transport.barrier(self._patience("all ranks to finish"))
        except BaseException as error:
            self._fail(error)
            raise
        self._release()
        if self._folder is None:
            return None
        if self.rank == 0:
            update_run(self._folder, status="finished", result={"steps": self.num_updates, "seconds": self._interpreter.ledger.now()})
        return Run.load(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.finish()
        elif not self._finished:
            self._fail(error)

    def _weigh(self, closure: Callable[[], Tensor] | None, num_samples: int | None) -> list[Micro]:
        if num_samples is not None and num_samples < 1:
            raise ConfigError(f"num_samples={num_samples}: give step(None) where this rank has no samples")
        if self._unit is None:
            self._unit = self._agree_on_unit("0" if closure is None else "" if num_samples is None else str(num_samples))
        if closure is None:
            return []
        assert self._unit is not None
        if (num_samples is None) != (self._unit == 0):
            raise ConfigError("num_samples must be given on every rank and step, or never: ranks are weighted by it")
        if num_samples is None:
            return [Micro(closure, 1.0 / self.num_workers, 1)]
        self._samples += num_samples * self.num_workers  # exact where batches are equal
        return [Micro(closure, num_samples / (self._unit * self.num_workers), num_samples)]

    def _agree_on_unit(self, mine: str) -> int | None:
        """Samples of a batch of weight 1 / p: the largest first batch of any rank; 0 where samples are not counted."""
        everyone = self._transport.gather_texts(mine, self._patience("all ranks' first step"))
        if "" in everyone:
            return 0
        return max(map(int, everyone)) or None  # nobody had samples: the next step decides

    def _micros(self, step: int) -> list[Micro]:
        return self._next

    def _book(self, step: int, loss: Tensor | None) -> None:
        if loss is not None and not loss.is_cuda and not bool(torch.isfinite(loss)):  # on a GPU looking would make the host wait
            raise Diverged(
                f"the loss of rank {self.rank} is {float(loss)} at step {step}: lower the learning rate (now {self.replica.lr:g})"
            )
        if self._folder is not None:
            seconds = self._interpreter.ledger.now()
            row = {"step": step, "seconds": seconds, "samples": self._samples, "bytes_sent": int(self._interpreter.bytes_sent)}
            numbers = {"staleness": self._interpreter.staleness, "loss": None if loss is None else float(loss), "lr": self.replica.lr}
            self._recorder.metrics({**row, **numbers, "num_samples": sum(micro.num_samples for micro in self._next)})
            self._recorder.end_step()
        self._interpreter.staleness = None

    def _open_record(self, algorithm: Algorithm, optimizer: torch.optim.Optimizer) -> None:
        name = ""
        if self.rank == 0:
            info = {"clock": "wall", "method": {"name": type(algorithm).__name__, "settings": {}}, "num_workers": self.num_workers}
            problem = {"name": f"trainer-{describe(type(self.replica.model))}", "note": "", "optimizer": type(optimizer).__name__}
            name = str(new_run({**info, "problem": problem, "runtime": self._transport.library, "status": "running"}))
        self._folder = Path(self._transport.gather_texts(name, self._patience("rank 0 to open the record"))[0])
        header = {"host": socket.gethostname(), "pid": os.getpid(), "device": str(self._transport.device)}
        recorder = FileRecorder(self._folder, self.rank, {**header, "origin_s": time.perf_counter(), "unix_s": time.time()})
        self._recorder = self._interpreter.recorder = self._interpreter.ledger.recorder = recorder

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, PeerFailed):
            words = f"rank {self.rank} failed: {type(error).__name__}: {error}"
            if hasattr(self, "_interpreter"):
                words = words.replace("failed:", f"failed at step {self._interpreter.ledger.step}:", 1)
            self._transport.announce_failure(words)
            if self._folder is not None:
                update_run(self._folder, status="failed", error=words)
        self._finished = True
        self._release()

    def _release(self) -> None:
        for name in ("_interpreter", "replica", "_recorder", "_transport"):
            if hasattr(self, name):  # not after a failure while this was made
                getattr(self, name).close()
