"""Seconds until a cluster's ranks are of use, and of a step driven from a notebook, each beside bare mpiexec doing the same.

    python tests/benchmarks/cluster_start.py [--ranks 4] [--rounds 5] [--steps 200]

Ready means: torch and the runtime imported on every rank, and the MPI world formed. Both sides are run in turn, because
a machine's speed changes from minute to minute; the ratio of medians is what counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import workbench as wb
from workbench.clusters.mpi_install import find_mpi, mpiexec_command

BARE_START = "from mpi4py import MPI; import workbench.runtimes.launch; MPI.COMM_WORLD.Barrier()"
METHOD, PROBLEM = "synchronous-sgd", "digits-mlp"


def bare_start(ranks: int) -> float:
    """Seconds of bare mpiexec, from its start to its end."""
    command, env = mpiexec_command(find_mpi(), ranks, [sys.executable, "-c", BARE_START])
    begin = time.monotonic()
    subprocess.run(command, env=env, check=True, stdin=subprocess.DEVNULL)
    return time.monotonic() - begin


def seconds_per_step(metrics: Any) -> float:
    """Median over the second half of rank 0's steps."""
    times = [row["seconds"] for row in metrics if "evaluation" not in row]
    steps = [after - before for before, after in itertools.pairwise(times)]
    return statistics.median(steps[len(steps) // 2 :])


def bare_steps(ranks: int, steps: int, folder: Path) -> float:
    """Of `workbench train`, whose ranks are plain mpiexec's."""
    words = f"train {METHOD} --problem {PROBLEM} --workers {ranks} --runtime mpi --steps {steps} --evaluate-every 0 --json".split()
    env = {**os.environ, "WORKBENCH_RUNS": str(folder)}
    subprocess.run([sys.executable, "-m", "workbench", *words], env=env, check=True, capture_output=True)
    newest = max(folder.glob("2*"), key=lambda path: path.name)
    return seconds_per_step(wb.Run.load(newest).metrics[0])


def measure(ranks: int, rounds: int, steps: int) -> dict[str, Any]:
    """All of it."""
    found: dict[str, list[float]] = {"bare_start_s": [], "cluster_start_s": [], "bare_step_s": [], "cluster_step_s": []}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["WORKBENCH_RUNS"] = folder
        bare_start(ranks)  # the first reads from the disk
        for _ in range(rounds):
            found["bare_start_s"].append(bare_start(ranks))
            begin = time.monotonic()
            with wb.Cluster(ranks, quiet=True) as cluster:
                cluster.client[:].apply_sync(lambda: "workbench.runtimes.launch" in __import__("sys").modules)
                found["cluster_start_s"].append(time.monotonic() - begin)
                run = cluster.train(wb.SynchronousSGD(), wb.problems.digits_mlp(), steps=steps, evaluate_every=0).wait()
                found["cluster_step_s"].append(seconds_per_step(run.run.metrics[0]))
            found["bare_step_s"].append(bare_steps(ranks, steps, Path(folder)))
    medians = {name: statistics.median(values) for name, values in found.items()}
    ratios = {what: medians[f"cluster_{what}_s"] / medians[f"bare_{what}_s"] for what in ("start", "step")}
    return {"ranks": ranks, "medians": medians, "ratios": ratios, "all": found, "load": os.getloadavg()[0]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    print(json.dumps(measure(options.ranks, options.rounds, options.steps), indent=1))


if __name__ == "__main__":
    main()
