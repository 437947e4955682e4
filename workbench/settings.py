"""How to train: all settings that belong neither to the algorithm nor to the problem."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from sys import float_info
from types import FunctionType
from typing import Any, Literal, Protocol, final, runtime_checkable

import torch
from torch import nn

from workbench.arguments import check_flag, check_whole, is_number
from workbench.errors import ConfigError
from workbench.gradients import Layout

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
ScheduleFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


TRACE_STEPS = 2_000  # default number of traced steps; `Settings.trace_steps` says how many bytes these take
CHECK_REPLICAS = 1_024  # default number of steps between comparisons of replicas
CHECK_REPLICAS_MEANS = "the steps between comparisons of replicas, 1 for each step, 0 for none"
BAD_GRADIENT = ("stop", "skip", "clip", "ignore")
PROGRESS = ("auto", "blocking", "tests", "thread", "library")


@runtime_checkable
class ComputeTimes(Protocol):
    """The seconds of a rank's compute: `costs.Compute`, which this layer must not import."""

    @property
    def forward_s(self) -> float: ...

    @property
    def backward_s(self) -> float: ...

    @property
    def update_s(self) -> float: ...

    def factors(self, seed: int, step: int, num_workers: int) -> Any:
        """Each worker's slowdown in this step, shape (num_workers,)."""

    def time_share(self, share_of_batch: float) -> float:
        """The share of the seconds that a share of a full minibatch takes."""

    def finish_s(self, seed: int, rank: int, begin_s: float, seconds: float) -> float:
        """The time at which work of `seconds` ends if it begins at `begin_s`."""

    def ready_shares(self, layout: Layout) -> tuple[float, ...]:
        """The share of backward after which each bucket is final."""

    def forward_parts(self, layout: Layout) -> tuple[float, ...]:
        """The share of forward in which each bucket is used."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one training run; the same on every rank.

    Attributes:
        epochs, steps: length of training; give exactly one. An epoch is `ceil(samples / (batch_size * workers))` steps.
        batch_size: samples of a worker in a step; None: the problem's.
        optimizer: parameters -> `torch.optim` optimizer; None: the problem's.
        lr: learning rate of the optimizer's first parameter group. Other groups keep their proportion to it. None: the
            optimizer's.
        schedule: optimizer -> `torch.optim.lr_scheduler`; it advances after each update.
        clip_norm: global norm to which the gradient of each update is clipped: the mean gradient, or in local steps the
            rank's own. Refused if no rank has one (servers), or if it is a direction (`SignSGD`): see
            `program.Update`.
        ema_decay: evaluate an exponential moving average of the parameters with this decay for each update (0.9999,
            for example), over the parameters at the end of each step; None: no average.
        num_micro: micro-batches in a step; their gradients accumulate before they are sent.
        precision: "fp32", or "bf16" / "fp16" for automatic mixed precision (fp16 with dynamic loss scaling; with
            parameter servers each worker has its own scale).
        compile: run the module through `torch.compile`.
        evaluate_every: steps between evaluations on the test data; None: once an epoch; 0: at the end only. They use
            rank 0's buffers and change no state.
        seed: of data order, initial weights and dropout.
        on_bad_gradient: handling of a rank's own gradient that is not finite, or above `max_grad_norm`. "stop" ends
            the run and names rank and parameter. "skip" leaves it out of the sum. "clip" scales it to
            `max_grad_norm`, and leaves it out if it is not finite. "ignore" does not check. See
            `replica.gradient_guard`.
        max_grad_norm: largest good global norm of a rank's own mean gradient; None: no limit. With a limit, buckets
            are sent after backward. (`clip_norm` limits the mean over all ranks.)
        divergence_ratio: end the run if a rank's loss exceeds its first loss by this factor; None: end it only if
            the loss is not finite.
        timeout_s: how long a rank may wait for its peers before the run ends with an error.
        trace_steps: record spans of this many first steps, which limits the trace; None: all steps, 0: none. Metrics
            cover all steps. A span takes about 50 bytes in a rank's file. On digits with 2 ranks, a step takes 0.3 kB
            (PipeSGD) to 3 kB (LayerwiseSGD with 10 buckets by Ring). So the default takes 0.5 to 6 MB a rank. The
            number of a ring's spans grows with the number of ranks.
        progress: how background communication makes progress while a rank computes: see
            `runtimes.execution.progress`.
        on_failure: what synchronous ranks do if one of them is lost: "stop", or "shrink" to continue with the others
            (gloo, Open MPI 5). There, algorithms with servers always continue if a worker is lost.
        threads: compute threads of a rank; None: share the machine's cores among its ranks.
        checkpoint_every: steps between checkpoints that are written during training. A run that crashed continues
            from the newest. None: a checkpoint is written only when the run is stopped.
        keep_checkpoints: number of newest checkpoints to keep.
        compute: seconds of each rank's forward, backward and update, such as
            `costs.Compute(forward_s=0.03, backward_s=0.07, stragglers=costs.Lognormal(sigma=0.3))`. Real ranks compute
            the gradient and sleep for the rest of these seconds, so that many ranks can share few cores. At the same
            seed, the stragglers are those of a simulation. Stragglers that depend on the clock also advance during
            evaluations and pauses. None: ranks do not sleep.
        check_replicas: compare the parameters of all ranks after 1, 2, 4, 8, ... steps up to this number, then each time
            this number of steps has passed, and at the end, if the algorithm keeps them equal. Ranks that differ by
            more than rounding end the run. 1: after each step. 0: never.
        callbacks: objects that are called after each step and evaluation: see `workbench.callbacks`.
    """

    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    optimizer: OptimizerFactory | None = field(default=None, repr=False)
    lr: float | None = None
    schedule: ScheduleFactory | None = field(default=None, repr=False)
    clip_norm: float | None = None
    ema_decay: float | None = None
    num_micro: int = 1
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: bool = False
    evaluate_every: int | None = None
    seed: int = 0
    on_bad_gradient: Literal["stop", "skip", "clip", "ignore"] = "stop"
    max_grad_norm: float | None = None
    divergence_ratio: float | None = None
    timeout_s: float = 120.0
    trace_steps: int | None = TRACE_STEPS
    progress: Literal["auto", "blocking", "tests", "thread", "library"] = "auto"
    on_failure: Literal["stop", "shrink"] = "stop"
    threads: int | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    compute: ComputeTimes | None = None
    check_replicas: int = CHECK_REPLICAS
    callbacks: Sequence[Any] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError("give the length of training: either epochs=... or steps=..., not both")
        for name in ("epochs", "steps", "batch_size", "num_micro", "threads", "checkpoint_every", "keep_checkpoints"):
            value = getattr(self, name)
            if value is not None:
                check_whole(name, value, 1)
        check_flag("compile", self.compile)
        for name in ("clip_norm", "lr", "timeout_s", "divergence_ratio"):
            _check_positive(name, getattr(self, name))
        for name in ("optimizer", "schedule"):
            value = getattr(self, name)
            if value is not None and (not callable(value) or isinstance(value, torch.optim.Optimizer)):
                raise ConfigError(
                    f"{name}={value!r}: give a function that returns it, such as functools.partial(torch.optim.SGD, "
                    "lr=0.1)"
                )
        if self.ema_decay is not None and not (is_number(self.ema_decay) and 0 <= self.ema_decay < 1):
            raise ConfigError(
                f"ema_decay={self.ema_decay!r}: give a number from 0 (no averaging) to below 1, 0.9999 in the papers"
            )
        if self.trace_steps is not None:
            check_whole("trace_steps", self.trace_steps, 0, "the number of steps to trace, 0 for none, None for all")
        if self.evaluate_every is not None:
            steps = "the steps between evaluations, 0 for the end only, None for once an epoch"
            check_whole("evaluate_every", self.evaluate_every, 0, steps)
        check_whole("check_replicas", self.check_replicas, 0, CHECK_REPLICAS_MEANS)
        if self.progress not in PROGRESS:
            raise ConfigError(f"progress={self.progress!r}: choose one of {', '.join(PROGRESS)}")
        if self.on_failure not in ("stop", "shrink"):
            raise ConfigError(f"on_failure={self.on_failure!r}: choose stop or shrink")
        check_guard(self.on_bad_gradient, self.max_grad_norm)
        if self.divergence_ratio is not None and self.divergence_ratio <= 1:
            raise ConfigError(
                f"divergence_ratio={self.divergence_ratio!r}: give a factor of a rank's first loss, above 1, such as 10"
            )
        if self.compute is not None and not isinstance(self.compute, ComputeTimes):
            raise ConfigError(
                f"compute={self.compute!r}: give seconds, such as costs.Compute(forward_s=0.03, backward_s=0.07)"
            )
        if not isinstance(self.callbacks, list | tuple) or not all(
            hasattr(one, "on_step") and not isinstance(one, type) for one in self.callbacks
        ):
            raise ConfigError(
                f"callbacks={self.callbacks!r}: give a list of callbacks, such as [wb.callbacks.TensorBoard()]"
            )
        if self.precision not in ("fp32", "bf16", "fp16"):
            raise ConfigError(f"precision={self.precision!r}: choose fp32, bf16 or fp16")

    def as_record(self) -> dict[str, Any]:
        """Return names and values fit for JSON, as written to the run's folder."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "callbacks"}
        return {
            name: value if isinstance(value, int | float | str | None) else describe(value)
            for name, value in plain.items()
        }


def describe(factory: Any) -> str:
    """Return a readable name of a function, partial or class, for the record. It is equal in all processes.

    >>> from functools import partial
    >>> describe(partial(torch.optim.SGD, lr=0.1))
    'SGD(lr=0.1)'
    """
    inner = getattr(factory, "func", None)
    if inner is not None:
        arguments = [_argument(item) for item in factory.args] + [
            f"{key}={_argument(value)}" for key, value in factory.keywords.items()
        ]
        return f"{describe(inner)}({', '.join(arguments)})"
    return getattr(factory, "__name__", None) or repr(factory)


def _argument(value: Any) -> str:
    """Return repr(value), except for a function: its repr has an address, which differs between processes."""
    return describe(value) if isinstance(value, partial | FunctionType) else repr(value)


def check_guard(on_bad_gradient: str, max_grad_norm: float | None) -> None:
    """Raise `ConfigError` for an unknown policy, or for policies that contradict each other."""
    if on_bad_gradient not in BAD_GRADIENT:
        raise ConfigError(f"on_bad_gradient={on_bad_gradient!r}: choose one of {', '.join(BAD_GRADIENT)}")
    _check_positive("max_grad_norm", max_grad_norm)
    if on_bad_gradient == "clip" and max_grad_norm is None:
        raise ConfigError(
            "on_bad_gradient='clip' scales a gradient to max_grad_norm: set it, such as 1.0, or use 'skip'"
        )
    if on_bad_gradient == "ignore" and max_grad_norm is not None:
        raise ConfigError(
            "max_grad_norm limits good gradients, and on_bad_gradient='ignore' does not check them: use 'clip' or "
            "'skip'"
        )


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not (is_number(value) and 0 < value <= float_info.max):
        raise ConfigError(f"{name}={value!r}: give a finite number above 0")
