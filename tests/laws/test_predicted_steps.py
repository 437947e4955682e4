"""The predicted time of a step is that of a simulation with the costs of what an algorithm sends, for each algorithm.

The calibration has other costs for the library's own sums than for messages. Which of them an algorithm uses is read from
a trace, not from its class.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.laws.variants import name_of, representatives
from workbench import costs
from workbench.calibration.effective import make_setting
from workbench.calibration.model import Calibration
from workbench.calibration.parts import Estimate, Line, Origin, Pace, Shapes
from workbench.calibration.predict import predict
from workbench.calibration.steady import gap, messages_per_step, steady_seconds, steady_steps
from workbench.ops import AllReduce, Apply, Backward, EndStep, Program, Recv, Send
from workbench.program import Algorithm, Context

WORKERS = 4
LIBRARY_S, MESSAGE_S, SUM_S_PER_BYTE, S_PER_BYTE = 20e-3, 1e-3, 2e-8, 8e-9
COMPUTE = costs.Compute(forward_s=0.01, backward_s=0.02, update_s=0.001)
LIBRARY_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier")


def calibration() -> Calibration:
    return Calibration(
        origin=Origin(source="made up", algorithm="none", runtime="simulated", num_workers=WORKERS, num_steps=1),
        shapes=Shapes(parameters=(("weight", (200, 300)), ("bias", (300,))), batch_size=8),
        pace=Pace(
            forward_s=Estimate(COMPUTE.forward_s),
            backward_s=Estimate(COMPUTE.backward_s),
            update_s=Estimate(COMPUTE.update_s),
            other_s=Estimate(0.0),
        ),
        line=Line(
            latency_s=Estimate(LIBRARY_S),
            message_latency_s=Estimate(MESSAGE_S),
            s_per_byte=Estimate(S_PER_BYTE),
            sum_s_per_byte=Estimate(SUM_S_PER_BYTE),
        ),
    )


def network(latency_s: float, sum_s_per_byte: float) -> costs.Network:
    """A network with one latency, for algorithms that use one kind of communication."""
    return costs.Network(latency_s=latency_s, bandwidth_bytes_per_s=1 / S_PER_BYTE, sum_s_per_byte=sum_s_per_byte)


@lru_cache(maxsize=1)
def trace(algorithm: Algorithm, on: costs.Network, steps: int) -> wb.Run:
    shapes = calibration().shapes
    return wb.simulate(
        algorithm,
        shapes.problem(shapes.batch_size * WORKERS * steps),
        workers=WORKERS,
        network=on,
        compute=COMPUTE,
        timing_only=True,
        detail="messages",
        steps=steps,
        batch_size=shapes.batch_size,
        trace_steps=None,
    )


def step_of(algorithm: Algorithm) -> tuple[float, bool, bool]:
    """Return the seconds of a step by messages, and whether it uses the library's collectives, and messages."""
    steps = steady_steps(algorithm, 30)
    first = trace(algorithm, network(MESSAGE_S, SUM_S_PER_BYTE), steps)
    during = first.spans.table["step"] < steps - 1  # without the average at the end
    kinds = set(first.spans.kind_names[during].tolist())
    library, messages = bool(kinds & set(LIBRARY_KINDS)), "send" in kinds
    run = trace(algorithm, network(LIBRARY_S, 0.0), steps) if library and not messages else first
    return float(steady_seconds(run, algorithm).mean()), library, messages


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMessages(Algorithm):
    """An algorithm of a newcomer: each rank sends its gradient to the next one, every `interval` steps."""

    interval: int = 1

    def worker(self, ctx: Context) -> Program:
        for step in ctx.steps():
            gradient = yield Backward(step)
            if (step + 1) % self.interval == 0:
                place, p = ctx.rank, ctx.num_workers
                if place % 2 == 0:
                    yield Send((place + 1) % p, gradient.flat.clone(), tag=1)
                    yield Recv((place - 1) % p, tag=1, like=gradient.flat.clone())
                else:
                    yield Recv((place - 1) % p, tag=1, like=gradient.flat.clone())
                    yield Send((place + 1) % p, gradient.flat.clone(), tag=1)
            yield Apply(gradient)
            yield EndStep(step)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSum(Algorithm):
    """An algorithm of a newcomer with the library's sum, in a field that is not called `collective`."""

    way: Any = None

    def worker(self, ctx: Context) -> Program:
        for step in ctx.steps():
            gradient = yield Backward(step)
            yield Apply((yield AllReduce(gradient, self.way)))
            yield EndStep(step)


NEWCOMERS = [OwnMessages(), OwnMessages(interval=50), OwnSum(), OwnSum(way=wb.collectives.Ring())]


@pytest.mark.parametrize("algorithm", [*representatives(), *NEWCOMERS], ids=name_of)
def test_a_prediction_has_the_costs_of_what_is_sent(algorithm: Algorithm) -> None:
    expected_s, library, messages = step_of(algorithm)
    if library and messages:
        pytest.skip("it mixes both, so no network with one latency has its time")
    found = predict(calibration(), algorithm, workers=WORKERS, steps=30, draws=0)
    assert found.step_s == pytest.approx(expected_s, rel=0.02), f"library: {library}, messages: {messages}"
    check_messages(algorithm)


def check_messages(algorithm: Algorithm) -> None:
    """Check the number of messages, which says how many steps can be simulated, and how long a rank handles them."""
    steps = steady_steps(algorithm, 30)
    run = trace(algorithm, network(MESSAGE_S, SUM_S_PER_BYTE), steps)
    during = run.spans.select(kinds=("send",)).table
    counted = (
        int(np.count_nonzero(during["step"] < steps - 1)) / (steps - 1) * max(algorithm.period, gap(run, algorithm))
    )
    setting = make_setting(calibration(), WORKERS)
    predicted = messages_per_step(calibration(), algorithm, setting)
    assert (predicted == 0) == (counted == 0)
    assert predicted == pytest.approx(counted, rel=0.6, abs=2)


def test_a_slow_library_does_not_slow_gossip_and_slow_messages_do_not_slow_its_sums() -> None:
    def step_s(algorithm: Algorithm, **line: float) -> float:
        given = calibration()
        changed = replace(given, line=replace(given.line, **{name: Estimate(value) for name, value in line.items()}))
        return predict(changed, algorithm, workers=WORKERS, steps=30, draws=0).step_s

    for algorithm in (wb.DPSGD(), wb.StochasticGradientPush(), wb.ADPSGD(), wb.AdasumSGD(), OwnMessages()):
        assert step_s(algorithm, latency_s=0.5) == pytest.approx(step_s(algorithm), rel=0.01)
    for algorithm in (wb.SynchronousSGD(), wb.LayerwiseSGD(bucket_bytes=1e5), wb.LocalSGD(every=4), OwnSum()):
        assert step_s(algorithm, message_latency_s=0.5) == pytest.approx(step_s(algorithm))
        assert step_s(algorithm, latency_s=0.5) > 2 * step_s(algorithm)
