"""What a reader of several runs must know: what failed, whose parameters were evaluated, which learning rates do not compare."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.trace.run import Run

SAME_WITHIN = 1.5  # rates per global batch that differ by less are comparable


def updates_per_batch(run: Run) -> float | None:
    """How many updates of the parameters a run makes for each global batch, as its record says; None before the first.

    1 where gradients of all workers are one mean; p where an asynchronous server applies each worker's gradient by itself.
    """
    updates = run.updates()
    if not updates:
        return 1.0 if run.rows() else None
    shard = updates[0]["bucket"]
    num_updates = sum(row["bucket"] == shard for row in updates)
    num_steps = len(run.rows())
    return num_updates / num_steps if num_steps else None


def learning_rate(run: Run) -> float | None:
    """Of the run's first step, as its record says."""
    for shares in run.rows().values():
        for row in shares.values():
            if isinstance(rate := row.get("lr"), int | float):
                return float(rate)
    return None


def rates_note(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """A sentence where runs make different numbers of updates a global batch at learning rates that do not make up for it; else ""."""
    known = []
    for run, label in zip(runs, labels, strict=True):
        updates, rate = updates_per_batch(run), learning_rate(run)
        if updates is not None and rate is not None and rate > 0:
            known.append((updates, rate, label))
    if not known:
        return ""
    base_updates, base_rate, base = min(known, key=lambda one: one[0])
    told = []
    for updates, rate, label in known:
        ratio = updates * rate / (base_updates * base_rate)
        if updates > SAME_WITHIN * base_updates and not 1 / SAME_WITHIN <= ratio <= SAME_WITHIN:
            fair = base_rate * base_updates / updates
            told.append(
                f"{label} makes {updates / base_updates:.3g} updates where {base} makes one: at lr={rate:g} beside lr={base_rate:g}, "
                f"compare it at about lr={fair:.3g}"
            )
    return "Learning rates are not comparable. " + "; ".join(told) + "." if told else ""


def notes_of(runs: Sequence[Run], labels: Sequence[str]) -> list[str]:
    """Footnotes of a table of runs: failures, whose parameters are evaluated, what the columns count, learning rates."""
    found = [f"{label}: {run.trouble}" for run, label in zip(runs, labels, strict=True) if run.trouble]
    found += [f"{label}: {run.waiting}" for run, label in zip(runs, labels, strict=True) if run.waiting]
    found += [f"{label}: {run.evaluated}." for run, label in zip(runs, labels, strict=True) if run.evaluated and run.evaluations()]
    if any(run.rows() for run in runs):
        found.append(
            "training: seconds until the last rank ended its last step, without evaluations; a slow worker that ends alone counts."
        )
    if any(run.updates() for run in runs):
        found.append(
            "staleness: the largest of any gradient, in updates of a server; its mean is smaller, about p - 1 for p equal workers."
        )
    rates = rates_note(runs, labels)
    return [*found, rates] if rates else found
