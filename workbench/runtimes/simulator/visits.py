"""Visits to servers learned by heart: in a timing-only simulation a worker's push and pull are the same messages every step.

What a worker asks of servers for a minibatch depends on the step by its number alone, and on versions by the stamps that travel; what
a server sends for an answer depends on who is answered and on the stamp. Each is run once (`sim_rehearsal`); a `Visit` or a `Reply`
then does the same at the same virtual times, without a generator and without a request for each message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from workbench import ops
from workbench.ops import Program, Ticket
from workbench.program import Answer, Exchange
from workbench.runtimes.simulator.communication import PENDING, check_arrived
from workbench.runtimes.simulator.compute import begin_pass
from workbench.runtimes.simulator.rehearsal import BACKWARD, RECEIVE, SEND, WAIT, Sending, Tape, rehearse_answer, rehearse_exchange

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.gradients import Gradient
    from workbench.runtimes.simulator.process import SimProcess
    from workbench.runtimes.simulator.worker import Shapes


@final
class Learner:
    """What one rank of a simulation knows by heart of visits (`program.Visits`).

    Args:
        shapes: of this rank's values.
        shared: tapes, the same dictionary for all ranks of a simulation.
    """

    def __init__(self, shapes: Shapes, shared: dict[Any, Any]) -> None:
        self._shapes, self._shared = shapes, shared

    def exchange(self, key: Any, program: Exchange) -> Exchange:
        known: dict[tuple[int, ...], Visit | None] = {}  # of this rank

        def begin(of: tuple[int, ...], step: int, stamps: list[int]) -> ops.Request | Program:
            if of not in known:
                if (key, of) not in self._shared:
                    self._shared[key, of] = rehearse_exchange(program, of, self._shapes)
                tape = self._shared[key, of]
                known[of] = None if tape is None else Visit(tape)
            visit = known[of]
            if visit is None:
                return program(of, step, stamps)
            visit.step, visit.stamps = step, stamps
            return visit

        return begin

    def answer(self, key: Any, program: Answer) -> Answer:
        if key not in self._shared:
            self._shared[key] = rehearse_answer(program, self._shapes)
        known = self._shared[key]
        return program if known is None else lambda to, stamp: Reply((known, to, stamp))


@final
class Visit(ops.Request):
    """A worker's exchange of one step; as a request, to be played in its place. The answer is the stamps that came back."""

    __slots__ = (
        "_agreed",
        "_begun",
        "_blocked",
        "_done",
        "_fabric",
        "_found",
        "_position",
        "_since_s",
        "_tape",
        "_thread",
        "_worker",
        "stamps",
        "step",
    )

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._thread: Any = None  # that plays it
        self._blocked, self._since_s = -1, 0.0  # the slot that it waits for, and since when
        self._agreed: Any = (None, None)  # what arrived last, and what it was asked for as
        self.step, self.stamps = 0, list[int]()

    def __repr__(self) -> str:
        for what, slot, of in self._tape.instructions:
            if what == RECEIVE and slot == self._blocked:
                return f"Recv(source={of[0]}, tag={of[1]}, stamped=True)"
        return f"push and pull of step {self.step}"

    def begin(self, thread: SimProcess) -> None:
        """Before anything is asked; the program of the thread goes on with the answer."""
        tape = self._tape
        if self._thread is not thread:
            self._thread, self._worker, self._fabric = thread, thread.worker, thread.simulation.fabric
            self._begun = [0.0] * tape.num_slots
        self._position, self._blocked, self._done, self._found = 0, -1, bytearray(tape.num_slots), [0] * tape.num_found
        thread.num_started += tape.num_started
        thread.pending = self

    def go(self, _: Any = None) -> None:
        """Go on as far as possible."""
        thread, fabric, done, instructions = self._thread, self._fabric, self._done, self._tape.instructions
        if self._blocked >= 0:
            self._blocked = -1
            if self._worker.traced and thread.task == 0:
                self._span("wait", "compute", self._since_s)
        for position in range(self._position, len(instructions)):
            what, slot, of = instructions[position]
            if what == WAIT:
                if not done[slot]:
                    self._blocked, self._position, self._since_s = slot, position + 1, fabric.clock.now_s
                    return
            elif what == RECEIVE:
                self._begun[slot] = fabric.clock.now_s
                fabric.receive(thread.key, of[1], of[0], self._worker.rank, self._received, (slot, of))
            elif what == SEND:
                self._send(of)
            elif what == BACKWARD:
                self._position = position + 1
                begin_pass(thread, self.step, 1.0, self._launch if of else None, self._through)
                return
            elif self._work(of):
                self._position = position + 1
                return
        thread.resume(self._found)

    def _launch(self, bucket: int) -> None:
        """A bucket's gradients are final."""
        self._send(self._tape.instructions[self._position - 1][2][bucket])

    def _through(self, late: tuple[int, ...]) -> None:
        """The pass is over, and with it the gradients of the last buckets are final."""
        launches = self._tape.instructions[self._position - 1][2]
        if launches:
            for bucket in late:
                self._send(launches[bucket])
        self.go()

    def _work(self, of: tuple[str, int]) -> bool:
        """Sum so many bytes; whether that takes time."""
        thread, clock = self._thread, self._fabric.clock
        kind, num_bytes = of
        seconds: float = thread.simulation.network.local_s(kind, num_bytes)
        if thread.worker.traced:
            thread.worker.recorder.span(kind, "comm", clock.now_s, clock.now_s + seconds, self.step, -1, num_bytes)
        if seconds > 0:
            clock.at(clock.now_s + seconds, self.go)
        return seconds > 0

    def _send(self, sending: Sending) -> None:
        thread, fabric = self._thread, self._fabric
        self._begun[sending.slot] = fabric.clock.now_s
        load = (sending.flat, self.stamps[sending.position], True)
        fabric.send(thread.key, sending.tag, sending.to, self._worker.rank, sending.num_bytes, load, self._sent, sending, thread.priority)

    def _sent(self, sending: Sending) -> None:
        worker, slot = self._worker, sending.slot
        counted = 0 if sending.to == worker.rank else sending.num_bytes
        worker.bytes_sent += counted
        if worker.traced:
            self._span("send", "comm", self._begun[slot], sending.bucket, counted, sending.to)
        self._done[slot] = 1
        if slot == self._blocked:
            self.go()

    def _received(self, what: tuple[int, tuple[int, int, Tensor, int]], sender: int, load: tuple[Tensor, int, bool]) -> None:
        slot, (_, _, like, number) = what
        worker = self._worker
        if load[0] is not self._agreed[0] or like is not self._agreed[1]:
            check_arrived(worker.rank, like, True, sender, load)
            self._agreed = (load[0], like)
        self._found[number] = load[1]
        if worker.traced:
            num_bytes = 0 if sender == worker.rank else like.numel() * like.element_size()
            self._span("recv", "comm", self._begun[slot], -1, num_bytes, sender)
        self._done[slot] = 1
        if slot == self._blocked:
            self.go()

    def _span(self, kind: str, lane: str, begin: float, bucket: int = -1, num_bytes: int = 0, peer: int = -1) -> None:
        self._worker.recorder.span(kind, lane, begin, self._fabric.clock.now_s, self.step, bucket, num_bytes, peer)


def play_visit(thread: SimProcess, visit: Visit) -> Any:
    """In place of what it asks."""
    visit.begin(thread)
    visit.go()
    return PENDING


@final
class Reply(tuple[Sending, int, int], ops.Request):
    """A server's answer: what is sent, to whom, its stamp. As a request; its own answer is the packed parameters, and the ticket of
    their sending."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Send(to={self[1]}, tag={self[0].tag}, stamp={self[2]})"


def play_reply(thread: SimProcess, reply: Reply) -> tuple[Gradient, Ticket]:
    """Send it in the background."""
    sending, to, stamp = reply
    worker, fabric = thread.worker, thread.simulation.fabric
    thread.num_started += 1
    ticket = Ticket(thread.num_started, reply, [])
    load = (sending.flat, stamp, True)
    what = (thread, reply, ticket, fabric.clock.now_s)
    fabric.send(thread.key, sending.tag, to, worker.rank, sending.num_bytes, load, _replied, what, thread.priority)
    return worker.replica.pack_parameters(sending.bucket, master=True), ticket


def _replied(what: tuple[SimProcess, Reply, Ticket, float]) -> None:
    """It has arrived."""
    thread, (sending, to, _), ticket, begin_s = what
    worker = thread.worker
    counted = 0 if to == worker.rank else sending.num_bytes
    worker.bytes_sent += counted
    if worker.traced:
        worker.recorder.span("send", "comm", begin_s, thread.simulation.clock.now_s, worker.step, -1, counted, to)
    ticket.done = True
    for action in ticket.runtime:
        action()
