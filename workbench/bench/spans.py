"""A trace of a million spans: read, analysed and drawn, on one core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.bench import BenchOptions
from workbench.bench.rows import Row, compare
from workbench.trace.recorder import FileRecorder
from workbench.trace.store import new_run, update_run

NUM_RANKS, NUM_STEPS = 64, 977  # 16 spans a step: 1 000 448
ALLOWED_S, ALLOWED_BYTES = 5.0, 5e6
LIMIT_S = 900.0  # time limit of a process that reads the trace
MAX_ROUNDS = 5  # every round reads the full trace
WHOLE = "read, analysed and drawn"
IN_A_PROCESS = "import json, sys; from workbench.bench.spans import measure; print(json.dumps(measure(sys.argv[1])))"
LATE_RANK, LATE_STEP = 13, 617  # this backward takes ten times as long

Floats = NDArray[np.float64]


def write_trace(root: Path, num_ranks: int = NUM_RANKS, num_steps: int = NUM_STEPS, seed: int = 0) -> Path:
    """Write the folder of a run as recorders do: trace and metrics of each rank, on the rank's own clock.

    A step has a forward and a backward, with two buckets that are ready half-way and at the end of backward. For each
    bucket, the rank encodes, sends to the next rank, receives from the previous rank, decodes and sums. Then follow an
    all-reduce of the rest, a wait for it, and two updates.
    """
    folder = new_run(
        {"algorithm": {"name": "LayerwiseSGD"}, "problem": {"name": "made"}, "num_workers": num_ranks, "clock": "wall"},
        root,
    )
    rows = _steps(num_ranks, num_steps, np.random.default_rng(seed))
    for rank in range(num_ranks):
        recorder = FileRecorder(folder, rank, {"host": f"host-{rank // 8}", "pid": rank})
        offset_s = 3.0 * rank  # offset of the rank's clock
        recorder.clock(offset_s, -offset_s)
        recorder.clock(offset_s + 1.0, -offset_s)
        mine = [
            (kind, lane, starts[:, rank].tolist(), ends[:, rank].tolist(), *more)
            for kind, lane, starts, ends, *more in rows
        ]
        for step in range(num_steps):
            for kind, lane, starts, ends, bucket, num_bytes, way in mine:
                peer = (rank + way) % num_ranks if way else -1
                recorder.span(kind, lane, starts[step] + offset_s, ends[step] + offset_s, step, bucket, num_bytes, peer)
            recorder.metrics(
                {
                    "step": step,
                    "seconds": mine[-1][3][step],
                    "samples": 32 * num_ranks * (step + 1),
                    "bytes_sent": 800_000 * (step + 1),
                    "staleness": 0,
                    "loss": 2.0 / (step + 1),
                    "num_samples": 32,
                    "lr": 0.1,
                }
            )
            recorder.end_step()
        recorder.close()
    update_run(folder, status="finished")
    return folder


def _steps(
    num_ranks: int, num_steps: int, random: np.random.Generator
) -> list[tuple[str, str, Floats, Floats, int, int, int]]:
    """Return the spans of all steps, one entry for each span of a step, in order of their ends.

    An entry is (kind, lane, starts, ends, bucket, bytes, peer minus rank). Starts and ends have shape (steps, ranks).
    """
    found: dict[tuple[str, int], tuple[str, Floats, Floats, int, int]] = {}

    def noise(mean_s: float) -> Floats:
        return np.asarray(mean_s * (0.9 + random.exponential(0.1, num_ranks)))

    def put(
        step: int,
        kind: str,
        lane: str,
        start_s: Floats,
        end_s: Floats,
        bucket: int = -1,
        num_bytes: int = 0,
        way: int = 0,
    ) -> Floats:
        shape = (num_steps, num_ranks)
        _, starts, ends, *_ = found.setdefault((kind, bucket), (lane, np.zeros(shape), np.zeros(shape), num_bytes, way))
        starts[step], ends[step] = start_s, end_s
        return end_s

    begin_s = random.uniform(0, 1e-3, num_ranks)
    for step in range(num_steps):
        forward_s = put(step, "forward", "compute", begin_s, begin_s + noise(4e-3))
        work_s = noise(8e-3)
        if step == LATE_STEP and num_ranks > LATE_RANK:
            work_s[LATE_RANK] *= 10
        backward_s = put(step, "backward", "compute", forward_s, forward_s + work_s)
        for bucket in range(2):
            ready_s = forward_s + (bucket + 1) / 2 * work_s
            encoded_s = put(step, "encode", "comm", ready_s, ready_s + noise(2e-4), bucket, 400_000)
            arrived_s = np.maximum(np.roll(encoded_s, 1), encoded_s) + noise(3e-3)  # both sides are ready
            put(step, "send", "comm", encoded_s, np.roll(arrived_s, -1), bucket, 400_000, 1)
            put(step, "recv", "comm", encoded_s, arrived_s, bucket, 400_000, -1)
            decoded_s = put(step, "decode", "comm", arrived_s, arrived_s + noise(2e-4), bucket, 400_000)
            summed_s = put(step, "sum", "comm", decoded_s, decoded_s + noise(3e-4), bucket, 400_000)
        met_s = np.full(num_ranks, summed_s.max() + 1e-3)
        put(step, "all_reduce", "collective", summed_s, met_s, 2, 4_000)
        put(step, "wait", "compute", backward_s, met_s)
        half_s = put(step, "apply", "compute", met_s, met_s + noise(5e-4), 0)
        begin_s = put(step, "apply", "compute", half_s, half_s + noise(5e-4), 1)
    return [
        (kind, lane, starts, ends, bucket, size, way)
        for (kind, bucket), (lane, starts, ends, size, way) in found.items()
    ]


def run(how: BenchOptions) -> Iterator[Row]:
    """Measure seconds on one core: of each part without its imports, of all parts, and of a new process."""
    case = "1 000 448 spans, 64 ranks"
    if not how.wanted(case):
        return
    rounds = min(how.rounds, MAX_ROUNDS)
    taken: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as root:
        how.report(f"{case}: the trace is written ...")
        folder = write_trace(Path(root))
        for number in range(rounds + 1):
            begin = time.perf_counter()
            output = subprocess.run(
                [sys.executable, "-c", IN_A_PROCESS, str(folder)],
                check=True,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            found = {**json.loads(output.stdout), "a process from begin to end": time.perf_counter() - begin}
            for name, value in found.items():
                taken.setdefault(name, []).extend([value] * bool(number))  # not the first, which reads from the disk
            how.report(f"{case}: {found[WHOLE]:.2f} s")
    json_bytes = taken.pop("json_bytes")
    for what, times in taken.items():
        below = 1.0 if what == WHOLE else None
        yield compare(
            times, ALLOWED_S, case=case, what=what, over=f"{ALLOWED_S:g} s allowed", kind="limit", below=below
        )
    over = f"{ALLOWED_BYTES / 1e6:g} MB allowed"
    yield compare(
        json_bytes, ALLOWED_BYTES, case=case, what="the figure's JSON", over=over, unit="B", kind="limit", below=1.0
    )


def measure(folder: str) -> dict[str, float]:
    """Return seconds of reading, analysing and drawing a run on one core, and the bytes of its timeline's JSON."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found: dict[str, float] = {}

    def timed(what: str, part: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = part()
        found[what] = time.perf_counter() - begin
        return result

    import workbench.analysis
    import workbench.plots.gantt.figures  # noqa: F401
    from workbench import analysis, plots
    from workbench.trace import Run

    run = timed("Run.load", lambda: Run.load(folder))
    timed("run.spans", lambda: run.spans)
    timed("overlap", lambda: analysis.run_overlap(run))
    timed("critical path", lambda: analysis.run_critical_path(run))
    timed("parts", lambda: analysis.run_parts(run))
    timed("summary", lambda: analysis.summary(run))
    figure = timed("timeline of all steps and ranks", lambda: plots.timeline(run, slice(None), run.spans.ranks))
    text = timed("its JSON", figure.to_json)
    return {WHOLE: sum(found.values()), **found, "json_bytes": len(text)}
