"""Conversion of a calibration's values to JSON and back."""

from __future__ import annotations

from dataclasses import fields
from math import isfinite
from typing import Any

from workbench import costs
from workbench.costs import Stragglers


def distribution_record(distribution: Stragglers) -> dict[str, Any]:
    """Return a distribution as plain values."""
    return {
        "distribution": type(distribution).__name__,
        **{item.name: getattr(distribution, item.name) for item in fields(distribution)},
    }


def distribution_of(record: dict[str, Any]) -> Stragglers:
    """Return the distribution of a record. Older files call its name `law`.

    Raises:
        ValueError: there is no such distribution.
    """
    values = {key: as_tuples(value) for key, value in record.items()}
    name = values.pop("law") if "law" in values else values.pop("distribution")
    kind = getattr(costs, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, Stragglers)):
        raise ValueError(f"no distribution of stragglers is called {name!r}")
    return kind(**values)


def describe_distribution(distribution: Stragglers) -> str:
    """Describe a distribution in a few words; numbers have three digits.

    >>> describe_distribution(costs.Lognormal(sigma=0.12345))
    'Lognormal(sigma=0.123)'
    """
    values = [(item.name, getattr(distribution, item.name)) for item in fields(distribution)]
    said = (
        f"{name}={value:.3g}" if isinstance(value, float) else f"{name}: {len(value)} of them" for name, value in values
    )
    return f"{type(distribution).__name__}({', '.join(said)})"


def as_tuples(value: Any) -> Any:
    """Convert lists to tuples, at all levels."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def without_nan(value: Any) -> Any:
    """Convert numbers that are not finite to null, because JSON has none."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value
