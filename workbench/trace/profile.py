"""Read a Chrome trace of torch.profiler: steps, collectives, and the launch of each kernel."""

from __future__ import annotations

import math
import re
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from workbench.errors import ConfigError
from workbench.trace.files.text import open_file, parse_json, unpacked
from workbench.trace.links import COLLECTIVES
from workbench.trace.spans import Spans

Event = dict[str, Any]
Row = tuple[str, str, float, float, int, int, int, int]  # of `Spans.from_rows`
MICRO = 1e-6
AUTOGRAD = "autograd::engine::evaluate_function: "
ITEMSIZE = {
    "float": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "double": 8,
    "Float": 4,
    "Half": 2,
    "BFloat16": 2,
    "Double": 8,
    "Int": 4,
    "Long": 8,
}
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
LIBRARIES = ("gloo", "mpi")  # their calls run on host threads
SCALARS = ("correlation", "device", "stream", "dtype", "Collective name")  # args of an event that are used as keys
PROTOBUF = b"\n"  # first byte of a Perfetto trace in protobuf: the tag of its first packet
MAX_NUMBER, MAX_DEPTH, MAX_NAME = 2**62, 4, 200
EXPORT_HINT = (
    "profile some steps after the first with torch.profiler.profile(record_shapes=True), and give "
    "prof.export_chrome_trace's file"
)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """One rank's profile.

    Attributes:
        name: the file's name.
        rank, num_workers: from the profile (`distributedInfo`); None if it has none.
        host: the machine's name.
        events: events with a begin and a duration, sorted by begin; in microseconds since `base_us`.
        base_us: origin of the times.
    """

    name: str
    rank: int | None
    num_workers: int | None
    host: str
    events: list[Event]
    base_us: float = 0.0


def read_profile(profile: Any) -> Profile:
    """Read a Chrome trace (also .gz), or a `torch.profiler.profile` that has ended.

    Raises:
        ConfigError: the file is not such a trace; the message says how to make one.
    """
    return as_profile(*read_trace_file(profile))


def read_trace_file(profile: Any) -> tuple[dict[str, Any], str]:
    """Return the content of a Chrome trace, and the name of its file for messages. Arguments and errors as above."""
    if hasattr(profile, "export_chrome_trace"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            return _with_events(parse_json(path.read_text()), "the profile"), "the profile"
    path, content = Path(profile), b""
    try:
        with open_file(path) as file:
            content = file.read()
        content = unpacked(content) if path.suffix == ".gz" else content
        return _with_events(parse_json(content), str(path)), str(path)
    except MemoryError as error:
        raise ConfigError(f"{path} is larger than the memory: {EXPORT_HINT}") from error
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({getattr(error, 'strerror', None) or error}): {EXPORT_HINT}"
        ) from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        if content.startswith(PROTOBUF) and not content.lstrip().startswith((b"{", b"[")):
            raise ConfigError(
                f"{path} seems to be a Perfetto trace in protobuf: convert it with `traceconv json {path} trace.json`"
            ) from error
        raise ConfigError(f"{path} is not a Chrome trace ({error}): {EXPORT_HINT}") from error


def _with_events(trace: Any, name: str) -> dict[str, Any]:
    """Return a trace in the format's object form; its other form is the list of events alone."""
    is_list = isinstance(trace, list) and all(isinstance(event, dict) for event in trace)
    found = {"traceEvents": trace} if is_list else trace
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise ConfigError(f"{name} holds no traceEvents: {EXPORT_HINT}")
    return found


def as_profile(trace: dict[str, Any], name: str) -> Profile:
    """Return the profile in a Chrome trace."""
    info = trace.get("distributedInfo")
    rank: Any = info.get("rank") if isinstance(info, dict) else None
    num_workers: Any = info.get("world_size") if isinstance(info, dict) else None
    base_ns: Any = trace.get("baseTimeNanoseconds")
    whole = [found for event in trace["traceEvents"] if (found := _event(event)) is not None]
    return Profile(
        name=name,
        rank=rank if _is_number(rank, whole=True) and rank >= 0 else None,
        num_workers=num_workers if _is_number(num_workers, whole=True) and num_workers > 0 else None,
        host=str(trace.get("host_name", ""))[:MAX_NAME],
        events=sorted(whole, key=lambda event: event["ts"]),
        base_us=base_ns * 1e-3 if _is_number(base_ns) else 0.0,
    )


def _event(event: Any) -> Event | None:
    """Return an event with a begin, a duration and valid args; None for any other, of which profiles hold many."""
    if not isinstance(event, dict) or event.get("ph") != "X" or not isinstance(event.get("name"), str):
        return None
    if not (_is_number(event.get("ts")) and _is_number(event.get("dur")) and event["dur"] >= 0):
        return None
    args = event.get("args")
    if args and not (
        isinstance(args, dict) and all(isinstance(args.get(name, 0), str | int | float) for name in SCALARS)
    ):
        args = None
    plain = isinstance(event.get("pid", 0), str | int) and isinstance(event.get("tid", 0), str | int)
    return {**event, "args": args, "cat": str(event.get("cat", ""))} if plain else None


def _is_number(value: Any, whole: bool = False) -> bool:
    """Return whether a value can be a time or a count."""
    return type(value) in ((int,) if whole else (int, float)) and abs(value) < MAX_NUMBER


def named(event: Event, *beginnings: str) -> bool:
    """Return whether an event's name begins with one of these."""
    return str(event.get("name", "")).startswith(beginnings)


def args_of(event: Event) -> dict[str, Any]:
    """Return the event's args."""
    return event.get("args") or {}


def profiler_steps(events: list[Event]) -> list[tuple[int, float, float]]:
    """Return (number, begin, end) of each `ProfilerStep`, in microseconds."""
    found = [event for event in events if event.get("cat") == "user_annotation" and named(event, "ProfilerStep#")]
    numbers = [re.search(r"#([0-9]{1,9})", event["name"]) for event in found]
    return [
        (int(match[1]), event["ts"], event["ts"] + event["dur"])
        for event, match in zip(found, numbers, strict=True)
        if match
    ]


def optimizer_ends(events: list[Event]) -> list[float]:
    """Return the end of each optimizer step, in microseconds."""
    return [event["ts"] + event["dur"] for event in events if named(event, "Optimizer.step#")]


def step_bounds(profile: Profile) -> list[tuple[float, float]]:
    """Return begin and end of each step, in µs: of each `ProfilerStep`, or from one optimizer step to the next.

    Raises:
        ConfigError: the profile has neither.
    """
    steps = profiler_steps(profile.events)
    if len(steps) > 1:
        return [(begin, end) for _, begin, end in steps]
    ends = optimizer_ends(profile.events)
    if len(ends) < 2:
        raise ConfigError(f"{profile.name} has no steps (neither ProfilerStep# nor Optimizer.step#): {EXPORT_HINT}")
    return list(pairwise(ends))


class Call(NamedTuple):
    """A call of a communication library.

    Attributes:
        kind: one of `KINDS`.
        event: as recorded: the call, or its kernel on a GPU.
        num_bytes: of its buffer; None if the profile does not say.
        itemsize: bytes of an element.
    """

    kind: str
    event: Event
    num_bytes: int | None
    itemsize: int


def calls(events: list[Event]) -> list[Call]:
    """Return the calls of communication libraries, by begin: NCCL's kernels, or else gloo's and MPI's calls."""
    kernels = [event for event in events if event.get("cat") in ON_DEVICE and is_nccl(event)]
    return [_kernel_call(event) for event in kernels] or [_host_call(event) for event in events if library_of(event)]


def is_nccl(event: Event) -> bool:
    """Return whether a kernel is NCCL's."""
    return "nccl" in str(event.get("name", "")).lower()


def library_of(event: Event) -> str | None:
    """Return the library of a host event: "gloo" for "gloo:all_reduce"; None for other events."""
    library, colon, _ = str(event.get("name", "")).partition(":")
    return library if colon and library in LIBRARIES else None


def _kernel_call(event: Event) -> Call:
    args = args_of(event)
    size = ITEMSIZE.get(str(args.get("dtype")), 4)
    num: Any = args.get("In msg nelems")
    num_bytes = num * size if _is_number(num, whole=True) and num >= 0 else None
    return Call(_kind(str(args.get("Collective name") or event["name"])), event, num_bytes, size)


def _host_call(event: Event) -> Call:
    args = args_of(event)
    size = ITEMSIZE.get(str(_first(args.get("Input type"))), 4)
    numel = _numel(_first(args.get("Input Dims")))
    return Call(_kind(str(event["name"]).partition(":")[2]), event, None if numel is None else numel * size, size)


def _first(items: Any) -> Any:
    return items[0] if isinstance(items, list) and items else None


def _numel(dims: Any, depth: int = 0) -> int | None:
    """Return the number of elements of a shape, or of several equal shapes; None if it is not a shape."""
    if _is_number(dims, whole=True):
        return int(dims) if dims >= 0 else None
    if not isinstance(dims, list) or depth > MAX_DEPTH:
        return None
    parts = [_numel(item, depth + 1) for item in dims]
    product = math.prod(part for part in parts if part is not None)
    return product if None not in parts and product < MAX_NUMBER else None


_KINDS = (  # the first that is part of the name, without punctuation
    ("allreduce", "all_reduce"),
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("sendrecv", "communicate"),
    ("send", "send"),
    ("recv", "recv"),
)


def _kind(name: str) -> str:
    plain = re.sub(r"[^a-z]", "", name.lower())
    return next((kind for word, kind in _KINDS if word in plain), "communicate")


@final
class Device:
    """A GPU's kernels by their launch."""

    def __init__(self, events: list[Event]) -> None:
        self.kernels = [event for event in events if event.get("cat") == "kernel"]
        self.launches = {args_of(event).get("correlation"): event for event in events if event.get("cat") in LAUNCHES}
        computing = [(self.launch_of(event), event) for event in self.kernels if not is_nccl(event)]
        known = sorted(((launch["ts"], event) for launch, event in computing if launch), key=lambda pair: pair[0])
        self._at = [at for at, _ in known]
        self._events = [event for _, event in known]

    def launch_of(self, event: Event) -> Event | None:
        """Return the host call that launched a kernel; None if it was not recorded."""
        return self.launches.get(args_of(event).get("correlation", object()))

    def of_launches(self, begin: float, end: float) -> tuple[float, float] | None:
        """Return begin of the first and end of the last kernel that was launched in an interval.

        It is None if there is none.
        """
        chosen = self._events[bisect_right(self._at, begin) : bisect_right(self._at, end)]
        if not chosen:
            return None
        return min(event["ts"] for event in chosen), max(event["ts"] + event["dur"] for event in chosen)


def on_one_clock(ranks: Sequence[tuple[int, str, list[Row]]]) -> list[Spans]:
    """Return spans of (rank, host, rows), in seconds since the first.

    Clocks of other hosts are shifted to the first host's clock. The shift is the median difference between the ends of
    the same collectives. It assumes that a collective ends at the same time on all ranks.
    """
    ends = {(row[0], row[4], row[5]): row[3] for row in ranks[0][2] if row[0] in COLLECTIVES}
    origin = min((row[2] for row in ranks[0][2]), default=0.0)
    found = []
    for rank, host, rows in ranks:
        apart = [
            ends[key] - row[3] for row in rows if host != ranks[0][1] and (key := (row[0], row[4], row[5])) in ends
        ]
        shift = (float(np.median(apart)) if apart else 0.0) - origin
        moved: list[Row] = [(row[0], row[1], row[2] + shift, row[3] + shift, *row[4:]) for row in rows]
        found.append(Spans.from_rows(rank, moved))
    return found
