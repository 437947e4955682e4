"""The Pareto front of several algorithms: lowest cost, highest gain."""

from __future__ import annotations

from collections.abc import Mapping


def pareto_front(costs_and_gains: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the names that no other name dominates, the cheapest first.

    A name dominates another if it costs no more, gains no less, and differs in one of the two.

    >>> pareto_front({"quick": (1.0, 0.8), "good": (3.0, 0.9), "slow": (4.0, 0.9), "poor": (2.0, 0.7)})
    ['quick', 'good']
    """
    points = costs_and_gains
    beaten = {
        name
        for name, (cost, gain) in points.items()
        for other_cost, other_gain in points.values()
        if (other_cost, other_gain) != (cost, gain) and other_cost <= cost and other_gain >= gain
    }
    return sorted((name for name in points if name not in beaten), key=lambda name: points[name])
