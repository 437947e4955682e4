"""The laws test algorithms that are added later: the list is found, not maintained."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import workbench.algorithms
from tests.laws.variants import SETTINGS, find_algorithms, variants

NEW = '''
from dataclasses import dataclass
from typing import final

from workbench.ops import Program
from workbench.program import Algorithm, Context


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NewSGD(Algorithm):
    """Does nothing yet."""

    patience: int = 3

    def worker(self, ctx: Context) -> Program:
        yield from ()
'''


def test_a_new_file_is_held_to_the_laws_with_its_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "new.py").write_text(NEW)
    monkeypatch.setattr(workbench.algorithms, "__path__", [*workbench.algorithms.__path__, str(tmp_path)])
    try:
        assert "NewSGD(patience=3)" in map(repr, variants())
    finally:
        sys.modules.pop("workbench.algorithms.new", None)
        vars(workbench.algorithms).pop("new", None)


def test_every_algorithm_is_there_and_no_entry_is_for_nothing() -> None:
    found = find_algorithms()
    assert {"SynchronousSGD", "LayerwiseSGD", "PipeSGD"} <= {kind.__name__ for kind in found}
    assert set(SETTINGS) <= set(found)
