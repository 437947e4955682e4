"""plotly.js, the library that draws figures in a browser, as text."""

from __future__ import annotations

from importlib import resources
from importlib.metadata import version


def plotly_js() -> str:
    """Return the text of plotly.js."""
    return resources.files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")


def plotly_js_version() -> str:
    """Return the version of the package that holds it."""
    return version("plotly")
