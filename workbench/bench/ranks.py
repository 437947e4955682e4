"""Ranks for a benchmark: real processes that call functions, on this machine or on hosts of an emulated network."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from workbench.runtimes.rank.main import RuntimeName

if TYPE_CHECKING:
    from workbench.clusters import Cluster
    from workbench.clusters.local.mpi_install import MPIInstall
    from workbench.runtimes.transport.base import Transport

CALL_S = 900.0


@final
@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of one world and one runtime."""

    cluster: Cluster
    runtime: RuntimeName
    folder: Path

    @property
    def number(self) -> int:
        return self.cluster.num_ranks

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float = CALL_S) -> list[Any]:
        """Call `function(runtime, folder, *args)` on all ranks; return its results in order of rank.

        `function` must be in a module, because ranks import it. It must call `world(runtime, folder)` first.
        """
        view = self.cluster.client[:]
        result = view.apply_async(function, self.runtime, str(self.folder), *args)
        return list(result.get(timeout_s))


@contextmanager
def ranks(number: int, runtime: RuntimeName, launcher: str = "local", mpi: MPIInstall | None = None) -> Iterator[Ranks]:
    """Start ranks, with this MPI if given, and end them after the block.

    Raises:
        LaunchError: the ranks cannot be started here; the message says why.
    """
    from workbench.clusters import Cluster

    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        Cluster(number, runtime=runtime, launcher=launcher, mpi=mpi, quiet=True) as cluster,
    ):
        yield Ranks(cluster, runtime, Path(folder))


def world(runtime: RuntimeName, folder: str, timeout_s: float = 120.0) -> Transport:
    """Return this rank's transport to all ranks; the same object at every call."""
    from workbench.runtimes.rank.main import make_transport

    return make_transport(runtime, timeout_s, Path(folder))


def bind(rank: int, number: int) -> int:
    """Bind a rank's threads to its share of the cores, as cluster launchers do. Return the number of cores.

    Without binding, the compute threads of two ranks are often put on one core, and messages are handled on another.
    """
    all_cores = os.cpu_count() or 1  # all cores, even if this process is bound
    share = max(1, all_cores // number)
    if hasattr(os, "sched_setaffinity"):
        cores = {(rank * share + core) % all_cores for core in range(share)}
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended, or the cores are not available
                os.sched_setaffinity(int(task.name), cores)
    return share
