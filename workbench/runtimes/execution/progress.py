"""The progress engine: how started communication makes progress while the rank computes.

| progress | the library's own sums | sub-programs over messages |
|---|---|---|
| "auto" | by the library if it moves bytes itself (NCCL, gloo; not long ones on a CPU), else on a lane's thread | on a lane's thread |
| "blocking" | at once, in the foreground: nothing is hidden | the same |
| "tests" | begun without blocking, and polled at every request and every gradient of backward; one lane only | the same |
| "thread" | on a lane's thread | on a lane's thread |
| "library" | begun without blocking, and left to the library | refused |

With several lanes, a rank asks for "thread" instead of "auto": `rank.main.progress_of` says why.

Two gloo sums in progress at once compete for one connection. On a slow network Pipe-SGD's steps were 4 to 7 % longer
than with one sum after the other. So "auto" runs long sums on a lane's thread. Short sums hide each other's latency
instead.

Free sub-programs wait for other ranks' work, not for bytes. Under "auto" and "thread" they share one thread; servers
always do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from workbench import ops
from workbench.collectives import flat_of
from workbench.errors import ConfigError
from workbench.ops import FREE, Request, Ticket
from workbench.program import Algorithm, perform
from workbench.runtimes.execution.endpoint import Caller, Endpoint, RankClock
from workbench.runtimes.execution.polling import PollingExecutor
from workbench.runtimes.execution.tasks import LANE_SPINS, FairExecutor, Lane, Task, TaskHandle
from workbench.runtimes.transport.base import Deadline, Handle, Transport
from workbench.runtimes.transport.mailbox import Mailbox
from workbench.units import MIB

TAG_SPAN = 1024  # tags of a started sub-program: each has its own range
LONG_BYTES = 4 * MIB  # a longer sum is bound by the network
NUM_TAG_RANGES = 28  # MPI guarantees tags up to 32767


@final
class ProgressEngine:
    """A rank's lanes, and how they make progress.

    Args:
        here: the foreground's endpoint.
        answer: answers a request of a sub-program; of the foreground if the sub-program is None.
        progress: a row of the table above.
    """

    def __init__(
        self,
        transport: Transport,
        clock: RankClock,
        mailbox: Mailbox,
        here: Endpoint,
        answer: Callable[[Request, Caller | None], Any],
        *,
        progress: str,
    ) -> None:
        self.transport, self.clock = transport, clock
        self._mailbox, self._here, self._answer = mailbox, here, answer
        self._progress = progress
        self._polling = PollingExecutor()
        self._begun: list[Handle] = []  # handles of the library, to be polled
        self._endpoints: dict[int, Endpoint] = {}  # lane -> endpoint that starts the library's sums of that lane
        self._lanes: dict[int, Lane | FairExecutor] = {}
        self._num_started = self._num_programs = 0
        self._streams: dict[int, Any] = {}  # lane -> the device stream of its sub-programs
        self._last: dict[int, TaskHandle] = {}  # range of tags -> the last sub-program that used it
        if not transport.has_threads and progress in ("auto", "thread"):
            self._progress = "tests"

    @property
    def ticks(self) -> bool:
        """Return True if `tick` must be called now and then."""
        return self._progress == "tests"

    def tick(self) -> bool:
        """Poll what no thread drives. Returns whether anything moved."""
        if not self.ticks:
            return False
        self._begun = [handle for handle in self._begun if not handle.poll()]
        return self._polling.go()

    def wait(self, handle: TaskHandle, deadline: Deadline) -> None:
        """Wait until a sub-program has ended."""
        self._polling.wait(handle, deadline) if self.ticks else handle.wait(deadline)

    def _waited(self, begin: float) -> None:
        self.clock.recorder.span("wait", self.clock.compute_lane, begin, self.clock.now(), self.clock.step)

    def start(self, request: ops.Start) -> Ticket:
        """Begin a request or sub-program in the background. Servers always have a thread."""
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
        return self._start_program(request)

    def _start_native(self, work: Request, lane: int) -> Ticket | None:
        """Begin the library's own sum; None if a sub-program must take it."""
        match self._progress:
            case "blocking":
                return self._perform_now(work)
            case "thread":
                return None
            case "tests" | "library":
                ticket = self._endpoint_of(lane).start(work, always=True)
                if ticket is not None and self.ticks:
                    self._begun.append(ticket.runtime)
                return ticket
            case _:
                return None if _is_long(work) else self._endpoint_of(lane).start(work)

    def _perform_now(self, work: Request) -> Ticket:
        """Do the work in the foreground. Its error is raised at `Wait`, as that of other work."""
        done = Ticket.completed(None)
        try:
            done.value = self._answer(work, None)
        except Exception as error:  # noqa: BLE001 - raised at `Wait`
            done.error = error
        return done

    def _start_program(self, request: ops.Start) -> Ticket:
        work, lane = request.work, request.lane
        program_number = -1
        if not isinstance(work, Request):  # only sub-programs draw random numbers; all libraries count them equally
            self._num_programs += 1
            program_number = self._num_programs
        number = self._num_started % NUM_TAG_RANGES
        tags = 0 if request.shares_tags else (1 + number) * TAG_SPAN
        endpoint = Endpoint(
            self.transport.for_lane(max(lane, 0)),
            self.clock,
            self._mailbox,
            spins=LANE_SPINS,
            tags=tags,
            task=program_number,
        )
        program = perform(work) if isinstance(work, Request) else work
        after = None if request.shares_tags else self._last.get(number)
        streams = self.transport.streams
        task = Task(
            program,
            endpoint,
            self.clock,
            self._answer,
            priority=request.priority,
            after=after,
            serves=request.shares_tags,
            streams=streams,
            # A server exchanges values with the foreground while both run: one stream keeps their work in order.
            stream=streams.current() if request.shares_tags else self._stream_of(lane),
            begin=None if request.shares_tags else streams.record_event(),
            sums=lane <= 0 or self.transport.sums_from_threads,
        )
        if not request.shares_tags:
            self._last[number] = task.handle
        ticket = Ticket(self._num_started, work, task.handle)
        if self._progress == "library" and not request.shares_tags and not isinstance(work, Request):
            raise ConfigError(
                f"progress={self._progress!r} is for the library's own sums: use collective=Native(), or "
                "progress='thread'"
            )
        if request.shares_tags and not self.transport.has_threads:
            raise ConfigError(
                "a server next to a worker needs an MPI with MPI_THREAD_MULTIPLE, which this one lacks: use "
                "dedicated=True"
            )
        if self._progress in ("blocking", "tests") and not request.shares_tags:
            self._polling.submit(task, lane)
            if self._progress == "blocking":
                begin = self.clock.now()
                self._polling.wait(task.handle, self.clock.deadline(f"a sub-program of step {self.clock.step}"))
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
        if lane not in self._endpoints:
            self._endpoints[lane] = Endpoint(self.transport.for_lane(lane), self.clock, self._mailbox)
        return self._endpoints[lane]

    @property
    def ended(self) -> bool:
        """Return True if nothing is in progress and every lane's thread has ended."""
        return not self.transport.in_flight and all(lane.ended for lane in self._lanes.values())

    def close(self) -> None:
        """End the threads. Work in progress is abandoned."""
        for lane in self._lanes.values():
            lane.close()
        self._answer = (
            _refuse_after_end  # drop the interpreter's method: the cycle would keep the library's sockets open
        )


def _is_long(work: Request) -> bool:
    """Return True if a sum is bound by the network. Equal on every rank, because lanes have separate connections."""
    if not isinstance(work, ops.AllReduce):
        return False
    flat = flat_of(work.value)
    return flat.device.type == "cpu" and flat.numel() * flat.element_size() >= LONG_BYTES


def _refuse_after_end(request: Request, caller: Caller | None) -> Any:  # noqa: ARG001 - the signature of `answer`
    raise RuntimeError(f"{type(request).__name__} was asked for after the end of the run")


def check_lanes(algorithm: Algorithm, progress: str) -> None:
    """Raise `ConfigError` for a deadlock: with "tests", lanes would block in a different order on each rank."""
    if progress == "tests" and algorithm.requires.num_lanes > 1:
        raise ConfigError(
            f"progress='tests' drives one lane, and this algorithm has {algorithm.requires.num_lanes}: use "
            "progress='thread'"
        )
