"""The state of a simulated cluster, and how a process runs from one request to the next.

A process is a program of one worker: a generator of requests. `SimProcess.resume` takes requests from it until one
takes time. A handler answers each request. It is a function `(cluster, process, request)` that returns the answer, or
`PENDING`. After `PENDING` it resumes the process later, by the clock. `simulation.HANDLERS` names the handler of each
type of request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from workbench.costs import AnyNetwork
from workbench.ops import Apply, Program, Ticket
from workbench.runtimes.simulator.fabric import Clock, Fabric
from workbench.runtimes.simulator.pass_times import PassTimes
from workbench.runtimes.simulator.recorded_answers import RecordedAnswers
from workbench.runtimes.simulator.worker import SimWorker

Continuation = Callable[[Any, Exception | None], None]
PENDING = object()  # a handler's answer to a request that takes time


@final
class SimCluster:
    """The state that handlers share.

    Attributes:
        clock, fabric: virtual time, and the simulated network.
        network, times: the costs of communication, and the times of computing.
        handlers: type of request -> its handler.
        processes: processes that have not ended, in order of their beginning.
        recorded: rank -> recorded events of the run that is replayed; None if this is no replay.
        errors: errors of background work that no `Wait` has raised yet.
        on_update: called with (worker, request, end time) for each update of a server's copy.
        check_in_flight: verify that no value changes between its request and its use by the network.
    """

    __slots__ = (
        "_answers",
        "check_in_flight",
        "clock",
        "errors",
        "fabric",
        "handlers",
        "network",
        "num_workers",
        "on_update",
        "processes",
        "recorded",
        "times",
    )

    def __init__(
        self,
        network: AnyNetwork,
        times: PassTimes,
        num_workers: int,
        handlers: Handlers,
        *,
        check_in_flight: bool,
    ) -> None:
        self.clock = Clock()
        self.fabric = Fabric(self.clock, network, num_workers)
        self.network, self.times, self.num_workers = network, times, num_workers
        self.handlers = handlers
        self.check_in_flight = check_in_flight
        self.processes: dict[SimProcess, None] = {}
        self.errors: list[Exception] = []
        self.on_update: Callable[[SimWorker, Apply, float], None] | None = None
        self.recorded: dict[int, list[dict[str, Any]]] | None = None
        self._answers: dict[tuple[int, int], RecordedAnswers] = {}

    def answers_of(self, rank: int, task: int) -> RecordedAnswers | None:
        """The recorded answers to a program; None if this is no replay."""
        if self.recorded is None or task < 0:
            return None
        if (rank, task) not in self._answers:
            self._answers[rank, task] = RecordedAnswers(self.recorded.get(rank, []), rank, task)
        return self._answers[rank, task]


@final
class SimProcess:
    """A program of one worker: its own, or one that it started.

    Args:
        then: called with (returned value, None) at the program's end, or with (None, error).
        key: key of its messages. It is 0 for the worker's own program, and for a server that shares its tags.
        task: number of this program among the worker's programs, in order of starting. The worker's own is 0.
        priority: priority of its messages that wait for an interface.
        free: it runs on no lane, and may still wait when the run is stopped.
        channel: channel of its collectives.
        background: an error of the program is given to `then`. Otherwise it ends the simulation.
    """

    __slots__ = (
        "_program",
        "_send",
        "background",
        "channel",
        "cluster",
        "free",
        "key",
        "lanes",
        "num_started",
        "num_tasks",
        "pending",
        "priority",
        "recorded",
        "task",
        "then",
        "waiting_since_s",
        "worker",
    )

    def __init__(
        self,
        cluster: SimCluster,
        worker: SimWorker,
        program: Program,
        then: Continuation,
        *,
        key: int = 0,
        task: int = 0,
        priority: int = 0,
        free: bool = False,
        channel: str = "foreground",
        background: bool = False,
    ) -> None:
        self.cluster, self.worker = cluster, worker
        self.key, self.task, self.priority, self.free, self.channel = key, task, priority, free, channel
        self.then, self.background = then, background
        self.pending: Any = None  # the request that it waits for
        self.recorded = cluster.answers_of(worker.rank, task)
        self.num_started = 0  # background work so far: the next key
        self.num_tasks = 0  # background programs so far
        self.lanes: dict[int, list[SimProcess]] = {}  # of background programs; nearly always one or two
        self.waiting_since_s = 0.0
        self.run_next(program)

    def run_next(self, program: Program) -> None:
        """Make this the program that `resume` begins."""
        self._program, self._send = program, program.send
        self.cluster.processes[self] = None

    def resume(self, answer: Any = None, error: Exception | None = None) -> None:
        """Continue with the answer to the last request, or with its error, until one takes time."""
        cluster, send = self.cluster, self._send
        handlers = cluster.handlers
        try:
            self.pending = request = send(answer) if error is None else self._program.throw(error)
            while True:
                try:
                    answer = handlers[request.__class__](cluster, self, request)
                    if answer is PENDING:
                        return
                except Exception as raised:  # noqa: BLE001 - the program may handle it
                    self.pending = request = self._program.throw(raised)
                else:
                    self.pending = request = send(answer)
        except StopIteration as stop:
            cluster.processes.pop(self, None)
            self.then(stop.value, None)
        except Exception as unhandled:  # noqa: BLE001 - raised again, here or at `Wait`
            self._fail(unhandled)

    def waited(self, answer: Any, since_s: float) -> None:
        """Continue with the answer to a request that the program has waited for."""
        if self.task == 0 and self.worker.traced:
            self.worker.recorder.span("wait", "compute", since_s, self.cluster.clock.now_s, self.worker.step)
        self.resume(answer)

    def _fail(self, error: Exception) -> None:
        """End with an error. Background work gives it to `then`; otherwise it ends the simulation."""
        if not self.background or self not in self.cluster.processes:
            raise error
        self.close()
        self.then(None, error)

    def close(self) -> None:
        """Close the program."""
        self._program.close()
        self.cluster.processes.pop(self, None)

    def halt(self) -> None:
        """End the program, because the worker's process ends. Nothing follows."""
        self.close()
        self.then = _ignore


Handler = Callable[[SimCluster, SimProcess, Any], Any]


@final
class Handlers(dict[type, Handler]):
    """Type of request -> its handler."""

    def __missing__(self, kind: type) -> Handler:
        raise TypeError(f"{kind.__name__} is not a request of the simulator")


def complete(cluster: SimCluster, ticket: Ticket, value: Any, error: Exception | None = None) -> None:
    """End background work: resume the processes that wait for it."""
    ticket.done, ticket.value = True, value
    if error is not None:
        ticket.error = error
        cluster.errors.append(error)
    for action in ticket.runtime:
        action()


def _ignore(value: Any, error: Exception | None) -> None:
    """Ignore the end of a program whose process has ended."""
