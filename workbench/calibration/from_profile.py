"""A cost model from torch.profiler's record of a plain DDP loop, which needs no change for it.

What is read of a Chrome trace: `ProfilerStep#` or the optimizer's steps say where a step ends; `DistributedDataParallel.forward`,
autograd's functions and `Optimizer.step` what is forward, backward and update; `gloo:all_reduce` (or, on a GPU, NCCL's kernels)
what was summed, with its size by record_shapes=True. Autograd's last function of each parameter tells its shape, and when in
backward its gradient was there. On a GPU, phases are those of the kernels that were launched in them.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np

from workbench.calibration.fit import fit
from workbench.calibration.model import Calibration
from workbench.calibration.observed import Observed, Periods, observe_spans
from workbench.calibration.parts import Origin, Shapes
from workbench.collectives import native_bytes
from workbench.errors import ConfigError
from workbench.trace.spans import Spans

Event = dict[str, Any]
MICRO = 1e-6
AUTOGRAD = "autograd::engine::evaluate_function: "
ACCUMULATE = "torch::autograd::AccumulateGrad"
ITEMSIZE = {"float": 4, "c10::Half": 2, "c10::BFloat16": 2, "double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Double": 8}
QUICKEST = 0.25  # of the sums that one rank alone tells of: the rest has waited for the others
HOW = "profile some steps after the first with torch.profiler.profile(record_shapes=True), and give prof.export_chrome_trace's file"


@final
@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank's profile."""

    name: str
    rank: int
    num_workers: int
    rows: list[tuple[Any, ...]]  # of `Spans.from_rows`
    parameters: list[tuple[tuple[int, ...], float]]  # (shape, part of backward after which it was there), in order of readiness
    itemsize: int
    host: str


def from_profile(
    profile: Any,
    *,
    batch_size: int = 1,
    workers: int | None = None,
    cores: float | None = None,
    threads: int = 1,
    latency_s: float | None = None,
    line_bytes_per_s: float | None = None,
    seed: int = 0,
) -> Calibration:
    """Fit compute and network to a profile of a DDP loop.

    Args:
        profile: the path of a Chrome trace (also .gz), a `torch.profiler.profile` that has ended, or several of either, one a
            rank: of all ranks it is known who waited for whom.
        batch_size: samples a worker and step; no profile tells.
        workers: ranks that took part, where the profile does not say (`distributedInfo`).
        cores, latency_s, line_bytes_per_s, seed: as for `calibrate`; threads: of a rank.

    Raises:
        ConfigError: a file that is no such trace, a trace without steps, shapes or DDP; says how to make one.
    """
    given = list(profile) if isinstance(profile, list | tuple) else [profile]
    if not given:
        raise ConfigError(f"no profile was given: {HOW}")
    ranks = [_read(one, position, workers) for position, one in enumerate(given)]
    num_workers = ranks[0].num_workers
    if len({rank.rank for rank in ranks}) < len(ranks):
        raise ConfigError(f"{ranks[0].name} and another profile are of one rank: give one of each rank, or one alone")
    spans = Spans.concatenate(_on_one_clock(ranks))
    observed = observe_spans(spans, num_workers, ranks[0].name)
    notes: tuple[str, ...] = ()
    if len(ranks) == 1 and num_workers > 1:
        observed = _quickest(observed)
        alone = f"profile of one rank of {num_workers}: its quickest sums count"
        notes = (f"{alone}, for the others waited for a rank too; give all ranks' profiles",)
    first = ranks[0]
    in_order = list(reversed(first.parameters))
    shapes = Shapes(
        parameters=tuple((f"parameter{number}", shape) for number, (shape, _) in enumerate(in_order)),
        batch_size=batch_size,
        itemsize=first.itemsize,
    )
    hosts = {rank.host for rank in ranks}
    origin = Origin(
        source=Path(first.name).name,
        method="DistributedDataParallel",
        runtime="torch.profiler",
        num_workers=num_workers,
        num_steps=observed.compute.forward_s.shape[1],
    )
    found = fit(observed, origin, shapes, cores=cores, threads=threads, latency_s=latency_s, line_bytes_per_s=line_bytes_per_s, seed=seed)
    ready = np.array([part for _, part in first.parameters])
    shares = tuple(np.diff(np.maximum.accumulate(ready) / ready.max(), prepend=0.0)[::-1].tolist()) if ready.max() > 0 else ()
    where = (f"{len(hosts)} hosts: their clocks were brought together by the ends of the sums",) if len(hosts) > 1 else ()
    return replace(found, pace=replace(found.pace, backward_shares=shares), notes=(*found.notes, *notes, *where))


def _read(profile: Any, position: int, workers: int | None) -> _Rank:
    if hasattr(profile, "export_chrome_trace"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            return _parse(json.loads(path.read_text()), "the profile", position, workers)
    path = Path(profile)
    try:
        text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
        return _parse(json.loads(text), str(path), position, workers)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}): {HOW}") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is no Chrome trace ({error}): {HOW}") from error


def _parse(trace: Any, name: str, position: int, workers: int | None) -> _Rank:
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ConfigError(f"{name} holds no traceEvents: {HOW}")
    told = trace.get("distributedInfo") or {}
    num_workers = workers or told.get("world_size")
    if not num_workers:
        raise ConfigError(f"{name} does not say how many ranks there were: give workers= (--workers)")
    events = sorted((event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event), key=lambda event: event["ts"])
    bounds = _step_bounds(events, name)
    device = _Device(events)
    rows, parameters, itemsize = list[tuple[Any, ...]](), list[tuple[tuple[int, ...], float]](), 4
    sums = _sums(events, device, name)
    at = [event["ts"] for event in events]
    for step, (begin, end) in enumerate(bounds):
        inside = events[bisect_left(at, begin) : bisect_left(at, end)]
        phases = _phases(inside)
        if phases is None:
            continue
        rows += _compute_rows(step, phases, inside, device)
        mine = [item for item in sums if begin <= item[0] < end]
        for bucket, (start, finish, num_bytes, size) in enumerate(mine):
            sent = int(native_bytes(int(num_workers), num_bytes))
            rows.append(("all_reduce", "comm", start * MICRO, finish * MICRO, step, bucket, sent, -1))
            itemsize = size
        ready = _ready(inside, phases)
        parameters = ready if len(ready) >= len(parameters) else parameters
    if not parameters:
        raise ConfigError(f"{name} names no shapes of parameters: profile with record_shapes=True, after the first step or two")
    rank = int(told.get("rank", position))
    return _Rank(name, rank, int(num_workers), rows, parameters, itemsize, str(trace.get("host_name", "")))


def _step_bounds(events: list[Event], name: str) -> list[tuple[float, float]]:
    """When each step begins and ends, in microseconds: as the profiler was told, or from one optimizer's step to the next."""
    told = [event for event in events if str(event.get("name", "")).startswith("ProfilerStep#") and event.get("cat") == "user_annotation"]
    if len(told) > 1:
        return [(event["ts"], event["ts"] + event["dur"]) for event in told]
    ends = [event["ts"] + event["dur"] for event in events if str(event.get("name", "")).startswith("Optimizer.step#")]
    if len(ends) < 2:
        raise ConfigError(f"{name} has no steps (neither ProfilerStep# nor Optimizer.step#): {HOW}")
    return list(pairwise(ends))


def _phases(inside: list[Event]) -> tuple[float, float, float] | None:
    """When forward and backward begin, and when backward's last function has ended; None: no whole step."""
    forward = next((event["ts"] for event in inside if event.get("name") == "DistributedDataParallel.forward"), None)
    autograd = [event for event in inside if str(event.get("name", "")).startswith(AUTOGRAD)]
    update = [event for event in inside if str(event.get("name", "")).startswith("Optimizer.step#")]
    if forward is None or not autograd or not update:
        return None
    last = max(event["ts"] + event["dur"] for event in autograd)
    return forward, autograd[0]["ts"], last


def _compute_rows(step: int, phases: tuple[float, float, float], inside: list[Event], device: _Device) -> list[tuple[Any, ...]]:
    forward, backward, behind = phases
    named = [("forward", forward, backward), ("backward", backward, behind)]
    copies = [event for event in inside if str(event.get("name", "")).endswith("copy_bucket_to_grad")]
    updates = [event for event in inside if str(event.get("name", "")).startswith("Optimizer.step#")]
    named += [("apply", event["ts"], event["ts"] + event["dur"]) for event in (*copies, *updates)]
    rows = []
    for kind, start, finish in named:
        on_device = device.of_launches(start, finish)
        if device.kernels and on_device is None:
            continue
        start, finish = on_device or (start, finish)
        rows.append((kind, "compute", start * MICRO, finish * MICRO, step, -1, 0, -1))
    return rows


def _ready(inside: list[Event], phases: tuple[float, float, float]) -> list[tuple[tuple[int, ...], float]]:
    """(shape, part of backward) of each parameter, in the order in which their gradients were there."""
    _, backward, behind = phases
    found = []
    for event in inside:
        dims = (event.get("args") or {}).get("Input Dims")
        if event.get("name") == ACCUMULATE and dims:
            part = (event["ts"] + event["dur"] - backward) / max(behind - backward, 1e-9)
            found.append((tuple(int(length) for length in dims[0]), min(1.0, part)))
    return found


def _sums(events: list[Event], device: _Device, name: str) -> list[tuple[float, float, int, int]]:
    """(begin, end, bytes, bytes of an element) of each sum, in order of time."""
    found = []
    if any("nccl" in str(event.get("name", "")).lower() for event in device.kernels):
        for event in device.kernels:
            args = event.get("args") or {}
            if "nccl" in str(event["name"]).lower() and "AllReduce" in str(event["name"]):
                if "In msg nelems" not in args:
                    raise ConfigError(f"{name}: NCCL's kernels do not say what they sum: profile with a PyTorch of 2.2 or later")
                size = ITEMSIZE.get(str(args.get("dtype")), 4)
                found.append((event["ts"], event["ts"] + event["dur"], int(args["In msg nelems"]) * size, size))
        return found
    for event in events:
        if str(event.get("name", "")) in ("gloo:all_reduce", "mpi:all_reduce"):
            args = event.get("args") or {}
            if not args.get("Input Dims"):
                raise ConfigError(f"{name}: its sums have no sizes: profile with record_shapes=True")
            size = ITEMSIZE.get(str((args.get("Input type") or ["float"])[0]), 4)
            numel = int(np.prod(args["Input Dims"][0]))
            found.append((event["ts"], event["ts"] + event["dur"], numel * size, size))
    return found


@final
class _Device:
    """A GPU's kernels, by when they were launched."""

    def __init__(self, events: list[Event]) -> None:
        self.kernels = [event for event in events if event.get("cat") == "kernel"]
        launched = {(event.get("args") or {}).get("correlation"): event["ts"] for event in events if event.get("cat") == "cuda_runtime"}
        computing = [event for event in self.kernels if "nccl" not in str(event["name"]).lower()]
        pairs = [(launched.get((event.get("args") or {}).get("correlation")), event) for event in computing]
        known = sorted(((at, event) for at, event in pairs if at is not None), key=lambda pair: pair[0])
        self._at = [at for at, _ in known]
        self._events = [event for _, event in known]

    def of_launches(self, begin: float, end: float) -> tuple[float, float] | None:
        """From the first to the last of the kernels that were launched in a time; None without any."""
        chosen = self._events[bisect_right(self._at, begin) : bisect_right(self._at, end)]
        if not chosen:
            return None
        return min(event["ts"] for event in chosen), max(event["ts"] + event["dur"] for event in chosen)


def _on_one_clock(ranks: Sequence[_Rank]) -> list[Spans]:
    """All ranks' spans; clocks of other hosts are moved so that sums, which end on all ranks at once, do."""
    first, found = ranks[0], []
    origin = min(row[2] for row in first.rows)
    ends = {(row[4], row[5]): row[3] for row in first.rows if row[0] == "all_reduce"}
    for rank in ranks:
        shift = 0.0
        if rank.host != first.host:
            apart = [ends[row[4], row[5]] - row[3] for row in rank.rows if row[0] == "all_reduce" and (row[4], row[5]) in ends]
            shift = float(np.median(apart)) if apart else 0.0
        moved = [(*row[:2], row[2] + shift - origin, row[3] + shift - origin, *row[4:]) for row in rank.rows]
        found.append(Spans.from_rows(rank.rank, moved))
    return found


def _quickest(observed: Observed) -> Observed:
    """Of the sums of each size, the quickest quarter."""
    periods = observed.periods
    size = np.round(np.log(np.maximum(periods.wire_bytes, 1.0)), 2)
    keep = np.zeros(len(periods), bool)
    for one in np.unique(size):
        here = size == one
        keep |= here & (periods.seconds <= np.quantile(periods.seconds[here], QUICKEST))
    return replace(observed, periods=Periods(**{name: getattr(periods, name)[keep] for name in Periods.__slots__}))
