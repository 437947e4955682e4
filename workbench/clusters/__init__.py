"""Where ranks live: MPI engines behind a notebook, and plain mpiexec for the command line.

`Cluster` needs ipyparallel, `mpi_install` does not: so nothing is imported before it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from workbench.errors import ConfigError

if TYPE_CHECKING:
    from workbench.clusters.cluster import Cluster
    from workbench.clusters.detached import attach
    from workbench.clusters.run_handle import RunHandle
    from workbench.clusters.slurm.request import Slurm

__all__ = ["Cluster", "RunHandle", "Slurm", "attach"]

_HOMES = {  # no module is called like a name of these: importing it would hide the name
    "Cluster": "cluster",
    "RunHandle": "run_handle",
    "Slurm": "slurm.request",
    "attach": "detached",
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
    value = globals()[name] = getattr(module, name)  # in place of the module of that name, which its import put there
    return value
