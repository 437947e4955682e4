"""Taking up a cluster that was detached."""

from __future__ import annotations

from workbench.clusters.cluster import Cluster


def attach(name: str, *, quiet: bool = False) -> Cluster:
    """Take up a cluster that was detached, with the training that it was left with: see `Cluster.attach`.

    Args:
        name: its id, or the beginning of one that no other has.
        quiet: print nothing.

    Raises:
        ConfigError: there is none of that name; names those there are.
        LaunchError: somebody holds it, or its processes have ended.
    """
    return Cluster.attach(name, quiet=quiet)
