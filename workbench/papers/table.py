"""Generates parts of `README.md`, `papers/README.md`, the papers' cards and notebooks, from claims, records and amendments."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import get_args

from workbench import resources
from workbench.errors import ConfigError
from workbench.experiments.notebook_catalogue import question_of
from workbench.papers.amendments import Amendment, read_amendments, write_amendments
from workbench.papers.claims import Claim, Experiment, Origin, Question
from workbench.papers.plan import keys_with_claims
from workbench.papers.records import Record
from workbench.papers.verdict_rows import Paper, Row, read_papers, stale_reason
from workbench.papers.verdicts import MEASURED, Verdict
from workbench.trace.files.atomic import write_atomic

BEGIN, END = "<!-- generated: workbench papers table -->", "<!-- end of the generated part -->"
GENERATED_PART = re.compile(re.escape(BEGIN) + r"\n.*?" + re.escape(END), re.DOTALL)
ANSWER, WIDTH = "**Answer**", 100  # of a notebook's first cell
STALE = re.compile(r", stale \((no digest|other parameters|other code)\)|^Stale: .*\n\n", re.MULTILINE)
HEADLINE_HEAD = ("the paper says", "its number", "measured here", "where", "figure")
FRONT_HEAD = ("the paper says", "its number", "measured here", "verdict")
HEAD = ("paper", "claim", "verdict", "measured (expected; paper's)", "spread", "where run", "date")
CARD_HEAD = ("claim", "verdict", "ours", "expected", "spread", "where run")
VERDICTS = (*MEASURED, "needs hardware", "not run")
ORIGINS: Mapping[Origin, str] = {
    "statement of the paper": "Statements of the papers",
    "reviewer's question": "Reviewers' questions",
    "own check": "Own checks",
}


def pages() -> dict[Path, str]:
    """Return path -> up-to-date text, for every page with a generated part.

    Raises:
        ConfigError: a file of claims or a record is not valid, or a page has no place for its generated part.
    """
    root = resources.shared("papers")
    papers = read_papers()
    verdicts = {row.claim.name: row.verdict for paper in papers for row in paper.rows}
    found = {root / "README.md": _in_place(root / "README.md", overview(papers))}
    front = root.parent / "README.md"  # of a checkout
    if front.is_file() and BEGIN in front.read_text(encoding="utf-8"):
        found[front] = _in_place(front, front_page(papers))
    for paper in papers:
        path = root / paper.key / "card.md"
        found[path] = _in_place(path, card_part(paper, verdicts))
    return found


def stale_pages() -> list[Path]:
    """Return the pages and notebooks that are not up to date with claims, records and amendments.

    The mark of a stale record is not compared: it depends on the code, and every change of code would change pages.
    """
    texts = {**pages(), **answered_notebooks()}
    return [
        path for path, text in texts.items() if STALE.sub("", path.read_text(encoding="utf-8")) != STALE.sub("", text)
    ]


def update_pages() -> list[Path]:
    """Write the pages that differ. Return their paths."""
    return _write(pages())


def update_notebooks() -> list[Path]:
    """Write the notebooks whose answer differs from that of their record. Return their paths.

    This is no part of `workbench reproduce --update`: between two sessions a notebook must stay as it was committed.
    """
    return _write(answered_notebooks())


def _write(texts: Mapping[Path, str]) -> list[Path]:
    changed = {path: text for path, text in texts.items() if path.read_text(encoding="utf-8") != text}
    for path, text in changed.items():
        write_atomic(path, text)
    return [*changed]


def update_amendments() -> list[Path]:
    """Write the amendment logs that differ from git's history. Return their paths."""
    root = resources.shared("papers")
    written = [write_amendments(root, key) for key in keys_with_claims()]
    return [path for path in written if path is not None]


def _in_place(path: Path, generated: str) -> str:
    text = path.read_text(encoding="utf-8")
    if len(GENERATED_PART.findall(text)) != 1:
        raise ConfigError(f"{path} has no place for its generated part: add the lines {BEGIN!r} and {END!r}")
    return GENERATED_PART.sub(lambda _: f"{BEGIN}\n{generated.strip()}\n{END}", text)


# -- papers/README.md --------------------------------------------------------------------------------------------------


def overview(papers: Sequence[Paper]) -> str:
    """Return the headlines, the counts, and a table for each origin of claims.

    With records of several sites, a last table shows each site's verdicts.
    """
    rows = [row for paper in papers for row in paper.rows]
    if not rows:
        return "Nothing is claimed yet."
    lines = [*_headlines(rows), "## Counts", "", *_stale(rows), *_counts(rows)]
    for origin, title in ORIGINS.items():
        own = [row for row in rows if row.claim.origin == origin]
        if own:
            table = [_line(HEAD), _line(["---"] * len(HEAD)), *(_line(_cells(row)) for row in own)]
            if origin == "own check":
                table = ["<details><summary>Show them</summary>", "", *table, "", "</details>"]
            lines += ["", f"## {title}", "", *table]
    return "\n".join([*lines, *_by_site(rows)])


def _headlines(rows: Sequence[Row]) -> list[str]:
    """The table of the claims with `headline: true`; empty without such claims."""
    chosen = [row for row in rows if row.claim.headline]
    if not chosen:
        return []
    lines = ["## Headlines", "", _line(HEADLINE_HEAD), _line(["---"] * len(HEADLINE_HEAD))]
    for row in chosen:
        claim = row.claim
        if row.record:
            measured = f"{_measured(row)}: **{row.word}**"
            where = f"[{row.clock}]({_record_link(row, claim.paper)}), {row.sample}"
        else:
            measured, where = "not measured yet", ""
        about = f"[{claim.paper}]({claim.paper}/card.md): {claim.statement}"
        lines.append(_line([about, claim.theirs or "none quoted", measured, where, _figure_link(row)]))
    return [*lines, ""]


def front_page(papers: Sequence[Paper]) -> str:
    """Return the headlines for the README of the repository, and how many claims have which verdict.

    A headline is what a paper says, its number, and the one measured here.
    """
    rows = [row for paper in papers for row in paper.rows]
    lines = [_line(FRONT_HEAD), _line(["---"] * len(FRONT_HEAD))]
    for row in (row for row in rows if row.claim.headline):
        claim = row.claim
        measured = _measured(row) if row.record else "not measured yet"
        verdict = f"{row.word}; {row.clock.partition(',')[0]}" if row.record else ""  # the page has the rest
        about = f"{claim.statement} ([{claim.paper}](papers/{claim.paper}/card.md))"
        lines.append(_line([about, claim.theirs or "none quoted", measured, verdict]))
    stated = [row.verdict.word for row in rows if row.claim.origin == "statement of the paper"]
    if stated:
        counts = ", ".join(f"{stated.count(word)} {word}" for word in VERDICTS if word in stated)
        more = f"[All {len(rows)} claims](papers/README.md#counts) include reviewers' questions and our own checks."
        lines += ["", f"Of {len(stated)} statements of the papers: {counts}.", more]
    return "\n".join(lines)


def _measured(row: Row) -> str:
    """The value of a claim with its interval and its unit."""
    return " ".join(filter(None, (row.ours, row.interval, row.claim.unit)))


def _figure_link(row: Row) -> str:
    """A link to the figure of a claim, else to its notebook."""
    claim = row.claim
    for path in _pictures(claim.paper, claim.notebook):
        if claim.figure and path.stem == f"{claim.notebook}-{claim.figure}":
            return f"[{claim.figure}]({claim.paper}/figures/{path.name})"
    return f"[{claim.notebook}](../notebooks/{claim.notebook}.ipynb)"


def _stale(rows: Sequence[Row]) -> list[str]:
    """A sentence about stale records; empty if there are none."""
    reasons = [stale_reason(row.record) for row in rows if row.record]
    stale = [reason for reason in reasons if reason]
    if not stale:
        return []
    by_reason = ", ".join(f"{stale.count(reason)} {reason}" for reason in dict.fromkeys(stale))
    return [f"Stale: {len(stale)} of {len(reasons)} measured claims ({by_reason}).", ""]


def _counts(rows: Sequence[Row]) -> list[str]:
    """The number of claims of each origin, and of each verdict."""
    words = [word for word in VERDICTS if any(row.verdict.word == word for row in rows)]
    lines = [_line(["", "claims", *words]), _line(["---"] * (2 + len(words)))]
    for origin in get_args(Origin):
        own: list[str] = [row.verdict.word for row in rows if row.claim.origin == origin]
        lines.append(_line([ORIGINS[origin].lower(), str(len(own)), *(str(own.count(word)) for word in words)]))
    return lines


def _cells(row: Row) -> list[str]:
    claim = row.claim
    measured = f"{row.ours} ({row.expectation})" if row.record else f"({row.expectation})"
    return [
        f"[{claim.paper}]({claim.paper}/card.md)",
        f"{claim.statement} ({claim.source}) `{claim.id}`",
        row.word,
        measured,
        row.spread,
        f"[{row.where}]({_record_link(row, claim.paper)})" if row.record else row.where,
        row.date,
    ]


def _record_link(row: Row, folder: str) -> str:
    assert row.record is not None
    return f"{folder}/records/{row.record.path.name}" if folder else f"records/{row.record.path.name}"


def _by_site(rows: Sequence[Row]) -> list[str]:
    sites = sorted({record.site for row in rows for record in row.all})
    if len(sites) < 2:
        return []
    lines = ["", "## Sites", "", _line(["claim", *sites]), _line(["---"] * (1 + len(sites)))]
    for row in rows:
        by_site = {
            record.site: f"{verdict.word} ({record.size})"
            for record in row.all
            if (verdict := record.verdict(row.claim))
        }
        if by_site:
            lines.append(_line([f"{row.claim.paper} `{row.claim.id}`", *(by_site.get(site, "") for site in sites)]))
    return lines


# -- cards -------------------------------------------------------------------------------------------------------------


def card_part(paper: Paper, verdicts: Mapping[str, Verdict]) -> str:
    """Return the generated part of a card.

    For each notebook: its question, its answer, its figures, its claims with their verdicts, and the questions that it
    answers. At the end the amendments.

    Args:
        paper: the paper.
        verdicts: name of a claim -> verdict, of all papers.
    """
    claims = paper.claims
    items: list[Claim | Experiment | Question] = [*claims.claims, *claims.experiments, *claims.questions]
    lines = ["## Results", ""]
    for name in sorted({item.notebook for item in items}):
        lines += _notebook(paper, name, verdicts)
    lines += _amendments(read_amendments(resources.shared("papers"), paper.key))
    return "\n".join(lines)


def _notebook(paper: Paper, name: str, verdicts: Mapping[str, Verdict]) -> list[str]:
    """The part of a card about one notebook."""
    up = os.path.relpath(resources.shared("notebooks"), resources.shared("papers") / paper.key)
    notebook = f"{up}/{name}.ipynb"
    lines = [f"### {question_of(resources.notebook(name))}", "", f"Notebook [{name}]({notebook})."]
    experiments = [item for item in paper.claims.experiments if item.notebook == name]
    lines += [f"- {item.id}, {item.artefact}: {_plain(item.about)}" for item in experiments]
    lines += ["", *_answer(paper, name, verdicts)]
    lines += _figures(paper, name)
    rows = [row for row in paper.rows if row.claim.notebook == name]
    if rows:
        lines += [_line(CARD_HEAD), _line(["---"] * len(CARD_HEAD))]
        for row in rows:
            claim = row.claim
            where = f"[{row.where}]({_record_link(row, '')})" if row.record else row.where
            about = f"{claim.statement} ({claim.cited}) `{claim.id}`"
            expected = row.expectation.removeprefix("expected ")
            lines.append(_line([about, row.word, row.ours, expected, row.spread, where]))
        lines.append("")
    explained = [row for row in rows if row.claim.explanation]
    if explained:
        lines += ["Our explanations:", ""]
        lines += [f"- `{row.claim.id}` ({row.verdict.word}): {_plain(row.claim.explanation)}" for row in explained]
        lines.append("")
    asked = [item for item in paper.claims.questions if item.notebook == name]
    if asked:
        lines += ["What reviewers asked:", ""]
        lines += [f"- {_plain(item.question)} ({item.asked}; cell `{item.cell}`)" for item in asked]
        lines.append("")
    return lines


def _answer(paper: Paper, name: str, verdicts: Mapping[str, Verdict]) -> list[str]:
    """The answer in the notebook's deciding record."""
    records = [record for record in paper.records if record.facts["notebook"] == name]
    if not records:
        return [f"{ANSWER}: not measured yet.", ""]
    record = records[-1]
    link = f"[record](records/{record.path.name})"
    if record.answer is None:
        return [f"{ANSWER}: the {link} has none; see the first cell of the notebook.", ""]
    if gone := record.answer.unknown_claims(verdicts):
        return [f"{ANSWER}: the {link} answers by {', '.join(gone)}, no longer a claim: measure again.", ""]
    return [f"{ANSWER} (size `{record.size}`, {link}). {record.answer.filled(verdicts).strip()}", ""]


def _pictures(key: str, notebook: str) -> list[Path]:
    """The figures of a notebook, in the order of their names."""
    folder = resources.shared("papers") / key / "figures"
    return sorted(path for path in folder.glob(f"{notebook}-*") if path.suffix in (".svg", ".png"))


def _figures(paper: Paper, name: str) -> list[str]:
    """Each figure with its text and its caption."""
    described = {f"{item.notebook}-{item.id}": item for item in paper.claims.figures}
    lines = []
    for path in _pictures(paper.key, name):
        about = described.get(path.stem)
        lines += [f"![{_plain(about.alt) if about else path.stem}](figures/{path.name})", ""]
        if about:
            lines += [f"*{_plain(about.caption)}*", ""]
    return lines


def _amendments(amendments: Iterable[Amendment]) -> list[str]:
    """The amendments after the first record, and the number of those before."""
    all_of_them = [*amendments]
    late = [item for item in all_of_them if item.measured]
    if not all_of_them:
        return []
    early = len(all_of_them) - len(late)
    lines = [
        "## Amendments",
        "",
        (
            "Expectations, metrics and parameters that were edited after the first record of their notebook was "
            f"committed. Before their first records there were {early} edits."
        ),
        "",
    ]
    if not late:
        return [*lines, "None."]
    head = ("day", "commit", "claim or notebook", "entry", "before", "after")
    lines += [_line(head), _line(["---"] * len(head))]
    lines += [
        _line([item.date[:10], f"`{item.commit[:10]}`", item.of, item.entry, item.before, item.after]) for item in late
    ]
    return lines


# -- notebooks ---------------------------------------------------------------------------------------------------------


def answered_notebooks() -> dict[Path, str]:
    """Return path -> text of each notebook whose record has an answer, with this answer in its first cell."""
    papers = read_papers()
    verdicts = {row.claim.name: row.verdict for paper in papers for row in paper.rows}
    records: dict[str, list[Record]] = {}
    for paper in papers:
        deciding = {str(record.facts["notebook"]): record for record in paper.records}
        for name, record in deciding.items():
            if record.answer is not None and not record.answer.unknown_claims(verdicts):
                records.setdefault(name, []).append(record)
    found = {}
    for name, several in records.items():
        path = resources.notebook(name)
        found[path] = _with_answer(path, several, verdicts)
    return found


def _with_answer(path: Path, records: Sequence[Record], verdicts: Mapping[str, Verdict]) -> str:
    """The text of a notebook's file with the answer of its records, which differ in the paper only."""
    content = json.loads(path.read_text(encoding="utf-8"))
    first = content["cells"][0]
    paragraphs = "".join(first["source"]).split("\n\n")
    links = ", ".join(f"[record]({Path(os.path.relpath(record.path, path.parent)).as_posix()})" for record in records)
    answer = records[0].answer
    assert answer is not None
    given = f"{ANSWER} (size `{records[0].size}`, {links}). {answer.filled(verdicts).strip()}"
    lines = [
        part
        for line in given.splitlines()
        for part in textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False)
    ]
    places = [place for place, text in enumerate(paragraphs) if text.startswith(ANSWER)]
    if not places:
        raise ConfigError(f"{path}: its first cell has no paragraph that begins with {ANSWER}: write one")
    paragraphs[places[0]] = "\n".join(lines)
    first["source"] = "\n\n".join(paragraphs).splitlines(keepends=True)
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


# -- Markdown ----------------------------------------------------------------------------------------------------------


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _plain(text: str) -> str:
    """The text on one line, with escaped column signs."""
    return " ".join(text.split()).replace("|", r"\|")
