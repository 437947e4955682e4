"""Small tables of results: rows of plain values, shown as text or as HTML."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from workbench.trace.kinds import SLEPT_LANE
from workbench.units import GB, KB, MB

MISSING = "\N{EN DASH}"


def seconds(value: float) -> str:
    """Format seconds with three digits and a unit.

    >>> seconds(0.01234), seconds(75.0), seconds(0)
    ('12.3 ms', '75.0 s', '0 s')
    """
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(value) >= 0.9995 * factor:
            return f"{three_digits(value / factor)} {unit}"
    return f"{three_digits(value / 1e-6)} µs" if value else "0 s"


def format_age(value: float) -> str:
    """Format the time since an event.

    >>> format_age(0.4), format_age(1.25), format_age(75.2)
    ('now', '1.2 s ago', '75 s ago')
    """
    if value < 1:
        return "now"
    return f"{value:.1f} s ago" if value < 9.95 else f"{value:.0f} s ago"


def num_bytes(value: float) -> str:
    """Format bytes with three digits and a unit of powers of 1000.

    >>> num_bytes(1.6e6), num_bytes(12)
    ('1.60 MB', '12 B')
    """
    for factor, unit in ((GB, "GB"), (MB, "MB"), (KB, "kB")):
        if abs(value) >= 0.9995 * factor:
            return f"{three_digits(value / factor)} {unit}"
    return f"{value:.0f} B"


def percent(value: float) -> str:
    """Format a share as per cent.

    >>> percent(0.9581)
    '95.8 %'
    """
    return f"{100 * value:.1f} %"


def slept_words(*, slept: bool) -> str:
    """Return the words to add to a title if ranks slept for their compute; "" if they computed.

    >>> slept_words(slept=True)
    ', compute (slept)'
    """
    return f", {SLEPT_LANE}" if slept else ""


def three_digits(value: float) -> str:
    """Format three significant digits, whole numbers above 1000.

    >>> three_digits(9.996), three_digits(0.5), three_digits(2345.6), three_digits(0)
    ('10.0', '0.500', '2346', '0.00')
    """
    if abs(value) < 0.9995:
        return f"{value:#.3g}" if value else "0.00"
    digits = next(digits for digits in (2, 1, 0) if digits == 0 or abs(round(value, digits)) < 10 ** (3 - digits))
    return f"{value:.{digits}f}"


def _printable(text: str) -> str:
    """Remove control characters, with which a name could clear the terminal's screen."""
    return (
        text
        if text.isprintable()
        else "".join(sign if sign.isprintable() or sign == "\n" else "\N{REPLACEMENT CHARACTER}" for sign in text)
    )


@final
@dataclass(frozen=True, slots=True)
class Column:
    """A column: the key in the rows, its title, and its format."""

    key: str
    title: str
    text: Callable[[Any], str] = str


@dataclass(frozen=True, repr=False)
class Table:
    """Rows with columns. `rows` holds the exact values (None if missing); the columns say how they are shown.

    >>> print(Table([{"algorithm": "PipeSGD", "step_s": 0.0125}], (Column("algorithm", "algorithm"), Column("step_s", "step", seconds))))
    algorithm   step
    ---------  -------
    PipeSGD    12.5 ms
    """

    rows: Sequence[dict[str, Any]]
    columns: tuple[Column, ...]
    caption: str = ""
    footnotes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]

    def cells(self) -> list[list[str]]:
        """Return the text of every cell; an en dash for a missing value."""
        return [
            [MISSING if row.get(column.key) is None else column.text(row[column.key]) for column in self.columns]
            for row in self.rows
        ]

    def __str__(self) -> str:
        lines = [
            [column.title for column in self.columns],
            *([_printable(cell) for cell in line] for line in self.cells()),
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([self.caption] * bool(self.caption) + text + [_printable(note) for note in self.footnotes])

    __repr__ = __str__  # a notebook stores it next to the HTML

    def _repr_html_(self) -> str:
        caption = f"<caption>{html.escape(self.caption)}</caption>" if self.caption else ""
        head = "".join(f"<th style='padding: 2px 8px'>{html.escape(column.title)}</th>" for column in self.columns)
        # on the cell itself: JupyterLab styles cells, not tables
        cell = "<td style='white-space: nowrap; padding: 2px 8px'>{}</td>"
        body = "".join(f"<tr>{''.join(cell.format(html.escape(text)) for text in line)}</tr>" for line in self.cells())
        notes = "".join(f"<p style='margin: 2px 8px'><small>{html.escape(note)}</small></p>" for note in self.footnotes)
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"


def tabulate(
    rows: Sequence[dict[str, Any]], caption: str = "", **columns: str | tuple[str, Callable[[Any], str]]
) -> Table:
    """Return a table from the keys of its rows.

    Args:
        rows: exact values.
        caption: the table's title.
        columns: key -> title, or title and format.

    >>> print(tabulate([{"algorithm": "PipeSGD", "step_s": 0.0125}], algorithm="algorithm", step_s=("step", seconds)))
    algorithm   step
    ---------  -------
    PipeSGD    12.5 ms
    """
    shown = tuple(Column(key, *([title] if isinstance(title, str) else title)) for key, title in columns.items())
    return Table(rows, shown, caption=caption)
