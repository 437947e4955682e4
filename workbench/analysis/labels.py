"""Labels of runs in legends and tables: the algorithm, and what distinguishes it from the other runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from workbench.trace.run import Run


def distinct_labels(runs: Sequence[Run], *, repetitions: bool = True) -> list[str]:
    """Return a label for each run: its algorithm, and the settings that distinguish it from runs of the same algorithm.

    Args:
        runs: the runs that are shown together.
        repetitions: also give different labels to runs that differ only in seed and name.

    Example:
        >>> runs = [Run(info={"algorithm": {"name": "PipeSGD"}, "num_workers": number}, metrics={}) for number in (4, 64)]
        >>> distinct_labels(runs)
        ['PipeSGD, 4 workers', 'PipeSGD, 64 workers']
    """
    labels = [run.label for run in runs]
    facts = [_facts(run, repetitions) for run in runs]
    for name in dict.fromkeys(name for fact in facts for name in fact):
        groups = defaultdict(list)
        for position, label in enumerate(labels):
            groups[label].append(position)
        for group in groups.values():
            values = [facts[position].get(name, "") for position in group]
            if len(set(values)) > 1:
                for position, value in zip(group, values, strict=True):
                    labels[position] += f", {value}" if value else ""
    rates = [(run.info.get("settings") or {}).get("lr") for run in runs]
    if len({str(rate) for rate in rates if rate is not None}) > 1:
        for position, rate in enumerate(rates):
            if rate is not None and f"lr={rate}" not in labels[position]:
                labels[position] += f", lr={rate}"
    return labels


def _facts(run: Run, repetitions: bool) -> dict[str, str]:
    """Return facts that may distinguish a run from others of its algorithm, the most informative first."""
    info = run.info
    settings = info.get("settings") or {}
    found = {
        name: str(value)
        for name, value in ((info.get("algorithm") or {}).get("settings") or {}).items()
        if isinstance(value, str)
    }
    found["runtime"] = str(info.get("runtime") or "")
    found["workers"] = f"{info['num_workers']} workers" if info.get("num_workers") else ""
    found["problem"] = str((info.get("problem") or {}).get("name") or "")
    names = ("batch_size", "lr", "num_micro", "precision", "optimizer", "schedule", "epochs", "steps")
    found |= {name: f"{name}={settings[name]}" for name in names if settings.get(name) is not None}
    if repetitions:
        found["seed"] = f"seed {settings['seed']}" if "seed" in settings else ""
        found["id"] = run.id
    return found
