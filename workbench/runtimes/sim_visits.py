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
from workbench.runtimes.sim_backward import begin_pass
from workbench.runtimes.sim_comm import check_arrived
from workbench.runtimes.sim_rehearsal import BACKWARD, RECEIVE, SEND, WAIT, Sending, Tape, rehearse_answer, rehearse_exchange

if TYPE_CHECKING:
    from workbench.runtimes.sim_thread import SimThread
    from workbench.runtimes.sim_worker import Shapes


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
        return program if known is None else lambda to, stamp: Reply(known, to, stamp)


@final
class Visit(ops.Request):
    """A worker's exchange of one step; as a request, to be played in its place. The answer is the stamps that came back."""

    __slots__ = ("_begun", "_blocked", "_done", "_fabric", "_found", "_position", "_since_s", "_tape", "_thread", "step", "stamps")

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._thread: SimThread | None = None
        self.step, self.stamps = 0, list[int]()

    def __repr__(self) -> str:
        for what, slot, of in self._tape.instructions:
            if slot == self._blocked and what == RECEIVE:
                return f"Recv(source={of[0]}, tag={of[1]}, stamped=True)"
            if slot == self._blocked and what == SEND:
                return repr(of)
        return f"the pass of step {self.step}"

    def play(self, thread: SimThread) -> None:
        """Begin; the program of the thread goes on with the answer."""
        self._thread, self._fabric = thread, thread.simulation.fabric
        num_slots = self._tape.num_slots
        self._position, self._blocked = 0, -1
        self._done, self._found = bytearray(num_slots), [0] * num_slots
        self._begun = [0.0] * num_slots
        thread.num_started += self._tape.num_started
        thread.pending = self
        self._go()

    def _go(self, _: Any = None) -> None:
        """Go on as far as possible."""
        thread, done = self._thread, self._done
        assert thread is not None
        if self._blocked >= 0:
            self._blocked = -1
            if thread.worker.traced and thread.strand == 0:
                self._span("wait", "compute", self._since_s)
        instructions = self._tape.instructions
        for position in range(self._position, len(instructions)):
            what, slot, of = instructions[position]
            if what == WAIT:
                if not done[slot]:
                    self._blocked, self._position, self._since_s = slot, position + 1, self._fabric.clock.now_s
                    return
            elif what == RECEIVE:
                fabric = self._fabric
                self._begun[slot] = fabric.clock.now_s
                fabric.receive(thread.key, of[1], of[0], thread.worker.rank, self._received, (slot, of[2]))
            elif what == SEND:
                self._send(slot, of)
            elif what == BACKWARD:
                self._position = position + 1
                begin_pass(thread, self.step, 1.0, None if of is None else self._launch, self._through)
                return
            elif self._work(of):
                self._position = position + 1
                return
        thread.resume([self._found[slot] for slot in self._tape.found])

    def _launch(self, bucket: int) -> None:
        """A bucket's gradients are final."""
        self._send(*self._tape.instructions[self._position - 1][2][bucket])

    def _through(self, late: tuple[int, ...] | None) -> None:
        launches = self._tape.instructions[self._position - 1][2]
        if launches is not None and late is not None:
            for bucket in late:
                self._send(*launches[bucket])
        self._go()

    def _work(self, of: tuple[str, int]) -> bool:
        """Sum so many bytes; whether that takes time."""
        thread, clock = self._thread, self._fabric.clock
        assert thread is not None
        kind, num_bytes = of
        seconds = thread.simulation.network.local_s(kind, num_bytes)
        if thread.worker.traced:
            thread.worker.recorder.span(kind, "comm", clock.now_s, clock.now_s + seconds, self.step, -1, num_bytes)
        if seconds > 0:
            clock.at(clock.now_s + seconds, self._go)
        return seconds > 0

    def _send(self, slot: int, sending: Sending) -> None:
        thread, fabric = self._thread, self._fabric
        assert thread is not None
        self._begun[slot] = fabric.clock.now_s
        load = (sending.flat, self.stamps[sending.position], True)
        fabric.send(
            thread.key, sending.tag, sending.to, thread.worker.rank, sending.num_bytes, load, self._sent, (slot, sending), thread.priority
        )

    def _sent(self, what: tuple[int, Sending]) -> None:
        slot, sending = what
        worker = self._thread.worker
        if sending.to != worker.rank:
            worker.bytes_sent += sending.num_bytes
        if worker.traced:
            num_bytes = 0 if sending.to == worker.rank else sending.num_bytes
            self._span("send", "comm", self._begun[slot], sending.bucket, num_bytes, sending.to)
        self._done[slot] = 1
        if slot == self._blocked:
            self._go()

    def _received(self, what: tuple[int, Any], sender: int, load: tuple[Any, int, bool]) -> None:
        slot, like = what
        worker = self._thread.worker
        check_arrived(worker.rank, like, True, sender, load)
        self._found[slot] = load[1]
        if worker.traced:
            num_bytes = 0 if sender == worker.rank else like.numel() * like.element_size()
            self._span("recv", "comm", self._begun[slot], -1, num_bytes, sender)
        self._done[slot] = 1
        if slot == self._blocked:
            self._go()

    def _span(self, kind: str, lane: str, begin: float, bucket: int = -1, num_bytes: int = 0, peer: int = -1) -> None:
        self._thread.worker.recorder.span(kind, lane, begin, self._fabric.clock.now_s, self.step, bucket, num_bytes, peer)


@final
class Reply(ops.Request):
    """A server's answer; as a request. Its own answer is the packed parameters, and the ticket of their sending."""

    __slots__ = ("_begin_s", "_sending", "_stamp", "_thread", "_ticket", "_to")

    def __init__(self, sending: Sending, to: int, stamp: int) -> None:
        self._sending, self._to, self._stamp = sending, to, stamp

    def __repr__(self) -> str:
        return f"Send(to={self._to}, tag={self._sending.tag}, stamp={self._stamp})"

    def play(self, thread: SimThread) -> Any:
        """Send it in the background."""
        sending, worker, fabric = self._sending, thread.worker, thread.simulation.fabric
        packed = worker.replica.pack_parameters(sending.bucket, master=True)
        thread.num_started += 1
        self._thread, self._begin_s = thread, fabric.clock.now_s
        self._ticket = ticket = Ticket(thread.num_started, self)
        ticket.runtime = []
        load = (sending.flat, self._stamp, True)
        fabric.send(thread.key, sending.tag, self._to, worker.rank, sending.num_bytes, load, _replied, self, thread.priority)
        return packed, ticket


def _replied(reply: Reply) -> None:
    """It has arrived."""
    thread, ticket = reply._thread, reply._ticket
    worker = thread.worker
    counted = 0 if reply._to == worker.rank else reply._sending.num_bytes
    worker.bytes_sent += counted
    if worker.traced:
        now_s = thread.simulation.clock.now_s
        worker.recorder.span("send", "comm", reply._begin_s, now_s, worker.step, -1, counted, reply._to)
    ticket.done = True
    for action in ticket.runtime:
        action()
