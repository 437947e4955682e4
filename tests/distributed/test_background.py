"""Concurrent background work, and its failures: tags, servers, their errors, slow evaluations."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.distributed.pool import shared_pool
from tests.laws import tiny
from tests.laws.train import (
    COMPUTE,
    MPI,
    NETWORK,
    assert_same,
    make_job,
    on_all_runtimes,
    on_real_runtimes,
    run_job,
    run_on_ranks,
    train,
)
from tests.laws.variants import name_of
from workbench import ops
from workbench.algorithms import (
    AsyncSGD,
    BackupSGD,
    LayerwiseSGD,
    NoCommunication,
    OnlineBackupSGD,
    PartialAllReduce,
    SendOrder,
    StaleSynchronousSGD,
)
from workbench.algorithms.quorum import NoiseScale
from workbench.collectives import PowerSGD, Ring
from workbench.errors import ConfigError
from workbench.program import Algorithm, Card, Context
from workbench.replica.local_training import run_info
from workbench.runtimes.reference import ReferenceRuntime
from workbench.runtimes.simulator.replay import replay
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings
from workbench.trace.run import Run

settings = partial(Settings, steps=4, batch_size=3, timeout_s=30)


@on_real_runtimes
def test_more_free_sub_programs_than_ranges_of_tags(runtime: str) -> None:
    """Fifty buckets by priority: the last started go first, and the 29th must not meet the messages of the first."""
    priority = LayerwiseSGD(bucket_bytes=0, order=SendOrder.PRIORITY, collective=Ring())
    found = train(runtime, 3, priority, tiny.problem(tiny.ManyParameters), settings())
    expected = train("simulated", 3, LayerwiseSGD(bucket_bytes=0), tiny.problem(tiny.ManyParameters), settings())
    for rank in range(3):
        assert_same(found.parameters[rank], expected.parameters[0], 1e-11)


@on_real_runtimes
def test_many_servers_on_a_rank(runtime: str) -> None:
    """Servers never end, so none may wait for another's place."""
    trained = train(runtime, 2, AsyncSGD(shards=40), tiny.problem(tiny.ManyParameters), settings())
    assert {row["bucket"] for row in trained.run.updates()} == set(range(40))
    assert torch.equal(trained.parameters[0][-1], trained.parameters[1][-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class StartsAMessage(Algorithm):
    """Rank 0 starts a message where rank 1 starts a program. Then both start one that exchanges a message."""

    card: ClassVar[Card] = Card(paper="none", staleness="0", bytes_per_step="0", memory="none")

    def worker(self, ctx: Context) -> ops.Program:
        like = torch.zeros(2)

        def message() -> ops.Program:
            yield ops.Send(1, like) if ctx.rank == 0 else ops.Recv(0, like)

        def nothing() -> ops.Program:
            yield ops.Now()

        yield ops.Discard((yield ops.Backward(0)))
        first = yield ops.Start(ops.Send(1, like) if ctx.rank == 0 else nothing())
        if ctx.rank == 1:
            yield ops.Recv(0, like)
        second = yield ops.Start(message(), lane=ops.FREE)
        for ticket in (first, second):
            yield ops.Wait(ticket)
        yield ops.EndStep(0)


@pytest.mark.parametrize("runtime", ["reference", "simulated", "torch", MPI])
def test_every_start_is_numbered(runtime: str) -> None:
    """Sub-programs of one number exchange messages, and a single message counts."""
    if runtime == "reference":
        ranks = ReferenceRuntime(StartsAMessage(), 2, lambda rank, step, parameters: parameters).run(1).ranks
        assert [len(rank.ends) for rank in ranks] == [1, 1]
    else:
        run = train(runtime, 2, StartsAMessage(), tiny.problem(test=None), settings(steps=1)).run
        assert run.info["status"] == "finished"


class BreaksInItsServer(torch.optim.SGD):
    """Fails in its third step."""

    def step(self, closure: Any = None) -> Any:
        self.count = getattr(self, "count", 0) + 1
        if self.count == 3:
            raise RuntimeError("out of memory, say")
        return super().step(closure)


@on_real_runtimes
def test_a_servers_error_is_heard_at_once_and_by_its_own_name(runtime: str) -> None:
    how = settings(optimizer=partial(BreaksInItsServer, lr=0.1), timeout_s=40)
    job = make_job(runtime, 3, AsyncSGD(), tiny.problem(), how)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="out of memory, say"):
        run_on_ranks(run_job, job, 3)
    assert time.monotonic() - begin < 30
    assert "out of memory, say" in (Path(job.folder) / "failed-00000.json").read_text()


@on_real_runtimes
def test_nobody_waits_for_rank_0_to_evaluate_an_asynchronous_run(runtime: str) -> None:
    """Six evaluations of half a second each, and ranks that wait two seconds for each other."""
    how = settings(steps=6, evaluate_every=1, timeout_s=2.0)
    problem = tiny.problem()
    job = make_job(runtime, 2, AsyncSGD(), replace(problem, correct=slowly(problem.correct)), how)
    run_on_ranks(run_job, job, 2)
    run = Run.load(job.folder)
    assert run.info["status"] == "finished"
    assert len(run.evaluations()) == 6


def slowly(correct: Any) -> Any:
    def judge(model: torch.nn.Module, batch: Any) -> Any:
        time.sleep(0.5)
        return correct(model, batch)

    return judge


def test_looking_after_several_lanes_now_and_then_is_refused() -> None:
    lanes = LayerwiseSGD(bucket_bytes=0, lanes=2, collective=PowerSGD())
    with pytest.raises(ConfigError, match="drives one lane"):
        train("torch", 2, lanes, tiny.problem(), settings(progress="tests"))


@on_all_runtimes
@pytest.mark.parametrize("algorithm", [AsyncSGD(), StaleSynchronousSGD(bound=1)], ids=["async", "ssp"])
def test_stopped_twice_takes_every_step_once(algorithm: Any, runtime: str) -> None:
    how = settings(steps=6)
    first = train(runtime, 2, algorithm, tiny.problem(), how, stop_after=5)
    assert first.run.info["status"] == "finished", "a stop behind the last step is none"
    first = train(runtime, 2, algorithm, tiny.problem(), how, stop_after=1)
    second = train(runtime, 2, algorithm, tiny.problem(), how, resume=first.checkpoint, stop_after=1)
    third = train(runtime, 2, algorithm, tiny.problem(), how, resume=second.checkpoint)
    for rank in range(2):
        assert [row["step"] for part in (first, second, third) for row in part.rows(rank)] == list(range(6))


def test_a_run_cut_short_is_replayed_as_far_as_it_went() -> None:
    how = settings(steps=8)
    trained = train("torch", 2, AsyncSGD(), tiny.problem(), how, stop_after=3)
    plain = run_info(AsyncSGD(), tiny.problem(), how, "torch", 2)  # the ranks' algorithm was the test's wrapper
    trained.run.info.update({name: plain[name] for name in ("algorithm", "content")})
    replayed = replay(trained.run, AsyncSGD(), tiny.problem(), how)
    assert torch.equal(replayed.parameters[1], trained.parameters[1][-1])


def test_a_time_out_that_was_not_needed_takes_no_time() -> None:
    def seconds(timeout_s: float | None) -> float:
        algorithm = BackupSGD(backups=0, timeout_s=timeout_s)
        return (
            Simulation(algorithm, tiny.problem(), settings(), 2, network=NETWORK, compute=COMPUTE)
            .run()
            .info["result"]["seconds"]
        )

    assert seconds(1e4) == seconds(None)


def test_noise_is_never_measured_for_the_last_time() -> None:
    """Small noise at first, much of it later: an update of a single gradient would tell nothing of it."""
    trained = train("simulated", 4, OnlineBackupSGD(), tiny.problem(num_samples=200), settings(steps=30))
    assert min(len(row["sources"]) for row in trained.run.updates()) >= 2
    assert NoiseScale(3.0).value() == 3.0


@on_real_runtimes
def test_who_never_communicates_can_still_be_stopped(runtime: str) -> None:
    trained = train(runtime, 2, NoCommunication(), tiny.problem(), settings(steps=500), control=[{"stop": True}])
    assert trained.run.info["status"] == "stopped"
    assert max(row["step"] for rank in range(2) for row in trained.rows(rank)) < 10


# On a rank: of hooks of other tests that are not collected yet
KNOWN: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def note_background_threads() -> None:
    """On a rank: before what is looked at."""
    KNOWN.update(threading.enumerate())


def background_threads() -> list[str]:
    """On a rank: threads of ours since then that have not ended within a moment; one that waits for a message never does."""
    since = [thread for thread in threading.enumerate() if thread.name.startswith("workbench") and thread not in KNOWN]
    for thread in since:
        thread.join(timeout=3)
    return [thread.name for thread in since if thread.is_alive()]


@on_real_runtimes
@pytest.mark.parametrize(
    "algorithm", [AsyncSGD(shards=2), BackupSGD(backups=1), PartialAllReduce(quorum="solo")], ids=name_of
)
def test_nothing_stays_posted_behind_a_run(algorithm: Any, runtime: str) -> None:
    """A receive from any rank that found its message in the rank's own box is still posted: a peer sends something for it."""
    size = 3 if runtime == "mpi" else 2  # fewer MPI ranks than three are a part of the three
    shared_pool(runtime, size).run(note_background_threads)
    for _ in range(3):
        train(runtime, 2, algorithm, tiny.problem(), settings())
    assert shared_pool(runtime, size).run(background_threads) == [[]] * size
