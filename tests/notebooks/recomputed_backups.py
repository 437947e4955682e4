"""What each notebook on backup workers (41 to 50) must show, computed again as in `recomputed`."""

from __future__ import annotations

from collections.abc import Callable

from tests.notebooks.formulas import Names
from tests.notebooks.shown import Again, Kept

NOTEBOOKS: dict[str, Callable[[Names, list[Kept]], Again]] = {}
