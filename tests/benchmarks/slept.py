"""Step times of real ranks that sleep for their compute, next to the simulator's, from one cost model and the same seeds.

    python -m tests.benchmarks.slept                                      # five minutes of a quiet machine
    python -m tests.benchmarks.slept --write                              # writes records/slept.json
    python -m tests.benchmarks.slept --ranks 4 --steps 20 --sessions 1    # small

The link of the simulation is measured on the same ranks before the trainings. A session is a cluster, a seed, and a
rotation of the algorithms. The first row of a runtime says how late its ranks wake if they only sleep.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import workbench as wb
from workbench.algorithms import AsyncSGD, BackupSGD, PipeSGD, SynchronousSGD
from workbench.analysis.summary import step_seconds
from workbench.analysis.table import Column, Table, seconds
from workbench.calibration.probe import Probe, probe_here
from workbench.costs import Compute, Lognormal, Network
from workbench.problems.base import Problem
from workbench.program import Algorithm

RECORD = Path(__file__).parents[2] / "records" / "slept.json"
RUNTIMES = ("torch", "mpi")
ALGORITHMS: tuple[Algorithm, ...] = (SynchronousSGD(), PipeSGD(width=2), BackupSGD(backups=2), AsyncSGD())
COMPUTE = Compute(forward_s=0.03, backward_s=0.07, stragglers=(Lognormal(sigma=0.3),))
NUM_SLEEPS, SLEEP_S = 100, 0.02
WAIT_S = 300.0


def problem() -> Problem:
    return replace(wb.problems.digits_softmax(), test=None)


def wake_delays(num_sleeps: int, sleep_s: float) -> list[float]:
    """On a rank: the seconds by which each of some sleeps ends too late."""
    import time  # an engine gets this function without its module

    found = []
    for _ in range(num_sleeps):
        end_s = time.perf_counter() + sleep_s
        time.sleep(sleep_s)
        found.append(time.perf_counter() - end_s)
    return found


def link_of(found: Probe, algorithm: Algorithm) -> Network:
    """Return the measured link: sums and messages have their own latency."""
    latency_s = found.message_latency_s if algorithm.requires.servers else found.sum_latency_s
    return Network(
        latency_s=latency_s,
        bandwidth_bytes_per_s=1 / found.s_per_byte,
        sum_s_per_byte=found.sum_s_per_byte,
        name="measured",
    )


def run_session(runtime: str, ranks: int, steps: int, session: int) -> tuple[list[float], list[dict[str, Any]]]:
    """Return wake delays, and measured and predicted mean step seconds of each algorithm."""
    turn = session % len(ALGORITHMS)
    how: dict[str, Any] = {"steps": steps, "batch_size": 8, "evaluate_every": 0, "seed": session}
    rows = []
    with wb.Cluster(ranks, runtime=runtime, quiet=True, timeout_s=WAIT_S) as cluster:
        view = cluster.client[:]
        delays = [delay for rank in view.apply_sync(wake_delays, NUM_SLEEPS, SLEEP_S) for delay in rank]
        found = view.apply_sync(probe_here)[0]
        for algorithm in (*ALGORITHMS[turn:], *ALGORITHMS[:turn]):
            network = link_of(found, algorithm)
            run = cluster.train(algorithm, problem(), compute=COMPUTE, threads=1, **how).wait(WAIT_S).run
            predicted = wb.simulate(
                algorithm, problem(), workers=ranks, network=network, compute=COMPUTE, timing_only=True, **how
            )
            measured_s, predicted_s = (float(step_seconds(one).mean()) for one in (run, predicted))
            row = {"runtime": runtime, "algorithm": type(algorithm).__name__, "session": session}
            notes = [note for note in run.info["notes"] if note.startswith("compute took longer")]
            rows.append({**row, "measured_s": measured_s, "predicted_s": predicted_s, "notes": notes})
            print(rows[-1], flush=True)
    return delays, rows


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each runtime and algorithm: means over sessions, and the ratio with its spread."""
    found = []
    for runtime, algorithm in dict.fromkeys((row["runtime"], row["algorithm"]) for row in rows):
        chosen = [row for row in rows if (row["runtime"], row["algorithm"]) == (runtime, algorithm)]
        ratios = [row["measured_s"] / row["predicted_s"] for row in chosen]
        found.append(
            {
                "runtime": runtime,
                "algorithm": algorithm,
                "measured_s": statistics.fmean(row["measured_s"] for row in chosen),
                "predicted_s": statistics.fmean(row["predicted_s"] for row in chosen),
                "ratio": statistics.fmean(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
            }
        )
    return found


def wake_row(runtime: str, delays: list[float]) -> dict[str, Any]:
    """Return how late ranks wake: the median, and the two highest percentiles."""
    median_s, p90_s, p99_s = np.percentile(delays, (50, 90, 99)).tolist()
    return {"runtime": runtime, "median_s": median_s, "p90_s": p90_s, "p99_s": p99_s, "num_sleeps": len(delays)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sessions", type=int, default=3)
    parser.add_argument("--runtimes", nargs="+", choices=RUNTIMES, default=RUNTIMES)
    parser.add_argument("--write", action="store_true", help="write records/slept.json")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    delays: dict[str, list[float]] = {runtime: [] for runtime in options.runtimes}
    for session in range(options.sessions):
        for runtime in options.runtimes:
            late, measured = run_session(runtime, options.ranks, options.steps, session)
            delays[runtime] += late
            rows += measured
    wakes = [wake_row(runtime, delays[runtime]) for runtime in options.runtimes]
    ratio = "{:.3f}".format
    columns = (
        Column("runtime", "runtime"),
        Column("algorithm", "algorithm"),
        Column("measured_s", "measured, compute (slept)", seconds),
        Column("predicted_s", "simulated", seconds),
        *(Column(name, name, ratio) for name in ("ratio", "lowest", "highest")),
    )
    print(Table(summarize(rows), columns, caption=f"Mean time of a step on {options.ranks} ranks"))
    late_columns = (
        Column("runtime", "runtime"),
        *(Column(f"{name}_s", name, seconds) for name in ("median", "p90", "p99")),
    )
    print(Table(wakes, late_columns, caption=f"How late ranks wake from {SLEEP_S * 1e3:g} ms"))
    if options.write:
        how = {"ranks": options.ranks, "steps": options.steps, "sessions": options.sessions, "compute": str(COMPUTE)}
        how |= {"cores": os.cpu_count(), "load_before": round(load, 2)}
        versions = {"workbench": wb.__version__, "torch": __import__("torch").__version__}
        record = {"how": how, "versions": versions, "summary": summarize(rows), "wake": wakes, "rows": rows}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
