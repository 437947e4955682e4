"""`make mutants`: plants each bug of the table in a copy of the package, and runs the tests that should see it.

    python -m tests.mutants.run [NAME ...] [--jobs 2] [--write] [--missing]

A name is a mutant's, or a part of it: `ring`. The working tree is not touched. The tests must pass on the copy as it is
first. Exit status 1 if a mutant survives that is not marked as equivalent, or one that is so marked is caught.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import final

from tests.mutants.table import MUTANTS, Mutant, Selection

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "records" / "mutants.json"
RECORD_LOCK = threading.Lock()
LIMIT_S = 300.0  # of the tests of one mutant; one that hangs is caught by it
COPIED = (
    "workbench",
    "tests",
    "records",
    "pyproject.toml",
    "conftest.py",
    "README.md",
    "docs",
    "CONTRIBUTING.md",
    "papers",
    "notebooks",
)
SURVIVED, TIMED_OUT = "", "the time limit"


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a mutant: the test that failed ("" for none), and the seconds until then."""

    mutant: Mutant
    caught_by: str
    seconds: float

    @property
    def as_expected(self) -> bool:
        return (self.caught_by == SURVIVED) == bool(self.mutant.equivalent)


def copy_of(folder: Path) -> Path:
    """The repository's files that tests need."""
    folder.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
        else:
            shutil.copyfile(source, folder / name)
    subprocess.run([sys.executable, "-m", "compileall", "-q", "workbench", "tests"], cwd=folder, check=True)
    return folder


def first_failure(folder: Path, tests: Iterable[Selection], limit_s: float = LIMIT_S) -> str:
    """The first test that fails in that copy; "" if all pass."""
    end = time.monotonic() + limit_s
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / ".hypothesis"),
    }
    for selection in tests:
        words = ("-x", "-q", "-p", "no:cacheprovider", "-n", "0", "--timeout", "60", "--tb", "no", *selection)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *words],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=max(1.0, end - time.monotonic()),
            )
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        if done.returncode == 5:  # nothing was chosen
            raise SystemExit(f"no test is chosen by {' '.join(selection)}: see tests/mutants/table.py")
        if -done.returncode in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
            raise SystemExit(
                f"pytest was ended from outside by signal {-done.returncode}: this says nothing of the mutant; run it once more"
            )
        if done.returncode:
            failed = re.search(r"^(?:FAILED|ERROR) (\S+?::\S+?(?:\[.*?\])?)(?: - |$)", done.stdout, re.MULTILINE)
            return (
                failed[1] if failed else f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]!r}"
            )
    return SURVIVED


def plant(mutant: Mutant, folder: Path) -> tuple[Path, str]:
    """Write the bug into the copy; the answer is the file and its correct text."""
    path = folder / "workbench" / mutant.file
    correct = path.read_text()
    assert correct.count(mutant.old) == 1, (
        f"{mutant.name}: its old text is in {mutant.file} {correct.count(mutant.old)} times"
    )
    _write(path, correct.replace(mutant.old, mutant.new))
    return path, correct


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()  # a change within one second and of one length would not be seen


def try_one(mutant: Mutant, copies: SimpleQueue[Path], *, write: bool) -> Outcome:
    """Plant it in a free copy, and take it out again."""
    folder, begin = copies.get(), time.monotonic()
    try:
        path, correct = plant(mutant, folder)
        try:
            caught_by = first_failure(folder, mutant.tests)
        finally:
            _write(path, correct)
    finally:
        copies.put(folder)
    outcome = Outcome(mutant, caught_by, time.monotonic() - begin)
    print(line_of(outcome), flush=True)
    if write:
        record(outcome)
    return outcome


def line_of(outcome: Outcome) -> str:
    found = (
        f"caught by {outcome.caught_by}"
        if outcome.caught_by
        else "SURVIVED"
        if not outcome.mutant.equivalent
        else "survived, as it should"
    )
    return f"{outcome.mutant.name:28} {outcome.mutant.file:34} {outcome.seconds:5.0f} s  {found}"


def check_unmutated(mutants: list[Mutant], copies: SimpleQueue[Path], jobs: int) -> None:
    """End here unless all the tests pass where nothing is planted."""

    def check(selection: Selection) -> str:
        folder = copies.get()
        try:
            return first_failure(folder, [selection], limit_s=4 * LIMIT_S)
        finally:
            copies.put(folder)

    selections = list(dict.fromkeys(selection for mutant in mutants for selection in mutant.tests))
    with ThreadPoolExecutor(jobs) as pool:
        for selection, failed in zip(selections, pool.map(check, selections), strict=True):
            if failed:
                raise SystemExit(f"nothing is planted and {failed} fails ({' '.join(selection)}): mend that first")


def chosen(names: list[str]) -> list[Mutant]:
    """Mutants of that name, else those whose names contain it."""
    found = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    found = found or [mutant for mutant in MUTANTS if any(name in mutant.name for name in names)]
    if not found:
        raise SystemExit(
            f"no mutant is called {' or '.join(names)}: choose among {', '.join(mutant.name for mutant in MUTANTS)}"
        )
    return found


def record(outcome: Outcome) -> None:
    """Write one row of records/mutants.json, which is in the table's order; rows of other mutants stay as they were."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    row = {"date": datetime.now(UTC).date().isoformat(), "commit": commit, "caught_by": outcome.caught_by or None}
    with RECORD_LOCK:
        rows = {**_recorded(), outcome.mutant.name: row}
        in_order = {mutant.name: rows[mutant.name] for mutant in MUTANTS if mutant.name in rows}
        RECORD.write_text(json.dumps({"mutants": in_order}, indent=1) + "\n")


def _recorded() -> dict[str, dict[str, str | None]]:
    return dict(json.loads(RECORD.read_text())["mutants"]) if RECORD.exists() else {}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="plant bugs in a copy of the package, and see which test fails")
    parser.add_argument("names", nargs="*", help="mutants, or parts of their names; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--write", action="store_true", help="write each outcome into records/mutants.json")
    parser.add_argument("--missing", action="store_true", help="only those that records/mutants.json does not hold")
    parser.add_argument("--unchecked", action="store_true", help="do not run the tests without a mutant first")
    asked = parser.parse_args(words)
    mutants, begin = chosen(asked.names), time.monotonic()
    if asked.missing:
        recorded = _recorded()
        mutants = [mutant for mutant in mutants if mutant.name not in recorded]
    copies: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for number in range(asked.jobs):
            copies.put(copy_of(Path(folder) / str(number)))
        if not asked.unchecked:
            check_unmutated(mutants, copies, asked.jobs)
        with ThreadPoolExecutor(asked.jobs) as pool:
            outcomes = list(pool.map(lambda mutant: try_one(mutant, copies, write=asked.write), mutants))
    wrong = [outcome for outcome in outcomes if not outcome.as_expected]
    num_caught = sum(bool(outcome.caught_by) for outcome in outcomes)
    print(f"\n{num_caught} of {len(outcomes)} caught in {(time.monotonic() - begin) / 60:.0f} minutes", end="")
    print(f"; not as expected: {', '.join(outcome.mutant.name for outcome in wrong)}" if wrong else "; all as expected")
    for outcome in wrong:
        print(f"  {outcome.mutant.name}: {outcome.mutant.why}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
