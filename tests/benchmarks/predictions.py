"""Predicted against measured step times on the emulated network.

    python -m tests.benchmarks.predictions run [FOLDER]     # 15 to 20 minutes; continues after an interruption
    python -m tests.benchmarks.predictions record [FOLDER]  # writes records/predictions.json and prints its table
    python -m tests.benchmarks.predictions repredict        # predicts again from both records' calibrations; keeps the measured rows

Per model only one synchronous run of two hosts at one rate, and messages of some sizes there, are fitted. All
predictions are written to the folder before anything else is measured. Then other rates, four hosts and other
algorithms are measured: gloo over TCP between network namespaces, limited by `tbf`. The hosts share this machine's
cores; the model contains this.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np

import workbench as wb
from workbench import algorithms, problems
from workbench.analysis import summary
from workbench.analysis.summary import step_seconds
from workbench.analysis.table import Column, Table, percent, seconds
from workbench.calibration import Calibration, Probe, calibrate, predict, probe, with_probe
from workbench.calibration.fixed_point import midmean
from workbench.calibration.probe import without_hold_up
from workbench.clusters.emulated import EmulatedNetwork, parse_rate
from workbench.problems import Problem
from workbench.program import Algorithm
from workbench.trace.run import Run

HERE = Path(__file__).parents[2]
RECORD, SECOND = (HERE / "records" / f"{name}.json" for name in ("predictions", "predictions-second"))
FOLDER = Path("runs") / "predictions"
CORES = 2
CALIBRATED_AT = (2, "200mbit")
RATES = ("100mbit", "200mbit", "400mbit", "800mbit")
HOSTS = (2, 4)
CALIBRATION_STEPS = 40
SECONDS_EACH = 7.0  # of measured training, at least MIN_STEPS
MIN_STEPS, MAX_STEPS = 8, 40
WAIT_S = 240.0
UNSEEN = (
    "Calibrations, predictions and measurements are all of one session, after the model was last changed. Other measurements of the same "
    "cells had been seen when it was changed; no number was fitted to them."
)
SEEN = (
    "predicted_s, low_s, high_s and bound are of the present model, from the calibrations here: the measured rows had been seen when the "
    "model was changed, and no number was fitted to them. error_before is of the model before, first_error of what was predicted first."
)


@dataclass(frozen=True)
class Model:
    """A problem by name, with its options and samples per worker."""

    problem: str
    options: dict[str, Any]
    batch_size: int

    def make(self) -> Problem:
        return problems.get(self.problem, **self.options)


MODELS = {
    "mlp-8mb": Model("wide-mlp", {"megabytes": 8.0}, 384),
    "transformer-13mb": Model("text-transformer", {"width": 256, "layers": 4}, 12),
}
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "synchronous": ("synchronous-sgd", {}),
    "layer-wise": ("layerwise-sgd", {}),
    "Pipe-SGD": ("pipe-sgd", {"width": 2}),
    "Pipe-SGD, 16-bit hops": ("pipe-sgd", {"width": 2, "collective": "ring:truncate16"}),
    "PS-Sync": ("parameter-server-sgd", {}),
}


def algorithm(name: str) -> Algorithm:
    word, settings = ALGORITHMS[name]
    return algorithms.get(word, **settings)


# -- one rank on a host ------------------------------------------------------------------------------------------------


def be_rank(plan: Path) -> None:
    """Execute all jobs of a plan as one rank of torchrun's environment."""
    import torch

    from workbench.runtimes.rank.main import Job, leave_world, run_rank
    from workbench.runtimes.transport.base import Deadline
    from workbench.runtimes.transport.torch_distributed import TorchTransport, join_process_group
    from workbench.settings import Settings

    content = json.loads(plan.read_text())
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    join_process_group(rank, content["hosts"], None, 120.0)
    if content["probe"]:
        transport = TorchTransport(timeout_s=120.0)
        found = probe(transport, lambda what: Deadline(what, transport.peer_failure, 120.0))
        if rank == 0:
            Path(content["probe"]).write_text(json.dumps(found.as_record()))
        transport.close()
    model = MODELS[content["model"]]
    for job in content["jobs"]:
        settings = Settings(steps=job["steps"], batch_size=model.batch_size, evaluate_every=0, threads=1, seed=1)
        problem = replace(model.make(), test=None)
        run_rank(
            Job(
                algorithm=algorithm(job["algorithm"]),
                problem=problem,
                settings=settings,
                runtime="torch",
                folder=job["folder"],
            )
        )
    leave_world()


# -- all ranks ----------------------------------------------------------------------------------------------------------


def measure(
    folder: Path, model: str, hosts: int, rate: str, steps: dict[str, int], probe_file: Path | None = None
) -> dict[str, Run]:
    """Train with each algorithm on an emulated network; return its name -> its run."""
    from workbench.replica.local_training import run_info
    from workbench.settings import Settings
    from workbench.trace.store import new_run

    jobs = []
    for name, number in steps.items():
        settings = Settings(steps=number, batch_size=MODELS[model].batch_size, evaluate_every=0, threads=1, seed=1)
        info = run_info(algorithm(name), MODELS[model].make(), settings, "torch", hosts)
        jobs.append({"algorithm": name, "steps": number, "folder": str(new_run(info, folder / "runs").resolve())})
    plan = folder / f"plan-{model}-{hosts}-{rate}.json"
    plan.write_text(
        json.dumps(
            {"hosts": hosts, "model": model, "jobs": jobs, "probe": str(probe_file.resolve()) if probe_file else None}
        )
    )
    command = [sys.executable, "-m", "tests.benchmarks.predictions", "rank", str(plan.resolve())]
    with EmulatedNetwork(hosts, rate=rate) as network, (folder / "ranks.log").open("ab") as log:
        world = {
            "WORLD_SIZE": hosts,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "MASTER_ADDR": network.hosts[0].address,
            "MASTER_PORT": 29500,
        }
        common = {**{key: str(value) for key, value in world.items()}, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
        ranks = [
            network.run(
                host,
                command,
                env={**common, "RANK": str(host)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=HERE,
            )
            for host in range(hosts)
        ]
        deadline = time.monotonic() + WAIT_S
        try:
            codes = [rank.wait(max(1.0, deadline - time.monotonic())) for rank in ranks]
        except subprocess.TimeoutExpired:
            raise SystemExit(
                f"{model} on {hosts} hosts at {rate}: not done in {WAIT_S:g} s; see {folder / 'ranks.log'}"
            ) from None
    if any(codes):
        raise SystemExit(f"{model} on {hosts} hosts at {rate}: ranks ended with {codes}; see {folder / 'ranks.log'}")
    return {job["algorithm"]: Run.load(job["folder"]) for job in jobs}


def fit(folder: Path, model: str) -> Calibration:
    """Return the calibration of a model: fitted once, then read."""
    path = folder / f"calibration-{model}.json"
    if path.exists():
        return Calibration.load(path)
    hosts, rate = CALIBRATED_AT
    probe_file = folder / f"probe-{model}.json"
    run = measure(folder, model, hosts, rate, {"synchronous": CALIBRATION_STEPS}, probe_file)["synchronous"]
    found = Probe.from_record(json.loads(probe_file.read_text()))
    first = calibrate(run, problem=MODELS[model].make(), cores=CORES, line_bytes_per_s=parse_rate(rate) / 8)
    calibration = with_probe(first, found)
    calibration.save(path)
    return calibration


def predict_all(folder: Path, models: list[str]) -> list[dict[str, Any]]:
    """Return all predictions; write them before anything except the calibration cells is measured."""
    path = folder / "predicted.json"
    if path.exists():
        return list(json.loads(path.read_text()))
    rows = []
    for model in models:
        calibration = fit(folder, model)
        for hosts in HOSTS:
            for rate in RATES:
                for name in ALGORITHMS:
                    cell = {"model": model, "hosts": hosts, "rate": rate, "algorithm": name}
                    rows.append({**cell, **prediction(calibration, cell)})
    path.write_text(json.dumps(rows, indent=1))
    return rows


def prediction(calibration: Calibration, cell: dict[str, Any]) -> dict[str, Any]:
    """Return the prediction for a cell."""
    rate = parse_rate(cell["rate"]) / 8
    found = predict(
        calibration, algorithm(cell["algorithm"]), workers=cell["hosts"], bandwidth_bytes_per_s=rate, cores=CORES
    )
    usual = found.usual_s / found.step_s  # the band is of the mean step
    return {
        "predicted_s": found.usual_s,
        "low_s": usual * found.low_s,
        "high_s": usual * found.high_s,
        "bound": found.bound,
    }


def run_all(folder: Path, models: list[str]) -> None:
    """Calibrate, predict, then measure the missing cells."""
    folder.mkdir(parents=True, exist_ok=True)
    for model in models:
        print(fit(folder, model), flush=True)
    rows = predict_all(folder, models)
    measured = folder / "measured.jsonl"
    done = {line["cell"] for line in read_lines(measured)}
    for model in models:
        for hosts in HOSTS:
            for rate in RATES:
                cell = f"{model}/{hosts}/{rate}"
                if cell in done:
                    continue
                here = [row for row in rows if (row["model"], row["hosts"], row["rate"]) == (model, hosts, rate)]
                steps = {row["algorithm"]: steps_for(row["predicted_s"]) for row in here}
                runs = measure(folder, model, hosts, rate, steps)
                found = {name: describe(run) for name, run in runs.items()}
                with measured.open("a") as file:
                    file.write(json.dumps({"cell": cell, "algorithms": found}) + "\n")
                print(cell, {name: f"{each['step_s']:.3f}" for name, each in found.items()}, flush=True)


def steps_for(step_s: float) -> int:
    return int(min(MAX_STEPS, max(MIN_STEPS, SECONDS_EACH / step_s)))


def describe(run: Run) -> dict[str, Any]:
    """Mean of the middle half, and quartiles, of a run's steps after the warm-up."""
    times = np.sort(step_seconds(run))
    quarter = len(times) // 4
    return {
        "step_s": midmean(times),
        "low_s": float(times[quarter]),
        "high_s": float(times[-1 - quarter]),
        "steps": summary(run)["steps"],
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# -- the record -----------------------------------------------------------------------------------------------------------

COLUMNS = (
    Column("model", "model"),
    Column("hosts", "hosts"),
    Column("rate", "rate"),
    Column("algorithm", "algorithm"),
    Column("predicted_s", "predicted", seconds),
    Column("measured_s", "measured", seconds),
    Column("error", "error", percent),
    Column("bound", "bound by"),
)


def record(folder: Path) -> None:
    """Write predictions and measurements as a record and a table; the numbers below it exclude the cell of the calibration.

    If `predicted-first.json` exists, the record also has the errors of these earlier predictions.
    """
    first = {_key(row): row["predicted_s"] for row in json.loads(_text(folder / "predicted-first.json"))}
    found = {line["cell"]: line["algorithms"] for line in read_lines(folder / "measured.jsonl")}
    rows = []
    for row in json.loads((folder / "predicted.json").read_text()):
        cell = found.get(f"{row['model']}/{row['hosts']}/{row['rate']}", {}).get(row["algorithm"])
        if cell is None:
            continue
        seen = (row["hosts"], row["rate"], row["algorithm"]) == (*CALIBRATED_AT, "synchronous")
        spread = {"measured_low_s": cell["low_s"], "measured_high_s": cell["high_s"], "steps": cell["steps"]}
        rows.append(
            {
                **row,
                "measured_s": cell["step_s"],
                **spread,
                "error": row["predicted_s"] / cell["step_s"] - 1,
                "fitted": seen,
            }
        )
        if first:
            rows[-1]["first_error"] = first[_key(row)] / cell["step_s"] - 1
    models = sorted({row["model"] for row in rows})
    write(
        rows,
        {name: Calibration.load(folder / f"calibration-{name}.json").as_record() for name in models},
        {"seen": UNSEEN},
    )


def repredict(path: Path) -> None:
    """Predict a record's rows again from its calibrations; `error_before` is the error of the earlier prediction."""
    recorded = json.loads(path.read_text())
    known = {
        name: without_hold_up(Calibration.from_record(record)) for name, record in recorded["calibrations"].items()
    }
    rows = []
    for row in recorded["rows"]:
        new = {**row, **prediction(known[row["model"]], row)}
        rows.append({**new, "error": new["predicted_s"] / row["measured_s"] - 1})
        if not isclose(new["predicted_s"], row["predicted_s"], rel_tol=1e-9):
            rows[-1]["error_before"] = row.get("error_before", row["error"])
    others = any("error_before" in row for row in rows)
    if others:
        rows = [{"error_before": row["error"], **row} for row in rows]
    kept = {name: recorded["how"][name] for name in ("seen", "measured_again") if name in recorded["how"]}
    write(rows, recorded["calibrations"], {**kept, **({"seen": SEEN} if others else {})}, path)


def write(rows: list[dict[str, Any]], calibrations: dict[str, Any], more: dict[str, Any], path: Path = RECORD) -> None:
    """Write the record and print its table.

    Args:
        more: entries of "how": "seen", what was known at the time of the predictions; "measured_again", which cells,
            and why.
    """
    errors = sorted(abs(row["error"]) for row in rows if not row["fitted"])
    result = {
        "how": {
            "calibrated_at": {
                "hosts": CALIBRATED_AT[0],
                "rate": CALIBRATED_AT[1],
                "algorithm": "synchronous",
                "steps": CALIBRATION_STEPS,
            },
            "models": {name: {**vars(MODELS[name])} for name in calibrations},
            "algorithms": {name: f"{word} {settings}" for name, (word, settings) in ALGORITHMS.items()},
            "cores": CORES,
            "runtime": "torch (gloo)",
            **more,
        },
        "error_median": statistics.median(errors),
        "error_worst": errors[-1],
        **_parts(rows),
        "versions": {"workbench": wb.__version__, "torch": __import__("torch").__version__ + ""},
        "calibrations": calibrations,
        "rows": rows,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(Table(rows, COLUMNS))
    middle, worst = percent(statistics.median(errors)), percent(errors[-1])
    print(f"{len(errors)} predictions: error {middle} at the median, {worst} at worst; {path}")


def _key(row: dict[str, Any]) -> str:
    return f"{row['model']}/{row['hosts']}/{row['rate']}/{row['algorithm']}"


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else "[]"


def _parts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and worst error of each model, number of hosts and algorithm, and of the first predictions."""
    rows = [row for row in rows if not row["fitted"]]

    def of(name: str, error: str = "error") -> dict[str, Any]:
        groups: dict[str, list[float]] = {}
        for row in rows:
            groups.setdefault(str(row[name]), []).append(abs(row[error]))
        return {key: {"median": statistics.median(errors), "worst": max(errors)} for key, errors in groups.items()}

    parts: dict[str, Any] = {f"by_{name}": of(name) for name in ("model", "hosts", "algorithm")}
    if rows and "first_error" in rows[0]:
        parts["first_by_model"] = of("model", "first_error")
    if rows and "error_before" in rows[0]:
        parts["before_by_algorithm"] = of("algorithm", "error_before")
    return parts


if __name__ == "__main__":
    what, *rest = sys.argv[1:] or ["run"]
    place = Path(rest[0]) if rest else FOLDER
    chosen = rest[1:] or list(MODELS)
    match what:
        case "rank":
            be_rank(place)
        case "run":
            run_all(place, chosen)
            record(place)
        case "record":
            record(place)
        case "repredict":
            repredict(RECORD)
            repredict(SECOND)
        case _:
            raise SystemExit(__doc__)
