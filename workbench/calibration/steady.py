"""How many steps of an algorithm are simulated, and which of them are timed: those that no longer depend on the start."""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.analysis.summary import step_seconds
from workbench.calibration.effective import Setting, sends_messages
from workbench.calibration.model import Calibration
from workbench.program import Algorithm
from workbench.trace.run import Run

MIN_STEPS, FEWEST_STEPS = 8, 4  # minimum steps of a simulation by messages, and of one with many messages
MESSAGES = 4000  # more steps than the minimum are simulated up to this number of messages
MAX_SIMULATED_MESSAGES = 20_000  # of the minimum steps, and of a simulation that is repeated for other draws
MOST_STEPS = 400  # of a pipeline; longer periods are simulated FEWEST_PERIODS times
FILL_STEPS = 50  # for each step of staleness: until a pipeline's sums queue up, steps do not wait for them
PERIODS, FEWEST_PERIODS = 4, 2  # to simulate of an algorithm that does not communicate in each step


def period(algorithm: Algorithm) -> int:
    """Return the number of steps from one communication to the next, if the algorithm says it; else 1."""
    every = getattr(algorithm, "every", 1)
    return every if isinstance(every, int) else 1


def staleness(algorithm: Algorithm) -> int:
    """Return the staleness of an algorithm whose sums may lag behind its steps; 0 for any other, such as a server."""
    return 0 if algorithm.requires.servers else algorithm.max_staleness or 0


def steady_steps(algorithm: Algorithm, steps: int) -> int:
    """Return at least `steps`, enough to fill a pipeline or for whole periods after the first.

    >>> from workbench.algorithms import LocalSGD, PipeSGD
    >>> [steady_steps(PipeSGD(width=width), 30) for width in (2, 3, 8, 20)]
    [30, 100, 350, 400]
    >>> [steady_steps(LocalSGD(every=every), 30) for every in (1, 8, 100, 1500)]
    [30, 33, 401, 3001]
    """
    every, late = period(algorithm), staleness(algorithm)
    if every > 1:
        return max(steps, min(PERIODS, max(FEWEST_PERIODS, MOST_STEPS // every)) * every + 1)
    if late > 1:
        return max(steps, min(MOST_STEPS, FILL_STEPS * late))
    return steps


def steady_seconds(run: Run, algorithm: Algorithm, every: int | None = None) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return seconds of the steps after the start, shape (periods, steps of a period).

    The first of several periods is left out: a sum that it starts may delay only the next one. So is the first half of
    the steps of a pipeline of more than two: if a sum takes longer than a step, the first steps do not wait for it yet.
    Steps of an algorithm that communicates in each step are those after the warm-up, of all ranks: a period is a step.

    Args:
        every: steps of a period; None: those that the algorithm says.
    """
    ends_s = np.array([row["seconds"] for row in run.steps()])
    if staleness(algorithm) > 1:
        return np.diff(ends_s[len(ends_s) // 2 :]).reshape(-1, 1)
    every = period(algorithm) if every is None else every
    if every < 2 or len(ends_s) <= every:
        return step_seconds(run).reshape(-1, 1)
    num = (len(ends_s) - 1) // every * every
    periods_s = np.diff(ends_s)[len(ends_s) - 1 - num :].reshape(-1, every)
    return periods_s[1:] if len(periods_s) > 1 else periods_s


def affordable_steps(calibration: Calibration, algorithm: Algorithm, setting: Setting, steps: int) -> int:
    """Return `steady_steps`, or fewer if each has many messages and a pipeline is full after two or three steps."""
    least = steady_steps(algorithm, steps)
    messages = messages_per_step(calibration, algorithm, setting)
    if least > steps or period(algorithm) > 1 or not messages or algorithm.requires.servers:
        return least
    fewest = MIN_STEPS if messages * MIN_STEPS <= MAX_SIMULATED_MESSAGES else FEWEST_STEPS
    return int(min(steps, max(fewest, MESSAGES / max(messages, 1.0))))


def messages_per_step(calibration: Calibration, algorithm: Algorithm, setting: Setting) -> float:
    """Return the approximate number of messages of all workers in a step that sums; 0 if the library sums."""
    collective = getattr(algorithm, "collective", None)
    if not sends_messages(algorithm):
        return 0.0
    if algorithm.requires.servers:
        return 2.0 * setting.workers * int(getattr(algorithm, "shards", 1) or 1)
    max_bytes = algorithm.requires.buckets.max_bytes
    buckets = 1 if max_bytes is None else calibration.shapes.num_bytes / max(max_bytes, 1.0) + 1
    return setting.workers * 2 * (setting.workers - 1) * int(getattr(collective, "chunks", 1)) * buckets
