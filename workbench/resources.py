"""Files that come with the package: notebooks, paper cards and tuned learning rates, in a checkout and in an installed wheel.

The environment variable WORKBENCH_SHARE names another folder with `notebooks/` and `papers/` to use instead.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Literal

from workbench.errors import ConfigError
from workbench.naming import unknown

PACKAGE = Path(__file__).resolve().parent
SHARE_VARIABLE = "WORKBENCH_SHARE"
DISTRIBUTION = "sgd-workbench"


def version() -> str:
    """Return the version of the installed distribution."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "not installed (it runs from its folder)"


def shared(kind: Literal["notebooks", "papers", "kernels", "records"]) -> Path:
    """Return the folder of a kind: in WORKBENCH_SHARE, in an installed package, or next to the package in a checkout.

    >>> shared("notebooks").name
    'notebooks'
    """
    own: list[Path] = [Path(os.environ[SHARE_VARIABLE]).resolve() / kind] if os.environ.get(SHARE_VARIABLE) else []
    for folder in (*own, PACKAGE / "_share" / kind, PACKAGE.parent / kind):
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"this installation holds no {kind}: install sgd-workbench from its wheel, or in a checkout with `make install`"
    )


def notebooks() -> tuple[str, ...]:
    """Return the names of the notebooks that come with the package, in reading order."""
    return tuple(sorted(path.stem for path in shared("notebooks").glob("*.ipynb")))


def notebook(name: str) -> Path:
    """Return the file of a notebook by name, with or without `.ipynb`.

    Raises:
        ConfigError: unknown name; the nearest is named.
    """
    known = notebooks()
    stem = name.removesuffix(".ipynb")
    if stem not in known:
        raise unknown("notebook", name, known)
    return shared("notebooks") / f"{stem}.ipynb"


def kernels() -> tuple[Path, ...]:
    """Return the folders of the Jupyter kernels that come with the package."""
    return tuple(sorted(path.parent for path in shared("kernels").glob("*/kernel.json")))
