"""Fit a cost model to a torch.profiler record of a plain DDP loop, without changes to the loop.

These parts of the Chrome trace are used:

- `ProfilerStep#` or the optimizer's steps end a step.
- `DistributedDataParallel.forward`, autograd's functions and `Optimizer.step` are forward, backward and update. On a
  GPU, a phase consists of the kernels that were launched in it.
- `gloo:all_reduce` (on a GPU, NCCL's kernels) are the sums; record_shapes=True adds their sizes.
- Autograd's last function for each parameter gives the parameter's shape, and when in backward its gradient is ready.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np

from workbench.calibration.fit import Given, fit
from workbench.calibration.model import Calibration
from workbench.calibration.observed import Observed, Periods, observe_spans
from workbench.calibration.parts import Origin, Shapes
from workbench.collectives import native_bytes
from workbench.errors import ConfigError
from workbench.trace.from_profiler import profiles_of
from workbench.trace.profile import (
    AUTOGRAD,
    EXPORT_HINT,
    MICRO,
    Device,
    Event,
    Profile,
    Row,
    args_of,
    calls,
    named,
    on_one_clock,
    read_profile,
    step_bounds,
)
from workbench.trace.spans import Spans

ACCUMULATE = "torch::autograd::AccumulateGrad"
QUICKEST = 0.25  # share of sums to use with one rank's profile: slower ones may have waited for other ranks


@final
@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank's profile."""

    name: str
    rank: int
    num_workers: int
    rows: list[Row]
    # (shape, part of backward after which its gradient was ready), in order of readiness
    parameters: list[tuple[tuple[int, ...], float]]
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
    """Fit compute and network to profiles of a DDP loop.

    Args:
        profile: the path of a Chrome trace (also .gz), a folder with one for each rank, a `torch.profiler.profile`
            that has ended, or several of these. Profiles of all ranks show how long ranks waited for each other.
        batch_size: samples of a worker in a step; a profile does not contain it.
        workers: number of ranks, if the profile does not contain it (`distributedInfo`).
        cores, latency_s, line_bytes_per_s, seed: as for `calibrate`.
        threads: compute threads of a rank.

    Raises:
        ConfigError: the file is not such a trace, or has no steps, shapes or DDP; the message says how to make one.
    """
    given = list(profiles_of(profile))
    if not given:
        raise ConfigError(f"no profile was given: {EXPORT_HINT}")
    ranks = [_parse(read_profile(one), position, workers) for position, one in enumerate(given)]
    num_workers = ranks[0].num_workers
    if len({rank.rank for rank in ranks}) < len(ranks):
        raise ConfigError(f"{ranks[0].name} and another profile are of one rank: give one for each rank, or only one")
    spans = Spans.concatenate(on_one_clock([(rank.rank, rank.host, rank.rows) for rank in ranks]))
    observed = observe_spans(spans, num_workers, ranks[0].name)
    notes: tuple[str, ...] = ()
    if len(ranks) == 1 and num_workers > 1:
        observed = _fastest_quarter(observed)
        alone = f"profile of one rank of {num_workers}: only its quickest sums are used"
        notes = (f"{alone}, because the others may have waited for a rank; give all ranks' profiles",)
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
        algorithm="DistributedDataParallel",
        runtime="torch.profiler",
        num_workers=num_workers,
        num_steps=observed.compute.forward_s.shape[1],
    )
    found = fit(
        observed,
        origin,
        shapes,
        Given(cores=cores, threads=threads, latency_s=latency_s, line_bytes_per_s=line_bytes_per_s, seed=seed),
    )
    ready = np.array([part for _, part in first.parameters])
    shares = (
        tuple(np.diff(np.maximum.accumulate(ready) / ready.max(), prepend=0.0)[::-1].tolist())
        if ready.max() > 0
        else ()
    )
    where = (f"{len(hosts)} hosts: their clocks were aligned by the ends of the sums",) if len(hosts) > 1 else ()
    return replace(found, pace=replace(found.pace, backward_shares=shares), notes=(*found.notes, *notes, *where))


def _parse(profile: Profile, position: int, workers: int | None) -> _Rank:
    num_workers = workers or profile.num_workers
    if not num_workers:
        raise ConfigError(f"{profile.name} does not say how many ranks there were: give workers= (--workers)")
    events = profile.events
    bounds = step_bounds(profile)
    device = Device(events)
    rows, parameters, itemsize = list[Row](), list[tuple[tuple[int, ...], float]](), 4
    sums = _sums(profile)
    at = [event["ts"] for event in events]
    for step, (begin, end) in enumerate(bounds):
        inside = events[bisect_left(at, begin) : bisect_left(at, end)]
        phases = _phases(inside)
        if phases is None:
            continue
        rows += _compute_rows(step, phases, inside, device)
        mine = [item for item in sums if begin <= item[0] < end]
        for bucket, (start, finish, num_bytes, size) in enumerate(mine):
            sent = int(native_bytes(num_workers, num_bytes))
            rows.append(("all_reduce", "comm", start * MICRO, finish * MICRO, step, bucket, sent, -1))
            itemsize = size
        ready = _ready(inside, phases)
        parameters = ready if len(ready) >= len(parameters) else parameters
    if not parameters:
        raise ConfigError(
            f"{profile.name} has no shapes of parameters: profile with record_shapes=True, after the first step or two"
        )
    rank = profile.rank if profile.rank is not None else position
    return _Rank(profile.name, rank, num_workers, rows, parameters, itemsize, profile.host)


def _phases(inside: list[Event]) -> tuple[float, float, float] | None:
    """Return the begin of forward and backward, and the end of backward's last function.

    It is None if the step is incomplete.
    """
    forward = next((event["ts"] for event in inside if event.get("name") == "DistributedDataParallel.forward"), None)
    autograd = [event for event in inside if named(event, AUTOGRAD)]
    update = [event for event in inside if named(event, "Optimizer.step#")]
    if forward is None or not autograd or not update:
        return None
    last = max(event["ts"] + event["dur"] for event in autograd)
    return forward, autograd[0]["ts"], last


def _compute_rows(step: int, phases: tuple[float, float, float], inside: list[Event], device: Device) -> list[Row]:
    forward, backward, behind = phases
    found = [("forward", forward, backward), ("backward", backward, behind)]
    copies = [event for event in inside if str(event.get("name", "")).endswith("copy_bucket_to_grad")]
    updates = [event for event in inside if named(event, "Optimizer.step#")]
    found += [("apply", event["ts"], event["ts"] + event["dur"]) for event in (*copies, *updates)]
    rows = list[Row]()
    for kind, start, finish in found:
        on_device = device.of_launches(start, finish)
        if device.kernels and on_device is None:
            continue
        start, finish = on_device or (start, finish)
        rows.append((kind, "compute", start * MICRO, finish * MICRO, step, -1, 0, -1))
    return rows


def _ready(inside: list[Event], phases: tuple[float, float, float]) -> list[tuple[tuple[int, ...], float]]:
    """Return (shape, part of backward) of each parameter, in the order in which their gradients were ready."""
    _, backward, behind = phases
    found = []
    for event in inside:
        dims = args_of(event).get("Input Dims")
        if event.get("name") == ACCUMULATE and dims:
            part = (event["ts"] + event["dur"] - backward) / max(behind - backward, 1e-9)
            found.append((tuple(int(length) for length in dims[0]), min(1.0, part)))
    return found


def _sums(profile: Profile) -> list[tuple[float, float, int, int]]:
    """Return (begin, end, bytes, bytes of an element) of each sum, in order of time."""
    found = []
    for call in calls(profile.events):
        if call.kind != "all_reduce":
            continue
        if call.num_bytes is None:
            on_device = call.event.get("cat") == "kernel"
            how = "profile with a PyTorch of 2.2 or later" if on_device else "profile with record_shapes=True"
            raise ConfigError(f"{profile.name}: its sums have no sizes: {how}")
        found.append((call.event["ts"], call.event["ts"] + call.event["dur"], call.num_bytes, call.itemsize))
    return found


def _fastest_quarter(observed: Observed) -> Observed:
    """Keep the quickest quarter of the sums of each size."""
    periods = observed.periods
    size = np.round(np.log(np.maximum(periods.wire_bytes, 1.0)), 2)
    keep = np.zeros(len(periods), bool)
    for one in np.unique(size):
        here = size == one
        keep |= here & (periods.seconds <= np.quantile(periods.seconds[here], QUICKEST))
    return replace(observed, periods=Periods(**{name: getattr(periods, name)[keep] for name in Periods.__slots__}))
