"""What a step would take with another method, on other numbers of workers, over another network: simulated from a calibration."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from workbench import costs
from workbench.algorithms import names as method_names
from workbench.analysis.overlap import overlap
from workbench.analysis.summary import num_warm_up, step_seconds
from workbench.analysis.table import Column, Table, percent, seconds
from workbench.calibration.model import Calibration
from workbench.collectives import Native
from workbench.costs import Compute, Network
from workbench.errors import ConfigError
from workbench.gradients import build_layout, trainable
from workbench.naming import kebab
from workbench.program import Algorithm
from workbench.runtimes.simulate import simulate
from workbench.trace.run import Run

STEPS = 30
BAND = (0.1, 0.9)
NUM_DRAWS = 8
UNBOUND = 1e18  # bytes a second of a wire that costs nothing


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where something is predicted.

    Attributes:
        workers: how many ranks.
        line_bytes_per_s: what the link is called; None: the one that was measured.
        latency_s: of the link, beyond what was measured.
        cores: that all ranks share; None: each has what it needs.
        name: how tables call the network.
    """

    workers: int
    line_bytes_per_s: float | None = None
    latency_s: float = 0.0
    cores: float | None = None
    name: str = "as measured"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a step is said to take.

    Attributes:
        step_s: seconds, the mean over steps; `median_s` the median.
        low_s, high_s: of the mean, what nine and one of ten samples of the calibration's steps exceed.
        saved_s: by how much a step were shorter if compute, wire, latency or stragglers cost nothing; what saves most binds.
        overlap: hidden part of the communication; None where there is none.
    """

    method: str
    setting: Setting
    step_s: float
    median_s: float
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
            "median_s": self.median_s,
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

    The method itself is run on simulated workers, timing only; where ranks share cores, compute and what communication takes of
    them is slowed until the cores suffice. The band is of the calibration's uncertainty: the same with other draws of it.

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


def make_setting(
    calibration: Calibration,
    workers: int,
    network: Network | str | None = None,
    bandwidth_bytes_per_s: float | None = None,
    latency_s: float | None = None,
    cores: float | None = None,
) -> Setting:
    """The arguments of `predict` as a place to predict at."""
    if network is not None and bandwidth_bytes_per_s is not None:
        raise ConfigError("give a network or a bandwidth, not both")
    if not isinstance(workers, int) or workers < 1:
        raise ConfigError(f"workers={workers!r}: a whole number, 1 or more")
    if bandwidth_bytes_per_s is not None and not bandwidth_bytes_per_s > 0:
        raise ConfigError(f"bandwidth_bytes_per_s={bandwidth_bytes_per_s!r}: a number above 0, 125e6 for 1 Gbit/s")
    cores = cores if cores is not None else calibration.host.cores
    name = "as measured"
    if network is not None:
        found: Any = costs.get(network) if isinstance(network, str) else network
        bandwidth_bytes_per_s, name = found.bandwidth_bytes_per_s, found.name
        latency_s = found.latency_s if latency_s is None else latency_s
    elif bandwidth_bytes_per_s is not None:
        name = f"{bandwidth_bytes_per_s * 8e-6:g} Mbit/s"
    if bandwidth_bytes_per_s is None and workers > 1 and calibration.line.s_per_byte.value <= 0:
        raise ConfigError("the calibration is of one rank and knows no network: give network= or bandwidth_bytes_per_s=")
    return Setting(workers=workers, line_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s or 0.0, cores=cores, name=name)


def predict_at(
    calibration: Calibration, algorithm: Algorithm, setting: Setting, *, steps: int = STEPS, draws: int = NUM_DRAWS, seed: int = 0
) -> Prediction:
    """`predict`, at a place that `make_setting` made."""
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"algorithm={algorithm!r}: a method, such as PipeSGD(width=2); there are {', '.join(method_names())}")
    chosen = [calibration.draws[position] for position in _spread(len(calibration.draws), draws)]
    run, times, shown = _simulated(calibration, algorithm, setting, steps, seed)
    means = [_step_s(calibration.drawn(draw), algorithm, setting, steps, seed) for draw in chosen]
    step_s = float(times.mean())
    low, high = (float(np.quantile([step_s, *means], level)) for level in BAND)
    saved = {
        what: step_s - _without(what, calibration, algorithm, setting, steps, seed) for what in ("compute", "wire", "latency", "stragglers")
    }
    return Prediction(
        method=run.label,
        setting=setting,
        step_s=step_s,
        median_s=float(np.median(times)),
        low_s=low,
        high_s=high,
        saved_s={what: max(value, 0.0) for what, value in saved.items()},
        overlap=shown,
    )


def _spread(num: int, wanted: int) -> list[int]:
    return sorted({round(position) for position in np.linspace(0, num - 1, min(num, wanted))}) if num and wanted else []


def _step_s(calibration: Calibration, algorithm: Algorithm, setting: Setting, steps: int, seed: int) -> float:
    return float(_simulated(calibration, algorithm, setting, steps, seed)[1].mean())


def _without(what: str, calibration: Calibration, algorithm: Algorithm, setting: Setting, steps: int, seed: int) -> float:
    """Seconds of a step in which something costs nothing."""
    compute, network = effective_costs(calibration, algorithm, setting)
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
    return float(step_seconds(_run(calibration, algorithm, setting, compute, network, steps, seed)).mean())


def _simulated(
    calibration: Calibration, algorithm: Algorithm, setting: Setting, steps: int, seed: int
) -> tuple[Run, np.ndarray[Any, np.dtype[np.float64]], float | None]:
    """A run, its steps' seconds, and how much of its communication was hidden; again where that takes cores from compute."""
    compute, network = effective_costs(calibration, algorithm, setting)
    run = _run(calibration, algorithm, setting, compute, network, steps, seed)
    hidden = _hidden(run)
    if setting.cores is not None and hidden:
        busy_s = hidden * _communication_cpu_s(calibration, algorithm, setting, run)
        compute, network = effective_costs(calibration, algorithm, setting, busy_s)
        run = _run(calibration, algorithm, setting, compute, network, steps, seed)
        hidden = _hidden(run)
    return run, step_seconds(run), hidden


def _run(
    calibration: Calibration, algorithm: Algorithm, setting: Setting, compute: Compute, network: Network, steps: int, seed: int
) -> Run:
    problem = calibration.shapes.problem(calibration.shapes.batch_size * setting.workers * steps)
    return simulate(
        algorithm,
        problem,
        workers=setting.workers,
        network=network,
        compute=compute,
        timing_only=True,
        steps=steps,
        seed=seed,
        batch_size=calibration.shapes.batch_size,
    )


def _hidden(run: Run) -> float | None:
    found = overlap(run.spans, slice(num_warm_up(len(run.metrics[0])), None))
    return found.fraction


def effective_costs(calibration: Calibration, algorithm: Algorithm, setting: Setting, busy_s: float = 0.0) -> tuple[Compute, Network]:
    """Compute and network of one rank among so many, on the cores that they share.

    With p ranks of k threads on c cores that compute T seconds a step, beside `busy_s` seconds of a core in which communication
    runs at the same time, each takes max(T, p (k T + busy_s) / c). A byte on the wire takes at least what its core's seconds,
    for all ranks at once, do.
    """
    host, compute = calibration.host, calibration.compute()
    network = calibration.network(
        setting.line_bytes_per_s, setting.latency_s, messages=sends_messages(algorithm), codec=codec_of(algorithm)
    )
    if setting.cores is None:
        return compute, network
    total = compute.forward_s + compute.backward_s + compute.update_s
    crowd = max(1.0, setting.workers * (host.threads * total + busy_s) / (setting.cores * total)) if total else 1.0
    scaled = {name: getattr(compute, name) * crowd for name in ("forward_s", "backward_s", "update_s")}
    least = setting.workers * host.cpu_s_per_byte / setting.cores
    crowd_local = max(1.0, setting.workers / setting.cores)
    local = {name: getattr(network, name) * crowd_local for name in ("sum_s_per_byte", "encode_s_per_byte", "decode_s_per_byte")}
    rate = 1 / max(1 / network.bandwidth_bytes_per_s, least)
    return replace(compute, **scaled), replace(network, bandwidth_bytes_per_s=rate, **local)


def _communication_cpu_s(calibration: Calibration, algorithm: Algorithm, setting: Setting, run: Run) -> float:
    """Seconds of a core that a rank's communication takes in a step: bytes, and work on messages; not slowed by others."""
    with_shapes = calibration.shapes.problem(1).model()
    layout = build_layout(trainable(with_shapes), algorithm.bucket_bytes, algorithm.num_buckets)
    sent = [algorithm.bytes_per_step(rank, setting.workers, layout) or 0.0 for rank in range(setting.workers)]
    table = run.spans.select(kinds=("sum", "encode", "decode")).table
    steps = len(run.metrics[0])
    crowd = max(1.0, setting.workers / (setting.cores or setting.workers))
    work_s = float((table["end_s"] - table["start_s"]).sum()) / crowd / steps / setting.workers
    return calibration.host.cpu_s_per_byte * statistics.fmean(sent) + work_s


def sends_messages(algorithm: Algorithm) -> bool:
    """Whether a method sends messages itself, rather than to ask the library for a sum."""
    return algorithm.has_servers or not isinstance(getattr(algorithm, "collective", Native()), Native)


def codec_of(algorithm: Algorithm) -> str | None:
    """The name of the codec that a method's collective has."""
    codec = getattr(getattr(algorithm, "collective", None), "codec", None)
    return None if codec is None else kebab(type(codec).__name__)
