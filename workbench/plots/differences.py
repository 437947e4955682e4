"""The settings in which runs differ: for the columns of a comparison, and for the question which runs are repetitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.trace.info import MEASURED
from workbench.trace.run import Run

SIMULATED = "simulated: "  # begins the notes of a simulated run; the first one names the network


def settings_of(run: Run) -> dict[str, Any]:
    """Return all that determines a training, by name: algorithm, its settings, problem, place, and settings of the run.

    A setting of the algorithm with the name of a setting of the run is "set.NAME", as in `workbench runs`.

    >>> info = {"algorithm": {"name": "PipeSGD", "settings": {"width": 2}}, "settings": {"lr": 0.1}, "num_workers": 4}
    >>> {name: value for name, value in settings_of(Run(info, {})).items() if value is not None}
    {'algorithm': 'PipeSGD', 'width': 2, 'workers': 4, 'lr': 0.1}
    """
    info = run.info
    algorithm, problem, general = (info.get(name) or {} for name in ("algorithm", "problem", "settings"))
    own = {
        name if name not in general else f"set.{name}": value
        for name, value in (algorithm.get("settings") or {}).items()
    }
    notes = (str(note) for note in info.get("notes") or ())
    place = {
        "problem": problem.get("name"),
        "workers": info.get("num_workers"),
        "runtime": info.get("runtime"),
        "network": next((note.removeprefix(SIMULATED) for note in notes if note.startswith(SIMULATED)), None),
    }
    simulated = dict(info.get("simulated") or {})
    if str(simulated.get("compute")).startswith(MEASURED):
        simulated["compute"] = MEASURED
    optimizer = {"optimizer": general.get("optimizer") or problem.get("optimizer")}
    return {"algorithm": algorithm.get("name"), **own, **place, **general, **simulated, **optimizer}


def differences(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return for each run the settings that are not the same in all runs; None for a setting that a run does not have.

    A setting that only some algorithms have counts if it is not at its default.

    >>> runs = [Run({"settings": {"lr": rate, "seed": 0}}, {}) for rate in (0.1, 0.2)]
    >>> differences(runs)
    [{'lr': 0.1}, {'lr': 0.2}]
    """
    every = [settings_of(run) for run in runs]
    defaults = [set((run.info.get("algorithm") or {}).get("defaults") or ()) for run in runs]

    def differs(name: str) -> bool:
        have = [
            (one[name], name in quiet) for one, quiet in zip(every, defaults, strict=True) if one.get(name) is not None
        ]
        chosen = any(not quiet for _, quiet in have)
        return len({repr(value) for value, _ in have}) > 1 or (len(have) < len(every) and chosen)

    differing = [name for name in dict.fromkeys(name for one in every for name in one) if differs(name)]
    return [{name: one.get(name) for name in differing} for one in every]
