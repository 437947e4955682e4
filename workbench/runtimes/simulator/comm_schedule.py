"""Collectives learned by heart: in a timing-only simulation a collective's requests are the same every time, so they are asked for once.

What a rank of a ring sends, receives and sums depends on its rank, on how many there are and on the size of the value, and
on nothing else. `rehearse` runs its sub-program once, answers every request at once, and writes down what it asked; a
`SchedulePlayer` then goes through that tape in virtual time: the same messages at the same times, without a generator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from workbench import ops
from workbench.gradients import Gradient
from workbench.ops import Message, Program, Request, Ticket, Value
from workbench.runtimes.execution.endpoint import size_of

if TYPE_CHECKING:
    from workbench.runtimes.simulator.state import SimProcess

SEND, RECEIVE, WAIT, WORK = range(4)
Instruction = tuple[int, int, int, int, Any]
"""(SEND | RECEIVE, slot, peer, tag, bytes), (WAIT, slot, ...), (WORK, bytes, ..., kind). A peer is counted from the rank, so that ranks
share instructions."""


@final
class CommSchedule(ops.Request):
    """What a sub-program asks, from its begin to its end; as a request, to be gone through in its place. The answer is `value`."""

    __slots__ = ("instructions", "num_slots", "value")

    def __init__(self, instructions: tuple[Instruction, ...], num_slots: int, value: Any = None) -> None:
        self.instructions, self.num_slots, self.value = instructions, num_slots, value

    def __repr__(self) -> str:
        return f"a collective of {len(self.instructions)} requests"


@final
class ScheduleCache:
    """The tapes of one rank.

    Args:
        shared: instructions and whole tapes that ranks have in common; the same dictionary for all ranks of a simulation.
        seconds: of local work, by kind and bytes; what takes none is left out, unless it is `traced`.
    """

    def __init__(
        self, rank: int, num_workers: int, shared: dict[Any, Any], seconds: Callable[[str, float], float], *, traced: bool = True
    ) -> None:
        self._rank, self._num_workers, self._shared = rank, num_workers, shared
        self._seconds, self._traced = seconds, traced
        self._known: dict[Any, CommSchedule | None] = {}

    def __call__(self, key: Any, begin: Callable[[Value], Request | Program], value: Value) -> Request | Program:
        """The sub-program `begin(value)`, or its tape; `key` names what it depends on beside the value's size."""
        size = (value.bucket, value.layout.numel) if isinstance(value, Gradient) else (value.numel(), value.dtype)
        if (key, size) not in self._known:
            self._known[key, size] = self._learn(begin(value))
        known = self._known[key, size]
        return begin(value) if known is None else _play(known, value)

    def _learn(self, work: Request | Program) -> CommSchedule | None:
        tape = rehearse(work)
        if tape is None:
            return None
        rank, p, shared = self._rank, self._num_workers, self._shared
        relative = ((op, slot, (peer - rank) % p if op < WAIT else 0, tag, size) for op, slot, peer, tag, size in tape.instructions)
        kept = (item for item in relative if item[0] != WORK or self._traced or self._seconds(item[4], item[1]) > 0)
        instructions = tuple(shared.setdefault(item, item) for item in kept)
        return CommSchedule(shared.setdefault(instructions, instructions), tape.num_slots)


def _play(tape: CommSchedule, value: Value) -> Program:
    yield CommSchedule(tape.instructions, tape.num_slots)
    return value


def rehearse(work: Request | Program) -> CommSchedule | None:
    """The tape of a sub-program that asks for messages and local work alone; None of any other."""
    if isinstance(work, Request):
        return None
    tape: list[Instruction] = []
    num_slots = 0
    slots: dict[int, int] = {}  # of tickets
    answer: Any = None
    while True:
        try:
            request = work.send(answer)
        except StopIteration:
            return CommSchedule(tuple(tape), num_slots)
        inner = request.work if isinstance(request, ops.Start) else request
        answer = None
        match inner:
            case ops.Send(to, value, tag, None):
                tape.append((SEND, num_slots, to, tag, size_of(value)))
            case ops.Recv(source, like, tag, False) if source != ops.ANY:
                tape.append((RECEIVE, num_slots, source, tag, size_of(like)))
                answer = Message(source, like if like.is_contiguous() else like.new_empty(like.numel()))  # one byte, expanded, is none
            case ops.Wait(ticket) if ticket.key in slots:
                tape.append((WAIT, slots[ticket.key], 0, 0, None))
                answer = ticket.value
                continue
            case ops.Local(kind, num_bytes, action):
                tape.append((WORK, num_bytes, 0, 0, kind))
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
            tape.append((WAIT, num_slots, 0, 0, None))
        num_slots += 1


@final
class SchedulePlayer:
    """Goes through a tape for a simulated program, and says when it is through."""

    __slots__ = ("_begun", "_blocked", "_done", "_fabric", "_key", "_position", "_since_s", "_tape", "_then", "_thread", "_traced")

    def __init__(self, thread: SimProcess, tape: CommSchedule, then: Callable[[Any], None]) -> None:
        cluster = thread.cluster
        self._thread, self._then = thread, then
        self._tape = tape.instructions
        self._fabric = cluster.fabric
        self._key = (thread.key, thread.priority, thread.worker.rank, cluster.num_workers)
        self._position = 0
        self._since_s = 0.0
        self._blocked = -1  # the slot that it waits for
        self._done = bytearray(tape.num_slots)
        self._traced = thread.worker.traced
        self._begun: list[float] = [0.0] * tape.num_slots if self._traced else []

    def __repr__(self) -> str:
        for op, slot, peer, tag, size in self._tape:
            if op < WAIT and slot == self._blocked:
                peer = (peer + self._key[2]) % self._key[3]
                return f"{'Send to' if op == SEND else 'Recv from'} rank {peer} (tag {tag}, {size} bytes)"
        return "local work"

    def go(self, _: Any = None) -> None:
        """Go on as far as possible."""
        tape, done, fabric = self._tape, self._done, self._fabric
        key, priority, rank, p = self._key
        if self._blocked >= 0 and self._traced and self._thread.task == 0:
            self._span("wait", "compute", self._since_s)
        self._blocked = -1
        for position in range(self._position, len(tape)):
            op, slot, peer, tag, size = tape[position]
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
        self._position = len(tape)
        self._then(None)

    def _work(self, kind: str, num_bytes: int, position: int) -> bool:
        """Encode, decode or sum; whether that takes time."""
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
