"""Rehearsals of visits: a sub-program is run once, each request answered at once with what can be told from everything else."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, final

from workbench import ops
from workbench.collectives import flat_of
from workbench.gradients import Gradient
from workbench.ops import Message, Ticket
from workbench.program import Answer, Exchange
from workbench.runtimes.execution.endpoint import bucket_of, size_of
from workbench.runtimes.transport.mailbox import STAMP_BYTES

if TYPE_CHECKING:
    from workbench.runtimes.simulator.worker import Shapes

BACKWARD, SEND, RECEIVE, WAIT, WORK = range(5)
Instruction = tuple[int, int, Any]
"""(BACKWARD, -1, what is sent of each bucket), (SEND, slot, what), (RECEIVE, slot, (source, tag, like, position of its stamp in the
answer)), (WAIT, slot, None), (WORK, -1, (kind, bytes))."""


@final
class Mark(int):
    """A number that is told from others of its value."""


@final
class Sending:
    """A stamped message: to whom, its tag, bytes, bucket, content, which of the stamps it carries, its slot."""

    __slots__ = ("bucket", "flat", "num_bytes", "position", "slot", "tag", "to")

    def __init__(self, request: ops.Send, bucket: int, position: int = 0, slot: int = 0) -> None:
        self.to, self.tag, self.position, self.bucket, self.slot = request.to, request.tag, position, bucket, slot
        self.flat = flat_of(request.value)
        self.num_bytes = size_of(request.value) + STAMP_BYTES

    def __repr__(self) -> str:
        return f"Send(to={self.to}, tag={self.tag})"


@final
class Tape:
    """A worker's exchange: what it asks in turn, and how many stamps it returns."""

    __slots__ = ("instructions", "num_found", "num_slots", "num_started")

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.num_slots = self.num_started = self.num_found = 0


class _Other(Exception):
    """It asks for something that is not played."""


@final
class _Rehearsal:
    """Answers the requests of an exchange."""

    def __init__(self, step: Mark, stamps: list[Mark], shapes: Shapes) -> None:
        self._step, self._stamps, self._shapes = step, stamps, shapes
        self.tape = Tape()
        self.tickets: list[tuple[Ticket, int]] = []
        self.arrived: list[Mark] = []  # stamps

    def _slot(self) -> int:
        self.tape.num_slots += 1
        return self.tape.num_slots - 1

    def _sending(self, request: Any) -> Sending:
        """The message of a send in the background, of a value of this step."""
        request = request.work if isinstance(request, ops.Start) else request
        if not isinstance(request, ops.Send) or not isinstance(request.value, Gradient) or request.value.step is not self._step:
            raise _Other
        for position, mark in enumerate(self._stamps):
            if request.stamp is mark:
                self.tape.num_started += 1
                return Sending(request, bucket_of(request.value), position, self._slot())
        raise _Other

    def _ticket(self, slot: int) -> Ticket:
        self.tickets.append((Ticket(slot, ops.Barrier()), slot))
        return self.tickets[-1][0]

    def answer(self, request: Any) -> Any:
        """What it is told; the tape is one instruction longer."""
        add = self.tape.instructions.append
        match request:
            case ops.Backward(step, on_bucket, None) if step is self._step:
                gradient = self._shapes.backward(step)
                if on_bucket is None:
                    add((BACKWARD, -1, []))
                    return gradient
                launches = [self._sending(on_bucket(gradient.part(piece.index))) for piece in gradient.layout.buckets]
                add((BACKWARD, -1, launches))
                return tuple(self._ticket(sending.slot) for sending in launches)
            case ops.Start():
                sending = self._sending(request)
                add((SEND, sending.slot, sending))
                return self._ticket(sending.slot)
            case ops.Recv(source, like, tag, True) if source != ops.ANY:
                slot, mark = self._slot(), Mark(0)
                add((RECEIVE, slot, (source, tag, like, len(self.arrived))))
                add((WAIT, slot, None))
                self.arrived.append(mark)
                return Message(source, like, mark)
            case ops.Wait(ticket) if any(known is ticket for known, _ in self.tickets):
                add((WAIT, next(slot for known, slot in self.tickets if known is ticket), None))
            case ops.Local("sum", num_bytes, _):
                add((WORK, -1, ("sum", num_bytes)))
            case ops.UnpackParameters() | ops.Discard():
                pass  # nothing is kept
            case _:
                raise _Other
        return None


def rehearse_exchange(program: Exchange, of: tuple[int, ...], shapes: Shapes) -> Tape | None:
    """The tape of a worker's exchange; None where it asks for anything that is not played."""
    step, stamps = Mark(0), [Mark(0) for _ in of]
    work, rehearsal = program(of, step, list(stamps)), _Rehearsal(step, stamps, shapes)
    if isinstance(work, ops.Request):
        return None
    answer = None
    try:
        while True:
            answer = rehearsal.answer(work.send(answer))
    except _Other:
        work.close()
        return None
    except StopIteration as stop:
        found = rehearsal.tape.num_found = len(rehearsal.arrived)
        same = len(stop.value) == found and all(map(operator.is_, stop.value, rehearsal.arrived))
        return rehearsal.tape if same else None


def rehearse_answer(program: Answer, shapes: Shapes) -> Sending | None:
    """What an answer sends: parameters of the server's copy, as they were packed; None where it asks for anything else."""
    to, stamp = Mark(0), Mark(0)
    work = program(to, stamp)
    if isinstance(work, ops.Request):
        return None
    pack = next(work, None)
    if not isinstance(pack, ops.PackParameters) or pack.bucket is None or not pack.master:
        work.close()
        return None
    packed = shapes.pack_parameters(pack.bucket, master=True)
    start = work.send(packed)
    send = start.work if isinstance(start, ops.Start) else None
    if not isinstance(send, ops.Send) or send.to is not to or send.stamp is not stamp or send.value is not packed.flat:
        work.close()
        return None
    ticket = Ticket(0, send)
    try:
        work.send(ticket)
    except StopIteration as stop:
        return Sending(send, pack.bucket) if stop.value == (packed, ticket) else None
    work.close()
    return None
