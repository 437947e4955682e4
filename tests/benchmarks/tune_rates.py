"""Learning rates for problems that delays harm: the best of a grid, for each algorithm, delay and number of workers.

    python -m tests.benchmarks.tune_rates [PROBLEM]   # some 25 minutes of one core; writes records/tuned-rates.json

A grid has at least five rates, by factors of 2. The best has the smallest mean test loss at the end of training. A grid is extended
until the best is inside. The best and its two neighbours have three seeds, the others at least one.
Rows of the record that exist stay. Delete the ones to measure again.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import workbench as wb
from workbench import algorithms as a
from workbench import costs
from workbench.algorithms import StaleSGD
from workbench.algorithms.staleness import Constant
from workbench.problems.tuned_rates import changed_settings, without_rate
from workbench.program import Algorithm
from workbench.runtimes.rank.fingerprint import data_digest

RECORD = Path(__file__).parents[2] / "records" / "tuned-rates.json"
SEEDS, WIDTH, MOST_RATES = 3, 5, 12
JITTER, NETWORK = 0.3, "ethernet-1g"


@dataclass(frozen=True)
class Plan:
    """How a problem is trained: the length, the compute's seconds of a minibatch, and the first rate of synchronous SGD to try."""

    length: dict[str, int]
    forward_s: float
    backward_s: float
    first_lr: float


PLANS = {
    "mnist1d-cnn": Plan({"epochs": 10}, 0.4e-3, 0.8e-3, 0.05),
    "mnist1d-mlp": Plan({"epochs": 10}, 0.4e-3, 0.8e-3, 0.05),
    "mnist5k-cnn": Plan({"epochs": 3}, 4e-3, 8e-3, 0.05),
    "mnist1d-softmax": Plan({"epochs": 10}, 0.4e-3, 0.8e-3, 0.05),
    "library-transformer": Plan({"steps": 25}, 45e-3, 90e-3, 4e-3),
}
# Algorithm, number of workers, and the first rate to try as a part of the problem's.
CORE: list[tuple[Algorithm, int, float]] = [
    (a.SynchronousSGD(), 4, 1),
    (a.PipeSGD(width=2), 4, 1 / 2),
    (a.PipeSGD(width=3), 4, 1 / 4),
    (a.PipeSGD(width=5), 4, 1 / 8),
    (a.AsyncSGD(), 4, 1 / 2),
    (a.SynchronousSGD(), 8, 1),
    (a.AsyncSGD(), 8, 1 / 4),
]
MORE: list[tuple[Algorithm, int, float]] = [
    (a.PipeSGD(width=2), 8, 1 / 2),
    (a.PipeSGD(width=3), 8, 1 / 4),
    (a.PipeSGD(width=5), 8, 1 / 8),
    (StaleSGD(staleness=Constant(1)), 4, 1 / 2),
    (StaleSGD(staleness=Constant(4)), 4, 1 / 8),
    (a.BackupSGD(backups=1), 4, 1),
    (a.SoftsyncSGD(), 4, 1),
]
# A gradient of mnist5k-cnn takes 5 ms and one of the transformer 0.135 s, so they have few rows.
ROWS = {**dict.fromkeys(PLANS, CORE), "mnist5k-cnn": CORE[:5], "library-transformer": CORE[:1]}
MORE_ROWS = {name: MORE for name in PLANS if name.startswith("mnist1d")}


def train(problem: wb.Problem, algorithm: Algorithm, workers: int, lr: float, seed: int) -> dict[str, float] | None:
    """Return test loss, accuracy and mean staleness at the end of a simulated training; None if it diverged."""
    plan = PLANS[problem.name]
    compute = costs.Compute(
        forward_s=plan.forward_s,
        backward_s=plan.backward_s,
        update_s=0.1e-3,
        stragglers=(costs.Lognormal(sigma=JITTER),),
    )
    how: dict[str, Any] = {"workers": workers, "network": NETWORK, "compute": compute, "lr": lr, "seed": seed}
    quiet: dict[str, Any] = {"evaluate_every": 0, "trace_steps": 0, "threads": 1}
    try:
        run = wb.simulate(algorithm, problem, **how, **quiet, **plan.length)
    except wb.errors.Diverged:
        return None
    last = run.evaluations()[-1]
    if not math.isfinite(last["test_loss"]):
        return None
    stale = [value for row in run.updates() for value in row["staleness"]]
    stale += [row["staleness"] for rows in run.metrics.values() for row in rows if row.get("staleness") is not None]
    return {
        "loss": round(last["test_loss"], 5),
        "accuracy": round(last["accuracy"], 5),
        "staleness": statistics.fmean(stale) if stale else 0.0,
    }


def mean_loss(tried: dict[str, Any]) -> float:
    """Return the mean loss of a rate over its seeds: infinite if a training diverged."""
    return math.inf if None in tried["losses"] else statistics.fmean(tried["losses"])


def tune(problem: wb.Problem, algorithm: Algorithm, workers: int, first_lr: float) -> dict[str, Any]:
    """Return a row of the record."""
    found: dict[int, dict[str, Any]] = {}
    staleness: dict[int, list[float]] = {}

    def measure(power: int, seeds: int) -> None:
        tried = found.setdefault(power, {"lr": first_lr * 2.0**power, "losses": [], "accuracies": []})
        for seed in range(len(tried["losses"]), seeds):
            run = train(problem, algorithm, workers, tried["lr"], seed)
            tried["losses"].append(run and run["loss"])
            tried["accuracies"].append(run and run["accuracy"])
            staleness.setdefault(power, []).append(run["staleness"] if run else 0.0)

    for power in range(-(WIDTH // 2), WIDTH // 2 + 1):
        measure(power, 1)
    while True:
        best = min(sorted(found), key=lambda power: mean_loss(found[power]))
        if len(found) > MOST_RATES:
            raise SystemExit(f"{problem.name}, {algorithm}: the best of {MOST_RATES} rates is at an edge")
        around = [power for power in (best - 1, best + 1) if power not in found]
        if around:
            measure(around[0], 1)
            continue
        if all(len(found[power]["losses"]) == SEEDS for power in (best - 1, best, best + 1)):
            break
        for power in (best - 1, best, best + 1):
            measure(power, SEEDS)
    return {
        "problem": problem.name,
        "algorithm": type(algorithm).__name__,
        "settings": changed_settings(algorithm),
        "workers": workers,
        "batch_size": problem.batch_size,
        "lr": found[best]["lr"],
        "loss": round(statistics.fmean(found[best]["losses"]), 5),
        "accuracy": round(statistics.fmean(found[best]["accuracies"]), 5),
        "staleness": round(statistics.fmean(staleness[best]), 2),
        "grid": [found[power] for power in sorted(found)],
    }


def describe_problem(problem: wb.Problem) -> dict[str, Any]:
    """Return how a problem is trained, and the sizes by which it is known again."""
    plan = PLANS[problem.name]
    compute = {"forward_s": plan.forward_s, "backward_s": plan.backward_s, "update_s": 0.1e-3}
    return {
        "optimizer": without_rate(problem.optimizer),
        "parameters": problem.num_parameters(),
        "samples": problem.num_samples(),
        "data": data_digest(problem.train_data()),
        **plan.length,
        "compute": compute,
        **({"note": problem.note} if problem.note else {}),
    }


def planned(only: str) -> Iterator[tuple[str, Algorithm, int, float]]:
    """Yield all rows to measure: first those that every problem has."""
    for rows in (ROWS, MORE_ROWS):
        for name, entries in rows.items():
            if only in name:
                for algorithm, workers, part in entries:
                    yield name, algorithm, workers, part * PLANS[name].first_lr


def read_rows() -> list[dict[str, Any]]:
    """Return the record's rows; none if there is no record."""
    rows: list[dict[str, Any]] = json.loads(RECORD.read_text())["rows"] if RECORD.exists() else []
    return rows


def write(rows: list[dict[str, Any]]) -> None:
    """Write the record, problem by problem."""
    how = {"seeds": SEEDS, "network": NETWORK, "stragglers": f"lognormal:{JITTER}", "best": "smallest mean test loss"}
    versions = {"workbench": wb.__version__, "torch": __import__("torch").__version__}
    names = [name for name in PLANS if any(row["problem"] == name for row in rows)]
    record = {
        "how": how,
        "versions": versions,
        "problems": {name: describe_problem(wb.problems.get(name)) for name in names},
        "rows": sorted(rows, key=lambda row: names.index(row["problem"])),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def main(only: str = "") -> None:
    for name, algorithm, workers, first_lr in planned(only):
        key = [name, type(algorithm).__name__, changed_settings(algorithm), workers]
        if any([row["problem"], row["algorithm"], row["settings"], row["workers"]] == key for row in read_rows()):
            continue
        row = tune(wb.problems.get(name), algorithm, workers, first_lr)
        write([*read_rows(), row])  # read again: another process can measure other problems
        print(*key, f"lr {row['lr']:g}: loss {row['loss']:.3f}, accuracy {100 * row['accuracy']:.1f} %", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
