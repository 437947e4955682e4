"""Turns measured values into a verdict, by one rule for all claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import numpy as np

from workbench.papers.claims import Claim, Expectation, Size

Word = Literal[
    "reproduced", "same direction at reduced scale", "not reproduced", "underpowered", "needs hardware", "not run"
]
LEAST_SEEDS = 5
LEVEL = 0.95


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a claim.

    Attributes:
        word: the verdict.
        mean: mean of the values; NaN without values.
        low, high: ends of the interval that decides; NaN without values.
        num_values: number of values.
    """

    word: Word
    mean: float
    low: float
    high: float
    num_values: int


def judge(claim: Claim, values: Sequence[float], size: Size) -> Verdict:
    """Judge a claim by its values, one per seed.

    The interval is Student's 95 % interval of the mean. For a deterministic claim it is from the smallest value
    to the largest.

    - Inside the expectation: reproduced. For a claim about the paper's own scale, at a smaller size: "same direction at
      reduced scale".
    - Outside: not reproduced.
    - Across an end, or with fewer than five seeds: underpowered.

    Args:
        claim: the claim.
        values: one value per seed.
        size: size of the notebook.

    Raises:
        ValueError: a value is not finite.
    """
    if not all(math.isfinite(value) for value in values):
        raise ValueError(
            f"{claim.name}: {list(values)}: all values must be finite; report a divergence in the notebook's text"
        )
    expected = claim.expectation_at(size)
    if not values or expected is None:
        word: Word = "needs hardware" if claim.needs and expected is None else "not run"
        return Verdict(word, math.nan, math.nan, math.nan, len(values))
    mean = float(np.mean(values))
    low, high = interval(values, claim.deterministic)
    return Verdict(_word(claim, expected, (low, high), len(values), size), mean, low, high, len(values))


def interval(values: Sequence[float], deterministic: bool = False) -> tuple[float, float]:
    """Return the ends of the 95 % interval of the mean; for deterministic values, the smallest and the largest.

    >>> [round(end, 2) for end in interval([1.0, 2.0, 3.0, 4.0, 5.0])]
    [1.04, 4.96]
    """
    from scipy.stats import t

    if deterministic or len(values) == 1:
        return float(min(values)), float(max(values))
    half = float(t.ppf((1 + LEVEL) / 2, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    mean = float(np.mean(values))
    return mean - half, mean + half


def _word(claim: Claim, expected: Expectation, ends: tuple[float, float], num_values: int, size: Size) -> Word:
    if num_values < LEAST_SEEDS and not claim.deterministic:
        return "underpowered"
    inside = [expected.holds(end) for end in ends]
    if all(inside):
        return "reproduced" if claim.scale == "any" or size == "full" else "same direction at reduced scale"
    apart = ends[0] > expected.high or ends[1] < expected.low
    touching = expected.strict and (ends[0] >= expected.high or ends[1] <= expected.low)
    return "not reproduced" if apart or touching or claim.deterministic else "underpowered"
