"""The ranks of a run admit a process in the place of a rank that left.

The process asks by a command to the run (`join`), on which all ranks agree as on any other command (decisions/0017).
Asynchronous ranks then have equal parameters. Synchronous ranks and ranks at their own pace finish the same step first,
and the process waits meanwhile: see `grow`. The lowest rank writes the run's position for the process (`JoinState`). All
ranks and the process form new groups of the library. Each reports to the lowest rank whether it has met all others, and
the lowest rank decides for all. Then the process continues with the lowest rank's next step. The minibatches that its
place has missed are not computed. If the process ends before that, the ranks continue as they were.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast, final

import torch

from workbench.errors import PeerFailed, Stalled
from workbench.ops import EndStep
from workbench.runtimes.checkpoint.rank_state import pack_state
from workbench.runtimes.control.commands import read_commands
from workbench.runtimes.control.controller import RunController
from workbench.runtimes.execution.endpoint import RankClock
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.liveness.deadline import Deadline
from workbench.runtimes.liveness.failure_detector import read_heartbeat, state_of
from workbench.runtimes.transport.base import Transport
from workbench.trace.files.atomic import atomic_file
from workbench.trace.store import read_info, update_run

WAITED_FOR = "all ranks to meet the one that joins"
MET, NOT_MET = "met", "not met"
COUNTS = ("num_texts", "num_shrinks", "num_taken")  # of `Membership`: they name the meetings


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JoinState:
    """The position of a run at the admission, for the process that joins.

    Attributes:
        step: the last step that the lowest rank has finished.
        state: the state of that rank's program after this step, as `pack_state` writes it.
        sync_point: the step before which all programs end next.
        paused_s: seconds of evaluations and pauses, which are not training.
        seconds, unix_s, origin_s: that rank's clock, the time of day, and the clock's origin.
        place: the position in the commands to the run (`RunController.place`).
        has_optimizer: the process also gets that rank's optimizer, and so its learning rate.
    """

    step: int
    state: dict[str, Any]
    sync_point: int
    paused_s: float
    seconds: float
    unix_s: float
    origin_s: float
    place: tuple[int, int]
    has_optimizer: bool = False

    @classmethod
    def of(cls, written: dict[str, Any]) -> JoinState:
        """Return the position from its written form."""
        welcome = written["welcome"]
        return cls(**{**welcome, "place": tuple(welcome["place"])})

    @classmethod
    def now(
        cls, clock: RankClock, controller: RunController, end: EndStep, sync_point: int, paused_s: float
    ) -> JoinState:
        """Return this rank's position."""
        when: dict[str, Any] = {"seconds": clock.now(), "unix_s": time.time(), "origin_s": clock.origin_s}
        return cls(
            step=end.step,
            state=pack_state(end.state),
            sync_point=sync_point,
            paused_s=paused_s + clock.pause_seconds(),
            place=controller.place,
            **when,
        )

    def begin(self, clock: RankClock, controller: RunController, *, trained: bool) -> float:
        """Set this rank's clock and commands.

        Return the lowest rank's origin on its clock, minus this rank's on its own.

        Args:
            trained: whether the ranks are in step. Then this rank has the lowest rank's optimizer, too.
        """
        clock.origin_s = time.perf_counter() - self.seconds - max(0.0, time.time() - self.unix_s)
        controller.catch_up(*self.place, trained=trained or self.has_optimizer)
        return self.origin_s - clock.origin_s


def place_of(rank: int, number: int) -> str:
    """Return the name under which all meet a process. `number`: earlier requests for that rank's place."""
    return f"join-{rank:05d}-{number}"


# -- on the ranks of the run ------------------------------------------------------------------------------------


def admit(
    rank: int,
    number: int,
    here: JoinState,
    interpreter: Interpreter,
    timeout_s: float,
    saved: dict[str, Any] | None = None,
) -> str | None:
    """Admit a process as that rank, or let it wait.

    Return the reason if it failed, else None. All ranks call it, with nothing in flight.

    Args:
        number: number of earlier requests for its place.
        saved: the state that it continues from (`take_checkpoint`). None: from the model alone; in a run that shrinks,
            the process waits until all ranks have finished the same step (`grow.admit_waiting`).
    """
    transport = interpreter.transport
    members = transport.members
    if members is None:
        return "this algorithm does not continue without a rank"
    members.departures(now=True)
    if not 0 <= rank < members.num_ranks or not members.has_left(rank):
        return f"rank {rank} has not left"
    if members.shrinks and saved is None:
        return None
    members.detector.forget(rank)
    place = place_of(rank, number)
    ranks = [other for other in range(members.num_ranks) if other == rank or not members.has_left(other)]
    leads = transport.rank == 0  # among the ranks of the run: the process that joins may be rank 0
    if leads:
        facts = {"ranks": ranks, "num_lanes": transport.num_lanes, "shrinks": members.shrinks}
        facts |= {"departures": members.record(), **{name: getattr(members, name) for name in COUNTS}}
        what = (
            {"model": interpreter.replica.model.state_dict()}
            if saved is None
            else {"saved": {**saved, "num_workers": len(ranks)}}
        )
        here = replace(here, has_optimizer=saved is not None)
        _write(members.folder / f"{place}.pt", {"welcome": asdict(here), **facts, **what})
    if not all_have_met(transport, (rank, number), ranks, timeout_s):
        return f"rank {rank} had ended again, or did not meet the others in {timeout_s:g} s"
    members.readmit(rank)
    if members.shrinks:
        members.accept(ranks)
    interpreter.reset_transport()
    if leads:
        folder = members.folder.parent
        row = {"rank": rank, "step": here.step + 1, "seconds": round(here.seconds - here.paused_s, 3)}
        update_run(folder, joined=[*read_info(folder).get("joined", []), row])
    return None


def _write(path: Path, value: dict[str, Any]) -> None:
    with atomic_file(path) as file:
        torch.save(value, file)


def all_have_met(transport: Transport, joining: tuple[int, int], ranks: list[int], timeout_s: float) -> bool:
    """Return True if all of `ranks` have met in new groups. The lowest rank collects the reports and decides.

    Args:
        joining: the rank that joins, and the number of earlier requests for its place.
    """
    (rank, number), members = joining, transport.members
    assert members is not None
    place, num_gone, lowest = (
        place_of(*joining),
        len(members.departures(now=True)),
        min(other for other in ranks if other != rank),
    )

    def failure() -> str | None:
        row = read_heartbeat(members.folder.parent, rank)
        asked_since = num_join_requests(members.folder.parent, rank) > number + 1  # by a process in its place
        gone = row is None or state_of(row) == "gone" or asked_since
        return (
            f"rank {rank} has ended again"
            if gone
            else "another rank has left"
            if len(members.departures()) > num_gone
            else None
        )

    def agreed(met: bool) -> bool:
        members.put(place, MET if met else NOT_MET)
        if members.rank == lowest:
            members.put(f"{place}-all", MET if all(wait_for_text(place, other) == MET for other in ranks) else NOT_MET)
        return wait_for_text(f"{place}-all", lowest) == MET

    def wait_for_text(what: str, other: int) -> str:
        deadline = Deadline(
            WAITED_FOR, members.failure if what != place else failure, 3 * timeout_s if what != place else timeout_s
        )
        try:
            while (text := members.text(what, other)) is None:
                deadline.pause()
        except (PeerFailed, Stalled):
            if what != place:  # the lowest rank decides; no rank continues if it has left
                raise
            return members.text(what, other) or NOT_MET
        return text

    deadline = Deadline(WAITED_FOR, failure, timeout_s)
    if not transport.can_admit:  # MPI
        from workbench.runtimes.elastic import mpi_admission  # initialises MPI

        return mpi_admission.admit(cast(Any, transport), rank, place, ranks, deadline, agreed)
    return transport.admit(ranks, members.folder / place, deadline, agreed)


def num_join_requests(folder: Path, rank: int) -> int:
    """Return how often a process has asked for that rank's place."""
    return sum(word.get("join") == rank for word in read_commands(folder))
