"""The laws of the updates for any number of workers, size, cut and seed (simulated)."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.laws import tiny
from tests.laws.reference import serial
from tests.laws.train import assert_same, train
from tests.laws.variants import COLLECTIVES
from workbench.algorithms import ApplyOrder, LayerwiseSGD, PipeSGD, SynchronousSGD
from workbench.collectives import Native
from workbench.gradients import Gradient
from workbench.laws.sentences import assert_same_rows
from workbench.ops import Apply, Backward, EndStep, Ticket, WaitAny
from workbench.problems.base import Problem
from workbench.program import Context
from workbench.replica.backward import Hooks
from workbench.replica.local_training import LocalTraining
from workbench.settings import Settings

ROUNDING = 1e-11
OPTIMIZERS = st.sampled_from([tiny.sgd, tiny.momentum, tiny.adam])


def sized_mlp(widths: tuple[int, ...]) -> nn.Module:
    sizes = (tiny.NUM_FEATURES, *widths, tiny.NUM_CLASSES)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    widths = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    return tiny.problem(partial(sized_mlp, widths), num_samples=draw(st.integers(1, 20)), test=None)


@st.composite
def hows(draw: st.DrawFn) -> Settings:
    return Settings(
        steps=draw(st.integers(1, 6)),
        batch_size=draw(st.integers(1, 4)),
        optimizer=draw(OPTIMIZERS),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=40)
@given(
    num_workers=st.integers(1, 4),
    problem=problems(),
    how=hows(),
    bucket_bytes=st.one_of(st.none(), st.floats(0, 400)),
    order=st.sampled_from(ApplyOrder),
    collective=st.sampled_from(COLLECTIVES),
)
def test_layerwise_is_synchronous(num_workers, problem, how, bucket_bytes, order, collective) -> None:
    """Bit-identical if sums are in rank order (native sums of the simulator, Linear); a ring adds each block in another order."""
    found = train(
        "simulated",
        num_workers,
        LayerwiseSGD(bucket_bytes=bucket_bytes, apply=order, collective=collective),
        problem,
        how,
    )
    expected = train("simulated", num_workers, SynchronousSGD(), problem, how)
    in_rank_order = type(collective).__name__ != "Ring" or num_workers <= 2
    for rank in range(num_workers):
        assert_same(found.parameters[rank], expected.parameters[0], 0 if in_rank_order else ROUNDING)


@given(problem=problems(), how=hows(), bucket_bytes=st.floats(0, 200), seed=st.integers(0, 2**32 - 1))
def test_buckets_may_arrive_in_any_order(problem, how, bucket_bytes, seed) -> None:
    """One worker, driven by hand: each `WaitAny` is answered with a bucket drawn at random."""
    algorithm = LayerwiseSGD(bucket_bytes=bucket_bytes, apply=ApplyOrder.ANY)
    worker = LocalTraining(algorithm, problem, how, 0, 1, torch.device("cpu"))
    program, answer, random = algorithm.worker(Context(0, 1, num_steps=how.steps)), None, Random(seed)
    seen = []
    while True:
        try:
            request = program.send(answer)
        except StopIteration:
            break
        match request:
            case Backward(step, on_bucket):
                buckets: list[Gradient] = []
                worker.replica.backward(step, worker.minibatch(step), Hooks(bucket=buckets.append))
                answer = tuple(Ticket.completed(on_bucket(bucket).value) for bucket in buckets)
            case WaitAny(tickets):
                position = random.randrange(len(tickets))
                answer = position, tickets[position].value
            case Apply(gradient):
                answer = worker.replica.apply(gradient)
            case EndStep():
                answer = seen.append(worker.replica.read_parameters())
            case _:
                raise AssertionError(request)
    assert_same([*seen, seen[-1]], train("simulated", 1, SynchronousSGD(), problem, how).parameters[0], 0)


@settings(max_examples=40)
@given(
    num_workers=st.integers(1, 4),
    problem=problems(),
    how=hows(),
    width=st.integers(1, 5),
    collective=st.sampled_from(COLLECTIVES),
)
def test_pipe_is_serial_sgd_with_late_gradients(num_workers, problem, how, width, collective) -> None:
    found = train("simulated", num_workers, PipeSGD(width=width, collective=collective), problem, how)
    expected = serial(problem, how, num_workers, delay=width - 1)
    for rank in range(num_workers):
        assert_same(found.parameters[rank], expected, ROUNDING)


@settings(max_examples=30)
@given(
    num_workers=st.integers(1, 4),
    problem=problems(),
    how=hows(),
    width=st.integers(1, 3),
    bucket_bytes=st.floats(0, 400),
)
def test_time_changes_no_number(num_workers, problem, how, width, bucket_bytes) -> None:
    """A simulation is a pure function of its inputs: run twice it is the same run, to the last span."""
    for algorithm in (PipeSGD(width=width), LayerwiseSGD(bucket_bytes=bucket_bytes, collective=Native())):
        one, two = (train("simulated", num_workers, algorithm, problem, how) for _ in range(2))
        law = f"{type(algorithm).__name__}: a simulation is a function of its inputs"
        for rank in range(num_workers):
            assert_same_rows(law, one.run.metrics[rank], two.run.metrics[rank], f"rank {rank} of {num_workers}")
        assert_same_rows(law, one.run.spans.table.tolist(), two.run.spans.table.tolist(), "spans")
