"""Started sub-programs without a thread: they go on whenever the foreground looks after them, as MPI_Test would let them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import final

from workbench.ops import FREE
from workbench.runtimes.execution.tasks import Task, TaskHandle
from workbench.runtimes.transport.base import Deadline


@final
class PollingExecutor:
    """Sub-programs in the foreground's hands: those of one lane one after the other, free ones side by side."""

    def __init__(self) -> None:
        self._lanes: dict[int, deque[Task]] = defaultdict(deque)
        self._num_free = 0

    def submit(self, task: Task, lane: int) -> None:
        """Begin one; it goes on at the next turn."""
        if lane == FREE:  # a lane of its own
            self._num_free += 1
            lane = FREE - self._num_free
        self._lanes[lane].append(task)

    def go(self) -> bool:
        """Let each go on as far as it can; whether any did."""
        moved = False
        for line in list(self._lanes.values()):
            while line:
                try:
                    if not line[0].ready():
                        break
                    ended = line[0].advance()
                except BaseException as error:  # noqa: BLE001 - handed to whoever waits for it
                    line[0].fail(error)
                    ended = True
                moved = True
                if not ended:
                    break
                line.popleft()
        return moved

    def wait(self, handle: TaskHandle, deadline: Deadline) -> None:
        """Until that one has ended, looking after all meanwhile."""
        self.until(handle.poll, deadline)

    def until(self, done: Callable[[], bool], deadline: Deadline) -> None:
        """Until something is so."""
        while not done():
            if not self.go():
                deadline.pause()
