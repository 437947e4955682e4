"""A run in one row, and a comparison of several runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import numpy as np

from workbench.analysis.critical import CriticalPath, critical_path
from workbench.analysis.fairness import notes_of
from workbench.analysis.labels import distinct_labels
from workbench.analysis.overlap import Overlap, overlap
from workbench.analysis.parts import Parts, parts
from workbench.analysis.table import Column, Table, num_bytes, percent, seconds, three_digits
from workbench.errors import ConfigError
from workbench.trace.info import num_remaining
from workbench.trace.run import Run, as_runs

INTERPOLATED = ("seconds", "samples", "bytes_sent")  # between two evaluations
WARM_UP_SHARE, WARM_UP_STEPS = 10, 10  # the first tenth of the steps, at most ten, is the warm-up


def run_overlap(run: Run, steps: slice | None = None) -> Overlap:
    """Return hidden and exposed communication and idle time of a run, by rank and step."""
    return overlap(run.spans, steps)


def run_critical_path(run: Run, steps: slice | None = None) -> CriticalPath:
    """Return the chain of spans, over ranks and messages, that ends each step of a run."""
    return critical_path(run.spans, steps)


def run_parts(run: Run, steps: slice | None = None) -> Parts:
    """Return seconds of waiting, wire, decoding, summing and encoding of a run's messages, by rank."""
    return parts(run.spans, steps)


def trace_coverage(run: Run) -> str:
    """Return which steps the trace covers, if not all; "" if it covers all, or if there is no trace."""
    first = (run.info.get("settings") or {}).get("trace_steps")
    num_steps = 1 + max((row["step"] for rows in run.metrics.values() for row in rows), default=-1)
    traced = run.spans.table["step"]
    traced = traced[traced >= 0]
    if first is None or first >= num_steps or not len(traced):
        return ""
    return f"trace of steps {traced.min():,} to {traced.max():,} of {num_steps:,}"


def steady_overlap(run: Run) -> Overlap:
    """Return the overlap without the warm-up steps of the trace (`num_warm_up`).

    The trace may cover only a part of the run.
    """
    steps = np.unique(run.spans.table["step"])
    steps = steps[steps >= 0]
    return run_overlap(run, slice(int(steps[num_warm_up(len(steps))]), None) if len(steps) else None)


def summary(run: Run) -> dict[str, Any]:
    """Return a run as plain values, fit for JSON; None for values that were not recorded.

    Keys: algorithm, settings, problem, runtime, workers, remaining (workers that have not left), status, clock, steps
    (taken), accuracy and loss (of the last evaluation on the test data), train_loss (mean over the last tenth of the
    steps), seconds (of training, without evaluation), step_seconds_median (see `step_seconds`), samples, bytes_sent
    (all ranks), staleness_max, overlap (hidden share of the communication), and the means for each step and rank
    step_s, compute_s, hidden_s, exposed_s, load_s (reading data), idle_s (over the same steps as the median), run (its
    name), folder.
    """
    info, steps, evaluations = run.info, run.steps(), run.evaluations()
    last = steps[-1] if steps else {}
    final = evaluations[-1] if evaluations else {}
    stale = [row["staleness"] for rows in run.metrics.values() for row in rows if row.get("staleness") is not None]
    stale += [value for row in run.updates() for value in row["staleness"]]
    losses = [row["loss"] for row in steps[len(steps) - max(1, len(steps) // 10) :] if row["loss"] is not None]
    times = step_seconds(run)
    found = steady_overlap(run)
    means = found.per_step()
    return {
        "algorithm": (info.get("algorithm") or {}).get("name"),
        "settings": (info.get("algorithm") or {}).get("settings") or {},
        "problem": (info.get("problem") or {}).get("name"),
        "runtime": info.get("runtime"),
        "workers": info.get("num_workers", len(run.metrics)),
        "remaining": num_remaining({"num_workers": len(run.metrics), **info}),
        "status": info.get("status"),
        "clock": info.get("clock"),
        "steps": len(steps),
        "accuracy": final.get("accuracy"),
        "loss": final.get("test_loss"),
        **{name: final.get(name) for name in run.metric_names},
        "train_loss": float(np.mean(losses)) if losses else None,
        "seconds": last.get("seconds"),
        "step_seconds_median": float(np.median(times)) if len(times) else None,
        "samples": last.get("samples"),
        # includes messages in flight at the last step
        "bytes_sent": max((row["bytes_sent"] for row in (last, final) if row), default=None),
        "staleness_max": max(stale) if stale else None,
        "overlap": found.fraction,
        "step_s": means.get("window_s"),
        **{key: means.get(key) for key in ("compute_s", "hidden_s", "exposed_s", "load_s", "idle_s")},
        "run": run.id,
        "folder": str(run.folder) if run.folder else None,
    }


def num_warm_up(num_steps: int) -> int:
    """Return how many first steps are slower than usual (allocations, connections): the first tenth, 1 to 10 of them.

    >>> [num_warm_up(steps) for steps in (1, 2, 50, 1000)]
    [0, 1, 5, 10]
    """
    return min(max(1, num_steps // WARM_UP_SHARE), WARM_UP_STEPS, max(num_steps - 1, 0))


def step_seconds(run: Run) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the durations of the steps after the warm-up, of all ranks, without evaluations, shape (N,)."""
    found: list[float] = []
    for rows in run.metrics.values():
        ends = [(row["step"], row["seconds"]) for row in rows if "evaluation" not in row]
        gaps = [later[1] - earlier[1] for earlier, later in pairwise(ends) if later[0] == earlier[0] + 1]
        found.extend(gaps[max(num_warm_up(len(ends)) - 1, 0) :])
    return np.array(found)


def mean_step_s(run: Run, skip: int) -> float:
    """Return the mean seconds of a step after the first `skip` + 1. A step ends when its slowest rank ends it.

    Raises:
        ConfigError: the run has too few steps.
    """
    ends_s = [row["seconds"] for row in run.steps()][skip:]
    if len(ends_s) < 2:
        raise ConfigError(f"the run has {len(run.steps())} steps, and at least {skip + 2} are needed: train longer")
    return float((ends_s[-1] - ends_s[0]) / (len(ends_s) - 1))


def typical_window(run: Run, count: int) -> slice:
    """Return `count` consecutive steps whose time is the median of all such windows after the warm-up, for a figure."""
    rows = run.steps()
    first = num_warm_up(len(rows))
    lengths_s = {  # a resumed run begins at a later step, and its place in `rows` is another number
        rows[place]["step"]: rows[place + count - 1]["seconds"] - rows[place - 1]["seconds"]
        for place in range(first, len(rows) - count + 1)
    }
    if not lengths_s or count < 1 or first < 1:
        raise ConfigError(
            f"the run has {len(rows)} steps, fewer than {count} after the warm-up: train longer, or ask for fewer"
        )
    begin = sorted(lengths_s, key=lambda step: lengths_s[step])[(len(lengths_s) - 1) // 2]
    return slice(begin, begin + count)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """When a curve of evaluations meets a target.

    Attributes:
        steps: number of steps, interpolated between two evaluations.
        low, high: the fewest and the most steps that the two evaluations allow.
        place: of the first evaluation that meets the target.
    """

    steps: int
    low: int
    high: int
    place: int


def crossing(steps: Sequence[int], values: Sequence[float], target: float, *, higher: bool = False) -> Crossing | None:
    """Return when evaluations first meet a target; None if none does.

    The metric is taken to be linear between two evaluations, and the result is the first whole step at or after the
    line's crossing. So it is exact if every step is evaluated. Without an earlier finite value, it is this evaluation.

    Args:
        steps: number of steps taken before each evaluation, ascending.
        values: the metric at each evaluation.
        target: the value to reach: values of at most the target meet it, or of at least the target if `higher`.

    >>> crossing([10, 20, 30], [2.0, 1.0, 0.8], 1.25)
    Crossing(steps=18, low=11, high=20, place=1)
    """
    sign = 1 if higher else -1
    place = next((place for place, value in enumerate(values) if sign * value >= sign * target), None)
    if place is None:
        return None
    before, high = (steps[place - 1] if place else 0), steps[place]
    share = 1.0
    if place and math.isfinite(values[place - 1]) and math.isfinite(values[place]):
        share = (target - values[place - 1]) / (values[place] - values[place - 1])
    low = min(before + 1, high)
    return Crossing(steps=max(low, math.ceil(before + share * (high - before))), low=low, high=high, place=place)


def time_to(run: Run, y: str, target: float) -> dict[str, Any] | None:
    """Return when a run meets the target (accuracy at least, test loss at most), or None: see `crossing`.

    Args:
        run: the run.
        y: "accuracy", "test_loss", or one of the problem's metrics, with its direction.
        target: the value to reach.

    Returns:
        The row of `Run.evaluations` that first meets the target, with step, seconds, samples and bytes_sent interpolated
        between the evaluation before and this one. `step_low` and `step_high` are the first and the last step at whose
        end the target can have been met, as far as these two evaluations tell.

    Raises:
        ConfigError: the run has no such metric.
    """
    _check_measured(y, [run])
    rows = [row for row in run.evaluations() if row[y] is not None]
    counts = [row["step"] + 1 for row in rows]
    met = crossing(counts, [row[y] for row in rows], target, higher=run.is_better_higher(y))
    if met is None:
        return None
    after = rows[met.place]
    before = rows[met.place - 1] if met.place else {"step": -1, **dict.fromkeys(INTERPOLATED, 0)}
    length = after["step"] - before["step"]
    share = (met.steps - 1 - before["step"]) / length if length else 1.0
    between = {
        name: type(after[name])(before[name] + share * (after[name] - before[name]))
        for name in INTERPOLATED
        if share < 1 and None not in (before[name], after[name])
    }
    return {**after, **between, "step": met.steps - 1, "step_low": met.low - 1, "step_high": met.high - 1}


def _check_measured(y: str, runs: Sequence[Run]) -> None:
    """Raise `ConfigError` unless one of the runs measures this at its evaluations."""
    known = dict.fromkeys(["accuracy", "test_loss", *(name for run in runs for name in run.metric_names)])
    if y not in known:
        raise ConfigError(
            f"{y!r} is not measured in {', '.join(run.id for run in runs)}: choose one of {', '.join(known)}"
        )


def time_to_accuracy(run: Run, target: float) -> float | None:
    """Return training seconds until the test accuracy (0 to 1) is reached; None if it is not: see `time_to`."""
    met = time_to(run, "accuracy", target)
    return met["seconds"] if met else None


def time_to_loss(run: Run, target: float) -> float | None:
    """Return training seconds until the test loss is reached; None if it is not: see `time_to`."""
    met = time_to(run, "test_loss", target)
    return met["seconds"] if met else None


COLUMNS = (
    Column("label", "algorithm"),
    Column("accuracy", "accuracy", percent),
    Column("loss", "test loss", three_digits),
    Column("seconds", "training", seconds),
    Column("step_seconds_median", "step (median)", seconds),
    Column("exposed_s", "exposed (mean)", seconds),
    Column("overlap", "overlap", percent),
    Column("bytes_sent", "sent", num_bytes),
    Column("staleness_max", "staleness (max)"),
    Column("steps", "steps"),
    Column("workers", "workers"),
    Column("runtime", "runtime"),
)
TIME_COLUMNS = (
    Column("label", "algorithm"),
    Column("runtime", "runtime"),
    Column("seconds", "training", seconds),
    Column("step", "step"),
    Column("step_range", "between steps", lambda bounds: f"{bounds[0]} to {bounds[1]}"),
    Column("samples", "samples"),
    Column("bytes_sent", "sent", num_bytes),
)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Table):
    """Several runs, one a row; the exact values are in `rows` (see `summary`)."""

    runs: tuple[Run, ...] = ()

    def time_to_accuracy(self, target: float) -> Table:
        """Return when each run reached this test accuracy (0 to 1), interpolated; None if it never did."""
        return self._time_to(
            "accuracy", target, f"Accuracy of at least {percent(target)}, interpolated between evaluations"
        )

    def time_to_loss(self, target: float) -> Table:
        """Return when each run reached this test loss, interpolated; None if it never did."""
        return self._time_to("test_loss", target, f"Test loss of at most {target:g}, interpolated between evaluations")

    def time_to(self, metric: str, target: float) -> Table:
        """Return when each run met a target of one of the problem's metrics, interpolated; None if it never did."""
        return self._time_to(metric, target, f"{metric} of {target:g}, or better, interpolated between evaluations")

    def _time_to(self, y: str, target: float, caption: str) -> Table:
        _check_measured(y, self.runs)
        keys = ("seconds", "step", "samples", "bytes_sent")
        rows = []
        for row, run in zip(self.rows, self.runs, strict=True):
            measured = y in ("accuracy", "test_loss", *run.metric_names)
            met = (time_to(run, y, target) if measured else None) or {}
            rows.append(
                {
                    **{key: row[key] for key in ("label", "algorithm", "runtime", "run")},
                    **{key: met.get(key) for key in keys},
                    "step_range": [met["step_low"], met["step_high"]] if met else None,
                }
            )
        return Table(rows, TIME_COLUMNS, caption=caption)


def compare(runs: Iterable[Run]) -> Comparison:
    """Return a table of several runs.

    Example:
        >>> print(compare([Run(info={"algorithm": {"name": "PipeSGD"}}, metrics={})]).rows[0]["steps"])
        0
    """
    runs = as_runs(runs)
    notes = sorted({str(note) for run in runs if (note := (run.info.get("problem") or {}).get("note"))})
    labels = distinct_labels(runs)
    rows = [{"label": label, **summary(run)} for label, run in zip(labels, runs, strict=True)]
    state = (Column("status", "state"),) if any(run.failure_summary for run in runs) else ()
    own = dict.fromkeys(name for run in runs for name in run.metric_names)
    columns = (COLUMNS[0], *state, *COLUMNS[1:3], *(Column(name, name, three_digits) for name in own), *COLUMNS[3:])
    if any(run.departures_summary for run in runs):
        columns = (*columns[:-1], Column("remaining", "remaining"), columns[-1])
    return Comparison(rows, columns, caption="; ".join(notes), footnotes=tuple(notes_of(runs, labels)), runs=runs)
