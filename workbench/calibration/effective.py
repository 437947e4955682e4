"""Costs under given conditions: another network, and cores that ranks share between compute and communication."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any, Literal, final

from workbench import costs
from workbench.calibration.cores import LOCAL, Slowness
from workbench.calibration.model import Calibration
from workbench.costs import Compute, Network
from workbench.errors import ConfigError
from workbench.gradients import build_layout, trainable
from workbench.naming import kebab
from workbench.program import Algorithm
from workbench.trace.run import Run

Cores = float | Literal["measured", "own"] | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The conditions of a prediction.

    Attributes:
        workers: number of ranks.
        line_bytes_per_s: the nominal rate of the link; None: the measured link.
        latency_s: latency in addition to the measured one.
        cores: number of cores that all ranks share; None: each rank has enough.
        name: name of the network in tables.
        assumed: True if the number of cores was assumed, False if it was given.
    """

    workers: int
    line_bytes_per_s: float | None = None
    latency_s: float = 0.0
    cores: float | None = None
    name: str = "as measured"
    assumed: bool = False


def make_setting(
    calibration: Calibration,
    workers: int,
    network: Network | str | None = None,
    bandwidth_bytes_per_s: float | None = None,
    latency_s: float | None = None,
    cores: Cores = None,
) -> Setting:
    """Return the conditions that the arguments of `predict` describe.

    Without `cores`, the shared cores of the measured machine are assumed only for the same number of workers on the
    same network. Otherwise each rank is assumed to have a host with the cores that it needs.
    """
    if network is not None and bandwidth_bytes_per_s is not None:
        raise ConfigError("give a network or a bandwidth, not both")
    if not isinstance(workers, int) or workers < 1:
        raise ConfigError(f"workers={workers!r}: give a whole number, 1 or more")
    if bandwidth_bytes_per_s is not None and not bandwidth_bytes_per_s > 0:
        raise ConfigError(f"bandwidth_bytes_per_s={bandwidth_bytes_per_s!r}: give a number above 0, 125e6 for 1 Gbit/s")
    if isinstance(cores, str) and cores not in ("measured", "own"):
        raise ConfigError(
            f'cores={cores!r}: give a number that all ranks share, "measured" for those of the calibration, "own" for '
            "a host for each rank"
        )
    if isinstance(cores, int | float) and not cores > 0:
        raise ConfigError(f'cores={cores!r}: give a number above 0, or "own" for a host for each rank')
    assumed = cores is None
    same = (
        workers == calibration.origin.num_workers
        and network is None
        and bandwidth_bytes_per_s is None
        and latency_s is None
    )
    if cores is None:
        cores = "measured" if same else "own"
    shared = (calibration.host.cores if cores == "measured" else None) if isinstance(cores, str) else float(cores)
    name = "as measured"
    if network is not None:
        found: Any = costs.get(network) if isinstance(network, str) else network
        bandwidth_bytes_per_s, name = found.bandwidth_bytes_per_s, found.name
        latency_s = found.latency_s if latency_s is None else latency_s
    elif bandwidth_bytes_per_s is not None:
        name = f"{bandwidth_bytes_per_s * 8e-6:g} Mbit/s"
    if bandwidth_bytes_per_s is None and workers > 1 and calibration.line.s_per_byte.value <= 0:
        why = "of one rank" if calibration.origin.num_workers < 2 else "of a run whose trace has no communication"
        raise ConfigError(f"the calibration is {why} and has no network: give network= or bandwidth_bytes_per_s=")
    return Setting(
        workers=workers,
        line_bytes_per_s=bandwidth_bytes_per_s,
        latency_s=latency_s or 0.0,
        cores=shared,
        name=name,
        assumed=assumed,
    )


def describe_cores(calibration: Calibration, setting: Setting) -> str:
    """Return which cores were measured, and which a prediction assumes."""
    host, ranks = calibration.host, calibration.origin.num_workers
    threads = f"{host.threads} thread{'s' if host.threads > 1 else ''} a rank"
    if host.cores is None:
        measured = f"{ranks} ranks that did not share cores, as far as the record says ({threads})"
    else:
        measured = f"{ranks} ranks on {host.cores:g} cores of one machine ({threads})"
    if setting.cores is None:
        predicted = f"{setting.workers} ranks, each on a host with its own cores"
    else:
        predicted = f"{setting.workers} ranks on {setting.cores:g} shared cores"
    return f"measured: {measured}; predicted: {predicted}{' (assumed: --cores changes it)' if setting.assumed else ''}"


def effective_costs(
    calibration: Calibration, algorithm: Algorithm, setting: Setting, slow: Slowness | None = None
) -> tuple[Compute, Network]:
    """Return compute and network costs of one rank, on the cores that the ranks share.

    Args:
        slow: slowdown of each kind of work by shared cores; None: the result of `core_slowdown`.
    """
    compute = calibration.compute()
    network = calibration.network(setting.line_bytes_per_s, setting.latency_s, codec=codec_of(algorithm))
    if setting.cores is None:
        return compute, network
    slow = slow or core_slowdown(calibration, setting)
    scaled = {name: getattr(compute, name) * slow.compute for name in ("forward_s", "backward_s", "update_s")}
    local = {
        name: getattr(network, name) * slow.local
        for name in ("sum_s_per_byte", "encode_s_per_byte", "decode_s_per_byte")
    }
    rate = network.bandwidth_bytes_per_s / slow.wire
    latencies = {
        name: (getattr(network, name) - setting.latency_s) * slow.hop + setting.latency_s
        for name in ("latency_s", "library_latency_s")
    }
    return replace(compute, **scaled), replace(network, bandwidth_bytes_per_s=rate, **latencies, **local)


def core_slowdown(calibration: Calibration, setting: Setting) -> Slowness:
    """Return the slowdown if all ranks do the same work at the same time.

    It is at least 1. For compute of p ranks with k threads on c cores it is p k / c.
    """
    workers, cores = setting.workers, setting.cores or setting.workers
    each = max(1.0, workers / cores)
    wire = max(1.0, workers * wire_part(calibration, setting) / cores)
    return Slowness(compute=max(1.0, workers * calibration.host.threads / cores), local=each, wire=wire)


def wire_part(calibration: Calibration, setting: Setting) -> float:
    """Return the part of a core that a rank needs while it sends."""
    network = calibration.network(setting.line_bytes_per_s, setting.latency_s)
    return core_s_per_byte(calibration, network) * network.bandwidth_bytes_per_s


def core_s(calibration: Calibration, algorithm: Algorithm, setting: Setting, run: Run, slow: Slowness) -> float:
    """Return the core seconds of a rank's step, without slowdown: compute, sending and work on messages, hidden or not.

    Args:
        run: a simulated run, slowed by `slow`.
    """
    compute, threads = calibration.compute(), calibration.host.threads
    total = compute.forward_s + compute.backward_s + compute.update_s
    with_shapes = calibration.shapes.problem(1).model()
    buckets = algorithm.requires.buckets
    layout = build_layout(trainable(with_shapes), buckets.max_bytes, buckets.count)
    sent = [algorithm.bytes_per_step(rank, setting.workers, layout) or 0.0 for rank in range(setting.workers)]
    table = run.spans.select(kinds=LOCAL).table
    work_s = float((table["end_s"] - table["start_s"]).sum()) / slow.local / len(run.metrics[0]) / setting.workers
    network = calibration.network(setting.line_bytes_per_s, setting.latency_s)
    return threads * total + core_s_per_byte(calibration, network) * statistics.fmean(sent) + work_s


def core_s_per_byte(calibration: Calibration, network: Network) -> float:
    """Return core seconds for a byte over this network.

    If the link is faster than the measured one, communication takes the same share of a core as on the measured link.
    A faster link delivers bytes in larger pieces, because a burst of `tbf` and a TCP window last equally long, so the
    receiver polls equally often. If the link is slower, each byte takes the same core time as on the measured link,
    because a piece is at least a packet. On the emulated network a rank's own processor time for a byte is 5 to 6 ns at
    100, 200 and 400 Mbit/s, and 3.5 ns at 800 Mbit/s.
    """
    measured = calibration.line.s_per_byte.value
    scale = network.bandwidth_bytes_per_s * measured if measured > 0 else 1.0
    return calibration.host.cpu_s_per_byte / max(1.0, scale)


def codec_of(algorithm: Algorithm) -> str | None:
    """Return the name of an algorithm's codec."""
    return None if algorithm.codec is None else kebab(type(algorithm.codec).__name__)
