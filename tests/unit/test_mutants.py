"""The table of planted bugs is in step with the source, and the record with the table."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

import pytest

from tests.mutants import run
from tests.mutants.table import MUTANTS, Mutant
from tests.unit.test_style import ROOT

RECORD = json.loads(run.RECORD.read_text())["mutants"]
by_name = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


@by_name
def test_each_bug_can_be_planted_and_is_a_program(mutant: Mutant) -> None:
    text = (ROOT / "workbench" / mutant.file).read_text()
    assert text.count(mutant.old) == 1, (
        f"{mutant.file}: {mutant.old!r} is there {text.count(mutant.old)} times; give the mutant another text"
    )
    assert mutant.old != mutant.new
    ast.parse(text.replace(mutant.old, mutant.new))
    assert mutant.why and mutant.tests
    for selection in mutant.tests:
        for word in selection:
            assert not word.endswith(".py") or (ROOT / word).exists(), f"{word} is no test"


def test_there_are_many_and_each_has_a_name_of_its_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
    assert {mutant.file.split("/")[0] for mutant in MUTANTS} >= {
        "algorithms",
        "collectives",
        "codecs",
        "gradients.py",
        "replica",
    }


def test_the_record_is_of_these_and_what_survived_has_a_reason() -> None:
    """Write it by `make mutants` once more if this fails."""
    reasons = {mutant.name: mutant.equivalent for mutant in MUTANTS}
    assert set(RECORD) <= set(reasons), f"of no mutant: {set(RECORD) - set(reasons)}"
    for name, row in RECORD.items():
        assert {"date", "commit", "caught_by"} == set(row)
        assert bool(row["caught_by"]) != bool(reasons[name]), (
            f"{name} survived, or is marked as equivalent and was caught"
        )


def test_a_bug_is_planted_in_the_copy_and_taken_out(tmp_path: Path) -> None:
    mutant = MUTANTS[0]
    path = tmp_path / "workbench" / mutant.file
    path.parent.mkdir(parents=True)
    path.write_text((ROOT / "workbench" / mutant.file).read_text())
    planted, correct = run.plant(mutant, tmp_path)
    assert planted == path and mutant.new in path.read_text()
    assert (ROOT / "workbench" / mutant.file).read_text() == correct, "the working tree is as it was"


def test_the_first_failure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(code: int, text: str) -> None:
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], code, text, ""))

    answers(0, "3 passed")
    assert run.first_failure(tmp_path, [("tests/a.py",)]) == ""
    answers(1, "FAILED tests/a.py::test_b[1 - 2] - assert 1 == 2\n1 failed")
    assert run.first_failure(tmp_path, [("tests/a.py",)]) == "tests/a.py::test_b[1 - 2]"
    answers(-15, "")
    with pytest.raises(SystemExit, match="from outside by signal 15"):
        run.first_failure(tmp_path, [("tests/a.py",)])
    answers(5, "")
    with pytest.raises(SystemExit, match="no test is chosen by tests/a"):
        run.first_failure(tmp_path, [("tests/a.py",)])


def test_names_choose() -> None:
    assert [mutant.name for mutant in run.chosen(["pipe-warmup"])] == ["pipe-warmup"]
    assert len(run.chosen(["ring-"])) > 2
    assert run.chosen([]) == list(MUTANTS)
    with pytest.raises(SystemExit, match="no mutant is called nothing"):
        run.chosen(["nothing"])
