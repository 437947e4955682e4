"""Pipe-SGD with compute and communication times that change from step to step, as a recurrence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.errors import ConfigError


def pipe_ends_s(compute_s: ArrayLike, communication_s: Sequence[float], width: int) -> NDArray[np.float64]:
    """Return when the sum of each step's gradients is complete, in seconds since the first step's begin.

    Worker i begins step t when it has ended step t-1 and the sum of step t-K is complete. Sums run one after another,
    each from the arrival of the last worker:

        r_i[t] = max(r_i[t-1], e[t-K]) + c_i[t],   e[t] = max(max_i r_i[t], e[t-1]) + m[t]

    With constant c and m it is `pipe_s`: c + m for a step with width 1, otherwise max(c, m), for any width. If
    they change, a wider pipeline lets an early worker run further ahead. Its mean step comes nearer to max(E[max_i
    c_i], E[m]), which is the lower bound. Update and codec belong to c or m. Derived here; the algorithm is
    li2018pipesgd's.

    Args:
        compute_s: (T, p) c of each step and worker.
        communication_s: (T,) m of each step.
        width: K, steps in flight.

    Returns:
        (T,) e.

    >>> pipe_ends_s([[1.0], [1.0], [1.0]], [1.0, 3.0, 1.0], width=2).tolist()
    [2.0, 5.0, 6.0]

    Raises:
        ConfigError: there are no steps, different numbers of them, or the width is not a whole number of 1 or more.
    """
    compute, communication = np.asarray(compute_s, float), np.asarray(communication_s, float)
    if compute.ndim != 2 or communication.shape != compute.shape[:1] or not compute.size:
        raise ConfigError(
            f"compute_s is {compute.shape} and communication_s {communication.shape}: give (steps, workers) and "
            "(steps,)"
        )
    if not isinstance(width, int) or width < 1:
        raise ConfigError(f"width={width}: give a whole number, 1 or more")
    ends = np.zeros(len(compute))
    ready, free_s = np.zeros(compute.shape[1]), 0.0
    for step, (seconds, sum_s) in enumerate(zip(compute, communication, strict=True)):
        due_s = ends[step - width] if step >= width else 0.0
        ready = np.maximum(ready, due_s) + seconds
        ends[step] = free_s = max(float(ready.max()), free_s) + sum_s
    return ends
