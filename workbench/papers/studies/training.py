"""One training of a study: simulated, or on real ranks if a launcher is given."""

from __future__ import annotations

from typing import Any

from workbench.papers.pool_client import ranks
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulate import simulate
from workbench.trace.run import Run


def train(
    algorithm: Algorithm,
    problem: Problem,
    *,
    workers: int,
    launcher: str = "",
    network: Any = "free",
    compute: Any,
    **settings: Any,
) -> Run:
    """Train on simulated workers or on ranks. Return the run when it has ended.

    Args:
        algorithm: the algorithm.
        problem: what to train.
        workers: number of workers or ranks.
        launcher: where real ranks run, as in `Cluster`; empty: simulate.
        network, compute: costs of the simulation; real ranks ignore them.
        settings: fields of `workbench.settings.Settings`.

    Raises:
        Diverged: a simulated loss is not a finite number.
        WorkbenchError: a rank failed.
    """
    if not launcher:
        return simulate(algorithm, problem, workers=workers, network=network, compute=compute, **settings)
    with ranks(workers, launcher) as cluster:
        handle = cluster.train(algorithm, problem, **settings)
        handle.wait()
        return handle.run


__all__ = ["train"]
