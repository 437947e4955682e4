"""The only importer of torchvision.

torchvision's compiled operators do not load with every torch; its models and data sets do.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from contextlib import suppress
from functools import cache
from types import ModuleType

import torch

from workbench.errors import ConfigError

EXTENSIONS = ("_C_stable", "_C")  # in release 0.29, and in earlier ones
SCHEMAS = tuple(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms"))


def torchvision() -> ModuleType:
    """Return the torchvision package, imported at the first call.

    With a CPU-only torch, torchvision's compiled extension may not load. The import then fails with `operator
    torchvision::nms does not exist`, because torchvision registers shapes for two undeclared operators. In that case
    this function first declares these operators, without an implementation. Only box detection needs one.

    Raises:
        ConfigError: torchvision is not installed, or does not fit this torch.
    """
    if not repair_torchvision():
        raise ConfigError("this problem needs torchvision, which is not installed: pip install torchvision")
    try:
        return importlib.import_module("torchvision")
    except (ImportError, RuntimeError, AttributeError) as error:
        trouble = f"torchvision cannot be imported with torch {torch.__version__} ({error})"
        raise ConfigError(f"{trouble}: install the release that was made for this torch") from error


def repair_torchvision() -> bool:
    """Declare the operators if torchvision's own do not load. Other libraries can import torchvision then.

    Returns:
        Whether torchvision is installed.
    """
    if "torchvision" in sys.modules:
        return True
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return False
    if not extension_loads(spec.submodule_search_locations[0]):
        declare_operators()
    return True


def extension_loads(folder: str) -> bool:
    """Load torchvision's compiled operators, as its import does. Return whether that succeeded."""
    details = (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES)
    finder = importlib.machinery.FileFinder(folder, details)
    for name in EXTENSIONS:
        spec = finder.find_spec(name)
        if spec is not None and spec.origin is not None:
            with suppress(OSError):
                torch.ops.load_library(spec.origin)
                return True
    return False


@cache
def declare_operators() -> torch.library.Library:
    """Declare the two operators. The declaration lives as long as the returned object, which the cache keeps."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema)
    return library
