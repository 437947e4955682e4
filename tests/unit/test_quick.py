"""The list of quick tests, which `make check` runs."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "tests" / "quick.txt").read_text().splitlines()


def is_quick(line: str) -> bool:
    """Whether the file or test is there; a whole file must not start ranks."""
    path, _, test = line.partition("::")
    if not (ROOT / path).is_file():
        return False
    text = (ROOT / path).read_text()
    return f"def {test.partition('[')[0]}(" in text if test else "shared_pool" not in text and "mark.mpi" not in text


def test_the_list_holds_tests_that_are_there_and_start_no_ranks() -> None:
    assert len(set(LINES)) == len(LINES) > 0
    assert [line for line in LINES if not is_quick(line)] == []
