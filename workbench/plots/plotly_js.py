"""plotly.js, the library that draws live figures in a browser, as text.

It is the basic bundle, with lines and bars: a browser needs 0.1 s of a core to load it, and 0.9 s for all of plotly.js.
JupyterLab serves the file as part of an extension; `lab/build.py` writes it.
"""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).parent / "labextension" / "static" / "plotly-basic.js"


def plotly_js() -> str:
    """Return the text of a JavaScript module whose default is plotly.js."""
    return PATH.read_text(encoding="utf-8")
