"""A papermill engine for notebooks that start clusters: `papermill --engine workbench in.ipynb out.ipynb`.

Papermill by itself leaves a notebook's processes behind when it is terminated, saves five megabytes with every live
figure, and marks each cell of a notebook that ran out of time as completed. This engine does none of it.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import tempfile
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

from workbench.clusters.supervision.reaper import end_marked, start_warden
from workbench.experiments.record import begin_record, end_record
from workbench.experiments.sigterm import terminated_as_exit


@final
class WorkbenchEngine(NBClientEngine):  # type: ignore[misc] # papermill ships no types
    """Runs a notebook, and ends whatever it started when it ends, fails, runs out of time, is terminated or is killed.

    A record of how it ended is put beside the notebook (see `record`).
    """

    @classmethod
    def execute_managed_notebook(cls, nb_man: NotebookExecutionManager, kernel_name: str, **options: Any) -> None:
        """Execute; called by papermill.

        Args:
            options: those of `NBClientEngine`, nbclient's traits, and `total_timeout_s`: how long the whole notebook may take
                (`execution_timeout` is each cell's).
        """
        mark = f"WORKBENCH_NOTEBOOK_{secrets.token_hex(8).upper()}"
        total_timeout_s = options.pop("total_timeout_s", None)
        if total_timeout_s is not None:
            deadline = time.monotonic() + total_timeout_s
            options["timeout_func"] = lambda cell: max(1, math.ceil(deadline - time.monotonic()))
        options.setdefault("store_widget_state", False)  # each live figure would add its whole JavaScript to the file
        options["config"] = _encrypted(options.get("config"))
        variables = {"IPP_NONINTERACTIVE": "1", mark: "1"}
        # A kernel that computes and is asked to shut down prints a traceback of its closed sockets: it is ended before it is asked.
        ended = terminated_as_exit(lambda: end_marked(mark))
        with ended, _recorded(nb_man, kernel_name), _warded(mark), _environment(variables):
            try:
                super().execute_managed_notebook(nb_man, kernel_name, **options)
            except BaseException as error:
                if isinstance(error, CellTimeoutError) and total_timeout_s is not None:
                    _mark_failed(nb_man, TimeoutError(f"the notebook had not ended after {total_timeout_s:g} s, in this cell"))
                else:
                    _mark_failed(nb_man, error)
                raise


def _encrypted(config: Config | None) -> Config:
    """With words to and from the kernel encrypted, where pyzmq and the kernel's specification can; what the caller has set stands."""
    found = Config(KernelManager={"transport_encryption": "auto"}) if zmq.has("curve") else Config()
    found.merge(config or {})
    return found


@contextmanager
def _recorded(nb_man: NotebookExecutionManager, kernel_name: str) -> Iterator[None]:
    """The record beside the notebook, if that goes to a file of this machine."""
    output = str(nb_man.output_path or "-")
    if output == "-" or "://" in output:
        yield
        return
    about = nb_man.nb.metadata.papermill
    record = begin_record(Path(output), str(about.get("input_path") or ""), kernel_name, dict(about.get("parameters") or {}))
    try:
        yield
    except BaseException as error:
        end_record(Path(output), record, error)
        raise
    end_record(Path(output), record, _failure(nb_man))


def _failure(nb_man: NotebookExecutionManager) -> BaseException | None:
    """The exception of a cell, which papermill raises after its engine has returned."""
    for cell in nb_man.nb.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error" and (output.ename, output.evalue) not in (("SystemExit", ""), ("SystemExit", "0")):
                return _CellFailed(output.ename, output.evalue)
    return None


@final
class _CellFailed(Exception):
    """What a cell raised."""

    def __init__(self, ename: str, evalue: str) -> None:
        super().__init__(evalue)
        self.ename, self.evalue = ename, evalue


@contextmanager
def _warded(mark: str) -> Iterator[None]:
    """Ends what is marked when it leaves, and when this process is killed."""
    scratch = tempfile.mkdtemp(prefix="workbench-notebook-")
    warden = start_warden(mark, scratch)
    try:
        yield
    finally:
        end_marked(mark)
        warden.kill()
        warden.wait()
        shutil.rmtree(scratch, ignore_errors=True)


def _mark_failed(nb_man: NotebookExecutionManager, error: BaseException) -> None:
    """Say in the notebook that it did not end, and where: papermill does so only for an exception raised by the cell."""
    begun = [cell for cell in nb_man.nb.cells if cell.metadata.papermill.get("start_time")]
    if not begun:
        nb_man.nb.metadata.papermill["exception"] = True
        return
    cell = begun[-1]
    nb_man.cell_exception(cell)
    if cell.cell_type == "code":
        words = str(error).splitlines() or [""]
        told = {"output_type": "error", "ename": type(error).__name__, "evalue": words[0], "traceback": words}
        cell.outputs.append(NotebookNode(told))  # type: ignore[no-untyped-call] # nbformat's annotations are partial


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Those variables in the environment, which the kernel inherits."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
