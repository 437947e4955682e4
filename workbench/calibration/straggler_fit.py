"""Fit a distribution of stragglers to measured slowness: by likelihood, judged by the Kolmogorov-Smirnov distance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from workbench.costs import Empirical, Lognormal, Pareto, ShiftedExponential, SlowMachines, Stragglers

Floats = NDArray[np.float64]
MIN_SAMPLES = 12  # with fewer, distributions cannot be distinguished
MAX_VALUES = 128  # values that an empirical distribution keeps
EQUAL_WITHIN = 0.02  # ranks whose medians differ by less are equal
MIN_SPREAD = 1e-3  # a smaller spread counts as none


def fit_distribution(slowness: Floats) -> tuple[tuple[Stragglers, ...], float, str]:
    """Fit the distribution of one rank's seconds divided by their median, from (N,) independent samples.

    Candidates are lognormal, shifted exponential and Pareto, compared by their largest likelihood (as by Akaike's
    criterion, because all have two parameters). If a Kolmogorov-Smirnov test rejects the best one at the 5 % level, the
    samples themselves are the distribution.

    Returns:
        The distribution (or none), the scale, and a sentence on the choice. Median seconds, times the scale, times a
        factor of the distribution, are the seconds of a step.
    """
    samples = np.sort(slowness[np.isfinite(slowness) & (slowness > 0)])
    if len(samples) < 2 or samples[-1] - samples[0] < MIN_SPREAD:
        return (), 1.0, f"{len(samples)} samples without a spread: no distribution"
    sigma = float(np.log(samples).std(ddof=1))
    if len(samples) < MIN_SAMPLES:
        return (
            (Lognormal(sigma=sigma),),
            _lognormal_scale(samples, sigma),
            f"lognormal assumed: {len(samples)} samples cannot distinguish distributions",
        )
    fits = sorted(_candidates(samples, sigma), key=lambda fit: -fit[0])
    best = fits[0]
    said = ", ".join(f"{name} {likelihood - best[0]:+.1f}" for likelihood, name, *_ in fits[1:])
    distance = stats.kstest(samples, best[4])
    judged = f"KS distance {distance.statistic:.3f}, p {distance.pvalue:.2g}"
    chosen = f"{best[1]} is likeliest of {len(samples)} samples (log-likelihood: {said}; {judged})"
    if distance.pvalue >= 0.05:
        return (best[2],), best[3], chosen
    values = np.quantile(samples, (np.arange(min(MAX_VALUES, len(samples))) + 0.5) / min(MAX_VALUES, len(samples)))
    return (Empirical(values=tuple(values.tolist())),), 1.0, f"the samples themselves: {chosen}"


def _lognormal_scale(samples: Floats, sigma: float) -> float:
    """Return the mean of the fitted lognormal: `Lognormal` has mean 1, and the samples have median 1."""
    return float(np.exp(np.log(samples).mean() + sigma**2 / 2))


def _candidates(samples: Floats, sigma: float) -> list[tuple[float, str, Stragglers, float, Any]]:
    """Return (log-likelihood, name, distribution, scale, cumulative distribution) of each candidate."""
    num, least = len(samples), float(samples[0])
    logs = np.log(samples)
    normal = stats.norm(logs.mean(), sigma)
    found: list[tuple[float, str, Stragglers, float, Any]] = [
        (
            float((normal.logpdf(logs) - logs).sum()),
            "lognormal",
            Lognormal(sigma=sigma),
            _lognormal_scale(samples, sigma),
            lambda x: normal.cdf(np.log(x)),
        )
    ]
    excess = float(samples.mean()) - least
    scale = excess * num / (num - 1)  # the smallest of N exponentials is scale / N above the shift, on average
    shift = max(least - scale / num, 0.0)
    exponential = stats.expon(shift, scale)
    shifted_exponential = ShiftedExponential(shift=shift, scale=scale)
    found.append(
        (float(exponential.logpdf(samples).sum()), "shifted exponential", shifted_exponential, 1.0, exponential.cdf)
    )
    spread = float((logs - math.log(least)).mean())
    pareto = stats.pareto((num - 1) / num / spread, scale=least * (1 - spread / num))
    heavy_tail = Pareto(shape=(num - 1) / num / spread, scale=least * (1 - spread / num))
    found.append((float(pareto.logpdf(samples).sum()), "Pareto", heavy_tail, 1.0, pareto.cdf))
    return found


def slow_ranks(seconds: Floats) -> tuple[Floats, SlowMachines | None]:
    """Return each rank's permanent slowdown, relative to the median rank, from (ranks, steps) seconds.

    The second result is the distribution of these slow ranks; None if all are equal. A rank is slow or fast if its
    median differs by 2 % and by three standard errors of a median.
    """
    medians = np.nanmedian(seconds, 1)
    middle = float(np.median(medians))
    spread = 1.4826 * np.nanmedian(np.abs(seconds - medians[:, None]), 1)
    error = 1.2533 * spread / np.sqrt(np.isfinite(seconds).sum(1)) / middle
    factors = medians / middle
    differs = np.abs(factors - 1) > np.maximum(EQUAL_WITHIN, 3 * error)
    factors = np.where(differs, factors, 1.0)
    if not differs.any():
        return np.ones(len(medians)), None
    return factors, SlowMachines(
        factor_of=tuple((rank, float(factor)) for rank, factor in enumerate(factors) if factor != 1.0)
    )
