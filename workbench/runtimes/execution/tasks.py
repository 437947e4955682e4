"""Started sub-programs as tasks: in order on a lane's thread, or concurrently on one thread that polls all of them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, final

from workbench import ops
from workbench.errors import ConfigError
from workbench.ops import Program, Request, Ticket
from workbench.runtimes.execution.endpoint import PENDING, Caller, Endpoint, RankClock
from workbench.runtimes.transport.base import Deadline, Handle
from workbench.streams import HOST, Streams

LANE_SPINS = 20  # few: each poll of a lane takes the interpreter lock from the thread that computes


@final
class TaskHandle(Handle):
    """A started sub-program."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self.event = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None
        self.ready: Any = None  # the device event after which its value is valid, if it used its own stream
        self.then: Callable[[], None] | None = None  # called at its end, on the thread that ran it; must not raise

    def end(self, value: Any = None, error: BaseException | None = None, ready: Any = None) -> None:
        """Set its result."""
        self.value, self.error, self.ready = value, error, ready
        self.finished_s = time.perf_counter()
        self.event.set()
        if self.then is not None:
            self.then()

    def poll(self) -> bool:
        return self.event.is_set()

    def wait(self, deadline: Deadline) -> None:
        while not self.event.wait(0.1):
            deadline.check()


@final
class Task(Caller):
    """A started sub-program, and what it waits for.

    Args:
        answer: answers each of its requests. `PENDING` says that it waits for a ticket.
        after: the sub-program that used its tags before, which must have ended.
        serves: maybe no thread waits for it when it fails, so its failure is set on the rank clock.
        streams, stream: the device stream on which it works; None: its thread's own.
        begin: the device event after which it may begin.
        sums: whether it may ask for the library's own sums.
    """

    def __init__(
        self,
        program: Program,
        endpoint: Endpoint,
        clock: RankClock,
        answer: Callable[[Request, Caller], Any],
        *,
        priority: int = 0,
        after: TaskHandle | None = None,
        serves: bool = False,
        streams: Streams = HOST,
        stream: Any = None,
        begin: Any = None,
        sums: bool = True,
    ) -> None:
        self._streams, self._stream, self._begin, self._sums = streams, stream, begin, sums
        self.handle = TaskHandle()
        self._after, self._serves = after, serves
        self.priority = priority
        self.alone = False  # alone on its thread, which may block in the library
        self.endpoint = endpoint
        self._program, self._clock, self._answer = program, clock, answer
        self._reply: Any = None
        self._error: Exception | None = None  # of the request that it waited for
        self._tickets: tuple[Ticket, ...] = ()
        self._any = False  # whether one of the tickets is enough
        self._deadline_s: float | None = None
        self._num_waits = 0

    def ready(self) -> bool:
        """Return True if it can continue. Takes the result that it waited for."""
        if self._stream is None:
            return self._is_ready()
        with self._streams.on(self._stream):
            return self._is_ready()

    def _is_ready(self) -> bool:
        if self._after is not None:
            if not self._after.poll():
                return False
            self._after = None
        if not self._tickets:
            return True
        for position, ticket in enumerate(self._tickets):
            if ticket.done or ticket.runtime.poll():
                return self._found(position)
        if self._deadline_s is not None and self._clock.now() >= self._deadline_s:
            return self._found(-1)
        return False

    def _found(self, position: int) -> bool:
        try:
            value = self.endpoint.finish(self._tickets[position]) if position >= 0 else None
        except Exception as error:  # noqa: BLE001 - raised in the program
            self._raise_next(error)
            return True
        if self._any:
            self._clock.recorder.event({"task": self.endpoint.task, "wait_any": self._num_waits, "position": position})
            self._num_waits += 1
            self._reply = None if position < 0 else (position, value)
        else:
            self._reply = value
        self._tickets, self._any, self._deadline_s = (), False, None
        return True

    def _raise_next(self, error: Exception) -> None:
        """Raise the error of the request in the program, when it continues."""
        self._error = error
        self._tickets, self._any, self._deadline_s = (), False, None

    def block(self, deadline: Deadline) -> None:
        """Wait until it can continue; for a thread with nothing else to do."""
        if len(self._tickets) == 1 and self._deadline_s is None and not self._any:
            with self._streams.on(self._stream) if self._stream is not None else nullcontext():
                try:
                    self.endpoint.finish(self._tickets[0], inside=self.alone)
                except Exception as error:  # noqa: BLE001 - raised in the program
                    self._raise_next(error)
        while not self.ready():
            deadline.pause()

    def advance(self) -> bool:
        """Run it until it must wait. Returns True at its end, when its handle is complete."""
        if self._stream is None:
            return self._advance()
        with self._streams.on(self._stream):
            if self._begin is not None:
                self._streams.wait(self._begin)
                self._begin = None
            return self._advance()

    def _advance(self) -> bool:
        try:
            request = self._continue()
            while True:
                try:
                    waits = self._take(request)
                except Exception as error:  # noqa: BLE001 - the program may handle it
                    request = self._program.throw(error)
                    continue
                if waits:
                    return False
                request = self._continue()
        except StopIteration as stop:
            self.handle.end(stop.value, ready=None if self._stream is None else self._streams.record_event())
        except BaseException as error:  # noqa: BLE001 - raised where its handle is waited for
            self.fail(error)
        return True

    def _continue(self) -> Request:
        error, self._error = self._error, None
        return self._program.send(self._reply) if error is None else self._program.throw(error)

    def fail(self, error: BaseException) -> None:
        """End it with this error."""
        if self._serves and self._clock.failure is None:
            self._clock.failure = error
        self.handle.end(error=error)

    def _take(self, request: Request) -> bool:
        """Take a request and return False if its answer is known."""
        self._reply = self._answer(request, self)
        if self._reply is not PENDING:
            return False
        if self.alone and not self._any and not self._tickets[0].done:
            return True  # without polling, which would take the lock from another thread
        return not self._is_ready()

    def message(self, request: ops.Send | ops.Recv) -> Any:
        return self.wait(self.endpoint.start_message(request))

    def collective(self, operation: Callable[[Any], Any], request: Request) -> Any:
        if not self._sums:
            raise ConfigError(
                "NCCL may deadlock if threads of a rank begin sums on several lanes, because each rank may begin them "
                "in another "
                "order: use lanes=1 (max_delay=1), or sum over Send and Recv, for example with inner=Ring()"
            )
        return operation(request)

    def start(self, request: ops.Start) -> Ticket:
        ticket = self.endpoint.start(request.work) if isinstance(request.work, Request) else None
        assert ticket is not None, f"a sub-program cannot start {type(request.work).__name__} in the background"
        return ticket

    def wait(self, ticket: Ticket) -> Any:
        self._tickets = (ticket,)
        return PENDING

    def wait_any(self, tickets: tuple[Ticket, ...], timeout_s: float | None) -> Any:
        self._tickets, self._any = tickets, True
        self._deadline_s = None if timeout_s is None else self._clock.now() + timeout_s
        return PENDING


@final
class Lane:
    """A thread that runs started sub-programs in the order in which they started, which is the same on every rank.

    Args:
        inside: it may block in the library; the threads that wait for its sub-programs check for failures and have a
            deadline.
    """

    def __init__(self, clock: RankClock, *, inside: bool = False) -> None:
        self._clock, self._inside = clock, inside
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="workbench-lane", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        task.alone = self._inside
        self._queue.put(task)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            task.endpoint.enter_thread()
            try:
                task.block(self._clock.deadline("tags that another sub-program uses", LANE_SPINS))
                while not task.advance():
                    task.block(self._clock.deadline("what a sub-program waits for", LANE_SPINS))
            except BaseException as error:  # noqa: BLE001 - as in `advance`
                task.fail(error)
            del task  # else this thread would keep it, and its callback, until the next one

    def leave(self) -> None:
        """End the thread after the submitted tasks, without waiting: a garbage collection may run this on it."""
        self._queue.put(None)

    @property
    def ended(self) -> bool:
        """Return True if its thread has ended."""
        return not self._thread.is_alive()

    def close(self) -> None:
        self.leave()
        self._thread.join(timeout=1.0)


@final
class FairExecutor:
    """A thread that polls all free sub-programs and runs each as far as it can, the most urgent first.

    Any order is valid, because active sub-programs have separate tags. A sub-program
    whose tags an older one still uses waits until that one ends.
    """

    def __init__(self, clock: RankClock) -> None:
        self._clock = clock
        self._arrived: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._active: list[Task] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="workbench-executor", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        self._arrived.put(task)

    def _admit(self, block: bool) -> None:
        while True:
            try:
                task = self._arrived.get(block)
            except queue.Empty:
                break
            block = False
            if task is None:
                self._closing = True
                return
            task.endpoint.enter_thread()
            self._active.append(task)
        self._active.sort(key=lambda task: task.priority)  # stable: equally urgent ones stay in order of starting

    def _run(self) -> None:
        deadline = self._clock.deadline("what free sub-programs wait for", LANE_SPINS)
        while not self._closing:
            self._admit(block=not self._active)
            moved = False
            for task in list(self._active):
                try:
                    moves = task.ready()
                except BaseException as error:  # noqa: BLE001 - as in `Task.advance`
                    self._end(task, error)
                    continue
                if moves:
                    moved = True
                    if task.advance():
                        self._active.remove(task)
                    break  # begin again with the most urgent
            if moved:
                deadline = self._clock.deadline("what free sub-programs wait for", LANE_SPINS)
                continue
            try:
                deadline.pause()
            except BaseException as error:  # noqa: BLE001 - as in `Task.advance`
                for task in list(self._active):
                    self._end(task, error)

    def _end(self, task: Task, error: BaseException) -> None:
        task.fail(error)
        self._active.remove(task)

    @property
    def ended(self) -> bool:
        """Return True if its thread has ended."""
        return not self._thread.is_alive()

    def close(self) -> None:
        self._arrived.put(None)
        self._thread.join(timeout=1.0)
