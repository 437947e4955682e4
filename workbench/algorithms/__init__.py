"""Every training method, one file each."""

from __future__ import annotations

from typing import Any

from workbench import collectives
from workbench.algorithms.layerwise import ApplyOrder, LayerwiseSGD
from workbench.algorithms.pipe import DelayedSGD, PipeSGD
from workbench.algorithms.synchronous import SynchronousSGD
from workbench.naming import call_checked, kebab, unknown
from workbench.program import Algorithm

__all__ = ["ApplyOrder", "DelayedSGD", "LayerwiseSGD", "PipeSGD", "SynchronousSGD", "get", "names"]

_METHODS = {kebab(method.__name__): method for method in (SynchronousSGD, LayerwiseSGD, PipeSGD, DelayedSGD)}


def names() -> tuple[str, ...]:
    """What `get` knows.

    >>> names()
    ('synchronous-sgd', 'layerwise-sgd', 'pipe-sgd', 'delayed-sgd')
    """
    return tuple(_METHODS)


def get(name: str, **settings: Any) -> Algorithm:
    """A method by name; a collective may be named too.

    >>> get("pipe-sgd", width=3, collective="ring")
    PipeSGD(width=3, collective=Ring())

    Raises:
        ConfigError: no such method, no such setting, or a value it cannot have.
    """
    plain = name.lower().replace("_", "-")
    if plain not in _METHODS:
        raise unknown("method", name, _METHODS)
    if isinstance(settings.get("collective"), str):
        settings["collective"] = collectives.get(settings["collective"])
    method: Algorithm = call_checked(plain, _METHODS[plain], settings)
    return method
