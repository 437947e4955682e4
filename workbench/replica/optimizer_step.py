"""Optimizer steps with given gradients, for all parameters or for one bucket."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any, final

import torch
from torch import Tensor, nn

from workbench.errors import ConfigError
from workbench.gradients import Layout
from workbench.program import Algorithm, Replicas
from workbench.settings import OptimizerFactory, ScheduleFactory

_NOT_COMPILED = ("add_param_group", "load_state_dict", "state_dict")  # methods that torch excludes from its compiler
_DISABLED_ATTRIBUTE = "__dynamo_disable"  # attribute in which torch notes the replacement


def compiler_is_loaded() -> bool:
    """Return whether torch's compiler is imported in this process, so that this code may be compiled."""
    return "torch._dynamo" in sys.modules


@contextmanager
def uncompiled() -> Iterator[None]:
    """Make, save or load an optimizer without the import of torch's compiler, which takes two seconds in each process.

    torch imports the compiler to exclude these methods from it. That is unnecessary before the compiler is imported.
    """
    marked = []
    if not compiler_is_loaded():
        for name in _NOT_COMPILED:
            function = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
            if function is not None and not hasattr(function, _DISABLED_ATTRIBUTE):
                setattr(function, _DISABLED_ATTRIBUTE, function)
                marked.append(function)
    try:
        yield
    finally:
        for function in marked:
            with suppress(AttributeError):
                delattr(function, _DISABLED_ATTRIBUTE)


def build_optimizer(make: OptimizerFactory, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of these parameters.

    Raises:
        ConfigError: it refuses them, as `torch.optim.Muon` refuses biases, or `make` returns something else.
    """
    try:
        with uncompiled():
            optimizer = make(parameters)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the optimizer cannot be made for this model ({type(error).__name__}: {error}): choose another one, or give "
            "a function from parameters to an optimizer that treats such parameters otherwise"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "optimizer= takes a function from parameters to a torch.optim optimizer, such as "
            "functools.partial(torch.optim.SGD, lr=0.1)"
        )
    return optimizer


def _uncompiled_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any] | None:
    """Return the step of one of torch's own optimizers with its hooks, without graph breaks that import the compiler.

    None for another optimizer, or if the step was replaced.
    """
    layers: list[Any] = [optimizer.step]
    while hasattr(layers[-1], "__wrapped__"):
        layers.append(layers[-1].__wrapped__)
    num_expected = 3 + hasattr(layers[0], "_wrapped_by_lr_sched")  # hooks, no_grad, the update itself
    if len(layers) != num_expected or layers[-2].__code__.co_name != "_use_grad":
        return None
    update = layers[-1]

    def step(self: torch.optim.Optimizer) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return update(self)

    return torch.optim.Optimizer.profile_hook_step(step)


WHOLE = "an algorithm that applies the whole gradient (SynchronousSGD(), LayerwiseSGD(apply='all'), PipeSGD())"
# settings of a parameter group that a training loop may change between steps
SCHEDULED = ("lr", "momentum", "betas", "weight_decay")


@final
class OptimizerWrapper:
    """An optimizer with its schedule and clipping. `step` uses the gradients in the parameters' `.grad`.

    Args:
        parameters: the trainable parameters, in the layout's order.
        schedule: made for the optimizer; it advances after each update of all parameters.
        clip_norm: clip the global norm to this value before a step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Tensor],
        layout: Layout,
        *,
        schedule: ScheduleFactory | None,
        clip_norm: float | None,
    ) -> None:
        self.optimizer = optimizer
        self._schedule = schedule(optimizer) if schedule else None
        if isinstance(self._schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ConfigError(
                "ReduceLROnPlateau needs the loss at each step: use a schedule that depends on the number of updates "
                "only"
            )
        self._uncompiled_step = _uncompiled_step(optimizer)
        self._clip_norm = clip_norm
        self._parameters = parameters
        self._layout = layout
        self._narrowed = self._narrow_groups()
        self._group_sizes = self._sizes()
        self.keeps = False  # whether to keep norm and gradients of the last update
        self.grad_norm: Tensor | None = None  # of the last complete update, before clipping; None if not kept
        self.kept: dict[int, Tensor] = {}  # position of a parameter -> its gradient after the step
        self._squares: list[Tensor] = []  # squared norms of the update's buckets so far
        self.used_lr: Any = None  # first group's rate in the last step, with its `lr_scale`
        self.of_step: dict[int, list[dict[str, Any]]] = {}  # step -> each group's settings for it: see `remember`

    @property
    def clips(self) -> bool:
        return self._clip_norm is not None

    def remember(self, step: int) -> None:
        """Record the optimizer's present settings for the update with this step's gradient, which may come later."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # no warning of a schedule before the first update
        self.of_step[step] = [
            {name: _copied(value) for name, value in _scheduled(group).items()} for group in self.optimizer.param_groups
        ]

    def step(self, bucket: int | None, lr_scale: float, of: int = -1) -> None:
        """Take one optimizer step; with a bucket, for its parameters only. `of` is the step of its gradient.

        The settings for this step are undone after it. What the optimizer changes in its groups stays, also for the
        updates whose settings are remembered.
        """
        groups = self.optimizer.param_groups
        if bucket is not None and len(self._layout.buckets) > 1:  # hooks may be registered at any time
            check_per_parameter(self.optimizer)
        if bucket is not None and self._sizes() != self._group_sizes:  # a group or a parameter was added
            self._narrowed = self._narrow_groups()
            self._group_sizes = self._sizes()
        if self._clip_norm is not None:
            self.grad_norm = nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        elif self.keeps:
            self._measure(bucket)
        past = self.of_step.get(of, [])
        parameters = [group["params"] for group in groups]
        saved = [_scheduled(group) for group in groups]
        for group, values in zip(groups, past, strict=False):  # a group may be new
            group.update(values)
        if lr_scale != 1.0:
            for group in groups:
                group["lr"] = group["lr"] * lr_scale
        used = [{name: _Used(value) for name, value in _scheduled(group).items()} for group in groups]
        try:
            for position, group in enumerate(groups):
                if bucket is not None:
                    group["params"] = self._narrowed[bucket][position]
            self.used_lr = _copied(groups[0].get("lr"))
            self._step()
        finally:
            for group, params in zip(groups, parameters, strict=True):
                group["params"] = params
            self._undo(saved, used, [values for step, values in self.of_step.items() if step != of])

    def _undo(
        self, saved: list[dict[str, Any]], used: list[dict[str, _Used]], remembered: list[list[dict[str, Any]]]
    ) -> None:
        """Restore the groups' settings, and carry over what the optimizer changed."""
        for position, (group, settings) in enumerate(zip(self.optimizer.param_groups, saved, strict=False)):
            for name, during in used[position].items():
                after, before = group[name], settings[name]
                group[name] = before
                if not during.is_changed(after):
                    continue
                group[name] = _assigned(before, carried(before, during.copy, after))
                for values in remembered:
                    if position < len(values):
                        values[position][name] = _copied(carried(values[position][name], during.copy, after))

    def _step(self) -> None:
        if self._uncompiled_step is None or compiler_is_loaded():
            self.optimizer.step()
            return
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedules check it
        self._uncompiled_step(self.optimizer)

    def _measure(self, bucket: int | None) -> None:
        """Compute the norm of the present gradients, or of all buckets since the last complete update."""
        parameters = (
            self._parameters
            if bucket is None
            else [self._parameters[slot.index] for slot in self._layout.buckets[bucket].slots]
        )
        norm = nn.utils.get_total_norm([param.grad for param in parameters if param.grad is not None])
        self._squares.append(norm.square())
        if bucket is None or len(self._squares) == len(self._layout.buckets):
            self.grad_norm, self._squares = torch.stack(self._squares).sum().sqrt(), []

    def keep(self, indices: Iterable[int]) -> None:
        """Keep copies of the gradients with which these parameters were just updated."""
        for index in indices:
            gradient = self._parameters[index].grad
            if gradient is None:
                self.kept.pop(index, None)
            elif index in self.kept:
                self.kept[index].copy_(gradient)
            else:
                self.kept[index] = gradient.clone()

    def advance_schedule(self) -> None:
        """Advance after an update of all parameters."""
        if self._schedule is not None:
            self._schedule.step()

    def set_lr(self, lr: float) -> None:
        """Set the first group's learning rate from the next update on.

        Other groups keep their proportion to it. A schedule continues from the new value with the same factors.
        """
        factor = set_rates(self.optimizer, lr)
        if self._schedule is not None:
            _scale(self._schedule, factor)

    def _sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.optimizer.param_groups]

    def _narrow_groups(self) -> list[list[list[Tensor]]]:
        """List each parameter group's parameters in each bucket, so that a step on few of many parameters is cheap."""
        bucket_of = {id(param): slot.bucket for param, slot in zip(self._parameters, self._layout.slots, strict=True)}
        return [
            [
                [param for param in group["params"] if bucket_of.get(id(param)) == piece.index]
                for group in self.optimizer.param_groups
            ]
            for piece in self._layout.buckets
        ]

    def state(self) -> dict[str, Any]:
        """Return the state of the optimizer and the schedule."""
        with uncompiled():
            return {
                "optimizer": self.optimizer.state_dict(),
                "schedule": self._schedule.state_dict() if self._schedule else None,
                "used_lr": None if self.used_lr is None else float(self.used_lr),
            }

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state()`."""
        with uncompiled():
            self.optimizer.load_state_dict(deepcopy(state["optimizer"]))  # the optimizer would share the tensors
        self.used_lr = state.get("used_lr")  # checkpoints of earlier versions have none
        self._narrowed = self._narrow_groups()
        self._group_sizes = self._sizes()
        if self._schedule is not None and state["schedule"] is not None:
            self._schedule.load_state_dict(state["schedule"])


def set_rates(optimizer: torch.optim.Optimizer, lr: float) -> float:
    """Set the first group's learning rate; other groups keep their proportion to it. Return the factor.

    >>> weights = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    >>> made = torch.optim.SGD([{"params": weights[:1], "lr": 0.1}, {"params": weights[1:], "lr": 0.01}])
    >>> factor = set_rates(made, 0.2)
    >>> factor, [group["lr"] for group in made.param_groups]
    (2.0, [0.2, 0.02])
    """
    groups = optimizer.param_groups
    first = groups[0]["lr"]
    present = float(first) or float(groups[0].get("initial_lr", 0.0))  # 0 in a warm-up's first step
    factor = lr / present if present else 1.0
    for group in groups:
        group["lr"] = lr if group["lr"] == first else group["lr"] * factor
        for name in ("initial_lr", "max_lr", "min_lr"):
            if name in group:
                group[name] *= factor
    return factor


def set_first_rates(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rates of a new optimizer, as `Settings.lr` says.

    Raises:
        ConfigError: the first group's rate is 0, and another group has another rate.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    if not rates[0] and any(rates):
        raise ConfigError(
            "lr= is the rate of the optimizer's first parameter group, and the others keep their proportion to it; but "
            "the first group has lr=0: give the rates in optimizer=, without lr="
        )
    set_rates(optimizer, lr)


def check_schedule_takes_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Raise `ConfigError` if a schedule, made for an optimizer with this rate, has replaced the rate by its own."""
    base = float(optimizer.param_groups[0].get("initial_lr", lr))
    if not math.isclose(base, lr):
        raise ConfigError(
            f"lr={lr:g} has no effect, because the schedule sets its own rates (it starts from {base:g}): leave lr= "
            "out, or give a schedule of factors, such as torch.optim.lr_scheduler.LambdaLR"
        )


def _scheduled(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in SCHEDULED if name in group}


def _copied(value: Any) -> Any:
    """Copy a value that a schedule may change in place."""
    return value.clone() if isinstance(value, Tensor) else value


@final
class _Used:
    """A setting at the beginning of a step."""

    def __init__(self, value: Any) -> None:
        self.copy = _copied(value)
        self._value = value
        self._version = value._version if isinstance(value, Tensor) else 0

    def is_changed(self, after: Any) -> bool:
        """Return whether the optimizer changed it. Does not wait for a device."""
        if isinstance(after, Tensor):
            return after is not self._value or after._version != self._version
        return bool(after != self.copy)


def carried(value: Any, before: Any, after: Any) -> Any:
    """Return a setting that changes as another one did, from `before` to `after`.

    An equal one becomes equal. Another one changes by the same factor.

    >>> carried(0.1, 0.1, 0.3), carried(0.5, 0.25, 0.5), carried((0.9, 0.999), (0.9, 0.999), (0.8, 0.999))
    (0.3, 1.0, (0.8, 0.999))
    """
    if isinstance(value, tuple | list):
        return type(value)(carried(*each) for each in zip(value, before, after, strict=True))
    changed_in_place = isinstance(value, Tensor) and value is after
    if changed_in_place or before == after:
        return value
    if value == before:
        return after
    return value * (after / before) if before else value + after


def _assigned(setting: Any, value: Any) -> Any:
    """Return the new value of a setting. A tensor stays the same object, because others may hold it."""
    if not isinstance(setting, Tensor) or setting is value:
        return value
    with torch.no_grad():
        return setting.copy_(torch.as_tensor(value))


def _scale(schedule: Any, factor: float) -> None:
    """Multiply the base, largest and smallest learning rates of a schedule by a factor."""
    for name in ("base_lrs", "max_lrs"):
        if hasattr(schedule, name):
            setattr(schedule, name, [value * factor for value in getattr(schedule, name)])
    if hasattr(schedule, "eta_min"):
        schedule.eta_min *= factor
    for inner in getattr(schedule, "_schedulers", ()):
        _scale(inner, factor)


def check_optimizer(
    optimizer: torch.optim.Optimizer, clip_norm: float | None, precision: str, applies_buckets: bool
) -> None:
    """Raise `ConfigError` for an optimizer or a combination that cannot work; the message says what to use instead."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        raise ConfigError(
            f"{type(optimizer).__name__} evaluates the loss itself (a closure): use an optimizer that steps with given "
            "gradients"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError("SparseAdam takes sparse gradients only, but summed gradients are dense: use Adam")
    if applies_buckets and clip_norm is not None:
        raise ConfigError(
            f"clip_norm needs the whole gradient, but this algorithm applies bucket by bucket: use {WHOLE}, or no "
            "clip_norm"
        )
    if applies_buckets and precision == "fp16":
        raise ConfigError(
            f"fp16 loss scaling needs the whole gradient, but this algorithm applies bucket by bucket: use {WHOLE}, or "
            "precision='bf16'"
        )


def added_to(optimizer: torch.optim.Optimizer) -> list[str]:
    """Name what was added to this object: hooks of `step()`, or another `step()`. Schedules of torch are allowed."""
    added = [
        name
        for name, hooks in (
            ("step_pre_hook", getattr(optimizer, "_optimizer_step_pre_hooks", None)),
            ("step_post_hook", getattr(optimizer, "_optimizer_step_post_hooks", None)),
        )
        if hooks
    ]
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        added.append("another step()")
    return added


def check_per_parameter(optimizer: torch.optim.Optimizer) -> None:
    """Raise `ConfigError` unless a step for each bucket is the same as one step for all.

    It is so if each parameter's update depends on that parameter alone, as in the optimizers of torch.optim. Another
    class declares it by `per_parameter = True`, because it may count its steps, or compute a statistic over all
    parameters. A hook of `step()` would run once for each bucket.
    """
    kind, added = type(optimizer), added_to(optimizer)
    declared = f"{kind.__module__}.".startswith("torch.optim.") or vars(kind).get("per_parameter") is True
    if declared and not added:
        return
    reason, other_fix = f"and it has {' and '.join(added)}", ""
    if not added:
        reason = "and it may need all parameters at once, because it is not a class of torch.optim"
        other_fix = ". Or declare per_parameter = True in the class, if each parameter's update depends on it alone"
    raise ConfigError(
        f"this algorithm updates bucket by bucket, so it would call step() of {kind.__name__} once for each bucket, "
        f"{reason}: use {WHOLE}, or shards=1 if servers update{other_fix}"
    )


# torch's wrappers
WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"})
FREEZE_FIX = "unfreeze and add parameters first, and make the Trainer after that"


def check_not_wrapped(model: nn.Module) -> None:
    """Raise `ConfigError` for a model that sums or shards its gradients itself."""
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind.__name__ in WRAPPERS and kind.__module__.startswith("torch."):
                raise ConfigError(
                    f"the model is wrapped in torch's {kind.__name__}, which sums gradients over ranks itself: give "
                    "the Trainer the model "
                    "inside (model.module) and call that one in the step's function, or make the Trainer instead of "
                    "the wrapper"
                )


def check_forward(algorithm: Algorithm, model: nn.Module, num_workers: int) -> None:
    """Raise `ConfigError` for a module whose forward pass changes parameters, if these must be equal on all ranks.

    `max_norm` of an embedding shrinks the rows that this rank's batch reads.
    """
    if num_workers == 1 or (algorithm.replicas != Replicas.EVERY_STEP and not algorithm.requires.servers):
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ConfigError(
                f"{name or type(module).__name__} has max_norm={module.max_norm:g}: its forward pass changes the rows of "
                "this rank's batch, and other ranks do not. Leave max_norm out, and limit all rows after each step on "
                "every rank: with torch.no_grad(): weight.copy_(torch.renorm(weight, 2, 0, max_norm))"
            )


@final
class TrainedParameters:
    """The trained parameters at the time of the layout, and checks that they stay the same.

    Gradients of a parameter outside the layout are not averaged over the ranks, and not reset to None. Therefore an
    optimizer may hold only parameters of the model, and a frozen parameter must stay frozen.

    Args:
        model, optimizer: the model, and the optimizer of its parameters.
        parameters: the parameters in the layout.

    Raises:
        ConfigError: the optimizer holds trainable parameters outside the model, or none of the model.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        self._model = model
        self._optimizer = optimizer
        self._laid_out = {id(param) for param in parameters}
        named = list(model.named_parameters())
        held = [param for group in optimizer.param_groups for param in group["params"]]
        own = {id(param) for _, param in named}
        if not any(id(param) in own for param in held):
            raise ConfigError(
                "the optimizer holds none of the model's parameters: make the optimizer from this model's parameters, "
                "after the model was copied, wrapped or moved"
            )
        for place, param in self._held():
            if param.requires_grad and id(param) not in self._laid_out:
                raise ConfigError(
                    f"the optimizer's {self._name(place, param)} is not the model's, and only the model's gradients "
                    "are averaged over the "
                    "ranks: give the Trainer one module that holds all parameters, such as nn.ModuleList([model, "
                    "criterion])"
                )
        self._refresh([param for _, param in named])

    def _held(self) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """Yield (position, group) and parameter, for all parameters of the optimizer."""
        for number, group in enumerate(self._optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                yield (position, number), param

    def _refresh(self, of_model: Sequence[Tensor]) -> None:
        self._sizes = [len(group["params"]) for group in self._optimizer.param_groups]
        outside = {
            id(param): param
            for param in (*of_model, *(param for _, param in self._held()))
            if id(param) not in self._laid_out
        }
        self._outside = list(outside.values())

    def _name(self, place: tuple[int, int], param: Tensor) -> str:
        position, number = place
        names = self._optimizer.param_groups[number].get("param_names")
        own = next((name for name, other in self._model.named_parameters() if other is param), None)
        name = own or (names[position] if names else f"shape {tuple(param.shape)}")
        return f"parameter {position} of group {number} ({name})"

    def check(self) -> None:
        """Raise `ConfigError` if a parameter outside the layout became trainable. Takes microseconds, once a step."""
        for param in self._outside:
            if param.requires_grad:
                raise ConfigError(self._unfrozen(param))
        groups = self._optimizer.param_groups
        if len(groups) == len(self._sizes) and all(
            len(group["params"]) == size for group, size in zip(groups, self._sizes, strict=True)
        ):
            return
        for place, param in self._held():
            if param.requires_grad and id(param) not in self._laid_out:
                raise ConfigError(
                    f"the optimizer got {self._name(place, param)} after the Trainer was made, which lays out "
                    f"gradients once: {FREEZE_FIX}"
                )
        self._refresh(list(self._model.parameters()))

    def _unfrozen(self, param: Tensor) -> str:
        name = next((name for name, other in self._model.named_parameters() if other is param), None)
        place = next((place for place, other in self._held() if other is param), None)
        what = (
            f"{name} of the model"
            if name
            else f"the optimizer's {self._name(place, param)}"
            if place
            else "a parameter"
        )
        return f"{what} was unfrozen after the Trainer was made, which lays out gradients once: {FREEZE_FIX}"
