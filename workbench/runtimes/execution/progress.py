"""What a rank has started: how it goes on while the rank computes.

| progress | the library's own sums | sub-programs over messages |
|---|---|---|
| "auto" | by the library where it moves bytes itself (NCCL, gloo; not long ones on a CPU), else on a lane's thread | on a lane's thread |
| "blocking" | at once, in the foreground: nothing is hidden | the same |
| "tests" | begun without blocking, and looked after at every request and every gradient of backward; one lane only | the same |
| "thread" | on a lane's thread | on a lane's thread |
| "library" | begun without blocking, and left to the library | refused |
| "process" | by a helper process on shared memory | refused |

gloo begins whatever it is given, and two sums that are under way at once get in each other's way on one connection: where the wire
binds, Pipe-SGD's steps were 4 to 7 % longer than with one sum after the other. Short sums hide each other's latency instead.

Free sub-programs, which wait for other ranks' work rather than for bytes, go round on a thread of their own under "auto" and
"thread"; servers always do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from workbench import ops
from workbench.collectives import flat_of
from workbench.errors import ConfigError
from workbench.ops import FREE, Request, Ticket
from workbench.program import Algorithm, perform
from workbench.runtimes.execution.endpoint import Endpoint, RankClock
from workbench.runtimes.execution.helper_process import Helper
from workbench.runtimes.execution.polling import PollingExecutor
from workbench.runtimes.execution.tasks import LANE_SPINS, FairExecutor, Lane, Task, TaskHandle
from workbench.runtimes.transport.base import Deadline, Handle, Transport
from workbench.runtimes.transport.mailbox import Mailbox
from workbench.units import MIB

TAG_SPAN = 1024  # tags a sub-program may use; each started one has its own range
LONG_BYTES = 4 * MIB  # of a sum
NUM_TAG_RANGES = 28  # MPI guarantees tags up to 32767 only


@final
class ProgressEngine:
    """A rank's lanes, and how they make progress.

    Args:
        here: the foreground's endpoint.
        answer: answers the requests of sub-programs that concern the replica and time.
        helper: for progress="process".
    """

    def __init__(
        self,
        transport: Transport,
        clock: RankClock,
        mailbox: Mailbox,
        here: Endpoint,
        answer: Callable[[Request, int], Any],
        *,
        progress: str,
        helper: Helper | None,
    ) -> None:
        self.transport, self.clock = transport, clock
        self._mailbox, self._here, self._own = mailbox, here, answer
        self._progress, self._helper = progress, helper
        self._turns = PollingExecutor()
        self._begun: list[Handle] = []  # of the library's own, to be tested
        self._beside: dict[int, Endpoint] = {}  # lane -> where the library's own background work of other lanes is started
        self._lanes: dict[int, Lane | FairExecutor] = {}
        self._num_started = self._num_strands = 0
        self._streams: dict[int, Any] = {}  # lane -> the stream of the device on which its sub-programs work
        self._last: dict[int, TaskHandle] = {}  # range of tags -> the sub-program that had it last
        if not transport.has_threads and progress in ("auto", "thread"):
            self._progress = "tests"

    @property
    def ticks(self) -> bool:
        """Whether it wants to be looked after now and then."""
        return self._progress == "tests"

    def tick(self) -> bool:
        """Look after what nobody else does; whether anything moved."""
        if not self.ticks:
            return False
        self._begun = [handle for handle in self._begun if not handle.poll()]
        return self._turns.go()

    def wait(self, handle: TaskHandle, deadline: Deadline) -> None:
        """Until a sub-program has ended."""
        self._turns.wait(handle, deadline) if self.ticks else handle.wait(deadline)

    def _waited(self, begin: float) -> None:
        self.clock.recorder.span("wait", "compute", begin, self.clock.now(), self.clock.step)

    def start(self, request: ops.Start) -> Ticket:
        """Begin a request or sub-program in the background, which goes on as `progress` says. Servers always have a thread."""
        work, lane = request.work, request.lane
        if not request.shares_tags:
            self._num_started += 1
        if isinstance(work, ops.Send | ops.Recv):
            ticket = self._endpoint_of(lane).start(work)
            assert ticket is not None
            return ticket
        if isinstance(work, Request):
            ticket = self._start_native(work, lane)
            if ticket is not None:
                return ticket
        return self._start_strand(request)

    def _start_native(self, work: Request, lane: int) -> Ticket | None:
        """The library's own sum, as `progress` says; None where a sub-program is to take it."""
        if self._helper is not None and isinstance(work, ops.AllReduce):
            return Ticket(self._num_started, work, self._helper.start_all_reduce(flat_of(work.value)))
        match self._progress:
            case "blocking":
                begin = self.clock.now()
                done = Ticket.completed(self._here.perform(work))
                self._waited(begin)
                return done
            case "thread":
                return None
            case "tests" | "library":
                ticket = self._endpoint_of(lane).start(work, always=True)
                if ticket is not None and self.ticks:
                    self._begun.append(ticket.runtime)
                return ticket
            case _:
                return None if _is_long(work) else self._endpoint_of(lane).start(work)

    def _start_strand(self, request: ops.Start) -> Ticket:
        work, lane = request.work, request.lane
        strand_number = -1
        if not isinstance(work, Request):  # only these may be answered by chance, and are counted alike on every library
            self._num_strands += 1
            strand_number = self._num_strands
        number = self._num_started % NUM_TAG_RANGES
        tags = 0 if request.shares_tags else (1 + number) * TAG_SPAN
        endpoint = Endpoint(
            self.transport.for_lane(max(lane, 0)), self.clock, self._mailbox, spins=LANE_SPINS, tags=tags, task=strand_number
        )
        program = perform(work) if isinstance(work, Request) else work
        after = None if request.shares_tags else self._last.get(number)
        streams = self.transport.streams
        task = Task(
            program,
            endpoint,
            self.clock,
            self._own,
            priority=request.priority,
            after=after,
            serves=request.shares_tags,
            streams=streams,
            # What serves exchanges values with the foreground while both run: on one stream their work is in order.
            stream=streams.current() if request.shares_tags else self._stream_of(lane),
            begin=None if request.shares_tags else streams.mark(),
            sums=lane <= 0 or self.transport.sums_from_threads,
        )
        if not request.shares_tags:
            self._last[number] = task.handle
        ticket = Ticket(self._num_started, work, task.handle)
        if self._progress in ("library", "process") and not request.shares_tags and not isinstance(work, Request):
            raise ConfigError(f"progress={self._progress!r} is for the library's own sums: use collective=Native(), or progress='thread'")
        if request.shares_tags and not self.transport.has_threads:
            raise ConfigError("a server beside a worker needs an MPI with MPI_THREAD_MULTIPLE, which this one is not: use dedicated=True")
        if self._progress in ("blocking", "tests") and not request.shares_tags:
            self._turns.submit(task, lane)
            if self._progress == "blocking":
                begin = self.clock.now()
                self._turns.wait(task.handle, self.clock.deadline(f"a sub-program of step {self.clock.step}"))
                self._waited(begin)
            return ticket
        if lane not in self._lanes:
            self._lanes[lane] = FairExecutor(self.clock) if lane == FREE else Lane(self.clock, inside=True)
        self._lanes[lane].submit(task)
        return ticket

    def _stream_of(self, lane: int) -> Any:
        if lane not in self._streams:
            self._streams[lane] = self.transport.streams.new()
        return self._streams[lane]

    def _endpoint_of(self, lane: int) -> Endpoint:
        if lane <= 0:
            return self._here
        if lane not in self._beside:
            self._beside[lane] = Endpoint(self.transport.for_lane(lane), self.clock, self._mailbox)
        return self._beside[lane]

    @property
    def ended(self) -> bool:
        """Whether nothing is under way, and no thread of a lane is left."""
        return not self.transport.in_flight and all(lane.ended for lane in self._lanes.values())

    def close(self) -> None:
        """End the threads and the helper; work still in them is abandoned."""
        for lane in self._lanes.values():
            lane.close()
        if self._helper is not None:
            self._helper.close()
        self._own = _nobody  # the interpreter's own method: with it both would keep each other, and the library's sockets, alive


def _is_long(work: Request) -> bool:
    """Whether a sum is bound by the wire; the same on every rank, since lanes have connections of their own."""
    if not isinstance(work, ops.AllReduce):
        return False
    flat = flat_of(work.value)
    return flat.device.type == "cpu" and flat.numel() * flat.element_size() >= LONG_BYTES


def _nobody(request: Request, task: int) -> Any:  # noqa: ARG001 - the signature it stands in for
    raise RuntimeError(f"{type(request).__name__} was asked for after the end of the run")


def check_lanes(algorithm: Algorithm, progress: str) -> None:
    """Raise `ConfigError` for what would deadlock: looked after now and then, lanes would block in another order on each rank."""
    if progress == "tests" and algorithm.requires.num_lanes > 1:
        raise ConfigError(
            f"progress='tests' looks after one lane, and this method has {algorithm.requires.num_lanes}: use progress='thread'"
        )
