"""Answers of a recorded run that depend on timing: the order of messages, and the time of the clock."""

from __future__ import annotations

from collections import deque
from typing import Any, final

from workbench.errors import ConfigError


@final
class RecordedAnswers:
    """The answers to one program of one rank, in the order of its requests.

    Args:
        events: the rank's recorded events.
        rank, task: rank and number of the program.
    """

    def __init__(self, events: list[dict[str, Any]], rank: int, task: int) -> None:
        mine = [row for row in events if row.get("task") == task]
        self._name = f"rank {rank}, program {task}"
        self._sources = deque(
            row["source"] for row in sorted((row for row in mine if "any" in row), key=lambda row: row["any"])
        )
        self._positions = deque(row["position"] for row in mine if "wait_any" in row)
        self._nows = deque(row["now"] for row in mine if "now" in row)
        self.position = -1  # of the last `WaitAny`
        # Steps after which the rank was asked to stop.
        self.controls = {row["control"] for row in mine if "control" in row}

    def source(self) -> int:
        """Return the sender of the next receive from any rank; -1 at the record's end, where none was waited for."""
        return int(self._sources.popleft()) if self._sources else -1

    def next_position(self) -> int:
        """Return the position of the ticket that the next `WaitAny` found; -1 if it timed out."""
        self.position = int(self._next(self._positions, "WaitAny"))
        return self.position

    def now(self) -> float:
        """Return the time that the next `Now` returned."""
        return float(self._next(self._nows, "Now"))

    def _next(self, answers: deque[Any], what: str) -> Any:
        if not answers:
            raise ConfigError(
                f"no further answer to {what} in the record of {self._name}: its algorithm, problem or settings differ"
            )
        return answers.popleft()
