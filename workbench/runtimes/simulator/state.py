"""The state of a simulated cluster, and how a process runs from one request to the next.

A process is a program of one worker: a generator of requests. `SimProcess.resume` asks it for requests until one takes time. A
handler answers each request: a function `(cluster, process, request)` that returns the answer, or `PENDING`. In the latter case it
resumes the process later, by the clock. `simulation.HANDLERS` names the handler of each type of request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, final

from workbench.costs import AnyNetwork
from workbench.ops import Apply, Program, Ticket
from workbench.runtimes.simulator.fabric import Clock, Fabric
from workbench.runtimes.simulator.pass_times import PassTimes
from workbench.runtimes.simulator.recorded_answers import RecordedAnswers
from workbench.runtimes.simulator.worker import SimWorker

Then = Callable[[Any, Exception | None], None]
PENDING = object()  # a handler's answer to a request that takes time


@final
class SimCluster:
    """What handlers answer requests with.

    Attributes:
        clock, fabric: virtual time, and the network that messages pass.
        network, times: what communication costs, and what computing costs.
        handlers: type of request -> its handler.
        processes: those that have not ended, in order of beginning.
        recorded: rank -> recorded events of the run that is replayed; None where nothing is.
        errors: of background work, as long as no `Wait` has raised them.
        on_update: called with (worker, request, when it ends) of each update of a server's copy.
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
        self, network: AnyNetwork, times: PassTimes, num_workers: int, handlers: Mapping[type, Handler], *, check_in_flight: bool
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
        """The recorded answers of a program; None where nothing is replayed."""
        if self.recorded is None or task < 0:
            return None
        if (rank, task) not in self._answers:
            self._answers[rank, task] = RecordedAnswers(self.recorded.get(rank, []), rank, task)
        return self._answers[rank, task]


@final
class SimProcess:
    """A program of one worker: its own, or one that it started.

    Args:
        then: called with what the program returns, and with None.
        key: of its messages: 0 for the worker's own program and for a server that shares its tags.
        task: which program of this worker it is, in order of starting; the worker's own is 0.
        priority: of its messages among those that wait for an interface.
        free: it runs on no lane, and may still wait when the run is stopped.
        channel: of its collectives.
        background: an error of the program is given to `then`. Else it ends the simulation.
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
        then: Then,
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
        self.num_started = 0  # works in the background, as their keys count them
        self.num_tasks = 0  # programs in the background
        self.lanes: dict[int, deque[SimProcess]] = {}
        self.waiting_since_s = 0.0
        self.run_next(program)

    def run_next(self, program: Program) -> None:
        """Make this the program that `resume` begins."""
        self._program, self._send = program, program.send
        self.cluster.processes[self] = None

    def resume(self, answer: Any = None) -> None:
        """Continue with the answer to the last request, until one takes time."""
        cluster, send = self.cluster, self._send
        handlers = cluster.handlers
        try:
            while True:
                self.pending = request = send(answer)
                handler = handlers.get(request.__class__)
                if handler is None:
                    raise TypeError(f"{type(request).__name__} is not a request that can be answered here")
                answer = handler(cluster, self, request)
                if answer is PENDING:
                    return
        except StopIteration as stop:
            cluster.processes.pop(self, None)
            self.then(stop.value, None)
        except Exception as error:  # noqa: BLE001 - raised again, here or at `Wait`
            self.fail(error)

    def waited(self, answer: Any, since_s: float) -> None:
        """Continue with the answer to a request that the program has waited for."""
        if self.task == 0 and self.worker.traced:
            self.worker.recorder.span("wait", "compute", since_s, self.cluster.clock.now_s, self.worker.step)
        self.resume(answer)

    def fail(self, error: Exception) -> None:
        """End with an error: of background work it goes to `then`, else it ends the simulation."""
        if not self.background or self not in self.cluster.processes:
            raise error
        self.close()
        self.then(None, error)

    def close(self) -> None:
        """End here."""
        self._program.close()
        self.cluster.processes.pop(self, None)

    def halt(self) -> None:
        """End with the worker's process: nothing follows."""
        self.close()
        self.then = _ignore


Handler = Callable[[SimCluster, SimProcess, Any], Any]


def complete(cluster: SimCluster, ticket: Ticket, value: Any, error: Exception | None = None) -> None:
    """End background work: resume the processes that wait for it."""
    ticket.done, ticket.value, ticket.error = True, value, error
    if error is not None:
        cluster.errors.append(error)
    for action in ticket.runtime:
        action()


def _ignore(value: Any, error: Exception | None) -> None:
    """Take the value of a program whose process has ended: nothing needs it."""
