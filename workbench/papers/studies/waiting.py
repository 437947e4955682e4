"""When ranks end their steps if messages take no time: they wait for all others, for their neighbours, or for none."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workbench.topologies import Graph

Floats = NDArray[np.float64]


def last_end_of_sums(compute_s: Floats) -> float:
    """Return when the last step ends if all ranks wait for the slowest one in each step.

    Args:
        compute_s: seconds of each step (row) of each rank (column).

    >>> last_end_of_sums(np.array([[1.0, 3.0], [2.0, 1.0]]))
    5.0
    """
    return float(compute_s.max(axis=1).sum())


def last_end_of_gossip(compute_s: Floats, graph: Graph) -> float:
    """Return when the last rank ends if each waits for its neighbours only, as in D-PSGD.

    Rank i ends step t when it has computed it, and its neighbours j have ended the step before, whose parameters it averages:
    E_i(t) = max(E_i(t-1) + c_i(t), max_j E_j(t-1)). So a neighbour that is late by less than a step's compute costs nothing.

    Args:
        compute_s: as in `last_end_of_sums`.
        graph: who receives from whom.

    >>> from workbench.topologies import Ring
    >>> late = np.ones((2, 5))
    >>> late[0, 0] = 3.0
    >>> last_end_of_gossip(late, Ring()), last_end_of_sums(late)
    (4.0, 4.0)
    >>> late[1] = [1.0, 1.0, 3.0, 1.0, 1.0]
    >>> last_end_of_gossip(late, Ring()), last_end_of_sums(late)
    (4.0, 6.0)
    """
    num_steps, num_ranks = compute_s.shape
    ends = np.zeros(num_ranks)
    for step in range(num_steps):
        heard = graph.mixing(num_ranks, step) > 0
        ends = np.maximum(ends + compute_s[step], np.where(heard, ends, 0.0).max(axis=1))
    return float(ends.max())


def last_end_alone(compute_s: Floats) -> float:
    """Return when the last rank ends if none waits for another one.

    >>> last_end_alone(np.array([[1.0, 3.0], [2.0, 1.0]]))
    4.0
    """
    return float(compute_s.sum(axis=0).max())
