"""A process takes the place of a rank that has left a run, which went on without it.

It says so by a word to the run (`join`), at which all come to rest as at any other (decisions/0017): of methods with servers every worker
then holds the same parameters; for those in step see `grow`. There the lowest rank writes down what the one that comes must know; all that
are there and it meet in new groups of the library; and when each has met the others, which the lowest rank asks and tells, they go on, it
with the next step of that rank. The minibatches between are not computed. Where it is gone again by then, they go on as they were.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from workbench.errors import ConfigError, PeerFailed, Stalled
from workbench.ops import EndStep
from workbench.program import Context
from workbench.runtimes.endpoint import Ledger
from workbench.runtimes.helm import ASK_AGAIN, Helm
from workbench.runtimes.interpreter import Interpreter
from workbench.runtimes.interrupts import heard_once
from workbench.runtimes.membership import FOLDER, Membership, can_be_replaced, left_name
from workbench.runtimes.patience import Patience
from workbench.runtimes.presence import Presence, present, state_of
from workbench.runtimes.transport import Transport
from workbench.runtimes.words import read_words, write_word
from workbench.runtimes.worker import Worker, share_cores
from workbench.trace.recorder import FileRecorder, metrics_name
from workbench.trace.store import read_info, update_run
from workbench.trace.tail import last_step_row

WHAT = "all ranks to meet the one that comes"
MET, NOT_MET = "met", "not met"
COUNTS = ("num_texts", "num_shrinks", "num_taken")  # of `Membership`: by which names all meet


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Where a run is that comes to rest, as the rank that comes must know it.

    Attributes:
        step: the last that the lowest rank has finished.
        state: of its program there: versions of the servers' shards.
        rest: the step before which all next come to rest.
        paused_s: of evaluations and while the run was held, which are not training.
        seconds, unix_s, origin_s: of training, on the clock, and where that rank's clock stood at the run's beginning.
        place: of the words to the run (`Helm.place`).
    """

    step: int
    state: tuple[int, ...]
    rest: int | None
    paused_s: float
    seconds: float
    unix_s: float
    origin_s: float
    place: tuple[int, int]

    @classmethod
    def of(cls, told: dict[str, Any]) -> Welcome:
        """As it was written down."""
        welcome = told["welcome"]
        return cls(**{**welcome, "state": tuple(welcome["state"]), "place": tuple(welcome["place"])})

    @classmethod
    def now(cls, ledger: Ledger, helm: Helm, end: EndStep, rest: int | None, paused_s: float) -> Welcome:
        """This rank's."""
        when = {"seconds": ledger.now(), "unix_s": time.time(), "origin_s": ledger.origin_s}
        return cls(step=end.step, state=tuple(map(int, end.state)), rest=rest, paused_s=paused_s + ledger.held(), place=helm.place, **when)

    def begin(self, ledger: Ledger, helm: Helm, *, trained: bool) -> float:
        """Be there (`trained`: with that rank's optimizer); its origin on its clock, minus ours on ours."""
        ledger.origin_s = time.perf_counter() - self.seconds - max(0.0, time.time() - self.unix_s)
        helm.catch_up(*self.place, trained=trained)
        return self.origin_s - ledger.origin_s


def place_of(rank: int, number: int) -> str:
    """The name under which a rank is met that asks the so manieth time."""
    return f"join-{rank:05d}-{number}"


# -- those that are there --------------------------------------------------------------------------------------


def admit(
    rank: int, number: int, here: Welcome, interpreter: Interpreter, timeout_s: float, saved: dict[str, Any] | None = None
) -> str | None:
    """Every rank that is there calls it, with all programs ended. Why that one was not let in, or None.

    Args:
        number: which time it asks.
        saved: what it goes on with (`take_checkpoint`); None: with the model.
    """
    transport = interpreter.transport
    members = transport.members
    if members is None:
        return "this method does not go on without a rank"
    members.look(now=True)
    if not 0 <= rank < members.num_ranks or not members.has_left(rank):
        return f"rank {rank} has not left"
    members.presence.forget(rank)
    place = place_of(rank, number)
    ranks = [other for other in range(members.num_ranks) if other == rank or not members.has_left(other)]
    leads = transport.rank == 0  # of those that are there: the one that comes may be rank 0
    if leads:
        facts = {"ranks": ranks, "num_lanes": transport.num_lanes, "shrinks": members.shrinks}
        facts |= {"departures": members.record(), **{name: getattr(members, name) for name in COUNTS}}
        what = {"model": interpreter.replica.model.state_dict()} if saved is None else {"saved": {**saved, "num_workers": len(ranks)}}
        _write(members.folder / f"{place}.pt", {"welcome": asdict(here), **facts, **what})
    if not _met(members, transport.admit, (rank, number), ranks, timeout_s):
        return f"rank {rank} was gone again, or did not meet the others in {timeout_s:g} s"
    members.takes_back(rank)
    if members.shrinks:
        members.accept(ranks)
    interpreter.renew()
    if leads:
        folder = members.folder.parent
        row = {"rank": rank, "step": here.step + 1, "seconds": round(here.seconds - here.paused_s, 3)}
        update_run(folder, joined=[*read_info(folder).get("joined", []), row])
    return None


def _write(path: Path, value: dict[str, Any]) -> None:
    draft = path.with_suffix(".new")
    with draft.open("wb") as file:
        torch.save(value, file)
    draft.rename(path)


def _met(members: Membership, meet: Callable[..., bool], who: tuple[int, int], ranks: list[int], timeout_s: float) -> bool:
    """Whether all of `ranks` have met in new groups: the lowest asks each, and what it says counts for all.

    Args:
        who: the rank that comes, and which time it asks.
    """
    rank, number = who
    place, num_gone, lowest = place_of(*who), len(members.look(now=True)), min(other for other in ranks if other != rank)

    def failure() -> str | None:
        row = present(members.folder.parent, rank)
        asked_since = _times_asked(members.folder.parent, rank) > number + 1  # by a process in its place
        gone = row is None or state_of(row) == "gone" or asked_since
        return f"rank {rank} is gone again" if gone else "another has left" if len(members.look()) > num_gone else None

    def agreed(met: bool) -> bool:
        members.put(place, MET if met else NOT_MET)
        if members.rank == lowest:
            members.put(f"{place}-all", MET if all(said(place, other) == MET for other in ranks) else NOT_MET)
        return said(f"{place}-all", lowest) == MET

    def said(what: str, other: int) -> str:
        patience = Patience(WHAT, members.failure if what != place else failure, 3 * timeout_s if what != place else timeout_s)
        try:
            while (text := members.text(what, other)) is None:
                patience.pause()
        except (PeerFailed, Stalled):
            if what != place:  # the lowest decides, and nobody goes on without it
                raise
            return members.text(what, other) or NOT_MET
        return text

    return meet(ranks, members.folder / place, Patience(WHAT, failure, timeout_s), agreed)


# -- the one that comes ----------------------------------------------------------------------------------------


def rejoin(job: Any, rank: int) -> dict[str, Any]:
    """Train as that rank, which has left the run of `job.folder`, from where it is until its end.

    Args:
        job: as the other ranks were given it (`launch.Job`).

    Returns:
        As `run_rank`.

    Raises:
        ConfigError: the run goes on with that rank, or not without it, or is over.
        Stalled: it did not come to rest in time.
    """
    from workbench.runtimes.launch import as_rank  # which imports this
    from workbench.runtimes.torch_dist import TorchTransport

    folder, timeout_s, step = Path(job.folder), job.settings.timeout_s, [-1]
    num_ranks = int(read_info(folder)["num_workers"])
    if job.runtime != "torch" or not can_be_replaced(job.algorithm, job.settings.on_failure, rank, num_ranks):
        raise ConfigError(f"{job.algorithm} on {num_ranks} ranks of {job.runtime} does not go on without rank {rank}: resume it instead")
    worker = Worker(job.algorithm, job.problem, job.settings, rank, num_ranks, torch.device("cpu"))
    times = _wait_until_left(folder, rank, timeout_s)
    others = [row for other in range(num_ranks) if other != rank and (row := present(folder, other)) and state_of(row) != "gone"]
    share_cores(job.settings.threads, sum(row["host"] == socket.gethostname() for row in others) + 1)
    with heard_once() as leave, Presence(folder, rank, num_ranks, step=lambda: step[0]) as presence:
        number, saved = _ask(folder, rank, timeout_s)
        ranks, shrinks = saved["ranks"], saved["shrinks"]
        transport: Transport = TorchTransport.late(rank, num_ranks, saved["num_lanes"], timeout_s)
        members = Membership(presence, lambda other: job.algorithm.goes_on_without(other, num_ranks), shrinks=shrinks)
        transport.members = members
        for name in COUNTS:
            setattr(members, name, saved[name])
        members.num_taken[rank] = times
        members.hear_of(saved["departures"], saved["welcome"]["seconds"])
        if shrinks:
            members.accept(ranks)
        if not _met(members, transport.admit, (rank, number), ranks, timeout_s):
            raise PeerFailed(f"rank {rank} was not taken in: one of ranks {ranks} left meanwhile, or did not come. Try again")
        return as_rank(transport, presence, step, leave, partial(_train, job, worker, transport, presence, saved, step))


def _train(job: Any, worker: Worker, transport: Transport, presence: Presence, told: dict[str, Any], at: list[int]) -> dict[str, Any]:
    from workbench.runtimes.grow import begin_as
    from workbench.runtimes.launch import record_departures
    from workbench.runtimes.session import Session  # which import this

    folder, settings = presence.folder, job.settings
    header = {"host": socket.gethostname(), "pid": os.getpid(), "device": str(transport.device), "threads": torch.get_num_threads()}
    header |= {"origin_s": time.perf_counter(), "unix_s": time.time()}
    recorder = FileRecorder(folder, presence.rank, header, settings.trace_steps, goes_on=True)
    how: dict[str, Any] = {"timeout_s": settings.timeout_s, "progress": settings.progress, "presence": presence}
    interpreter = Interpreter(transport, worker.replica, recorder, worker.minibatch, **how)
    if (before := last_step_row(folder / metrics_name(presence.rank))) is not None:
        interpreter.ledger.bytes_sent = float(before["bytes_sent"])  # a rank's, whichever process has it
    try:
        ctx = Context(transport.rank, transport.num_workers, num_steps=worker.num_steps, layout=worker.replica.layout, seed=settings.seed)
        ctx.may_shrink = "saved" in told
        if "saved" in told:
            begin_as(worker, ctx, told["saved"], job.algorithm, interpreter)
            late = replace(Welcome.of(told), rest=worker.num_steps)
        else:
            worker.replica.model.load_state_dict(told["model"])
            late = Welcome.of(told)
            ctx.first_step, ctx.resumed = late.step + 1, late.state or None
        helm = Helm(job.algorithm, settings, interpreter, recorder, folder, job.runtime)
        summary = Session(helm, worker, interpreter, recorder, folder, stop_after=job.stop_after).run(ctx, at, late)
        record_departures(folder, transport)
        return summary
    finally:
        interpreter.close()
        worker.replica.close()
        recorder.close()


def _wait_until_left(folder: Path, rank: int, timeout_s: float) -> int:
    """How often that rank has left: until the others say that it did."""
    patience = Patience(f"the run {folder.name} to go on without rank {rank}", lambda: _over(folder), timeout_s)
    while True:
        row, times = present(folder, rank), 0
        while (folder / FOLDER / left_name(rank, times)).exists():
            times += 1
        if row is not None and state_of(row) != "gone":
            raise ConfigError(
                f"rank {rank} of the run {folder.name} is there (process {row['pid']} on {row['host']}): nobody can take its place"
            )
        if times:
            return times
        patience.pause()


def _ask(folder: Path, rank: int, timeout_s: float) -> tuple[int, dict[str, Any]]:
    """Ask the run to be let in, until it says where it is; which time that was, and what it says.

    Raises:
        ConfigError: why it lets nobody in.
    """
    patience = Patience("the run to come to rest", lambda: _over(folder), timeout_s)
    number = -1
    while number < 0 or not (path := folder / FOLDER / f"{place_of(rank, number)}.pt").exists():
        if number < 0 or (refused := _answer(folder, rank, number)) == ASK_AGAIN:
            number = _times_asked(folder, rank)
            write_word(folder, {"join": rank})
        elif refused:
            raise ConfigError(f"the run {folder.name} did not let rank {rank} in: {refused}")
        patience.pause()
    told: dict[str, Any] = torch.load(path, weights_only=True)
    return number, told


def _times_asked(folder: Path, rank: int) -> int:
    return sum(word.get("join") == rank for word in read_words(folder))


def _answer(folder: Path, rank: int, number: int) -> str:
    """Why the so many-th time that a rank asked was in vain, as the run's record says; "" so far."""
    rows = [row for row in read_info(folder).get("steering", ()) if row.get("join") == rank]
    return str(rows[number].get("refused", "")) if number < len(rows) else ""


def _over(folder: Path) -> str | None:
    return None if (folder / FOLDER).is_dir() else f"the run {folder.name} is over, or its ranks do not go on without each other"
