"""The controls of a live figure: its x axis, logarithmic axes, smoothing, and what the right panel shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import ipywidgets
import plotly.graph_objects as go

from workbench.plots.lines import SMOOTH, X_TITLES, Y_TITLES, convergence, measured_axes, offered_axes
from workbench.trace.run import Run
from workbench.trace.views import XAxis

SMOOTHING = {"none": 0.0, "2 %": SMOOTH, "10 %": 0.1, "30 %": 0.3}  # of a curve


@final
class AxisControls:
    """Controls of `lines.convergence`. Show `widget`, and draw with `figure`.

    Args:
        x: the first x axis.
        on_change: called after a change by the user.
    """

    def __init__(self, x: XAxis, on_change: Callable[[], Any]) -> None:
        self._on_change = on_change
        self._first = x
        self.x_axis = ipywidgets.ToggleButtons(style={"button_width": "76px"})
        self._set_x_options(list(X_TITLES))
        self.log_x = _switch("log x", "Logarithmic x axes")
        self.log_y = _switch("log loss", "Logarithmic axes of the losses")
        self.smooth = ipywidgets.Dropdown(
            options=SMOOTHING,
            value=SMOOTH,
            description="smoothing",
            tooltip="Share of a curve over which the minibatch loss is averaged",
            layout={"width": "160px"},
            style={"description_width": "70px"},
        )
        # shown if the problem has metrics of its own
        self.right = ipywidgets.Dropdown(tooltip="The right panel", layout={"width": "150px", "display": "none"})
        self._observed = (self.x_axis, self.log_x, self.log_y, self.smooth, self.right)
        for control in self._observed:
            control.observe(self._changed, names="value")
        self.widget = ipywidgets.HBox(self._observed, layout={"flex_flow": "row wrap"})

    @property
    def x(self) -> XAxis:
        """The present x axis."""
        axis: XAxis = self.x_axis.value
        return axis

    @property
    def choice(self) -> tuple[Any, ...]:
        """The present values of the controls."""
        return tuple(control.value for control in self._observed)

    def figure(self, runs: Sequence[Run], **more: Any) -> go.Figure:
        """Return the curves of the runs with the present choice; it is first limited to what the runs have."""
        self._offer(runs)
        how = {"smooth": self.smooth.value, "log_x": self.log_x.value, "log_y": self.log_y.value}
        return convergence(runs, self.x, right=self.right.value, **how, **more)

    def _changed(self, _: Any) -> None:
        self._on_change()

    def _offer(self, runs: Sequence[Run]) -> None:
        """Offer the axes that the runs have, and keep what was chosen."""
        for control in (self.x_axis, self.right):
            control.unobserve(self._changed, names="value")  # the caller draws
        try:
            if (offered := offered_axes(runs)) != list(self.x_axis.options):
                self._set_x_options(offered)
            axes, before = measured_axes(runs), self.right.options
            named = tuple((Y_TITLES.get(name, name), name) for name in axes)
            if named != before:
                chosen = self.right.value if before and self.right.value != before[0][1] else axes[0]
                self.right.options = named
                self.right.value = chosen if chosen in axes else axes[0]
                self.right.layout.display = None if any(name not in Y_TITLES for name in axes) else "none"
        finally:
            for control in (self.x_axis, self.right):
                control.observe(self._changed, names="value")

    def _set_x_options(self, names: Sequence[XAxis]) -> None:
        chosen = self.x_axis.value or self._first
        self.x_axis.tooltips = [X_TITLES[name] for name in names]
        self.x_axis.options = names
        self.x_axis.value = chosen if chosen in names else "steps"


def _switch(text: str, tooltip: str) -> Any:
    return ipywidgets.ToggleButton(description=text, tooltip=tooltip, layout={"width": "76px"})
