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
    from workbench.clusters import Cluster, attach

    name = json.loads(os.environ.get(LENT) or "{}").get(lent_key(num_workers, launcher))
    if name:
        try:
            lent = attach(name, quiet=True)
        except WorkbenchError:  # its ranks died in the notebook before: this one starts its own
            pass
        else:
            try:
                yield lent
            finally:
                lent.detach()
            return
    with Cluster(num_workers, launcher=launcher, quiet=True) as cluster:
        yield cluster
