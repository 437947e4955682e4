"""How much slower than usual a worker's compute is: by step, by machine, by time of day, or while it is down.

A law answers two questions. `factors`: by what each worker's seconds are multiplied in a step, a pure function of (seed, step).
`finish_s`: when work ends that begins at a moment, for laws that know the clock (`timed`). Laws combine: factors multiply.
Where all workers are alike and steps independent, a law is `Independent` and has the `quantile` and `mean` of its distribution,
from which order statistics follow. Factors multiply `Compute`'s seconds, whatever their mean is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

# What can be said in a word and some numbers, and which of its numbers these are, in order.
_LAWS: dict[str, tuple[type[Stragglers], tuple[str, ...]]] = {
    kebab(law.__name__): (law, order)
    for law, order in (
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
    """What `get` knows.

    >>> names()[:3]
    ('constant', 'lognormal', 'shifted-exponential')
    """
    return tuple(_LAWS)


def get(text: str) -> Stragglers:
    """A law by name, its numbers behind a colon in their order or by their names.

    >>> get("lognormal:0.3"), get("bimodal:0.05,4")
    (Lognormal(sigma=0.3), Bimodal(probability=0.05, factor=4))
    >>> get("shifted-exponential:scale=0.5")
    ShiftedExponential(shift=1.0, scale=0.5)

    Raises:
        ConfigError: there is none of that name, or it does not take these numbers; what it takes is named.
    """
    name, _, rest = (part.strip() for part in text.partition(":"))
    if name.lower() not in _LAWS:
        raise unknown("law of stragglers", name, _LAWS)
    law, order = _LAWS[name.lower()]
    made: Stragglers = _made(name.lower(), law, order, [word.strip() for word in rest.split(",")] if rest else [])
    return made


def _made(name: str, law: Callable[..., Any], order: tuple[str, ...], words: list[str]) -> Any:
    usage = f"{name}:{','.join(order)}"
    options: dict[str, Any] = {}
    for position, word in enumerate(words):
        key, equals, value = word.partition("=")
        if not equals and position >= len(order):
            raise ConfigError(f"{name}:{','.join(words)}: {len(words)} numbers, and it takes at most {len(order)}: {usage}")
        key = key.strip().replace("-", "_") if equals else order[position]
        if key in options:
            raise ConfigError(f"{name}:{','.join(words)}: {key} is given twice: {usage}")
        options[key] = parse_value(value if equals else word)
    check_kinds(name, law, options)
    try:
        return call_checked(name, law, options)
    except ConfigError as error:
        raise ConfigError(f"{error} ({usage})") from error
