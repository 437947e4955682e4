"""Runs a notebook from start to end, as papermill does, with an honest outcome."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError, WorkbenchError
from workbench.experiments.catalogue import parameters_of
from workbench.naming import unknown

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def run_notebook(
    path: str | Path,
    output: str | Path,
    parameters: dict[str, Any] | None = None,
    *,
    timeout_s: float | None = None,
    kernel: str | None = None,
) -> Path:
    """Execute a notebook into `output`, which is written whatever happens. No process is left behind, even if this one is killed.

    Beside it, in a file that ends in `.record.json`, is how it went: see `record.read_record`.

    Args:
        parameters: values for its cell tagged `parameters`.
        timeout_s: how long the whole notebook may take; None for as long as it likes.
        kernel: name of the kernel; None for the one the notebook names.

    Returns:
        The path of the executed notebook.

    Raises:
        ConfigError: no such notebook, parameter or kernel.
        WorkbenchError: a cell failed, or the time was up; says which, and where the notebook is.
    """
    import papermill
    from jupyter_client.kernelspec import NoSuchKernel
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.engines import papermill_engines
    from papermill.exceptions import PapermillExecutionError

    from workbench.experiments.papermill_engine import WorkbenchEngine

    path, output = Path(path), Path(output)
    parameters = {name: list(value) if isinstance(value, tuple) else value for name, value in (parameters or {}).items()}
    _check(path, output, parameters)  # a tuple, as "1,4" is read, papermill would hand over as text
    output.parent.mkdir(parents=True, exist_ok=True)
    papermill_engines.register("workbench", WorkbenchEngine)
    where = f"the notebook as far as it ran: {output}"
    try:
        papermill.execute_notebook(
            path,
            output,
            parameters=parameters,
            engine_name="workbench",
            kernel_name=kernel,
            progress_bar=sys.stderr.isatty(),
            total_timeout_s=timeout_s,
        )
    except PapermillExecutionError as error:
        failure = WorkbenchError(f"{path} failed in cell [{error.exec_count}]: {error.ename}: {error.evalue} ({where})")
        failure.add_note(COLOURS.sub("", "\n".join(error.traceback)))
        raise failure from None
    except CellTimeoutError:
        raise WorkbenchError(f"{path} had not ended after {timeout_s:g} s: give it more with timeout_s ({where})") from None
    except DeadKernelError:
        raise WorkbenchError(f"{path}: its kernel died (out of memory?) ({where})") from None
    except NoSuchKernel as error:
        raise ConfigError(f"{path}: there is no kernel {error.name!r}; `jupyter kernelspec list` shows those there are") from None
    return output


def _check(path: Path, output: Path, parameters: dict[str, Any]) -> None:
    """Papermill only warns of a parameter that the notebook does not have, and runs it with other values than asked for."""
    if output.suffix != ".ipynb" or output.is_dir():
        raise ConfigError(f"the output {output}: name a file that ends in .ipynb; its page and its record are put beside it")
    known = [parameter.name for parameter in parameters_of(path)]
    for name in parameters:
        if name not in known:
            raise unknown(f"parameter of {path.name}", name, known)


def tagged_text(notebook: Path, tag: str) -> str:
    """What the cells of an executed notebook that carry a tag show, as plain text."""
    import nbformat

    content = nbformat.read(notebook, as_version=4)  # type: ignore[no-untyped-call]
    outputs = [output for cell in content.cells if tag in cell.metadata.get("tags", []) for output in cell.get("outputs", [])]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs).rstrip()
