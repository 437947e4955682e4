"""Notebooks as HTML pages with figures that work offline: the notebook keeps the data, the page has plotly.js once."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
import plotly.io as pio
from jinja2 import DictLoader
from nbconvert import HTMLExporter
from plotly.offline import get_plotlyjs

from workbench.errors import ConfigError
from workbench.plots.renderer import CONFIG, PLOTLY
from workbench.trace.files.atomic import write_atomic

WIDGET = "application/vnd.jupyter.widget-view+json"

# The usual page of JupyterLab's look without downloads. require.js would also hide Plotly from the figures' scripts.
TEMPLATE = """{% extends 'lab/index.html.j2' %}
{% block html_head_js_requirejs %}{{ resources.workbench_scripts }}{% endblock %}
{% block html_head_js_mathjax %}{% if resources.workbench_mathematics %}{{ super() }}{% endif %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
"""


def export_html(notebook: Path | str, page: Path | str, *, first: Sequence[str] = ()) -> Path:
    """Make one HTML file from an executed notebook; any browser draws its figures, with or without a network.

    Only formulas in the notebook's text load a script from the network. Live widgets are left out.

    Args:
        notebook: an .ipynb file.
        page: the .html file to write, atomically.
        first: tags of cells whose outputs are also shown below the title, without their code, in the order of the tags.

    Returns:
        The page's path.

    Raises:
        ConfigError: the file is missing, or is not a notebook.
    """
    path, page = Path(notebook), Path(page)
    try:
        content = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    except FileNotFoundError:
        raise ConfigError(f"no notebook {path}: give the path of an executed .ipynb file") from None
    except (nbformat.reader.NotJSONError, nbformat.ValidationError) as error:
        raise ConfigError(
            f"{path} is not a notebook ({str(error)[:80]}): give the path of an executed .ipynb file"
        ) from None
    content.cells[1:1] = [_output_of(cell) for tag in first for cell in content.cells if tag in _tags(cell)]
    num_figures = draw_figures(content)
    resources = {
        "metadata": {"name": path.stem},
        "workbench_scripts": f"<script>{get_plotlyjs()}</script>" if num_figures else "",
        "workbench_mathematics": any("$" in cell.source for cell in content.cells if cell.cell_type == "markdown"),
    }
    loaders = [DictLoader({"offline.html.j2": TEMPLATE})]
    exporter = HTMLExporter(extra_loaders=loaders, template_file="offline.html.j2")  # type: ignore[no-untyped-call]
    body, _ = exporter.from_notebook_node(content, resources=resources)
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, body)
    return page


def _tags(cell: Any) -> list[str]:
    return list(cell.metadata.get("tags", []))


def _output_of(cell: Any) -> Any:
    """Return a copy of a cell whose code is not shown."""
    copy = deepcopy(cell)
    copy.metadata["transient"] = {"remove_source": True}
    copy.id = f"{cell.id}-first"
    return copy


def draw_figures(content: Any) -> int:
    """Replace each figure in a notebook's outputs by HTML that calls Plotly, and drop widgets.

    Return the number of figures.
    """
    content.metadata.pop("widgets", None)
    num_figures = 0
    for cell in content.cells:
        if cell.cell_type != "code":
            continue
        cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
        for output in cell.outputs:
            if PLOTLY in output.get("data", {}):
                num_figures += 1
                output.data = {"text/html": figure_division(output.data[PLOTLY], f"figure-{num_figures}")}
    return num_figures


def figure_division(specification: dict[str, Any], name: str) -> str:
    """Return the HTML of one figure; it calls Plotly."""
    height = f"{specification.get('layout', {}).get('height', 450)}px"
    config = {**specification.get("config", {}), "responsive": True, **CONFIG}
    figure = {key: specification[key] for key in ("data", "layout") if key in specification}
    return str(
        pio.to_html(
            figure,
            config=config,
            full_html=False,
            include_plotlyjs=False,
            validate=False,
            div_id=name,
            default_height=height,
        )
    )
