"""Check whether the package's folder is intact: another distribution has the same import name."""

from __future__ import annotations

import sys
import warnings
from importlib import metadata
from pathlib import Path

from workbench.resources import DISTRIBUTION, PACKAGE


def foreign_distributions(folder: Path) -> list[str]:
    """Return the other distributions whose record lists a file in the package's folder."""
    found = set[str]()
    for distribution in metadata.distributions(path=[str(folder.parent), *sys.path]):
        name = distribution.metadata["Name"] or ""
        if name.lower().replace("_", "-") == DISTRIBUTION:
            continue
        for file in distribution.files or []:
            if (
                file.parts
                and file.parts[0] == folder.name
                and Path(str(file.locate())).resolve().is_relative_to(folder.resolve())
            ):
                found.add(name)
                break
    return sorted(found)


def mixed(folder: Path = PACKAGE) -> tuple[str, str] | None:
    """Return what is wrong and the fix, if another distribution has written into the folder; otherwise None."""
    others = foreign_distributions(folder)
    if not others:
        return None
    words = f"{', '.join(others)} has also written into {folder}: files of both are mixed, and either may be damaged"
    return (
        words,
        f"pip uninstall {' '.join(others)} {DISTRIBUTION}, then install {DISTRIBUTION} again as README.md says",
    )


def warn_if_mixed() -> None:
    """Warn about mixed files. `import workbench` calls it if the folder holds foreign files."""
    found = mixed()
    if found is not None:
        words, fix = found
        warnings.warn(f"{words}. Fix: {fix}", RuntimeWarning, stacklevel=2)
