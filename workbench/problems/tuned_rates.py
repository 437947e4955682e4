"""Tuned learning rates: one for a problem, an algorithm with its settings, a number of workers and a batch size.

The rates are in `records/tuned-rates.json`, with all rates that were tried. `python -m tests.benchmarks.tune_rates`
measures them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any, final

from workbench.errors import ConfigError
from workbench.program import Algorithm, defaults_of, settings_of
from workbench.resources import shared
from workbench.settings import OptimizerFactory, describe

FILE = "tuned-rates.json"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TunedRate:
    """A row of the record.

    Attributes:
        problem, algorithm: names of the problem and the algorithm.
        settings: settings that the algorithm's label shows, without a lossless collective.
        workers, batch_size: number of workers, and samples of each worker in a step.
        lr: the rate of `grid` with the smallest mean test loss at the end of training. It is not the first or last one.
        loss, accuracy: means over the seeds with this rate.
        grid: the rates that were tried, in ascending order, each with the losses and accuracies of all seeds; None if a
            training diverged.
    """

    problem: str
    algorithm: str
    settings: dict[str, Any]
    workers: int
    batch_size: int
    lr: float
    loss: float
    accuracy: float
    grid: tuple[dict[str, Any], ...]

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.algorithm}({given}) on {self.workers} workers"


def changed_settings(algorithm: Algorithm) -> dict[str, Any]:
    """Return the first setting and those that differ from the defaults, as JSON values, without a lossless collective.

    >>> from workbench.algorithms import PipeSGD
    >>> from workbench.collectives import Ring
    >>> changed_settings(PipeSGD(width=3, collective=Ring()))
    {'width': 3}
    """
    settings, left_out = settings_of(algorithm), set(defaults_of(algorithm))
    if "collective" in settings and not settings["collective"].lossy:
        left_out.add("collective")
    return {
        name: value if isinstance(value, int | float | None) else str(value)
        for name, value in settings.items()
        if name not in left_out
    }


def without_rate(optimizer: OptimizerFactory) -> str:
    """Return an optimizer's name and arguments for a record, without its learning rate.

    >>> from functools import partial
    >>> import torch
    >>> without_rate(partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    'SGD(momentum=0.9)'
    """
    if not isinstance(optimizer, partial):
        return describe(optimizer)
    others = {name: value for name, value in optimizer.keywords.items() if name != "lr"}
    return describe(partial(optimizer.func, *optimizer.args, **others))


@lru_cache(maxsize=1)
def read_record() -> dict[str, Any]:
    """Return the record: "problems" (how each was trained), "rows", and how all rows were measured."""
    record: dict[str, Any] = json.loads((shared("records") / FILE).read_text(encoding="utf-8"))
    return record


def rates_of(problem: str) -> tuple[TunedRate, ...]:
    """Return all rows of the problem with this name, in the record's order.

    >>> str(rates_of("mnist1d-cnn")[0])
    'SynchronousSGD() on 4 workers'
    """
    names = [item.name for item in fields(TunedRate)]
    rows = [row for row in read_record()["rows"] if row["problem"] == problem]
    return tuple(TunedRate(**{name: row[name] for name in names}) for row in rows)


def find_rate(problem: str, algorithm: Algorithm, workers: int, batch_size: int) -> TunedRate:
    """Return the row of exactly this problem, algorithm, number of workers and batch size.

    Raises:
        ConfigError: there is no such row. The message lists the rows of the problem, or the problems that have rows.
    """
    rows = rates_of(problem)
    if not rows:
        tuned = ", ".join(read_record()["problems"])
        raise ConfigError(f"problem {problem} has no tuned learning rates: give a number; there are some for {tuned}")
    name, settings = type(algorithm).__name__, changed_settings(algorithm)
    for row in rows:
        if (row.algorithm, row.settings, row.workers, row.batch_size) == (name, settings, workers, batch_size):
            return row
    wanted = replace(rows[0], algorithm=name, settings=settings, workers=workers)
    raise ConfigError(
        f"no learning rate of {problem} was tuned for {wanted} with {batch_size} samples each: give a number; there "
        "are "
        f"rates, with {rows[0].batch_size} samples each, for {', '.join(map(str, rows))}"
    )


def note_of(problem: str, lr: float) -> str:
    """Return a note for the record of a run with a tuned rate."""
    how = read_record()["problems"][problem]
    length = next(f"{how[unit]} {unit}" for unit in ("epochs", "steps") if unit in how)
    return f"learning rate {lr:g} is tuned for trainings of {length} (records/{FILE})"


def check_kind(problem: str, optimizer: OptimizerFactory, sizes: dict[str, int]) -> None:
    """Check that a problem has the options and the optimizer of the record.

    Args:
        problem: the problem's name.
        optimizer: the optimizer that trains the problem.
        sizes: the problem's numbers of "parameters" and of "samples".

    Raises:
        ConfigError: the problem or the optimizer differs from the record.
    """
    recorded = read_record()["problems"][problem]
    found = {"optimizer": without_rate(optimizer), **sizes}
    for name, value in found.items():
        if value != recorded[name]:
            raise ConfigError(
                f"the learning rates of {problem} were tuned with {name} {recorded[name]}, not {value}: give a number"
            )
