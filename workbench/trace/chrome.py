"""Chrome trace JSON for ui.perfetto.dev and chrome://tracing: written, and read back.

Each rank is a process, each lane a thread, and each message an arrow. `otherData` describes the run, so that a file
read back has the same spans, to the nanosecond to which times are rounded.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ConfigError
from workbench.trace.files.atomic import atomic_file
from workbench.trace.info import fault_of
from workbench.trace.links import messages
from workbench.trace.read import Trace
from workbench.trace.row_checks import is_note, is_number, is_span
from workbench.trace.rows import sublanes
from workbench.trace.spans import Spans

TICKS_PER_S = 1e6  # the format's unit is the microsecond
LATEST_S = 1e15  # no clock shows more
TICK = 0.001  # smallest time in that unit
OURS = "workbench"  # the entry of `otherData` that a file of this module has
FIRST = 1  # number of rank 0's process and of its first thread: Perfetto uses 0 for the kernel's idle task


def chrome_events(spans: Spans, headers: Mapping[int, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield spans as trace events, after the events that name processes and threads.

    Times begin at the earliest span. The format requires that events of one thread nest. So spans of a lane that
    overlap in part get additional threads.
    """
    table = spans.table
    origin_s = float(table["start_s"].min()) if len(table) else 0.0
    threads: dict[tuple[int, int, int], int] = {}
    sub = sublanes(table)
    for rank, lane, number in sorted(set(_columns(table, sub))):
        threads[rank, lane, number] = FIRST + sum(key[0] == rank for key in threads)
    for rank in spans.ranks:
        host = headers.get(rank, {}).get("host")
        yield _metadata("process_name", rank, FIRST, name=f"rank {rank}" + (f" on {host}" if host else ""))
        yield _metadata("process_sort_index", rank, FIRST, sort_index=rank)
    for (rank, lane, number), thread in threads.items():
        name = spans.lanes[lane]
        yield _metadata("thread_name", rank, thread, name=name + (f" ({number + 1})" if number else ""), lane=name)
        yield _metadata("thread_sort_index", rank, thread, sort_index=thread)
    starts, ends = _ticks(table["start_s"], origin_s), _ticks(table["end_s"], origin_s)
    places = [(FIRST + rank, threads[rank, lane, number]) for rank, lane, number in _columns(table, sub)]
    for row, start, end, (process, thread), kind in zip(
        table, starts, ends, places, spans.kind_names.tolist(), strict=True
    ):
        bucket = int(row["bucket"])
        args = {"step": int(row["step"])}
        args.update({key: int(row[key]) for key in ("bucket", "peer") if row[key] >= 0})
        if row["bytes"]:
            args["bytes"] = int(row["bytes"])
        yield {
            "ph": "X",
            "name": f"{kind} {bucket}" if bucket >= 0 else kind,
            "cat": kind,
            "pid": process,
            "tid": thread,
            "ts": start,
            "dur": round(end - start, 3),
            "args": args,
        }
    yield from _flows(table, starts, ends, places)


def _ticks(times_s: np.ndarray[Any, Any], origin_s: float) -> list[float]:
    """Return microseconds since `origin_s`. A damaged file may hold times that overflow: they are cut."""
    since_s = np.clip(times_s, -LATEST_S, LATEST_S) - np.clip(origin_s, -LATEST_S, LATEST_S)
    return list(np.round(since_s * TICKS_PER_S, 3).tolist())


def _columns(table: NDArray[Any], sub: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    return zip(table["rank"].tolist(), table["lane"].tolist(), sub.tolist(), strict=True)


def _flows(
    table: NDArray[Any], starts: list[float], ends: list[float], places: list[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """Yield an arrow for each message: from the begin of its send to a time within its receive.

    The viewer attaches an arrow to the span that is open on the thread at that time. Two kinds of arrows are left out:
    those that would go back in time (clocks disagree), and those without a span to end in.
    """
    for number, (send, receive) in enumerate(zip(*(side.tolist() for side in messages(table)), strict=True)):
        begin, end = starts[send], round(ends[receive] - TICK, 3)
        if ends[send] - begin < 2 * TICK or end < max(begin, starts[receive]):
            continue
        for phase, at, (process, thread) in (("s", begin, places[send]), ("f", end, places[receive])):
            flow = {
                "ph": phase,
                "name": "message",
                "cat": "message",
                "id": number,
                "pid": process,
                "tid": thread,
                "ts": at,
            }
            yield {**flow, "bp": "e"} if phase == "f" else flow


def _metadata(what: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": FIRST + rank, "tid": thread, "args": args}


def export_chrome(path: Path, spans: Spans, headers: Mapping[int, Mapping[str, Any]], info: Mapping[str, Any]) -> Path:
    """Write spans to `path` atomically. `info` and `headers` describe the run and its ranks. Returns the path."""
    origin_s = float(spans.table["start_s"].min()) if len(spans) else 0.0
    about = {OURS: {"origin_s": origin_s, "info": info, "headers": headers}}
    with atomic_file(path) as binary, io.TextIOWrapper(binary, encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ')
        file.write(json.dumps(about))
        file.write(', "traceEvents": [\n')
        for position, event in enumerate(chrome_events(spans, headers)):
            file.write((",\n" if position else "") + json.dumps(event))
        file.write("\n]}\n")
    return path


def is_export(trace: Mapping[str, Any]) -> bool:
    """Return whether `export_chrome` wrote this trace."""
    other = trace.get("otherData")
    return isinstance(other, dict) and OURS in other


def read_chrome(trace: Mapping[str, Any], name: str) -> tuple[dict[str, Any], dict[int, Trace]]:
    """Return the `info` and the traces of a run, from the file that `export_chrome` wrote.

    Args:
        trace: the file's content, for which `is_export` holds.
        name: the file's, for messages.

    Raises:
        ConfigError: the file was changed, so that it is no such trace any more.
    """
    about = trace["otherData"][OURS]
    info, headers = (about.get(key) if isinstance(about, dict) else None for key in ("info", "headers"))
    if not (isinstance(info, dict) and isinstance(headers, dict) and is_number(about.get("origin_s"))):
        raise _damaged(name, "its otherData does not describe a run")
    fault = fault_of(info)
    if fault:
        raise _damaged(name, fault)
    lanes, rows = dict[tuple[Any, Any], Any](), dict[int, list[Any]]()
    for event in trace["traceEvents"]:
        if not isinstance(event, dict) or not isinstance(event.get("args", {}), dict):
            raise _damaged(name, f"{event!r:.60} is no event")
        process, thread, args = event.get("pid"), event.get("tid"), event.get("args", {})
        if not (isinstance(process, int) and process >= FIRST and isinstance(thread, int)):
            raise _damaged(name, f"{event!r:.60} is not of a rank")
        if event.get("name") == "thread_name" and event.get("ph") == "M":
            lanes[process, thread] = args.get("lane")
        elif event.get("ph") == "X":
            row = _row(event, args, lanes.get((process, thread)), about["origin_s"])
            if not is_span(row):
                raise _damaged(name, f"{event!r:.60} is no span")
            rows.setdefault(process - FIRST, []).append(tuple(row))
    known = {number: header for number, header in _numbered(headers) if is_note(header)}
    traces = {rank: Trace(known.get(rank, {"rank": rank}), tuple(rows.get(rank, ())), ()) for rank in {*known, *rows}}
    return info, dict(sorted(traces.items()))


def _row(event: Mapping[str, Any], args: Mapping[str, Any], lane: Any, origin_s: float) -> list[Any]:
    """Return an event as a row of a trace; a missing or wrong entry is found by `is_span`."""
    begin: Any = event.get("ts")
    length: Any = event.get("dur")
    times = list[float]()
    if is_number(begin) and is_number(length):
        times = [origin_s + begin / TICKS_PER_S, origin_s + (begin + length) / TICKS_PER_S]
    numbers = [args.get("step"), args.get("bucket", -1), args.get("bytes", 0), args.get("peer", -1)]
    return [event.get("cat"), lane, *times, *(number if type(number) is int else None for number in numbers)]


def _numbered(headers: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    return ((int(rank), header) for rank, header in headers.items() if rank.isdecimal() and len(rank) < 10)


def _damaged(name: str, fault: str) -> ConfigError:
    return ConfigError(f"{name} is not as `workbench export` wrote it ({fault}): export the run again")
