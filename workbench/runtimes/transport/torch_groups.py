"""Groups of gloo that are made in the midst of a run: of some of its ranks, or with one that came later.

torch's own `new_group` numbers groups by how many a process has made, which ranks that lived through different failures do not agree
on, and waits half an hour for a rank that has ended. Here ranks meet by a file in the run's folder, under a name that all of them know.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist

from workbench.runtimes.liveness.deadline import Deadline, on_a_thread

LIMIT = timedelta(minutes=30)  # of an operation, as torch has it: ours ends before
_KEPT: list[dist.ProcessGroup] = []  # what has lost a peer would wait for it where it is given back


@final
class Meeting:
    """Where these ranks make groups, as often as they all do.

    Args:
        path: a file that no others meet at.
        rank: one of them.
        ranks: which, by the numbers that messages name.
        timeout_s: how long a group's making may take; None: as long as an operation.
    """

    def __init__(self, path: Path, rank: int, ranks: Sequence[int], timeout_s: float | None) -> None:
        self.store = dist.FileStore(str(path), len(ranks))
        self._ranks, self._place = list(ranks), list(ranks).index(rank)
        self._timeout = LIMIT if timeout_s is None else timedelta(seconds=timeout_s)
        self._num_made = 0

    def groups(self, number: int, deadline: Deadline) -> list[dist.ProcessGroup]:
        """So many new groups; every one of the ranks calls it. A rank that is gone meanwhile ends it here, though not in the library."""
        names = [f"group-{self._num_made + more}" for more in range(number)]
        self._num_made += number
        made = on_a_thread(lambda: [self._group(name) for name in names], deadline.check)
        _KEPT.extend(made)
        return made

    def _group(self, name: str) -> dist.ProcessGroup:
        store, size, gloo = dist.PrefixStore(f"{name}/", self.store), len(self._ranks), dist.ProcessGroup.BackendType.GLOO
        group, backend = dist.ProcessGroup(store, self._place, size), dist.ProcessGroupGloo(store, self._place, size, self._timeout)
        backend._set_default_timeout(LIMIT)  # of messages: one that closes connections would hide why the others left
        group._set_default_backend(gloo)
        group._register_backend(torch.device("cpu"), gloo, backend)
        dist.distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(self._ranks)}
        return group
