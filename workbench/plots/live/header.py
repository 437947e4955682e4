"""The header of a live view: what each run does, as HTML that a saved notebook keeps."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from tqdm import tqdm

from workbench.analysis.labels import distinct_labels
from workbench.analysis.table import three_digits
from workbench.trace.progress import progress_of
from workbench.trace.run import Run

MAX_RUNS = 12  # of more, the others are counted
COLOURS = {"running": "#0072B2", "finished": "#009E73", "failed": "#D55E00", "killed": "#D55E00", "lost": "#D55E00"}
OTHER = "#767676"  # starting, paused, stopped


def header(runs: Sequence[Run]) -> str:
    """Return a line of HTML for each run: state, step, time left, accuracy and folder; and the error of a failed one.

    A line has its run's name: JupyterLab brings it up to date if the kernel that wrote it cannot (lab/src/stills.ts).
    """
    shown = zip(distinct_labels(runs), runs[:MAX_RUNS], strict=False)
    lines = [
        (_line(label, run), f' data-run="{escape(run.folder.name)}"' if run.folder is not None else "")
        for label, run in shown
    ]
    if len(runs) > MAX_RUNS:
        lines.append((f"and {len(runs) - MAX_RUNS} more runs", ""))
    return "".join(f'<div style="font-size: 13px; line-height: 1.5"{name}>{line}</div>' for line, name in lines)


def no_longer_followed(runs: Sequence[Run]) -> str:
    """Return a sentence for a view that has ended though runs are lost: they may write again. Empty if none is."""
    lost = [f'wb.open_run("{run.id}")' for run in runs if run.info.get("status") == "lost"]
    if not lost:
        return ""
    call = escape(f"wb.plots.watch({', '.join(lost)})")
    return f"<div>This view has ended. If the run writes again, <code>{call}</code> follows it.</div>"


def _line(label: str, run: Run) -> str:
    status = str(run.info.get("status", "starting"))
    colour = COLOURS.get(status, OTHER)
    facts = [*_progress(run), *_quality(run)]
    if run.departures_summary:
        facts.append(f"<b>{escape(run.departures_summary)}</b>")
    if run.folder is not None:
        facts.append(f"<code>{escape(str(run.folder))}</code>")
    state = f'<span style="color: {colour}">&#9679;</span> <b>{escape(status)}</b> &nbsp;{escape(label)}'
    return " &nbsp;&middot;&nbsp; ".join([state, *facts]) + _error(run, status)


def _progress(run: Run) -> list[str]:
    done = progress_of(run)
    if not done.taken:
        return []
    facts = [f"step {done.taken}" if done.total is None else f"step {done.taken} of {done.total}"]
    if run.steps_per_epoch:
        of = f" of {round(done.total / run.steps_per_epoch, 1):g}" if done.total else ""
        facts.append(f"epoch {done.taken / run.steps_per_epoch:.1f}{of}")
    if done.left_s is not None:
        facts.append(f"{tqdm.format_interval(done.left_s)} left")
    return facts


def _quality(run: Run) -> list[str]:
    evaluations = run.evaluations()
    if evaluations and evaluations[-1].get("accuracy") is not None:
        return [f"accuracy {100 * evaluations[-1]['accuracy']:.1f} %"]
    # The last row of a rank may be an evaluation.
    newest: list[dict[str, Any]] = [
        next((row for row in reversed(rows) if "evaluation" not in row), {}) for rows in run.metrics.values()
    ]
    losses = [row["loss"] for row in newest if row.get("loss") is not None]
    return [f"loss {three_digits(sum(losses) / len(losses))}"] if losses else []


def _error(run: Run, status: str) -> str:
    """The error of a run that failed, with its rank if a rank reported it."""
    failures: dict[int, dict[str, Any]] = run.failures
    if failures:
        rank = min(failures, key=lambda rank: ("PeerFailed" in str(failures[rank].get("error")), rank))
        error = str(failures[rank].get("error", "failed"))
        text = error if error.startswith("rank ") else f"rank {rank}: {error}"
    else:
        text = str(run.info.get("error") or "") if status in ("failed", "killed", "lost") else ""
    first = text.split("\n", 1)[0]
    return f'<div style="color: {COLOURS["failed"]}; margin-left: 1.2em">{escape(first)}</div>' if first else ""
