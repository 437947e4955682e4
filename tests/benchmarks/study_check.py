"""What `wb.study` predicts, against real ranks on an emulated network.

    python -m tests.benchmarks.study_check            # 12 minutes of a quiet machine, root; writes records/study.json
    python -m tests.benchmarks.study_check --others   # 9 minutes; writes records/study-other-models.json

Intervals of predictions are from the errors of the second record (`workbench.what_if.interval`): two models of
`tests/benchmarks/predictions.py`. The first record tests them with the two models of
notebooks/03-how-much-would-it-help.ipynb, which nothing was fitted to. Each model is asked about once, with costs that
are measured in this process. Then all algorithms of the answer train on 2 hosts of an emulated network, whose ranks
sleep for the seconds of compute; and on 2 and 4 hosts, whose ranks compute and share this machine's cores.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import torch

import workbench as wb
from workbench.resources import notebook
from workbench.what_if.candidates import default_candidates, name_of

RECORDS = Path(__file__).parents[2] / "records"
RATE, MINUTES = "1gbit", 2.0
CHECKS = ((2, True), (2, False), (4, False))  # hosts, slept
STEPS = 12
QUESTIONS: dict[str, dict[str, Any]] = {
    "vit": {"workers": [4, 16], "target": ("loss", 1.0)},
    "gpt": {"workers": [4, 16], "target": ("loss", 3.0)},
}


def other_models() -> dict[str, tuple[wb.Problem, int]]:
    """Return problems and samples of a worker in a step."""
    return {
        "mlp-8mb": (wb.problems.wide_mlp(megabytes=8.0), 128),
        "transformer-13mb": (wb.problems.text_transformer(width=256, layers=4), 8),
    }


def models() -> dict[str, wb.Problem]:
    """Return the problems that the notebook's cells define."""
    cells = nbformat.read(notebook("03-how-much-would-it-help"), as_version=4).cells  # type: ignore[no-untyped-call]
    names: dict[str, Any] = {"__name__": "__main__"}  # so that ranks receive the classes themselves
    wanted = {"parameters", "imports", *QUESTIONS}
    for cell in cells:
        if wanted.intersection(cell.metadata.get("tags", [])):
            exec(compile(cell.source, "notebook", "exec"), names)
    __import__("__main__").__dict__.update(
        {name: names[name] for name in ("ViT", "GPT", "LENGTH", "next_byte", "nn", "torch")}
    )
    return {name: names[name] for name in QUESTIONS}


def check(name: str, study: wb.Study) -> list[dict[str, Any]]:
    """Train each of the default algorithms on the ranks, and return the rows of the checks."""
    rows = []
    for hosts, slept in CHECKS:
        algorithms = default_candidates(hosts, study.calibration.shapes.num_bytes)
        with wb.Cluster(hosts, launcher=f"emulated:{RATE}", quiet=True) as cluster:
            found = study.check(cluster, algorithms=algorithms, slept=slept, steps=STEPS, rounds=1, quiet=True)
        print(found, flush=True)
        servers = {name_of(one): one.requires.servers for one in algorithms}
        rows += [
            {"model": name, "hosts": hosts, "slept": slept, "servers": servers[row["algorithm"]], **row}
            for row in found.rows
        ]
    return rows


def conditions() -> dict[str, Any]:
    return {
        "machine": f"{os.cpu_count()} cores, {platform.system()}",
        "torch": torch.__version__,
        "runtime": "Open MPI",
        "rate": RATE,
        "load_before": os.getloadavg()[0],
    }


def write(name: str, how: dict[str, Any], rows: list[dict[str, Any]], **rest: Any) -> None:
    """Write a record, with how many measurements are inside their intervals, and the largest error."""
    judged = [row for row in rows if not row["fitted"]]
    errors = sorted(abs(row["error"]) for row in judged)
    how |= {
        "inside": sum(row["inside"] for row in judged),
        "rows": len(judged),
        "worst": errors[-1],
        "median": errors[len(errors) // 2],
    }
    (RECORDS / name).write_text(json.dumps({"how": how, **rest, "rows": rows}, indent=1) + "\n")
    print(f"{how['inside']} of {how['rows']} inside, median error {how['median']:.1%}, worst {how['worst']:.1%}")


def others() -> None:
    """Ask about the models of `tests/benchmarks/predictions.py`, check, and write the record."""
    how, rows = conditions(), []
    for name, (problem, batch_size) in other_models().items():
        study = wb.study(problem, networks=[RATE], workers=[2], minutes=0.5, batch_size=batch_size, quiet=True)
        rows += check(name, study)
    write("study-other-models.json", how, rows)


def main() -> None:
    """Ask, check, and write the record."""
    how, studies, rows = conditions(), [], []
    for name, problem in models().items():
        asked = QUESTIONS[name]
        begin = time.monotonic()
        study = wb.study(problem, networks=[RATE], minutes=MINUTES, **asked)
        taken_s = time.monotonic() - begin
        print(study, flush=True)
        studies.append(
            {
                "model": name,
                "parameters": problem.num_parameters(),
                "asked": {**asked, "network": RATE, "minutes": MINUTES},
                "seconds": taken_s,
                "answer": study.answer,
                "cells": [cell.as_record() for cell in study.cells],
                "notes": list(study.calibration.notes),
            }
        )
        rows += check(name, study)
    write("study.json", how, rows, studies=studies)


if __name__ == "__main__":
    others() if "--others" in sys.argv[1:] else main()
