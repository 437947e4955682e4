"""Runs and spans that are made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.trace.run import Run
from workbench.trace.spans import Spans

# kind, lane, start_s, end_s, step, bucket, bytes, peer
Row = tuple[str, str, float, float, int, int, int, int]


def made_run(
    ends: Sequence[float],
    losses: Sequence[float] | None = None,
    evaluations: Mapping[int, tuple[float, float]] | None = None,
) -> Run:
    """Return a run of two ranks.

    Args:
        ends: seconds at which each step ends on the second rank; the first ends every second step half a second before.
        losses: training losses of both ranks; 1 by default.
        evaluations: step -> test loss and accuracy after it, by the second rank.
    """
    chosen = losses or [1.0] * len(ends)
    metrics: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for step, (end, loss) in enumerate(zip(ends, chosen, strict=True)):
        row = {"step": step, "loss": loss, "samples": 1, "num_samples": 1, "bytes_sent": 0}
        metrics[0].append({**row, "seconds": end - 0.5 * (step % 2)})
        metrics[1].append({**row, "seconds": end})
        if evaluations and step in evaluations:
            test_loss, accuracy = evaluations[step]
            judged = {"loss_sum": 1000 * test_loss, "count": 1000, "correct": 1000 * accuracy, "judged": 1000}
            metrics[1].append({**row, "seconds": end, "evaluation": {**judged, "shares": 1}})
    return Run(info={"num_workers": 2, "status": "finished"}, metrics=metrics)


def joined(*rows_of_rank: list[Row]) -> Spans:
    """Return the spans of ranks 0, 1, ... as one table."""
    return Spans.concatenate(Spans.from_rows(rank, rows) for rank, rows in enumerate(rows_of_rank))
