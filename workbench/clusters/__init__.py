"""Where ranks run: on engines that a notebook drives, or under plain mpiexec or torchrun for the command line.

Imports point down in this order:

- `cluster`: `Cluster`, the user's object.
- `start`, `status`, `run_handle`: its parts.
- `jobs`, `commands`, `waiting`, `output`, `failures`, `folder_results`: a run's arguments, commands, long waits, output
  of ranks, errors and results.
- `engines`: talks to ranks.
- `launchers`: start engines. `slurm`, `schedulers`, `local` and `emulated`: the places where engines run.
- `supervision`: which clusters and ranks exist; ends processes that remain.

`Cluster` needs ipyparallel, and `local/mpi_install` does not, so each name is imported when it is first used. May
import `plots` and the layers below it. Used by `kernel`, `experiments` and layers above. Begin with `cluster`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from workbench.errors import ConfigError

if TYPE_CHECKING:
    from workbench.clusters.cluster import Cluster, attach
    from workbench.clusters.run_handle import RunHandle
    from workbench.clusters.schedulers.request import BatchJob
    from workbench.clusters.slurm.request import Slurm

__all__ = ["BatchJob", "Cluster", "RunHandle", "Slurm", "attach"]

_HOMES = {  # no module may have one of these names: its import would hide the name
    "BatchJob": "schedulers.request",
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
