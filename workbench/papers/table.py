"""Generates parts of `papers/README.md` and of the papers' cards, from claims and records."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from workbench import resources
from workbench.errors import ConfigError
from workbench.papers.claims import Experiment, Question
from workbench.papers.rows import Paper, Row, read_papers
from workbench.trace.files.atomic import write_atomic

BEGIN, END = "<!-- generated: workbench papers table -->", "<!-- end of the generated part -->"
GENERATED_PART = re.compile(re.escape(BEGIN) + r"\n.*?" + re.escape(END), re.DOTALL)
HEAD = ("paper", "claim", "verdict", "measured (expected; paper's)", "spread", "where run", "date")
HEADLINE_HEAD = ("paper", "claim", "verdict", "measured", "expected; paper's", "metric", "where run")


def pages() -> dict[Path, str]:
    """Return path -> up-to-date text, for every page with a generated part.

    Raises:
        ConfigError: a file of claims or a record is not valid, or a page has no place for its generated part.
    """
    root = resources.shared("papers")
    papers = read_papers()
    found = {root / "README.md": _in_place(root / "README.md", verdicts(papers))}
    for paper in papers:
        path = root / paper.key / "card.md"
        found[path] = _in_place(path, card_part(paper))
    return found


def stale_pages() -> list[Path]:
    """Return the pages that are not up to date with claims and records."""
    return [path for path, text in pages().items() if path.read_text(encoding="utf-8") != text]


def update_pages() -> list[Path]:
    """Write the pages that are not up to date. Return their paths."""
    texts = pages()
    stale = stale_pages()
    for path in stale:
        write_atomic(path, texts[path])
    return stale


def _in_place(path: Path, generated: str) -> str:
    text = path.read_text(encoding="utf-8")
    if len(GENERATED_PART.findall(text)) != 1:
        raise ConfigError(f"{path} has no place for its generated part: add the lines {BEGIN!r} and {END!r}")
    return GENERATED_PART.sub(lambda _: f"{BEGIN}\n{generated.strip()}\n{END}", text)


def verdicts(papers: Sequence[Paper]) -> str:
    """Return the headlines, and a table of claims for each paper.

    With records of several sites, a last table shows each site's verdicts.
    """
    rows = [row for paper in papers for row in paper.rows]
    if not rows:
        return "Nothing is claimed yet."
    lines = [*_headlines(rows), "## All claims", "", _counted(rows)]
    for paper in papers:
        lines += ["", f"### {paper.key}", "", _counted(paper.rows), "", _line(HEAD), _line(["---"] * len(HEAD))]
        lines += [_line(_cells(row)) for row in paper.rows]
    return "\n".join([*lines, *_by_site(rows)])


def _counted(rows: Sequence[Row]) -> str:
    """The number of claims, and of each verdict."""
    words = dict.fromkeys(row.verdict.word for row in rows)
    counted = {word: sum(row.verdict.word == word for row in rows) for word in words}
    return f"{len(rows)} claims: " + ", ".join(f"{number} {word}" for word, number in counted.items()) + "."


def _headlines(rows: Sequence[Row]) -> list[str]:
    """The table of the claims with `headline: true`; empty without such claims."""
    chosen = [row for row in rows if row.claim.headline]
    if not chosen:
        return []
    lines = ["## Headlines", "", _line(HEADLINE_HEAD), _line(["---"] * len(HEADLINE_HEAD))]
    for row in chosen:
        claim = row.claim
        cells = [
            f"[{claim.paper}]({claim.paper}/card.md)",
            claim.statement,
            row.verdict.word,
            f"{row.ours} {row.interval}",
            row.expectation.removeprefix("expected "),
            claim.metric,
            f"[{row.kind}](../notebooks/{claim.notebook}.ipynb)",
        ]
        lines.append(_line(cells))
    return [*lines, ""]


def _cells(row: Row) -> list[str]:
    claim = row.claim
    measured = f"{row.ours} ({row.expectation})" if row.record else f"({row.expectation})"
    return [
        f"[{claim.paper}]({claim.paper}/card.md)",
        f"`{claim.id}`: {claim.statement} ({claim.source})",
        row.verdict.word,
        measured,
        row.spread,
        f"[{row.where}]({_link(row, claim.paper)})" if row.record else row.where,
        row.date,
    ]


def _link(row: Row, folder: str) -> str:
    assert row.record is not None
    return f"{folder}/records/{row.record.path.name}" if folder else f"records/{row.record.path.name}"


def _by_site(rows: Sequence[Row]) -> list[str]:
    sites = sorted({record.site for row in rows for record in row.all})
    if len(sites) < 2:
        return []
    lines = ["", _line(["claim", *sites]), _line(["---"] * (1 + len(sites)))]
    for row in rows:
        by_site = {
            record.site: f"{verdict.word} ({record.size})"
            for record in row.all
            if (verdict := record.verdict(row.claim))
        }
        if by_site:
            lines.append(_line([f"{row.claim.paper} `{row.claim.id}`", *(by_site.get(site, "") for site in sites)]))
    return lines


def card_part(paper: Paper) -> str:
    """Return the generated part of a card: claims, experiments, questions and figures."""
    up = os.path.relpath(resources.shared("notebooks"), resources.shared("papers") / paper.key)

    def link(name: str) -> str:
        return f"[{name}]({up}/{name}.ipynb)"

    lines = [
        "## Claims",
        "",
        "| claim | verdict | ours | expected | spread | notebook | where run |",
        _line(["---"] * 7),
    ]
    for row in paper.rows:
        claim = row.claim
        where = f"[{row.where}]({_link(row, '')})" if row.record else row.where
        about = f"`{claim.id}`: {claim.statement} ({claim.source}; {claim.provenance})"
        lines.append(
            _line([about, row.verdict.word, row.ours, row.expectation, row.spread, link(claim.notebook), where])
        )
    explained = [row for row in paper.rows if row.claim.explanation]
    if explained:
        lines += ["", "Our explanations, which nothing here tests:", ""]
        lines += [f"- `{row.claim.id}` ({row.verdict.word}): {_plain(row.claim.explanation)}" for row in explained]
    lines += _experiments(paper.claims.experiments, link)
    lines += _questions(paper.claims.questions, link)
    lines += _figures(paper.key)
    return "\n".join(lines)


def _experiments(experiments: Sequence[Experiment], link: Callable[[str], str]) -> list[str]:
    rows = [
        _line([item.id, item.artefact, item.about, link(item.notebook)])
        for item in sorted(experiments, key=lambda item: item.id)
    ]
    return ["", "## Experiments", "", "| | of the paper | about | here |", _line(["---"] * 4), *rows] if rows else []


def _questions(questions: Sequence[Question], link: Callable[[str], str]) -> list[str]:
    rows = [_line([item.question, item.asked, f"{link(item.notebook)}, cell `{item.cell}`"]) for item in questions]
    return (
        ["", "## What reviewers asked", "", "| question | asked by | answered in |", _line(["---"] * 3), *rows]
        if rows
        else []
    )


def _figures(key: str) -> list[str]:
    folder = resources.shared("papers") / key / "figures"
    found = sorted(path for path in folder.glob("*") if path.suffix in (".svg", ".png"))
    lines = [line for path in found for line in (f"![{path.stem}](figures/{path.name})", "")]
    return ["", "## Figures", "", *lines] if lines else []


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _plain(text: str) -> str:
    """The text on one line, with escaped column signs."""
    return " ".join(text.split()).replace("|", r"\|")
