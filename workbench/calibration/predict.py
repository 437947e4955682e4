"""Predict a step with another algorithm, number of workers or network, by a simulation with a calibration."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from workbench.algorithms import names as algorithm_names
from workbench.analysis.overlap import overlap
from workbench.analysis.summary import num_warm_up
from workbench.analysis.table import Column, Table, percent, seconds
from workbench.calibration.cores import Slowness
from workbench.calibration.effective import (
    Cores,
    Setting,
    core_slowdown,
    describe_cores,
    make_setting,
)
from workbench.calibration.fixed_point import Scenario, Simulated, midmean, simulated, simulated_run
from workbench.calibration.handling import handling_seconds
from workbench.calibration.model import Calibration
from workbench.calibration.model_error import band
from workbench.calibration.steady import (
    MAX_SIMULATED_MESSAGES,
    MIN_STEPS,
    affordable_steps,
    messages_per_step,
    more_periods,
    steady_seconds,
    steady_steps,
)
from workbench.costs import Network
from workbench.errors import ConfigError
from workbench.program import Algorithm
from workbench.trace.run import Run

STEPS = 30
NUM_DRAWS = 8
NOTED_DIFFERENCE = 0.1
UNBOUND = 1e18  # bytes per second of a wire that takes no time


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A prediction of a step.

    Attributes:
        step_s: mean seconds over steps.
        usual_s: the mean without the longest and the shortest quarter of the steps.
        low_s, high_s: 10 % and 90 % quantiles of the mean of a few steps, with the model's own error
            (`calibration.model_error`).
        cores: the measured cores, and the cores that the prediction assumes, in words.
        other_step_s: if the cores were assumed: approximate seconds of a step with the other assumption (the measured
            machine's shared cores, or a host for each rank). None: there is no other assumption.
        saved_s: cost (wire, latency, stragglers or compute) -> seconds by which a step would be shorter if that cost
            were zero. For compute, the steps with and without it have no stragglers. The largest is the bound.
        overlap: hidden share of the communication; None without communication.
    """

    algorithm: str
    setting: Setting
    step_s: float
    usual_s: float
    low_s: float
    high_s: float
    saved_s: dict[str, float]
    overlap: float | None
    cores: str = ""
    other_step_s: float | None = None

    @property
    def other_cores(self) -> str | None:
        """The other assumption about cores, with its step time, if it changes a step by more than 10 %."""
        if self.other_step_s is None or abs(self.other_step_s / self.step_s - 1) <= NOTED_DIFFERENCE:
            return None
        own = self.setting.cores is None
        what = (
            "with the shared cores of the measured machine (--cores measured)"
            if own
            else "with own cores for each rank (--cores own)"
        )
        return f"{what} about {seconds(self.other_step_s)} a step, not {seconds(self.step_s)}"

    @property
    def bound(self) -> str:
        """The cost that a step waits for most."""
        return max(self.saved_s, key=lambda what: self.saved_s[what]) if self.saved_s else "unknown"

    def as_record(self) -> dict[str, Any]:
        """Return plain values, fit for JSON."""
        setting = self.setting
        return {
            "algorithm": self.algorithm,
            "workers": setting.workers,
            "network": setting.name,
            "line_bytes_per_s": setting.line_bytes_per_s,
            "step_s": self.step_s,
            "usual_s": self.usual_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "bound": self.bound,
            "saved_s": self.saved_s,
            "overlap": self.overlap,
            "shared_cores": setting.cores,
            "cores": self.cores,
            "other_step_s": self.other_step_s,
        }


COLUMNS = (
    Column("algorithm", "algorithm"),
    Column("workers", "workers"),
    Column("network", "network"),
    Column("step_s", "step", seconds),
    Column("low_s", "10 %", seconds),
    Column("high_s", "90 %", seconds),
    Column("bound", "bound by"),
    Column("overlap", "overlap", percent),
)


def table(predictions: list[Prediction]) -> Table:
    """Return predictions as a table; the caption says which cores they assume."""
    caption = "Seconds a step, predicted; 10 and 90 % include the model's own error"
    return Table(
        [prediction.as_record() for prediction in predictions],
        COLUMNS,
        caption="\n".join([caption, *cores_lines(predictions)]),
    )


def cores_lines(predictions: Sequence[Prediction]) -> list[str]:
    """Return the assumptions about cores, each line once; with both step times if they differ by more than 10 %."""
    lines = list(dict.fromkeys(f"cores {prediction.cores}" for prediction in predictions))
    for one in predictions:
        if one.other_cores:
            lines.append(
                f"cores differ: {one.algorithm}, {one.setting.workers} workers, {one.setting.name}: {one.other_cores}"
            )
    return lines


def predict(
    calibration: Calibration,
    algorithm: Algorithm,
    *,
    workers: int,
    network: Network | str | None = None,
    bandwidth_bytes_per_s: float | None = None,
    latency_s: float | None = None,
    cores: Cores = None,
    steps: int = STEPS,
    draws: int = NUM_DRAWS,
    seed: int = 0,
) -> Prediction:
    """Predict the time of a step, with an error band and the cost that bounds the step.

    The algorithm runs on simulated workers, timing only. If ranks share cores, all work on cores is slowed until the
    cores suffice (`calibration.cores`). The time in which a rank handles its own messages is added
    (`calibration.handling`). The band combines the calibration's uncertainty (other draws), the variation of
    steps and the model's own error (`calibration.model_error`).

    Args:
        network: a network, its name in `workbench.costs`, or None for the measured one.
        bandwidth_bytes_per_s: instead of `network`, another nominal rate of the measured network (125e6 for 1 Gbit/s).
        latency_s: latency in addition to the measured one; None: that of `network`, or 0.
        cores: a number that all ranks share; "measured": those of the calibration; "own": each rank has a host with
            enough cores. None: "measured" for the same number of workers on the measured network, otherwise "own".
            `Prediction.cores` says which.
        steps: steps to simulate, including the warm-up; more until a pipeline of more than two steps is full, and for
            whole periods of an algorithm that communicates every H steps.
        draws: draws of the calibration for the band. With 0, the band has only the variation of steps and the model's
            error.

    Raises:
        ConfigError: the network is unknown, the calibration has no network, or the algorithm cannot run on this number
            of workers.
    """
    setting = make_setting(calibration, workers, network, bandwidth_bytes_per_s, latency_s, cores)
    return predict_at(calibration, algorithm, setting, steps=steps, draws=draws, seed=seed)


def predict_at(
    calibration: Calibration,
    algorithm: Algorithm,
    setting: Setting,
    *,
    steps: int = STEPS,
    draws: int = NUM_DRAWS,
    seed: int = 0,
) -> Prediction:
    """Predict under the conditions of `make_setting`."""
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(
            f"algorithm={algorithm!r}: give an algorithm, such as PipeSGD(width=2); there are "
            f"{', '.join(algorithm_names())}"
        )
    asked, steps = steps, affordable_steps(calibration, algorithm, setting, steps)
    messages = messages_per_step(calibration, algorithm, setting) / algorithm.period
    events = messages if steps <= asked else max(messages, setting.workers)  # of a step; a sum by formula is also one
    heavy = events * steps > MAX_SIMULATED_MESSAGES  # then other draws are scaled, not simulated
    scenario = Scenario(calibration=calibration, algorithm=algorithm, setting=setting, steps=steps, seed=seed)
    found = simulated(scenario)
    while (periods := more_periods(found.run, algorithm, steps)) is not None:
        steps = periods
        scenario = replace(scenario, steps=steps)
        found = simulated(scenario)
    mean_s, handled_s = found.step_s, handling_seconds(calibration, algorithm, setting)
    saved = _saved_s(scenario, found)
    if heavy and draws:
        drawn = [_in_proportion(calibration, draw, mean_s, saved, messages > 0) for draw in calibration.draws]
    else:
        chosen = [calibration.draws[position] for position in _spread(len(calibration.draws), draws)]
        drawn = [
            simulated(replace(scenario, calibration=calibration.drawn(draw)), found.slow).step_s for draw in chosen
        ]
    low, high = band(mean_s, drawn, step_sd=float(found.times.mean(axis=1).std() / found.times.mean()))
    least_steps = min(steps, steady_steps(algorithm, MIN_STEPS))
    limit = 1.0
    if calibration.line.latency_limit_s is not None:
        largest = replace(calibration, line=calibration.line.with_largest_latency())
        limit = simulated(replace(scenario, calibration=largest), found.slow).step_s / mean_s
    other_s = _with_other_cores(replace(scenario, steps=least_steps))
    return Prediction(
        algorithm=found.run.label,
        setting=setting,
        step_s=mean_s + handled_s,
        usual_s=mean_s / float(found.times.mean()) * midmean(found.times) + handled_s,
        low_s=low * min(1.0, limit, *found.orders) + handled_s,
        high_s=high * max(1.0, limit, *found.orders) + handled_s,
        saved_s={**saved, "latency": saved["latency"] + handled_s},
        overlap=_hidden(found.run),
        cores=describe_cores(calibration, setting),
        other_step_s=None if other_s is None else other_s + handled_s,
    )


def _saved_s(scenario: Scenario, found: Simulated) -> dict[str, float]:
    """Return by how many seconds a step would be shorter without each cost."""
    mean_s, scale = found.step_s, found.step_s / float(found.times.mean())
    left = {what: scale * _without(what, scenario, found.slow) for what in ("compute", "wire", "latency", "stragglers")}
    saved = {
        "compute": left["stragglers"] - left["compute"],
        **{what: mean_s - left[what] for what in ("wire", "latency", "stragglers")},
    }
    return {what: max(value, 0.0) for what, value in saved.items()}


def _in_proportion(
    calibration: Calibration, draw: Mapping[str, float], mean_s: float, saved_s: dict[str, float], messages: bool
) -> float:
    """Return the seconds of a step for another draw, to first order: each cost's share changes in proportion to it."""
    pace, line = calibration.pace, calibration.line
    latency = "message_latency_s" if messages else "latency_s"
    computed = ("forward_s", "backward_s", "update_s", "other_s")
    values = {
        "compute": (
            sum(getattr(pace, name).value for name in computed),
            sum(draw.get(name, getattr(pace, name).value) for name in computed),
        ),
        "wire": (line.s_per_byte.value, draw.get("s_per_byte", line.s_per_byte.value)),
        "latency": (getattr(line, latency).value, draw.get(latency, getattr(line, latency).value)),
    }
    return mean_s + float(
        sum(saved_s[what] * (drawn / value - 1) for what, (value, drawn) in values.items() if value > 0)
    )


def _with_other_cores(scenario: Scenario) -> float | None:
    """Return the approximate seconds of a step with the other assumption about cores."""
    calibration, setting = scenario.calibration, scenario.setting
    if not setting.assumed or calibration.host.cores is None:
        return None
    other = replace(setting, cores=calibration.host.cores if setting.cores is None else None)
    slow = None if other.cores is None else core_slowdown(calibration, other)
    return simulated(replace(scenario, setting=other), slow).step_s


def predicted_run(
    calibration: Calibration,
    algorithm: Algorithm,
    *,
    workers: int,
    network: Network | str | None = None,
    bandwidth_bytes_per_s: float | None = None,
    steps: int = STEPS,
    seed: int = 0,
) -> Run:
    """Return the simulated run of `predict`, with all its spans. Arguments and errors are those of `predict`."""
    setting = make_setting(calibration, workers, network, bandwidth_bytes_per_s)
    scenario = Scenario(calibration=calibration, algorithm=algorithm, setting=setting, steps=steps, seed=seed)
    return simulated(scenario).run


def _spread(num: int, wanted: int) -> list[int]:
    return sorted({round(position) for position in np.linspace(0, num - 1, min(num, wanted))}) if num and wanted else []


def step_s(calibration: Calibration, algorithm: Algorithm, setting: Setting, steps: int, seed: int) -> float:
    """Return the mean seconds of a step."""
    steps = affordable_steps(calibration, algorithm, setting, steps)
    scenario = Scenario(calibration=calibration, algorithm=algorithm, setting=setting, steps=steps, seed=seed)
    return simulated(scenario).step_s + handling_seconds(calibration, algorithm, setting)


def _without(what: str, scenario: Scenario, slow: Slowness | None) -> float:
    """Return the seconds of a step if one cost is zero."""
    compute, network = scenario.costs(slow)
    match what:
        case "compute":
            compute = replace(compute, forward_s=0.0, backward_s=0.0, update_s=0.0)
        case "wire":
            network = replace(network, bandwidth_bytes_per_s=UNBOUND)
        case "latency":
            network = network.without_latency
        case "stragglers":
            mean = statistics.fmean(
                float(np.median(compute.factors(scenario.seed, step, scenario.setting.workers)))
                for step in range(scenario.steps)
            )
            compute = replace(
                compute, forward_s=compute.forward_s * mean, backward_s=compute.backward_s * mean, stragglers=()
            )
    run = simulated_run(scenario, compute, network)
    return float(steady_seconds(run, scenario.algorithm).mean())


def _hidden(run: Run) -> float | None:
    found = overlap(run.spans, slice(num_warm_up(len(run.metrics[0])), None))
    return found.fraction
