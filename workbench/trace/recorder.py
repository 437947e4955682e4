"""Recorders: where a runtime records one rank's metrics, spans and clock measurements."""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from pathlib import Path
from threading import Lock
from typing import Any, final

from workbench.trace.files.append import append, cannot_write, create, open_append
from workbench.trace.kinds import CODES

FLUSH_S = 0.5  # rows older than this are written at the next call, even inside a step

SpanRow = tuple[str, str, float, float, int, int, int, int]  # kind, lane, start_s, end_s, step, bucket, bytes, peer


def metrics_name(rank: int) -> str:
    """Return the file name of one rank's metrics."""
    return f"metrics-{rank:05d}.jsonl"


def events_name(rank: int) -> str:
    """Return the file name of one rank's events: server updates and timing-dependent answers.

    The file exists only if there are any.
    """
    return f"events-{rank:05d}.jsonl"


def trace_name(rank: int) -> str:
    """Return the file name of one rank's spans."""
    return f"trace-{rank:05d}.jsonl"


class Recorder(ABC):
    """Records one rank.

    Any thread may call `span` and `event`; only the thread of the program calls the other methods.
    """

    @abstractmethod
    def span(
        self,
        kind: str,
        lane: str,
        start_s: float,
        end_s: float,
        step: int,
        bucket: int = -1,
        num_bytes: int = 0,
        peer: int = -1,
    ) -> None:
        """Record that `kind` (one of `KINDS`) happened on `lane` between two times of this rank's clock."""

    @abstractmethod
    def metrics(self, row: dict[str, Any]) -> None:
        """Record one row: a step's numbers, or an evaluation's."""

    @abstractmethod
    def event(self, row: dict[str, Any]) -> None:
        """Record a server's update, or an answer that depends on timing. A replay needs both."""

    @abstractmethod
    def clock(self, at_s: float, offset_s: float) -> None:
        """Record a clock measurement: at `at_s` of this rank's clock, rank 0's clock shows `at_s + offset_s`."""

    @abstractmethod
    def end_step(self) -> None:
        """End a step: everything recorded so far must survive a crash."""

    @abstractmethod
    def close(self) -> None:
        """End the record. Closing twice is allowed."""


_WATCH: ContextVar[Callable[[dict[str, Any]], None]] = ContextVar("watch")


@contextmanager
def watched_rows(watch: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Within the block, call `watch` with each row of metrics that is kept in memory: the progress of a simulation."""
    token = _WATCH.set(watch)
    try:
        yield
    finally:
        _WATCH.reset(token)


@final
class _WatchedRows(list[dict[str, Any]]):
    """Rows that are shown to a function when they are appended."""

    def __init__(self, watch: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._watch = watch

    def append(self, row: dict[str, Any]) -> None:
        super().append(row)
        self._watch(row)


@final
class MemoryRecorder(Recorder):
    """Keeps everything in lists (simulated runs, notebooks, tests).

    >>> recorder = MemoryRecorder(rank=1)
    >>> recorder.span("forward", "compute", 0.0, 0.25, step=0)
    >>> recorder.spans
    [('forward', 'compute', 0.0, 0.25, 0, -1, 0, -1)]
    """

    def __init__(self, rank: int = 0, trace_steps: int | None = None) -> None:
        self.rank = rank
        self._traced = inf if trace_steps is None else trace_steps
        watch = _WATCH.get(None)
        self.rows: list[dict[str, Any]] = [] if watch is None else _WatchedRows(watch)
        self.spans: list[SpanRow] = []
        self.clocks: list[tuple[float, float]] = []
        self.events: list[dict[str, Any]] = []

    def span(
        self,
        kind: str,
        lane: str,
        start_s: float,
        end_s: float,
        step: int,
        bucket: int = -1,
        num_bytes: int = 0,
        peer: int = -1,
    ) -> None:
        if step < self._traced:
            self.spans.append((kind, lane, start_s, end_s, step, bucket, num_bytes, peer))

    def metrics(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def event(self, row: dict[str, Any]) -> None:
        self.events.append(row)

    def clock(self, at_s: float, offset_s: float) -> None:
        self.clocks.append((at_s, offset_s))

    def end_step(self) -> None:
        """Nothing to do: memory does not outlive a crash."""

    def close(self) -> None:
        """Nothing to do."""


@final
class NullRecorder(Recorder):
    """Keeps nothing: for a loop without a record."""

    def span(
        self,
        kind: str,
        lane: str,
        start_s: float,
        end_s: float,
        step: int,
        bucket: int = -1,
        num_bytes: int = 0,
        peer: int = -1,
    ) -> None:
        """Nothing."""

    def metrics(self, row: dict[str, Any]) -> None:
        """Nothing."""

    def event(self, row: dict[str, Any]) -> None:
        """Nothing."""

    def clock(self, at_s: float, offset_s: float) -> None:
        """Nothing."""

    def end_step(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


@final
class FileRecorder(Recorder):
    """Appends complete lines to the rank's files, in one write at the end of every step.

    `span` only appends to a queue; spans become text when they are written. A reader may follow the files while they
    grow.

    Args:
        folder: the run's folder. It must exist, without a record of this rank unless `extends`.
        rank: this rank.
        header: first line of the trace: rank, host, pid, device, origin_s, unix_s.
        trace_steps: number of steps whose spans are kept; None keeps all.
        extends: append to the files of an earlier process of this rank.

    If the files can no longer be written, the lines written so far stay complete. `end_step` or `close` then raises.

    Raises:
        ConfigError: the folder already holds a record of this rank.
        WorkbenchError: the record cannot be written.
    """

    def __init__(
        self, folder: Path, rank: int, header: dict[str, Any], trace_steps: int | None = None, *, extends: bool = False
    ) -> None:
        self._traced = inf if trace_steps is None else trace_steps
        self._open = open_append if extends else create
        self._spans: deque[SpanRow] = deque()  # deques: append and popleft are atomic, so no thread waits to record
        self._rows: deque[str] = deque()  # of metrics
        self._events: deque[str] = deque()
        self._events_path = Path(folder) / events_name(rank)
        self._events_file = -1
        self._notes = deque([json.dumps({**header, "rank": rank}, default=_plain) + "\n"])  # header and clocks
        self._lanes: dict[str, str] = {}
        self._writing = Lock()
        self._folder = Path(folder)
        self._error: OSError | None = None  # why the record cannot be written
        self._told = False
        try:
            self._metrics_file = self._open(self._folder / metrics_name(rank))
            self._trace_file = self._open(self._folder / trace_name(rank))
        except OSError as error:
            raise cannot_write(self._folder, error) from error
        self._closed = False
        self._written_s = 0.0
        self.end_step()

    def span(
        self,
        kind: str,
        lane: str,
        start_s: float,
        end_s: float,
        step: int,
        bucket: int = -1,
        num_bytes: int = 0,
        peer: int = -1,
    ) -> None:
        if step >= self._traced:
            return
        self._spans.append((kind, lane, start_s, end_s, step, bucket, num_bytes, peer))
        if time.monotonic() - self._written_s > FLUSH_S and self._writing.acquire(blocking=False):
            try:
                self._write()
            finally:
                self._writing.release()

    def metrics(self, row: dict[str, Any]) -> None:
        self._rows.append(row_text(row))

    def event(self, row: dict[str, Any]) -> None:
        self._events.append(json.dumps(row, default=_plain) + "\n")

    def clock(self, at_s: float, offset_s: float) -> None:
        self._notes.append(json.dumps({"clock": {"at_s": at_s, "offset_s": offset_s}}) + "\n")

    def end_step(self) -> None:
        with self._writing:
            self._write()
        self._raise_error()

    def close(self) -> None:
        with self._writing:
            if not self._closed:
                self._write()
                self._closed = True
                os.close(self._metrics_file)
                os.close(self._trace_file)
                if self._events_file >= 0:
                    os.close(self._events_file)
        if not self._told:
            self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            self._told = True
            raise cannot_write(self._folder, self._error) from self._error

    def _write(self) -> None:
        if self._closed:  # a background thread that outlived the run
            return
        lines = [self._notes.popleft() for _ in range(len(self._notes))]
        lines.extend(self._text(self._spans.popleft()) for _ in range(len(self._spans)))
        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        events = [self._events.popleft() for _ in range(len(self._events))]
        self._written_s = time.monotonic()
        if self._error is not None:
            return
        try:
            append(self._trace_file, lines)
            append(self._metrics_file, rows)
            if events:
                if self._events_file < 0:
                    self._events_file = self._open(self._events_path)
                append(self._events_file, events)
        except OSError as error:  # raised later on the program's thread, because any thread may be here
            self._error = error

    def _text(self, span: SpanRow) -> str:
        kind, lane, start_s, end_s, step, bucket, num_bytes, peer = span
        assert kind in CODES, f"{kind!r} is not a kind of span"
        assert end_s >= start_s, f"a {kind} span that ends at {end_s} before it starts at {start_s}"
        quoted = self._lanes.get(lane)
        if quoted is None:
            quoted = self._lanes[lane] = json.dumps(lane)
        return f'["{kind}",{quoted},{start_s:.7f},{end_s:.7f},{step},{bucket},{num_bytes},{peer}]\n'


def row_text(row: dict[str, Any]) -> str:
    """Return a row of metrics as a line of its file."""
    return json.dumps(row, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    """Convert NumPy and torch scalars to Python numbers."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be written to a record: give plain numbers and text")
