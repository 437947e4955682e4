"""`Trainer`: any algorithm in your own PyTorch loop."""

from __future__ import annotations

import json
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from workbench.arguments import check_whole
from workbench.errors import ConfigError, Diverged, PeerFailed, RankMismatch
from workbench.ops import EndStep
from workbench.program import (
    LOOP_ENDED,
    Algorithm,
    Context,
    Replicas,
    Update,
    clipping_refusal,
    complete,
    lower,
    shares_buffers,
)
from workbench.replica.backward import MicroBatch
from workbench.replica.gradient_guard import GradientGuard, GradientReport, entries_of
from workbench.replica.optimizer_step import check_forward
from workbench.replica.replica import Replica, evaluation_mode
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.execution.progress import check_lanes
from workbench.runtimes.execution.shared_state import share_extra_state, share_module_state, share_tensors
from workbench.runtimes.execution.slept_compute import LatePasses, SleptCompute, gather_late_passes
from workbench.runtimes.liveness.failure_detector import FailureDetector
from workbench.runtimes.rank.consistency import (
    check_consistency,
    facts_of_layout,
    facts_of_optimizer,
    versions,
)
from workbench.runtimes.rank.main import cause_of, progress_of, transport_here
from workbench.runtimes.rank.replica_check import ReplicaCheck
from workbench.runtimes.transport.measure_link import measure_link
from workbench.runtimes.user_loop.loop_checkpoints import (
    BatchWeights,
    LoopCheckpoints,
    Losses,
    Preview,
    PulledParameters,
    open_record,
)
from workbench.runtimes.user_loop.monitored_barrier import MonitoredBarrier
from workbench.runtimes.user_loop.peers import stop_watching, translated_errors, watch_peers
from workbench.runtimes.user_loop.process_end import ProcessEnd
from workbench.settings import CHECK_REPLICAS, CHECK_REPLICAS_MEANS, PROGRESS, ComputeTimes, check_guard
from workbench.trace.recorder import NullRecorder, Recorder
from workbench.trace.run import Run
from workbench.trace.store import read_info, update_run


@final
class Trainer:
    """Runs an algorithm in your own training loop, under torchrun, mpiexec, in an engine, or as one process.

    Rank 0's weights are sent to all ranks at the start. Each `step` takes this rank's loss. The algorithm decides when
    to update the model: a delayed one applies an earlier step's gradients. `finish` (or leaving the `with` block)
    applies gradients in flight, K - 1 for Pipe-SGD, and removes the hooks from the model.

    Unequal batches: without `num_samples` every rank counts the same, as in torch DDP. With it, ranks are weighted by
    their samples, so the update is the mean over all samples. A rank without samples calls `step(None)` and still takes
    part.

    Between steps, the weights lack updates in flight if the algorithm is a delayed one (Pipe-SGD: K - 1). With LocalSGD
    and DiLoCo they differ between ranks. `with trainer.evaluating():` shows them as `finish` would leave them. An
    update uses the learning rate, momentum and weight decay that the optimizer had in its gradient's step, also if the
    update comes later. So your own scheduler acts as in a synchronous loop.

    Servers (of `AsyncSGD`, `BackupSGD` and all others with `algorithm.requires.servers`) run on threads of the first
    ranks; with `dedicated=True` on the last ranks, which call `serve` instead. A server updates with a copy of the
    optimizer: its class, settings, parameter groups and state, and the settings of the worker's step. `step` returns
    when the servers have answered this rank, so each rank takes steps at its own pace, and as many as it likes. `save`,
    `load` and `finish` wait until all ranks have made the same call. The state of the optimizer (momentum) is on the
    servers.

    Buffers of any type are as in torch DDP with `broadcast_buffers=True` if no rank is ever a step ahead of another
    (`program.shares_buffers`): each step begins with rank 0's. With other algorithms each rank has its own buffers.

    An exception of one rank ends the run on all: the others raise `PeerFailed`, which names the rank and its error. A
    loss that is NaN or infinite (on CPUs) does the same. So does the end of a rank's process, if ranks share a
    machine; an MPI launcher ends all ranks. Gradients are checked if `on_bad_gradient` asks for it.

    Args:
        model, optimizer: your model, on this rank's device, and an optimizer over its parameters.
        algorithm: the algorithm, such as `PipeSGD(width=2)`.
        clip_norm: global norm to clip the mean gradient to before an update; in local steps the rank's own.
        precision: "fp32", "bf16" or "fp16": autocast around the closure.
        progress: how communication makes progress while you compute (see `runtimes.execution.progress`).
        record: write metrics and trace to a run folder, which `finish` returns as a `Run`.
        timeout_s: how long to wait for the other ranks.
        on_bad_gradient: what to do with a rank's gradient that holds a NaN or an infinity, or whose norm is above
            `max_grad_norm`. "stop" raises `Diverged`, which names rank and parameter. "skip" leaves it out of the mean,
            with a warning. "clip" scales it to `max_grad_norm`, and leaves it out if it is not finite. "ignore" does
            not check, which saves a pass over the gradient.
        max_grad_norm: the largest global norm of a rank's gradient that is accepted; None for any.
        keep_gradients: after a step each parameter's `.grad` is what its last update used: the mean gradient (clipped,
            if you clip), a rank's own in local steps, a vote of `SignSGD`. And `grad_norm` is measured. It costs a
            copy of the gradient. `clip_norm=math.inf` measures the norm alone.
        compute: seconds of forward, backward and update of every step, as in `Settings(compute=...)`: the rank sleeps
            for them, whatever its number of samples.
        compute_seed: the seed of the stragglers of `compute`.
        check_replicas: as in `Settings`: how often the parameters of all ranks are compared, if the algorithm keeps
            them equal.

    Attributes:
        num_skipped: number of this rank's gradients that were left out. On a GPU it is known a step later, unless the
            run is recorded.

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
        on_bad_gradient: str = "ignore",
        max_grad_norm: float | None = None,
        keep_gradients: bool = False,
        compute: ComputeTimes | None = None,
        compute_seed: int = 0,
        check_replicas: int = CHECK_REPLICAS,
    ) -> None:
        check_guard(on_bad_gradient, max_grad_norm)
        check_whole("check_replicas", check_replicas, 0, CHECK_REPLICAS_MEANS)
        if progress not in PROGRESS:
            raise ConfigError(f"progress={progress!r}: choose one of {', '.join(PROGRESS)}")
        self._algorithm = algorithm
        self._served = algorithm.requires.servers
        _check_update(algorithm, clip_norm, keep_gradients)
        self._transport = transport_here(timeout_s)
        self.rank, self.num_workers = self._transport.rank, self._transport.num_workers
        self._recorder: Recorder = NullRecorder()
        self._folder: Path | None = None
        self._next: list[MicroBatch] = []
        roles = algorithm.roles(self.num_workers)
        self._serves = self.rank not in roles.computing
        self._shares = BatchWeights(roles.num_computing)
        self._end = EndStep(-1)
        self._begun = False  # the program of an algorithm with servers: they run
        self._num_steps = 0
        self._finished = self._is_evaluating = False
        self._evaluated_s = 0.0
        self._detector: FailureDetector | None = None
        self._guard: GradientGuard | None = None
        self._late: tuple[GradientReport, ...] = ()  # reports of the device that may not be complete
        self._late_event: Any = None  # the device event after which they are
        self.num_skipped = 0
        with translated_errors(self._fail):
            self._detector = watch_peers(self, self._transport, timeout_s, announces=True)
            buckets = algorithm.requires.buckets
            self.replica = Replica(
                model,
                optimizer,
                bucket_bytes=buckets.max_bytes,
                num_buckets=buckets.count,
                applies_buckets=buckets.applied_singly,
                clip_norm=clip_norm,
                precision=precision,
                served=self._served,
            )
            self.replica.optimizer_wrapper.keeps = keep_gradients
            if on_bad_gradient != "ignore":
                self._guard = self.replica.guard = GradientGuard(
                    self.replica, on_bad_gradient, self.rank, max_grad_norm
                )
            slept = None
            if compute is not None:
                whole = self.replica.sends_whole
                slept = SleptCompute(compute, compute_seed, self.rank, self.replica.layout, whole=whole)
            self._interpreter = self._new_interpreter(
                slept, progress_of(algorithm, progress, self._transport), timeout_s
            )
            self._replica_check = ReplicaCheck(self.replica, self._interpreter, check_replicas)
            self._agree(algorithm, progress, compute=f"{compute}, seed {compute_seed}")
            if record:
                self._folder, self._recorder = open_record(algorithm, optimizer, self._interpreter)
        self._ctx = Context(self.rank, self.num_workers, layout=self.replica.layout)
        if algorithm.requires.link:
            self._ctx.link = measure_link(self._transport, self._deadline, self.replica.layout.message_bytes)
        self._program = lower(self._ctx, algorithm.worker(self._ctx))
        self._writer = LoopCheckpoints(algorithm, self._interpreter, self._ctx)
        self._interpreter.clock.origin_s = time.perf_counter()

    def _new_interpreter(self, slept: SleptCompute | None, progress: str, timeout_s: float) -> Interpreter:
        """Return the interpreter of the algorithm's program, and prepare its waits and its end."""
        here = weakref.ref(self)  # a weak reference: the interpreter must not keep the Trainer alive

        def micro_batches(_step: int) -> list[MicroBatch]:
            trainer = here()
            return [] if trainer is None else trainer._next

        made = Interpreter(
            self._transport,
            self.replica,
            self._recorder,
            micro_batches,
            slept=slept,
            reads_data=False,
            timeout_s=timeout_s,
            progress=progress,
            detector=self._detector,
        )
        self._deadline = made.clock.deadline
        self._barrier = MonitoredBarrier(self._transport, in_step=not self._algorithm.asynchronous)
        made.clock.watch = self._barrier.num_arrived
        self._process_end = ProcessEnd(self._transport, made, self._detector, self._barrier)
        self._collected = weakref.finalize(self, self._process_end.collected)
        self._collected.atexit = False
        return made

    def _agree(self, algorithm: Algorithm, progress: str, compute: str) -> None:
        """Open the lanes, check that all ranks have the same settings, and give all of them rank 0's parameters."""
        algorithm.check(self.num_workers)
        check_forward(algorithm, self.replica.model, self.num_workers)
        check_lanes(algorithm, progress)
        self._transport.open_lanes(algorithm.requires.num_lanes)
        known = {**versions(), "algorithm": str(algorithm), **facts_of_layout(self.replica.layout)}
        known["compute"] = compute
        known |= facts_of_optimizer(self.replica.optimizer_wrapper.optimizer)
        check_consistency(known, self._transport, self._interpreter)
        share_tensors(self.replica.shared_tensors(), self._transport, self._interpreter.clock)
        share_extra_state(self.replica.module_state, self._transport, self._interpreter.clock)
        self._interpreter.shares_buffers = shares_buffers(algorithm)

    @property
    def num_updates(self) -> int:
        """Optimizer steps taken so far. With servers: those in the parameters that this rank has pulled."""
        if self._served:
            return min(getattr(self._end.state, "versions", ()), default=0)
        return min(self.replica.updates)

    def step(self, closure: Losses, num_samples: int | Sequence[int] | None = None) -> Tensor | None:
        """One step of the algorithm with this rank's loss.

        A list of functions accumulates gradients: each computes the loss of one micro-batch. Forward and backward run
        for one after the other, and the ranks communicate once. The micro-batches of a rank count the same, or each by
        its samples. Bind each batch to its function: `lambda x=x, y=y: ...` or `functools.partial`. A lambda that only
        names the loop's variables would read their last values.

        Hooks of parameters and modules run as under torch DDP: on this rank's gradient, before it is averaged. A hook
        of `register_post_accumulate_grad_hook` may replace `.grad`, and then sees the gradients of earlier
        micro-batches in it, each divided by their number (or weighted by its samples).

        With servers, this rank's parameters are then those that the servers sent in answer to its gradient. Other ranks
        need not take the step.

        Args:
            closure: runs forward and returns the mean loss, a scalar with a graph. Or a list of such functions, one a
                micro-batch. None if this rank has no samples.
            num_samples: number of samples in this rank's batch, or in each micro-batch. Give it on every rank and step,
                or never.

        Returns:
            The loss, detached: the mean over the micro-batches. None without a closure, and if `PartialAllReduce` did
            not call it because this rank was too late for the step.

        Raises:
            PeerFailed: another rank failed.
            ConfigError: `finish` was called before, the loss is not one number, or micro-batches are the same.

        Example:
            >>> model = nn.Linear(3, 1)
            >>> batches = [(torch.ones(5, 3), torch.zeros(5, 1)), (torch.zeros(5, 3), torch.ones(5, 1))]
            >>> from workbench.algorithms import SynchronousSGD
            >>> with Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), SynchronousSGD()) as trainer:
            ...     losses = [lambda x=x, y=y: nn.functional.mse_loss(model(x), y) for x, y in batches]
            ...     loss = trainer.step(losses)
        """
        self._check_usable()
        with translated_errors(self._fail):
            self._barrier.steps = self._num_steps + 1
            self.replica.optimizer_wrapper.remember(self._end.step + 1)
            if self._served:  # the settings go with the gradient
                self.replica.optimizer_wrapper.of_step.clear()
                self._replica_check.check_sent()
            self._next = self._shares.weigh(closure, num_samples, self._gather_counts)
            self._begin_servers()
            self._interpreter.loss = None
            end = self._interpreter.advance(self._program)
            assert end is not None, "the program ended before finish()"
            self._end = end
            self._num_steps += 1
            if self.replica.optimizer_wrapper.keeps:
                self.replica.show_gradients()
            self._record_step(end, self._interpreter.loss)
            self._evaluated_s += self._replica_check.end_step(self._algorithm, self._num_steps)
            if self._served:
                self._replica_check.note_sent(self._num_steps)
        return self._interpreter.loss

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the mean gradient of the last update, before clipping: that of `clip_grad_norm_` under DDP.

        None before the first update. Reading it waits for a GPU.

        Raises:
            ConfigError: the Trainer has neither `clip_norm` nor `keep_gradients`, so it is not measured.
        """
        wrapper = self.replica.optimizer_wrapper
        if not (wrapper.keeps or wrapper.clips):
            raise ConfigError(
                "the gradient's norm is not measured: give the Trainer keep_gradients=True, or clip_norm=math.inf"
            )
        return None if wrapper.grad_norm is None else float(wrapper.grad_norm)

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Show the model as `finish` would leave it now, in evaluation mode. Training continues unchanged afterwards.

        Within the block, gradients in flight are applied (K - 1 of Pipe-SGD, StreamingDiLoCo's outer steps). Parameters
        that differ between ranks (LocalSGD, DiLoCo) are averaged, and buffers (BatchNorm's statistics) are rank 0's. So
        the weights can be evaluated or exported. After the block, parameters, buffers, optimizer state, gradients in
        flight and each module's mode are bit-identical to before. If gradients are in flight, the block costs a copy of
        the parameters and of the optimizer's state. Every rank must enter the block after the same step. The time in it
        does not count as training.

        With servers, the parameters are the servers' present ones, and the buffers are this rank's. A rank may enter
        the block alone, while the others train.

        Yields:
            The model. Changes to its weights are undone at the end of the block.

        Raises:
            ConfigError: after `finish`.

        Example:
            >>> from workbench.algorithms import PipeSGD
            >>> model = nn.Linear(1, 1, bias=False).double()
            >>> trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), PipeSGD(width=2))
            >>> before = model.weight.item()
            >>> loss = trainer.step(lambda: model(torch.ones(1, 1, dtype=torch.float64)).sum())
            >>> with trainer.evaluating():
            ...     model.weight.item() == before - 1
            True
            >>> model.weight.item() == before
            True
            >>> trainer.finish()
        """
        self._check_usable()
        begin = time.perf_counter()
        with translated_errors(self._fail):
            if self._served:
                self._begin_servers()
                ahead: Preview | PulledParameters = PulledParameters(self._algorithm, self._interpreter, self._ctx)
            else:
                self._wait_for_all("evaluating")
                ahead = Preview(self._algorithm, self._interpreter, self._ctx, self._end)
        self._is_evaluating = True
        try:
            with evaluation_mode(self.replica.model) as model:
                yield model
        finally:
            self._is_evaluating = False
            ahead.undo()
            self._evaluated_s += time.perf_counter() - begin

    def settle(self) -> None:
        """Wait for communication in flight without applying it, so that the next measurement has the network to itself.

        For weights with all updates, use `evaluating`.
        """
        self._check_usable()
        with translated_errors(self._fail):
            self._interpreter.complete_all(self._end.state)

    def save(self, folder: str | Path, own: Any = None, *, keep: int = 2) -> None:
        """Write a checkpoint, with gradients in flight. Every rank must call it, after the same step.

        With servers, each rank may have taken another number of steps. `save` waits until all ranks have called it,
        and this rank then has the servers' present parameters.

        Args:
            folder: a folder for this training's checkpoints alone, which all ranks see.
            own: tensors and plain values of this rank's loop, such as `scheduler.state_dict()`.
            keep: how many checkpoints stay; older ones are removed.

        Raises:
            OSError: on all ranks, if one could not write, or if the folder has later checkpoints of another training.
                Training may continue, and earlier checkpoints stay valid.
            ConfigError: ranks have finished different steps, or `own` holds other objects.
        """
        self._check_usable()
        with translated_errors(self._fail):
            self._wait_for_all("save", folder=str(Path(folder).absolute()), keep=keep)
            reason = self._write_checkpoint(Path(folder), own, keep)
        if reason:
            raise OSError(reason)

    def _write_checkpoint(self, folder: Path, own: Any, keep: int) -> str:
        """Return which ranks could not write it, and why; "" if all could."""
        more = {"scheduled": dict(self.replica.optimizer_wrapper.of_step), "steps": self._num_steps}
        counted = {**self._shares.state(), **more}
        reason = self._writer.save(folder, self._end, own, counted, keep, in_step=not self._served)
        if self._served:
            self._begin_program()
            self._replica_check.note_sent(None)
        return reason

    def load(self, folder: str | Path, *, missing_ok: bool = False) -> tuple[int, Any]:
        """Continue from the newest complete checkpoint in the folder.

        On the same number of ranks the result is bit-identical (with servers: if the order of updates is the same).
        Every rank must call it, before its first step. Another number of ranks is possible if the ranks' states are
        equal, so not with servers.

        Args:
            folder: that of `save`.
            missing_ok: begin at step 0 if there is no folder yet, or no complete checkpoint in it: the first `save` may
                have been interrupted.

        Returns:
            The number of this rank's steps before the checkpoint, and this rank's `own`, or None on another number of
            ranks.

        Raises:
            ConfigError: there is no complete checkpoint (unless `missing_ok`), it is of another algorithm, model or
                optimizer, or a step was taken before.
        """
        self._check_usable()
        with translated_errors(self._fail):
            if self._num_steps:
                raise ConfigError("load() comes before the first step: make a new Trainer to go back")
            self._wait_for_all("load", folder=str(Path(folder).absolute()))
            if missing_ok and not self._writer.finds_one(Path(folder)):
                return 0, None
            kept = self._read_checkpoint(Path(folder))
        return self._num_steps, kept["loop"] if kept["num_workers"] == self._shares.num_workers else None

    def _read_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Continue from it, and return its entry of the loop."""
        first_step, kept = self._writer.load(folder)
        self._shares.load(kept)
        self.replica.optimizer_wrapper.of_step = dict(kept.get("scheduled") or {})
        self._num_steps = self._barrier.steps = kept.get("steps", first_step)
        self._end = EndStep(first_step - 1, self._ctx.resumed)
        self._begin_program()
        return kept

    def finish(self) -> Run | None:
        """Apply gradients in flight and release the model.

        Returns the run if it was recorded. A second call returns the same. Every rank must call it, after the same
        step; with servers and other asynchronous algorithms, after any step, and it waits for the other ranks as long as
        `timeout_s`. What a program does after its loop begins when all ranks have called it; in an asynchronous
        algorithm, when this rank has. Afterwards the model's buffers (BatchNorm's statistics) are rank 0's on all ranks.
        """
        if self._finished:
            return None if self._folder is None else Run.load(self._folder)
        self._check_usable()
        self._finished = True
        with translated_errors(self._fail):
            alone = self._algorithm.asynchronous and not self._served
            if alone:  # other ranks may wait for what this program does after its loop
                self._end_program()
            self._wait_for_all("finish", counted=not alone and self._algorithm.replicas != Replicas.NEVER)
            if not (alone or self._served):
                self._end_program()
                self._replica_check.end_run(self._algorithm, self._num_steps)
        return self._end_run()

    def _end_program(self) -> None:
        """Run the program to its end: what it does after its loop."""
        self._ctx.num_steps = LOOP_ENDED
        end = self._interpreter.advance(self._program)
        assert end is None, "the program continues after its end"

    def _end_run(self) -> Run | None:
        """Release the model after all programs have ended, and return the run if it was recorded."""
        with translated_errors(self._fail):
            self._report_gradient(self._interpreter.clock.step, last=True)
            share_module_state(self.replica.module_state, self._transport, self._interpreter.clock)
            if self._served:
                self._interpreter.flush()
            deadline = self._deadline("all ranks to finish")
            self._transport.barrier(deadline)
            slept = self._interpreter.slept
            late = LatePasses() if slept is None else gather_late_passes(slept.late, self._transport, deadline)
        if self.rank == 0 and late.loud:
            warnings.warn(late.note, RuntimeWarning, stacklevel=2)
        self._release()
        if self._folder is None:
            return None
        if self.rank == 0:
            update_run(
                self._folder,
                notes=[*read_info(self._folder).get("notes", ()), *filter(None, [late.note])],
                status="finished",
                result={"steps": self.num_updates, "seconds": self._interpreter.clock.now() - self._evaluated_s},
            )
        return Run.load(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        elif not self._finished:
            if isinstance(error, ValueError) and "default process group twice" in str(error):
                error.add_note(
                    "The Trainer made the default process group, since there was none. Call init_process_group before "
                    "the Trainer is made, "
                    "or leave the call out."
                )
            self._fail(error)

    def _check_usable(self) -> None:
        if self._finished:
            raise ConfigError("this Trainer is finished: make a new one to train on")
        if self._is_evaluating:
            raise ConfigError("this Trainer is evaluating: leave the evaluating() block first")
        if self._serves:
            raise ConfigError(
                f"rank {self.rank} is a server of {self._algorithm}, and computes no gradients: call "
                "workbench.serve(model, optimizer, algorithm) on it in place of a Trainer"
            )

    def _wait_for_all(self, what: str, *, counted: bool = True, **arguments: Any) -> None:
        """Wait until all ranks have made the same call, so that their next collectives match.

        With servers, all programs have ended then.

        Args:
            arguments: of the call, for dedicated servers.
        """
        if self._served:
            self._meet({"call": what, "counts": self._shares.counts, **arguments})
            return
        self._barrier.wait(what, self._deadline(f"all ranks to call {what}()"), self._interpreter.tick, counted=counted)

    def _meet(self, call: dict[str, Any]) -> dict[str, Any]:
        """End this rank's program: with servers, it ends when all workers end theirs. Return the first worker's call.

        Raises:
            RankMismatch: workers made different calls.
        """
        if not self._serves:
            self._begin_servers()
        self._end_program()
        self._end = EndStep(self._end.step, self._ctx.resumed)
        texts = self._transport.gather_texts(json.dumps(call), self._deadline("all ranks to make the same call"))
        return _same_call([json.loads(text) for text in texts])

    def _begin_program(self) -> None:
        """Make the program that continues after the last step."""
        self._ctx.num_steps, self._begun = None, False
        self._ctx.first_step, self._ctx.resumed = self._end.step + 1, complete(self._end.state)
        self._program = lower(self._ctx, self._algorithm.worker(self._ctx))

    def _begin_servers(self) -> None:
        """Begin the servers on this rank. They copy the present parameters, which the user may have set until now."""
        if self._served and not self._begun:
            self._begun = True
            end = self._interpreter.advance(self._program)
            assert end is not None
            self._end = end

    def _serve(self) -> Run | None:
        """Serve until the workers have called `finish`."""
        with translated_errors(self._fail):
            if not self._serves:
                raise ConfigError(
                    f"rank {self.rank} computes gradients with {self._algorithm}: make a Trainer on it. serve() is for "
                    "the last ranks, those of algorithm.roles(num_ranks).serving, with dedicated=True"
                )
            while (call := self._meet({}))["call"] != "finish":
                if call["call"] == "save":
                    self._write_checkpoint(Path(call["folder"]), None, call["keep"])
                else:
                    self._read_checkpoint(Path(call["folder"]))
        self._finished = True
        return self._end_run()

    def _gather_counts(self, text: str) -> list[str]:
        """Return the numbers of samples of all ranks' first batches; one sample if ranks are not in step."""
        if self._served:
            return ["1" if text not in ("", "0") else text]
        return self._transport.gather_texts(text, self._deadline("all ranks' first step"))

    def _record_step(self, end: EndStep, loss: Tensor | None) -> None:
        step = end.step
        found = self._report_gradient(step) | ({"dropped": True} if end.dropped else {})
        # Not on a GPU: reading the loss would wait for it.
        if "skipped" not in found and loss is not None and not loss.is_cuda and not bool(torch.isfinite(loss)):
            raise Diverged(
                f"the loss of rank {self.rank} is {float(loss)} at step {step}: lower the learning rate (now "
                f"{self.replica.lr:g})"
            )
        if self._folder is not None:
            seconds = self._interpreter.clock.now() - self._evaluated_s
            row = {
                "step": step,
                "seconds": seconds,
                "samples": self._shares.samples,
                "bytes_sent": int(self._interpreter.bytes_sent),
            }
            value = None if loss is None or ("skipped" in found and not bool(torch.isfinite(loss))) else float(loss)
            lr = self.replica.lr if self._served else self.replica.used_lr  # servers update with the worker's rate
            numbers = {"staleness": self._interpreter.staleness, "loss": value, "lr": lr}
            computed = () if loss is None else self._next
            self._recorder.metrics(
                {**row, **numbers, "num_samples": sum(micro.num_samples for micro in computed), **found}
            )
            self._recorder.end_step()
        self._interpreter.staleness = None

    def _report_gradient(self, step: int, *, last: bool = False) -> dict[str, Any]:
        """Return why this rank's gradient was bad, for the record. On a GPU without a record it is known a step later.

        Args:
            last: this is the last step.
        """
        found, event = () if self._guard is None else self._guard.take_reports(), None
        if self._transport.device.type == "cuda" and self._folder is None and not last:
            found, self._late, step = self._late, found, step - 1
            event, self._late_event = self._late_event, self._transport.streams.record_event()
        with self._transport.streams.after(event):  # None: after all work until now
            entries = entries_of((*self._late, *found) if last else found, None)
        entries.pop("loss")
        if "skipped" in entries:
            self.num_skipped += 1
            warnings.warn(
                f"step {step}: a gradient of rank {self.rank} was left out: {entries['skipped']}",
                RuntimeWarning,
                stacklevel=4,
            )
        return entries

    def _fail(self, error: BaseException) -> BaseException:
        """Announce the error to the other ranks and release the model. Returns the error to raise."""
        error = cause_of(error, self._transport, self._detector)
        reason = ""
        if not isinstance(error, PeerFailed):
            reason = f"rank {self.rank} failed: {type(error).__name__}: {error}"
            if hasattr(self, "_interpreter"):
                reason = reason.replace("failed:", f"failed at step {self._interpreter.clock.step}:", 1)
            with suppress(RuntimeError):  # the process that holds the store is gone
                self._transport.announce_failure(reason)
            if self._folder is not None:
                update_run(self._folder, status="failed", error=reason)
        self._finished = True
        self._release(reason)
        return error

    def _release(self, reason: str = "") -> None:
        stop_watching(self._detector, reason)
        for name in ("_interpreter", "replica", "_recorder", "_transport"):
            if hasattr(self, name):  # absent after a failure in __init__
                getattr(self, name).close()
        if hasattr(self, "_process_end"):
            self._collected.detach()
            self._process_end.failed = True
            if self._interpreter.ended:
                self._process_end.forget()


def serve(model: nn.Module, optimizer: torch.optim.Optimizer, algorithm: Algorithm, **options: Any) -> Run | None:
    """Serve parameters on a dedicated rank, and return when all workers have finished.

    Workers make a `Trainer` with the same model, optimizer and algorithm. Servers are the last `algorithm.shards`
    ranks: `algorithm.roles(num_ranks).serving`. `save` and `load` of the workers' Trainers include this rank. The model
    here is not trained: the workers have the result.

    Args:
        model, optimizer, algorithm: as those of the workers.
        options: those of the workers' `Trainer`.

    Returns:
        The run, with `record=True`.

    Raises:
        PeerFailed: another rank failed.
        ConfigError: this rank computes gradients.

    Example:
        On each rank of three, of which the last one serves:
        >>> def train(model, optimizer, batches, rank, algorithm):
        ...     if rank in algorithm.roles(3).serving:
        ...         serve(model, optimizer, algorithm)
        ...         return
        ...     with Trainer(model, optimizer, algorithm) as trainer:
        ...         for x in batches:
        ...             trainer.step(lambda: model(x).square().mean())
    """
    return Trainer(model, optimizer, algorithm, **options)._serve()


def _check_update(algorithm: Algorithm, clip_norm: float | None, keep_gradients: bool) -> None:
    """Raise `ConfigError` for options that do not fit what the algorithm updates with."""
    refusal = clipping_refusal(algorithm)
    if clip_norm is not None and refusal:
        raise ConfigError(f"clip_norm={clip_norm}: {refusal}")
    if keep_gradients and algorithm.update == Update.SERVED:
        raise ConfigError(
            f"keep_gradients=True: only a server of {type(algorithm).__name__} has the mean gradient of an update: "
            "leave it out"
        )


def _same_call(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the call of the first rank that made one. Dedicated servers made none.

    Raises:
        RankMismatch: another rank made another call, or counts its samples otherwise.
    """
    made = [(rank, call) for rank, call in enumerate(calls) if call]
    first, expected = made[0]
    for rank, call in made:
        if call["call"] != expected["call"]:
            raise RankMismatch(
                f"rank {first} calls {expected['call']}(), but rank {rank} calls {call['call']}(): make the same call "
                "on every rank, and not under `if rank == 0`"
            )
    counting = {rank: call["counts"] for rank, call in made if call["counts"] is not None}
    if len(set(counting.values())) > 1:
        raise RankMismatch(
            f"num_samples was given on ranks {[rank for rank, counts in counting.items() if counts]} and not on all: "
            "ranks are weighted by it, so give it on every rank, or never"
        )
    return expected
