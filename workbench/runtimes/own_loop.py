"""What a loop of one's own leaves to its `Trainer`: to weigh its ranks' batches, to record, to keep checkpoints and to find them.

Checkpoints are those of a run (`kept`), in a folder that the loop names, and written while it waits.
"""

from __future__ import annotations

import gc
import io
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from workbench.backward import Micro
from workbench.errors import ConfigError
from workbench.ops import EndStep
from workbench.program import Algorithm, Context
from workbench.runtimes.alike import holds_alike, without_alike
from workbench.runtimes.checkpoint import random_state, take_checkpoint
from workbench.runtimes.interpreter import Interpreter
from workbench.runtimes.kept import part_of, remove_old_parts, write_part
from workbench.runtimes.part import said_by, save_part
from workbench.runtimes.restore import go_on_from
from workbench.settings import describe
from workbench.trace.recorder import FileRecorder, Recorder
from workbench.trace.store import new_run
from workbench.trace.who import when_begun

Closure = Callable[[], Tensor]
Losses = Closure | Sequence[Closure] | None

CHECKED_STEPS = 3  # a loop that scales its losses does so from its first step on
OWN = "own"  # of a part: the loop's own values, and what was counted


@final
class Shares:
    """Weighs a rank's batches: all ranks alike, or by their samples where the loop counts them.

    Attributes:
        samples: of all ranks until now, where they are counted.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._unit: int | None = None  # samples of a batch of weight 1 / p; 0: not counted; None: not known yet
        self._num_checked = 0  # steps whose losses were looked at for a GradScaler's factor
        self.samples = 0

    def weigh(self, loss: Losses, num_samples: int | Sequence[int] | None, gather: Callable[[str], list[str]]) -> list[Micro]:
        """This step's micro-batches.

        Args:
            gather: a text of each rank -> all of them.

        Raises:
            ConfigError: samples are counted on some ranks or steps only, or what is given is not a function or several.
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
            share = 1.0 / (self._num_workers * len(closures))
            return [Micro(closure, share, 1) for closure in closures]
        self.samples += total * self._num_workers  # exact where batches are equal
        nominal = self._unit * self._num_workers
        return [Micro(closure, number / nominal, number) for closure, number in zip(closures, numbers, strict=True)]

    def state(self) -> dict[str, Any]:
        """To be kept."""
        return {"samples": self.samples, "unit": self._unit, "num_workers": self._num_workers}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state()`; on another number of ranks batches are others, and what weighs 1 / p is agreed on anew."""
        self.samples = int(state["samples"])
        if state["num_workers"] == self._num_workers and (state["unit"] is None or isinstance(state["unit"], int)):
            self._unit = state["unit"]


def _micro_batches(loss: Losses, num_samples: int | Sequence[int] | None) -> tuple[list[Closure], Sequence[int] | None]:
    """The functions of a step's micro-batches and, if they are counted, the samples of each."""
    closures: list[Closure] = [] if loss is None else [loss] if callable(loss) else list(loss) if isinstance(loss, list | tuple) else [loss]
    for closure in closures:
        if not callable(closure):
            raise ConfigError(
                f"step() takes a function that computes the loss, and was given a {type(closure).__name__}: "
                "trainer.step(lambda: loss_fn(model(x), y)), or a list of such functions, one a micro-batch"
            )
    if num_samples is None or isinstance(num_samples, int):
        numbers = None if num_samples is None else [num_samples]
        if numbers is not None and len(closures) > 1:
            raise ConfigError(f"num_samples={num_samples} for {len(closures)} micro-batches: give a list, the samples of each")
    else:
        numbers = [int(number) for number in num_samples]
    if numbers is not None and any(number < 1 for number in numbers):
        raise ConfigError(f"num_samples={num_samples}: give step(None) where this rank has no samples")
    if numbers is not None and closures and len(numbers) != len(closures):
        raise ConfigError(f"num_samples={num_samples} for {len(closures)} micro-batches: give the samples of each")
    return closures, numbers


def _checked(closure: Closure) -> Closure:
    def loss() -> Tensor:
        value = closure()
        check_unscaled(value)
        return value

    return loss


def _unit_of(everyone: list[str]) -> int | None:
    """Samples of a batch of weight 1 / p: the largest first batch of any rank; 0 where they are not counted; None where nobody had any."""
    return 0 if "" in everyone else max(map(int, everyone)) or None


@final
class LoopKeeper:
    """Keeps a rank's parts of checkpoints, and finds them."""

    def __init__(self, algorithm: Algorithm, interpreter: Interpreter, ctx: Context) -> None:
        self._algorithm, self._interpreter, self._ctx = algorithm, interpreter, ctx
        self._replica, self._transport = interpreter.replica, interpreter.transport
        self._run = ""

    def _gather(self, text: str, what: str) -> list[str]:
        return self._transport.gather_texts(text, self._interpreter.ledger.patience(what))

    def save(self, folder: Path, end: EndStep, own: Any, counted: dict[str, Any], keep: int) -> str:
        """Write all that ranks need to go on behind a step. Every rank comes here, and leaves when all have written.

        Returns:
            Which ranks could not write, and why; "" if all could.

        Raises:
            ConfigError: ranks are not behind one step, or `own` is not to be kept.
        """
        if not isinstance(keep, int) or keep < 1:
            raise ConfigError(f"keep={keep!r}: how many checkpoints stay in the folder, 1 or more")
        _check_plain(own)
        steps = [int(text) for text in self._gather(str(end.step), "all ranks to keep a checkpoint")]
        if len(set(steps)) > 1:
            raise ConfigError(f"ranks are behind steps {steps}, and a checkpoint is of one: save on all of them behind the same step")
        self._run = self._run or self._gather(secrets.token_hex(8), "all ranks to keep a checkpoint")[0]
        rank, num_workers = self._ctx.rank, self._ctx.num_workers
        self._interpreter.complete_all(end.state)
        words = ""
        try:
            self._write(folder, end, {**counted, "loop": own})
            remove_old_parts(folder, rank, num_workers, keep)
        except (OSError, RuntimeError) as error:  # torch's writer has its own words for a full disk
            words = f"rank {rank} could not write its checkpoint of step {end.step} ({error}): those before it stand"
        return "; ".join(filter(None, self._gather(words, "all ranks to have written a checkpoint")))

    def _write(self, folder: Path, end: EndStep, own: dict[str, Any]) -> None:
        rank, num_workers = self._ctx.rank, self._ctx.num_workers
        saved = take_checkpoint(self._algorithm, self._replica, num_workers, end, self._ctx.memory)
        saved |= {"random": random_state(self._transport.device), OWN: own}
        if rank and holds_alike(self._algorithm):
            saved = without_alike(saved, frozenset(dict(self._replica.model.named_parameters(remove_duplicate=False))))
        path = part_of(folder, max(end.step, 0), rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = {"step": end.step, "rank": rank, "num_workers": num_workers, "run": self._run}
        write_part(path, partial(save_part, saved), facts)

    def load(self, folder: Path) -> tuple[int, dict[str, Any]]:
        """Go on from the folder's newest checkpoint that is whole. Every rank comes here.

        Returns:
            How many steps were taken before it, and what was counted; with "loop", the loop's own, where ranks are as many.

        Raises:
            ConfigError: there is none, or it is of another method, model or optimizer.
        """
        saved, words = go_on_from(folder, self._algorithm, self._replica, self._ctx, self._interpreter)
        if self._ctx.rank == 0:
            for word in words:
                print(f"{folder}: {word}")
        own = saved.get(OWN)
        if not isinstance(own, dict) or not isinstance(own.get("samples"), int) or not {"unit", "num_workers", "loop"} <= own.keys():
            raise ConfigError(f"{folder} holds a run's checkpoint and not a loop's: go on from it with resume={str(folder)!r}")
        return self._ctx.first_step, own


def open_record(algorithm: Algorithm, optimizer: torch.optim.Optimizer, interpreter: Interpreter) -> tuple[Path, Recorder]:
    """A run's folder, which all ranks are told, and this rank's recorder in it; the interpreter writes to it from now on."""
    transport, name = interpreter.transport, ""
    if transport.rank == 0:
        info = {"clock": "wall", "method": {"name": type(algorithm).__name__, "settings": {}}, "num_workers": transport.num_workers}
        model = describe(type(interpreter.replica.model))
        problem = {"name": f"trainer-{model}", "note": "", "optimizer": type(optimizer).__name__}
        name = str(new_run({**info, "problem": problem, "runtime": transport.library, "status": "running"}))
    folder = Path(transport.gather_texts(name, interpreter.ledger.patience("rank 0 to open the record"))[0])
    header = {"host": socket.gethostname(), "pid": os.getpid(), "device": str(transport.device), **when_begun()}
    recorder = FileRecorder(folder, transport.rank, {**header, "origin_s": time.perf_counter(), "unix_s": time.time()})
    interpreter.recorder = interpreter.ledger.recorder = recorder
    return folder, recorder


def check_unscaled(loss: Tensor) -> None:
    """Raise `ConfigError` for a loss that a `torch.amp.GradScaler` has scaled.

    A scaler returns the product of the loss and a tensor that it holds. Autograd keeps that tensor, so the last operations before
    the loss tell whether a scaler holds one of their factors.
    """
    nodes = [loss.grad_fn] if isinstance(loss, Tensor) and loss.grad_fn is not None else []
    for node in nodes:  # grows on the way
        factor = getattr(node, "_saved_other", None) if node.name() == "MulBackward0" else None
        if isinstance(factor, Tensor) and not factor.ndim and not factor.requires_grad and _scaler_of(factor):
            raise ConfigError(
                "the loss was scaled by a GradScaler, and its gradients would be applied scaled: return the loss itself, "
                "and give the Trainer precision='fp16', which scales the loss and unscales the gradients"
            )
        if len(nodes) < NUM_NODES:
            nodes += [before for before, _ in node.next_functions if before is not None and before.name() in _ELEMENTWISE]


NUM_NODES = 16  # of the graph, from the loss on
_ELEMENTWISE = frozenset(f"{name}Backward0" for name in ("Mul", "Div", "Add", "Sub", "Mean", "Sum", "ToCopy", "View", "Squeeze"))


def _scaler_of(factor: Tensor) -> bool:
    """Whether an enabled GradScaler holds this tensor."""
    for holder in gc.get_referrers(factor):
        scalers = [holder] if not isinstance(holder, dict) else gc.get_referrers(holder)
        if any(isinstance(one, torch.amp.GradScaler) and one.is_enabled() for one in scalers):
            return True
    return False


def _check_plain(own: Any) -> None:
    """Raise `ConfigError` unless it can be read again without running what a file says."""
    held = io.BytesIO()
    try:
        torch.save(own, held)
        held.seek(0)
        torch.load(held, weights_only=True)
    except Exception as error:  # whatever it holds may raise its own
        raise ConfigError(
            f"own={type(own).__name__} cannot be kept ({said_by(error)}): give tensors and plain values, such as a scheduler's state_dict()"
        ) from error
