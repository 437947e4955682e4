"""Every method of the package, found by walking it, in the settings in which the laws are to hold.

A new file in `workbench/algorithms` is held to them with its defaults, without being named here.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import workbench.algorithms
from workbench.algorithms import ApplyOrder, LayerwiseSGD, PipeSGD, SynchronousSGD
from workbench.collectives import HalvingDoubling, Linear, Native, Ring, Tree
from workbench.program import Algorithm

COLLECTIVES = (Native(), Ring(), Linear(), Tree(), HalvingDoubling())
SMALL_BUCKET = 200.0  # bytes; cuts the tiny model's six tensors into four buckets

SETTINGS: dict[type[Algorithm], list[Algorithm]] = {
    SynchronousSGD: [SynchronousSGD(collective=collective) for collective in COLLECTIVES],
    LayerwiseSGD: [
        *(LayerwiseSGD(bucket_bytes=size) for size in (0, None)),
        *(LayerwiseSGD(bucket_bytes=SMALL_BUCKET, apply=order) for order in ApplyOrder),
        LayerwiseSGD(bucket_bytes=0, apply=ApplyOrder.ANY, collective=Ring()),
        LayerwiseSGD(bucket_bytes=SMALL_BUCKET, apply=ApplyOrder.BACKWARD, collective=Linear()),
    ],
    PipeSGD: [
        *(PipeSGD(width=width) for width in (1, 2, 3, 4)),
        PipeSGD(width=2, collective=Ring()),
        PipeSGD(width=3, collective=Linear()),
    ],
}


def find_algorithms() -> list[type[Algorithm]]:
    """The methods in `workbench.algorithms`, file by file."""
    found: list[type[Algorithm]] = []
    for module_info in pkgutil.walk_packages(workbench.algorithms.__path__, "workbench.algorithms."):
        module = importlib.import_module(module_info.name)
        for _, item in inspect.getmembers(module, inspect.isclass):
            if issubclass(item, Algorithm) and not inspect.isabstract(item) and item.__module__ == module.__name__:
                found.append(item)
    return found


def variants() -> list[Algorithm]:
    """Each method in each of its settings; with its defaults where there is no entry."""
    return [variant for kind in find_algorithms() for variant in SETTINGS.get(kind, [kind()])]


def name_of(algorithm: Algorithm) -> str:
    """Short, for a test's id: PipeSGD-3-Ring."""
    words = [type(value).__name__ if hasattr(value, "all_reduce") else str(value) for value in algorithm.settings().values()]
    return "-".join([type(algorithm).__name__, *words])
