"""Every algorithm that sums with every codec: it trains a convex problem, or is refused, and the message says what to
use.

    python -m tests.benchmarks.combinations     # simulated cluster; writes records/combinations.json and records/combinations.md

A run trains if its loss falls by at least 1 - MARGIN of the fall with the exact sum.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.laws import tiny
from workbench.algorithms import (
    SPARTA,
    AdaptiveDelaySGD,
    Constant,
    DeAR,
    DiLoCo,
    EagerDiLoCo,
    FedAvg,
    LayerwiseSGD,
    LocalSGD,
    PartialAllReduce,
    PipeSGD,
    StaleSGD,
    StreamingDiLoCo,
    SynchronousSGD,
)
from workbench.codecs import (
    QSGD,
    Codec,
    ErrorFeedback,
    Float16,
    Linear8,
    NaturalCompression,
    RandomK,
    SharedInt8,
    Sign,
    TernGrad,
    TopK,
    Truncate16,
)
from workbench.collectives import Collective, Hierarchical, Once, PowerSGD, Ring
from workbench.costs import Compute, Lognormal, Network
from workbench.errors import ConfigError
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings

RECORDS = Path(__file__).parents[2] / "records"
SEED, STEPS, RANKS, BATCH = 7, 200, 3, 4
SHARE = 0.1  # of the values, that top-k sends
# With error feedback a value is sent 1 / SHARE = 10 steps late at most on average, as if the run had 10 of its 200
# steps less (karimireddy2019error, theorem II: the error is of second order in the delay). Half as much again is for
# noise of a last loss.
MARGIN = 1.5 / SHARE / STEPS

CODECS: tuple[Codec, ...] = (
    Truncate16(),
    Float16(),
    Linear8(),
    QSGD(),
    TernGrad(),
    NaturalCompression(),
    TopK(fraction=SHARE),
    RandomK(fraction=SHARE),
    Sign(),
    SharedInt8(),
)
COLLECTIVES: tuple[Collective, ...] = (
    *(Ring(codec=codec) for codec in CODECS),
    *(
        Once(codec=codec, inner=Ring()) if isinstance(codec, type(SharedInt8())) else Once(codec=codec)
        for codec in CODECS
    ),
    *(
        Once(codec=ErrorFeedback(codec=codec))
        for codec in (TopK(fraction=SHARE), RandomK(fraction=SHARE), Sign(), Linear8())
    ),
    *(Hierarchical(group=2, codec=codec) for codec in CODECS),
    PowerSGD(rank=1, inner=Ring()),
    PowerSGD(rank=1, alternate=True, inner=Ring()),
    PowerSGD(rank=1, error_feedback=False, inner=Ring()),
)
ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "SynchronousSGD": SynchronousSGD,
    "LayerwiseSGD": partial(LayerwiseSGD, bucket_bytes=100.0),
    "DeAR": partial(DeAR, bucket_bytes=100.0),
    "PipeSGD": PipeSGD,
    "PipeSGD(width=3, lanes=2)": partial(PipeSGD, width=3, lanes=2),
    "AdaptiveDelaySGD(max_delay=2)": partial(AdaptiveDelaySGD, max_delay=2),
    "PartialAllReduce": PartialAllReduce,
    "PartialAllReduce(quorum='all')": partial(PartialAllReduce, quorum="all"),
    "LocalSGD(every=4)": partial(LocalSGD, every=4),
    "FedAvg(every=4)": partial(FedAvg, every=4),
    "SPARTA": SPARTA,
    "StaleSGD(staleness=Constant(1))": partial(StaleSGD, staleness=Constant(1)),
    "DiLoCo(every=4)": partial(DiLoCo, every=4, outer_lr=1.0, outer_momentum=0.0, nesterov=False),
    "StreamingDiLoCo(every=4, fragments=2)": partial(
        StreamingDiLoCo, every=4, fragments=2, outer_lr=1.0, outer_momentum=0.0, nesterov=False
    ),
    "EagerDiLoCo(every=4)": partial(EagerDiLoCo, every=4, outer_lr=1.0, outer_momentum=0.0, nesterov=False),
}


def classifier() -> nn.Module:
    """Softmax regression: 21 parameters, convex."""
    return nn.Linear(tiny.NUM_FEATURES, tiny.NUM_CLASSES).double()


def losses(algorithm: Algorithm) -> tuple[float, float]:
    """On all training data, before and after."""
    problem = tiny.problem(classifier)
    how = Settings(steps=STEPS, batch_size=BATCH, optimizer=partial(torch.optim.SGD, lr=0.1), seed=SEED)
    network = Network(latency_s=0.05, bandwidth_bytes_per_s=1e4)
    compute = Compute(forward_s=0.3, backward_s=0.7, stragglers=(Lognormal(sigma=0.5),))
    simulation = Simulation(algorithm, problem, how, RANKS, network=network, compute=compute)
    model = simulation.workers[0].trained.model
    x, y = tiny.data()

    def loss() -> float:
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model(x), y))

    before = loss()
    simulation.run()
    return before, loss()


def outcome(make: Callable[..., Algorithm], collective: Collective, gained: float) -> dict[str, Any]:
    """Return "trained", with its share of the exact sum's gain; "refused", with the message; or neither, which fails."""
    try:
        algorithm = make(collective=collective)
        algorithm.check(RANKS)
    except ConfigError as error:
        return {"outcome": "refused", "words": str(error)}
    try:
        before, after = losses(algorithm)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a third outcome
        return {"outcome": "failed", "words": f"{type(error).__name__}: {error}"}
    reached = (before - after) / gained
    return {"outcome": "trained" if reached >= 1 - MARGIN else "failed", "reached": round(reached, 4)}


def table() -> list[dict[str, Any]]:
    """A row for each algorithm and collective."""
    rows = []
    for name, make in ALGORITHMS.items():
        before, after = losses(make(collective=Ring()))
        for collective in COLLECTIVES:
            rows.append(
                {"algorithm": name, "collective": repr(collective), **outcome(make, collective, before - after)}
            )
            print(rows[-1], flush=True)
    return rows


def page(record: dict[str, Any]) -> str:
    """The record as a page of Markdown."""
    settings = record["settings"]
    lines = [
        "# Algorithms and compression",
        "",
        "Generated from [combinations.json](combinations.json) by `make combinations`. Do not edit.",
        "",
        (
            f"Softmax regression, {settings['steps']} steps on {settings['ranks']} simulated workers, seed {settings['seed']}, "
            f"commit {record['commit']}, torch {record['versions']['torch']}, {record['date']}."
        ),
        (
            f"A number is the part of the exact sum's gain in loss that was reached. At least {1 - settings['margin']:.3f} is trained. "
            "A combination without a number is refused when it is made; the words are below."
        ),
        "",
    ]
    names = list(dict.fromkeys(row["algorithm"] for row in record["rows"]))
    kinds = list(dict.fromkeys(row["collective"] for row in record["rows"]))
    by_key = {(row["algorithm"], row["collective"]): row for row in record["rows"]}
    lines += [f"| collective | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for kind in kinds:
        cells = [_cell(by_key[name, kind]) for name in names]
        lines.append(f"| `{kind}` | {' | '.join(cells)} |")
    lines += ["", "## Refused", ""]
    words = dict.fromkeys(
        (row["algorithm"], row["collective"], row["words"]) for row in record["rows"] if row["outcome"] == "refused"
    )
    lines += [f"- {name}, `{kind}`: {text}" for name, kind, text in words]
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any]) -> str:
    match row["outcome"]:
        case "trained":
            return f"{row['reached']:.3f}"
        case "refused":
            return "refused"
        case _:
            return f"**fails** ({row['reached']:.3f})" if "reached" in row else "**fails**"


def main() -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=RECORDS
    ).stdout.strip()
    record = {
        "settings": {"seed": SEED, "steps": STEPS, "ranks": RANKS, "batch_size": BATCH, "margin": MARGIN},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "rows": table(),
    }
    (RECORDS / "combinations.json").write_text(json.dumps(record, indent=1) + "\n")
    (RECORDS / "combinations.md").write_text(page(record))


if __name__ == "__main__":
    main()
