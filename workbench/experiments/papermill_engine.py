"""A papermill engine for notebooks that start clusters: `papermill --engine workbench in.ipynb out.ipynb`.

When papermill's own engine is terminated, it leaves the notebook's processes running. It adds five megabytes to the
notebook for every live figure. When the time limit is reached, it marks all cells as completed. This engine avoids
all three problems.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import zmq
from nbclient.exceptions import CellTimeoutError
from nbformat import NotebookNode
from papermill.engines import NBClientEngine, NotebookExecutionManager
from traitlets.config import Config

from workbench.clusters.supervision.reaper import end_marked, reaped
from workbench.clusters.supervision.sigterm import terminated_as_exit
from workbench.experiments.execution_record import begin_record, end_record
from workbench.machine import environment
from workbench.progress import progress_line


@final
class WorkbenchEngine(NBClientEngine):  # type: ignore[misc] # papermill ships no types
    """Runs a notebook, and ends its processes even if it fails, reaches its time limit, is terminated or is killed.

    A record of how the notebook ended is written next to it (see `record`).
    """

    @classmethod
    def execute_managed_notebook(cls, nb_man: NotebookExecutionManager, kernel_name: str, **options: Any) -> None:
        """Execute a notebook. Papermill calls this.

        Args:
            nb_man: papermill's manager of the notebook.
            kernel_name: name of the kernel.
            options: those of `NBClientEngine`, nbclient's traits, and `total_timeout_s`, the limit for the whole
                notebook in seconds (`execution_timeout` is the limit for each cell). With `progress="cells"` the
                engine shows a progress line, on a terminal and in logs; papermill's own is for terminals only.
        """
        if options.pop("progress", None):
            nb_man.pbar = progress_line(len(nb_man.nb.cells), "cells")
        mark = f"WORKBENCH_NOTEBOOK_{secrets.token_hex(8).upper()}"
        total_timeout_s = options.pop("total_timeout_s", None)
        if total_timeout_s is not None:
            deadline = time.monotonic() + total_timeout_s
            options["timeout_func"] = lambda cell: max(1, math.ceil(deadline - time.monotonic()))
        options.setdefault("store_widget_state", False)  # each live figure would add its whole JavaScript to the file
        options["config"] = _encrypted(options.get("config"))
        variables = {"IPP_NONINTERACTIVE": "1", mark: "1"}
        # A kernel that is asked to shut down while it computes prints a traceback of its closed sockets. So kill it.
        ended = terminated_as_exit(lambda: end_marked(mark))
        with ended, _recorded(nb_man, kernel_name), reaped(mark), environment(variables):
            try:
                super().execute_managed_notebook(nb_man, kernel_name, **options)
            except BaseException as error:
                if isinstance(error, CellTimeoutError) and total_timeout_s is not None:
                    _mark_failed(
                        nb_man, TimeoutError(f"the notebook had not ended after {total_timeout_s:g} s, in this cell")
                    )
                else:
                    _mark_failed(nb_man, error)
                raise


def _encrypted(config: Config | None) -> Config:
    """Add encryption of the kernel's messages, if pyzmq and the kernelspec support it.

    The caller's settings have priority.
    """
    found = Config(KernelManager={"transport_encryption": "auto"}) if zmq.has("curve") else Config()
    found.merge(config or {})
    return found


@contextmanager
def _recorded(nb_man: NotebookExecutionManager, kernel_name: str) -> Iterator[None]:
    """Write the record next to the notebook, if the notebook is a file on this machine."""
    output = str(nb_man.output_path or "-")
    if output == "-" or "://" in output:
        yield
        return
    about = nb_man.nb.metadata.papermill
    record = begin_record(
        Path(output), str(about.get("input_path") or ""), kernel_name, dict(about.get("parameters") or {})
    )
    try:
        yield
    except BaseException as error:
        end_record(Path(output), record, error)
        raise
    end_record(Path(output), record, _failure(nb_man))


def _failure(nb_man: NotebookExecutionManager) -> BaseException | None:
    """Return the exception of a cell. Papermill raises the exception after its engine has returned."""
    for cell in nb_man.nb.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error" and (output.ename, output.evalue) not in (
                ("SystemExit", ""),
                ("SystemExit", "0"),
            ):
                return _CellFailed(output.ename, output.evalue)
    return None


@final
class _CellFailed(Exception):
    """The exception of a cell."""

    def __init__(self, ename: str, evalue: str) -> None:
        super().__init__(evalue)
        self.ename, self.evalue = ename, evalue


def _mark_failed(nb_man: NotebookExecutionManager, error: BaseException) -> None:
    """Write the error into the last executed cell. Papermill does this only for exceptions of a cell."""
    begun = [cell for cell in nb_man.nb.cells if cell.metadata.papermill.get("start_time")]
    if not begun:
        nb_man.nb.metadata.papermill["exception"] = True
        return
    cell = begun[-1]
    nb_man.cell_exception(cell)
    if cell.cell_type == "code":
        lines = str(error).splitlines() or [""]
        output = {"output_type": "error", "ename": type(error).__name__, "evalue": lines[0], "traceback": lines}
        cell.outputs.append(NotebookNode(output))  # type: ignore[no-untyped-call] # nbformat's annotations are partial
