"""Where ranks run: MPI engines for a notebook, and plain mpiexec for the command line.

`Cluster` needs ipyparallel and `mpi_install` does not. So each name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from workbench.errors import ConfigError

if TYPE_CHECKING:
    from workbench.clusters.cluster import Cluster, attach
    from workbench.clusters.run_handle import RunHandle
    from workbench.clusters.slurm.request import Slurm

__all__ = ["Cluster", "RunHandle", "Slurm", "attach"]

_HOMES = {  # no module may have one of these names: its import would hide the name
    "Cluster": "cluster",
    "RunHandle": "run_handle",
    "Slurm": "slurm.request",
    "attach": "cluster",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package == "workbench":
            raise
        raise ConfigError(f"clusters need {package}: pip install 'sgd-workbench[mpi,notebooks]'") from error
    value = getattr(module, name)
    globals()[name] = value
    return value
