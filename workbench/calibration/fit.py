"""Fit a cost model to observed steps."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.calibration.model import Calibration
from workbench.calibration.observed import Compute, Observed, Periods
from workbench.calibration.parts import Estimate, Host, Line, Origin, Pace, Shapes
from workbench.calibration.straggler_fit import fit_distribution, slow_ranks
from workbench.errors import ConfigError

Floats = NDArray[np.float64]
NUM_DRAWS = 40
BUSY = 0.25  # share of the median: a larger variation of compute (10 to 90 % quantile) indicates a busy machine
HUBER = 1.345  # residuals above this multiple of the spread get less weight
SPREAD_OF_SIZES = 0.05  # if message sizes differ by less, latency and bandwidth cannot be separated


def fit(
    observed: Observed,
    origin: Origin,
    shapes: Shapes,
    *,
    cores: float | None = None,
    threads: int = 1,
    latency_s: float | None = None,
    line_bytes_per_s: float | None = None,
    seed: int = 0,
) -> Calibration:
    """Fit compute, stragglers and link to observed steps.

    Compute is the median over steps. The link is a straight line, fitted robustly to the times in which the network was
    busy: alpha for each message and beta for each byte. The uncertainty comes from resampling complete steps with
    replacement.

    Raises:
        ConfigError: no compute was recorded.
    """
    compute, periods = observed.compute, observed.periods
    core_slowdown = 1.0 if cores is None else max(1.0, origin.num_workers * threads / cores)
    values = _pace_values(compute, core_slowdown)
    link, told_apart = _link_values(periods, origin.num_workers, latency_s)
    notes = _notes(origin, threads, cores, core_slowdown, link is not None, told_apart, latency_s)
    draws = _draws(compute, periods, origin.num_workers, core_slowdown, latency_s, seed)
    distributions, scale, words = _stragglers(compute)
    values |= {name: values[name] * scale for name in ("forward_s", "backward_s")}
    values |= link or {"latency_s": 0.0, "s_per_byte": 0.0}
    for draw in draws:
        draw["forward_s"], draw["backward_s"] = draw["forward_s"] * scale, draw["backward_s"] * scale
    spread = {name: float(np.std([draw[name] for draw in draws])) for name in draws[0]} if draws else {}

    def estimate(name: str) -> Estimate:
        fitted = name != "latency_s" or told_apart
        return Estimate(float(values[name]), spread.get(name, float("nan")) if fitted else float("nan"))

    seconds: dict[str, Any] = {name: estimate(name) for name in ("forward_s", "backward_s", "update_s", "other_s")}
    pace = Pace(**seconds, stragglers=distributions, fit=words)
    alpha = estimate("latency_s")
    gamma, gamma_words = _sum_of(observed)
    notes += gamma_words
    notes += _busy(compute, origin)
    line = Line(
        latency_s=alpha,
        message_latency_s=alpha,
        s_per_byte=estimate("s_per_byte"),
        sum_s_per_byte=gamma,
        codecs=_codec_of(observed),
        line_bytes_per_s=line_bytes_per_s,
    )
    host = Host(cores=cores, threads=threads)
    return Calibration(
        origin=origin, shapes=shapes, pace=pace, line=line, host=host, draws=tuple(draws), notes=tuple(notes)
    )


def _busy(compute: Compute, origin: Origin) -> list[str]:
    """Return a note if other load is the likeliest cause of the variation of compute.

    The record has only wall time, which does not show the cause.
    """
    if origin.runtime == "simulated":
        return []
    seconds = compute.forward_s + compute.backward_s
    usual = seconds / np.nanmedian(seconds, 1, keepdims=True)
    low, high = np.nanquantile(usual, (0.1, 0.9))
    if high - low <= BUSY:
        return []
    spread = f"compute of one rank varies from {low:.2f} to {high:.2f} of its median (10 to 90 %)"
    cause = "other programs on the machine, or ranks that share its cores, are a likelier cause than slow workers"
    again = "profile the loop again on an idle machine, then `workbench calibrate TRACE...`"
    if origin.runtime != "torch.profiler":
        again = (
            f"repeat the `workbench train` command of {origin.source} on an idle machine, then `workbench "
            "calibrate last`"
        )
    fix = f"{again}; or leave the variation out with stragglers=() in the calibration's pace"
    return [f"{spread}: {cause}, and predictions repeat it on every worker; {fix}"]


def _notes(
    origin: Origin,
    threads: int,
    cores: float | None,
    core_slowdown: float,
    linked: bool,
    told_apart: bool,
    latency_s: float | None,
) -> list[str]:
    """Return notes about what could not be determined, and the assumptions made instead."""
    notes = []
    if core_slowdown > 1:
        notes.append(
            f"{origin.num_workers} ranks of {threads} threads shared {cores:g} cores: seconds of compute are divided "
            f"by {core_slowdown:.3g}"
        )
    if not linked:
        notes.append("no communication was recorded: the network is unknown, and predictions need network=")
    elif not told_apart:
        why = "all messages have one size: latency_s cannot be separated from bandwidth"
        notes.append(f"{why} and is taken as {latency_s or 0:g} s; use more sizes, or --probe")
    return notes


# -- compute ---------------------------------------------------------------------------------------------------------


def _pace_values(compute: Compute, core_slowdown: float) -> dict[str, float]:
    """Return medians over ranks and steps. The times of a permanently slow rank are first divided by its slowdown."""
    if not np.isfinite(compute.forward_s).any() or not np.isfinite(compute.backward_s).any():
        raise ConfigError("no forward and backward was recorded: calibrate from a run whose ranks compute gradients")
    factors, _ = slow_ranks(compute.forward_s + compute.backward_s)
    found = {}
    for name in ("forward_s", "backward_s", "update_s", "other_s"):
        table = getattr(compute, name) / (factors[:, None] if name in ("forward_s", "backward_s") else 1.0)
        found[name] = float(np.nanmedian(table)) / core_slowdown if np.isfinite(table).any() else 0.0
    return found


def _stragglers(compute: Compute) -> tuple[tuple[Any, ...], float, str]:
    seconds = compute.forward_s + compute.backward_s
    factors, machines = slow_ranks(seconds)
    alike = seconds / factors[:, None]
    distributions, scale, words = fit_distribution((alike / np.nanmedian(alike)).ravel())
    if machines is not None:
        named = ", ".join(f"rank {rank} by {factor:.3f}" for rank, factor in machines.factor_of)
        return (*distributions, machines), scale, f"{words}; always slower or quicker than the median rank: {named}"
    return distributions, scale, words


# -- link ------------------------------------------------------------------------------------------------------------


def _link_values(periods: Periods, num_workers: int, latency_s: float | None) -> tuple[dict[str, float] | None, bool]:
    """Return alpha and beta, and whether both were fitted; None without communication."""
    if num_workers < 2 or not len(periods) or periods.wire_bytes.max() <= 0:
        return None, False
    sizes = periods.wire_bytes / periods.num_messages
    told_apart = latency_s is None and float(np.ptp(sizes)) > SPREAD_OF_SIZES * float(sizes.max())
    alpha, beta = robust_line(
        periods.seconds, periods.num_messages, periods.wire_bytes, None if told_apart else latency_s or 0.0
    )
    return {"latency_s": alpha, "s_per_byte": beta}, told_apart


def robust_line(seconds: Floats, num_messages: Floats, wire_bytes: Floats, alpha: float | None) -> tuple[float, float]:
    """Fit seconds = num_messages alpha + wire_bytes beta with Huber's weights; alpha and beta are at least 0.

    If `alpha` is given, only beta is fitted. Errors are relative to the time, or to a tenth of the median if that is
    longer.
    """
    scale = 1 / np.maximum(seconds, 0.1 * max(float(np.median(seconds)), 1e-12))
    weights = np.ones(len(seconds))
    fixed = alpha
    beta = 0.0
    for _ in range(30):
        w = scale * np.sqrt(weights)
        if fixed is None:
            (free, beta), *_ = np.linalg.lstsq(np.stack([num_messages * w, wire_bytes * w], 1), seconds * w, rcond=None)
            alpha = max(float(free), 0.0)
        assert alpha is not None
        rest = (seconds - num_messages * alpha) * w
        if fixed is not None or alpha == 0.0:
            beta = float((rest @ (wire_bytes * w)) / ((wire_bytes * w) @ (wire_bytes * w)))
        residual = (seconds - num_messages * alpha - wire_bytes * beta) * scale
        spread = 1.4826 * float(np.median(np.abs(residual)))
        if spread < 1e-12:
            break
        weights = np.minimum(1.0, HUBER * spread / np.maximum(np.abs(residual), 1e-15))
    return float(alpha or 0.0), max(float(beta), 1e-15)


def _draws(
    compute: Compute, periods: Periods, num_workers: int, core_slowdown: float, latency_s: float | None, seed: int
) -> list[dict[str, float]]:
    """Return the fitted numbers of each resample of the steps."""
    random = np.random.default_rng(seed)
    num_steps = compute.forward_s.shape[1]
    steps = np.unique(periods.step)
    rows = {int(step): np.flatnonzero(periods.step == step) for step in steps}
    found = []
    for _ in range(NUM_DRAWS):
        columns = random.integers(0, num_steps, num_steps)
        part = Compute(**{name: getattr(compute, name)[:, columns] for name in Compute.__slots__})
        draw = _pace_values(part, core_slowdown)
        if len(steps):
            chosen = np.concatenate([rows[int(step)] for step in random.choice(steps, len(steps))])
            link, _ = _link_values(
                Periods(**{name: getattr(periods, name)[chosen] for name in Periods.__slots__}), num_workers, latency_s
            )
            draw |= link or {}
            if link:
                draw["message_latency_s"] = link["latency_s"]
        found.append(draw)
    return found


# -- local work ------------------------------------------------------------------------------------------------------


def _sum_of(observed: Observed) -> tuple[Estimate, list[str]]:
    values = observed.local.get("sum")
    if values is None:
        return Estimate(0.0), [
            "the time of the library's own additions is part of beta: gamma alone is in no record, and is taken as 0"
        ]
    return Estimate(float(np.median(values)), _median_error(values)), []


def _codec_of(observed: Observed) -> tuple[tuple[str, float, float], ...]:
    """Return the costs of the run's codec, without a name: `predict` uses them for any codec."""
    local = observed.local
    if "encode" not in local or "decode" not in local:
        return ()
    return (("", float(np.median(local["encode"])), float(np.median(local["decode"]))),)


def _median_error(values: Floats) -> float:
    return float(1.2533 * 1.4826 * np.median(np.abs(values - np.median(values))) / np.sqrt(len(values)))


def ready_to_shares(
    ready: Sequence[tuple[int, float]], bucket_of: Sequence[int], numel: Sequence[int]
) -> tuple[float, ...]:
    """Return `backward_shares`: the time of each bucket, divided among its parameters in proportion to their elements.

    Args:
        ready: (bucket, part of backward after which it was final) of every step.
        bucket_of, numel: bucket and elements of each parameter, in order of registration.
    """
    num = max(bucket_of) + 1
    ends = np.array(
        [np.median([part for bucket, part in ready if bucket == number] or [np.nan]) for number in range(num)]
    )
    if not np.isfinite(ends).all():
        return ()
    ends = np.maximum.accumulate(ends)
    ends[-1] = 1.0
    lengths = np.diff(ends, prepend=0.0)
    sizes = np.bincount(bucket_of, numel, minlength=num)
    shares = [lengths[bucket] * count / sizes[bucket] for bucket, count in zip(bucket_of, numel, strict=True)]
    return tuple(float(share) for share in shares) if all(isfinite(share) for share in shares) else ()
