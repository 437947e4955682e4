"""Parts of `Trainer`: weights of the ranks' batches, the record, checkpoints, and a preview of the final model.

Checkpoints have the format of a run's (`checkpoint.files`). The loop names the folder and waits while they are written.
"""

from __future__ import annotations

import dis
import gc
import io
import json
import operator
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from workbench.errors import ConfigError
from workbench.gradients import Gradient
from workbench.ops import EndStep, State, Ticket
from workbench.program import Algorithm, Context, defaults_of, leaves, lower, map_leaves, settings_of
from workbench.replica.backward import MicroBatch
from workbench.replica.gradient_guard import GradientGuard
from workbench.replica.local_training import slept_note
from workbench.runtimes.checkpoint.files import (
    complete_checkpoints,
    rank_file_path,
    remove_old_rank_files,
    split_source,
    write_rank_file,
)
from workbench.runtimes.checkpoint.rank_state import random_state, take_checkpoint
from workbench.runtimes.checkpoint.reader import brief_error, save_rank_file
from workbench.runtimes.checkpoint.replicated import is_replicated, without_replicated
from workbench.runtimes.checkpoint.restore import restore_state
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.execution.shared_state import share_module_state
from workbench.settings import describe
from workbench.trace.processes import when_begun
from workbench.trace.recorder import FileRecorder, NullRecorder, Recorder
from workbench.trace.store import new_run

Closure = Callable[[], Tensor]
Losses = Closure | Sequence[Closure] | None

CHECKED_STEPS = 3  # a loop that scales its losses does so from the first step
LOOP_STATE = "own"  # entry of a rank file: the loop's own values, and the counts of samples


@final
class BatchWeights:
    """Weights of a rank's batches: equal for all ranks, or by samples if the loop counts them.

    Attributes:
        num_workers: ranks that compute gradients.
        samples: of all ranks until now, if they are counted.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._unit: int | None = None  # samples of a batch with weight 1 / p; 0: not counted; None: not known yet
        self._num_checked = 0  # steps whose losses were checked for a GradScaler's factor
        self.samples = 0

    @property
    def counts(self) -> bool | None:
        """Return True if samples are counted; None if that is not known yet."""
        return None if self._unit is None else self._unit > 0

    def weigh(
        self, loss: Losses, num_samples: int | Sequence[int] | None, gather: Callable[[str], list[str]]
    ) -> list[MicroBatch]:
        """Return this step's micro-batches, with their weights.

        Args:
            gather: this rank's text -> the texts of all ranks.

        Raises:
            ConfigError: samples are counted on some ranks or steps only, or the loss is no function or list of
                functions.
        """
        closures, numbers = _micro_batches(loss, num_samples)
        counted, total = numbers is not None, sum(numbers or ())
        if self._unit is None:
            self._unit = _unit_of(gather("0" if not closures else str(total) if counted else ""))
        if not closures:
            return []
        assert self._unit is not None
        if counted == (self._unit == 0):
            raise ConfigError("num_samples must be given on every rank and step, or never: ranks are weighted by it")
        if self._num_checked < CHECKED_STEPS:
            self._num_checked += 1
            closures = [_checked(closure) for closure in closures]
        if numbers is None:
            share = 1.0 / (self.num_workers * len(closures))
            return [MicroBatch(closure, share, 1) for closure in closures]
        self.samples += total * self.num_workers  # exact where batches are equal
        nominal = self._unit * self.num_workers
        return [
            MicroBatch(closure, number / nominal, number) for closure, number in zip(closures, numbers, strict=True)
        ]

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"samples": self.samples, "unit": self._unit, "num_workers": self.num_workers}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state()`. On another number of ranks they agree again on the batch with weight 1 / p."""
        self.samples = int(state["samples"])
        if state["num_workers"] == self.num_workers and (state["unit"] is None or isinstance(state["unit"], int)):
            self._unit = state["unit"]


def _micro_batches(loss: Losses, num_samples: int | Sequence[int] | None) -> tuple[list[Closure], Sequence[int] | None]:
    """The loss functions of a step's micro-batches, and the samples of each if they are counted."""
    given: Any = [] if loss is None else loss if isinstance(loss, list | tuple) else [loss]
    closures: list[Closure] = list(given)
    for closure in closures:
        if not callable(closure):
            raise ConfigError(
                f"step() takes a function that computes the loss; got {type(closure).__name__}: "
                "trainer.step(lambda: loss_fn(model(x), y)), or a list of such functions, one a micro-batch"
            )
    _check_bound(closures)
    if num_samples is None:
        return closures, None
    try:
        numbers = [operator.index(num_samples)]  # type: ignore[arg-type]  # an int, also NumPy's, or a tensor with one
        if len(closures) > 1:
            raise ConfigError(
                f"num_samples={num_samples} for {len(closures)} micro-batches: give a list, the samples of each"
            )
    except TypeError:
        numbers = [int(number) for number in num_samples]  # type: ignore[union-attr]
    if any(number < 1 for number in numbers):
        raise ConfigError(f"num_samples={num_samples}: use step(None) if this rank has no samples")
    if closures and len(numbers) != len(closures):
        raise ConfigError(f"num_samples={num_samples} for {len(closures)} micro-batches: give the samples of each")
    return closures, numbers


def _check_bound(closures: Sequence[Closure]) -> None:
    """Raise `ConfigError` if micro-batches read the same variables of a loop, so that all see its last batch.

    They are then functions of one loop: the same code with the same variables, of which one holds data. Functions that
    read an iterator, and one function that is given several times, may compute a new batch at each call.
    """
    seen: dict[Any, FunctionType] = {}
    for closure in closures:
        if not isinstance(closure, FunctionType):
            continue
        defaults = (*(closure.__defaults__ or ()), *(closure.__kwdefaults__ or {}).values())
        read = (closure.__code__, closure.__globals__, *(closure.__closure__ or ()), *defaults)
        other = seen.setdefault(tuple(map(id, read)), closure)
        if other is closure:
            continue
        variables = _variables_of(closure)
        if any(hasattr(value, "__next__") for value in variables.values()):
            continue
        data = [name for name, value in variables.items() if _is_data(value)]
        if data:
            raise ConfigError(
                f"two micro-batches are the same function of the same variables ({', '.join(data)}), so both compute the "
                "loss of the loop's last batch: bind each batch to its function, as in "
                "[lambda x=x, y=y: loss_fn(model(x), y) for x, y in batches]. If the function itself reads the next "
                "batch, give it several times: [function] * number"
            )


def _variables_of(function: FunctionType) -> dict[str, Any]:
    """Names and values of the outer variables that a function reads, except those that have no value."""
    code, values = function.__code__, dict[str, Any]()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty cell
            values[name] = cell.cell_contents
    names = {item.argval for item in dis.get_instructions(code) if item.opname == "LOAD_GLOBAL"}
    return values | {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}


def _is_data(value: object) -> bool:
    if isinstance(value, Tensor):
        return not value.requires_grad
    return isinstance(value, int | float | str | slice | list | tuple | Mapping | np.ndarray)


def _checked(closure: Closure) -> Closure:
    def loss() -> Tensor:
        value = closure()
        check_unscaled(value)
        return value

    return loss


def _unit_of(everyone: list[str]) -> int | None:
    """Samples of a batch of weight 1 / p: the largest first batch of any rank; 0: not counted; None: no samples."""
    return 0 if "" in everyone else max(map(int, everyone)) or None


@final
class LoopCheckpoints:
    """Writes and loads a rank's files of a loop's checkpoints."""

    def __init__(self, algorithm: Algorithm, interpreter: Interpreter, ctx: Context) -> None:
        self._algorithm, self._interpreter, self._ctx = algorithm, interpreter, ctx
        self._replica, self._transport = interpreter.replica, interpreter.transport
        self._run = ""
        self._folders: set[Path] = set()  # with checkpoints of this training

    def _gather(self, text: str, what: str) -> list[str]:
        return self._transport.gather_texts(text, self._interpreter.clock.deadline(what))

    def save(
        self, folder: Path, end: EndStep, own: Any, counted: dict[str, Any], keep: int, *, in_step: bool = True
    ) -> str:
        """Write a checkpoint after a step. Every rank must call it, and returns when all have written.

        Args:
            in_step: all ranks must have finished the same step. Otherwise the checkpoint is named after the last one.

        Returns:
            Which ranks could not write, and why; "" if all could. None writes over another training's checkpoints.

        Raises:
            ConfigError: ranks have finished different steps, or `own` cannot be saved.
        """
        if not isinstance(keep, int) or keep < 1:
            raise ConfigError(f"keep={keep!r}: give the number of checkpoints to keep, 1 or more")
        _check_plain(own)
        steps = [int(text) for text in self._gather(str(end.step), "all ranks to keep a checkpoint")]
        if in_step and len(set(steps)) > 1:
            raise ConfigError(
                f"ranks have finished steps {steps}, and a checkpoint is of one step: save on all ranks after the same "
                "step"
            )
        self._run = self._run or self._gather(secrets.token_hex(8), "all ranks to keep a checkpoint")[0]
        self._interpreter.complete_all(end.state)
        if in_step:  # otherwise all programs have ended
            self._interpreter.advance(lower(self._ctx, self._algorithm.pull(self._ctx)))
        place = max(0, *steps)
        words = self._other_training(folder, place)
        if not words:
            words = self._write_and_remove(folder, place, end, {**counted, "loop": own}, keep)
        found = self._gather(words, "all ranks to have written a checkpoint")
        return "; ".join(dict.fromkeys(filter(None, found)))

    def _other_training(self, folder: Path, place: int) -> str:
        """Return why the folder cannot be used: it has later checkpoints, which `load` would prefer. "" if it can."""
        if folder.resolve() in self._folders:
            return ""
        later = [
            checkpoint.num_steps
            for checkpoint in complete_checkpoints(folder)
            if checkpoint.step is None or checkpoint.step > place  # None: of a run's stop
        ]
        if not later:
            return ""
        return (
            f"{folder} holds checkpoints of another training, up to {later[0]} steps, and load() would take those: "
            "give another folder, or call load() before the first step"
        )

    def _write_and_remove(self, folder: Path, place: int, end: EndStep, own: dict[str, Any], keep: int) -> str:
        """Write this rank's file and remove old ones. Return why that failed; "" if it did not."""
        rank, num_workers = self._ctx.rank, self._ctx.num_workers
        try:
            self._write(folder, place, end, own)
            self._folders.add(folder.resolve())
            remove_old_rank_files(folder, rank, num_workers, keep, place)
        except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError on a full disk
            return f"rank {rank} could not write its checkpoint of step {end.step} ({error}): earlier ones are valid"
        return ""

    def _write(self, folder: Path, place: int, end: EndStep, own: dict[str, Any]) -> None:
        rank, num_workers = self._ctx.rank, self._ctx.num_workers
        saved = take_checkpoint(self._algorithm, self._replica, num_workers, end, self._ctx.memory)
        own = {**own, "algorithm": str(self._algorithm)}
        saved |= {"random": random_state(self._transport.device), LOOP_STATE: own}
        if rank and is_replicated(self._algorithm):
            saved = without_replicated(
                saved, frozenset(dict(self._replica.model.named_parameters(remove_duplicate=False)))
            )
        path = rank_file_path(folder, place, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = {"step": end.step, "rank": rank, "num_workers": num_workers, "run": self._run}
        write_rank_file(path, partial(save_rank_file, saved), facts)

    def finds_one(self, folder: Path) -> bool:
        """Return True if rank 0 finds a complete checkpoint in the folder. Every rank must call it."""
        deadline = self._interpreter.clock.deadline("all ranks to find the checkpoint")
        source, _ = split_source(str(folder))
        found = json.dumps(bool(complete_checkpoints(Path(source))))
        return bool(json.loads(self._interpreter.transport.gather_texts(found, deadline)[0]))

    def load(self, folder: Path) -> tuple[int, dict[str, Any]]:
        """Continue from the folder's newest complete checkpoint. Every rank must call it.

        Returns:
            Number of steps before it, and the counts of samples; its entry "loop" has the loop's own values.

        Raises:
            ConfigError: there is none, or it is of another algorithm, model or optimizer.
        """
        saved, words = restore_state(folder, self._algorithm, self._replica, self._ctx, self._interpreter)
        self._folders.add(Path(split_source(str(folder))[0]).resolve())
        own = saved.get(LOOP_STATE)
        before, now = own.get("algorithm") if isinstance(own, dict) else None, str(self._algorithm)
        if before not in (None, now):
            words = [*words, f"this checkpoint is of {before}, and the training continues with {now}"]
        if self._ctx.rank == 0:
            for word in words:
                print(f"{folder}: {word}")
        if (
            not isinstance(own, dict)
            or not isinstance(own.get("samples"), int)
            or not {"unit", "num_workers", "loop"} <= own.keys()
        ):
            raise ConfigError(
                f"{folder} holds a run's checkpoint and not a loop's: continue from it with resume={str(folder)!r}"
            )
        return self._ctx.first_step, own


def open_record(
    algorithm: Algorithm, optimizer: torch.optim.Optimizer, interpreter: Interpreter
) -> tuple[Path, Recorder]:
    """Make a run's folder and this rank's recorder in it, which the interpreter uses from then on.

    Every rank must call it.
    """
    transport, name = interpreter.transport, ""
    if transport.rank == 0:
        info: dict[str, Any] = {
            "clock": "wall",
            "algorithm": {
                "name": type(algorithm).__name__,
                "defaults": defaults_of(algorithm),
                "settings": {
                    name: value if isinstance(value, int | float | None) else str(value)
                    for name, value in settings_of(algorithm).items()
                },
            },
            "num_workers": transport.num_workers,
        }
        if (slept := interpreter.slept) is not None:
            settings = {"compute": repr(slept.compute), "seed": slept.seed}
            info |= {"settings": settings, "notes": slept_note(slept.compute)}
        model = describe(type(interpreter.replica.model))
        problem = {"name": f"trainer-{model}", "note": "", "optimizer": type(optimizer).__name__}
        name = str(new_run({**info, "problem": problem, "runtime": transport.library, "status": "running"}))
    folder = Path(transport.gather_texts(name, interpreter.clock.deadline("rank 0 to open the record"))[0])
    header = {"host": socket.gethostname(), "pid": os.getpid(), "device": str(transport.device), **when_begun()}
    recorder = FileRecorder(folder, transport.rank, {**header, "origin_s": time.perf_counter(), "unix_s": time.time()})
    interpreter.recorder = interpreter.clock.recorder = recorder
    return folder, recorder


@final
class Preview:
    """The model as it would be if training ended after this step; `undo` restores the present one.

    Every rank makes one. A second program of the algorithm runs to its end from a copy of the first one's state. It
    applies gradients in flight and makes the replicas equal, with copies of the optimizer's state and of the codecs'
    residuals. The first program waits at its step's end.

    Args:
        end: the end of the last step.
    """

    def __init__(self, algorithm: Algorithm, interpreter: Interpreter, ctx: Context, end: EndStep) -> None:
        self._interpreter, self._replica = interpreter, interpreter.replica
        replica, self._bytes_sent = interpreter.replica, interpreter.clock.bytes_sent
        self._values: list[tuple[Tensor, Tensor]] = []
        self._restored: list[Callable[[], object]] = [partial(replica.module_state.load, replica.module_state.copy())]
        self._recorder = interpreter.recorder
        interpreter.recorder = interpreter.clock.recorder = NullRecorder()
        try:
            if end.step >= 0 and _has_pending_updates(algorithm, end):
                interpreter.complete_all(end.state)
                self._set_aside()
                here = end.step + 1
                memory = {name: value.clone() for name, value in ctx.memory.items()}
                copied = replace(ctx, first_step=here, num_steps=here, resumed=_copies(end.state), memory=memory)
                interpreter.advance(lower(copied, algorithm.conclude(copied)))
            share_module_state(replica.module_state, interpreter.transport, interpreter.clock)
        except BaseException:
            self.undo()
            raise

    def _set_aside(self) -> None:
        """Save what an update changes; the optimizer works on copies of its state."""
        replica, wrapper = self._replica, self._replica.optimizer_wrapper
        self._values += [(param, param.detach().clone()) for param in replica.parameters]
        staleness, updates, of_step = self._interpreter.staleness, list(replica.updates), dict(wrapper.of_step)
        kept, norm = {index: value.clone() for index, value in wrapper.kept.items()}, wrapper.grad_norm
        scale = replica.loss_scale and (replica.loss_scale.value, replica.loss_scale.good)
        for optimizer in _optimizers(wrapper.optimizer):
            state, groups = dict(optimizer.state), [dict(group) for group in optimizer.param_groups]
            for param, own in state.items():
                optimizer.state[param] = deepcopy(own)
            self._restored += [optimizer.state.clear, partial(optimizer.state.update, state)]
            self._restored += [
                partial(group.update, values) for group, values in zip(optimizer.param_groups, groups, strict=True)
            ]

        def restore() -> None:
            self._interpreter.staleness, replica.updates = staleness, updates
            wrapper.of_step, wrapper.kept, wrapper.grad_norm = of_step, kept, norm
            if wrapper.keeps:
                replica.show_gradients()
            if replica.loss_scale is not None and scale is not None:
                replica.loss_scale.value, replica.loss_scale.good = scale
            if isinstance(replica.guard, GradientGuard):
                replica.guard.take_reports()

        self._restored.append(restore)

    @torch.no_grad()
    def undo(self) -> None:
        """Restore every value."""
        for tensor, value in self._values:
            tensor.copy_(value)
        for restore in self._restored:
            restore()
        self._interpreter.recorder = self._interpreter.clock.recorder = self._recorder
        self._interpreter.clock.bytes_sent = self._bytes_sent


@final
class PulledParameters:
    """A server algorithm's present parameters in this rank's model; `undo` restores the rank's own.

    One rank may make one while the others train.
    """

    def __init__(self, algorithm: Algorithm, interpreter: Interpreter, ctx: Context) -> None:
        self._values = [(param, param.detach().clone()) for param in interpreter.replica.parameters]
        self._state = interpreter.replica.module_state
        self._copied = self._state.copy()
        interpreter.advance(lower(ctx, algorithm.pull(ctx)))

    @torch.no_grad()
    def undo(self) -> None:
        """Restore the parameters, and the buffers and extra state that the block may have changed."""
        for param, value in self._values:
            param.copy_(value)
        self._state.load(self._copied)


def _has_pending_updates(algorithm: Algorithm, end: EndStep) -> bool:
    """Return True if the end of training would change parameters. Gradients that are in no sum are left out then."""
    unused = {id(item) for item in leaves(end.state and end.state.unused(end.step))}
    return not algorithm.replicas.equal_parameters or any(
        isinstance(item, Ticket | Gradient) and id(item) not in unused for item in leaves(end.state)
    )


def _copies(state: State | None) -> State | None:
    """Return a copy of a program's state, with completed tickets."""
    return map_leaves(
        state, lambda item: Ticket.completed(_copy(item.value)) if isinstance(item, Ticket) else _copy(item)
    )


def _copy(value: Any) -> Any:
    if isinstance(value, Gradient):
        return value.copy()
    return value.clone() if isinstance(value, Tensor) else value


def _optimizers(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """An optimizer and the optimizers inside it (ZeRO's)."""
    yield optimizer
    for inner in vars(optimizer).values():
        if isinstance(inner, torch.optim.Optimizer):
            yield from _optimizers(inner)


def check_unscaled(loss: Tensor) -> None:
    """Raise `ConfigError` for a loss that a `torch.amp.GradScaler` has scaled.

    A scaler returns the product of the loss and a tensor that it holds. Autograd keeps that tensor, so the last
    operations before the loss tell whether a scaler holds one of their factors.
    """
    nodes = [loss.grad_fn] if isinstance(loss, Tensor) and loss.grad_fn is not None else []
    for node in nodes:  # grows in the loop
        factor = getattr(node, "_saved_other", None) if node.name() == "MulBackward0" else None
        if isinstance(factor, Tensor) and not factor.ndim and not factor.requires_grad and _scaler_of(factor):
            raise ConfigError(
                "the loss was scaled by a GradScaler, and its gradients would be applied scaled: return the loss "
                "itself, "
                "and give the Trainer precision='fp16', which scales the loss and unscales the gradients"
            )
        if len(nodes) < NUM_NODES:
            nodes += [
                before for before, _ in node.next_functions if before is not None and before.name() in _ELEMENTWISE
            ]


NUM_NODES = 16  # nodes of the graph to check, from the loss on
_ELEMENTWISE = frozenset(
    f"{name}Backward0" for name in ("Mul", "Div", "Add", "Sub", "Mean", "Sum", "ToCopy", "View", "Squeeze")
)


def _scaler_of(factor: Tensor) -> bool:
    """Return True if an enabled GradScaler holds this tensor."""
    for holder in gc.get_referrers(factor):
        scalers = [holder] if not isinstance(holder, dict) else gc.get_referrers(holder)
        if any(isinstance(one, torch.amp.GradScaler) and one.is_enabled() for one in scalers):
            return True
    return False


def _check_plain(own: Any) -> None:
    """Raise `ConfigError` unless `own` can be loaded without running code of the file."""
    held = io.BytesIO()
    try:
        torch.save(own, held)
        held.seek(0)
        torch.load(held, weights_only=True)
    except Exception as error:  # its objects may raise any error
        raise ConfigError(
            f"own={type(own).__name__} cannot be saved ({brief_error(error)}): "
            "give tensors and plain values, such as a scheduler's state_dict()"
        ) from error
