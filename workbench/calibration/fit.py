"""Fit a cost model to observed steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from workbench.analysis.table import seconds
from workbench.calibration.model import Calibration
from workbench.calibration.observed import Compute, Observed, Periods
from workbench.calibration.parts import LEAST_S_PER_BYTE, Estimate, Host, Line, Origin, Pace, Shapes
from workbench.calibration.straggler_fit import fit_distribution, slow_ranks
from workbench.errors import ConfigError

Floats = NDArray[np.float64]
NUM_DRAWS = 40
BUSY = 0.25  # share of the median: a larger variation of compute (10 to 90 % quantile) indicates a busy machine
HUBER = 1.345  # residuals above this multiple of the spread get less weight
SPREAD_OF_SIZES = 0.05  # if message sizes differ by less, latency and bandwidth cannot be separated


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the caller knows and a record does not show.

    Attributes:
        cores: number of cores that all ranks shared; None: each had enough.
        threads: compute threads of a rank.
        latency_s: latency of a hop; None: from messages of several sizes.
        line_bytes_per_s: nominal rate of the link.
        seed: of the resampling.
    """

    cores: float | None = None
    threads: int = 1
    latency_s: float | None = None
    line_bytes_per_s: float | None = None
    seed: int = 0

    def core_slowdown(self, num_workers: int) -> float:
        """Return by how much shared cores slowed the compute of these ranks."""
        return 1.0 if self.cores is None else max(1.0, num_workers * self.threads / self.cores)


def fit(observed: Observed, origin: Origin, shapes: Shapes, given: Given | None = None) -> Calibration:
    """Fit compute, stragglers and link to observed steps.

    Compute is the median over steps. The link is a straight line, fitted robustly to the times in which the network was
    busy: alpha for each message and beta for each byte. The uncertainty comes from resampling complete steps with
    replacement.

    Raises:
        ConfigError: no compute was recorded, or the given latency is longer than a message.
    """
    given = given or Given()
    compute = observed.compute
    values = _pace_values(compute, given.core_slowdown(origin.num_workers))
    link, told_apart = _link_values(observed.periods, origin.num_workers, given.latency_s)
    draws = _draws(observed, origin.num_workers, given)
    distributions, scale, words = _stragglers(compute)
    values |= {name: values[name] * scale for name in ("forward_s", "backward_s")}
    values |= link or {"latency_s": 0.0, "s_per_byte": 0.0}
    for draw in draws:
        draw["forward_s"], draw["backward_s"] = draw["forward_s"] * scale, draw["backward_s"] * scale
    spread = {name: float(np.std([draw[name] for draw in draws])) for name in draws[0]} if draws else {}

    def estimate(name: str) -> Estimate:
        fitted = name != "latency_s" or told_apart
        return Estimate(float(values[name]), spread.get(name, float("nan")) if fitted else float("nan"))

    pace: dict[str, Any] = {name: estimate(name) for name in ("forward_s", "backward_s", "update_s", "other_s")}
    alpha = estimate("latency_s")
    gamma, gamma_words = _sum_of(observed)
    line = Line(
        latency_s=alpha,
        message_latency_s=alpha,
        s_per_byte=estimate("s_per_byte"),
        sum_s_per_byte=gamma,
        codecs=_codec_of(observed),
        line_bytes_per_s=given.line_bytes_per_s,
    )
    if link is not None and not told_apart and given.latency_s is None:
        line = _with_limit(line, observed.periods)
    notes = _notes(origin, given, line, linked=link is not None)
    return Calibration(
        origin=origin,
        shapes=shapes,
        pace=Pace(**pace, stragglers=distributions, fit=words),
        line=line,
        host=Host(cores=given.cores, threads=given.threads),
        draws=tuple(draws),
        notes=(*notes, *gamma_words, *_busy(compute, origin)),
    )


def _busy(compute: Compute, origin: Origin) -> list[str]:
    """Return a note if other load is the likeliest cause of the variation of compute.

    The record has only wall time, which does not show the cause.
    """
    if origin.runtime == "simulated":
        return []
    compute_s = compute.forward_s + compute.backward_s
    usual = compute_s / np.nanmedian(compute_s, 1, keepdims=True)
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


def _notes(origin: Origin, given: Given, line: Line, *, linked: bool) -> list[str]:
    """Return notes about what could not be determined, and the assumptions made instead."""
    notes = []
    core_slowdown = given.core_slowdown(origin.num_workers)
    if core_slowdown > 1:
        notes.append(
            f"{origin.num_workers} ranks of {given.threads} threads shared {given.cores:g} cores: seconds of compute "
            f"are divided by {core_slowdown:.3g}"
        )
    if not linked:
        notes.append("no communication was recorded: the network is unknown, and predictions need network=")
    elif line.latency_limit_s is not None:
        notes.append(
            "all messages have one size: latency_s cannot be separated from bandwidth and is taken as 0 s; the bands of "
            f"predictions include latencies up to {seconds(line.latency_limit_s)}; give latency_s= (--latency), use "
            "more sizes, or --probe"
        )
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
    compute_s = compute.forward_s + compute.backward_s
    factors, machines = slow_ranks(compute_s)
    alike = compute_s / factors[:, None]
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
    mean_s = float(np.median(periods.seconds / periods.num_messages))
    if latency_s is not None and latency_s >= mean_s > 0:
        raise ConfigError(
            f"latency_s={latency_s:g}: a message of the run took only {seconds(mean_s)} with its bytes; give the "
            "latency of one hop, in seconds"
        )
    alpha, beta = robust_line(
        periods.seconds, periods.num_messages, periods.wire_bytes, None if told_apart else latency_s or 0.0
    )
    return {"latency_s": alpha, "s_per_byte": beta}, told_apart


def _with_limit(line: Line, periods: Periods) -> Line:
    """Add the size of the messages, and the largest latency that they allow. A nominal rate bounds the bandwidth."""
    message_bytes = float(np.median(periods.wire_bytes / periods.num_messages))
    least_s_per_byte = 0.0 if line.line_bytes_per_s is None else 1 / line.line_bytes_per_s
    rest_s = message_bytes * (line.s_per_byte.value - least_s_per_byte)
    limit_s = max(0.0, min(float(np.median(periods.shortest_s)), rest_s))
    return replace(line, message_bytes=message_bytes, latency_limit_s=limit_s)


def robust_line(period_s: Floats, num_messages: Floats, wire_bytes: Floats, alpha: float | None) -> tuple[float, float]:
    """Fit seconds = num_messages alpha + wire_bytes beta with Huber's weights; alpha and beta are at least 0.

    If `alpha` is given, only beta is fitted. Errors are relative to the time, or to a tenth of the median if that is
    longer.
    """
    scale = 1 / np.maximum(period_s, 0.1 * max(float(np.median(period_s)), 1e-12))
    weights = np.ones(len(period_s))
    fixed = alpha
    beta = 0.0
    for _ in range(30):
        w = scale * np.sqrt(weights)
        if fixed is None:
            (free, beta), *_ = np.linalg.lstsq(
                np.stack([num_messages * w, wire_bytes * w], 1), period_s * w, rcond=None
            )
            alpha = max(float(free), 0.0)
        assert alpha is not None
        rest = (period_s - num_messages * alpha) * w
        if fixed is not None or alpha == 0.0:
            beta = float((rest @ (wire_bytes * w)) / ((wire_bytes * w) @ (wire_bytes * w)))
        residual = (period_s - num_messages * alpha - wire_bytes * beta) * scale
        spread = 1.4826 * float(np.median(np.abs(residual)))
        if spread < 1e-12:
            break
        weights = np.minimum(1.0, HUBER * spread / np.maximum(np.abs(residual), 1e-15))
    return float(alpha or 0.0), max(float(beta), LEAST_S_PER_BYTE)


def _draws(observed: Observed, num_workers: int, given: Given) -> list[dict[str, float]]:
    """Return the fitted numbers of each resample of the steps."""
    compute, periods = observed.compute, observed.periods
    core_slowdown = given.core_slowdown(num_workers)
    random = np.random.default_rng(given.seed)
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
            part_of_periods = Periods(**{name: getattr(periods, name)[chosen] for name in Periods.__slots__})
            link, _ = _link_values(part_of_periods, num_workers, given.latency_s)
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
