"""Recorders: where a runtime records one rank's metrics, spans and clock measurements."""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from pathlib import Path
from threading import Lock
from typing import Any, final, overload

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


_KEYS: dict[tuple[str, ...], tuple[str, ...]] = {}  # keys of rows -> the one object that all rows with these keys hold


@final
class Rows(Sequence[dict[str, Any]]):
    """Rows in memory. Those that are appended take half of the bytes of dictionaries: rows with equal keys hold them once.

    Reading such a row makes a new dictionary: what a reader changes in it is not kept. Its tuples come back as lists,
    as from a file.

    Args:
        watch: called with each row that comes.

    >>> rows = Rows()
    >>> rows.append({"step": 0, "loss": 2.5})
    >>> rows[-1]["loss"], rows
    (2.5, [{'step': 0, 'loss': 2.5}])
    """

    __slots__ = ("_items", "_watch")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, watch: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._items: list[dict[str, Any] | tuple[Any, ...]] = []  # a tuple: the row's keys, then its values
        self._watch = watch

    def append(self, row: dict[str, Any]) -> None:
        keys = tuple(row)
        values = [tuple(value) if type(value) is list else value for value in row.values()]  # smaller; () takes nothing
        self._items.append((_KEYS.setdefault(keys, keys), *values))
        if self._watch is not None:
            self._watch(row)

    def append_open(self, row: dict[str, Any]) -> None:
        """Append the dictionary itself, which its writer may complete later."""
        self._items.append(row)
        if self._watch is not None:
            self._watch(row)

    def copy(self) -> Rows:
        """Return the same rows, without the function that watches."""
        copied = Rows()
        copied._items = list(self._items)
        return copied

    def __repr__(self) -> str:
        return repr(list(self))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Rows | list) else NotImplemented

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(_as_dict, self._items)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [_as_dict(item) for item in self._items[index]]
        return _as_dict(self._items[index])


def _as_dict(item: dict[str, Any] | tuple[Any, ...]) -> dict[str, Any]:
    if isinstance(item, dict):
        return item
    keys, *values = item
    return {key: list(value) if type(value) is tuple else value for key, value in zip(keys, values, strict=True)}


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
        self.rows = Rows(_WATCH.get(None))
        self.spans: list[SpanRow] = []
        self.clocks: list[tuple[float, float]] = []
        self.events = Rows()

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
        self.rows.append_open(row)

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
