"""Visits to servers that a simulation knows by heart are the visits that it would have made: the same run to the last bit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import tiny
from tests.laws.sentences import assert_same_rows
from workbench.algorithms import AsyncSGD, BackupSGD, DelayCompensatedSGD, ParameterServerSGD, SoftsyncSGD, StaleSynchronousSGD
from workbench.algorithms.servers import ServerAlgorithm
from workbench.costs import Compute, Lognormal, Network
from workbench.costs.stragglers import Constant, Failures
from workbench.errors import Stalled
from workbench.ops import Backward, Discard, EndStep, Program, Recv, Send, Start, Wait
from workbench.program import Context, answered, exchanged
from workbench.runtimes.simulator import simulation as simulated
from workbench.runtimes.simulator import visits as sim_visits
from workbench.runtimes.simulator.rehearsal import rehearse_answer, rehearse_exchange
from workbench.runtimes.simulator.simulation import Simulation
from workbench.runtimes.simulator.worker import Shapes, shape_of
from workbench.settings import Settings
from workbench.trace.run import Run

METHODS = (
    AsyncSGD(),
    AsyncSGD(clip_norm=1.0),
    AsyncSGD(cutoff=1),
    DelayCompensatedSGD(),
    SoftsyncSGD(splits=1),
    StaleSynchronousSGD(bound=0),
    StaleSynchronousSGD(bound=2),
    ParameterServerSGD(),
    BackupSGD(backups=1),
    BackupSGD(backups=0, timeout_s=0.3),
)
NETWORKS = (
    Network(latency_s=0.1, bandwidth_bytes_per_s=1000.0, sum_s_per_byte=1e-4),
    Network(latency_s=0.0, bandwidth_bytes_per_s=math.inf),  # everything at once: only the order of asking decides
    Network(latency_s=1.0, bandwidth_bytes_per_s=math.inf),
)
STRAGGLERS = ((), (Constant(factor=2.0),), (Lognormal(sigma=0.5),), (Failures(mean_between_s=3.0, repair_s=0.5),))


def run_of(algorithm: ServerAlgorithm, ranks: int, steps: int, network: Network, compute: Compute, traced: bool, seed: int) -> Run:
    how = Settings(steps=steps, batch_size=3, seed=seed, trace_steps=None if traced else 0)
    return Simulation(algorithm, tiny.problem(test=None), how, ranks, network=network, compute=compute, timing_only=True).run()


@settings(max_examples=60, deadline=None)
@given(
    method=st.sampled_from(METHODS),
    shards=st.integers(1, 3),
    dedicated=st.booleans(),
    workers=st.integers(2, 5),
    steps=st.integers(1, 5),
    network=st.sampled_from(NETWORKS),
    stragglers=st.sampled_from(STRAGGLERS),
    update_s=st.sampled_from([0.0, 0.25]),
    traced=st.booleans(),
    seed=st.integers(0, 100),
)
def test_a_run_is_the_same_without(
    method: Any,
    shards: int,
    dedicated: bool,
    workers: int,
    steps: int,
    network: Network,
    stragglers: Any,
    update_s: float,
    traced: bool,
    seed: int,
) -> None:
    algorithm = replace(method, shards=shards, dedicated=dedicated)
    compute = Compute(forward_s=0.25, backward_s=0.5, update_s=update_s, stragglers=stragglers)
    how = (algorithm, workers + shards * dedicated, steps, network, compute, traced, seed)
    played: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim_visits.Visit, "begin", _counted(sim_visits.Visit.begin, played))
        by_heart = run_of(*how)
        assert len(played) >= workers, "nothing was played"
        patch.setattr(simulated, "Learner", lambda shapes, shared: None)
        plain = run_of(*how)
    law = f"{algorithm}: a visit by heart is the visit itself"
    for rank, rows in plain.metrics.items():
        assert_same_rows(law, by_heart.metrics[rank], rows, f"rank {rank} of {workers}")
    assert_same_rows(law, by_heart.updates(), plain.updates(), "updates of servers")
    assert_same_rows(law, by_heart.spans.table.tolist(), plain.spans.table.tolist(), "spans")
    assert by_heart.spans.lanes == plain.spans.lanes
    assert len(plain.spans.table) > 0 or not traced
    assert len(by_heart.metrics) == len(plain.metrics) and len(plain.metrics[0]) > 0 and len(plain.updates()) > 0
    assert by_heart.info["result"] == plain.info["result"]


def _counted(begin: Any, played: list[str]) -> Any:
    def count(visit: Any, thread: Any) -> None:
        played.append(repr(visit))
        begin(visit, thread)

    return count


def _context() -> tuple[Context, Shapes]:
    layout = shape_of(tiny.problem(test=None), AsyncSGD(shards=2))
    return Context(0, 3, layout=layout), Shapes(layout)


def _exchange(ctx: Context, *, stamp: int | None = None, source: int = 2, twice: bool = False, other: bool = False) -> Any:
    """A worker's exchange of one shard, with something odd about it."""

    def program(of: tuple[int, ...], step: int, stamps: list[int]) -> Program:
        gradient = yield Backward(step)
        sending = yield Start(Send(2, gradient.part(0), tag=0, stamp=stamps[0] if stamp is None else stamp))
        message = yield Recv(source, like=gradient.part(0).flat, tag=500, stamped=True)
        if other:
            yield EndStep(step)
        yield Wait(sending)
        yield Discard(gradient)
        return [message.stamp + 1] if twice else [message.stamp]

    return program


def test_what_is_not_played_is_asked_for() -> None:
    """A stamp of the worker's own, a receive from anybody, a request that does not belong, an answer that was reckoned."""
    ctx, shapes = _context()
    tape = rehearse_exchange(_exchange(ctx), (0,), shapes)
    assert tape is not None and (tape.num_slots, tape.num_started, tape.num_found) == (2, 1, 1)
    for odd in ({"stamp": 0}, {"source": -1}, {"other": True}, {"twice": True}):
        assert rehearse_exchange(_exchange(ctx, **odd), (0,), shapes) is None, odd


def test_an_answer_that_is_no_answer_is_asked_for() -> None:
    ctx, shapes = _context()

    def answer(to: int, stamp: int) -> Program:
        yield EndStep(stamp)
        return None, to

    assert rehearse_answer(answer, shapes) is None
    assert answered(ctx, "key", answer) is answer and exchanged(ctx, "key", _exchange(ctx)) is not None


def test_who_waits_for_ever_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hears nobody: what its workers wait for is said as it would be of what they ask themselves."""
    monkeypatch.setattr(AsyncSGD, "serve", _deaf)
    with pytest.raises(Stalled, match=r"rank 1: Recv\(source=2, tag=500, stamped=True\)"):
        run_of(AsyncSGD(dedicated=True), 3, 2, NETWORKS[0], Compute(forward_s=0.1, backward_s=0.1), True, 0)


def _deaf(self: AsyncSGD, ctx: Context, shard: int) -> Program:
    return
    yield
