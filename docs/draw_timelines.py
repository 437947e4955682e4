"""Draws the timelines of docs/concepts, from simulated runs, and the check of a study, from its record.

`python docs/draw_timelines.py` writes them into docs/pictures. The figures of how-it-works.md are in draw_concepts.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import plotly.graph_objects as go

import workbench as wb
from workbench.costs import Compute, Network, SlowMachines
from workbench.plots.pictures import write_pictures
from workbench.plots.style import BLUE, TEMPLATE, VERMILION
from workbench.program import Algorithm
from workbench.trace.run import Run
from workbench.units import MBIT_PER_S

PICTURES = Path(__file__).parent / "pictures"
STUDY = Path(__file__).parents[1] / "records" / "study.json"
WINDOW = slice(6, 9)
COMPUTE = Compute(forward_s=0.002, backward_s=0.004, update_s=0.0002)
FAST = Network(latency_s=20e-6, bandwidth_bytes_per_s=10_000 * MBIT_PER_S)
NETWORK = Network(latency_s=50e-6, bandwidth_bytes_per_s=170 * MBIT_PER_S)  # a sum of digits-mlp takes about 6 ms


def simulated(algorithm: Algorithm, *, compute: Compute = COMPUTE, network: Network = NETWORK) -> Run:
    return wb.simulate(
        algorithm,
        wb.problems.digits_mlp(),
        workers=4,
        network=network,
        compute=compute,
        steps=14,
        evaluate_every=0,
    )


def study_check() -> go.Figure:
    """Draw a study's predictions, and the measured seconds of ranks with slept compute."""
    rows = [row for row in json.loads(STUDY.read_text(encoding="utf-8"))["rows"] if row["slept"]]
    names = [f"{row['model'].upper()}: {row['algorithm']}" for row in rows]
    predicted = [row["predicted_s"] for row in rows]
    above, below = (
        [abs(row[end] - value) for row, value in zip(rows, predicted, strict=True)] for end in ("high_s", "low_s")
    )
    error = {"type": "data", "array": above, "arrayminus": below, "thickness": 2}
    figure = go.Figure(layout={"template": TEMPLATE, "height": 640, "margin": {"l": 260}})
    figure.add_scatter(
        x=predicted, y=names, error_x=error, mode="markers", name="predicted, with its interval", marker={"color": BLUE}
    )
    figure.add_scatter(
        x=[row["measured_s"] for row in rows],
        y=names,
        mode="markers",
        name="measured",
        marker={"color": VERMILION, "symbol": "diamond", "size": 9},
    )
    figure.update_xaxes(title="seconds of a step", rangemode="tozero")
    figure.update_yaxes(autorange="reversed")
    return figure


def figures() -> dict[str, go.Figure]:
    """Return all figures, by the name of their file."""
    late = Compute(forward_s=0.002, backward_s=0.004, update_s=0.0002, stragglers=(SlowMachines(factor_of={3: 1.8}),))
    sums = [wb.SynchronousSGD(), wb.LayerwiseSGD(bucket_bytes=16 * wb.units.KIB), wb.PipeSGD(width=2)]
    waits = [wb.SynchronousSGD(), wb.BackupSGD(backups=1), wb.AsyncSGD()]
    return {
        "overlap": wb.plots.timelines([simulated(one) for one in sums], WINDOW, ranks=[0, 1], links=False),
        "stragglers": wb.plots.timelines(
            [simulated(one, compute=late, network=FAST) for one in waits],
            [WINDOW, WINDOW, slice(3, 5)],  # a slow rank takes longer over as many steps
            links=False,
        ),
        "study-check": study_check(),
    }


def main() -> None:
    """Draw all figures."""
    drawn = {PICTURES / name: json.loads(figure.to_json()) for name, figure in figures().items()}
    for path in write_pictures(drawn).values():
        print(path)


if __name__ == "__main__":
    main()
