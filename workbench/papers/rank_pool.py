"""Ranks that `workbench reproduce` starts once and lends to one notebook after the other.

`clusters.Cluster` is looked up when ranks are wanted: it imports torch, which most notebooks alone do not need of this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, final

from workbench import clusters
from workbench.clusters.slurm.queue import Allocation
from workbench.clusters.supervision import registry as register
from workbench.clusters.supervision.reaper import end_marked, start_warden
from workbench.errors import ConfigError, LaunchError, WorkbenchError
from workbench.papers.pool_client import LENT
from workbench.papers.sizes import parse_ranks


@final
@dataclass(frozen=True, slots=True)
class _Lent:
    """A cluster that nobody holds but for the time of a notebook, and who ends it if this process is killed."""

    id: str
    mark: str
    warden: subprocess.Popen[bytes]


@final
class Lender:
    """Clusters that are detached between notebooks, so that each notebook's kernel can take them up and let go of them.

    They end with `close()`, and by a warden when this process is killed.

    Args:
        say: is told what could not be started.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lent: dict[str, _Lent] = {}
        self._refused: set[str] = set()

    @contextlib.contextmanager
    def lend(self, wanted: Collection[str]) -> Iterator[None]:
        """Within it, notebooks are told of those ranks; what is not wanted any more ends, what died is started anew.

        Args:
            wanted: such as "local:4". What cannot be started here, a notebook is told nothing of.
        """
        for words in [*self._lent]:
            if words not in wanted:
                self._end(words)
        for words in wanted:
            self._have(words)
        before = os.environ.get(LENT)
        os.environ[LENT] = json.dumps({words: self._lent[words].id for words in wanted if words in self._lent})
        try:
            yield
        finally:
            os.environ.pop(LENT)
            if before is not None:
                os.environ[LENT] = before

    def close(self) -> None:
        """End all ranks."""
        for words in [*self._lent]:
            self._end(words)

    def _have(self, words: str) -> None:
        if words in self._lent and not _is_well(self._lent[words].id):
            self._say(f"ranks {words} did not outlive the notebook before: started anew")
            self._end(words)
        if words in self._lent or words in self._refused:
            return
        try:
            self._lent[words] = _start(words)
        except (LaunchError, ConfigError) as error:
            self._refused.add(words)
            self._say(f"ranks {words} are not shared here, each notebook sees to its own: {str(error).splitlines()[0]}")

    def _end(self, words: str) -> None:
        lent = self._lent.pop(words)
        try:
            with contextlib.suppress(ConfigError):  # what is gone has no entry
                register.find(lent.id).clear()
            end_marked(lent.mark)
        finally:
            lent.warden.kill()
            lent.warden.wait()


def _start(words: str) -> _Lent:
    num_ranks, launcher = parse_ranks(words)
    if launcher.startswith("emulated"):
        raise LaunchError("an emulated network ends with the process that made it")
    if launcher == "local" and Allocation.here() is not None:
        launcher = "slurm"  # in a job, ranks go to all its nodes
    cluster = clusters.Cluster(num_ranks, launcher=launcher, name="lent", quiet=True)
    try:
        warden = start_warden(cluster.mark, str(register.find(cluster.id).folder))
        try:
            return _Lent(cluster.detach(), cluster.mark, warden)
        except BaseException:
            warden.kill()
            warden.wait()
            raise
    except BaseException:
        cluster.stop()
        raise


def _is_well(name: str) -> bool:
    """Whether all ranks are there and idle; a cluster that is not is stopped."""
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
