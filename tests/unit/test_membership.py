"""A message between two ranks, one of which has left: nothing passes for it where the run cannot go on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.errors import PeerFailed
from workbench.runtimes.liveness.membership import Membership
from workbench.runtimes.transport.base import Deadline, Handle
from workbench.runtimes.transport.fault_tolerant import PeerHandle


class Never(Handle):
    """A receive in which nothing comes, and of which the library says nothing."""

    def poll(self) -> bool:
        return False

    def wait(self, deadline: Deadline) -> None:
        raise AssertionError("it would wait for ever")


@pytest.mark.parametrize("losable", [True, False])
def test_a_message_of_one_that_has_left(tmp_path: Path, losable: bool) -> None:
    """Or a worker would take memory in which nothing came for its server's parameters, and go on with that."""
    detector: Any = SimpleNamespace(
        rank=0,
        num_ranks=3,
        folder=tmp_path,
        announce=None,
        end_of=lambda rank: "its process has ended" if rank == 1 else None,
    )
    handle = PeerHandle(Membership(detector, lambda rank: losable), 1, Never)
    if losable:
        assert handle.poll() and handle.finished_s is not None
    else:
        with pytest.raises(
            PeerFailed, match=r"rank 1 has left \(its process has ended\), and no process can take its place"
        ):
            handle.poll()
        assert handle.finished_s is None
