"""A calibration of a problem on this machine: its compute in this process, and messages between two processes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from workbench.calibration.from_profile import from_profile
from workbench.calibration.from_run import calibrate, shapes_of, with_shares
from workbench.calibration.model import Calibration
from workbench.calibration.parts import Estimate, Line, Origin, Pace
from workbench.calibration.probe import with_probe
from workbench.clusters.local.probe_ranks import probe_new_ranks
from workbench.costs import Stragglers
from workbench.costs.measure import Measured, measure_steps
from workbench.errors import ConfigError, WorkbenchError
from workbench.machine import num_cores
from workbench.problems.base import Problem
from workbench.settings import OptimizerFactory
from workbench.trace.from_profiler import is_profile_folder
from workbench.trace.run import Run
from workbench.trace.store import find_run

FEW_STEPS, STEPS, MOST_STEPS = 2, 12, 60  # to choose the number of threads; and to measure
WORK_OF_A_STEP = 2.3  # gradients that are computed for each measured step
WORTH_THREADS = 1.2  # all cores must be faster by this factor: on a busy machine threads wait for each other
MEASURED_S = 1.5  # of compute, if the most steps allow it
FETCHES, DRAWS = 5, 16
QUICK = 0.25  # quantile of the steps that counts: other work on the machine only adds time
BUSY = 0.25  # spread of the steps from which the machine is called busy
HERE = "this machine"  # the source of a calibration that was measured here
TCP_SHARE = 0.956  # payload of TCP in a rate that counts whole Ethernet frames
CODECS = ("truncate16", "linear8")

Calibrated = Calibration | Run | str | Path | Sequence[str | Path]


def calibration_of(calibrated: Calibrated, problem: Problem, batch_size: int) -> Calibration:
    """Return the calibration from what the caller has: itself, its file, a run, its name, or torch.profiler's traces.

    Raises:
        ConfigError: it is of another model or number of samples; or it cannot be read.
    """
    if not isinstance(calibrated, Calibration | Run | str | Path | list | tuple):
        raise ConfigError(
            f"calibrated={calibrated!r}: give a run, its name, a Calibration or its file, or traces of torch.profiler"
        )
    if isinstance(calibrated, Calibration):
        found = calibrated
    elif isinstance(calibrated, Run):
        found = _of_run(calibrated, problem, batch_size)
    elif not isinstance(calibrated, str | Path):
        found = from_profile([str(path) for path in calibrated], batch_size=batch_size)
    elif is_profile_folder(calibrated):
        found = from_profile(calibrated, batch_size=batch_size)
    elif str(calibrated).endswith((".json", ".json.gz")):
        path = Path(calibrated)
        traced = path.suffix == ".gz" or '"traceEvents"' in path.read_text()[:100_000] if path.exists() else False
        found = from_profile([str(path)], batch_size=batch_size) if traced else Calibration.load(path)
    else:
        found = _of_run(Run.load(find_run(calibrated)), problem, batch_size)
    expected = shapes_of(problem, batch_size)
    if sum(_numel(found)) != sum(_numel(expected)):
        raise ConfigError(
            f"calibrated=: {found.origin.source} has {sum(_numel(found))} parameters, and {problem.name} has "
            f"{sum(_numel(expected))}: give a run of this model"
        )
    if found.shapes.batch_size != batch_size:
        raise ConfigError(
            f"calibrated=: {found.origin.source} was measured with {found.shapes.batch_size} samples of a worker in a "
            f"step, and the study has {batch_size}: give batch_size={found.shapes.batch_size}, or another run"
        )
    if not found.pace.backward_shares and found.shapes.parameters == expected.parameters:
        found = with_shares(found, problem)
    return _tcp(found)


def content_of(calibrated: Calibrated) -> Any:
    """Return what costs are read from, by content: a calibration, the record of a run, or the bytes of files."""
    if isinstance(calibrated, Calibration):
        return calibrated.as_record()
    if isinstance(calibrated, Run):
        return calibrated.info, calibrated.metrics
    if not isinstance(calibrated, str | Path):
        return [content_of(path) for path in calibrated]
    if Path(calibrated).is_file():
        return Path(calibrated).read_bytes()
    return content_of(Run.load(find_run(calibrated)))


def _of_run(run: Run, problem: Problem, batch_size: int) -> Calibration:
    """Fit a run. One of a plain loop (`wb.record`) does not know its samples: they are taken to be those of the study."""
    found = calibrate(run, problem=problem)
    counted = any(row.get("samples") for rows in run.metrics.values() for row in rows)
    return found if counted else replace(found, shapes=replace(found.shapes, batch_size=batch_size))


def _numel(shapes: Any) -> list[int]:
    shapes = getattr(shapes, "shapes", shapes)
    return [int(np.prod(shape)) for _, shape in shapes.parameters]


def gradient_here(
    problem: Problem, batch_size: int, *, optimizer: OptimizerFactory | None = None, threads: int | None = None
) -> tuple[float, int]:
    """Return the seconds of a sample's gradient in this process, roughly, and with how many threads.

    Args:
        threads: None: one, or all cores of this machine, whichever is faster.
    """
    best: tuple[float, int] = (math.inf, 1)
    for number in sorted({threads or 1, threads or num_cores()}):
        measured = measure_steps(problem, batch_size, optimizer=optimizer, steps=FEW_STEPS, threads=number)
        step_s = float(np.mean(measured.forward_s + measured.backward_s + measured.update_s))
        if step_s * WORTH_THREADS < best[0]:
            best = (step_s, number)
    return best[0] / batch_size, best[1]


def measure_here(
    problem: Problem,
    batch_size: int,
    *,
    optimizer: OptimizerFactory | None = None,
    threads: int | None = None,
    stragglers: Sequence[Stragglers] = (),
    messages: bool = True,
    limit_s: float = math.inf,
) -> Calibration:
    """Measure the compute of a problem in this process, and messages between two processes of this machine.

    Args:
        threads: of a worker; None: one, or all cores of this machine, whichever is faster.
        stragglers: to assume; nothing here can measure those of other machines.
        messages: whether to measure latencies, sums and codecs, which takes some seconds.
        limit_s: of the measurement of compute, roughly; a slow model is measured in fewer steps.
    """
    sample_s, threads = gradient_here(problem, batch_size, optimizer=optimizer, threads=threads)
    step_s = WORK_OF_A_STEP * sample_s * batch_size
    steps = int(min(MOST_STEPS, max(STEPS, MEASURED_S / step_s)))
    steps = max(FEW_STEPS, int(min(steps, limit_s / step_s)))
    measured = measure_steps(problem, batch_size, optimizer=optimizer, steps=steps, threads=threads)
    source = problem.train_source()
    fetched = []
    for _ in range(FETCHES):
        begin = time.perf_counter()
        source.some(batch_size)
        fetched.append(time.perf_counter() - begin)
    notes = [f"compute was measured in this process with {threads} thread{'s' if threads > 1 else ''}"]
    if measured.spread > BUSY:
        notes.append(
            f"the machine was busy: steps differed by {measured.spread:.0%} of their median, so compute may be too long"
        )
    if not stragglers:
        notes.append(
            "all workers are equally fast: give stragglers=[costs.Lognormal(sigma=0.1)], or a run of many hosts"
        )
    zero = Estimate(0.0)
    found = Calibration(
        origin=Origin(source=HERE, algorithm="none", runtime="torch", num_workers=1, num_steps=len(measured.forward_s)),
        shapes=shapes_of(problem, batch_size),
        pace=Pace(
            forward_s=_quick(measured.forward_s),
            backward_s=_quick(measured.backward_s),
            update_s=_quick(measured.update_s),
            other_s=Estimate(statistics.median(fetched)),
            stragglers=tuple(stragglers),
            forward_shares=measured.compute.forward_shares,
            backward_shares=measured.compute.backward_shares,
        ),
        line=Line(latency_s=zero, message_latency_s=zero, s_per_byte=Estimate(1e-12), sum_s_per_byte=zero),
        draws=_draws(measured),
        notes=tuple(notes),
    )
    found = replace(found, host=replace(found.host, threads=threads))
    return _tcp(_probed(found) if messages else found)


def _quick(times: np.ndarray[Any, np.dtype[np.float64]]) -> Estimate:
    return Estimate(float(np.quantile(times, QUICK)))


def _draws(measured: Measured) -> tuple[dict[str, float], ...]:
    """Return the quantiles of resampled steps."""
    generator = np.random.default_rng(0)
    num = len(measured.forward_s)
    draws = []
    for _ in range(DRAWS):
        chosen = generator.integers(num, size=num)
        names = ("forward_s", "backward_s", "update_s")
        draws.append({name: float(np.quantile(getattr(measured, name)[chosen], QUICK)) for name in names})
    return tuple(draws)


def _probed(calibration: Calibration) -> Calibration:
    """Add latencies, sums and codecs as measured between two processes; a note if they cannot be started."""
    arguments = ["calibrate", "none", "--probe", "--codecs", ",".join(CODECS), "--runtime", "torch"]
    try:
        found = probe_new_ranks("torch", 2, arguments)
    except (WorkbenchError, OSError) as error:
        reason = str(error).splitlines()[0]
        return replace(
            calibration,
            notes=(*calibration.notes, f"messages were not measured ({reason}): they take no time to handle"),
        )
    probed = with_probe(calibration, found)
    return replace(
        probed,
        notes=(*calibration.notes, "the handling of messages was measured between two processes of this machine"),
    )


def _tcp(calibration: Calibration) -> Calibration:
    """Let TCP carry its usual share of a named rate, if the calibration does not know the measured link's rate."""
    line = calibration.line
    if line.line_bytes_per_s is not None or line.s_per_byte.value <= 0:
        return calibration
    return replace(calibration, line=replace(line, line_bytes_per_s=1 / (line.s_per_byte.value * TCP_SHARE)))
