"""Run a notebook with papermill, and raise an error for a failed cell, a reached time limit or a dead kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError, WorkbenchError
from workbench.experiments.notebook_catalogue import check_given, kernel_of, parameters_of
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
    """Execute a notebook and write the result to `output`, also after an error.

    No process of the notebook remains, even after a kill. A file next to the output, with the ending `.record.json`,
    says how the notebook ended: see `record.read_record`.

    Args:
        path: the notebook.
        output: the executed notebook.
        parameters: values for the cell with the tag `parameters`.
        timeout_s: limit for the whole notebook, in seconds; None for no limit.
        kernel: name of the kernel; None: that of the notebook, or `python3` if it names none.

    Returns:
        The path of the executed notebook.

    Raises:
        ConfigError: there is no such notebook, parameter or kernel; or a cell would replace a given parameter.
        WorkbenchError: a cell failed, or the time limit was reached; the message names the cell and the executed
            notebook.
    """
    import papermill
    from jupyter_client.kernelspec import NoSuchKernel
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.engines import papermill_engines
    from papermill.exceptions import PapermillExecutionError

    from workbench.experiments.papermill_engine import WorkbenchEngine

    path, output = Path(path), Path(output)
    parameters = dict(parameters or {})
    for name, value in parameters.items():
        if isinstance(value, tuple):  # "1,4" is read as a tuple, which papermill would pass as text
            parameters[name] = list(value)
    _check(path, output, parameters)
    output.parent.mkdir(parents=True, exist_ok=True)
    papermill_engines.register("workbench", WorkbenchEngine)
    where = f"the notebook as far as it ran: {output}"
    try:
        papermill.execute_notebook(
            path,
            output,
            parameters=parameters,
            engine_name="workbench",
            kernel_name=kernel or kernel_of(path)[0],
            language=kernel_of(path)[1],
            progress_bar=False,
            progress="cells",
            total_timeout_s=timeout_s,
        )
    except PapermillExecutionError as error:
        failure = WorkbenchError(f"{path} failed in cell [{error.exec_count}]: {error.ename}: {error.evalue} ({where})")
        failure.add_note(COLOURS.sub("", "\n".join(error.traceback)))
        raise failure from None
    except CellTimeoutError:
        raise WorkbenchError(f"{path} had not ended after {timeout_s:g} s: set timeout_s to more ({where})") from None
    except DeadKernelError:
        raise WorkbenchError(f"{path}: its kernel died (out of memory?) ({where})") from None
    except NoSuchKernel as error:
        raise ConfigError(
            f"{path}: there is no kernel {error.name!r}; `jupyter kernelspec list` shows all kernels"
        ) from None
    return output


def _check(path: Path, output: Path, parameters: dict[str, Any]) -> None:
    """Check the output's name and the parameters.

    Papermill only warns of an unknown parameter, and ignores its value.
    """
    if output.suffix != ".ipynb" or output.is_dir():
        raise ConfigError(
            f"the output {output}: name a file that ends in .ipynb; its page and its record are written next to it"
        )
    known = [parameter.name for parameter in parameters_of(path)]
    for name in parameters:
        if name not in known:
            raise unknown(f"parameter of {path.name}", name, known)
    check_given(path, parameters)


def tagged_text(notebook: Path, tag: str) -> str:
    """Return the plain text of the outputs of all cells with a tag, in an executed notebook."""
    import nbformat

    content = nbformat.read(notebook, as_version=4)  # type: ignore[no-untyped-call]
    tagged = [cell for cell in content.cells if tag in cell.metadata.get("tags", [])]
    outputs = [output for cell in tagged for output in cell.get("outputs", [])]
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return "\n".join(texts).rstrip()
