"""Numbers to Plotly figures, live views for JupyterLab, and HTML pages with figures offline.

Most modules are one kind of figure each: `lines`, `steps`, `overlap`, `studies`, `dots`, `limits`, `prediction`,
`fronts`, `panels`, `parallel_axes`, `graphs`. All use `style`, and `line_names` writes names at the ends of lines;
`plotly_js` is the browser's library. Separate folders are `gantt` (the timeline), `trace_viewer` (the interactive one)
and `live` (figures that grow while a run trains). `renderer` says how a notebook keeps figures; `html`, `pictures` and
`for_nbconvert` write pages and images. `comparison` is a table of runs, and `differences` the settings in which they
differ. `labextension/` gives finished figures the colours of a dark
theme in JupyterLab.

Imports `calibration`, `analysis` and what lies below. Used by `clusters` (live views), `papers` and layers above.
Begin with `lines`. Names are imported at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from workbench.errors import ConfigError

if TYPE_CHECKING:
    from workbench.plots.dots import dot_plot
    from workbench.plots.gantt.figures import timeline, timelines
    from workbench.plots.graphs import topology
    from workbench.plots.html import export_html
    from workbench.plots.limits import compare_with_limits
    from workbench.plots.lines import convergence, curves
    from workbench.plots.live.curves import LiveCurves, watch
    from workbench.plots.live.timeline import LiveTimeline
    from workbench.plots.overlap import overlap_bars
    from workbench.plots.panels import curves_in_panels, time_to_target
    from workbench.plots.parallel_axes import parallel
    from workbench.plots.prediction import compare_with_prediction
    from workbench.plots.renderer import use_notebook_renderer
    from workbench.plots.steps import per_step
    from workbench.plots.studies import curves_of, heat_map, scaling, stacked_bars, step_bars
    from workbench.plots.trace_viewer.difference import step_difference
    from workbench.plots.trace_viewer.page import TraceViewer

_HOMES = {  # no module has the name of a function: importing it would hide the function
    "LiveCurves": "live.curves",
    "LiveTimeline": "live.timeline",
    "TraceViewer": "trace_viewer.page",
    "compare_with_limits": "limits",
    "compare_with_prediction": "prediction",
    "convergence": "lines",
    "curves": "lines",
    "curves_in_panels": "panels",
    "curves_of": "studies",
    "dot_plot": "dots",
    "export_html": "html",
    "heat_map": "studies",
    "overlap_bars": "overlap",
    "parallel": "parallel_axes",
    "per_step": "steps",
    "scaling": "studies",
    "stacked_bars": "studies",
    "step_bars": "studies",
    "step_difference": "trace_viewer.difference",
    "time_to_target": "panels",
    "timeline": "gantt.figures",
    "timelines": "gantt.figures",
    "topology": "graphs",
    "use_notebook_renderer": "renderer",
    "watch": "live.curves",
}

__all__ = [
    "LiveCurves",
    "LiveTimeline",
    "TraceViewer",
    "compare_with_limits",
    "compare_with_prediction",
    "convergence",
    "curves",
    "curves_in_panels",
    "curves_of",
    "dot_plot",
    "export_html",
    "heat_map",
    "overlap_bars",
    "parallel",
    "per_step",
    "scaling",
    "stacked_bars",
    "step_bars",
    "step_difference",
    "time_to_target",
    "timeline",
    "timelines",
    "topology",
    "use_notebook_renderer",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "workbench":
            raise
        raise ConfigError(f"figures need {error.name}: pip install 'sgd-workbench[notebooks]'") from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
