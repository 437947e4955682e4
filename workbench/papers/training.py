"""One training of a study: in virtual time where it is small, on real ranks where these are named."""

from __future__ import annotations

from typing import Any

from workbench.papers.pool_client import ranks
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulate import simulate
from workbench.trace.run import Run


def train(
    algorithm: Algorithm, problem: Problem, *, workers: int, launcher: str = "", network: Any = "free", compute: Any, **settings: Any
) -> Run:
    """Train on simulated workers, or on ranks, and return the run when it has ended.

    Args:
        launcher: where real ranks are, as `Cluster` has it; none are started where it is empty.
        network, compute: what things cost simulated workers; real ones have what they have.
        settings: those of `workbench.settings.Settings`.

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
