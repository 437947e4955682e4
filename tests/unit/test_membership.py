"""A message between two ranks, one of which has left: it completes without content, or a run that cannot continue ends."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.algorithms import AsyncSGD, BackupSGD, NoCommunication, PartialAllReduce, SynchronousSGD, find
from workbench.algorithms import names as names_of_algorithms
from workbench.errors import ConfigError, PeerFailed
from workbench.program import Algorithm, Elasticity
from workbench.runtimes.elastic.policy import check_shrinks, enable_elasticity
from workbench.runtimes.liveness.membership import Membership
from workbench.runtimes.transport.base import Deadline, Handle
from workbench.runtimes.transport.fault_tolerant import PeerHandle

ROOT = Path(__file__).parents[2]


class Never(Handle):
    """A receive in which nothing comes, and of which the library says nothing."""

    def poll(self) -> bool:
        return False

    def wait(self, deadline: Deadline) -> None:
        raise AssertionError("it would wait forever")


@pytest.mark.parametrize("losable", [True, False])
def test_a_message_of_one_that_has_left(tmp_path: Path, losable: bool) -> None:
    """Otherwise a worker would take empty memory for its server's parameters, and continue with that."""
    detector: Any = SimpleNamespace(
        rank=0,
        num_ranks=3,
        folder=tmp_path,
        announce=None,
        end_of=lambda rank: "its process has ended" if rank == 1 else None,
        step_of=lambda rank: 7,
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


@pytest.mark.parametrize(
    ("algorithm", "warns"),
    [
        (BackupSGD(backups=1), True),
        (AsyncSGD(), True),
        (NoCommunication(), True),
        (PartialAllReduce(), True),
        (SynchronousSGD(), False),
    ],
    ids=str,
)
def test_a_library_that_ends_all_ranks_is_named_at_the_start(
    algorithm: Algorithm, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Only for algorithms that would continue elsewhere, and by one rank."""
    for rank in range(3):
        transport: Any = SimpleNamespace(
            rank=rank, num_workers=3, can_shrink=False, outlives_peers=False, library="MPICH 4.2", members=None
        )
        enable_elasticity(transport, SimpleNamespace(), algorithm, "stop")  # type: ignore[arg-type]
        assert transport.members is None
    expected = ["MPICH 4.2 ends all ranks when one is killed"] * warns
    assert [record.message.partition(", so")[0] for record in caplog.records] == expected
    assert all("--runtime torch" in record.message and "--with-ft ulfm" in record.message for record in caplog.records)


def test_the_page_on_failures_says_of_each_algorithm_what_a_killed_rank_does() -> None:
    """Its table has a row for each kind, and no algorithm is missing or in two rows."""
    page = (ROOT / "docs" / "how-to" / "failures-and-resume.md").read_text()
    table = page.partition("| algorithm | a killed rank | how to ask for it |")[2].partition("\n\n")[0]
    said: dict[str, Elasticity] = {}
    for line in table.splitlines()[2:]:
        names, happens, how = (cell.strip() for cell in line.strip("|").split("|"))
        continues = Elasticity.LOSES_WORKERS if "not rank 0" in happens else Elasticity.SHRINKS_ALWAYS
        kind = {"nothing to do": continues, '`on_failure="shrink"`': Elasticity.SHRINKS}.get(how, Elasticity.NONE)
        for name in re.findall(r"`(\w+)`", names):
            assert name not in said
            said[name] = kind
    algorithms = [find(name)() for name in names_of_algorithms()]
    assert said == {type(each).__name__: each.elasticity for each in algorithms}


def test_a_refusal_says_what_continues() -> None:
    with pytest.raises(ConfigError, match="continues without a killed worker that serves nothing"):
        check_shrinks(BackupSGD(backups=1), "shrink")
