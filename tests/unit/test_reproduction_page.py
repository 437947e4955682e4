"""The page of `workbench reproduce`: which expectation, which explanation and which answer it shows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.papers_share import CLAIMS, KEY, commit, facts, make_share, write_claims
from workbench.papers.claims import find_claim
from workbench.papers.records import record_file, write_record
from workbench.papers.reproduction import Outcome, mark_committed_answer
from workbench.papers.reproduction_page import write_page
from workbench.papers.site import busy_machine

pytestmark = pytest.mark.notebooks
NAME = "20-one"
LOW, HIGH = (0.5, 0.51, 0.49, 0.52, 0.48), (0.85, 0.9, 0.95, 0.8, 1.0)
NOT_AT_SMOKE = """    scale: paper
    theirs: about one
    sizes: [ci, full]
    reduced: {{between: [0.6, 1.4]}}
    explanation: The scale is small.
experiments:"""


@pytest.fixture
def share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A claim that size smoke does not test, and its committed record, whose verdict is "not reproduced"."""
    folder = make_share(tmp_path / "share", NAME)
    monkeypatch.setenv("WORKBENCH_SHARE", str(folder))
    write_claims(folder, NAME, CLAIMS.replace("experiments:", NOT_AT_SMOKE))
    write(folder / "papers", LOW, commit(folder))
    return folder


def write(records: Path, values: tuple[float, ...], sha: str = "0" * 40) -> None:
    told: dict[str, Any] = facts(NAME, find_claim(f"{KEY}/{NAME}-near-one"), sha, values)
    write_record(record_file(records, KEY, NAME, "ci", "2-cores"), told)


def page(folder: Path, size: Any, busy: str = "") -> str:
    outcome = Outcome(name=NAME, papers=(KEY,), status="finished", seconds=1.0, executed=folder / f"{NAME}.ipynb")
    return write_page([outcome], folder / "index.html", folder / "papers", size, "2-cores", busy=busy).read_text()


def test_without_a_record_the_expectation_is_that_of_the_smallest_size_that_has_one(
    share: Path, tmp_path: Path
) -> None:
    assert "expected 0.6 to 1.4 at size ci; paper: about one" in page(tmp_path, "smoke")
    assert "expected 0.9 to 1.1 at size full; paper: about one" in page(tmp_path, "full")


@pytest.mark.parametrize(("values", "word", "shown"), [(LOW, "not reproduced", True), (HIGH, "same direction", False)])
def test_the_explanation_of_another_verdict_is_not_shown(
    share: Path, tmp_path: Path, values: tuple[float, ...], word: str, shown: bool
) -> None:
    write(tmp_path / "papers", values)
    text = page(tmp_path, "ci")
    assert word in text and "expected 0.6 to 1.4; paper" in text
    assert ("The scale is small." in text) == shown


def test_load_of_others_is_said(share: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for load, busy in ((0.0, False), (100.0, True)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, load, load))
        assert ("load 100.0 on" in page(tmp_path, "ci", busy=busy_machine())) == busy


def test_the_answer_in_an_executed_notebook_is_named_as_that_of_the_committed_record(tmp_path: Path) -> None:
    for first, expected in (
        ("# One?\n\n**Answer** (size `ci`, [record](r)). Yes.", "# One?\n\n**Answer of the committed record; that"),
        ("# One?\n\n**Answer**: not measured yet.", "# One?\n\n**Answer**: not measured yet."),
    ):
        path = tmp_path / "one.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(first)]), path)
        mark_committed_answer(path)
        mark_committed_answer(path)
        source = nbformat.read(path, as_version=4).cells[0].source
        assert source.startswith(expected) and source.count("Answer") == 1
