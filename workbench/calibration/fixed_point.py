"""Simulate a calibrated run with shared cores and links, repeatedly, until the run and its slowdown agree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from workbench.calibration.cores import Slowness, slowness_in
from workbench.calibration.effective import Setting, codec_of, core_s, core_slowdown, effective_costs, wire_part
from workbench.calibration.model import Calibration
from workbench.calibration.steady import messages_per_step, staleness, steady_seconds
from workbench.collectives.wire import wire_share
from workbench.costs import Compute, Network
from workbench.errors import ConfigError
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulate import Detail, simulate
from workbench.trace.run import Run

MOST_MESSAGES, FEWEST_PIPELINE_STEPS = 30_000, 24  # to simulate of a pipeline of more than two steps without a formula
ROUNDS, ALIKE = 6, 0.02  # most simulations until slowdown and run agree; their relative tolerance


def midmean(times: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Return the mean of the middle half.

    It is nearly as robust as a median, and also correct if long and short steps alternate, as in a pipeline.

    >>> midmean(np.array([1.0, 3.0, 1.0, 3.0, 100.0, 1.0, 3.0, 0.0]))
    2.0
    """
    ordered = np.sort(times, axis=None)
    quarter = len(ordered) // 4
    return float(ordered[quarter : len(ordered) - quarter].mean())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """An algorithm under the conditions of `setting`, with costs from a calibration.

    Attributes:
        steps: steps to simulate.
        seed: of stragglers and other random choices.
    """

    calibration: Calibration
    algorithm: Algorithm
    setting: Setting
    steps: int
    seed: int = 0

    def costs(self, slow: Slowness | None = None) -> tuple[Compute, Network]:
        """Return the costs with a slowdown by shared cores (`effective_costs`)."""
        return effective_costs(self.calibration, self.algorithm, self.setting, slow)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A run and the seconds of its steps.

    Attributes:
        times: seconds of the steps after the start, shape (periods, steps of a period): see `steady_seconds`.
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


def simulated(scenario: Scenario, slow: Slowness | None = None) -> Simulated:
    """Simulate a run with a slowdown by shared cores: `slow`, or the fixed point if `slow` is None.

    Replies of servers are TCP connections that share an interface, but not exactly fairly. On the emulated network, the
    first of three replies takes 2.3 to 2.5 times as long as alone, the others 2.7 and 3 times. So the result is the
    middle between fair sharing and messages one after another.
    """
    found = _fixed_point(scenario, fair=True, slow=slow)
    servers = scenario.algorithm.requires.servers
    if not (servers and scenario.setting.workers > 2 and scenario.calibration.network(1.0).fair):
        return found
    turns = _fixed_point(scenario, fair=False, slow=found.slow)
    fair_s, turns_s = float(found.times.mean()), float(turns.times.mean())
    middle_s = (fair_s + turns_s) / 2
    return replace(found, orders=(fair_s / middle_s, turns_s / middle_s))


def _fixed_point(scenario: Scenario, *, fair: bool, slow: Slowness | None) -> Simulated:
    """Repeat the simulation until slowdown and run agree. A usual step takes at least the core time of its work."""
    calibration, algorithm, setting = scenario.calibration, scenario.algorithm, scenario.setting

    def run(now: Slowness | None) -> tuple[Run, Network]:
        compute, network = scenario.costs(now)
        network = replace(network, fair=network.fair and fair)
        return simulated_run(scenario, compute, network), network

    if setting.cores is None or setting.workers < 2:
        done, _ = run(None)
        return Simulated(run=done, times=steady_seconds(done, algorithm))
    all_at_once = core_slowdown(calibration, setting)
    part = wire_part(calibration, setting)
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
    times = steady_seconds(done, algorithm)
    least_s = setting.workers * core_s(calibration, algorithm, setting, done, now) / setting.cores
    return Simulated(run=done, times=times * max(1.0, least_s / midmean(times)), slow=now)


def simulated_run(scenario: Scenario, compute: Compute, network: Network) -> Run:
    """Simulate the steps of the algorithm with these costs, timing only.

    A pipeline of more than two steps needs many of them to be full. If they have too many messages, its sums are by
    formula; where there is none, fewer steps are simulated.
    """
    if staleness(scenario.algorithm) > 1:
        messages = messages_per_step(scenario.calibration, scenario.algorithm, scenario.setting)
        if messages * scenario.steps > MOST_MESSAGES:
            found = simulated_by_formula(scenario, compute, network)
            if found is not None:
                return found
            fewer = int(min(scenario.steps, max(FEWEST_PIPELINE_STEPS, MOST_MESSAGES / messages)))
            scenario = replace(scenario, steps=fewer)
    return _simulate(scenario, compute, network)


def simulated_by_formula(scenario: Scenario, compute: Compute, network: Network) -> Run | None:
    """Simulate one worker's program, with each sum by a closed form; None: there is none, or workers share cores."""
    workers, num_bytes = scenario.setting.workers, scenario.calibration.shapes.num_bytes
    if scenario.setting.cores is not None or not scenario.algorithm.symmetric:
        return None
    folded = with_codec(network, scenario.algorithm, num_bytes, workers)
    try:
        return _simulate(scenario, compute, folded, "formula")
    except ConfigError:  # no closed form
        return None


def _simulate(scenario: Scenario, compute: Compute, network: Network, detail: Detail = "auto") -> Run:
    shapes, workers = scenario.calibration.shapes, scenario.setting.workers
    return simulate(
        scenario.algorithm,
        shapes.problem(shapes.batch_size * workers * scenario.steps),
        workers=workers,
        network=network,
        compute=compute,
        timing_only=True,
        detail=detail,
        steps=scenario.steps,
        seed=scenario.seed,
        batch_size=shapes.batch_size,
    )


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
