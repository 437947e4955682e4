"""Simulated workers whose process ends: the check of `failures=`, and the failures themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from workbench.errors import ConfigError
from workbench.program import Algorithm, can_lose
from workbench.runtimes.simulator.state import SimCluster


def check_failures(algorithm: Algorithm, num_ranks: int, failures: Mapping[int, float]) -> None:
    """Raise `ConfigError` unless the algorithm can lose these ranks at these virtual times."""
    for rank, at_s in failures.items():
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < num_ranks:
            raise ConfigError(
                f"failures={dict(failures)}: there is no rank {rank!r} among {num_ranks}; choose 1 to {num_ranks - 1}"
            )
        if not can_lose(algorithm, rank, num_ranks):
            raise ConfigError(
                f"failures={dict(failures)}: {algorithm} on {num_ranks} ranks cannot continue without rank {rank}: "
                "choose a worker that serves nothing, not rank 0"
            )
        if not isinstance(at_s, int | float) or isinstance(at_s, bool) or not math.isfinite(at_s) or at_s < 0:
            raise ConfigError(
                f"failures={dict(failures)}: rank {rank} fails at {at_s!r}; give finite virtual seconds, 0 or more"
            )


def plan_failures(cluster: SimCluster, failures: Mapping[int, float]) -> None:
    """End these ranks' processes at their virtual times."""
    cluster.fabric.may_lose = bool(failures)
    for rank, at_s in failures.items():
        cluster.clock.at(float(at_s), lambda rank: _lose(cluster, rank), rank)


def _lose(cluster: SimCluster, rank: int) -> None:
    """End a rank's process, unless its programs have ended."""
    lost = [process for process in cluster.processes if process.worker.rank == rank]
    for process in lost:
        process.halt()
    if lost:
        cluster.fabric.leave(rank)


def departures_of(cluster: SimCluster) -> list[dict[str, Any]]:
    """The ranks that have left, as a run's record holds them."""
    return [
        {"rank": rank, "seconds": seconds, "why": "as was planned"} for rank, seconds in cluster.fabric.gone.items()
    ]
