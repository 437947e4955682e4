"""Pause, resume and stop buttons of a live view. They answer while the kernel executes a cell."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator
from typing import Any, final

import ipywidgets

Action = Callable[[], Any]


@final
class RunButtons:
    """A button that pauses and resumes, and one that stops. An error appears next to them in one line.

    Args:
        on_stop: called when Stop is pressed; None for no such button.
        on_pause, on_resume: called when the other button is pressed; if one is None, there is no such button.
        on_click: called after each of these calls.
    """

    def __init__(
        self,
        on_stop: Action | None,
        on_pause: Action | None = None,
        on_resume: Action | None = None,
        *,
        on_click: Action | None = None,
    ) -> None:
        self._on_click = on_click
        self._actions = {"stop": on_stop, "pause": on_pause, "resume": on_resume}
        self._active = True
        self._paused = False
        self._asked = ""
        self.stop = ipywidgets.Button(description="Stop", icon="stop", tooltip="End training after the step that runs")
        self.pause = ipywidgets.Button()
        self._error = ipywidgets.HTML()
        self.stop.disabled = on_stop is None
        self.pause.disabled = on_pause is None or on_resume is None
        self.stop.on_click(lambda _: self._click("stop"))
        self.pause.on_click(lambda _: self._click("resume" if self._paused else "pause"))
        self._name_pause()
        shown = [button for button in (self.pause, self.stop) if not button.disabled]
        self.widget = ipywidgets.HBox([*shown, self._error])

    def show(self, paused: bool, active: bool = True) -> None:
        """Label the buttons by their next action, and disable them if the run is not `active`."""
        if active != self._active:
            self._active = active
            self._asked = ""
            self.stop.description = "Stop"
        self.stop.disabled = not active or self._asked == "stop"
        self.pause.disabled = not active
        if paused != self._paused:
            self._paused, self._asked = paused, "stop" if self._asked == "stop" else ""
        if self._asked not in ("pause", "resume"):
            self._name_pause()

    def _name_pause(self) -> None:
        self.pause.description, self.pause.icon = ("Resume", "play") if self._paused else ("Pause", "pause")
        self.pause.tooltip = "Continue with the next step" if self._paused else "Pause all ranks after the current step"

    def _click(self, what: str) -> None:
        button = self.stop if what == "stop" else self.pause
        self._error.value = ""
        self._asked = what
        button.description = {"stop": "Stopping", "pause": "Pausing", "resume": "Resuming"}[what]
        if what == "stop":
            button.disabled = True
        action = self._actions[what]
        assert action is not None
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a button has no caller that could handle it
            self._asked = ""
            button.disabled = False
            button.description = "Stop"
            self._name_pause()
            self._error.value = error_line(error)
        if self._on_click is not None:
            self._on_click()


def error_line(error: BaseException) -> str:
    """Format an error as one line of HTML."""
    first = str(error).split("\n", 1)[0] or "no message"
    return f'<span style="color: #b00020"><b>{html.escape(type(error).__name__)}:</b> {html.escape(first)}</span>'


def answer_while_busy(widget: Any) -> None:
    """Let user actions on a widget, or on a widget inside it, reach Python while a cell runs.

    JupyterLab sends them over a subshell, a kernel thread next to the one that runs cells (JEP 91). From version 7.4
    on, ipykernel sends them back to the thread that drew the widget last, which is busy with the cell; this function
    undoes that. Kernels without subshells answer when they are idle.
    """
    for part in parts_of(widget):
        if hasattr(part.comm, "_reply_subshell_for"):
            part.comm._reply_subshell_for = lambda _, asked_over: asked_over


def without_null_tooltips(widget: Any) -> None:
    """Give an empty tooltip to a widget, and to each one inside it, that has none: ipywidgets would write "null"."""
    for part in parts_of(widget):
        if getattr(part, "tooltip", "") is None:
            part.tooltip = ""


def parts_of(widget: Any) -> Iterator[Any]:
    """Yield a widget and all widgets inside it."""
    yield widget
    for child in getattr(widget, "children", ()):
        yield from parts_of(child)
