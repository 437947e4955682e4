"""`TraceViewer`: timelines of one or two runs that a reader folds, zooms and compares."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, final

from workbench.analysis.table import Table
from workbench.plots.trace_viewer.payload import Steps, payload
from workbench.plots.trace_viewer.script import viewer_js
from workbench.trace.files.atomic import write_atomic
from workbench.trace.run import Run

NOTEBOOK_SPANS = 20_000  # a notebook's file holds them
# pixels of a frame in a notebook: without rows; of a row; of a folded rank; of a table of differences; and their limit
FRAME_PIXELS, ROW_PIXELS, FOLDED_PIXELS, TABLE_PIXELS, MAX_PIXELS = 190, 26, 14, 190, 760

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>html, body {{ margin: 0; height: 100%; }} #timeline {{ height: 100%; }}</style>
</head>
<body>
<div id="timeline"><noscript>This timeline needs JavaScript. A figure without it: run.timeline() in Python.</noscript></div>
<script type="application/json" id="timeline-data">{data}</script>
<script type="module">
{script}
mount(document.getElementById("timeline")).show(JSON.parse(document.getElementById("timeline-data").textContent));
</script>
</body>
</html>
"""


@final
class TraceViewer:
    """The timelines of one run, or of two on one time axis, in a browser.

    Show it as the last expression of a cell, or `save` it as an HTML page. Both work without a network and without a
    kernel. Press `?` in it for its keys. Ranks fold and unfold by a click; with more than eight they begin folded.
    A click on a span shows its messages, or its collective on all ranks. Two runs are aligned at a step, with a table
    of the difference of each part of a step.

    Args:
        runs: a run, or two runs to compare.
        steps: slice(first, one after the last); None for those from the middle that fit.
        ranks: which ranks; None for all.
        critical: include the critical path of each step.
        names: titles of the runs; None: their algorithms, and what distinguishes them.
        max_spans: largest number of spans of all runs together; with more, fewer steps are shown, but at least one. A
            notebook or page of 20,000 spans has about 400 kB, one of 100,000 spans 1.7 MB.

    Raises:
        ConfigError: there are no runs or more than two, or a trace holds none of these steps or ranks.
    """

    def __init__(
        self,
        runs: Run | Sequence[Run],
        steps: Steps = None,
        ranks: Iterable[int] | None = None,
        *,
        critical: bool = True,
        names: Sequence[str] | None = None,
        max_spans: int = NOTEBOOK_SPANS,
    ) -> None:
        self._shown = payload(
            [runs] if isinstance(runs, Run) else runs,
            steps,
            ranks,
            critical=critical,
            names=names,
            max_spans=max_spans,
        )

    @property
    def content(self) -> dict[str, Any]:
        """What the browser gets: see `payload`."""
        return self._shown.content

    @property
    def difference(self) -> Table | None:
        """How the steps shown of two runs differ (see `step_difference`); None for one run."""
        return self._shown.difference

    def save(self, path: Path | str) -> Path:
        """Write an HTML page, atomically, and return its path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, _page(self._shown.content))
        return path

    def _repr_html_(self) -> str:
        """Return the page in a frame, whose keys are not JupyterLab's."""
        document = html.escape(_page(self._shown.content))
        style = f"width: 100%; height: {_height(self._shown.content)}px; border: 0"
        return f'<iframe title="timeline" style="{style}" srcdoc="{document}"></iframe>'


def _height(content: dict[str, Any]) -> int:
    """Return the height of a frame, so that a small timeline leaves no empty space."""
    pixels = FRAME_PIXELS
    for run in content["runs"]:
        num_ranks = len({row["rank"] for row in run["rows"]})
        folded = num_ranks >= content["foldedFrom"]
        pixels += FOLDED_PIXELS * num_ranks if folded else ROW_PIXELS * len(run["rows"])
    return min(pixels, MAX_PIXELS) + TABLE_PIXELS * ("difference" in content)


def _page(content: dict[str, Any]) -> str:
    title = html.escape(" and ".join(run["name"] for run in content["runs"]))
    data = json.dumps(content).replace("<", "\\u003c")  # no name may end the script
    return PAGE.format(title=title, data=data, script=viewer_js())
