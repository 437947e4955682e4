"""Check the parameters of a notebook, in one line for each rule."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import pairwise
from typing import Any

from workbench.errors import ConfigError
from workbench.naming import did_you_mean, listed, shorten


def require(
    holds: bool = True,
    rule: str = "",
    /,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    num_at_least: int | None = None,
    ascending: bool = False,
    distinct: bool = False,
    including: Iterable[Any] = (),
    among: Collection[Any] | None = None,
    equally_many: bool = False,
    **parameters: Any,
) -> None:
    """Refuse a notebook's parameters that break a rule.

    Each rule applies to each parameter. Bounds apply to each value of a list.

    >>> require(at_least=2, workers=4, more_workers=[8, 16])
    >>> require(ascending=True, including=[1, 2], widths=[1, 2, 4])
    >>> require(1 < 4, "fewer backups than workers", backups=1, workers=4)
    >>> require(at_least=2, workers=[1, 2])
    Traceback (most recent call last):
    workbench.errors.ConfigError: workers=[1, 2]: give 2 or more

    Args:
        holds: whether a rule of the notebook's own is satisfied.
        rule: that rule as text, such as "fewer backups than workers".
        at_least: smallest value.
        above, below: exclusive bounds.
        num_at_least: smallest number of values.
        ascending: whether each value is larger than the one before.
        distinct: whether no value occurs twice.
        including: values that must be given.
        among: the values from which to choose.
        equally_many: whether the parameters have equally many values.
        parameters: name -> value.

    Raises:
        ConfigError: a rule is broken. The message has the parameters and the rule.
    """
    if not holds:
        raise _refused(parameters, rule)
    for name, value in parameters.items():
        one, values = {name: value}, listed(value)
        if at_least is not None and not all(item >= at_least for item in values):
            raise _refused(one, f"{at_least:g} or more")
        if above is not None and not all(item > above for item in values):
            raise _refused(one, f"more than {above:g}")
        if below is not None and not all(item < below for item in values):
            raise _refused(one, f"less than {below:g}")
        if num_at_least is not None and len(values) < num_at_least:
            raise _refused(one, f"{num_at_least} values or more")
        if ascending and any(later <= item for item, later in pairwise(values)):
            raise _refused(one, "each value larger than the one before")
        if distinct and any(item in values[:at] for at, item in enumerate(values)):
            raise _refused(one, "each value once")
        if missing := [item for item in including if item not in values]:
            raise _refused(one, f"{', '.join(map(str, missing))} too")
        if among is not None and (strangers := [item for item in values if item not in among]):
            meant = did_you_mean(str(strangers[0]), map(str, among))
            raise _refused(one, f"one or more of {', '.join(map(str, among))}", meant)
    if equally_many and len({len(listed(value)) for value in parameters.values()}) > 1:
        raise _refused(parameters, "equally many values of each")


def _refused(parameters: dict[str, Any], rule: str, meant: str = "") -> ConfigError:
    shown = ", ".join(f"{name}={shorten(value)}" for name, value in parameters.items())
    return ConfigError(f"{shown}: {meant}give {rule}")
