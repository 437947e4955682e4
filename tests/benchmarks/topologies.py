"""Topologies of D-PSGD: the distance of the replicas from their mean by step, and the time of a step on three networks.

    python -m tests.benchmarks.topologies          # writes records/topologies.json and records/topologies.svg
    python -m tests.benchmarks.topologies draw     # the figure again, from the record

A training does not depend on the network, so each is made once, on the smaller number of workers. A step's time is that
of a simulation without values.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import workbench as wb
from workbench import costs, topologies
from workbench.program import Algorithm

RECORDS = Path(__file__).parents[2] / "records"
HOW: dict[str, Any] = {
    "problem": "digits-mlp",
    "workers": [16, 64],
    "samples_per_step": 256,
    "lr": 0.1,
    "steps": 100,
    "evaluate_every": 5,
    "seed": 0,
    "target_loss": 0.15,
    "forward_s": 0.4e-3,
    "backward_s": 0.8e-3,
    "update_s": 0.1e-3,
    "networks": ["infiniband-hdr", "ethernet-1g", "wan-100m"],
}
TIMED_STEPS = 24  # whole periods of every graph
DISTANCE = "consensus_distance"


def algorithms() -> dict[str, Algorithm]:
    """Name of a row -> algorithm."""
    graphs = ("ring", "torus", "exponential", "one-peer-exponential", "complete")
    return {
        "all-reduce": wb.SynchronousSGD(),
        **{f"D-PSGD, {name}": wb.DPSGD(topology=topologies.get(name)) for name in graphs},
    }


def train(algorithm: Algorithm, workers: int, seed: int) -> dict[str, Any]:
    """The curves of a training."""
    run = wb.simulate(
        algorithm,
        wb.problems.digits_mlp(),
        workers=workers,
        network="ethernet-10g",
        steps=HOW["steps"],
        batch_size=HOW["samples_per_step"] // workers,
        lr=HOW["lr"],
        seed=seed,
        evaluate_every=HOW["evaluate_every"],
        trace_steps=0,
    )
    evaluations = run.evaluations()
    return {
        "steps": [row["step"] + 1 for row in evaluations],
        "losses": [round(row["test_loss"], 5) for row in evaluations],
        "distances": [round(row.get(DISTANCE, 0.0), 7) for row in evaluations],
    }


def step_s(algorithm: Algorithm, workers: int, network: str) -> float:
    """Seconds of a step, without the first and the last."""
    compute = costs.Compute(forward_s=HOW["forward_s"], backward_s=HOW["backward_s"], update_s=HOW["update_s"])
    run = wb.simulate(
        algorithm,
        wb.problems.digits_mlp(),
        workers=workers,
        network=network,
        compute=compute,
        timing_only=True,
        steps=TIMED_STEPS + 1,
        batch_size=1,
        trace_steps=0,
        evaluate_every=0,
    )
    ends = [max(rows[number]["seconds"] for rows in run.metrics.values()) for number in (0, TIMED_STEPS)]
    return (ends[1] - ends[0]) / TIMED_STEPS


def steps_to(target: float, curve: dict[str, Any]) -> int | None:
    """The first evaluated step at which the loss is at most the target."""
    return next((step for step, loss in zip(curve["steps"], curve["losses"], strict=True) if loss <= target), None)


def measure() -> None:
    """Write the record."""
    rows = []
    for workers in HOW["workers"]:
        for name, algorithm in algorithms().items():
            curve = train(algorithm, workers, HOW["seed"]) if workers == HOW["workers"][0] else None
            steps = None if curve is None else steps_to(HOW["target_loss"], curve)
            seconds = {network: step_s(algorithm, workers, network) for network in HOW["networks"]}
            graph = getattr(algorithm, "topology", None)
            rows.append(
                {
                    "name": name,
                    "workers": workers,
                    "spectral_gap": None if graph is None else graph.spectral_gap(workers),
                    "steps_to_target": steps,
                    "step_s": seconds,
                    "time_to_target_s": {one: None if steps is None else steps * each for one, each in seconds.items()},
                    "curve": curve,
                }
            )
            print(workers, name, steps, {one: f"{1e3 * each:.2f} ms" for one, each in seconds.items()}, flush=True)
    versions = {"workbench": wb.__version__, "torch": __import__("torch").__version__}
    (RECORDS / "topologies.json").write_text(
        json.dumps({"how": HOW, "versions": versions, "rows": rows}, indent=1) + "\n"
    )


def draw() -> None:
    """Write the figure of the record: left the distance by step on few workers, right the time of a step on many."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    from workbench.plots.pictures import write_pictures
    from workbench.plots.style import CYCLE, TEMPLATE

    record = json.loads((RECORDS / "topologies.json").read_text())
    few, many = record["how"]["workers"]
    rows = [row for row in record["rows"] if row["workers"] == few]
    step_s = {row["name"]: row["step_s"] for row in record["rows"] if row["workers"] == many}
    networks = record["how"]["networks"]
    figure = go.Figure(make_subplots(rows=1, cols=2, horizontal_spacing=0.12))
    for color, row in zip(CYCLE, rows, strict=False):
        name = row["name"].removeprefix("D-PSGD, ")
        if row["spectral_gap"] is not None:
            curve = row["curve"]
            shown = {"mode": "lines", "line": {"color": color}, "showlegend": False}
            figure.add_scatter(x=curve["steps"][:-1], y=curve["distances"][:-1], **shown, row=1, col=1)
        times = [1e3 * step_s[row["name"]][network] for network in networks]
        figure.add_bar(x=networks, y=times, name=name, marker={"color": color}, row=1, col=2)
    figure.update_xaxes(title="step", row=1, col=1)
    figure.update_yaxes(title=f"distance from the mean, {few} workers", type="log", row=1, col=1)
    figure.update_yaxes(title=f"ms a step, {many} workers", type="log", row=1, col=2)
    figure.update_layout(
        template=TEMPLATE,
        title="D-PSGD on five topologies, and the all-reduce",
        width=980,
        height=440,
        legend={"yref": "container", "y": 0, "yanchor": "bottom"},
    )
    write_pictures({RECORDS / "topologies": figure.to_dict()})


if __name__ == "__main__":
    if sys.argv[1:] != ["draw"]:
        measure()
    draw()
