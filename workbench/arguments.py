"""Checks of one setting: a whole number, a number, or true or false.

In Python, True is an instance of int and equals 1, and any text is true. Here true and false are no numbers, and only
they are true or false.
"""

from __future__ import annotations

from typing import Any, TypeGuard

from workbench.errors import ConfigError


def is_whole(value: object) -> TypeGuard[int]:
    """Return True if it is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True if it is a number, which may be infinite or NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_whole(name: str, value: Any, least: int, what: str | None = None, most: int | None = None) -> None:
    """Raise `ConfigError` unless a setting is a whole number from `least` to `most`. `what` says what to give.

    >>> check_whole("every", True, 1)
    Traceback (most recent call last):
    workbench.errors.ConfigError: every=True: give a whole number, 1 or more
    """
    if not is_whole(value) or value < least or (most is not None and value > most):
        limits = f"{least} or more" if most is None else f"{least} to {most}"
        raise ConfigError(f"{name}={value!r}: give {what or f'a whole number, {limits}'}")


def check_number(name: str, value: Any, least: float, what: str) -> None:
    """Raise `ConfigError` unless a setting is a number and at least `least`. `what` says what to give."""
    if not is_number(value) or not value >= least:
        raise ConfigError(f"{name}={value!r}: give {what}")


def check_flag(name: str, value: Any) -> None:
    """Raise `ConfigError` unless a setting is True or False.

    >>> check_flag("nesterov", "no")
    Traceback (most recent call last):
    workbench.errors.ConfigError: nesterov='no': give True or False
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: give True or False")
