"""Parses rates and times, such as `1gbit` and `5ms`."""

from __future__ import annotations

import re

from workbench.errors import ConfigError

RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
SLOWEST, FASTEST = 100e3, 100e9  # bit/s: below, a frame takes longer than TCP's first timeout; above, it has no effect
LONGEST_S = 2.0


def parse_rate(given: str | float) -> float:
    """Return bits per second. A number is returned unchanged.

    >>> parse_rate("1gbit"), parse_rate("2.5 Gbit/s"), parse_rate(1e8)
    (1000000000.0, 2500000000.0, 100000000.0)

    Raises:
        ConfigError: `given` is not a rate, or the rate cannot be emulated.
    """
    rate = _number(given, RATES, r"(?:/s)?", "a rate", "1gbit or 100mbit, in bits a second")
    if not SLOWEST <= rate <= FASTEST:
        raise ConfigError(f"a rate of {given!r}: from {rate_text(SLOWEST)} to {rate_text(FASTEST)} can be emulated")
    return rate


def parse_seconds(given: str | float) -> float:
    """Return seconds. A number is returned unchanged.

    >>> parse_seconds("5ms"), parse_seconds("250us"), parse_seconds(0)
    (0.005, 0.00025, 0.0)

    Raises:
        ConfigError: `given` is not a time, or the time cannot be emulated.
    """
    seconds = _number(given, TIMES, "", "a latency", "5ms or 250us")
    if not 0 <= seconds <= LONGEST_S:
        raise ConfigError(f"a latency of {given!r}: from 0 to {LONGEST_S:.0f}s can be emulated")
    return seconds


def rate_text(rate: float) -> str:
    """Return a rate in bits per second as text.

    >>> rate_text(1e9), rate_text(2.5e8)
    ('1 Gbit/s', '250 Mbit/s')
    """
    unit, scale = next((pair for pair in (("Gbit", 1e9), ("Mbit", 1e6)) if rate >= pair[1]), ("kbit", 1e3))
    return f"{rate / scale:.4g} {unit}/s"


def _number(given: str | float, units: dict[str, float], suffix: str, what: str, example: str) -> float:
    if isinstance(given, int | float) and not isinstance(given, bool):
        return float(given)
    if given == "0":
        return 0.0
    found = (
        re.fullmatch(rf"(\d+\.?\d*|\.\d+)\s*([a-z]+?){suffix}", given.strip().lower())
        if isinstance(given, str)
        else None
    )
    if found is None or found[2] not in units:
        raise ConfigError(f"{given!r} is not {what}: write {example}")
    return float(found[1]) * units[found[2]]
