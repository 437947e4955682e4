"""Every training method, one file each."""

from __future__ import annotations

from typing import Any

from workbench import collectives
from workbench.algorithms.adaptive_delay import AdaptiveDelaySGD
from workbench.algorithms.dear import DeAR
from workbench.algorithms.diloco import DiLoCo
from workbench.algorithms.layerwise import ApplyOrder, LayerwiseSGD, SendOrder
from workbench.algorithms.local_sgd import LocalSGD
from workbench.algorithms.no_communication import NoCommunication
from workbench.algorithms.partial import PartialAllReduce, Quorum
from workbench.algorithms.pipe import DelayedSGD, FirstSteps, PipeSGD
from workbench.algorithms.serial import SerialSGD
from workbench.algorithms.stale import StaleSGD
from workbench.algorithms.staleness import Constant, Empirical, Geometric, Staleness, Uniform, parse_staleness
from workbench.algorithms.synchronous import SynchronousSGD
from workbench.naming import call_checked, kebab, unknown
from workbench.program import Algorithm

__all__ = [
    "AdaptiveDelaySGD",
    "ApplyOrder",
    "Constant",
    "DeAR",
    "DelayedSGD",
    "DiLoCo",
    "Empirical",
    "FirstSteps",
    "Geometric",
    "LayerwiseSGD",
    "LocalSGD",
    "NoCommunication",
    "PartialAllReduce",
    "PipeSGD",
    "Quorum",
    "SendOrder",
    "SerialSGD",
    "StaleSGD",
    "Staleness",
    "SynchronousSGD",
    "Uniform",
    "get",
    "names",
    "parse_staleness",
]

_METHODS = {
    **{kebab(method.__name__): method for method in (SynchronousSGD, LayerwiseSGD, PipeSGD, DelayedSGD, AdaptiveDelaySGD)},
    "dear": DeAR,
    **{kebab(method.__name__): method for method in (PartialAllReduce, LocalSGD)},
    "diloco": DiLoCo,
    **{kebab(method.__name__): method for method in (StaleSGD, NoCommunication, SerialSGD)},
}


def names() -> tuple[str, ...]:
    """What `get` knows.

    >>> names()[:4]
    ('synchronous-sgd', 'layerwise-sgd', 'pipe-sgd', 'delayed-sgd')
    """
    return tuple(_METHODS)


def get(name: str, **settings: Any) -> Algorithm:
    """A method by name; a collective or a distribution of staleness may be named too.

    >>> get("pipe-sgd", width=3, collective="ring").width
    3
    >>> get("stale-sgd", staleness="uniform:0:8").staleness
    Uniform(low=0, high=8)

    Raises:
        ConfigError: no such method, no such setting, or a value it cannot have.
    """
    plain = name.lower().replace("_", "-")
    if plain not in _METHODS:
        raise unknown("method", name, _METHODS)
    if isinstance(settings.get("collective"), str):
        settings["collective"] = collectives.get(settings["collective"])
    if isinstance(settings.get("staleness"), str):
        settings["staleness"] = parse_staleness(settings["staleness"])
    method: Algorithm = call_checked(plain, _METHODS[plain], settings)
    return method
