"""Learning rates for problems that delays harm: the best of a grid, for each algorithm, delay and number of workers.

    python -m tests.benchmarks.tune_rates [PROBLEM]   # some 25 minutes of one core; writes records/tuned-rates.json

A grid has at least five rates, by factors of 2. The best has the smallest mean test loss at the end of training. A grid
is extended until the best is inside. The best, its two neighbours and all rates with a loss near the best have three
seeds, the others one. Trainings that the record has are not repeated. Delete a row to measure it again.
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
from workbench.trace.files.lock import locked

RECORD = Path(__file__).parents[2] / "records" / "tuned-rates.json"
SEEDS, WIDTH, MAX_RATES = 3, 5, 12
NEAR = 1.1  # of the smallest mean loss
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
    (a.StaleSynchronousSGD(), 4, 1 / 2),
    (a.DelayCompensatedSGD(), 4, 1 / 2),
    (a.LocalSGD(), 4, 1),
    (a.DPSGD(), 4, 1),
]
# A gradient of mnist5k-cnn takes 5 ms and one of the transformer 0.135 s, so these have only the rows of four workers.
ROWS = {name: CORE if name.startswith("mnist1d") else CORE[:5] for name in PLANS}
MORE_ROWS = {name: MORE if name.startswith("mnist1d") else MORE[3:] for name in PLANS}


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


def is_near(tried: dict[str, Any], best: dict[str, Any]) -> bool:
    """Return True if a rate's loss is so near to the best one that further seeds can make it the best."""
    return mean_loss(tried) <= NEAR * mean_loss(best)


def tune(
    problem: wb.Problem, algorithm: Algorithm, workers: int, first_lr: float, known: dict[str, Any] | None
) -> dict[str, Any]:
    """Return a row of the record, with the trainings of the `known` row."""
    found = {round(math.log2(tried["lr"] / first_lr)): tried for tried in (known["grid"] if known else [])}
    staleness = known["staleness"] if known else 0.0

    def measure(power: int, seeds: int) -> None:
        nonlocal staleness
        tried = found.setdefault(power, {"lr": first_lr * 2.0**power, "losses": [], "accuracies": []})
        for seed in range(len(tried["losses"]), seeds):
            run = train(problem, algorithm, workers, tried["lr"], seed)
            tried["losses"].append(run and run["loss"])
            tried["accuracies"].append(run and run["accuracy"])
            staleness = run["staleness"] if run else staleness

    if not found:
        for power in range(-(WIDTH // 2), WIDTH // 2 + 1):
            measure(power, 1)
    while True:
        best = min(sorted(found), key=lambda power: mean_loss(found[power]))
        if len(found) > MAX_RATES:
            raise SystemExit(f"{problem.name}, {algorithm}: the best of {MAX_RATES} rates is at an edge")
        new = [power for power in (best - 1, best + 1) if power not in found]
        near = [power for power, tried in found.items() if is_near(tried, found[best])]
        wanted = {best - 1, best, best + 1, *near}
        few = [power for power in sorted(wanted & found.keys()) if len(found[power]["losses"]) < SEEDS]
        if new:
            measure(new[0], 1)
        elif few:
            measure(few[0], SEEDS)
        else:
            break
    return {
        "problem": problem.name,
        "algorithm": type(algorithm).__name__,
        "settings": changed_settings(algorithm),
        "workers": workers,
        "batch_size": problem.batch_size,
        "lr": found[best]["lr"],
        "loss": round(statistics.fmean(found[best]["losses"]), 5),
        "accuracy": round(statistics.fmean(found[best]["accuracies"]), 5),
        "staleness": round(staleness, 2),
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


def read() -> dict[str, Any]:
    """Return the record; one without rows if there is none."""
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {"problems": {}, "rows": []}
    return record


def write(new: list[dict[str, Any]]) -> None:
    """Put rows into the record, in the order of the plan. Another process can put others."""
    plan = [key_of_plan(name, algorithm, workers) for name, algorithm, workers, _ in planned("")]
    how = {"seeds": SEEDS, "network": NETWORK, "stragglers": f"lognormal:{JITTER}", "best": "smallest mean test loss"}
    versions = {"workbench": wb.__version__, "torch": __import__("torch").__version__}
    described = {name: describe_problem(wb.problems.get(name)) for name in {row["problem"] for row in new}}
    with locked(RECORD.parent):
        record = read()
        rows = [row for row in record["rows"] if key_of(row) not in map(key_of, new)]
        rows = sorted([*rows, *new], key=lambda row: plan.index(key_of(row)))
        described = {**record["problems"], **described}
        problems = {name: described[name] for name in PLANS if name in described}
        content = {"how": how, "versions": versions, "problems": problems, "rows": rows}
        RECORD.write_text(json.dumps(content, indent=1) + "\n")


def main(only: str = "") -> None:
    for name, algorithm, workers, first_lr in planned(only):
        key = key_of_plan(name, algorithm, workers)
        known = next((row for row in read()["rows"] if key_of(row) == key), None)
        row = tune(wb.problems.get(name), algorithm, workers, first_lr, known)
        write([row])
        print(*key, f"lr {row['lr']:g}: loss {row['loss']:.3f}, accuracy {100 * row['accuracy']:.1f} %", flush=True)


def key_of(row: dict[str, Any]) -> list[Any]:
    """Return what tells a row from all others."""
    return [row["problem"], row["algorithm"], row["settings"], row["workers"]]


def key_of_plan(problem: str, algorithm: Algorithm, workers: int) -> list[Any]:
    """Return the same for a row that is planned."""
    return [problem, type(algorithm).__name__, changed_settings(algorithm), workers]


if __name__ == "__main__":
    main(*sys.argv[1:])
