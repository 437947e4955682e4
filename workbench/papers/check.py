"""`workbench papers check`: checks claims, notebooks, sizes, records and pages against each other."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from workbench import resources
from workbench.errors import ConfigError
from workbench.experiments.notebook_catalogue import paper_keys, parameters_of
from workbench.naming import unknown
from workbench.papers import history
from workbench.papers.amendments import is_complete
from workbench.papers.claims import Claim, Claims, Experiment, Question, read_claims
from workbench.papers.records import Record, judge_finding, read_record
from workbench.papers.sizes import read_sizes
from workbench.papers.table import GENERATED_PART, stale_pages
from workbench.papers.verdict_rows import read_papers, stale_reason
from workbench.papers.verdicts import MEASURED

DIGITS = re.compile(r"^['\"]?(digits|synthetic)")  # problems whose data are not those of a paper
ROW = re.compile(r"^\| \[(\w+)\]\(\w+/card\.md\) \| .*? `([a-z0-9-]+)` \| ([a-z ]+)[,|]", re.MULTILINE)


@final
@dataclass(slots=True)
class Result:
    """What the check found.

    Attributes:
        problems: a line for each problem of claims, notebooks, records, amendments and pages.
        notes: what could not be checked.
        stale: the stale records. They are not problems, because every change of the code makes some records stale.
        num_claims, num_records: numbers of claims and records.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    num_claims: int = 0
    num_records: int = 0


def check_papers() -> Result:
    """Check all papers."""
    result = Result()
    root = resources.shared("papers")
    with_history = history.has_history(root)
    if not with_history:
        result.notes.append(
            "no git history here: only the digests of expectations are checked, not when they were committed"
        )
    recorded: set[str] = set()
    for key in paper_keys():
        try:
            claims = read_claims(key)
        except ConfigError as error:
            result.problems.append(str(error))
            continue
        result.num_claims += len(claims.claims)
        _check_notebooks(key, claims, result)
        known = {claim.id: claim for claim in claims.claims}
        for path in sorted((root / key / "records").glob("*.json")):
            try:
                record = read_record(path)
            except ConfigError as error:
                result.problems.append(str(error))
                continue
            result.num_records += 1
            _check_record(record, key, known, result)
            if with_history:
                _check_history(record, key, known, root, result)
            recorded |= {f"{key}/{name}" for name in record.facts["findings"]}
        _check_amendments(root, key, result)
    _check_pages(root, recorded, result)
    return result


def _check_notebooks(key: str, claims: Claims, result: Result) -> None:
    """Check that every named notebook exists, with its sizes and the cells that answer questions."""
    items: list[Claim | Experiment | Question] = [*claims.claims, *claims.experiments, *claims.questions]
    for name in sorted({item.notebook for item in items}):
        about = f"{key}/claims/{name}.yaml"
        try:
            path = resources.notebook(name)
            if read_sizes(path) is None:
                result.problems.append(f"{about}: {name} has no sizes: write notebooks/sizes/{name}.yaml")
        except ConfigError as error:
            result.problems.append(f"{about}: {error}")
            continue
        tags = cell_tags(path)
        for question in claims.questions:
            if question.notebook == name and question.cell not in tags:
                result.problems.append(
                    f"{about}: question {question.id}: {unknown(f'cell of {name}', question.cell, sorted(tags))}"
                )


def cell_tags(notebook: Path) -> set[str]:
    """Return all tags of a notebook's cells."""
    import nbformat

    cells = nbformat.read(notebook, as_version=4).cells  # type: ignore[no-untyped-call]
    return {tag for cell in cells for tag in cell.metadata.get("tags", [])}


def _check_record(record: Record, key: str, claims: dict[str, Claim], result: Result) -> None:
    about = f"{key}/records/{record.path.name}"
    if record.facts["paper"] != key:
        result.problems.append(f"{about} is a record of {record.facts['paper']}")
    for name, found in record.facts["findings"].items():
        claim = claims.get(name)
        if claim is None or claim.notebook != record.facts["notebook"]:
            result.problems.append(f"{about}: {key}/claims/{record.facts['notebook']}.yaml has no claim {name}")
            continue
        if found["digest"] != claim.digest:
            result.problems.append(
                f"{about}: the expectation of {claim.name} was edited after this record: undo that, or measure again"
            )
            continue
        word = judge_finding(claim, found, record.size).word
        if found["verdict"] != word:
            result.problems.append(
                f"{about}: the verdict of {claim.name} is {found['verdict']!r}; by its values it is {word!r}"
            )
        if claim.scale == "paper" and word == "reproduced" and DIGITS.match(_problem(record)):
            result.problems.append(
                f"{about}: {claim.name} is about the paper's own data, but was measured on {_problem(record)}"
            )


def _problem(record: Record) -> str:
    """The problem that a record's notebook trained; empty if it is not a parameter of the notebook."""
    given = record.facts["parameters"].get("problem")
    if given is not None:
        return str(given)
    try:
        own = {
            parameter.name: parameter.default
            for parameter in parameters_of(resources.notebook(record.facts["notebook"]))
        }
    except ConfigError:
        return ""
    return own.get("problem", "")


def _check_history(record: Record, key: str, claims: dict[str, Claim], root: Path, result: Result) -> None:
    """Check that the claims existed at the record's commit, with the same expectations."""
    about = f"{key}/records/{record.path.name}"
    sha = str((record.facts["commit"] or {}).get("sha", ""))
    if not sha or not history.knows_commit(root, sha):
        result.notes.append(
            f"{about}: its commit {sha[:10] or '(none)'} is not in this history: only digests are checked"
        )
        return
    then = history.claims_at(root, key, record.facts["notebook"], sha)
    for name, found in record.facts["findings"].items():
        if name not in claims:
            continue  # `_check_record` names it
        claim = None if then is None else then.get(name) or then.get(claims[name].formerly)
        if claim is None:
            result.problems.append(
                f"{about}: {key}/{name} did not exist at the record's commit {sha[:10]}: commit claims before records"
            )
        elif claim.digest != found["digest"]:
            result.problems.append(f"{about}: {key}/{name} had another expectation at the record's commit {sha[:10]}")


def _check_amendments(root: Path, key: str, result: Result) -> None:
    """Check that the amendment log agrees with git's history."""
    if not is_complete(root, key):
        result.problems.append(f"{key}/amendments.json is not that of git's history: run `workbench papers table`")


def _find_stale(result: Result) -> None:
    """Name the stale records."""
    named: set[Path] = set()
    for paper in read_papers():
        for row in paper.rows:
            reason = stale_reason(row.record) if row.record else ""
            if row.record is not None and reason and row.record.path not in named:
                named.add(row.record.path)
                result.stale.append(f"{paper.key}/records/{row.record.path.name}: {reason}")


def _check_pages(root: Path, recorded: set[str], result: Result) -> None:
    """Check that no verdict is shown without a record, and that every page is up to date."""
    generated = GENERATED_PART.search((root / "README.md").read_text(encoding="utf-8"))
    for key, name, word in ROW.findall(generated[0] if generated else ""):
        if word.strip() in MEASURED and f"{key}/{name}" not in recorded:
            result.problems.append(f"README.md: {key}/{name} has the verdict {word.strip()!r} without a record")
    if result.problems:
        return  # pages cannot be right if claims or records are wrong
    try:
        _find_stale(result)
        for page in stale_pages():
            result.problems.append(
                f"{os.path.relpath(page, root)} is not up to date with claims and records: run `workbench papers table`"
            )
    except ConfigError as error:
        result.problems.append(str(error))
