"""The cost of a notebook that drives ranks, and of a notebook that follows their metrics."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.bench import BenchOptions
from workbench.bench.rows import Row, compare
from workbench.errors import LaunchError
from workbench.machine import environment

if TYPE_CHECKING:
    from workbench.clusters import Cluster
    from workbench.clusters.run_handle import RunHandle
    from workbench.trace.run import Run

DRIVEN, FOLLOWED = 1.01, 1.005
STEP_S = 20e-3  # approximate time of a step
STEPS, PROBE_STEPS, WARM_STEPS = 150, 60, 20  # steps of a timed run; of a run that measures a step; of the warm-up
WINDOW_S = 2.0  # seconds of a run that are timed together, with its curves drawn or without
LIMIT_S = 900.0  # time limit of a run: hundreds of times the expected time
LAST_BYTES = 4096  # the end of a metrics file, with its last row
ALGORITHM, PROBLEM, PROBE_BATCH = "synchronous-sgd", "wide-mlp", 32
MEGABYTES = 2  # size of the problem's gradient


def run(number: int, how: BenchOptions) -> Iterator[Row]:
    """Measure both costs, on the same MPI engines."""
    from workbench.clusters import Cluster

    by_cluster, looked_at = (f"{words}, {number} ranks, MPI" for words in ("a driven step", "a followed step"))
    if not how.wanted(by_cluster) and not how.wanted(looked_at):
        return
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        environment({"WORKBENCH_RUNS": folder}),
        Cluster(number, runtime="mpi", quiet=True) as cluster,
    ):
        batch_size = _batch_size(cluster)
        if how.wanted(by_cluster):
            times = driven(cluster, Path(folder), batch_size, how.rounds, how.report)
            over = "mpiexec workbench train"
            yield compare(times["ours"], times["bare"], case=by_cluster, what="Cluster.train", over=over, below=DRIVEN)
        if how.wanted(looked_at):
            times = followed(cluster, batch_size, how.rounds)
            what, over = "curves drawn live", "nobody looks"
            yield compare(times["followed"], times["alone"], case=looked_at, what=what, over=over, below=FOLLOWED)


def driven(
    cluster: Cluster, folder: Path, batch_size: int, rounds: int, report: Callable[[str], None]
) -> dict[str, list[float]]:
    """Return median seconds of a step on the engines and under mpiexec without a notebook, measured alternately.

    The first round does not count.
    """
    from workbench.clusters.local.mpi_install import find_mpi, mpiexec_command
    from workbench.trace.run import Run

    what = f"{ALGORITHM} --problem {PROBLEM} --option megabytes={MEGABYTES:g}"
    words = f"train {what} --steps {STEPS} --batch-size {batch_size} --evaluate-every 0"
    command, env = mpiexec_command(find_mpi(), cluster.num_ranks, [sys.executable, "-m", "workbench", *words.split()])

    def ours() -> float:
        return _step_s(_train(cluster, STEPS, batch_size).wait(LIMIT_S).run)

    def bare() -> float:
        known = set(folder.iterdir())
        subprocess.run(command, env=env, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S)
        (made,) = set(folder.iterdir()) - known
        return _step_s(Run.load(made))

    times: dict[str, list[float]] = {"ours": [], "bare": []}
    for round_ in range(rounds + 1):
        ways = {"ours": ours, "bare": bare}
        for name in list(ways)[:: 1 if round_ % 2 else -1]:
            seconds = ways[name]()
            if round_:
                times[name].append(seconds)
        if round_:
            report(
                f"{cluster.num_ranks} ranks: a step of {1e3 * times['ours'][-1]:.2f} ms driven, "
                f"{1e3 * times['bare'][-1]:.2f} ms bare"
            )
    return times


def followed(cluster: Cluster, batch_size: int, rounds: int) -> dict[str, list[float]]:
    """Return mean seconds of a step of one run, with and without drawing its curves, measured alternately.

    The work of the browser is not included.
    """
    from workbench.plots.live.curves import INTERVAL_S, LiveCurves
    from workbench.trace.follow import Follower

    handle = _train(cluster, sys.maxsize, batch_size)
    follower, view = Follower(handle.folder), LiveCurves()
    times: dict[str, list[float]] = {"followed": [], "alone": []}

    def window(name: str) -> float:
        first, begin_s = newest(handle.folder)
        until_s = time.monotonic() + WINDOW_S
        while time.monotonic() < until_s:
            if name == "followed":
                view.update([follower.poll()])
            time.sleep(view.pause_s if name == "followed" else INTERVAL_S)
        last, end_s = newest(handle.folder)
        return (end_s - begin_s) / (last - first)

    give_up_s = time.monotonic() + LIMIT_S
    while newest(handle.folder)[0] < WARM_STEPS:
        if handle.done or time.monotonic() > give_up_s:
            handle.stop().wait(LIMIT_S)  # raises the run's error, if there was one
            raise LaunchError(f"the training to be followed has not taken {WARM_STEPS} steps: see {handle.folder}")
        time.sleep(INTERVAL_S)
    for round_ in range(rounds + 1):
        for name in list(times)[:: 1 if round_ % 2 else -1]:
            seconds = window(name)
            if round_:
                times[name].append(seconds)
    handle.stop().wait(LIMIT_S)
    return times


def _train(cluster: Cluster, steps: int, batch_size: int) -> RunHandle:
    from workbench import algorithms, problems

    algorithm, problem = algorithms.get(ALGORITHM), problems.get(PROBLEM, megabytes=MEGABYTES)
    return cluster.train(algorithm, problem, steps=steps, batch_size=batch_size, evaluate_every=0)


def _batch_size(cluster: Cluster) -> int:
    """Return a batch size whose step takes about `STEP_S` or more."""
    probe_s = _step_s(_train(cluster, PROBE_STEPS, PROBE_BATCH).wait(LIMIT_S).run)
    return PROBE_BATCH * max(1, math.ceil(STEP_S / probe_s))


def _step_s(run: Run) -> float:
    """Return median seconds of a step of rank 0."""
    import numpy as np

    seconds = [row["seconds"] for row in run.metrics[0] if "loss" in row]
    return float(np.median(np.diff(seconds[WARM_STEPS:])))


def newest(folder: Path) -> tuple[int, float]:
    """Return rank 0's newest step, and the seconds of training until its end; step -1 before the first."""
    from workbench.trace.recorder import metrics_name

    path = folder / metrics_name(0)
    if not path.exists():
        return -1, 0.0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LAST_BYTES))
        lines = file.read().split(b"\n")[:-1]
    if not lines:
        return -1, 0.0
    row = json.loads(lines[-1])
    return int(row["step"]), float(row["seconds"])
