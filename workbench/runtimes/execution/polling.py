"""Started sub-programs without a thread: they make progress when the foreground polls them, as with MPI_Test."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import final

from workbench.ops import FREE
from workbench.runtimes.execution.tasks import Task, TaskHandle
from workbench.runtimes.transport.base import Deadline


@final
class PollingExecutor:
    """Runs sub-programs on the foreground's thread: those of one lane in order, free ones concurrently."""

    def __init__(self) -> None:
        self._lanes: dict[int, deque[Task]] = defaultdict(deque)
        self._num_free = 0

    def submit(self, task: Task, lane: int) -> None:
        """Add a task; it runs at the next call of `go`."""
        if lane == FREE:  # a separate lane
            self._num_free += 1
            lane = FREE - self._num_free
        self._lanes[lane].append(task)

    def go(self) -> bool:
        """Run each task as far as possible. Return True if any moved."""
        moved = False
        for line in list(self._lanes.values()):
            while line:
                try:
                    if not line[0].ready():
                        break
                    ended = line[0].advance()
                except BaseException as error:  # noqa: BLE001 - raised where its handle is waited for
                    line[0].fail(error)
                    ended = True
                moved = True
                if not ended:
                    break
                line.popleft()
        return moved

    def wait(self, handle: TaskHandle, deadline: Deadline) -> None:
        """Run all tasks until this one has ended."""
        self.until(handle.poll, deadline)

    def until(self, done: Callable[[], bool], deadline: Deadline) -> None:
        """Run all tasks until `done()`."""
        while not done():
            if not self.go():
                deadline.pause()
