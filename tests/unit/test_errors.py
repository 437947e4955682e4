"""What IPython shows of an error that the caller can fix."""

from __future__ import annotations

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import workbench as wb
from workbench.errors import WorkbenchError

CELL = """
import workbench as wb

def train():
    return wb.simulate("synchronous-sgd", wb.problems.digits_mlp(), workers=2, epochs=1, lr=-1.0)

train()
"""


OWN_FUNCTION = """
import torch
import workbench as wb

def my_loss(output, target):
    raise KeyError("no such class")

task = wb.Problem(model=lambda: torch.nn.Linear(3, 1), loss=my_loss, train=(torch.zeros(8, 3), torch.zeros(8, 1)))
wb.simulate(wb.SynchronousSGD(), task, workers=2, steps=1)
"""


def error_of(cell: str) -> WorkbenchError:
    shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
    shell.showtraceback = lambda *_, **__: None
    error = shell.run_cell(cell).error_in_exec
    assert isinstance(error, WorkbenchError)
    return error


def test_ipython_shows_the_callers_frames_and_the_message() -> None:
    lines = "\n".join(error_of(CELL)._render_traceback_()).splitlines()
    assert lines[-1].startswith("ConfigError: ")
    assert len(lines) < 10, "\n".join(lines)
    assert not any("/workbench/" in line or "IPython" in line for line in lines)
    assert any("wb.simulate" in line for line in lines) and any("train()" in line for line in lines)


def test_the_frames_of_a_function_that_failed_in_the_package_are_shown() -> None:
    lines = "\n".join(error_of(OWN_FUNCTION)._render_traceback_()).splitlines()
    assert any("in my_loss" in line for line in lines), "\n".join(lines)
    assert "KeyError: 'no such class'" in lines
    assert len(lines) < 20, "\n".join(lines)


def test_outside_a_cell_the_whole_traceback_is_shown() -> None:
    """A rank's error is read there, and its traceback is sent to the notebook."""
    try:
        wb.simulate(wb.SynchronousSGD(), wb.problems.digits_mlp(), workers=2, epochs=1, lr=-1.0)
    except WorkbenchError as caught:
        caught.add_note("in mine.yaml")
        lines = "\n".join(caught._render_traceback_()).splitlines()
    assert any("simulate.py" in line for line in lines)
    assert lines[-1] == "in mine.yaml"
