"""A comparison of runs in a notebook: a column for each setting that differs, and rows that a click on a title sorts."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from workbench.analysis.summary import Comparison, compare
from workbench.analysis.table import Column, Table
from workbench.plots.differences import differences
from workbench.trace.run import Run

SHOWN_ELSEWHERE = ("algorithm", "workers", "runtime", "steps")  # they have a column of their own
# Sorts the rows of the table in front of the script: by numbers if there are some, and missing values last.
SORT = """<script>(() => {
  const table = document.currentScript.previousElementSibling.querySelector("table");
  const value = (row, column) => row.cells[column].dataset.value ?? "";
  const compare = (one, other) => (one !== "" && other !== "" && !isNaN(one) && !isNaN(other)
    ? one - other : one.localeCompare(other));
  for (const title of table.tHead.rows[0].cells) {
    const button = title.firstElementChild;
    button.onclick = () => {
      const sign = title.ariaSort === "ascending" ? -1 : 1, column = title.cellIndex, rows = [...table.tBodies[0].rows];
      rows.sort((one, other) => {
        const [a, b] = [value(one, column), value(other, column)];
        return a === "" || b === "" ? (a === "") - (b === "") : sign * compare(a, b);
      });
      for (const other of table.tHead.rows[0].cells) other.ariaSort = "none";
      title.ariaSort = sign > 0 ? "ascending" : "descending";
      table.tBodies[0].append(...rows);
    };
  }
})()</script>"""
STYLE = """<style>
.workbench-comparison { overflow-x: auto }
.workbench-comparison td, .workbench-comparison th { padding: 2px 8px; text-align: left; white-space: nowrap }
.workbench-comparison td.words { min-width: 10ch; max-width: 40ch; white-space: normal; overflow-wrap: anywhere }
.workbench-comparison th { vertical-align: bottom }
.workbench-comparison th button { all: unset; cursor: pointer; font-weight: bold; white-space: nowrap }
.workbench-comparison th button:focus-visible { outline: 2px solid currentColor }
.workbench-comparison th[aria-sort=ascending] button::after { content: " \\25B4" }
.workbench-comparison th[aria-sort=descending] button::after { content: " \\25BE" }
</style>"""


def comparison_table(runs: Sequence[Run]) -> Table:
    """Return the numbers of `compare`, with a column for each setting in which the runs differ.

    The first column is the algorithm. Runs that differ in nothing have their names.
    """
    compared = compare(runs)
    differing = differences(compared.runs)
    names = [name for name in (differing[0] if differing else {}) if name not in SHOWN_ELSEWHERE]
    rows = [
        {**row, **{_key(name): one[name] for name in names}} for row, one in zip(compared.rows, differing, strict=True)
    ]
    own = tuple(Column(_key(name), name, _setting) for name in names)
    alone = len({repr(one) for one in differing}) == len(runs)
    named = () if alone else (Column("run", "run"),)
    measured = [column for column in compared.columns if column.key != "label"]
    columns = (Column("algorithm", "algorithm"), *own, *measured, *named)
    return Table(rows, columns, caption=compared.caption, footnotes=compared.footnotes)


def comparison_html(compared: Comparison) -> str:
    """Return a comparison as HTML: all names in full, on several lines if they are long; sorted by a click on a title."""
    table = comparison_table(compared.runs)
    titles = "".join(
        f'<th aria-sort="none"><button title="Sort by {html.escape(column.title)}">{html.escape(column.title)}</button></th>'
        for column in table.columns
    )
    body = "".join(
        f"<tr>{''.join(_cell(row.get(column.key), text) for column, text in zip(table.columns, line, strict=True))}</tr>"
        for row, line in zip(table.rows, table.cells(), strict=True)
    )
    caption = f"<caption>{html.escape(table.caption)}</caption>" if table.caption else ""
    notes = "".join(f"<p style='margin: 2px 8px'><small>{html.escape(note)}</small></p>" for note in table.footnotes)
    return (
        f'{STYLE}<div class="workbench-comparison"><table>{caption}<thead><tr>{titles}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{SORT}{notes}"
    )


def use_comparison_html(formatter: Any) -> None:
    """Let IPython's formatter for HTML show the results of `wb.compare` by `comparison_html`."""
    formatter.for_type(Comparison, comparison_html)


def _key(name: str) -> str:
    """Return the key of a setting in a row; a result may have the same name."""
    return f"setting {name}"


def _cell(value: Any, text: str) -> str:
    kind = ' class="words"' if isinstance(value, str) else ""
    exact = "" if value is None else f' data-value="{html.escape(str(value))}"'
    return f"<td{kind}{exact}>{html.escape(text)}</td>"


def _setting(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
