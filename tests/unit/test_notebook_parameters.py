"""A notebook uses the values that it is given, or is refused: two parameters cells, later assignments, no kernel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import pytest

from workbench import resources
from workbench.errors import ConfigError
from workbench.experiments import notebook_catalogue
from workbench.experiments.grid import read_grid
from workbench.experiments.notebook_catalogue import check_given, kernel_of, parameters_of
from workbench.experiments.notebooks import run_notebook

KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def written(folder: Path, cells: Sequence[tuple[str, bool]], **metadata: Any) -> Path:
    """Write a notebook of (code, tagged) cells, after a cell of text."""
    made = [nbformat.v4.new_markdown_cell("# Which?")]  # type: ignore[no-untyped-call]
    for code, tagged in cells:
        tags = {"tags": ["parameters"]} if tagged else {}
        made.append(nbformat.v4.new_code_cell(code, metadata=tags))  # type: ignore[no-untyped-call]
    content = nbformat.v4.new_notebook(cells=made, metadata=metadata)  # type: ignore[no-untyped-call]
    nbformat.write(content, folder / "mine.ipynb")  # type: ignore[no-untyped-call]
    return folder / "mine.ipynb"


def test_two_parameters_cells_are_refused_by_their_numbers(tmp_path: Path) -> None:
    path = written(tmp_path, [("lr = 0.1", True), ("print(lr)", False), ("lr = 0.2", True)], kernelspec=KERNEL)
    for refused in (
        lambda: run_notebook(path, tmp_path / "out.ipynb", {"lr": 0.5}),
        lambda: read_grid({"name": "mine", "notebook": str(path), "axes": {"lr": [0.5, 1.0]}}),
    ):
        with pytest.raises(ConfigError, match=r"mine\.ipynb: cells 2 and 4 have the tag parameters"):
            refused()


@pytest.mark.parametrize(
    ("later", "refused"),
    [
        (["lr = 0.2"], True),
        (["lr: float = 0.2"], True),
        (["%matplotlib inline\nx = 1\nlr = 2 * x"], True),
        (["print(lr)", "lr = 0.2"], False),  # read before
        (["lr = float(lr)"], False),
        (["if True:\n    lr = 0.2"], False),  # not to be seen cheaply
        (["other = 0.2", "this is no python", "lr += 1"], False),
    ],
)
def test_a_later_cell_that_replaces_a_given_value_is_refused(later: list[str], refused: bool, tmp_path: Path) -> None:
    path = written(tmp_path, [("lr = 0.1\nseed = 0", True), *((code, False) for code in later)], kernelspec=KERNEL)
    check_given(path, ["seed"])
    if not refused:
        check_given(path, ["lr"])
        return
    with pytest.raises(ConfigError, match="cell 3 assigns lr"):
        check_given(path, ["lr"])
    with pytest.raises(ConfigError, match="cell 3 assigns lr"):
        read_grid({"name": "mine", "notebook": str(path), "axes": {"lr": [0.5, 1.0]}})


def test_the_packages_notebooks_use_their_parameters() -> None:
    for name in resources.notebooks():
        path = resources.notebook(name)
        check_given(path, [parameter.name for parameter in parameters_of(path)])


def test_a_changed_notebook_is_another_cell(tmp_path: Path) -> None:
    def key(code: str) -> str:
        path = written(tmp_path, [("lr = 0.1", True), (code, False)], kernelspec=KERNEL)
        (cell,) = read_grid({"name": "mine", "notebook": str(path), "axes": {"lr": [0.5]}}).cells
        return cell.key

    assert key("print(lr)") == key("print(lr)") != key("print(2 * lr)")


def test_a_changed_file_is_another_cell(tmp_path: Path) -> None:
    def key(factor: int) -> str:
        file = tmp_path / "own.py"
        text = (
            "from workbench.problems import digits_softmax\n\ndef made(size: int = {}):\n    return digits_softmax()\n"
        )
        file.write_text(text.format(factor))
        values = {"problem": f"{file}:made", "algorithm": "synchronous-sgd", "steps": 2}
        (cell,) = read_grid({"name": "mine", "include": [values]}).cells
        return cell.key

    assert key(1) == key(1) != key(2)


@pytest.mark.notebooks
def test_a_notebook_without_a_kernel_runs_with_python(tmp_path: Path) -> None:
    path = written(tmp_path, [("x = 1", True), ("print(x)", False)])
    assert [parameter.name for parameter in parameters_of(path)] == ["x"]
    executed = run_notebook(path, tmp_path / "out.ipynb", {"x": 7})
    assert "7" in executed.read_text()


def test_without_any_kernel_one_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, [("x = 1", True)])
    monkeypatch.setattr(notebook_catalogue, "PYTHON_KERNEL", "none-of-these")
    with pytest.raises(ConfigError, match="names no kernel"):
        kernel_of(path)
