"""Notes on a comparison of runs: failures, the evaluated parameters, learning rates that are not comparable."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.trace.run import Run

SAME_WITHIN = 1.5  # learning rates per global batch within this factor are comparable


def updates_per_batch(run: Run) -> float | None:
    """Return the number of parameter updates for each global batch, from the run's record; None before the first.

    It is 1 if the gradients of all workers are averaged, and p if an asynchronous server applies each worker's gradient
    separately.
    """
    updates = run.updates()
    if not updates:
        return 1.0 if run.rows() else None
    shard = updates[0]["bucket"]
    num_updates = sum(row["bucket"] == shard for row in updates)
    num_steps = len(run.rows())
    return num_updates / num_steps if num_steps else None


def learning_rate(run: Run) -> float | None:
    """Return the learning rate of the run's first step, from its record."""
    for shares in run.rows().values():
        for row in shares.values():
            if isinstance(rate := row.get("lr"), int | float):
                return float(rate)
    return None


def gradient_weight(run: Run) -> float:
    """Return the mean factor of a gradient in an update: below 1 if the algorithm divides each by its staleness."""
    settings = (run.info.get("algorithm") or {}).get("settings") or {}
    if not settings.get("divide"):
        return 1.0
    weights = [1 / max(1, stale) for row in run.updates() for stale in row["staleness"]]
    return sum(weights) / len(weights) if weights else 1.0


def rates_note(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """Return a sentence if runs differ in updates per global batch and their learning rates do not compensate; else ""."""
    known = []
    for run, label in zip(runs, labels, strict=True):
        updates, rate = updates_per_batch(run), learning_rate(run)
        if updates is not None and rate is not None and rate > 0:
            known.append((updates * gradient_weight(run), updates, rate, label))
    if not known:
        return ""
    base_steps, base_updates, base_rate, base = min(known, key=lambda one: one[0])
    sentences = []
    for steps, updates, rate, label in known:
        ratio = steps * rate / (base_steps * base_rate)
        if steps > SAME_WITHIN * base_steps and not 1 / SAME_WITHIN <= ratio <= SAME_WITHIN:
            fair = base_rate * base_steps / steps
            sentences.append(
                f"{label} makes {updates / base_updates:.3g} updates where {base} makes one: at lr={rate:g} and "
                f"lr={base_rate:g}, "
                f"compare it at about lr={fair:.3g}"
            )
    return "Learning rates are not comparable. " + "; ".join(sentences) + "." if sentences else ""


def notes_of(runs: Sequence[Run], labels: Sequence[str]) -> list[str]:
    """Return the footnotes of a table of runs: failures, lost ranks, evaluated parameters, columns, learning rates."""
    found = [f"{label}: {run.failure_summary}" for run, label in zip(runs, labels, strict=True) if run.failure_summary]
    found += [f"{label}: {line}" for run, label in zip(runs, labels, strict=True) if (line := run.departures_summary)]
    found += [f"{label}: {run.waiting}" for run, label in zip(runs, labels, strict=True) if run.waiting]
    found += [
        f"{label}: {run.evaluated}."
        for run, label in zip(runs, labels, strict=True)
        if run.evaluated and run.evaluations()
    ]
    if any(run.rows() for run in runs):
        found.append(
            "training: seconds until the last rank ended its last step, without evaluations; a slow worker that ends "
            "alone counts."
        )
    if any(run.updates() for run in runs):
        found.append(
            "staleness: the largest of any gradient, in updates of a server; its mean is smaller, about p - 1 for p "
            "equal workers."
        )
    rates = rates_note(runs, labels)
    return [*found, rates] if rates else found
