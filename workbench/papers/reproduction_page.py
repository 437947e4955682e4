"""The page of `workbench reproduce`: verdicts, executed notebooks, and links to each notebook's page."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from workbench.papers.claims import SIZES, Size
from workbench.papers.reproduction import Outcome
from workbench.papers.verdict_rows import Row, read_papers
from workbench.trace.files.atomic import write_atomic

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem; padding: 0 1rem; color: #1b1f24; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0 2rem; width: 100%; }
th, td { border-bottom: 1px solid #d6dae0; padding: .35rem .7rem .35rem 0; text-align: left; vertical-align: top; }
th { font-weight: 600; }
.claim { min-width: 18rem; } .day { white-space: nowrap; }
.word { white-space: nowrap; font-weight: 600; }
.good { color: #17663a; } .bad { color: #a3241b; } .open { color: #7a5200; } .none { color: #5b6470; }
small { color: #5b6470; display: block; }
pre { white-space: pre-wrap; background: #f5f6f8; padding: .6rem; margin: .3rem 0; }
"""
KINDS = {
    "reproduced": "good",
    "same direction at reduced scale": "good",
    "overshoots": "bad",
    "not reproduced": "bad",
    "points the other way": "bad",
    "underpowered": "open",
    "censored": "open",
}


def write_page(
    outcomes: Sequence[Outcome], page: Path, records: Path, size: Size, site: str, *, busy: str = ""
) -> Path:
    """Write one HTML file, which needs no network. Its links go to the notebooks' pages in the same folder.

    Args:
        outcomes: the results of the notebooks.
        page: the file to write.
        records: folder of their records.
        size, site: of the records.
        busy: a sentence about other load on the machine; empty if there was none.
    """
    failed = [outcome.name for outcome in outcomes if outcome.status == "failed"]
    seconds = sum(outcome.seconds for outcome in outcomes)
    names = {outcome.name for outcome in outcomes}
    keys = list(dict.fromkeys(key for outcome in outcomes for key in outcome.papers))
    rows = (
        [row for paper in read_papers(records, keys) for row in paper.rows if row.claim.notebook in names]
        if keys
        else []
    )
    plural = "s" * (len(outcomes) != 1)
    head = f"{len(outcomes)} notebook{plural} at size {size} on {site}, {seconds / 60:.1f} min" + (
        f"; failed: {', '.join(failed)}" if failed else ""
    )
    committed = (
        {row.claim.name: row.verdict.word for paper in read_papers(keys=keys) for row in paper.rows} if keys else {}
    )
    body = [
        f"<h1>Claims and measurements</h1><p>{_text(head)}</p>{f'<p>{_text(busy)}</p>' if busy else ''}",
        _verdicts(rows, page, size, committed),
        _notebooks(outcomes, page),
    ]
    text = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Claims</title><style>{STYLE}</style></head>'
    )
    write_atomic(page, f"{text}<body>{''.join(body)}</body></html>\n")
    return page


def _verdicts(rows: Sequence[Row], page: Path, size: Size, committed: Mapping[str, str]) -> str:
    """The table of verdicts. An explanation is of the `committed` verdict, so it is not shown with another one."""
    if not rows:
        return ""
    lines = []
    for row in rows:
        claim = row.claim
        word = row.verdict.word
        explained = claim.explanation and word != "reproduced" and word == committed.get(claim.name)
        why = f"<small>Our explanation, not tested: {_text(claim.explanation)}</small>" if explained else ""
        cells = [
            _text(claim.paper),
            f'<div class="claim"><code>{_text(claim.id)}</code></div><small>{_text(claim.statement)} ({_text(claim.source)})</small>',
            f'<span class="word {KINDS.get(word, "none")}">{_text(row.word)}</span>{why}',
            f"{_text(row.ours)}<small>{_text(_expectation(row, size))}</small>",
            _text(row.spread),
            f"{_link(claim.notebook, page)}<small>{_text(row.where)}</small>",
            f'<span class="day">{_text(row.date)}</span>',
        ]
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    names = ("paper", "claim", "verdict", "measured, expected", "spread", "notebook, where", "date")
    return f"<h2>Verdicts</h2><table><tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>{''.join(lines)}</table>"


def _expectation(row: Row, size: Size) -> str:
    """The expectation at the record's size; without a record, at the smallest size from this one on that has one."""
    if row.record is not None:
        return row.expectation
    for one in SIZES[SIZES.index(size) :]:
        expected = row.claim.expectation_at(one)
        if expected is not None:
            return f"expected {expected} at size {one}{f'; paper: {row.claim.theirs}' if row.claim.theirs else ''}"
    return row.expectation


def _notebooks(outcomes: Sequence[Outcome], page: Path) -> str:
    lines = []
    for outcome in outcomes:
        kind = {"finished": "good", "failed": "bad", "recorded": "none"}[outcome.status]
        notes = "".join(f"<small>{_text(note)}</small>" for note in outcome.notes)
        error = f"<pre>{_text(outcome.error)}</pre>" if outcome.error else ""
        cells = [
            _link(outcome.name, page),
            f'<span class="word {kind}">{outcome.status}</span>{error}',
            f"{outcome.seconds:.0f} s",
            f"{_text(', '.join(outcome.papers))}{notes}",
        ]
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    names = ("notebook", "status", "took", "about")
    return f"<h2>Notebooks</h2><table><tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>{''.join(lines)}</table>"


def _link(name: str, page: Path) -> str:
    """A link to a notebook's page, if it exists."""
    there = page.with_name(f"{name}.html").is_file()
    return f'<a href="{html.escape(name)}.html">{_text(name)}</a>' if there else _text(name)


def _text(text: str) -> str:
    return html.escape(text)
