"""A pool of ranks, which `workbench reproduce` starts once and lends to one notebook after the other.

`clusters.Cluster` imports torch, and most notebooks need no ranks of the pool. So it is imported only when ranks are
needed.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, final

from workbench import clusters
from workbench.clusters.slurm.queue import Allocation
from workbench.clusters.supervision import registry
from workbench.clusters.supervision.reaper import end_marked, start_reaper
from workbench.errors import ConfigError, LaunchError, WorkbenchError
from workbench.machine import environment
from workbench.papers.pool_client import POOL_VARIABLE
from workbench.papers.sizes import parse_ranks


@final
@dataclass(frozen=True, slots=True)
class _PooledCluster:
    """A detached cluster, and the reaper that ends it if this process is killed."""

    id: str
    mark: str
    reaper: subprocess.Popen[bytes]


@final
class RankPool:
    """Detached clusters. Each notebook's kernel attaches to them and detaches again.

    They end with `close()`. If this process is killed, a reaper ends them.

    Args:
        report: called with messages, such as an error at a start.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._clusters: dict[str, _PooledCluster] = {}
        self._refused: set[str] = set()

    @contextlib.contextmanager
    def lend(self, wanted: Collection[str]) -> Iterator[None]:
        """Offer ranks to notebooks within the block.

        Other ranks of the pool end, and ranks that have died are restarted.

        Args:
            wanted: keys such as "local:4". Ranks that cannot be started are not offered.
        """
        for key in [*self._clusters]:
            if key not in wanted:
                self._end(key)
        for key in wanted:
            self._ensure(key)
        offered = {key: self._clusters[key].id for key in wanted if key in self._clusters}
        with environment({POOL_VARIABLE: json.dumps(offered)}):
            yield

    def close(self) -> None:
        """End all ranks."""
        for key in [*self._clusters]:
            self._end(key)

    def _ensure(self, key: str) -> None:
        if key in self._clusters and not _is_idle(self._clusters[key].id):
            self._report(f"ranks {key} ended in the notebook before: they are restarted")
            self._end(key)
        if key in self._clusters or key in self._refused:
            return
        try:
            self._clusters[key] = _start(key)
        except (LaunchError, ConfigError) as error:
            self._refused.add(key)
            self._report(f"ranks {key} are not shared here, each notebook starts its own: {str(error).splitlines()[0]}")

    def _end(self, key: str) -> None:
        cluster = self._clusters.pop(key)
        try:
            with contextlib.suppress(ConfigError):  # a cluster that has ended has no entry
                registry.find_entry(cluster.id).clear()
            end_marked(cluster.mark)
        finally:
            cluster.reaper.kill()
            cluster.reaper.wait()


def _start(key: str) -> _PooledCluster:
    num_ranks, launcher = parse_ranks(key)
    if launcher.startswith("emulated"):
        raise LaunchError("an emulated network ends with the process that made it")
    if launcher == "local" and Allocation.here() is not None:
        launcher = "slurm"  # in a job, ranks run on all its nodes
    cluster = clusters.Cluster(num_ranks, launcher=launcher, name="lent", quiet=True)
    try:
        reaper = start_reaper(cluster.mark, str(registry.find_entry(cluster.id).folder))
        try:
            return _PooledCluster(cluster.detach(), cluster.mark, reaper)
        except BaseException:
            reaper.kill()
            reaper.wait()
            raise
    except BaseException:
        cluster.stop()
        raise


def _is_idle(name: str) -> bool:
    """Return True if all ranks are alive and idle; otherwise stop the cluster."""
    cluster: Any = None
    try:
        cluster = clusters.Cluster.attach(name, quiet=True)
        if cluster.state == "ready":
            cluster.detach()
            return True
    except WorkbenchError:
        pass
    if cluster is not None:
        cluster.stop()
    return False
