"""Fit a cost model to the trace of a run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.analysis.table import num_bytes
from workbench.calibration.fit import Given, fit, ready_to_shares
from workbench.calibration.model import Calibration
from workbench.calibration.observed import COLLECTIVES, observe
from workbench.calibration.parts import Origin, Shapes
from workbench.collectives import native_bytes
from workbench.costs import measure_compute
from workbench.errors import ConfigError
from workbench.gradients import USED, build_layout, trainable
from workbench.naming import kebab
from workbench.problems.base import Problem
from workbench.trace.from_profiler import is_profile_folder
from workbench.trace.run import Run
from workbench.trace.store import find_run

MOST_EXTRAPOLATION = 5  # of the size of messages, if latency and bandwidth are not separated
ELEMENTS = (
    "backward is assumed to be in proportion to the elements of each parameter: give problem= (--problem) to measure it"
)


def calibrate(
    run: Run | str | Path,
    *,
    problem: Problem | None = None,
    cores: float | None = None,
    latency_s: float | None = None,
    line_bytes_per_s: float | None = None,
    seed: int = 0,
    before_probe: bool = False,
) -> Calibration:
    """Fit compute, stragglers and link to a run on real or simulated ranks.

    A synchronous run is best, because communication does not slow its compute. The link is fitted to the run's sums,
    each from the arrival of the last rank. `notes` lists what the record cannot show.

    Args:
        run: a run, its folder or its name; its algorithm must sum over all ranks, by the library or by messages. For
            profiles of torch.profiler use `from_profile`.
        problem: the problem of the run. It gives the shapes of the parameters if the record has none. With it, each
            parameter's share of compute is measured in this process, in about a second.
        cores: number of cores that all ranks shared; None: from the trace, if all ranks ran on one host.
        latency_s: latency of a hop, if the run has messages of one size only. Without it the bands of predictions
            include all latencies that these messages allow.
        line_bytes_per_s: nominal rate of the link, to compute the share of it that carries gradients.
        seed: seed of the resampling for the uncertainty.
        before_probe: `with_probe` follows and measures the latency, so the run's messages need not show it.

    Raises:
        ConfigError: the run has no trace, too few steps, no sums, or no shapes; or its messages have one size that is
            much smaller than those of a sum of this model. The message says what to do.
        RunNotFound: there is no such run.
    """
    if isinstance(run, str | Path) and is_profile_folder(run):
        raise ConfigError(f"{run} is a folder of profiles, not of a run: use calibration.from_profile({str(run)!r})")
    run = run if isinstance(run, Run) else Run.load(find_run(run))
    _check(run, cores, latency_s, line_bytes_per_s)
    observed = observe(run)
    num_workers = int(run.info.get("num_workers") or len(run.metrics))
    headers = run.headers
    threads = max((int(header.get("threads", 1)) for header in headers.values()), default=1)
    origin = Origin(
        source=run.id,
        algorithm=run.label,
        runtime=str(run.info.get("runtime", "unknown")),
        num_workers=num_workers,
        num_steps=observed.compute.forward_s.shape[1],
    )
    found = fit(
        observed,
        origin,
        _shapes(run, problem),
        Given(
            cores=cores if cores is not None else _shared_cores(headers),
            threads=threads,
            latency_s=latency_s,
            line_bytes_per_s=line_bytes_per_s,
            seed=seed,
        ),
    )
    if not before_probe:
        _check_messages(found)
    if found.line.codecs:
        found = replace(found, line=replace(found.line, codecs=((codec_name(run), *found.line.codecs[0][1:]),)))
    if problem is not None:
        return with_shares(found, problem)
    if observed.ready:
        shares = ready_to_shares(observed.ready, *_buckets(run, found.shapes, num_workers))
        return replace(found, pace=replace(found.pace, backward_shares=shares))
    return replace(found, notes=(*found.notes, ELEMENTS))


def _check(run: Run, cores: float | None, latency_s: float | None, line_bytes_per_s: float | None) -> None:
    """Raise `ConfigError` for a run or an argument that cannot be used."""
    for name, value in (("cores", cores), ("line_bytes_per_s", line_bytes_per_s)):
        if value is not None and not value > 0:
            raise ConfigError(f"{name}={value!r}: give a number above 0")
    if latency_s is not None and not latency_s >= 0:
        raise ConfigError(f"latency_s={latency_s!r}: seconds, 0 or more")
    if run.slept:
        raise ConfigError(
            f"run {run.id} slept for its compute, so its times are those of its compute= and not of a model: calibrate "
            "from a run "
            "without compute="
        )
    if run.updates():
        raise ConfigError(
            f"run {run.id} has parameter servers, whose messages wait for each other: calibrate from a run of an "
            "algorithm that sums over "
            "all ranks, such as synchronous-sgd"
        )


def _check_messages(found: Calibration) -> None:
    """Raise `ConfigError` if predictions would take the latency of small messages of one size for their bytes."""
    message_bytes = found.line.message_bytes
    if message_bytes is None:
        return
    sum_bytes = found.shapes.num_bytes / found.origin.num_workers
    if message_bytes * MOST_EXTRAPOLATION < sum_bytes:
        raise ConfigError(
            f"all messages of run {found.origin.source} ({found.origin.algorithm}) have {num_bytes(message_bytes)}. A "
            f"ring's sum of this model sends messages of {num_bytes(sum_bytes)}, whose time they do not show, because "
            "latency cannot be separated from bandwidth: give latency_s= (--latency), add --probe, or calibrate from a "
            "run of synchronous-sgd"
        )


def with_shares(calibration: Calibration, problem: Problem) -> Calibration:
    """Add each parameter's share of forward and backward, measured on a replica of the model in this process.

    Raises:
        ConfigError: the parameters of the problem's model differ from those of the run.
    """
    shapes = calibration.shapes
    found = shapes_of(problem, shapes.batch_size)
    if found.parameters != shapes.parameters:
        raise ConfigError(
            f"problem {problem.name} has {len(found.parameters)} parameters. Their names or shapes differ from the "
            f"{len(shapes.parameters)} of {calibration.origin.source}: give the problem that was trained, with its "
            "options"
        )
    measured = measure_compute(problem, shapes.batch_size, threads=calibration.host.threads)
    pace = replace(calibration.pace, forward_shares=measured.forward_shares, backward_shares=measured.backward_shares)
    return replace(calibration, pace=pace, notes=tuple(note for note in calibration.notes if note != ELEMENTS))


def _shared_cores(headers: dict[int, dict[str, Any]]) -> float | None:
    """Return the number of cores if all ranks ran on one machine.

    It is None if there were several machines, or if the trace does not say.
    """
    hosts = {header.get("machine", header.get("host")) for header in headers.values()}
    cores = [float(header["cores"]) for header in headers.values() if header.get("cores")]
    known = len(hosts) == 1 and None not in hosts and len(cores) == len(headers) and len(set(cores)) == 1
    return cores[0] if known else None


def batch_size_of_run(run: Run) -> int | None:
    """Return a rank's samples of a step; None if the run does not say it."""
    taken = [row["num_samples"] for rows in run.metrics.values() for row in rows if row.get("num_samples")]
    return max(taken, default=0) or int((run.info.get("settings") or {}).get("batch_size") or 0) or None


def _shapes(run: Run, problem: Problem | None) -> Shapes:
    model = run.info.get("model") or {}
    batch_size = batch_size_of_run(run)
    if batch_size is None:
        raise ConfigError(
            f"run {run.id} does not say how many samples its ranks took, because its metrics are missing: use another "
            "run"
        )
    if "shapes" in model:
        named = tuple((str(name), tuple(map(int, shape))) for name, shape in model["shapes"])
        return Shapes(parameters=named, batch_size=batch_size, itemsize=int(model.get("itemsize", 4)))
    if problem is None:
        raise ConfigError(
            f"run {run.id} has no shapes of its parameters (an earlier version wrote it): give problem=, such as "
            "problem=workbench.problems.digits_mlp()"
        )
    return shapes_of(problem, batch_size)


def shapes_of(problem: Problem, batch_size: int) -> Shapes:
    """Return the shapes of a problem's model."""
    layout = build_layout(trainable(problem.model()))
    return Shapes(
        parameters=tuple((slot.name, slot.shape) for slot in layout.slots),
        batch_size=batch_size,
        itemsize=layout.itemsize,
    )


def codec_name(run: Run) -> str:
    """Return the command-line name of the codec in the run's settings."""
    text = " ".join(str(value) for value in ((run.info.get("algorithm") or {}).get("settings") or {}).values())
    found = re.search(r"codec=(\w+)\(", text)
    return kebab(found[1]) if found else ""


def _buckets(run: Run, shapes: Shapes, num_workers: int) -> tuple[list[int], list[int]]:
    """Return bucket and elements of each parameter, in order of registration, from the bytes of each bucket's sum."""
    table = run.spans.select(kinds=COLLECTIVES).table
    sent = {int(row["bucket"]): int(row["bytes"]) for row in table if row["bucket"] >= 0}
    numel = [_numel(shape) for _, shape in shapes.parameters]
    whole = native_bytes(num_workers, max(4, shapes.itemsize))
    bucket_of, bucket, filled = [0] * len(numel), 0, USED
    for index in reversed(range(len(numel))):
        if filled > USED and filled + numel[index] + 1 > sent.get(bucket, 0) / whole + 0.5:
            bucket, filled = bucket + 1, USED
        bucket_of[index] = bucket
        filled += numel[index] + 1
    return bucket_of, numel


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product
