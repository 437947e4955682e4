"""Turns measured values into a verdict, by one rule for all claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import numpy as np

from workbench.papers.claims import Claim, Expectation, Size

VerdictName = Literal[
    "reproduced",
    "same direction at reduced scale",
    "overshoots",
    "not reproduced",
    "points the other way",
    "underpowered",
    "censored",
    "needs hardware",
    "not run",
]
# Verdicts that need a record.
MEASURED = (
    "reproduced",
    "same direction at reduced scale",
    "overshoots",
    "not reproduced",
    "points the other way",
    "underpowered",
    "censored",
)
Position = Literal["inside", "beyond", "outside", "other side", "across"]
MIN_SEEDS = 5
LEVEL = 0.95


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its interval.

    Attributes:
        mean: mean of the values; NaN without values.
        low, high: ends of the interval; NaN without values.

    >>> f"{Estimate(mean=1.19, low=0.86, high=1.52):.1f}", f"{Estimate(mean=5.0, low=5.0, high=5.0)}"
    ('1.2 [0.9, 1.5]', '5')
    >>> f"{Estimate(mean=1.0, low=0.722, high=1.28)}", f"{Estimate(mean=12.34, low=9.1, high=15.6)}"
    ('1.00 [0.72, 1.28]', '12.3 [9.1, 15.6]')
    """

    mean: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """The mean, and the interval if it has a width; each number in the given format, by default as in `texts`."""
        values = (self.mean, self.low, self.high)
        mean, low, high = (format(value, spec) for value in values) if spec else self.texts
        return mean if self.low == self.high else f"{mean} [{low}, {high}]"

    @property
    def texts(self) -> tuple[str, str, str]:
        """Mean, low and high with the same number of decimals, so that the interval's width has two digits."""
        values = (self.mean, self.low, self.high)
        width = self.high - self.low
        if not (math.isfinite(width) and width > 0 and max(map(abs, values)) < 1e6):
            return (number(self.mean), number(self.low), number(self.high))
        decimals = max(0, 1 - math.floor(math.log10(width)))
        # Adding 0 turns -0 into 0.
        mean, low, high = (f"{round(value, decimals) + 0.0:.{decimals}f}" for value in values)
        return mean, low, high


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict on a claim.

    Attributes:
        claim: `PAPER/CLAIM`.
        word: the verdict.
        estimate: the mean of the values, and the interval that decides.
        num_values: number of values.
        num_sessions: number of sessions that the interval includes; 0 if no real clock was read.
        num_censored: number of values that are a cap.
    """

    claim: str
    word: VerdictName
    estimate: Estimate
    num_values: int
    num_sessions: int = 0
    num_censored: int = 0

    @property
    def mean(self) -> float:
        """Mean of the values; NaN without values."""
        return self.estimate.mean

    @property
    def low(self) -> float:
        """Lower end of the interval; NaN without values."""
        return self.estimate.low

    @property
    def high(self) -> float:
        """Upper end of the interval; NaN without values."""
        return self.estimate.high

    def __format__(self, spec: str) -> str:
        """The estimate in the given format."""
        return format(self.estimate, spec)


def judge(
    claim: Claim,
    values: Sequence[float],
    size: Size,
    *,
    real_clock: bool = False,
    sessions: Sequence[int] = (),
    seeds: Sequence[int] = (),
    censored: Sequence[bool] = (),
) -> Verdict:
    """Judge a claim by its values.

    The interval is Student's 95 % interval of the mean, over seeds or, on a real clock, over sessions, whichever is
    wider (`estimate`).
    For a deterministic claim it is from the smallest value to the largest; nothing that is measured on a real clock is
    deterministic.

    - A value is a cap: censored.
    - Fewer than five values: underpowered.
    - Else by `position` of the interval. Inside the expectation: reproduced; for a claim about the paper's own scale,
      at a smaller size, "same direction at reduced scale". Beyond: overshoots. Outside: not reproduced. On the other
      side: points the other way. Across an end: underpowered.

    Args:
        claim: the claim.
        values: one value per seed and session.
        size: size of the notebook.
        real_clock: whether the values are times, rates or their ratios on a real clock.
        sessions: the session of each value; all of one session by default.
        seeds: the seed of each value; all of different seeds by default.
        censored: for each value, whether it is a cap; by default, whether it reaches the claim's cap.

    Raises:
        ValueError: a value is not finite, or there are not as many sessions as values.
    """
    if not all(math.isfinite(value) for value in values):
        raise ValueError(
            f"{claim.name}: {list(values)}: all values must be finite; report a divergence in the notebook's text"
        )
    expected = claim.expectation_at(size)
    if not values or expected is None:
        word: VerdictName = "needs hardware" if claim.needs and expected is None else "not run"
        none = Estimate(mean=math.nan, low=math.nan, high=math.nan)
        return Verdict(claim=claim.name, word=word, estimate=none, num_values=len(values))
    exact = claim.deterministic and not real_clock
    chosen = sessions or [0] * len(values)
    num_seeds = len(set(seeds)) or len(values)
    found = estimate(values, chosen if real_clock else (), seeds, exact=exact)
    num_censored = sum(censored) if censored else sum(value >= claim.cap for value in values)
    powered = exact or num_seeds >= MIN_SEEDS
    return Verdict(
        claim=claim.name,
        word="censored" if num_censored else _word(claim, found, size, exact=exact) if powered else "underpowered",
        estimate=found,
        num_values=len(values) if real_clock else num_seeds,
        num_sessions=len(set(chosen)) if real_clock else 0,
        num_censored=num_censored,
    )


def position(
    found: Estimate,
    expected: Expectation,
    *,
    no_effect: float | None = None,
    most: float | None = None,
    effect: float | None = None,
) -> Position:
    """Return where an interval lies.

    - "inside": all of it is expected.
    - "beyond": all of it is on the far side of the expected values, seen from `no_effect`.
    - "other side": all of it is on the wrong side of `no_effect`, or its mean is and the interval excludes `effect`.
    - "outside": all of it is outside, in another way.
    - "across": none of these.

    Args:
        found: the mean and its interval.
        expected: the expected values.
        no_effect: the value of no effect; None if the expected values have no far side.
        most: an end beyond which even expected values are too much.
        effect: the smallest effect that the claim would need.

    >>> position(Estimate(mean=0.8, low=0.7, high=0.9), Expectation.of({"above": 1}), no_effect=1)
    'other side'
    >>> position(Estimate(mean=2.1, low=1.9, high=2.3), Expectation.of({"between": [1.2, 1.8]}), no_effect=1)
    'beyond'
    """
    if no_effect is not None and no_effect >= expected.high:  # a decrease is expected: mirror all values
        return position(
            Estimate(mean=-found.mean, low=-found.high, high=-found.low),
            Expectation(-expected.high, -expected.low, expected.strict),
            no_effect=-no_effect,
            most=None if most is None else -most,
            effect=None if effect is None else -effect,
        )
    directed = no_effect is not None and no_effect <= expected.low
    if directed and found.low > (expected.high if most is None else most):
        return "beyond"
    if expected.holds(found.low) and expected.holds(found.high):
        return "inside"
    if directed and no_effect is not None:
        excludes_effect = effect is not None and found.mean < no_effect and found.high < effect
        if found.high < no_effect or excludes_effect:
            return "other side"
    apart = found.low > expected.high or found.high < expected.low
    touching = expected.strict and (found.low >= expected.high or found.high <= expected.low)
    return "outside" if apart or touching else "across"


def estimate(
    values: Sequence[float], sessions: Sequence[int] = (), seeds: Sequence[int] = (), *, exact: bool = False
) -> Estimate:
    """Return the mean and its 95 % interval.

    Values of one session have its conditions in common, and values of one seed its weights, data order and delays. So
    two Student's intervals are made: of the sessions' means, and of the seeds' means. The wider one counts. So values
    that a seed determines do not become more certain by repetition, and seeds that agree do not hide that sessions
    differ. For exact values the interval is from the smallest to the largest.

    Args:
        values: the values.
        sessions: the session of each value; all of one session by default.
        seeds: the seed of each value; all of different seeds by default.
        exact: whether the values have no random error.

    >>> print(f"{estimate([1.0, 2.0, 3.0, 4.0, 5.0]):.2f}")
    3.00 [1.04, 4.96]
    >>> print(f"{estimate([1.0, 1.1, 2.0, 2.1, 3.0, 3.1], [0, 0, 1, 1, 2, 2]):.2f}")
    2.05 [-0.43, 4.53]
    >>> print(f"{estimate([1.0, 2.0, 1.0, 2.0, 1.0, 2.0], [0, 0, 1, 1, 2, 2], [0, 1, 0, 1, 0, 1]):.2f}")
    1.50 [-4.85, 7.85]
    >>> print(f"{estimate([1.0, 2.0, 1.0, 2.0, 1.0, 2.0], [0, 0, 1, 1, 2, 2], [0, 1, 2, 3, 4, 5]):.2f}")
    1.50 [0.93, 2.07]

    Raises:
        ValueError: there are not as many sessions, or seeds, as values.
    """
    for what, of_value in (("session", sessions), ("seed", seeds)):
        if of_value and len(of_value) != len(values):
            raise ValueError(f"{len(values)} values of {len(of_value)} {what}s: give the {what} of each value")
    groups = [group for group in (sessions, seeds) if len(set(group)) > 1]
    if groups and not exact:
        return max((estimate(_means_of(values, group)) for group in groups), key=lambda found: found.high - found.low)
    mean = float(np.mean(values))
    if exact or len(values) == 1:
        return Estimate(mean=mean, low=float(min(values)), high=float(max(values)))
    from scipy.stats import t

    half = float(t.ppf((1 + LEVEL) / 2, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    return Estimate(mean=mean, low=mean - half, high=mean + half)


def _means_of(values: Sequence[float], groups: Sequence[int]) -> list[float]:
    """The mean of each group's values, in the order of the groups' numbers."""
    numbers, of_group = np.asarray(values, float), np.asarray(groups)
    return [float(numbers[of_group == group].mean()) for group in np.unique(of_group)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the 95 % interval of the mean.

    >>> [round(end, 2) for end in interval([1.0, 2.0, 3.0, 4.0, 5.0])]
    [1.04, 4.96]
    """
    found = estimate(values)
    return found.low, found.high


def number(value: float) -> str:
    """Return a number with three digits, as text.

    >>> number(1234.5), number(0.04567), number(1.0)
    ('1234', '0.0457', '1')
    """
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def _word(claim: Claim, found: Estimate, size: Size, *, exact: bool) -> VerdictName:
    """Return the verdict of enough values, none of which is a cap."""
    expected = claim.expectation_at(size)
    assert expected is not None, "such a claim is not judged"
    match position(found, expected, no_effect=claim.no_effect, most=claim.upper_limit_at(size), effect=claim.effect):
        case "inside":
            return "reproduced" if claim.scale == "any" or size == "full" else "same direction at reduced scale"
        case "beyond":
            return "overshoots"
        case "other side":
            return "points the other way"
        case "outside":
            return "not reproduced"
    return "not reproduced" if exact else "underpowered"
