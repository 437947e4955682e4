"""Cached schedules of collectives: in a timing-only simulation a collective makes the same requests every time.

The requests of a rank of a ring depend only on its rank, the number of ranks and the size of the value
(`Collective.fixed_schedule`). `record_schedule` runs its sub-program once, answers every request at once, and records
the requests. A `SchedulePlayer` then repeats that schedule in virtual time: the same messages at the same times,
without a generator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from workbench import ops
from workbench.collectives import Collective
from workbench.gradients import Gradient
from workbench.ops import Message, Program, Request, Ticket
from workbench.program import Context, Sum, take_sum
from workbench.runtimes.execution.endpoint import size_of

if TYPE_CHECKING:
    from workbench.runtimes.simulator.state import SimProcess

SEND, RECEIVE, WAIT, WORK = range(4)
Instruction = tuple[int, int, int, int, Any]
"""(SEND | RECEIVE, slot, peer, tag, bytes), (WAIT, slot, ...), (WORK, bytes, ..., kind). A peer is counted from the rank, so that ranks
share instructions."""


@final
class CommSchedule:
    """The requests of a collective, in order.

    In the simulator a sum may name a schedule instead of its collective. The handler of the sum then plays it.
    """

    __slots__ = ("instructions", "num_slots")

    def __init__(self, instructions: tuple[Instruction, ...], num_slots: int) -> None:
        self.instructions, self.num_slots = instructions, num_slots

    def __repr__(self) -> str:
        return f"a collective of {len(self.instructions)} requests"


@final
class ScheduleCache:
    """The schedules of one rank.

    Args:
        shared: instructions and schedules that are equal on several ranks. All ranks of a simulation share this
            dictionary.
        seconds: called with kind and bytes of local work. Work of 0 seconds is left out, unless it is `traced`.
    """

    def __init__(
        self,
        rank: int,
        num_workers: int,
        shared: dict[Any, Any],
        seconds: Callable[[str, float], float],
        *,
        traced: bool = True,
    ) -> None:
        self._rank, self._num_workers, self._shared = rank, num_workers, shared
        self._seconds, self._traced = seconds, traced
        self._known: dict[Any, CommSchedule | None] = {}

    def take(self, ctx: Context, request: Sum) -> Request | Program:
        """Return what takes a sum (`program.lower`).

        It is the sum itself with a schedule if the collective has one, else the collective's sub-program.
        """
        value, collective = request.value, request.collective
        assert isinstance(collective, Collective)
        chosen = replace(request, collective=collective.select(ctx, value))
        if not isinstance(chosen.collective, Collective) or not chosen.collective.fixed_schedule:
            return take_sum(ctx, chosen)
        size = (value.bucket, value.layout.numel) if isinstance(value, Gradient) else (value.numel(), value.dtype)
        key = (type(request), chosen.collective, ctx.rank, ctx.num_workers, size)
        if key not in self._known:
            self._known[key] = self._learn(take_sum(ctx, chosen))
        known = self._known[key]
        if known is None:
            return take_sum(ctx, chosen)
        return replace(chosen, collective=known)  # type: ignore[arg-type]  # only the simulator's handlers see it

    def _learn(self, work: Request | Program) -> CommSchedule | None:
        schedule = record_schedule(work)
        if schedule is None:
            return None
        rank, p, shared = self._rank, self._num_workers, self._shared
        relative = (
            (op, slot, (peer - rank) % p if op < WAIT else 0, tag, size)
            for op, slot, peer, tag, size in schedule.instructions
        )
        kept = (item for item in relative if item[0] != WORK or self._traced or self._seconds(item[4], item[1]) > 0)
        instructions = tuple(shared.setdefault(item, item) for item in kept)
        return CommSchedule(shared.setdefault(instructions, instructions), schedule.num_slots)


def record_schedule(work: Request | Program) -> CommSchedule | None:
    """Return the schedule of a sub-program with only messages and local work; None for any other."""
    if isinstance(work, Request):
        return None
    instructions: list[Instruction] = []
    num_slots = 0
    slots: dict[int, int] = {}  # of tickets
    answer: Any = None
    while True:
        try:
            request = work.send(answer)
        except StopIteration:
            return CommSchedule(tuple(instructions), num_slots)
        inner = request.work if isinstance(request, ops.Start) else request
        answer = None
        match inner:
            case ops.Send(to, value, tag, None):
                instructions.append((SEND, num_slots, to, tag, size_of(value)))
            case ops.Recv(source, like, tag, False) if source != ops.ANY:
                instructions.append((RECEIVE, num_slots, source, tag, size_of(like)))
                # An expanded byte is not contiguous
                answer = Message(source, like if like.is_contiguous() else like.new_empty(like.numel()))
            case ops.Wait(ticket) if ticket.key in slots:
                instructions.append((WAIT, slots[ticket.key], 0, 0, None))
                answer = ticket.value
                continue
            case ops.Local(kind, num_bytes, action):
                instructions.append((WORK, num_bytes, 0, 0, kind))
                answer = None if kind == "sum" else action()
                continue
            case _:
                work.close()
                return None
        if isinstance(request, ops.Start):
            ticket = Ticket(num_slots, inner)
            ticket.value, slots[num_slots] = answer, num_slots
            answer = ticket
        else:
            instructions.append((WAIT, num_slots, 0, 0, None))
        num_slots += 1


@final
class SchedulePlayer:
    """Repeats a schedule for a simulated program, and resumes it with `answer` at the end."""

    __slots__ = (
        "_answer",
        "_begun",
        "_blocked",
        "_done",
        "_fabric",
        "_instructions",
        "_key",
        "_position",
        "_since_s",
        "_thread",
        "_traced",
    )

    def __init__(self, thread: SimProcess, schedule: CommSchedule, answer: Any) -> None:
        cluster = thread.cluster
        self._thread, self._answer = thread, answer
        self._instructions = schedule.instructions
        self._fabric = cluster.fabric
        self._key = (thread.key, thread.priority, thread.worker.rank, cluster.num_workers)
        self._position = 0
        self._since_s = 0.0
        self._blocked = -1  # the slot that it waits for
        self._done = bytearray(schedule.num_slots)
        self._traced = thread.worker.traced
        self._begun: list[float] = [0.0] * schedule.num_slots if self._traced else []

    def __repr__(self) -> str:
        for op, slot, peer, tag, size in self._instructions:
            if op < WAIT and slot == self._blocked:
                peer = (peer + self._key[2]) % self._key[3]
                return f"{'Send to' if op == SEND else 'Recv from'} rank {peer} (tag {tag}, {size} bytes)"
        return "local work"

    def go(self, _: Any = None) -> None:
        """Continue as far as possible."""
        instructions, done, fabric = self._instructions, self._done, self._fabric
        key, priority, rank, p = self._key
        if self._blocked >= 0 and self._traced and self._thread.task == 0:
            self._span("wait", "compute", self._since_s)
        self._blocked = -1
        for position in range(self._position, len(instructions)):
            op, slot, peer, tag, size = instructions[position]
            if op == WAIT:
                if not done[slot]:
                    self._blocked, self._position = slot, position
                    self._since_s = fabric.clock.now_s
                    return
            elif op == SEND:
                if self._traced:
                    self._begun[slot] = fabric.clock.now_s
                peer = (rank + peer) % p
                fabric.send(key, tag, peer, rank, size, None, self._sent, (slot, size, peer), priority)
            elif op == RECEIVE:
                if self._traced:
                    self._begun[slot] = fabric.clock.now_s
                fabric.receive(key, tag, (rank + peer) % p, rank, self._received, (slot, size))
            elif self._work(size, slot, position):
                return
        self._position = len(instructions)
        self._thread.resume(self._answer)

    def _work(self, kind: str, num_bytes: int, position: int) -> bool:
        """Encode, decode or sum. Return True if that takes time."""
        clock = self._fabric.clock
        seconds = self._thread.cluster.network.local_s(kind, num_bytes)
        if self._traced:
            worker = self._thread.worker
            worker.recorder.span(kind, "comm", clock.now_s, clock.now_s + seconds, worker.step, -1, num_bytes)
        if seconds > 0:
            self._position = position + 1
            clock.at(clock.now_s + seconds, self.go)
        return seconds > 0

    def _span(self, kind: str, lane: str, begin: float, num_bytes: int = 0, peer: int = -1) -> None:
        worker = self._thread.worker
        worker.recorder.span(kind, lane, begin, self._fabric.clock.now_s, worker.step, -1, num_bytes, peer)

    def _sent(self, what: tuple[int, int, int]) -> None:
        slot, size, peer = what
        self._thread.worker.bytes_sent += size
        if self._traced:
            self._span("send", "comm", self._begun[slot], size, peer)
        self._done[slot] = 1
        if slot == self._blocked:
            self.go()

    def _received(self, what: tuple[int, int], sender: int, _: Any) -> None:
        slot, size = what
        if self._traced:
            self._span("recv", "comm", self._begun[slot], size, sender)
        self._done[slot] = 1
        if slot == self._blocked:
            self.go()
