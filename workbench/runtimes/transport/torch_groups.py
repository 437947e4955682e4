"""gloo groups that are made during a run: of some of its ranks, or with a rank that joined later.

torch's `new_group` numbers groups by how many the process has made. Ranks that saw different failures do not agree on
that number. `new_group` also waits half an hour for a rank that has ended. Here ranks meet by a file in the run's
folder, under a name that all ranks know.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist

from workbench.runtimes.liveness.deadline import Deadline, on_a_thread

LIMIT = timedelta(minutes=30)  # of an operation; torch's default. Our own deadline is shorter
_KEPT: list[dist.ProcessGroup] = []  # never destroyed: a group that lost a peer would wait for it


@final
class GroupRendezvous:
    """A rendezvous at which ranks make groups, as often as all of them call `groups`.

    Args:
        path: a file that no other ranks use.
        rank: this rank.
        ranks: all ranks of the groups, by the numbers that messages name.
        timeout_s: limit for making a group; None: that of an operation.
    """

    def __init__(self, path: Path, rank: int, ranks: Sequence[int], timeout_s: float | None) -> None:
        self.store = dist.FileStore(str(path), len(ranks))
        self._ranks, self._place = list(ranks), list(ranks).index(rank)
        self._timeout = LIMIT if timeout_s is None else timedelta(seconds=timeout_s)
        self._num_made = 0

    def groups(self, number: int, deadline: Deadline) -> list[dist.ProcessGroup]:
        """Make that many groups; every rank calls it.

        If a rank ends meanwhile, this call ends, but the library's call continues.
        """
        names = [f"group-{self._num_made + more}" for more in range(number)]
        self._num_made += number
        made = on_a_thread(lambda: [self._group(name) for name in names], deadline.check)
        _KEPT.extend(made)
        return made

    def _group(self, name: str) -> dist.ProcessGroup:
        store, size, gloo = (
            dist.PrefixStore(f"{name}/", self.store),
            len(self._ranks),
            dist.ProcessGroup.BackendType.GLOO,
        )
        group, backend = (
            dist.ProcessGroup(store, self._place, size),
            dist.ProcessGroupGloo(store, self._place, size, self._timeout),
        )
        backend._set_default_timeout(LIMIT)  # a shorter one closes connections, and hides why others left
        group._set_default_backend(gloo)
        group._register_backend(torch.device("cpu"), gloo, backend)
        dist.distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(self._ranks)}
        return group
