"""Convert Chrome traces to a run.

A profile of torch.profiler is one rank, with a lane for each GPU stream or busy host thread. An exported run is read
back.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from workbench.errors import ConfigError
from workbench.trace.chrome import is_export, read_chrome
from workbench.trace.links import COLLECTIVES
from workbench.trace.profile import (
    AUTOGRAD,
    EXPORT_HINT,
    MICRO,
    ON_DEVICE,
    Call,
    Device,
    Event,
    Profile,
    Row,
    args_of,
    as_profile,
    calls,
    library_of,
    named,
    on_one_clock,
    optimizer_ends,
    profiler_steps,
    read_trace_file,
)
from workbench.trace.read import Trace
from workbench.trace.run import PROFILED, Run
from workbench.trace.store import FORMAT

FILES = ("*.json", "*.json.gz")
LONG_US = 100.0  # a longer gap between two operations can separate two phases
NO_WORK = (
    "Optimizer.zero_grad#",
    "enumerate(DataLoader)",
    "ProfilerStep#",
    "nccl:",
    "c10d::",
    "record_param_comms",
    "## ",
)


def from_profiler(profile: Any) -> Run:
    """Convert profiles of a training loop to a run, for timelines, overlap and critical paths.

    On a GPU, each stream is a lane. Each kernel, copy and fill is a span of the phase in which the host launched it.
    NCCL's kernels are communication. Without a GPU, each busy host thread is a lane, with spans of forward, backward,
    apply, and the calls of gloo and MPI. The bytes of a span are those of its communicated buffer. Steps come from
    `prof.step()` under a schedule; without it, a step ends with each step of an optimizer. A profile has no losses,
    so the run has no metrics.

    A file that `Run.export_chrome` wrote (`workbench export`) is read back: the description and the spans of its run,
    on all ranks.

    Args:
        profile: the path of a Chrome trace (also .gz), a folder with one for each rank, a `torch.profiler.profile`
            that has ended, or several of these.

    Raises:
        ConfigError: there is no profile, two are of one rank, or a profile is empty; the message says how to make
            one. Or a file of `Run.export_chrome` was changed, or was given together with others.
    """
    files = [read_trace_file(one) for one in profiles_of(profile)]
    if not files:
        raise ConfigError(f"{profile} holds no profile ({' or '.join(FILES)}): {EXPORT_HINT}")
    exported = [(trace, name) for trace, name in files if is_export(trace)]
    if exported and len(files) > 1:
        raise ConfigError(f"{exported[0][1]} is a whole run that `workbench export` wrote: give this file alone")
    if exported:
        info, traces = read_chrome(*exported[0])
        return Run(info=info, metrics={}, traces=traces)
    found = [as_profile(trace, name) for trace, name in files]
    ranks = _ranks(found)
    rows = {rank: _rows(one) for rank, one in ranks.items()}
    silent = [one.name for rank, one in ranks.items() if not rows[rank]]
    if silent:
        raise ConfigError(f"{silent[0]} shows no work of a training step: {EXPORT_HINT}")
    first = next(iter(rows))
    since = {rank: (one.base_us - ranks[first].base_us) * MICRO for rank, one in ranks.items()}
    moved = {
        rank: [(*row[:2], row[2] + since[rank], row[3] + since[rank], *row[4:]) for row in rows[rank]] for rank in rows
    }
    moved = {rank: _renumbered(mine, moved[first]) for rank, mine in moved.items()}
    spans = on_one_clock([(rank, ranks[rank].host, moved[rank]) for rank in moved])
    traces = {}
    for rank, part in zip(moved, spans, strict=True):
        columns = [part.table[name].tolist() for name in ("start_s", "end_s", "step", "bucket", "bytes", "peer")]
        recorded = zip(part.kind_names.tolist(), part.lane_names.tolist(), *columns, strict=True)
        traces[rank] = Trace({"rank": rank, "host": ranks[rank].host}, tuple(recorded), ())
    name = _name(profile, found[0])
    info = {
        "format": FORMAT,
        "id": name,
        "algorithm": {"name": name, "settings": {}},
        "runtime": PROFILED,
        "num_workers": found[0].num_workers or len(found),
        "clock": "wall",
        "status": "finished",
    }
    return Run(info=info, metrics={}, traces=traces)


def _name(profile: Any, first: Profile) -> str:
    """Return the folder's name, or the first file's."""
    folder = isinstance(profile, str | Path) and Path(profile).is_dir()
    return Path(profile).resolve().name if folder else Path(first.name).name.partition(".")[0]


def is_profile_folder(path: str | Path) -> bool:
    """Return True for a folder that holds Chrome traces, and no run."""
    folder = Path(path)
    return not (folder / "run.json").exists() and any(True for pattern in FILES for _ in folder.glob(pattern))


def profiles_of(profile: Any) -> Iterator[Any]:
    """Yield the files of a folder, or the given profiles."""
    for one in profile if isinstance(profile, list | tuple) else [profile]:
        if not hasattr(one, "export_chrome_trace") and Path(one).is_dir():
            yield from sorted(path for pattern in FILES for path in Path(one).glob(pattern))
        else:
            yield one


def _ranks(profiles: Sequence[Profile]) -> dict[int, Profile]:
    """Return rank -> profile, ascending.

    The rank comes from the profile, or from a number in the file name, or from the order.
    """
    found: dict[int, Profile] = {}
    for position, one in enumerate(profiles):
        written = re.search(r"rank\D?(\d+)", Path(one.name).name)
        rank = one.rank if one.rank is not None else int(written[1]) if written else position
        if rank in found:
            raise ConfigError(f"{found[rank].name} and {one.name} are both of rank {rank}: give one of each rank")
        found[rank] = one
    return dict(sorted(found.items()))


# -- one rank --------------------------------------------------------------------------------------------------


class _Phase(NamedTuple):
    kind: str
    start: float
    end: float
    thread: Any
    step: int


def _rows(profile: Profile) -> list[Row]:
    """Return the rows of one rank, with times in seconds of its own clock."""
    steps = _Steps(profile)
    phases = _phases(profile.events, steps)
    device = Device(profile.events)
    if any(event.get("cat") in ON_DEVICE for event in profile.events):
        rows = _device_rows(profile, device, phases, steps)
    else:
        threads = {thread: number for number, thread in enumerate(dict.fromkeys(phase.thread for phase in phases))}
        lanes = {thread: f"thread {number}" if number else "compute" for thread, number in threads.items()}
        rows = [_row(one.kind, lanes[one.thread], one.start, one.end, one.step) for one in phases]
        rows += _library_rows(profile, steps)
    return _numbered(rows)


class _Steps:
    """Look up the step at a time, and the phase within the step."""

    def __init__(self, profile: Profile) -> None:
        steps = profiler_steps(profile.events)
        ends = optimizer_ends(profile.events)
        self.begins = [begin for _, begin, _ in steps] or [float("-inf"), *ends[:-1]]
        self.numbers = [number for number, _, _ in steps] or list(range(len(self.begins)))
        self.waits = sorted(call.event["ts"] + call.event["dur"] for call in calls(profile.events))
        # step -> begin of its last backward function; of its last update
        self._backward = dict[int, float]()
        self._update = dict[int, float]()
        for event in profile.events:
            if named(event, AUTOGRAD, "Optimizer.step#"):
                last = self._backward if named(event, AUTOGRAD) else self._update
                last[self.at(event["ts"])] = event["ts"]

    def at(self, time: float) -> int:
        """Return the step at a time; -1 before the first."""
        place = bisect_right(self.begins, time) - 1
        return self.numbers[place] if place >= 0 else -1

    def kind(self, event: Event) -> str:
        """Return the kind of a host event. Work between backward and the optimizer's step belongs to apply."""
        if named(event, AUTOGRAD):
            return "backward"
        if named(event, "Optimizer.step#"):
            return "apply"
        step, inf = self.at(event["ts"]), float("inf")
        if event["ts"] > self._update.get(step, inf):
            return "compute"
        return "apply" if step in self._update and event["ts"] > self._backward.get(step, inf) else "forward"

    def waited(self, since: float, until: float) -> bool:
        """Return whether the host waited for communication in between: a long gap in which communication ended."""
        ended = bisect_right(self.waits, until) > bisect_right(self.waits, since)
        return ended and until - since > LONG_US


def _row(kind: str, lane: str, start: float, end: float, step: int, num_bytes: int = 0) -> Row:
    return (kind, lane, start * MICRO, end * MICRO, step, -1, num_bytes, -1)


def _phases(events: list[Event], steps: _Steps) -> list[_Phase]:
    """Return the phases of the host's threads, by time.

    A phase joins operations of one kind and step, unless the host waited between.
    """
    found: list[_Phase] = []
    open_until: dict[Any, float] = {}  # thread -> end of its outermost open event
    latest: dict[Any, int] = {}  # thread -> place of its phase in `found`
    for event in events:
        if event.get("cat") not in ("cpu_op", "user_annotation") or named(event, *NO_WORK) or library_of(event):
            continue
        thread, start, end = (event.get("pid"), event.get("tid")), event["ts"], event["ts"] + event["dur"]
        if end <= open_until.get(thread, float("-inf")):
            continue  # nested in an open event
        open_until[thread] = end
        kind, step = steps.kind(event), steps.at(start)
        before = found[latest[thread]] if thread in latest else None
        if before is not None and (before.kind, before.step) == (kind, step) and not steps.waited(before.end, start):
            found[latest[thread]] = before._replace(end=end)
        else:
            latest[thread] = len(found)
            found.append(_Phase(kind, start, end, thread, step))
    return found


def _device_rows(profile: Profile, device: Device, phases: list[_Phase], steps: _Steps) -> list[Row]:
    """Return every kernel, copy and fill on its stream, with the phase and step of its launch."""
    of_thread: dict[Any, list[_Phase]] = {}
    for phase in phases:
        of_thread.setdefault(phase.thread, []).append(phase)
    begins = {thread: [phase.start for phase in mine] for thread, mine in of_thread.items()}
    communication = {id(call.event): call for call in calls(profile.events)}
    events = [event for event in profile.events if event.get("cat") in ON_DEVICE]
    devices = {args_of(event).get("device", event.get("pid")) for event in events}
    rows = []
    for event in events:
        args, launch = args_of(event), device.launch_of(event)
        at = launch["ts"] if launch else event["ts"]
        kind = "compute"
        if launch:
            thread = (launch.get("pid"), launch.get("tid"))
            place = bisect_right(begins.get(thread, []), at) - 1
            kind = of_thread[thread][place].kind if place >= 0 and at <= of_thread[thread][place].end else kind
        call: Call | None = communication.get(id(event))
        kind = call.kind if call else kind
        where = f"GPU {args.get('device', event.get('pid'))} " if len(devices) > 1 else ""
        lane = f"{where}stream {args.get('stream', event.get('tid'))}"
        rows.append(
            _row(
                kind, lane, event["ts"], event["ts"] + event["dur"], steps.at(at), (call.num_bytes or 0) if call else 0
            )
        )
    return rows


def _library_rows(profile: Profile, steps: _Steps) -> list[Row]:
    """Return the calls of gloo and MPI, on their threads."""
    found = calls(profile.events)
    threads = sorted({(call.event.get("pid"), call.event.get("tid")) for call in found}, key=str)
    rows = []
    for call in found:
        event = call.event
        number = threads.index((event.get("pid"), event.get("tid")))
        lane = f"{library_of(event)}{f' {number + 1}' if len(threads) > 1 else ''}"
        rows.append(
            _row(call.kind, lane, event["ts"], event["ts"] + event["dur"], steps.at(event["ts"]), call.num_bytes or 0)
        )
    return rows


# -- collectives, on all ranks ---------------------------------------------------------------------------------


def _numbered(rows: list[Row]) -> list[Row]:
    """Give the collectives of each step bucket numbers, in order of time."""
    counts: dict[tuple[str, int], int] = {}
    found = []
    for row in sorted(rows, key=lambda row: row[2]):
        if row[0] in COLLECTIVES:
            key = (row[0], row[4])
            counts[key] = counts.get(key, -1) + 1
            row = (*row[:5], counts[key], *row[6:])
        found.append(row)
    return found


def _renumbered(rows: list[Row], first: list[Row]) -> list[Row]:
    """Give rows the buckets of the first rank.

    Collectives of one size are matched in order: two threads may start them in any order.
    """
    numbers = dict(zip(_keys(first), (row[5] for row in first), strict=True))
    return [(*row[:5], numbers.get(key, row[5]), *row[6:]) for row, key in zip(rows, _keys(rows), strict=True)]


def _keys(rows: list[Row]) -> list[tuple[str, int, int, int]]:
    """Return (kind, step, bytes, number among equals) of each row."""
    counts: dict[tuple[str, int, int], int] = {}
    found = []
    for row in rows:
        key = (row[0], row[4], row[6])
        counts[key] = counts.get(key, -1) + 1
        found.append((*key, counts[key]))
    return found
