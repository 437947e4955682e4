"""The best (N, b) of 100 machines, as Fig. 6 of chen2016revisiting: from arrival times measured here, and from
distributions.

    python -m tests.benchmarks.best_backups     # some minutes; writes records/best-backups.json

Arrival times are the backward passes of real ranks of this machine, over their median. Updates to a goal are the
paper's two numbers, or counted here: digits, real gradients in virtual time, one sample a worker, the best learning
rate of each N.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import workbench as wb
from workbench import theory
from workbench.costs import Bimodal, Compute, Empirical, Independent, Lognormal, Pareto, ShiftedExponential
from workbench.theory import Iterations

RECORD = Path(__file__).parents[2] / "records" / "best-backups.json"
TOTAL = 100
PAPER = [(50, 137_500.0), (100, 76_200.0)]  # chen2016revisiting, section 3.1
MEASURED_RANKS, MEASURED_STEPS, MEASURED_BATCH, WARM_UP = (2, 4), 300, 64, 20
TARGET = 0.2  # test loss
STEPS_OF = {8: 240, 16: 160, 32: 100, 64: 70, 100: 60}
LRS, SEEDS = (0.05, 0.1, 0.2, 0.4, 0.8), 3
SIMULATED_BACKUPS, SIMULATED_STEPS = (0, 2, 4, 10, 20), 100
CARRIED_STEPS = 2000

LAWS: dict[str, Independent] = {
    "lognormal, sigma 0.1": Lognormal(sigma=0.1),
    "lognormal, sigma 0.3": Lognormal(sigma=0.3),
    "1 + exponential of mean 0.1": ShiftedExponential(scale=0.1),
    "1 + exponential of mean 0.5": ShiftedExponential(scale=0.5),
    "Pareto of shape 4": Pareto(shape=4.0),
    "one in 20 takes 3 times as long": Bimodal(probability=0.05, factor=3.0),
}


def measure_arrivals(ranks: int) -> list[float]:
    """Seconds of each rank's backward pass in each step over their median, ascending, of a run on real ranks."""
    with wb.Cluster(ranks, runtime="torch", quiet=True) as cluster:
        settings = {"steps": MEASURED_STEPS, "batch_size": MEASURED_BATCH, "threads": 1, "evaluate_every": 0}
        run = cluster.train(wb.ParameterServerSGD(), wb.problems.digits_cnn(), **settings).wait().run
    table = run.spans.table[run.spans.is_kind(["backward"])]
    table = table[table["step"] >= WARM_UP]
    return [round(value, 4) for value in Empirical.from_seconds(table["end_s"] - table["start_s"]).values]


def updates_to_target(num_workers: int, lr: float, seed: int) -> int | None:
    """Updates until the test loss is TARGET, one sample a worker; None if it does not reach it within the steps."""
    still = Compute(forward_s=1.0, backward_s=2.0)
    settings = {"steps": STEPS_OF[num_workers], "batch_size": 1, "evaluate_every": 1, "trace_steps": 0, "threads": 1}
    how: dict[str, Any] = {
        "workers": num_workers,
        "network": "free",
        "compute": still,
        "lr": lr,
        "seed": seed,
        **settings,
    }
    try:
        run = wb.simulate(wb.SynchronousSGD(), wb.problems.digits_mlp(), **how)
    except wb.errors.Diverged:
        return None
    return next((row["step"] + 1 for row in run.evaluations() if row["test_loss"] <= TARGET), None)


def count_updates() -> list[dict[str, Any]]:
    """For each N the learning rate that takes the fewest updates, mean over seeds."""
    rows = []
    for num_workers in STEPS_OF:
        tried = {lr: [updates_to_target(num_workers, lr, seed) for seed in range(SEEDS)] for lr in LRS}
        means = {lr: statistics.fmean(filter(None, counts)) for lr, counts in tried.items() if None not in counts}
        best = min(means, key=lambda lr: means[lr])
        rows.append({"workers": num_workers, "lr": best, "updates": means[best], "of_seeds": tried[best]})
        print(rows[-1], flush=True)
    return rows


def arrival_of(law: Independent) -> theory.Arrival:
    """Arrival times: with median 1 if they were measured, else in the scale of the distribution."""
    if isinstance(law, Empirical):
        return theory.EmpiricalTime(values_s=law.values)
    if isinstance(law, Bimodal):
        return theory.BimodalTime(usual_s=1.0, slow_s=law.factor, probability=law.probability)
    return theory.QuantileTime(quantile_of=law.quantile)


def best(arrival: theory.Arrival, updates: Callable[[float], float]) -> dict[str, Any]:
    """The best (N, b) if stragglers are cancelled, and if they continue into the next step, as they do here."""
    found = {}
    carried = theory.Backlog(arrival=arrival, num_steps=CARRIED_STEPS)
    for name, law in (("cancelled", arrival), ("carried", carried)):
        choice = theory.best_backups(TOTAL, updates, law)
        near = [b for b, seconds in enumerate(choice.total_s) if seconds <= 1.01 * choice.best_s]
        found[name] = {
            "N": TOTAL - choice.backups,
            "b": choice.backups,
            "times_as_fast_as_none": round(choice.gain, 4),
            "b_within_1_percent": [near[0], near[-1]],
        }
    return found


def simulated_steps(law: Independent) -> list[dict[str, float]]:
    """Mean time between updates of `BackupSGD`, message by message, next to both closed forms."""
    arrival = arrival_of(law)
    carried = theory.Backlog(arrival=arrival, num_steps=CARRIED_STEPS)
    problem = replace(wb.problems.digits_softmax(), train=range(10**9), test=None)  # timing only: samples are counted
    compute = Compute(forward_s=1 / 3, backward_s=2 / 3, stragglers=(law,))
    rows = []
    for b in SIMULATED_BACKUPS:
        how: dict[str, Any] = {"workers": TOTAL, "network": "free", "compute": compute, "timing_only": True}
        run = wb.simulate(wb.BackupSGD(backups=b), problem, **how, steps=SIMULATED_STEPS, batch_size=1, trace_steps=0)
        row = {"b": b, "simulated": run.updates()[-1]["seconds"] / SIMULATED_STEPS}
        row["carried"] = carried.expected_order_statistic(TOTAL - b, TOTAL)
        row["standard_error"] = carried.standard_error(TOTAL - b, TOTAL) * (CARRIED_STEPS / SIMULATED_STEPS) ** 0.5
        rows.append(
            {
                key: round(value, 4)
                for key, value in {**row, "order_statistic": arrival.expected_order_statistic(TOTAL - b, TOTAL)}.items()
            }
        )
    return rows


def spread(arrival: theory.Arrival) -> dict[str, float]:
    """Quantiles over the median."""
    levels = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    quantiles = {name: float(arrival.quantile(np.array([level]))[0]) for name, level in levels.items()}
    return {name: round(value / quantiles["p50"], 4) for name, value in quantiles.items()}


def main() -> None:
    load = os.getloadavg()[0]
    measured = {
        f"measured: {ranks} ranks of this machine": Empirical(values=tuple(measure_arrivals(ranks)))
        for ranks in MEASURED_RANKS
    }
    counted = count_updates()
    laws: dict[str, Independent] = {**measured, **LAWS}
    goals = {
        "paper": theory.fit_iterations(PAPER),
        "digits": theory.fit_iterations((row["workers"], row["updates"]) for row in counted),
    }
    rows = []
    for name, law in laws.items():
        arrival = arrival_of(law)
        row = {
            "law": name,
            "spread": spread(arrival),
            **{goal: best(arrival, updates) for goal, updates in goals.items()},
        }
        rows.append({**row, "steps": simulated_steps(law)})
        print(name, row, flush=True)
    how = {
        "total": TOTAL,
        "measured": f"backward of digits-cnn, {MEASURED_BATCH} samples a rank, {MEASURED_STEPS} steps of ParameterServerSGD on gloo",
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "updates": f"digits-mlp to a test loss of {TARGET}, one sample a worker, best of lr {LRS}, {SEEDS} seeds",
        "backlog_steps": CARRIED_STEPS,
        "simulated_steps": SIMULATED_STEPS,
    }
    versions = {"workbench": wb.__version__, "torch": __import__("torch").__version__}
    record = {
        "how": how,
        "versions": versions,
        "updates": {"paper": PAPER, "digits": counted, "fits": {name: fit_row(fit) for name, fit in goals.items()}},
        "rows": rows,
        "arrivals": {name: " ".join(f"{value:g}" for value in law.values) for name, law in measured.items()},
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def fit_row(fit: Iterations) -> dict[str, float | None]:
    """I(N) = limit (1 + critical / N)."""
    return {
        "limit": round(fit.limit, 3),
        "critical_workers": round(fit.critical_workers, 3),
        "limit_error": fit.limit_error and round(fit.limit_error, 3),
        "critical_workers_error": fit.critical_workers_error and round(fit.critical_workers_error, 3),
    }


if __name__ == "__main__":
    main()
