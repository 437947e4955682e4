"""Ranks for a notebook: those it is lent, or its own."""

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

LENT = "WORKBENCH_RANKS"  # {"local:4": name of a cluster}: what whoever executes several notebooks lends them


def lent_key(num_workers: int, launcher: str) -> str:
    """How ranks are told apart that could be lent."""
    return f"{launcher}:{num_workers}"


@contextmanager
def ranks(num_workers: int, launcher: str = "local") -> Iterator[Cluster]:
    """A cluster for the cells of a `with`; started for it and stopped behind it, unless `workbench reproduce` lends one.

    Starting ranks takes seconds, so notebooks that are executed one after the other share them.

    Args:
        num_workers: how many ranks.
        launcher: where they are, as `Cluster` has it: "local", "torch", "emulated:1gbit", ...
    """
    from workbench.clusters import Cluster

    lent = _taken_up(json.loads(os.environ.get(LENT) or "{}").get(lent_key(num_workers, launcher)))
    if lent is None:
        with Cluster(num_workers, launcher=launcher, quiet=True) as cluster:
            yield cluster
        return
    try:
        yield lent
    finally:
        _give_back(lent)


def where_of(launcher: str) -> Where:
    """What a finding calls ranks of a launcher; in a Slurm job "local" ones are the job's, on its nodes: see `Lender`."""
    if launcher.startswith("emulated"):
        return "emulated network"
    own = launcher in {"local", "torch"} and not os.environ.get("SLURM_JOB_ID")
    return "local ranks" if own else "cluster"


def within_reach(launcher: str) -> str:
    """The launcher, or "local" where an emulated network is asked for without the root rights it needs; says so."""
    if not launcher.startswith("emulated") or os.geteuid() == 0:
        return launcher
    print(f"{launcher} needs root: local ranks instead, and what is claimed of a network is left out")
    return "local"


def _taken_up(name: str | None) -> Cluster | None:
    """The lent ranks; None where none are lent, or they died in the notebook before: this one starts its own."""
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


def _give_back(cluster: Cluster) -> None:
    """As idle as it was lent; ranks that still train, or are gone, end here, and whoever lends them starts others."""
    if cluster.state == "ready":
        cluster.detach()
    else:
        cluster.stop()
