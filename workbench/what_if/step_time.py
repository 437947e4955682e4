"""The time of a step under given conditions: by closed forms where these exist, otherwise message by message."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import numpy as np

from workbench.analysis.overlap import overlap
from workbench.analysis.summary import num_warm_up
from workbench.calibration.effective import Setting
from workbench.calibration.fixed_point import Scenario, simulated, simulated_by_formula, simulated_run
from workbench.calibration.handling import handling_seconds
from workbench.calibration.model import Calibration
from workbench.calibration.predict import UNBOUND, predict_at
from workbench.calibration.steady import (
    FEWEST_PERIODS,
    FEWEST_STEPS,
    gap,
    messages_per_step,
    more_periods,
    steady_seconds,
    steady_steps,
)
from workbench.costs import Compute, Network
from workbench.program import Algorithm
from workbench.trace.run import Run
from workbench.what_if.interval import interval, missed_by

STEPS = 24  # of a simulation, with its warm-up
MESSAGES = 3000  # with more messages in a simulation, a closed form is used if there is one
LEAST_SHARE = 0.1  # of the mean: where steps differ as much as asynchronous ones, quantiles say little
COSTS = ("compute", "wire", "latency", "stragglers")
How = Literal["messages", "closed form"]
Change = Callable[[Compute, Network], tuple[Compute, Network]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step, predicted.

    Attributes:
        step_s: the mean.
        low_s, high_s: 5 % and 95 % quantiles of the mean of a few steps (`what_if.interval`).
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
    missed = missed_by(servers=algorithm.requires.servers, shared_cores=setting.cores is not None)
    if setting.cores is not None:
        found = predict_at(calibration, algorithm, setting, draws=0, seed=seed)
        low_s, high_s = interval(found.step_s, missed=missed)
        low_s = max(min(low_s, found.low_s), LEAST_SHARE * found.step_s)
        high_s = max(high_s, found.high_s)
        return StepTime(step_s=found.step_s, low_s=low_s, high_s=high_s, overlap=found.overlap, how="messages")
    run, how = step_run(calibration, algorithm, setting, seed=seed)
    times = _times(run, algorithm)
    mean_s = float(times.mean()) + handling_seconds(calibration, algorithm, setting)
    others = [_mean_s(calibration.drawn(draw), algorithm, setting, seed) for draw in calibration.draws[:4]]
    spread = float(times.std()) / mean_s
    low_s, high_s = interval(mean_s, others if how == "closed form" else [], step_sd=spread, missed=missed)
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
    saved["latency"] += handling_seconds(calibration, algorithm, setting)
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
    least = steady_steps(algorithm, steps)
    scenario = Scenario(calibration=calibration, algorithm=algorithm, setting=setting, steps=least, seed=seed)
    run, how = _simulated(scenario, change)
    while (periods := more_periods(run, algorithm, steps)) is not None:
        steps = periods
        run, how = _simulated(replace(scenario, steps=steps), change)
    return run, how


def _simulated(scenario: Scenario, change: Change | None) -> tuple[Run, How]:
    algorithm, setting, steps = scenario.algorithm, scenario.setting, scenario.steps
    if setting.cores is not None and change is None:
        return simulated(scenario).run, "messages"
    compute, network = scenario.costs()
    if change is not None:
        compute, network = change(compute, network)
    every = algorithm.period
    messages = messages_per_step(scenario.calibration, algorithm, setting) / every
    if messages * steps > MESSAGES:
        run = simulated_by_formula(scenario, compute, network)
        if run is not None:
            return run, "closed form"
    if not algorithm.requires.servers and messages and steps <= STEPS:
        least = FEWEST_STEPS if every == 1 else FEWEST_PERIODS * every + 1
        steps = int(min(steps, max(least, MESSAGES / messages)))
    return simulated_run(replace(scenario, steps=steps), compute, network), "messages"


def _mean_s(
    calibration: Calibration, algorithm: Algorithm, setting: Setting, seed: int, change: Change | None = None
) -> float:
    run, _ = step_run(calibration, algorithm, setting, seed=seed, change=change)
    return float(_times(run, algorithm).mean()) + handling_seconds(calibration, algorithm, setting)


def _times(run: Run, algorithm: Algorithm) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return seconds of steps after the start; means of whole periods if ranks do not communicate in each step."""
    every = algorithm.period
    times_s: np.ndarray[Any, np.dtype[np.float64]] = steady_seconds(
        run, algorithm, every if every > 1 else gap(run, algorithm)
    ).mean(axis=1)
    return times_s


def _without(cost: str, workers: int) -> Change:
    """Return a change that makes one cost zero."""

    def change(compute: Compute, network: Network) -> tuple[Compute, Network]:
        match cost:
            case "compute":
                return replace(compute, forward_s=0.0, backward_s=0.0, update_s=0.0), network
            case "wire":
                return compute, replace(network, bandwidth_bytes_per_s=UNBOUND)
            case "latency":
                return compute, network.without_latency
            case _:
                usual = statistics.fmean(float(np.median(compute.factors(0, step, workers))) for step in range(STEPS))
                forward_s, backward_s = compute.forward_s * usual, compute.backward_s * usual
                return replace(compute, forward_s=forward_s, backward_s=backward_s, stragglers=()), network

    return change
