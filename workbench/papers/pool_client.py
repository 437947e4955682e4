"""Ranks for a notebook: lent by a pool, or started by the notebook."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.clusters import Cluster
    from workbench.papers.findings import Where
    from workbench.runtimes.rank.main import RuntimeName

POOL_VARIABLE = "WORKBENCH_RANKS"  # {"local:4": name of a cluster}: the ranks that a pool lends to notebooks


def pool_key(num_workers: int, launcher: str) -> str:
    """Return the key of ranks in a pool, such as "local:4"."""
    return f"{launcher}:{num_workers}"


@contextmanager
def ranks(num_workers: int, launcher: str = "local", runtime: RuntimeName | None = None) -> Iterator[Cluster]:
    """A cluster for a `with` block. It is started and stopped here, unless `workbench reproduce` lends one.

    A start takes seconds, so notebooks that are executed one after the other share ranks.

    Args:
        num_workers: number of ranks.
        launcher: where the ranks run, as in `Cluster`: "local", "torch", "emulated:1gbit", ...
        runtime: "torch" or "mpi"; a pool lends ranks of its default runtime only.
    """
    from workbench.clusters import Cluster

    offered = json.loads(os.environ.get(POOL_VARIABLE) or "{}")
    borrowed = None if runtime else _borrow(offered.get(pool_key(num_workers, launcher)))
    if borrowed is None:
        with Cluster(num_workers, launcher=launcher, runtime=runtime, quiet=True) as cluster:
            yield cluster
        return
    try:
        yield borrowed
    finally:
        _return(borrowed)


def where_of(launcher: str, *, slept: bool = False) -> Where:
    """Return a finding's `where` for ranks of a launcher. In a Slurm job, "local" ranks run on the job's nodes.

    Args:
        launcher: where the ranks run, as in `Cluster`.
        slept: whether the ranks sleep their compute time.
    """
    if launcher.startswith("emulated"):
        return "emulated network, slept compute" if slept else "emulated network"
    if launcher in {"local", "torch"} and not os.environ.get("SLURM_JOB_ID"):
        return "local ranks, slept compute" if slept else "local ranks"
    return "cluster, slept compute" if slept else "cluster"


def within_reach(launcher: str) -> str:
    """Return the launcher; "local", with a message, if it is an emulated network and this user is not root."""
    if not launcher.startswith("emulated") or os.geteuid() == 0:
        return launcher
    print(f"{launcher} needs root: local ranks are used instead, and claims about a network are left out")
    return "local"


def _borrow(name: str | None) -> Cluster | None:
    """Attach to lent ranks. None if there are none or they have died; then the notebook starts its own."""
    from workbench.clusters import Cluster

    if not name:
        return None
    try:
        cluster = Cluster.attach(name, quiet=True)
    except WorkbenchError:
        return None
    if cluster.state == "ready":
        return cluster
    cluster.stop()
    return None


def _return(cluster: Cluster) -> None:
    """Detach from idle ranks. Ranks that still train or are lost end here, and the pool restarts them."""
    if cluster.state == "ready":
        cluster.detach()
    else:
        cluster.stop()
