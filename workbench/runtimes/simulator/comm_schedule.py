"""Cached schedules of collectives: in a timing-only simulation a collective makes the same requests every time.

The requests of a rank of a ring depend only on its rank, the number of ranks and the size of the value
(`Collective.fixed_schedule`). `record_schedule` runs its sub-program once, answers every request at once, and records
the requests. A `SchedulePlayer` then repeats that schedule in virtual time: the same messages at the same times,
without a generator.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, final

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
class InstructionTable:
    """Each different instruction once, for the schedules of all ranks.

    A schedule takes 2 or 4 bytes an instruction: a ring of p ranks has 8 (p - 1) of them on each rank.
    """

    __slots__ = ("_numbers", "_packed", "instructions")

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self._numbers: dict[Instruction, int] = {}
        self._packed: dict[bytes, bytes] = {}  # equal schedules of several ranks share their memory

    def schedule(self, instructions: Iterable[Instruction], num_slots: int) -> CommSchedule:
        """Return the schedule of these instructions."""
        numbers = []
        for item in instructions:
            number = self._numbers.setdefault(item, len(self.instructions))
            if number == len(self.instructions):
                self.instructions.append(item)
            numbers.append(number)
        width: Literal["H", "I"] = "H" if len(self.instructions) <= 1 << 16 else "I"
        packed = array(width, numbers).tobytes()
        return CommSchedule(self, memoryview(self._packed.setdefault(packed, packed)).cast(width), num_slots)


@final
class CommSchedule:
    """The requests of a collective, in order.

    In the simulator a sum may name a schedule instead of its collective. The handler of the sum then plays it.
    """

    __slots__ = ("_table", "num_slots", "numbers")

    def __init__(self, table: InstructionTable, numbers: memoryview[int], num_slots: int) -> None:
        self._table, self.numbers, self.num_slots = table, numbers, num_slots

    def __iter__(self) -> Iterator[Instruction]:
        return map(self._table.instructions.__getitem__, self.numbers)

    def __repr__(self) -> str:
        return f"a collective of {len(self.numbers)} requests"


@final
class ScheduleCache:
    """The schedules of one rank.

    Args:
        table: the instructions of all ranks of a simulation.
        seconds: called with kind and bytes of local work. Work of 0 seconds is left out, unless it is `traced`.
    """

    def __init__(
        self,
        rank: int,
        num_workers: int,
        table: InstructionTable,
        seconds: Callable[[str, float], float],
        *,
        traced: bool = True,
    ) -> None:
        self._rank, self._num_workers, self._table = rank, num_workers, table
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
        rank, p = self._rank, self._num_workers
        relative = (
            (op, slot, (peer - rank) % p if op < WAIT else 0, tag, size) for op, slot, peer, tag, size in schedule
        )
        kept = (item for item in relative if item[0] != WORK or self._traced or self._seconds(item[4], item[1]) > 0)
        return self._table.schedule(kept, schedule.num_slots)


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
            return InstructionTable().schedule(instructions, num_slots)
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
        "_key",
        "_left",
        "_schedule",
        "_since_s",
        "_thread",
        "_traced",
    )

    def __init__(self, thread: SimProcess, schedule: CommSchedule, answer: Any) -> None:
        cluster = thread.cluster
        self._thread, self._answer = thread, answer
        self._schedule, self._left = schedule, iter(schedule)  # the instructions that are left
        self._fabric = cluster.fabric
        self._key = (thread.key, thread.priority, thread.worker.rank, cluster.num_workers)
        self._since_s = 0.0
        self._blocked = -1  # the slot that it waits for
        self._done = bytearray(schedule.num_slots)
        self._traced = thread.worker.traced
        self._begun: list[float] = [0.0] * schedule.num_slots if self._traced else []

    def __repr__(self) -> str:
        for op, slot, peer, tag, size in self._schedule:
            if op < WAIT and slot == self._blocked:
                peer = (peer + self._key[2]) % self._key[3]
                return f"{'Send to' if op == SEND else 'Recv from'} rank {peer} (tag {tag}, {size} bytes)"
        return "local work"

    def go(self, _: Any = None) -> None:
        """Continue as far as possible."""
        done, fabric, traced = self._done, self._fabric, self._traced
        key, priority, rank, p = self._key
        if traced and self._blocked >= 0 and self._thread.task == 0:
            self._span("wait", "compute", self._since_s)
        self._blocked = -1
        for instruction in self._left:
            op, slot, peer, tag, size = instruction
            if op == WAIT:
                if not done[slot]:
                    self._blocked, self._since_s = slot, fabric.clock.now_s
                    return
                continue
            if op == WORK:
                if self._work(size, slot):
                    return
                continue
            if traced:
                self._begun[slot] = fabric.clock.now_s
            other = (rank + peer) % p
            if op == SEND:
                fabric.send((key, tag, rank, other), size, None, self._sent, instruction, priority)
            else:
                fabric.receive((key, tag, other, rank), self._received, instruction)
        self._thread.resume(self._answer)

    def _work(self, kind: str, num_bytes: int) -> bool:
        """Encode, decode or sum. Return True if that takes time."""
        clock = self._fabric.clock
        seconds = self._thread.cluster.network.local_s(kind, num_bytes)
        if self._traced:
            worker = self._thread.worker
            worker.recorder.span(kind, "comm", clock.now_s, clock.now_s + seconds, worker.step, -1, num_bytes)
        if seconds > 0:
            clock.at(clock.now_s + seconds, self.go)
        return seconds > 0

    def _span(self, kind: str, lane: str, begin: float, num_bytes: int = 0, peer: int = -1) -> None:
        worker = self._thread.worker
        worker.recorder.span(kind, lane, begin, self._fabric.clock.now_s, worker.step, -1, num_bytes, peer)

    def _sent(self, instruction: Instruction) -> None:
        _, slot, peer, _, size = instruction
        self._thread.worker.bytes_sent += size
        if self._traced:
            self._span("send", "comm", self._begun[slot], size, (self._key[2] + peer) % self._key[3])
        self._done[slot] = 1
        if slot == self._blocked:
            self.go()

    def _received(self, instruction: Instruction, sender: int, _: Any) -> None:
        slot = instruction[1]
        if self._traced:
            self._span("recv", "comm", self._begun[slot], instruction[4], sender)
        self._done[slot] = 1
        if slot == self._blocked:
            self.go()
