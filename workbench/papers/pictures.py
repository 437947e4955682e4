"""Draws the figures of a paper's card: those of notebook cells tagged `figure-NAME`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError, LaunchError
from workbench.papers.claims import Size
from workbench.papers.records import read_records
from workbench.papers.reproduction import Outcome
from workbench.plots.pictures import write_pictures
from workbench.plots.renderer import PLOTLY

TAG = "figure-"


def tagged_figures(executed: Path) -> dict[str, Any]:
    """Return name -> the last figure, as Plotly's JSON, of each cell tagged `figure-NAME`."""
    import nbformat

    found: dict[str, Any] = {}
    for cell in nbformat.read(executed, as_version=4).cells:  # type: ignore[no-untyped-call]
        names = [tag.removeprefix(TAG) for tag in cell.metadata.get("tags", []) if tag.startswith(TAG)]
        figures = [output.data[PLOTLY] for output in cell.get("outputs", []) if PLOTLY in output.get("data", {})]
        if figures:
            found |= dict.fromkeys(names, figures[-1])
    return found


def draw_pictures(outcomes: Sequence[Outcome], records: Path, size: Size, site: str) -> list[str]:
    """Draw figures into `figures/`, for notebooks with a deciding record that ran now or have no figure yet.

    Args:
        outcomes: the notebooks.
        records: folder of the records, with the layout of `papers/`.
        size, site: of the records.

    Returns:
        Messages, such as that there is no browser.
    """
    wanted: dict[Path, Any] = {}
    for outcome in outcomes:
        if outcome.status != "failed" and outcome.executed.is_file():
            wanted |= _figures_to_draw(outcome, records, size, site)
    if not wanted:
        return []
    try:
        write_pictures(wanted)
    except LaunchError as error:
        return [str(error)]
    return []


def _figures_to_draw(outcome: Outcome, records: Path, size: Size, site: str) -> dict[Path, Any]:
    """Return path without suffix -> figure, of a notebook in whose papers its record decides."""
    figures = tagged_figures(outcome.executed)
    paths = {
        records / key / "figures" / f"{outcome.name}-{name}": figure
        for key in outcome.papers
        if _decides(records, key, outcome.name, size, site)
        for name, figure in figures.items()
    }
    return {path: figure for path, figure in paths.items() if outcome.status == "finished" or not _is_drawn(path)}


def _is_drawn(path: Path) -> bool:
    return any(path.with_name(path.name + suffix).exists() for suffix in (".svg", ".png"))


def _decides(records: Path, key: str, notebook: str, size: Size, site: str) -> bool:
    """Return True if the record of this size and site decides the verdicts of its notebook."""
    try:
        of_notebook = [record for record in read_records(records, key) if record.facts["notebook"] == notebook]
    except ConfigError:
        return False
    return bool(of_notebook) and (of_notebook[-1].size, of_notebook[-1].site) == (size, site)
