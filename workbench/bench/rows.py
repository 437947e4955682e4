"""Rows: one measurement divided by another, with the 95 % interval of the ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

import numpy as np

from workbench.analysis import table
from workbench.analysis.table import Column, Table

Unit = Literal["s", "B/s", "B", "1"]
TargetStatus = Literal["met", "missed", "open", ""]
REPEATS = 2000  # bootstrap samples
COVERED = (0.025, 0.975)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One of our measurements divided by another.

    Attributes:
        case: the conditions: "50 MB MLP, 2 ranks, gloo".
        what: what was measured, such as the name of our algorithm.
        over: what it is compared with, the peer or the limit.
        kind: whether `over` is another program or a physical limit.
        unit: of `ours` and `theirs`, which are medians.
        ratio, low, high: median over rounds of our time divided by theirs, with its 95 % bootstrap interval. With one
            round, all three are equal.
        below, above: the required range of the ratio, if any.
    """

    case: str
    what: str
    over: str
    kind: Literal["peer", "limit"]
    unit: Unit
    ours: float
    theirs: float
    ratio: float
    low: float
    high: float
    rounds: int
    below: float | None = None
    above: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """The case, what was measured, and what it is compared with: these identify a row in a record."""
        return self.case, self.what, self.over

    @property
    def word(self) -> TargetStatus:
        """The state of the target: "met" or "missed" in the whole interval, else "open"; "" without a target."""
        if self.below is not None:
            return "met" if self.high < self.below else "missed" if self.low >= self.below else "open"
        if self.above is not None:
            return "met" if self.low > self.above else "missed" if self.high <= self.above else "open"
        return ""

    def as_record(self) -> dict[str, Any]:
        """Return values for a file: numbers with six digits, and `word`."""
        plain = {
            key: float(f"{value:.6g}") if isinstance(value, float) else value
            for key, value in asdict(self).items()
            if value is not None
        }
        return {**plain, "word": self.word}

    @classmethod
    def from_record(cls, facts: Mapping[str, Any]) -> Row:
        """Make a row from `as_record`."""
        return cls(**{name: value for name, value in facts.items() if name != "word"})


def compare(
    ours: Sequence[float] | np.ndarray,
    theirs: Sequence[float] | np.ndarray | float,
    *,
    case: str,
    what: str,
    over: str,
    unit: Unit = "s",
    kind: Literal["peer", "limit"] = "peer",
    below: float | None = None,
    above: float | None = None,
) -> Row:
    """Return a row of paired measurements, one for each round; `theirs` may be one number, such as a limit.

    >>> compare([2.0, 2.2, 2.1], [1.0, 1.1, 1.0], case="a sum", what="ours", over="theirs", below=3).word
    'met'
    """
    mine = np.asarray(ours, dtype=np.float64)
    its = np.broadcast_to(np.asarray(theirs, dtype=np.float64), mine.shape)
    ratios = mine / its
    low, high = interval(ratios)
    numbers = {
        "ours": float(np.median(mine)),
        "theirs": float(np.median(its)),
        "ratio": float(np.median(ratios)),
        "low": low,
        "high": high,
    }
    return Row(
        case=case, what=what, over=over, kind=kind, unit=unit, rounds=len(mine), below=below, above=above, **numbers
    )


def interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median.

    >>> interval([1.0, 1.0, 1.0])
    (1.0, 1.0)
    """
    array = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(0).choice(array, (REPEATS, len(array)))
    low, high = np.quantile(np.median(draws, axis=1), COVERED)
    return float(low), float(high)


def table_of(rows: Sequence[Row], caption: str = "") -> Table:
    """Return rows as a printed table."""

    def format_amount(value: float, unit: Unit) -> str:
        if unit == "s":
            return table.seconds(value)
        return table.num_bytes(value) + unit[1:] if unit in {"B", "B/s"} else f"{value:.3g}"

    shown = [
        {
            "case": row.case,
            "what": row.what,
            "ours": format_amount(row.ours, row.unit),
            "over": row.over,
            "theirs": format_amount(row.theirs, row.unit),
            "ratio": f"{row.ratio:.3f} [{row.low:.3f}, {row.high:.3f}]",
            "asked": f"< {row.below:g}"
            if row.below is not None
            else f"> {row.above:g}"
            if row.above is not None
            else "",
            "word": row.word,
        }
        for row in rows
    ]
    titles = {
        "case": "case",
        "what": "what",
        "ours": "ours",
        "over": "over",
        "theirs": "theirs",
        "ratio": "ratio",
        "asked": "asked",
        "word": "",
    }
    return Table(shown, tuple(Column(key, title) for key, title in titles.items()), caption=caption)
