"""Every training method, one file each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench import collectives
from workbench.algorithms.async_sgd import AsyncSGD
from workbench.algorithms.backup import BackupSGD, ParameterServerSGD
from workbench.algorithms.dc_asgd import DelayCompensatedSGD
from workbench.algorithms.layerwise import ApplyOrder, LayerwiseSGD
from workbench.algorithms.pipe import DelayedSGD, PipeSGD
from workbench.algorithms.softsync import SoftsyncSGD
from workbench.algorithms.stale_synchronous import StaleSynchronousSGD
from workbench.algorithms.synchronous import SynchronousSGD
from workbench.naming import call_checked, kebab, unknown
from workbench.program import Algorithm

__all__ = [
    "ApplyOrder",
    "AsyncSGD",
    "BackupSGD",
    "DelayCompensatedSGD",
    "DelayedSGD",
    "LayerwiseSGD",
    "ParameterServerSGD",
    "PipeSGD",
    "SoftsyncSGD",
    "StaleSynchronousSGD",
    "SynchronousSGD",
    "get",
    "names",
]

_METHODS: dict[str, Callable[..., Algorithm]] = {
    kebab(method.__name__): method
    for method in (
        SynchronousSGD,
        LayerwiseSGD,
        PipeSGD,
        DelayedSGD,
        ParameterServerSGD,
        BackupSGD,
        AsyncSGD,
        StaleSynchronousSGD,
        SoftsyncSGD,
        DelayCompensatedSGD,
    )
}


def names() -> tuple[str, ...]:
    """What `get` knows.

    >>> names()[:4]
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
