"""Ranks for a benchmark: real processes, on this machine or on hosts of an emulated network, which call functions."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from workbench.runtimes.launch import RuntimeName

if TYPE_CHECKING:
    from workbench.clusters import Cluster
    from workbench.runtimes.transport import Transport

CALL_S = 900.0


@final
@dataclass(frozen=True, slots=True)
class Ranks:
    """Of one world and one runtime."""

    cluster: Cluster
    runtime: RuntimeName
    folder: Path

    @property
    def number(self) -> int:
        return self.cluster.num_ranks

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float = CALL_S) -> list[Any]:
        """`function(runtime, folder, *args)` on all ranks at once; its results in order of rank.

        `function` is a module's own: ranks import it. It begins with `world(runtime, folder)`.
        """
        view = self.cluster.client[:]
        result = view.apply_async(function, self.runtime, str(self.folder), *args)
        return list(result.get(timeout_s))


@contextmanager
def ranks(number: int, runtime: RuntimeName, launcher: str = "local") -> Iterator[Ranks]:
    """Start them, and end them behind the block.

    Raises:
        LaunchError: they cannot be had here; says why.
    """
    from workbench.clusters import Cluster

    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Cluster(number, runtime=runtime, launcher=launcher, quiet=True) as cluster:
        yield Ranks(cluster, runtime, Path(folder))


def world(runtime: RuntimeName, folder: str, timeout_s: float = 120.0) -> Transport:
    """On a rank: the world that all ranks of it make; the same at every call."""
    from workbench.runtimes.launch import make_transport

    return make_transport(runtime, timeout_s, Path(folder))
