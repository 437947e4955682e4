"""The table of settings and algorithms in the docs is the one that the code gives, and its cells are tested."""

from __future__ import annotations

from tests.benchmarks.settings_table import COLUMNS, PAGE, page
from tests.laws.test_settings import CELLS


def test_the_page_has_the_present_table() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "run python -m tests.benchmarks.settings_table"


def test_each_column_is_a_case_of_the_law() -> None:
    assert list(COLUMNS) == list(CELLS)
