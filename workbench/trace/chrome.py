"""Chrome trace JSON for ui.perfetto.dev and chrome://tracing.

Each rank is a process, each lane a thread, and each message an arrow.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.trace.files.atomic import atomic_file
from workbench.trace.links import messages
from workbench.trace.rows import sublanes
from workbench.trace.spans import Spans

TICKS_PER_S = 1e6  # the format's unit is the microsecond
TICK = 0.001  # smallest time in that unit
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
        yield _metadata("thread_name", rank, thread, name=spans.lanes[lane] + (f" ({number + 1})" if number else ""))
        yield _metadata("thread_sort_index", rank, thread, sort_index=thread)
    starts = np.round((table["start_s"] - origin_s) * TICKS_PER_S, 3).tolist()
    ends = np.round((table["end_s"] - origin_s) * TICKS_PER_S, 3).tolist()
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


def export_chrome(path: Path, spans: Spans, headers: Mapping[int, Mapping[str, Any]], about: Mapping[str, Any]) -> Path:
    """Write spans to `path` atomically. `about` describes the run. Returns the path."""
    with atomic_file(path) as binary, io.TextIOWrapper(binary, encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ')
        file.write(json.dumps(about))
        file.write(', "traceEvents": [\n')
        for position, event in enumerate(chrome_events(spans, headers)):
            file.write((",\n" if position else "") + json.dumps(event))
        file.write("\n]}\n")
    return path
