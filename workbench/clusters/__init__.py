"""Where ranks live: MPI engines behind a notebook, and plain mpiexec for the command line.

`Cluster` needs ipyparallel, `mpi_install` does not: so nothing is imported before it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.clusters.cluster import Cluster
    from workbench.clusters.handle import RunHandle

__all__ = ["Cluster", "RunHandle"]


def __getattr__(name: str) -> Any:
    if name == "Cluster":
        from workbench.clusters.cluster import Cluster

        return Cluster
    if name == "RunHandle":
        from workbench.clusters.handle import RunHandle

        return RunHandle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
