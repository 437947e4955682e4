"""The time of a step under given conditions: by closed forms where these exist, otherwise message by message."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, final

import numpy as np

from workbench.analysis.overlap import overlap
from workbench.analysis.summary import num_warm_up, step_seconds
from workbench.calibration.effective import Setting, codec_of, effective_costs
from workbench.calibration.fixed_point import simulated
from workbench.calibration.model import Calibration
from workbench.calibration.model_error import band
from workbench.calibration.predict import FEWEST_STEPS, messages_per_step, predict_at
from workbench.collectives.wire import wire_share
from workbench.costs import Compute, Network
from workbench.errors import ConfigError
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulate import simulate
from workbench.trace.run import Run

STEPS, MOST_STEPS = 24, 400  # of a simulation, with its warm-up; of one that does not communicate in each step
FILL_STEPS = 50  # for each step of staleness: until a pipeline's sums queue up, steps do not wait for them
PERIODS, FEWEST_PERIODS = 4, 2  # to simulate of an algorithm that does not communicate in each step
MOST_MESSAGES = 30_000  # of a pipeline that has no closed form
MESSAGES = 3000  # with more messages in a simulation, a closed form is used if there is one
LEAST_SHARE = 0.1  # of the mean: where steps differ as much as asynchronous ones, quantiles say little
UNBOUND = 1e18  # bytes per second of a wire that takes no time
COSTS = ("compute", "wire", "latency", "stragglers")
How = Literal["messages", "closed form"]
Change = Callable[[Compute, Network], tuple[Compute, Network]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step, predicted.

    Attributes:
        step_s: the mean.
        low_s, high_s: 10 % and 90 % quantiles of the mean of a few steps (`calibration.model_error`).
        overlap: hidden share of the communication; None without communication.
        how: "closed form": one worker's program, with each sum by a formula. "messages": every message is an event.
    """

    step_s: float
    low_s: float
    high_s: float
    overlap: float | None
    how: How


def step_time(calibration: Calibration, algorithm: Algorithm, setting: Setting, seed: int = 0) -> StepTime:
    """Predict the time of a step.

    Raises:
        ConfigError: the algorithm cannot run on this number of workers.
    """
    if setting.cores is not None:
        found = predict_at(calibration, algorithm, setting, draws=0, seed=seed)
        low_s = max(found.low_s, LEAST_SHARE * found.step_s)
        return StepTime(step_s=found.step_s, low_s=low_s, high_s=found.high_s, overlap=found.overlap, how="messages")
    run, how = step_run(calibration, algorithm, setting, seed=seed)
    times = _times(run, algorithm)
    mean_s = float(times.mean())
    others = [_mean_s(calibration.drawn(draw), algorithm, setting, seed) for draw in calibration.draws[:4]]
    low_s, high_s = band(mean_s, others if how == "closed form" else [], step_sd=float(times.std()) / mean_s)
    if calibration.line.latency_limit_s is not None:  # messages of one size allow latencies up to this one
        largest = replace(calibration, line=calibration.line.with_largest_latency())
        limit = _mean_s(largest, algorithm, setting, seed) / mean_s
        low_s, high_s = low_s * min(1.0, limit), high_s * max(1.0, limit)
    low_s = max(low_s, LEAST_SHARE * mean_s)
    hidden = overlap(run.spans, slice(num_warm_up(len(run.metrics[0])), None)).fraction
    return StepTime(step_s=mean_s, low_s=low_s, high_s=high_s, overlap=hidden, how=how)


def saved_seconds(calibration: Calibration, algorithm: Algorithm, setting: Setting, seed: int = 0) -> dict[str, float]:
    """Return by how many seconds a step would be shorter if one cost were zero, for each of `COSTS`.

    The largest is what a step waits for most. For compute, the steps with and without it have no stragglers.
    """
    if setting.cores is not None:
        return predict_at(calibration, algorithm, setting, draws=0, seed=seed).saved_s
    mean_s = _mean_s(calibration, algorithm, setting, seed)
    without = {cost: _mean_s(calibration, algorithm, setting, seed, _without(cost, setting.workers)) for cost in COSTS}
    saved = {cost: mean_s - without[cost] for cost in ("wire", "latency", "stragglers")}
    return {
        cost: max(0.0, value)
        for cost, value in {"compute": without["stragglers"] - without["compute"], **saved}.items()
    }


def step_run(
    calibration: Calibration,
    algorithm: Algorithm,
    setting: Setting,
    *,
    seed: int = 0,
    steps: int = STEPS,
    change: Change | None = None,
) -> tuple[Run, How]:
    """Simulate some steps, timing only, and say how.

    Args:
        steps: with its warm-up; fewer if a step has many messages, more if the algorithm does not communicate in each.
        change: of the costs of compute and network.
    """
    every = _period(algorithm)
    if every > 1:
        num = min(PERIODS, max(FEWEST_PERIODS, MOST_STEPS // every))
        steps = max(steps, num * every + 1)
        return _simulated(calibration, algorithm, setting, seed, steps, change)
    if _staleness(algorithm) > 1:
        steps = max(steps, min(MOST_STEPS, FILL_STEPS * _staleness(algorithm)))
        return _simulated(calibration, algorithm, setting, seed, steps, change)
    run, how = _simulated(calibration, algorithm, setting, seed, steps, change)
    while _gap(run) > 1 and len(run.metrics[0]) < PERIODS * _gap(run) and steps < MOST_STEPS:
        steps = min(MOST_STEPS, max(4 * steps, PERIODS * _gap(run)))
        run, how = _simulated(calibration, algorithm, setting, seed, steps, change)
    return run, how


def _simulated(
    calibration: Calibration, algorithm: Algorithm, setting: Setting, seed: int, steps: int, change: Change | None
) -> tuple[Run, How]:
    if setting.cores is not None and change is None:
        return simulated(calibration, algorithm, setting, steps, seed).run, "messages"
    compute, network = effective_costs(calibration, algorithm, setting)
    if change is not None:
        compute, network = change(compute, network)
    every = _period(algorithm)
    messages = messages_per_step(calibration, algorithm, setting) / every
    size = calibration.shapes.batch_size
    common: dict[str, Any] = {
        "workers": setting.workers,
        "compute": compute,
        "timing_only": True,
        "seed": seed,
        "batch_size": size,
    }

    def problem(num: int) -> Any:
        return calibration.shapes.problem(size * setting.workers * num)

    if messages * steps > MESSAGES and algorithm.symmetric:
        folded = with_codec(network, algorithm, calibration.shapes.num_bytes, setting.workers)
        try:
            run = simulate(algorithm, problem(steps), network=folded, detail="formula", steps=steps, **common)
        except ConfigError:  # no closed form
            pass
        else:
            return run, "closed form"
    if not algorithm.requires.servers and messages and steps <= STEPS:
        least = FEWEST_STEPS if every == 1 else FEWEST_PERIODS * every + 1
        steps = int(min(steps, max(least, MESSAGES / messages)))
    elif messages and _staleness(algorithm) > 1:
        steps = int(min(steps, max(STEPS, MOST_MESSAGES / messages)))
    return simulate(algorithm, problem(steps), network=network, steps=steps, **common), "messages"


def with_codec(network: Network, algorithm: Algorithm, num_bytes: float, workers: int) -> Network:
    """Return a network whose bandwidth includes the work of the codec, for closed forms that have no codec.

    A rank encodes each of the ring's p pieces once, and decodes p - 1 of them to sum and p of the sum. A ring with
    several chunks encodes one while it sends another, so a byte takes the longer of the two times. Otherwise it takes
    their sum.

    Args:
        num_bytes: size of a gradient.
    """
    plain = replace(network, encode_s_per_byte=0.0, decode_s_per_byte=0.0)
    collective: Any = getattr(algorithm, "collective", None)
    if codec_of(algorithm) is None or workers < 2:
        return plain
    sent = 2 * (workers - 1) / workers  # of a gradient
    encoded, decoded = 1.0, (2 * workers - 1) / workers  # p of p pieces are encoded, and 2 p - 1 decoded
    work_s = (encoded * network.encode_s_per_byte + decoded * network.decode_s_per_byte) / sent
    share = wire_share(collective.codec, num_bytes / workers)
    wire_s = share / network.bandwidth_bytes_per_s
    byte_s = max(wire_s, work_s) if getattr(collective, "chunks", 1) > 1 else wire_s + work_s
    return replace(plain, bandwidth_bytes_per_s=share / byte_s)


def _mean_s(
    calibration: Calibration, algorithm: Algorithm, setting: Setting, seed: int, change: Change | None = None
) -> float:
    run, _ = step_run(calibration, algorithm, setting, seed=seed, change=change)
    return float(_times(run, algorithm).mean())


def _period(algorithm: Algorithm) -> int:
    """Return the number of steps from one communication to the next, if the algorithm says it; else 1."""
    every = getattr(algorithm, "every", 1)
    return every if isinstance(every, int) else 1


def _staleness(algorithm: Algorithm) -> int:
    """Return the staleness of an algorithm whose sums may lag behind its steps; 0 for any other, such as a server."""
    return 0 if algorithm.requires.servers else algorithm.max_staleness or 0


def _times(run: Run, algorithm: Algorithm) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return seconds of steps after the warm-up; means of whole periods if ranks do not communicate in each step.

    The first of several periods is left out: a sum that it starts may delay only the next one. So is the first half of
    the steps of a pipeline of more than two: if a sum takes longer than a step, the first steps do not wait for it yet.
    """
    period, ends_s = _period(algorithm), np.array([row["seconds"] for row in run.steps()])
    if _staleness(algorithm) > 1:
        return np.diff(ends_s[len(ends_s) // 2 :])
    period = period if period > 1 else _gap(run)
    if period < 2 or len(ends_s) <= period:
        return step_seconds(run)
    num = (len(ends_s) - 1) // period * period
    steps_s = np.diff(ends_s)[len(ends_s) - 1 - num :]
    periods_s: np.ndarray[Any, np.dtype[np.float64]] = steps_s.reshape(-1, period).mean(axis=1)
    return periods_s[1:] if len(periods_s) > 1 else periods_s


def _gap(run: Run) -> int:
    """Return the steps from one communication of rank 0 to the next: 1 if it sends in each step, and if it never sends."""
    sent = [row["bytes_sent"] for row in run.metrics[0] if "bytes_sent" in row and "evaluation" not in row]
    steps = [step for step, (before, after) in enumerate(pairwise([0.0, *sent])) if after > before]
    if len(steps) == len(sent) or (not steps and len(sent) >= MOST_STEPS):
        return 1
    if len(steps) < 2:
        return len(sent)  # not yet known
    return max(1, round(statistics.median(np.diff(steps).tolist())))


def _without(cost: str, workers: int) -> Change:
    """Return a change that makes one cost zero."""

    def change(compute: Compute, network: Network) -> tuple[Compute, Network]:
        match cost:
            case "compute":
                return replace(compute, forward_s=0.0, backward_s=0.0, update_s=0.0), network
            case "wire":
                return compute, replace(network, bandwidth_bytes_per_s=UNBOUND)
            case "latency":
                return compute, replace(network, latency_s=0.0)
            case _:
                usual = statistics.fmean(float(np.median(compute.factors(0, step, workers))) for step in range(STEPS))
                forward_s, backward_s = compute.forward_s * usual, compute.backward_s * usual
                return replace(compute, forward_s=forward_s, backward_s=backward_s, stragglers=()), network

    return change
