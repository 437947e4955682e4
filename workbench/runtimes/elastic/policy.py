"""Which runs continue without a rank, and how: decided by the algorithm, the transport and `Settings.on_failure`."""

from __future__ import annotations

from workbench.errors import ConfigError
from workbench.program import Algorithm, can_lose
from workbench.runtimes.liveness.failure_detector import FailureDetector
from workbench.runtimes.liveness.membership import FAULT_TOLERANT, Membership
from workbench.runtimes.transport.base import Transport


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
            f"{transport.library} ends all ranks when one ends: on_failure='shrink' needs runtime='torch' on CPUs, "
            f"or Open MPI 5 under `mpiexec {' '.join(FAULT_TOLERANT)}`; else use on_failure='stop', and resume from "
            "the checkpoint"
        )
    if any(without) or shrinks:
        transport.members = Membership(detector, without.__getitem__, shrinks=shrinks)


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
        raise ConfigError(
            f"{algorithm} cannot shrink to the ranks that remain: use on_failure='stop', and resume from the checkpoint"
        )
