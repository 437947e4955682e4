"""Metrics of the user's own, measured on the test data at each evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

from torch import Tensor, nn

from workbench.errors import ConfigError
from workbench.settings import Settings

if TYPE_CHECKING:
    from workbench.problems.loading import Batch

Better = Literal["higher", "lower"]
# Columns of evaluations, steps, summaries and tables of runs. The names of settings are columns, too.
TAKEN = frozenset(
    """
    accuracy algorithm bytes_sent cell clock compute_s correct created departures detail error exposed_s failures
    folder hidden_s idle_s judged kind label load_s loss lr network num_samples optimizer overlap problem rank
    remaining run runtime samples seconds settings staleness staleness_max status steered step stragglers step_s
    step_seconds_median steps sweep test_loss timing_only train_loss workers
    """.split()  # noqa: SIM905 - a list of strings would take a line each
).union(Settings.__slots__)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number that measures how good a model is.

    Attributes:
        function: `function(outputs, targets)` -> mean over the batch, for data of (input, target) pairs; with
            `whole_batch=True`, `function(model, batch)`. Over the test data it is averaged by the number of samples. If
            a batch counts otherwise (masked words), return (sum, what it is divided by) in place of a mean.
            Or an object of torchmetrics, whose `update(outputs, targets)` and `compute()` are called; its states need
            not be means, so rank 0 measures it alone, on all test data.
        better: whether higher or lower values are better; of a torchmetrics object its `higher_is_better`.

    Example:
        >>> error = Metric(function=lambda outputs, targets: (outputs.argmax(1) != targets).float().mean(), better="lower")
        >>> error.better
        'lower'
    """

    function: Any
    better: Better = "higher"

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError(
                f"a metric is {self.function!r}: give a function of (outputs, targets), or a torchmetrics object"
            )
        if self.better not in ("higher", "lower"):
            raise ConfigError(f"better={self.better!r}: choose higher or lower")

    @property
    def has_state(self) -> bool:
        """Return True for an object of torchmetrics."""
        return all(callable(getattr(self.function, name, None)) for name in ("update", "compute", "reset"))


def named_metrics(given: Mapping[str, Any]) -> dict[str, Metric]:
    """Return the metrics of a problem by name, from metrics, functions and torchmetrics objects.

    Raises:
        ConfigError: a name is taken or no identifier, or something else was given.
    """
    found = {}
    for name, one in given.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"metrics: {name!r} is no name: use letters, digits and _, such as top_5")
        if name in TAKEN:
            raise ConfigError(
                f"metrics: {name!r} is the name of another column: choose a different one, such as {name}_of_model"
            )
        better: Better = "lower" if getattr(one, "higher_is_better", None) is False else "higher"
        found[name] = one if isinstance(one, Metric) else Metric(function=one, better=better)
    return found


@final
class Measurement:
    """The metrics on one share of the test data.

    Args:
        metrics: by name.
        whole_batch: whether functions take (model, batch).
    """

    def __init__(self, metrics: Mapping[str, Metric], *, whole_batch: bool) -> None:
        self._whole_batch = whole_batch
        self._means = {name: metric for name, metric in metrics.items() if not metric.has_state}
        self._states = {name: metric for name, metric in metrics.items() if metric.has_state}
        self._sums: dict[str, list[float]] = {name: [0.0, 0] for name in self._means}
        for metric in self._states.values():
            metric.function.reset()

    @property
    def has_states(self) -> bool:
        """Return True if a metric must see all test data on one rank."""
        return bool(self._states)

    def add(self, model: nn.Module, batch: Batch, number: int) -> None:
        """Add a batch to the means."""
        if not self._means:
            return
        given = self._given(model, batch)
        for name, metric in self._means.items():
            total = self._sums[name]
            value = metric.function(*given)
            if isinstance(value, tuple) and len(value) == 2:
                total[0] += _number(name, value[0], number)
                total[1] += _number(name, value[1], number)
            else:
                total[0] += _number(name, value, number) * number
                total[1] += number

    def add_to_states(self, model: nn.Module, batch: Batch) -> None:
        """Add a batch to the torchmetrics objects."""
        outputs, targets = self._outputs(model, batch)
        for metric in self._states.values():
            where = getattr(metric.function, "to", None)
            (where(outputs.device) if where and isinstance(outputs, Tensor) else metric.function).update(
                outputs, targets
            )

    def check_states(self) -> None:
        """Raise `ConfigError` if a torchmetrics object computes no number. It need not be finite on few samples."""
        for name, metric in self._states.items():
            with _alone(metric.function):
                _number(name, metric.function.compute(), 0, finite=False)

    def sums(self, *, states: bool) -> dict[str, list[float]]:
        """Return name -> [sum, number of samples]. `states`: with the values of the torchmetrics objects, as [value, 1]."""
        found = dict(self._sums)
        if states:
            for name, metric in self._states.items():
                with _alone(metric.function):
                    found[name] = [_number(name, metric.function.compute(), 0), 1]
        return found

    def _given(self, model: nn.Module, batch: Batch) -> tuple[Any, Any]:
        return (model, batch) if self._whole_batch else self._outputs(model, batch)

    def _outputs(self, model: nn.Module, batch: Batch) -> tuple[Any, Any]:
        if self._whole_batch:
            raise ConfigError(
                "metrics: a torchmetrics object takes outputs and targets, which a problem with whole_batch=True does "
                "not name: give a function of (model, batch) that calls it"
            )
        inputs, targets = batch
        return model(inputs), targets


@contextmanager
def _alone(metric: Any) -> Iterator[None]:
    """Keep a torchmetrics object from waiting for the other processes of torch.distributed: they do not compute it."""
    parts: list[Any] = [
        part
        for part in (metric.modules() if isinstance(metric, nn.Module) else ())
        if hasattr(part, "distributed_available_fn")
    ]
    before = [part.distributed_available_fn for part in parts]
    for part in parts:
        part.distributed_available_fn = lambda: False
    try:
        yield
    finally:
        for part, function in zip(parts, before, strict=True):
            part.distributed_available_fn = function


def _number(name: str, value: Any, number: int, *, finite: bool = True) -> float:
    """A metric's value.

    Raises:
        ConfigError: it is not one number.
    """
    where = f" on a batch of {number} samples" if number else ""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ConfigError(
            f"metric {name} returned a tensor of shape {tuple(value.shape)}{where}: return one number, the mean "
            "over the batch"
        )
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"metric {name} returned {value!r}{where}: return one number") from None
    if finite and not math.isfinite(found):
        raise ConfigError(f"metric {name} is {found}{where}: return a finite number, or leave such samples out")
    return found
