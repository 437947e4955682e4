"""What a step would take with another method, on other numbers of workers, over another network: simulated from a calibration."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from workbench.algorithms import names as method_names
from workbench.analysis.overlap import overlap
from workbench.analysis.summary import num_warm_up, step_seconds
from workbench.analysis.table import Column, Table, percent, seconds
from workbench.calibration.cores import Slowness
from workbench.calibration.effective import Setting, effective_costs, make_setting, sends_messages
from workbench.calibration.model import Calibration
from workbench.calibration.settled import midmean, simulated, simulated_run
from workbench.costs import Network
from workbench.errors import ConfigError
from workbench.program import Algorithm
from workbench.trace.run import Run

STEPS = 30
LEAST_STEPS, MESSAGES = 8, 4000  # of a simulation message by message
BAND = (0.1, 0.9)
NUM_DRAWS = 8
UNBOUND = 1e18  # bytes a second of a wire that costs nothing


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a step is said to take.

    Attributes:
        step_s: seconds, the mean over steps; `usual_s` without the longest and shortest quarters of them.
        low_s, high_s: of the mean, what nine and one of ten samples of the calibration's steps exceed.
        saved_s: by how much a step were shorter if wire, latency or stragglers cost nothing, or, where nobody is late, compute;
            what saves most binds.
        overlap: hidden part of the communication; None where there is none.
    """

    method: str
    setting: Setting
    step_s: float
    usual_s: float
    low_s: float
    high_s: float
    saved_s: dict[str, float]
    overlap: float | None

    @property
    def bound(self) -> str:
        """What a step waits for most."""
        return max(self.saved_s, key=lambda what: self.saved_s[what]) if self.saved_s else "unknown"

    @property
    def samples_per_s(self) -> float:
        """Steps of one worker in a second."""
        return 1 / self.step_s

    def as_record(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        setting = self.setting
        return {
            "method": self.method,
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
        }


COLUMNS = (
    Column("method", "method"),
    Column("workers", "workers"),
    Column("network", "network"),
    Column("step_s", "step", seconds),
    Column("low_s", "10 %", seconds),
    Column("high_s", "90 %", seconds),
    Column("bound", "bound by"),
    Column("overlap", "overlap", percent),
)


def table(predictions: list[Prediction]) -> Table:
    """Predictions side by side."""
    return Table([prediction.as_record() for prediction in predictions], COLUMNS, caption="Seconds a step, predicted")


def predict(
    calibration: Calibration,
    algorithm: Algorithm,
    *,
    workers: int,
    network: Network | str | None = None,
    bandwidth_bytes_per_s: float | None = None,
    latency_s: float | None = None,
    cores: float | None = None,
    steps: int = STEPS,
    draws: int = NUM_DRAWS,
    seed: int = 0,
) -> Prediction:
    """What a step takes, with a band and with what bounds it.

    The method itself is run on simulated workers, timing only; where ranks share cores, all that wants them is slowed until they
    suffice (`calibration.cores`). The band is of the calibration's uncertainty: the same with other draws of it.

    Args:
        network: a network, its name in `workbench.costs`, or None for the one that was measured.
        bandwidth_bytes_per_s: instead: another rate of the measured one, as it is called (125e6 for 1 Gbit/s).
        latency_s: of the link, beyond what was measured of a message; a network brings its own.
        cores: that all ranks share; None: as in the calibration if its ranks shared some, else each rank has what it needs.
        steps: to simulate, the warm-up included.
        draws: how many for the band; 0 for none.

    Raises:
        ConfigError: the network is unknown, the calibration has none, or the method cannot run on so many workers.
    """
    setting = make_setting(calibration, workers, network, bandwidth_bytes_per_s, latency_s, cores)
    return predict_at(calibration, algorithm, setting, steps=steps, draws=draws, seed=seed)


def predict_at(
    calibration: Calibration, algorithm: Algorithm, setting: Setting, *, steps: int = STEPS, draws: int = NUM_DRAWS, seed: int = 0
) -> Prediction:
    """`predict`, at a place that `make_setting` made."""
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"algorithm={algorithm!r}: a method, such as PipeSGD(width=2); there are {', '.join(method_names())}")
    chosen = [calibration.draws[position] for position in _spread(len(calibration.draws), draws)]
    steps = affordable(calibration, algorithm, setting, steps)
    found = simulated(calibration, algorithm, setting, steps, seed)
    mean_s = found.step_s
    drawn = [simulated(calibration.drawn(draw), algorithm, setting, steps, seed, found.slow) for draw in chosen]
    said = sorted([mean_s, *(one.step_s for one in drawn)])
    low, high = (float(np.quantile(said, level)) for level in BAND)
    scale = mean_s / float(found.times.mean())
    left = {
        what: scale * _without(what, calibration, algorithm, setting, steps, seed, found.slow)
        for what in ("compute", "wire", "latency", "stragglers")
    }
    saved = {"compute": left["stragglers"] - left["compute"], **{what: mean_s - left[what] for what in ("wire", "latency", "stragglers")}}
    return Prediction(
        method=found.run.label,
        setting=setting,
        step_s=mean_s,
        usual_s=scale * midmean(found.times),
        low_s=low * min(1.0, *found.orders),
        high_s=high * max(1.0, *found.orders),
        saved_s={what: max(value, 0.0) for what, value in saved.items()},
        overlap=_hidden(found.run),
    )


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
    """The simulated run from which `predict` takes its numbers, with all its spans; arguments and errors as there."""
    setting = make_setting(calibration, workers, network, bandwidth_bytes_per_s)
    return simulated(calibration, algorithm, setting, steps, seed).run


def affordable(calibration: Calibration, algorithm: Algorithm, setting: Setting, steps: int) -> int:
    """Fewer steps where each has many messages: a pipeline is in its stride after two or three."""
    collective = getattr(algorithm, "collective", None)
    if not sends_messages(algorithm) or algorithm.has_servers:
        return steps
    buckets = 1 if algorithm.bucket_bytes is None else calibration.shapes.num_bytes / max(algorithm.bucket_bytes, 1.0) + 1
    messages = setting.workers * 2 * (setting.workers - 1) * getattr(collective, "chunks", 1) * buckets
    return int(min(steps, max(LEAST_STEPS, MESSAGES / max(messages, 1.0))))


def _spread(num: int, wanted: int) -> list[int]:
    return sorted({round(position) for position in np.linspace(0, num - 1, min(num, wanted))}) if num and wanted else []


def step_s(calibration: Calibration, algorithm: Algorithm, setting: Setting, steps: int, seed: int) -> float:
    """The mean seconds of a step, and nothing else."""
    steps = affordable(calibration, algorithm, setting, steps)
    return simulated(calibration, algorithm, setting, steps, seed).step_s


def _without(
    what: str, calibration: Calibration, algorithm: Algorithm, setting: Setting, steps: int, seed: int, slow: Slowness | None
) -> float:
    """Seconds of a step in which something costs nothing."""
    compute, network = effective_costs(calibration, algorithm, setting, slow)
    match what:
        case "compute":
            compute = replace(compute, forward_s=0.0, backward_s=0.0, update_s=0.0)
        case "wire":
            network = replace(network, bandwidth_bytes_per_s=UNBOUND)
        case "latency":
            network = replace(network, latency_s=0.0)
        case "stragglers":
            mean = statistics.fmean(float(np.median(compute.factors(seed, step, setting.workers))) for step in range(steps))
            compute = replace(compute, forward_s=compute.forward_s * mean, backward_s=compute.backward_s * mean, stragglers=())
    return float(step_seconds(simulated_run(calibration, algorithm, setting, compute, network, steps, seed)).mean())


def _hidden(run: Run) -> float | None:
    found = overlap(run.spans, slice(num_warm_up(len(run.metrics[0])), None))
    return found.fraction
