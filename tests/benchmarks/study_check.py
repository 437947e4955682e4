"""What `wb.study` predicts for the two models of its notebook, against real ranks on an emulated network.

    python -m tests.benchmarks.study_check    # 10 minutes of a quiet machine, root; writes records/study.json

The models are those of notebooks/03-how-much-would-it-help.ipynb; nothing in the cost model was fitted to them. Each is
asked about once, with costs that are measured in this process. Then the best three algorithms and plain synchronous SGD
train on 2 and 4 hosts of an emulated network, whose ranks share this machine's cores.
"""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import nbformat

import workbench as wb
from workbench.resources import notebook

RECORD = Path(__file__).parents[2] / "records" / "study.json"
RATE, HOSTS, MINUTES = "1gbit", (2, 4), 2.0
QUESTIONS: dict[str, dict[str, Any]] = {
    "vit": {"workers": [4, 16], "target": ("loss", 1.0)},
    "gpt": {"workers": [4, 16], "target": ("loss", 3.0)},
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


def main() -> None:
    """Ask, check, and write the record."""
    studies, rows = [], []
    for name, problem in models().items():
        asked = QUESTIONS[name]
        load = os.getloadavg()[0]
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
                "load_before": load,
                "answer": study.answer,
                "cells": [cell.as_record() for cell in study.cells],
                "notes": list(study.calibration.notes),
            }
        )
        for hosts in HOSTS:
            with wb.Cluster(hosts, launcher=f"emulated:{RATE}", quiet=True) as cluster:
                found = study.check(cluster)
            print(found, flush=True)
            rows += [{"model": name, "hosts": hosts, **row} for row in found.rows]
    judged = [row for row in rows if not row["fitted"]]
    inside = sum(row["inside"] for row in judged)
    worst = max(abs(row["error"]) for row in judged)
    how = {
        "machine": f"{os.cpu_count()} cores, {platform.system()}",
        "torch": wb.problems.base.torch.__version__,
        "rate": RATE,
        "inside": inside,
        "rows": len(judged),
        "worst": worst,
        "median": sorted(abs(row["error"]) for row in judged)[len(judged) // 2],
    }
    RECORD.write_text(json.dumps({"how": how, "studies": studies, "rows": rows}, indent=1) + "\n")
    print(f"{inside} of {len(judged)} inside, worst error {worst:.1%}")


if __name__ == "__main__":
    main()
