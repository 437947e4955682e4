"""Which runs continue without a rank, and how: decided by the algorithm, the transport and `Settings.on_failure`."""

from __future__ import annotations

import os

from workbench.errors import ConfigError
from workbench.logs import LOG
from workbench.program import Algorithm, Elasticity, can_lose
from workbench.runtimes.liveness.failure_detector import FailureDetector
from workbench.runtimes.liveness.membership import FAULT_TOLERANT, Membership
from workbench.runtimes.transport.base import Transport

NEEDED = (  # where ranks survive a killed one
    "runtime='torch' on CPUs (`workbench train --runtime torch`, `Cluster(launcher='torch')`), or Open MPI 5 under "
    f"`mpiexec {' '.join(FAULT_TOLERANT)}`"
)
TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"  # torchrun sets it for its ranks


def enable_elasticity(transport: Transport, detector: FailureDetector, algorithm: Algorithm, on_failure: str) -> None:
    """Let a run continue without some ranks, if its transport and its algorithm can.

    Raises:
        ConfigError: the run is to shrink, and cannot.
    """
    num_ranks = transport.num_workers
    shrinks = transport.can_shrink and (on_failure == "shrink" or algorithm.elasticity.shrinks_unasked)
    without = [transport.outlives_peers and can_lose(algorithm, rank, num_ranks) for rank in range(num_ranks)]
    check_shrinks(algorithm, on_failure)
    if on_failure == "shrink" and not transport.can_shrink:
        raise ConfigError(
            f"{transport.library} ends all ranks when one ends: on_failure='shrink' needs {NEEDED}; else use "
            "on_failure='stop', and resume from the checkpoint"
        )
    ends_all = "torchrun" if TORCHRUN_VARIABLE in os.environ else "" if transport.can_shrink else transport.library
    if transport.rank == 0 and ends_all and tolerates_loss(algorithm, on_failure, num_ranks):
        LOG.warning("%s", why_all_end(algorithm, ends_all))
    if any(without) or shrinks:
        transport.members = Membership(detector, without.__getitem__, shrinks=shrinks)


def tolerates_loss(algorithm: Algorithm, on_failure: str, num_ranks: int) -> bool:
    """Return True if the run continues when some rank's process is killed, where the library allows it."""
    return num_ranks > 1 and any(can_be_replaced(algorithm, on_failure, rank, num_ranks) for rank in range(num_ranks))


def why_all_end(algorithm: Algorithm, starter: str) -> str:
    """Return the warning that a run ends with its first killed rank, though its algorithm could continue."""
    return (
        f"{starter} ends all ranks when one is killed, so this run of {type(algorithm).__name__} does not continue "
        f"without a worker. To continue, use {NEEDED}"
    )


def can_be_replaced(algorithm: Algorithm, on_failure: str, rank: int, num_ranks: int) -> bool:
    """Return True if the run continues when that rank's process is killed, and admits another in its place."""
    shrinks = algorithm.elasticity.shrinks and (on_failure == "shrink" or algorithm.elasticity.shrinks_unasked)
    return shrinks or can_lose(algorithm, rank, num_ranks)


def ranks_to_replace(algorithm: Algorithm, on_failure: str, num_ranks: int, runtime: str) -> list[int]:
    """Return the ranks that can be replaced.

    Raises:
        ConfigError: there are none.
    """
    found = [rank for rank in range(num_ranks) if can_be_replaced(algorithm, on_failure, rank, num_ranks)]
    if runtime == "mpi" and on_failure != "shrink":
        raise ConfigError(
            "--replace with --runtime mpi needs --on-failure shrink; algorithms with servers need --runtime torch"
        )
    if not found:
        raise ConfigError(
            "--replace is for ranks that the run can lose: workers of algorithms with servers on gloo, all of "
            "partial-all-reduce, and with --on-failure shrink all of the algorithms that can shrink"
        )
    return found


def check_shrinks(algorithm: Algorithm, on_failure: str) -> None:
    """Raise `ConfigError` if a run is to shrink, and its algorithm cannot."""
    if on_failure == "shrink" and not algorithm.elasticity.shrinks:
        if algorithm.elasticity == Elasticity.LOSES_WORKERS:
            raise ConfigError(
                f"{algorithm} does not shrink: it continues without a killed worker that serves nothing, with "
                "on_failure='stop' (leave on_failure out)"
            )
        raise ConfigError(
            f"{algorithm} cannot shrink to the ranks that remain: use on_failure='stop', and resume from the checkpoint"
        )
