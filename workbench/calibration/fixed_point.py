"""A calibrated run simulated where ranks share cores and links: again and again, until what slows it is what it says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from workbench.analysis.summary import step_seconds
from workbench.calibration.cores import Slowness, slowness_in
from workbench.calibration.effective import Setting, core_s, crowd, effective_costs, wire_part
from workbench.calibration.model import Calibration
from workbench.costs import Compute, Network
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulate import simulate
from workbench.trace.run import Run

ROUNDS, ALIKE = 6, 0.02  # of simulations until slowness and run agree; by what part they may not


def midmean(times: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """The mean of the middle half: as robust as a median nearly, and right where long and short steps alternate, as in a pipeline.

    >>> midmean(np.array([1.0, 3.0, 1.0, 3.0, 100.0, 1.0, 3.0, 0.0]))
    2.0
    """
    ordered = np.sort(times)
    quarter = len(ordered) // 4
    return float(ordered[quarter : len(ordered) - quarter].mean())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A run and its steps' seconds.

    Attributes:
        slow: by what cores that are shared slow each kind of work in it.
        orders: of a method whose messages meet at an interface: the seconds of a step over `step_s` where they share it fairly, and
            where each waits for those before it.
    """

    run: Run
    times: np.ndarray[Any, np.dtype[np.float64]]
    slow: Slowness | None = None
    orders: tuple[float, float] = (1.0, 1.0)

    @property
    def step_s(self) -> float:
        """The mean; between both orders where they differ."""
        return float(self.times.mean()) / self.orders[0]


def simulated(
    calibration: Calibration, algorithm: Algorithm, setting: Setting, steps: int, seed: int, slow: Slowness | None = None
) -> Simulated:
    """A run, with the slowness of cores that are shared: `slow`, or as it settles.

    Where servers' replies meet at an interface, TCP's connections share it, but not quite fairly: on the emulated network the first of
    three replies is there after 2.3 to 2.5 times what it takes alone, the others after 2.7 and 3. So what is said is the middle
    between links that are shared fairly and messages one behind the other.
    """
    found = _settled(calibration, algorithm, setting, steps, seed, fair=True, slow=slow)
    if not (algorithm.has_servers and setting.workers > 2 and calibration.network(1.0).fair):
        return found
    turns = _settled(calibration, algorithm, setting, steps, seed, fair=False, slow=found.slow)
    fair_s, turns_s = float(found.times.mean()), float(turns.times.mean())
    middle_s = (fair_s + turns_s) / 2
    return replace(found, orders=(fair_s / middle_s, turns_s / middle_s))


def _settled(
    calibration: Calibration, algorithm: Algorithm, setting: Setting, steps: int, seed: int, *, fair: bool, slow: Slowness | None
) -> Simulated:
    """Simulated again until the cores slow what the run says they slow; and a usual step takes at least what all it does takes of them."""

    def run(now: Slowness | None) -> tuple[Run, Network]:
        compute, network = effective_costs(calibration, algorithm, setting, now)
        network = replace(network, fair=network.fair and fair)
        return simulated_run(calibration, algorithm, setting, compute, network, steps, seed), network

    if setting.cores is None or setting.workers < 2:
        done, _ = run(None)
        return Simulated(run=done, times=step_seconds(done))
    all_at_once = crowd(calibration, algorithm, setting)
    part = wire_part(calibration, algorithm, setting)
    now = slow or all_at_once
    for number in range(ROUNDS):
        done, network = run(now)
        if slow is not None or number == ROUNDS - 1:
            break
        found = slowness_in(
            done, cores=setting.cores, threads=calibration.host.threads, wire_part=part, s_per_byte=1 / network.bandwidth_bytes_per_s
        )
        found = replace(found, compute=max(found.compute, all_at_once.compute))  # a step waits for the slowest, which all others slow
        if now.is_like(found, ALIKE):
            break
        now = now.nearer(found)
    times = step_seconds(done)
    least_s = setting.workers * core_s(calibration, algorithm, setting, done, now) / setting.cores
    return Simulated(run=done, times=times * max(1.0, least_s / midmean(times)), slow=now)


def simulated_run(
    calibration: Calibration, algorithm: Algorithm, setting: Setting, compute: Compute, network: Network, steps: int, seed: int
) -> Run:
    """So many steps of the method on simulated workers, timing only."""
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
