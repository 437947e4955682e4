"""Ways to sum over all ranks."""

from __future__ import annotations

from workbench.collectives.base import Collective, Native, flat_of, native_bytes
from workbench.collectives.linear import Linear
from workbench.collectives.low_rank import PowerSGD
from workbench.collectives.once import Once
from workbench.collectives.ring import Ring
from workbench.errors import ConfigError
from workbench.naming import kebab, unknown

__all__ = ["Collective", "Linear", "Native", "Once", "PowerSGD", "Ring", "check_collective", "flat_of", "get", "native_bytes"]

_COLLECTIVES = {kebab(collective.__name__): collective for collective in (Native, Ring, Linear, PowerSGD)}


def check_collective(collective: object) -> None:
    """Raise `ConfigError` unless it is a way to sum."""
    if not isinstance(collective, Collective):
        raise ConfigError(
            f"collective={collective!r}: give one of {', '.join(sorted(made.__name__ for made in _COLLECTIVES.values()))}, such as Ring()"
        )


def get(name: str) -> Collective:
    """A collective by name.

    >>> get("ring")
    Ring()

    Raises:
        ConfigError: there is none of that name.
    """
    if name.lower() not in _COLLECTIVES:
        raise unknown("collective", name, _COLLECTIVES)
    return _COLLECTIVES[name.lower()]()
