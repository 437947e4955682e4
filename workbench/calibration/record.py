"""Values of a calibration as JSON and back."""

from __future__ import annotations

from dataclasses import fields
from math import isfinite
from typing import Any

from workbench import costs
from workbench.costs import Stragglers


def law_record(law: Stragglers) -> dict[str, Any]:
    """A law as plain values."""
    return {"law": type(law).__name__, **{item.name: getattr(law, item.name) for item in fields(law)}}


def law_of(record: dict[str, Any]) -> Stragglers:
    """The opposite.

    Raises:
        ValueError: there is no such law.
    """
    kind = getattr(costs, str(record["law"]), None)
    if not (isinstance(kind, type) and issubclass(kind, Stragglers)):
        raise ValueError(f"no law of stragglers is called {record['law']!r}")
    return kind(**{key: as_tuples(value) for key, value in record.items() if key != "law"})


def law_words(law: Stragglers) -> str:
    """A law in a few words, its numbers with three digits.

    >>> law_words(costs.Lognormal(sigma=0.12345))
    'Lognormal(sigma=0.123)'
    """
    values = [(item.name, getattr(law, item.name)) for item in fields(law)]
    said = (f"{name}={value:.3g}" if isinstance(value, float) else f"{name}: {len(value)} of them" for name, value in values)
    return f"{type(law).__name__}({', '.join(said)})"


def as_tuples(value: Any) -> Any:
    """Lists as tuples, all the way down."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def without_nan(value: Any) -> Any:
    """What is not finite as null: JSON has no other word for it."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value
