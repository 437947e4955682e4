"""Every method of the package, found by walking it, in the settings in which the laws are to hold.

A new file in `workbench/algorithms` is held to them with its defaults, without being named here.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import workbench.algorithms
from workbench.algorithms import (
    AdaptiveDelaySGD,
    ApplyOrder,
    Constant,
    DeAR,
    DiLoCo,
    FirstSteps,
    LayerwiseSGD,
    LocalSGD,
    NoCommunication,
    PartialAllReduce,
    PipeSGD,
    SendOrder,
    SerialSGD,
    StaleSGD,
    SynchronousSGD,
    Uniform,
)
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
        LayerwiseSGD(bucket_bytes=SMALL_BUCKET, lanes=2),
        LayerwiseSGD(bucket_bytes=SMALL_BUCKET, lanes=2, collective=Linear()),
        LayerwiseSGD(bucket_bytes=SMALL_BUCKET, order=SendOrder.PRIORITY, collective=Ring()),
    ],
    PipeSGD: [
        *(PipeSGD(width=width) for width in (1, 2, 3, 4)),
        PipeSGD(width=2, collective=Ring()),
        PipeSGD(width=3, collective=Linear()),
        PipeSGD(width=3, warmup_steps=2),
        PipeSGD(width=3, first=FirstSteps.DUPLICATE),
    ],
    AdaptiveDelaySGD: [AdaptiveDelaySGD(max_delay=1, adapt_every=2), AdaptiveDelaySGD(max_delay=3, adapt_every=2, collective=Ring())],
    DeAR: [
        *(DeAR(bucket_bytes=size) for size in (0, SMALL_BUCKET, None)),
        DeAR(bucket_bytes=SMALL_BUCKET, collective=Native()),
    ],
    PartialAllReduce: [PartialAllReduce(quorum="all"), PartialAllReduce(quorum="solo"), PartialAllReduce(collective=Linear())],
    LocalSGD: [LocalSGD(every=1), LocalSGD(every=3, after=2), LocalSGD(every=2, collective=Ring())],
    DiLoCo: [
        DiLoCo(every=1, outer_lr=1.0, outer_momentum=0.0),
        DiLoCo(every=3),
        DiLoCo(every=4, fragments=2, delay=1, mix=0.5, collective=Ring()),
        DiLoCo(every=2, eager=True),
    ],
    StaleSGD: [StaleSGD(staleness=Constant(2)), StaleSGD(staleness=Uniform(0, 3), ramp_steps=2)],
    NoCommunication: [NoCommunication()],
    SerialSGD: [SerialSGD(), SerialSGD(delay=2)],
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
