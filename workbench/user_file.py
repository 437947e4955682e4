"""Objects in the user's own files, named as `file.py:name` on the command line, in sweep files and in Python."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from workbench.errors import ConfigError
from workbench.naming import unknown

TORCHVISION_FIX = "install torchvision from the same place as torch, of the same build (CPU, or the same CUDA)"
_PREFIX = "workbench_user_file_"  # of the names of these modules


def is_in_user_file(name: str) -> bool:
    """Return whether a name has the form `file.py:name`.

    >>> is_in_user_file("mine.py:Mine"), is_in_user_file("pipe-sgd"), is_in_user_file("mine.py")
    (True, False, False)
    """
    file, colon, _ = name.rpartition(":")
    return bool(colon) and file.endswith(".py")


def load(name: str, what: str, fits: Callable[[Any], bool]) -> Any:
    """Return the object that `file.py:name` names.

    The file is executed like a script, once in a process, and can import from its own folder.

    Args:
        name: the path of the file, from the working directory, and a name in it.
        what: the kind of object, for messages, such as "algorithm".
        fits: whether an object of the file can be meant; messages suggest only these.

    Raises:
        ConfigError: there is no such file or name, or the file raises an exception.
    """
    file, _, attribute = name.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(
            f"{what} {name}: there is no file {file}: give its path, from the folder where the command runs"
        )
    module = _module_of(path, file)
    found = vars(module)
    if attribute not in found:
        own = sorted(key for key, value in found.items() if not key.startswith("_") and fits(value))
        raise unknown(f"{what} of {file}", attribute, own)
    return found[attribute]


def is_defined_in_user_file(value: Any) -> bool:
    """Return whether a class or function is defined in a user's file, and not imported there."""
    return str(getattr(value, "__module__", "")).startswith(_PREFIX)


def loaded_modules() -> list[ModuleType]:
    """Return the modules of the user's files that this process has executed. Other processes cannot import them."""
    return [module for name, module in list(sys.modules.items()) if name.startswith(_PREFIX)]


def _module_of(path: Path, file: str) -> ModuleType:
    """Execute a file as a module, unless this process has done so."""
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]  # `a-b.py` and `a_b.py` are two modules
    name = _PREFIX + re.sub(r"\W", "_", str(path)) + f"_{digest}"
    known = sys.modules.get(name)
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        fix = TORCHVISION_FIX if "torchvision::" in str(error) else f"fix the file; `python {file}` shows where"
        raise ConfigError(f"{file} cannot be run ({type(error).__name__}: {error}): {fix}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module
