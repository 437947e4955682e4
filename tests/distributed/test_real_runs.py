"""Real ranks from the job to the record: the files that a run leaves, and its effect on its processes."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.distributed.pool import shared_pool
from tests.laws import tiny
from tests.laws.gossip import RightGossip
from tests.laws.train import MPI, make_job, on_real_runtimes, run_job, run_on_ranks, train
from workbench.algorithms import ApplyOrder, LayerwiseSGD, LocalSGD, PipeSGD, SynchronousSGD
from workbench.collectives import Ring
from workbench.problems.loading import fetch
from workbench.program import Algorithm
from workbench.runtimes.rank.main import Job, run_rank, world_here
from workbench.runtimes.transport import base
from workbench.settings import Settings
from workbench.trace.recorder import trace_name
from workbench.trace.run import Run
from workbench.trace.weights import read_weights

NUM_RANKS = 3
HOW = Settings(steps=8, batch_size=3, timeout_s=30, evaluate_every=3)
ALGORITHMS = [
    SynchronousSGD(),
    LayerwiseSGD(bucket_bytes=200.0, apply=ApplyOrder.BACKWARD),
    PipeSGD(width=3),
    PipeSGD(width=2, collective=Ring()),
]
on_all_algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)


@on_real_runtimes
@on_all_algorithms
def test_the_record_of_a_run_is_whole(algorithm: Algorithm, runtime: str) -> None:
    trained = train(runtime, NUM_RANKS, algorithm, tiny.problem(), HOW)
    run = trained.run
    folder = Path(trained.checkpoint)
    assert run.info["status"] == "finished"
    assert run.info["result"]["last_step"] == 7
    assert run.info["num_workers"] == NUM_RANKS
    assert run.info["model"]["parameters"] == trained.final.numel()
    assert run.damaged == ()
    assert run.failures == {}
    assert not list(folder.glob("checkpoint-*")), "only a stopped run leaves checkpoints"
    assert sorted(run.metrics) == sorted(run.headers) == list(range(NUM_RANKS))
    for rank in range(NUM_RANKS):
        assert [row["step"] for row in trained.rows(rank)] == list(range(8))
        seconds = [row["seconds"] for row in run.metrics[rank]]
        assert seconds == sorted(seconds)
        assert [row["samples"] for row in trained.rows(rank)] == [9, 18, 23, 32, 41, 46, 55, 64]
        assert {row["num_samples"] for row in trained.rows(rank)} <= {1, 2, 3}
    assert [row["step"] for row in run.evaluations()] == [2, 5, 7]


@on_real_runtimes
def test_replicas_that_stay_different_are_evaluated_at_rank_0s(runtime: str) -> None:
    """All ranks share the work of an evaluation, so they need equal parameters. The simulator has rank 0's at hand."""
    real, simulated = (
        train(which, NUM_RANKS, RightGossip(), tiny.problem(), HOW).run for which in (runtime, "simulated")
    )
    found, expected = real.evaluations(), simulated.evaluations()
    assert [row["step"] for row in found] == [row["step"] for row in expected] == [2, 5, 7]
    for row, other in zip(found, expected, strict=True):
        assert row["test_loss"] == pytest.approx(other["test_loss"], rel=1e-12)
        assert row["accuracy"] == other["accuracy"]


@on_real_runtimes
def test_the_distance_of_replicas_from_their_mean_is_recorded(runtime: str) -> None:
    real, simulated = (
        train(which, NUM_RANKS, LocalSGD(every=4), tiny.problem(), HOW).run for which in (runtime, "simulated")
    )
    found, expected = real.curve("steps", "consensus_distance")[1], simulated.curve("steps", "consensus_distance")[1]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert found[0] > found[-1] == pytest.approx(0, abs=1e-12)
    assert not len(
        train(runtime, NUM_RANKS, SynchronousSGD(), tiny.problem(), HOW).run.curve("steps", "consensus_distance")[0]
    )


@on_real_runtimes
@on_all_algorithms
def test_the_trace_accounts_for_every_step(algorithm: Algorithm, runtime: str) -> None:
    """On each rank one forward and backward a step and one update a bucket, one after the other, within the run."""
    trained = train(runtime, NUM_RANKS, algorithm, tiny.problem(), HOW)
    table = trained.run.spans.table
    assert (table["end_s"] >= table["start_s"]).all()
    num_buckets = trained.run.info["model"]["buckets"]
    for rank in range(NUM_RANKS):
        for kind, times in (("forward", 1), ("backward", 1), ("apply", num_buckets)):
            spans = trained.run.spans.select(kinds=[kind]).table
            mine = spans[spans["rank"] == rank]
            assert sorted(mine["step"]) == sorted(list(range(8)) * times), kind
        compute = trained.run.spans.select(kinds=["forward", "backward", "apply", "wait", "evaluate"]).table
        mine = compute[compute["rank"] == rank]
        assert (mine["start_s"][1:] >= mine["end_s"][:-1] - 1e-6).all(), "one thing at a time"
        last = trained.rows(rank)[-1]["seconds"]
        assert last <= trained.run.info["result"]["seconds"] + 0.5


@on_real_runtimes
def test_spans_of_ranks_whose_clocks_differ_lie_on_one_clock(runtime: str) -> None:
    """Each rank's clock is made 100 s later than that of the rank before it; a sum still ends on all after it began on all."""
    job = make_job(runtime, NUM_RANKS, SynchronousSGD(), tiny.problem(), HOW)
    run_on_ranks(run_skewed, job, NUM_RANKS)
    run = Run.load(job.folder)
    table = run.spans.select(kinds=["all_reduce"]).table
    assert table["end_s"].max() < 60
    for step in range(8):
        sums = table[table["step"] == step]
        assert len(sums) == NUM_RANKS
        assert sums["end_s"].min() > sums["start_s"].max() - 2e-3
    lines = (Path(job.folder) / "trace-00002.jsonl").read_text().splitlines()
    origins = [
        json.loads((Path(job.folder) / trace_name(rank)).read_text().splitlines()[0])["origin_s"]
        for rank in range(NUM_RANKS)
    ]
    assert origins[2] - origins[0] == pytest.approx(200, abs=30)
    assert sum("clock" in line for line in lines) >= 2


def run_skewed(job: Job, num_ranks: int) -> None:
    true, skew_s = time.perf_counter, 100.0 * world_here()[0]
    clock = partial(str, skew_s)  # its name
    with patch.object(time, "perf_counter", lambda: true() + skew_s), patch.object(base, "name_of_clock", clock):
        run_job(job, num_ranks)


@on_real_runtimes
@pytest.mark.parametrize("model", [tiny.mlp, tiny.batchnorm_mlp, tiny.dropout_mlp], ids=["mlp", "batchnorm", "dropout"])
def test_the_evaluation_is_that_of_the_model_that_is_kept(model: Any, runtime: str) -> None:
    """Each rank judges its share; together that is one process with `model.safetensors` and the whole test set.

    Twice the same weights.
    """
    problem = tiny.problem(model, num_samples=22)
    trained = train(runtime, NUM_RANKS, PipeSGD(width=2), problem, replace(HOW, batch_size=4))
    kept = trained.run.model(problem)
    test = problem.test_data()
    assert test is not None
    batch = fetch(test, list(range(9)))
    with torch.no_grad():
        loss, (correct, judged) = problem.batch_loss(kept, batch), problem.correct(kept, batch)  # type: ignore[misc]
    assert sum(trained.run.metrics[rank][-1]["evaluation"]["count"] for rank in range(NUM_RANKS)) == 9, (
        "no sample is judged twice"
    )
    last = trained.run.evaluations()[-1]
    assert last["test_loss"] == pytest.approx(float(loss), rel=1e-12)
    assert last["accuracy"] == pytest.approx(int(correct) / judged)
    flat = torch.cat([param.detach().reshape(-1) for param in kept.parameters()])
    assert torch.equal(flat, trained.final)


@on_real_runtimes
def test_batchnorm_statistics_of_the_kept_model_are_rank_0s(runtime: str) -> None:
    """As under DDP: each step begins with them on all ranks, and then each rank adds its own batch."""
    problem = tiny.problem(tiny.Remembered(tiny.batchnorm_mlp), num_samples=22)
    job = make_job(runtime, NUM_RANKS, SynchronousSGD(), problem, replace(HOW, batch_size=4))
    states = shared_pool(runtime, NUM_RANKS).run(train_and_look, job)  # type: ignore[arg-type]
    kept = read_weights(Path(job.folder))
    assert kept is not None
    assert all(torch.equal(value, kept[name]) for name, value in states[0].items())
    statistics = {"1.running_mean", "1.running_var"}
    for state in states[1:]:
        assert {name for name, value in state.items() if not torch.equal(value, kept[name])} == statistics
    assert not torch.equal(states[0]["1.running_mean"], torch.zeros(8, dtype=torch.float64))


def train_and_look(job: Job) -> dict[str, torch.Tensor]:
    run_rank(job)
    return tiny.remembered_state()


@on_real_runtimes
def test_a_run_without_test_data_evaluates_nothing(runtime: str) -> None:
    trained = train(runtime, 2, PipeSGD(width=2), tiny.problem(test=None), HOW)
    assert trained.run.evaluations() == []
    assert trained.run.info["status"] == "finished"


@on_real_runtimes
def test_more_test_ranks_than_test_samples(runtime: str) -> None:
    trained = train(runtime, NUM_RANKS, SynchronousSGD(), tiny.problem(test=tiny.data(2, seed=5)), HOW)
    counts = [trained.run.metrics[rank][-1]["evaluation"]["count"] for rank in range(NUM_RANKS)]
    assert counts == [2, 0, 0], "the first rank takes the only batch"
    assert trained.run.evaluations()[-1]["test_loss"] is not None


@on_real_runtimes
def test_runs_leave_their_processes_as_they_were(runtime: str) -> None:
    """Ten runs in the same engines: no thread, no open file more than after two."""
    pool = shared_pool(runtime, NUM_RANKS)  # type: ignore[arg-type]
    for _ in range(2):
        train(runtime, NUM_RANKS, PipeSGD(width=2, collective=Ring()), tiny.problem(), HOW)
    before = pool.run(holdings)
    for _ in range(8):
        train(runtime, NUM_RANKS, PipeSGD(width=2, collective=Ring()), tiny.problem(), HOW)
    for (files, threads), (files_before, threads_before) in zip(pool.run(holdings), before, strict=True):
        assert files <= files_before + 2
        assert threads <= threads_before + 2


def holdings() -> tuple[int, int]:
    """Open files and threads of this process (a background thread may take a moment to end)."""
    for thread in threading.enumerate():
        if thread.name.startswith("workbench"):
            thread.join(2.0)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.mpi
def test_mpi_ranks_can_run_torch_distributed() -> None:
    """Engines are MPI processes: there the gloo group meets in the run's folder."""
    expected = train("mpi", NUM_RANKS, PipeSGD(width=2), tiny.problem(), HOW)
    pool = shared_pool("mpi", NUM_RANKS)
    for _ in range(2):
        job = make_job("torch", NUM_RANKS, PipeSGD(width=2), tiny.problem(), HOW)
        pool.run(run_rank, job)
        run = Run.load(job.folder)
        assert run.info["status"] == "finished"
        assert "gloo" in run.info["library"]
        flat = torch.cat([value.detach().reshape(-1) for value in run.model(tiny.problem()).parameters()])
        torch.testing.assert_close(flat, expected.final, rtol=1e-12, atol=0)
    pool.run(torch.distributed.destroy_process_group)  # a later test asks these ranks for MPI


@pytest.mark.parametrize("runtime", ["torch", MPI])
def test_a_second_run_in_the_same_folder_is_refused(runtime: str) -> None:
    """A folder holds one run: the record of the first is left as it was."""
    job = make_job(runtime, 3, SynchronousSGD(), tiny.problem(), HOW)
    pool = shared_pool(runtime, 3)  # type: ignore[arg-type]
    pool.run(run_rank, job)
    before = (Path(job.folder) / "metrics-00001.jsonl").read_bytes()
    with pytest.raises(Exception, match="exists already"):
        pool.run(run_rank, job)
    assert (Path(job.folder) / "metrics-00001.jsonl").read_bytes() == before


@on_real_runtimes
def test_a_large_message_among_small_ones(runtime: str) -> None:
    """2.4 MB: beyond what libraries send at once, in pieces of several sizes."""
    problem = tiny.problem(wide_mlp)
    how = Settings(steps=3, batch_size=3, timeout_s=30)
    whole = train("simulated", NUM_RANKS, SynchronousSGD(), problem, how)
    for algorithm in (
        SynchronousSGD(collective=Ring()),
        LayerwiseSGD(bucket_bytes=1e5),
        PipeSGD(width=1, collective=Ring()),
    ):
        found = train(runtime, NUM_RANKS, algorithm, problem, how)
        torch.testing.assert_close(found.final, whole.final, rtol=1e-9, atol=1e-12)


def wide_mlp() -> torch.nn.Module:
    width = 500
    layers = [
        torch.nn.Linear(tiny.NUM_FEATURES, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, width),
        torch.nn.Tanh(),
    ]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, tiny.NUM_CLASSES)).double()


@on_real_runtimes
def test_adam_with_a_schedule_learns(runtime: str) -> None:
    """A check without an oracle: the training data are learnt."""
    how = Settings(
        epochs=40,
        batch_size=4,
        optimizer=partial(torch.optim.Adam, lr=0.02),
        timeout_s=30,
        evaluate_every=0,
        trace_steps=0,
    )
    trained = train(runtime, 2, PipeSGD(width=2), tiny.problem(test=tiny.data()), how)
    assert trained.run.evaluations()[-1]["accuracy"] > 0.95
