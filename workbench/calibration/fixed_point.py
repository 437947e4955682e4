"""Simulate a calibrated run with shared cores and links, repeatedly, until the run and its slowdown agree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from workbench.analysis.summary import step_seconds
from workbench.calibration.cores import Slowness, slowness_in
from workbench.calibration.effective import Setting, core_s, core_slowdown, effective_costs, wire_part
from workbench.calibration.model import Calibration
from workbench.costs import Compute, Network
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulate import simulate
from workbench.trace.run import Run

ROUNDS, ALIKE = 6, 0.02  # most simulations until slowdown and run agree; their relative tolerance


def midmean(times: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Return the mean of the middle half.

    It is nearly as robust as a median, and also correct if long and short steps alternate, as in a pipeline.

    >>> midmean(np.array([1.0, 3.0, 1.0, 3.0, 100.0, 1.0, 3.0, 0.0]))
    2.0
    """
    ordered = np.sort(times)
    quarter = len(ordered) // 4
    return float(ordered[quarter : len(ordered) - quarter].mean())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A run and the seconds of its steps.

    Attributes:
        slow: slowdown of each kind of work by shared cores.
        orders: seconds of a step divided by `step_s`, for two cases: messages share an interface fairly, or are sent
            one after another. The cases differ for algorithms with servers.
    """

    run: Run
    times: np.ndarray[Any, np.dtype[np.float64]]
    slow: Slowness | None = None
    orders: tuple[float, float] = (1.0, 1.0)

    @property
    def step_s(self) -> float:
        """Mean seconds of a step; the middle of the two cases of `orders` if they differ."""
        return float(self.times.mean()) / self.orders[0]


def simulated(
    calibration: Calibration,
    algorithm: Algorithm,
    setting: Setting,
    steps: int,
    seed: int,
    slow: Slowness | None = None,
) -> Simulated:
    """Simulate a run with a slowdown by shared cores: `slow`, or the fixed point if `slow` is None.

    Replies of servers are TCP connections that share an interface, but not exactly fairly. On the emulated network, the
    first of three replies takes 2.3 to 2.5 times as long as alone, the others 2.7 and 3 times. So the result is the
    middle between fair sharing and messages one after another.
    """
    found = _fixed_point(calibration, algorithm, setting, steps, seed, fair=True, slow=slow)
    if not (algorithm.requires.servers and setting.workers > 2 and calibration.network(1.0).fair):
        return found
    turns = _fixed_point(calibration, algorithm, setting, steps, seed, fair=False, slow=found.slow)
    fair_s, turns_s = float(found.times.mean()), float(turns.times.mean())
    middle_s = (fair_s + turns_s) / 2
    return replace(found, orders=(fair_s / middle_s, turns_s / middle_s))


def _fixed_point(
    calibration: Calibration,
    algorithm: Algorithm,
    setting: Setting,
    steps: int,
    seed: int,
    *,
    fair: bool,
    slow: Slowness | None,
) -> Simulated:
    """Repeat the simulation until slowdown and run agree. A usual step takes at least the core time of its work."""

    def run(now: Slowness | None) -> tuple[Run, Network]:
        compute, network = effective_costs(calibration, algorithm, setting, now)
        network = replace(network, fair=network.fair and fair)
        return simulated_run(calibration, algorithm, setting, compute, network, steps, seed), network

    if setting.cores is None or setting.workers < 2:
        done, _ = run(None)
        return Simulated(run=done, times=step_seconds(done))
    all_at_once = core_slowdown(calibration, algorithm, setting)
    part = wire_part(calibration, algorithm, setting)
    now = slow or all_at_once
    for number in range(ROUNDS):
        done, network = run(now)
        if slow is not None or number == ROUNDS - 1:
            break
        found = slowness_in(
            done,
            cores=setting.cores,
            threads=calibration.host.threads,
            wire_part=part,
            s_per_byte=1 / network.bandwidth_bytes_per_s,
        )
        # a step waits for the slowest rank, which is slowed by all the others
        found = replace(found, compute=max(found.compute, all_at_once.compute))
        if now.is_like(found, ALIKE):
            break
        now = now.geometric_mean(found)
    times = step_seconds(done)
    least_s = setting.workers * core_s(calibration, algorithm, setting, done, now) / setting.cores
    return Simulated(run=done, times=times * max(1.0, least_s / midmean(times)), slow=now)


def simulated_run(
    calibration: Calibration,
    algorithm: Algorithm,
    setting: Setting,
    compute: Compute,
    network: Network,
    steps: int,
    seed: int,
) -> Run:
    """Simulate `steps` steps of the algorithm, timing only."""
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
