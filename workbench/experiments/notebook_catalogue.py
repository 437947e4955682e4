"""The package's notebooks: their questions and parameters, and the papers that they are about."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, final

from workbench import resources
from workbench.errors import ConfigError
from workbench.naming import unknown

PYTHON_KERNEL = "python3"
KEY = re.compile(r"\b[a-z]+(?:19|20)\d\d[a-z]+\b")  # key of a paper


@final
@dataclass(frozen=True, slots=True)
class Parameter:
    """A line of a notebook's parameters cell: `name: type = default  # comment`."""

    name: str
    type: str
    default: str
    comment: str


def find_notebook(name: str | Path) -> Path:
    """Return the file of a notebook: your own by its path, or one of the package by its name.

    Raises:
        ConfigError: there is no such notebook; the message names the nearest one.
    """
    if Path(name).suffix == ".ipynb" and Path(name).is_file():
        return Path(name)
    return resources.notebook(str(name))


def parameters_of(path: Path) -> tuple[Parameter, ...]:
    """Return the parameters of a notebook, in its order.

    Raises:
        ConfigError: papermill is missing, the file is not a notebook, or it has two parameters cells.
    """
    cells = _cells(path)
    number = parameters_cell(cells, path)
    if number is None:
        return ()
    from papermill.translators import papermill_translators

    kernel, language = kernel_of(path)
    found = papermill_translators.find_translator(kernel, language).inspect(cells[number])
    return tuple(
        Parameter(item.name, _type(item.inferred_type_name), item.default, item.help) for item in found if item.name
    )


def parameters_cell(cells: Sequence[Any], path: Path) -> int | None:
    """Return the index of the cell with the tag `parameters`; None if there is none.

    Raises:
        ConfigError: there are two. Papermill writes the given values after the first one, and the second one would
            replace them by its defaults.
    """
    tagged = [number for number, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) > 1:
        numbers = " and ".join(str(number + 1) for number in tagged)
        raise ConfigError(
            f"{path}: cells {numbers} have the tag parameters, and the last one would replace the given values by its "
            "own: keep the tag on one cell, with all parameters"
        )
    return tagged[0] if tagged else None


def check_given(path: Path, names: Iterable[str]) -> None:
    """Check that no later cell replaces a given parameter before a cell has read it.

    Raises:
        ConfigError: a cell does; the message has its number.
    """
    cells = _cells(path)
    first = parameters_cell(cells, path)
    if first is None:
        return
    unread = set(names)
    for number, cell in enumerate(cells[first + 1 :], first + 2):
        for statement in _statements(cell):
            read = {node.id for node in ast.walk(statement) if _is_name(node, ast.Load)}
            unread -= read
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            assigned = {node.id for node in targets if isinstance(node, ast.Name)} & unread
            if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None and assigned:
                raise ConfigError(
                    f"{path}: cell {number} assigns {min(assigned)}, so the given value would have no effect: remove "
                    "this assignment, or move it to the cell with the tag parameters"
                )


def _statements(cell: Any) -> list[ast.stmt]:
    """Return the statements of a code cell, without magics; none if it is in another language."""
    if cell.cell_type != "code":
        return []
    lines = ["" if line.lstrip()[:1] in ("%", "!") else line for line in cell.source.splitlines()]
    try:
        return ast.parse("\n".join(lines)).body
    except SyntaxError:
        return []


def _is_name(node: ast.AST, context: type[ast.expr_context]) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, context)


def code_of(path: Path) -> tuple[str, ...]:
    """Return the source of each code cell of a notebook."""
    return tuple(str(cell.source) for cell in _cells(path) if cell.cell_type == "code")


def kernel_of(path: Path) -> tuple[str, str]:
    """Return kernel and language of a notebook. One that names no kernel is taken to be in Python, for `python3`.

    Raises:
        ConfigError: it names no kernel, and there is no kernel `python3`.
    """
    metadata = _read(path).metadata
    spec = metadata.get("kernelspec") or {}
    language = (metadata.get("language_info") or {}).get("name") or spec.get("language") or "python"
    return spec.get("name") or _python_kernel(path), language


def _python_kernel(path: Path) -> str:
    from jupyter_client.kernelspec import find_kernel_specs

    known = find_kernel_specs()
    if PYTHON_KERNEL not in known:
        raise ConfigError(
            f"{path} names no kernel, and there is no kernel {PYTHON_KERNEL}: give kernel= (--kernel), or install one "
            f"with `python -m ipykernel install --user`"
        )
    return PYTHON_KERNEL


def _type(inferred: str) -> str:
    return "" if inferred == "None" else str(inferred)


def _cells(path: Path) -> list[Any]:
    """Return the cells of a notebook; errors as of `_read`."""
    return list(_read(path).cells)


def _read(path: Path) -> Any:
    """Return a notebook.

    Raises:
        ConfigError: papermill is missing, or the file does not exist or is not a notebook.
    """
    try:
        import nbformat
        import papermill  # noqa: F401 - the notebooks extra has both or neither
    except ModuleNotFoundError as error:
        raise ConfigError(f"notebooks need {error.name}: pip install 'sgd-workbench[notebooks]'") from error
    if not path.is_file():
        raise ConfigError(f"there is no notebook {path}")
    try:
        return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    except (ValueError, KeyError, AttributeError, nbformat.ValidationError, nbformat.reader.NotJSONError) as error:
        raise ConfigError(f"{path} is not a notebook ({str(error)[:80]}): give an .ipynb file") from None


def question_of(path: Path) -> str:
    """Return the first line of a notebook, which is its question."""
    cells = _cells(path)
    return str(cells[0].source).partition("\n")[0].lstrip("# ") if cells else ""


def papers_of(path: Path) -> tuple[str, ...]:
    """Return the keys of the papers that a notebook is about: all keys in its text and code."""
    text = "\n".join(cell.source for cell in _cells(path))
    return tuple(dict.fromkeys(key for key in KEY.findall(text) if key in paper_keys()))


def paper_keys() -> tuple[str, ...]:
    """Return the keys of all papers that have a card."""
    return tuple(
        sorted(folder.name for folder in resources.shared("papers").iterdir() if (folder / "card.md").is_file())
    )


def notebooks_about(name: str) -> tuple[Path, ...]:
    """Return the notebooks for a name: the notebook of this name, or the notebooks about the paper with this key.

    Raises:
        ConfigError: there is no such paper or notebook, or no notebook is about the paper; then the message names
            the papers with notebooks.
    """
    if Path(name).suffix == ".ipynb" or name in resources.notebooks():
        return (find_notebook(name),)
    about = {path: papers_of(path) for path in map(resources.notebook, resources.notebooks())}
    if name not in paper_keys():
        raise unknown("paper or notebook", name, (*paper_keys(), *resources.notebooks()))
    found = tuple(path for path, keys in about.items() if name in keys)
    if not found:
        covered = sorted({key for keys in about.values() for key in keys})
        raise ConfigError(
            f"no notebook is about {name} yet (its card: {resources.shared('papers') / name / 'card.md'}); "
            f"there are notebooks about {', '.join(covered) or 'no paper'}"
        )
    return found
