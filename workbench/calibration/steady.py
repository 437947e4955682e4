"""How many steps of an algorithm are simulated, and which of them are timed: those that no longer depend on the start."""

from __future__ import annotations

import statistics
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from workbench.analysis.summary import step_seconds
from workbench.calibration.effective import Setting
from workbench.calibration.model import Calibration
from workbench.calibration.parts import Shapes
from workbench.costs import Compute
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulate import simulate
from workbench.trace.run import Run

MIN_STEPS, FEWEST_STEPS = 8, 4  # minimum steps of a simulation by messages, and of one with many messages
MESSAGES = 4000  # more steps than the minimum are simulated up to this number of messages
MAX_SIMULATED_MESSAGES = 20_000  # of the minimum steps, and of a simulation that is repeated for other draws
MOST_STEPS = 400  # of a pipeline; longer periods are simulated FEWEST_PERIODS times
FILL_STEPS = 50  # for each step of staleness: until a pipeline's sums queue up, steps do not wait for them
MIN_PERIODS = 3  # in which messages are counted
PERIODS, FEWEST_PERIODS = 4, 2  # to simulate of an algorithm that does not communicate in each step


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
    every, late = algorithm.period, staleness(algorithm)
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
        every: steps of a period; None: those that the algorithm says, or that the run shows.
    """
    ends_s = np.array([row["seconds"] for row in run.steps()])
    if staleness(algorithm) > 1:
        return np.diff(ends_s[len(ends_s) // 2 :]).reshape(-1, 1)
    every = every or (algorithm.period if algorithm.period > 1 else gap(run, algorithm))
    if every < 2 or len(ends_s) <= every:
        return step_seconds(run).reshape(-1, 1)
    num = (len(ends_s) - 1) // every * every
    periods_s = np.diff(ends_s)[len(ends_s) - 1 - num :].reshape(-1, every)
    return periods_s[1:] if len(periods_s) > 1 else periods_s


def affordable_steps(calibration: Calibration, algorithm: Algorithm, setting: Setting, steps: int) -> int:
    """Return `steady_steps`, or fewer if each has many messages and a pipeline is full after two or three steps."""
    least = steady_steps(algorithm, steps)
    messages = messages_per_step(calibration, algorithm, setting)
    if least > steps or algorithm.period > 1 or not messages or algorithm.requires.servers:
        return least
    fewest = MIN_STEPS if messages * MIN_STEPS <= MAX_SIMULATED_MESSAGES else FEWEST_STEPS
    return int(min(steps, max(fewest, MESSAGES / max(messages, 1.0))))


def messages_per_step(calibration: Calibration, algorithm: Algorithm, setting: Setting) -> float:
    """Return the approximate number of messages of all workers in a step that communicates; 0 if the library sums."""
    max_bytes = algorithm.requires.buckets.max_bytes
    num_buckets = 1.0 if max_bytes is None else calibration.shapes.num_bytes / max(max_bytes, 1.0) + 1
    known = algorithm.messages_per_step(setting.workers, min(num_buckets, len(calibration.shapes.parameters)))
    if known is not None:
        return setting.workers * known
    try:
        return _counted(algorithm, calibration.shapes, setting.workers)
    except TypeError:  # your algorithm, with a setting that has no hash
        return _counted.__wrapped__(algorithm, calibration.shapes, setting.workers)


@lru_cache(maxsize=256)
def _counted(algorithm: Algorithm, shapes: Shapes, workers: int) -> float:
    """Count the messages of a few simulated steps."""
    periods = MIN_PERIODS if algorithm.period == 1 else 1
    steps = periods * algorithm.period
    run = simulate(
        algorithm,
        shapes.problem(shapes.batch_size * workers * steps),
        workers=workers,
        network="free",
        compute=Compute(forward_s=1.0, backward_s=1.0),
        timing_only=True,
        detail="messages",
        steps=steps,
        batch_size=shapes.batch_size,
        trace_steps=None,
    )
    return len(run.spans.select(kinds=("send",)).table) / periods


def gap(run: Run, algorithm: Algorithm) -> int:
    """Return the steps from one communication of rank 0 to the next: 1 if it sends in each step, and if it never sends.

    It is 1 for asynchronous algorithms: a rank that sends only when it is asked (`ADPSGD`) has no period.
    """
    if algorithm.asynchronous:
        return 1
    sent = [row["bytes_sent"] for row in run.metrics[0] if "bytes_sent" in row and "evaluation" not in row]
    steps = [step for step, (before, after) in enumerate(pairwise([0.0, *sent])) if after > before]
    if len(steps) == len(sent) or (not steps and len(sent) >= MOST_STEPS):
        return 1
    if len(steps) < 2:
        return len(sent)  # not yet known
    return max(1, round(statistics.median(np.diff(steps).tolist())))


def more_periods(run: Run, algorithm: Algorithm, steps: int) -> int | None:
    """Return the steps in which an algorithm whose period is not known communicates often enough; None: `steps` are."""
    if algorithm.period > 1 or staleness(algorithm) > 1:
        return None
    between = gap(run, algorithm)
    if between < 2 or len(run.metrics[0]) >= PERIODS * between or steps >= MOST_STEPS:
        return None
    return min(MOST_STEPS, max(4 * steps, PERIODS * between))
