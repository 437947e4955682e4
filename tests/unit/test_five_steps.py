"""CONTRIBUTING.md's five steps, applied literally in a copy of the repository: the result must work as the page says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.unit.test_style import ROOT, project_files

pytestmark = pytest.mark.timeout(300)  # each starts Python several times, on a machine that may be busy

BLOCK = re.compile(r'^( *)```(\w+) title="([^"]+)"\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)
NAME, CLASS = "halves-sgd", "HalvesSGD"
# The cheap ones, which need no processes of their own.
CHEAP = f"test_halves or {CLASS} and not (torch or mpi or real or every_runtime)"
LAWS = ("tests/laws", "tests/unit/test_halves.py")
TABLES = ("tests/unit/test_catalogue.py", "tests/unit/test_papers.py")
# To collect all laws once more takes longer than to run these
SEE_IT = (
    "tests/laws/test_updates.py",
    "tests/laws/test_replicas.py",
    "tests/unit/test_halves.py",
)
COMMANDS = """
import sys
import workbench
from workbench.cli.main import main

print(workbench.__file__)
for words in sys.argv[1:]:
    print("=====")
    assert main(words.split()) == 0
"""


def five_steps() -> str:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    return page.partition("## Add an algorithm in five steps")[2].partition("\n## ")[0]


def blocks() -> list[tuple[str, str, str]]:
    """(kind, file, text) of each fenced block that names a file, in order."""
    return [
        (kind, name, textwrap.dedent(text.replace(f"\n{indent}\n", "\n\n")))
        for indent, kind, name, text in BLOCK.findall(five_steps())
    ]


def apply(folder: Path, kind: str, name: str, text: str) -> None:
    """Write a new file; or put the lines with `+` after the line above them, which must be there exactly once."""
    path = folder / name
    if kind != "diff":
        assert not path.exists(), f"{name} is there already"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return
    for hunk in text.split("@@\n"):
        lines = hunk.splitlines()
        anchor, added = lines[0].removeprefix(" "), lines[1:]
        assert added and all(line.startswith("+") for line in added), hunk
        present = path.read_text().splitlines()
        assert present.count(anchor) == 1, f"{name}: {anchor!r} is there {present.count(anchor)} times"
        place = present.index(anchor) + 1
        present[place:place] = [line[1:] for line in added]
        path.write_text("\n".join(present) + "\n")


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "WORKBENCH_RUNS": str(folder / "runs"),
        "COLUMNS": "120",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=110
    )


def run_tests(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with the five steps done."""
    folder = tmp_path_factory.mktemp("repository")
    for path in project_files():
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    for kind, name, text in blocks():
        apply(folder, kind, name, text)
    return folder


def test_each_step_has_what_it_speaks_of() -> None:
    assert re.findall(r"^(\d)\. ", five_steps(), re.MULTILINE) == list("12345")
    assert [(kind, name) for kind, name, _ in blocks()] == [
        ("python", "workbench/algorithms/halves.py"),
        ("diff", "workbench/algorithms/__init__.py"),
        ("diff", "tests/laws/variants.py"),
        ("python", "tests/unit/test_halves.py"),
        ("markdown", "papers/rabenseifner2004optimization/card.md"),
        ("diff", "papers/README.md"),
        ("diff", "CHANGELOG.md"),
    ]


@pytest.mark.slow
def test_the_command_line_knows_the_new_algorithm_and_prints_the_docs_table(copy: Path) -> None:
    """The commands in one process of the copy."""
    command = re.search(rf"`workbench (train {NAME} [^`]*)`", five_steps())
    assert command, "step 2 says how to train with it"
    done = run(copy, "-c", COMMANDS, f"algorithms {NAME}", f"{command[1]} --json", "algorithms --markdown")
    assert done.returncode == 0, done.stderr
    place, shown, trained, markdown = done.stdout.split("=====\n")
    assert place.startswith(str(copy)), "the copy is what runs"
    assert shown.startswith(f"{NAME}: {CLASS}\n")
    assert json.loads(trained)["steps"] == 5
    assert f"\n| {NAME} | " in markdown  # step 5: the docs' table is what this prints
    page = (copy / "docs" / "algorithms" / "index.md").read_text()
    rows = [line for line in page.splitlines(keepends=True) if line.startswith("| algorithm |")]
    before, _, after = page.partition(rows[0])
    rest = re.sub(r"\A(\|.*\n)*", "", after)
    (copy / "docs" / "algorithms" / "index.md").write_text(before + markdown + rest)
    try:
        tested = run_tests(copy, *TABLES, "-k", f"{NAME} or the_docs or papers")
    finally:
        (copy / "docs" / "algorithms" / "index.md").write_text(page)
    assert "passed" in tested.stdout
    assert tested.returncode == 0, tested.stdout


def test_its_files_are_in_style(copy: Path) -> None:
    written = [name for kind, name, _ in blocks() if name.endswith(".py")]
    for words in (("check", "--no-cache"), ("format", "--check", "--no-cache")):
        judged = run(copy, "-m", "ruff", *words, *written)
        assert judged.returncode == 0, judged.stdout + judged.stderr


@pytest.mark.slow
def test_its_laws_hold_and_see_a_planted_bug(copy: Path) -> None:
    tested = run_tests(copy, *LAWS, "-k", CHEAP)
    assert tested.returncode == 0, tested.stdout
    assert int(re.findall(r"(\d+) passed", tested.stdout)[-1]) >= 8, "its own three tests, and some laws"
    path = copy / "workbench/algorithms/halves.py"
    correct = path.read_text()
    path.write_text(
        correct.replace("yield Apply(total)\n", "yield Discard(total)\n").replace(
            " Apply, Backward,", " Backward, Discard,"
        )
    )
    assert "Discard(total)" in path.read_text(), "a step that forgets to apply"
    try:
        failed = re.findall(r"^FAILED (tests/\w+)/", run_tests(copy, *SEE_IT, "-k", CHEAP).stdout, re.MULTILINE)
    finally:
        path.write_text(correct)
    assert set(failed) == {"tests/laws", "tests/unit"}, "the laws see it, and its own test does"
