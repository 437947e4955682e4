"""What IPython shows of an error that the caller can fix."""

from __future__ import annotations

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

CELL = """
import workbench as wb

def train():
    return wb.simulate("synchronous-sgd", wb.problems.digits_mlp(), workers=2, epochs=1, lr=-1.0)

train()
"""


def test_ipython_shows_the_callers_frames_and_the_message() -> None:
    shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
    shell.showtraceback = lambda *_, **__: None  # type: ignore[method-assign]
    result = shell.run_cell(CELL)
    error = result.error_in_exec
    assert error is not None
    lines = "\n".join(error._render_traceback_()).splitlines()
    assert lines[-1].startswith("ConfigError: ")
    assert len(lines) < 10, "\n".join(lines)
    assert not any("/workbench/" in line or "IPython" in line for line in lines)
    assert any("wb.simulate" in line for line in lines) and any("train()" in line for line in lines)


def test_notes_of_an_error_are_shown() -> None:
    from workbench.errors import ConfigError

    error = ConfigError("width=0: give a whole number")
    error.add_note("in mine.yaml")
    assert error._render_traceback_() == ["ConfigError: width=0: give a whole number", "in mine.yaml"]
