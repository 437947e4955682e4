"""Distributions of a worker's slowdown: by step, by machine, by time of day, or while it is down.

A distribution has two methods. `factors` gives the factor of each worker's seconds in a step, a pure function of
(seed, step). `finish_s` gives the end of work that begins at a given time, for distributions that depend on the clock
(`timed`). Factors of several distributions multiply. If all workers are equal and steps independent, a distribution is
`Independent` and has a `quantile` and a `mean`, from which order statistics follow. Factors multiply `Compute`'s
seconds. They are not normalised to mean 1.

- `base`: the interface, and several distributions as one.
- `independent`: equal workers and independent steps.
- `machines`: slow machines, times of day, failures.

Imports nothing else of `costs`. Used by `compute`. Begin with `base`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from workbench.arguments import is_number
from workbench.costs.stragglers.base import Array, Finish, Independent, Stragglers
from workbench.costs.stragglers.independent import (
    Bimodal,
    Constant,
    Empirical,
    EmpiricalByRank,
    Lognormal,
    Pareto,
    ShiftedExponential,
    Uniform,
)
from workbench.costs.stragglers.machines import Failures, SlowMachines, TimeVarying, Windows
from workbench.errors import ConfigError
from workbench.naming import call_checked, check_kinds, kebab, parse_value, unknown

__all__ = [
    "Array",
    "Bimodal",
    "Constant",
    "Empirical",
    "EmpiricalByRank",
    "Failures",
    "Finish",
    "Independent",
    "Lognormal",
    "Pareto",
    "ShiftedExponential",
    "SlowMachines",
    "Stragglers",
    "TimeVarying",
    "Uniform",
    "Windows",
    "get",
    "names",
]

# Distributions with a name on the command line, and the order of their numbers.
_DISTRIBUTIONS: dict[str, tuple[type[Stragglers], tuple[str, ...]]] = {
    kebab(distribution.__name__): (distribution, order)
    for distribution, order in (
        (Constant, ("factor",)),
        (Lognormal, ("sigma",)),
        (ShiftedExponential, ("shift", "scale")),
        (Pareto, ("shape", "scale")),
        (Uniform, ("low", "high")),
        (Bimodal, ("probability", "factor")),
        (SlowMachines, ("share", "factor")),
        (TimeVarying, ("sigma", "correlation")),
        (Failures, ("mean_between_s", "repair_s")),
    )
}


def names() -> tuple[str, ...]:
    """Return the names that `get` accepts.

    >>> names()[:3]
    ('constant', 'lognormal', 'shifted-exponential')
    """
    return tuple(_DISTRIBUTIONS)


def get(text: str) -> Stragglers:
    """Return a distribution by name, with its numbers after a colon, in order or by name.

    The factors of chosen ranks, counted from 0, are pairs: in `slow-machines:3=4`, rank 3 takes 4 times as long.

    >>> get("lognormal:0.3"), get("bimodal:0.05,4")
    (Lognormal(sigma=0.3), Bimodal(probability=0.05, factor=4))
    >>> get("shifted-exponential:scale=0.5")
    ShiftedExponential(shift=1.0, scale=0.5)
    >>> get("slow-machines:3=4,5=1.5").factor_of
    ((3, 4), (5, 1.5))

    Raises:
        ConfigError: there is no such name, or it does not take these numbers; the message names what it takes.
    """
    name, _, rest = (part.strip() for part in text.partition(":"))
    if name.lower() not in _DISTRIBUTIONS:
        raise unknown("distribution of stragglers", name, _DISTRIBUTIONS)
    distribution, order = _DISTRIBUTIONS[name.lower()]
    made: Stragglers = _build(
        name.lower(), distribution, order, [word.strip() for word in rest.split(",")] if rest else []
    )
    return made


def _build(name: str, distribution: Callable[..., Any], order: tuple[str, ...], words: list[str]) -> Any:
    text, usage = f"{name}:{','.join(words)}", f"{name}:{','.join(order)}"
    options: dict[str, Any] = {}
    if distribution is SlowMachines:
        usage = f"{name}:rank=factor, for several ranks {name}:rank=factor,rank=factor, or {usage}"
        pairs = [word for word in words if re.match(r"-?\d+\s*=", word)]
        words = [word for word in words if word not in pairs]
        if pairs:
            options["factor_of"] = _factor_of(text, pairs, usage)
    for position, word in enumerate(words):
        key, equals, value = word.partition("=")
        if not equals and position >= len(order):
            raise ConfigError(f"{text}: {len(words)} numbers, and it takes at most {len(order)}: {usage}")
        key = key.strip().replace("-", "_") if equals else order[position]
        if key in options:
            raise ConfigError(f"{text}: {key} is given twice: {usage}")
        options[key] = parse_value(value if equals else word)
    try:
        check_kinds(name, distribution, options)
        return call_checked(name, distribution, options)
    except ConfigError as error:
        raise ConfigError(f"{error} ({usage})") from error


def _factor_of(text: str, pairs: list[str], usage: str) -> tuple[tuple[int, Any], ...]:
    """Return the factors of chosen ranks from pairs such as "3=4"."""
    found = []
    for pair in pairs:
        rank, _, factor = pair.partition("=")
        value = parse_value(factor)
        if not is_number(value):
            raise ConfigError(
                f"{text}: the factor of rank {rank.strip()} is {factor.strip()!r}: give a number: {usage}"
            )
        found.append((int(rank), value))
    return tuple(found)
