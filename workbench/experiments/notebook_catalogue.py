"""The package's notebooks: their questions and parameters, and the papers that they are about."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from workbench import resources
from workbench.errors import ConfigError
from workbench.naming import unknown

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
        ConfigError: papermill is missing, or the file is not a notebook.
    """
    cells = _cells(path)
    import papermill

    found = papermill.inspect_notebook(path) if cells else {}
    return tuple(Parameter(name, _type(item), item["default"], item["help"]) for name, item in found.items())


def _type(item: dict[str, Any]) -> str:
    return "" if item["inferred_type_name"] == "None" else str(item["inferred_type_name"])


def _cells(path: Path) -> list[Any]:
    """Return the cells of a notebook.

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
        return list(nbformat.read(path, as_version=4).cells)  # type: ignore[no-untyped-call]
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
