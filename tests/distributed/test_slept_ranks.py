"""Slept compute on real ranks: the times of the trace, the numbers of the training, the words of the record."""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests.distributed import test_rejoin as joining
from tests.distributed import test_shrinking as shrinking
from tests.distributed.killing import Slow, rank_here
from tests.distributed.pool import RankPool
from tests.laws import tiny
from tests.laws.train import assert_same, on_real_runtimes, train
from workbench import plots
from workbench.algorithms import AsyncSGD, BackupSGD, LayerwiseSGD, SynchronousSGD
from workbench.analysis import compare, run_critical_path, run_overlap, run_parts
from workbench.calibration import calibrate
from workbench.collectives import Ring
from workbench.costs import Compute, SlowMachines, Uniform
from workbench.errors import ConfigError, RankMismatch
from workbench.gradients import Layout
from workbench.replica.local_training import LocalTraining
from workbench.runtimes.user_loop.trainer import Trainer
from workbench.settings import Settings
from workbench.trace.run import Run

SLOW = SlowMachines(factor_of={1: 2.0})
COMPUTE = Compute(forward_s=0.02, backward_s=0.04, update_s=0.04, stragglers=(SLOW,))
HOW = Settings(steps=4, batch_size=3, timeout_s=30, seed=1, evaluate_every=0, compute=COMPUTE)
NUM_SAMPLES = 24  # four whole batches of two ranks
PROBLEM = tiny.problem(num_samples=NUM_SAMPLES)
CLOCK_S = 1e-4  # rounding of the trace
READING_S = 0.01  # reading a minibatch is a part of the slept pass, and not of its spans; the first takes longer
LATE = "compute took longer than the slept time"
pytestmark = pytest.mark.filterwarnings(f"ignore:{LATE}")  # on a busy machine ranks wake late


def seconds_of(run: Run, rank: int, *kinds: str) -> list[float]:
    """Seconds of these kinds of spans of a rank, by step."""
    found: dict[int, float] = defaultdict(float)
    for row in run.spans.of_rank(rank).select(kinds=kinds).table:
        found[int(row["step"])] += float(row["end_s"] - row["start_s"])
    return [found[step] for step in sorted(found)]


def assert_slept(found: list[float], expected: float | list[float]) -> None:
    """Most steps are not shorter than asked for, and the best is not twice as long: other processes delay the rest."""
    wanted = np.broadcast_to(expected, len(found))
    assert np.median(np.array(found) - wanted) >= -READING_S, f"{found}, and {expected} was asked for"
    assert (np.array(found) / wanted).min() < 1.9, f"{found}, and {expected} was asked for"


def assert_buckets_leave_in_turn(run: Run, rank: int, layout: Layout, backward_s: float) -> None:
    """Each bucket's sum begins after its share of backward; in the best step, because a late forward shortens backward."""
    mine = run.spans.of_rank(rank)
    sums, backward = (mine.select(kinds=[kind]).table for kind in ("all_reduce", "backward"))
    assert len(sums) == 4 * len(layout.buckets)
    begins_s = [float(backward["start_s"][backward["step"] == step].min()) for step in range(4)]
    for bucket, share in enumerate(COMPUTE.ready_shares(layout)):
        offsets_s = [row["start_s"] - begins_s[row["step"]] for row in sums if row["bucket"] == bucket]
        assert max(offsets_s) >= backward_s * share - 0.001, f"bucket {bucket}: {offsets_s}"


@on_real_runtimes
def test_ranks_take_the_seconds_and_compute_the_same(runtime: str) -> None:
    algorithm = LayerwiseSGD(bucket_bytes=200.0)
    slept = train(runtime, 2, algorithm, PROBLEM, HOW)
    real = train(runtime, 2, algorithm, PROBLEM, replace(HOW, compute=None))
    assert_same(slept.parameters[0], real.parameters[0], 0.0, "a rank that sleeps computes what others compute")
    run = slept.run
    layout = LocalTraining(algorithm, PROBLEM, HOW, 0, 2, torch.device("cpu")).replica.layout
    assert "compute (slept)" in run.spans.lanes and "compute" not in run.spans.lanes
    for rank, factor in ((0, 1.0), (1, 2.0)):
        assert_slept(seconds_of(run, rank, "forward", "backward")[1:], 0.06 * factor)
        assert_slept(seconds_of(run, rank, "apply"), 0.04)
        assert_buckets_leave_in_turn(run, rank, layout, 0.04 * factor)


@on_real_runtimes
def test_a_slow_rank_delays_the_others_if_they_wait_for_it(runtime: str) -> None:
    run = train(runtime, 2, SynchronousSGD(), PROBLEM, HOW).run
    for rank in range(2):
        ends_s = [row["seconds"] for row in run.metrics[rank] if "evaluation" not in row]
        assert_slept(np.diff(ends_s).tolist(), 0.06 * 2.0 + 0.04)


@on_real_runtimes
def test_the_record_says_that_compute_was_slept(runtime: str) -> None:
    run = train(runtime, 2, LayerwiseSGD(bucket_bytes=200.0, collective=Ring()), PROBLEM, HOW).run
    assert run.slept and run.label == "Watched(inner=LayerwiseSGD), compute (slept)"
    assert "SlowMachines(factor_of=((1, 2.0),)" in run.info["settings"]["compute"]
    assert any(note.startswith("compute (slept): forward 20 ms, backward 40 ms") for note in run.info["notes"])
    for table in (
        compare([run]),
        run_overlap(run),
        run_overlap(run).of_rank(1),
        run_critical_path(run),
        run_parts(run),
    ):
        assert str(table).count("compute (slept)") == 1, table
    for figure in (run.timeline(), plots.per_step(run), plots.overlap_bars([run]), plots.curves([run])):
        assert "compute (slept)" in figure.to_json()
    assert plots.step_bars({"gloo": {"2 ranks": run}}).layout.title.text == "Time of a step, compute (slept)"
    with pytest.raises(ConfigError, match="slept for its compute"):
        calibrate(run)


@on_real_runtimes
def test_workers_and_server_sleep(runtime: str) -> None:
    how = replace(HOW, compute=replace(COMPUTE, stragglers=()))
    run = train(runtime, 3, AsyncSGD(dedicated=True), PROBLEM, how).run
    computing = [rank for rank in range(3) if seconds_of(run, rank, "forward")]
    assert len(computing) == 2
    for rank in computing:
        assert_slept(seconds_of(run, rank, "forward", "backward")[1:], 0.06)
    updates = run.spans.select(kinds=["apply"])
    assert set(updates.lane_names.tolist()) == {"server"} and len(updates) == 8
    assert (updates.table["end_s"] - updates.table["start_s"]).min() >= 0.01 - CLOCK_S


@on_real_runtimes
def test_a_resumed_run_draws_the_stragglers_of_its_steps(runtime: str) -> None:
    compute = replace(COMPUTE, stragglers=(Uniform(low=0.2, high=3.0),))
    how, algorithm = replace(HOW, steps=7, compute=compute), SynchronousSGD()
    problem = tiny.problem(num_samples=42)
    stopped = train(runtime, 2, algorithm, problem, how, stop_after=3)
    resumed = train(runtime, 2, algorithm, problem, how, resume=stopped.checkpoint)
    for rank in range(2):
        expected = [0.06 * float(compute.factors(1, step, 2)[rank]) for step in range(7)]
        before, after = (seconds_of(one.run, rank, "forward", "backward") for one in (stopped, resumed))
        assert len(before) + len(after) == 7 and len(after) > 2
        assert_slept(before[1:], expected[1 : len(before)])
        assert_slept(after[1:], expected[len(before) + 1 :])


@on_real_runtimes
def test_a_rank_that_computes_longer_is_noted(runtime: str) -> None:
    how = replace(HOW, compute=Compute(forward_s=0.004, backward_s=0.004))
    run = train(runtime, 2, SynchronousSGD(), tiny.problem(Slow, NUM_SAMPLES), how).run
    assert [note for note in run.info["notes"] if note.startswith(f"{LATE} in 100 % of the steps")]


@pytest.mark.parametrize("runtime", ["torch", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_a_slow_machine_stays_slow_after_another_is_killed(runtime: Literal["torch", "mpi"]) -> None:
    compute = Compute(forward_s=0.02, backward_s=0.02, stragglers=(SlowMachines(factor_of={2: 2.0}),))
    how = replace(shrinking.SHRINKING, compute=compute)
    found, run = shrinking.train(SynchronousSGD(), 1, how, runtime=runtime)
    for outcome in found.values():
        assert outcome.error is None, outcome.trace
    assert [row["rank"] for row in run.info["departures"]] == [1]
    for rank, factor in ((0, 1.0), (2, 2.0)):
        samples = {row["step"]: row["num_samples"] for row in run.metrics[rank] if "evaluation" not in row}
        steps = [step for step in sorted(samples) if step > shrinking.AT_STEP and samples[step]]
        expected = [0.04 * factor * samples[step] / (how.batch_size or 1) for step in steps]
        spans = run.spans.of_rank(rank).select(kinds=["forward", "backward"]).table
        lengths_s = np.bincount(spans["step"], spans["end_s"] - spans["start_s"])
        assert steps
        assert_slept(lengths_s[steps].tolist(), expected)


def test_a_process_that_takes_a_place_sleeps_as_the_one_before() -> None:
    """Its forward, too, which takes `STEP_S` by itself."""
    stragglers = (SlowMachines(factor_of={joining.VICTIM: 1.5}),)
    compute = Compute(forward_s=joining.STEP_S, backward_s=0.02, stragglers=stragglers)
    how = replace(joining.HOW, steps=30, trace_steps=None, compute=compute)
    found, came, run = joining.with_another(BackupSGD(backups=1), joining.rejoins_slowly, how)
    for outcome in [*found.values(), came]:
        assert outcome.error is None, outcome.trace
    first = run.info["joined"][0]["step"]
    spans = run.spans.of_rank(joining.VICTIM).select(steps=slice(first + 1, None), kinds=["forward", "backward"]).table
    assert len(spans) > 2
    seconds = [
        (row["end_s"] - row["start_s"]).sum()
        for row in (spans[spans["step"] == step] for step in np.unique(spans["step"]))
    ]
    assert np.median(seconds) >= (joining.STEP_S + 0.02) * 1.5 - READING_S, seconds


def own_loop(late: bool) -> tuple[list[float], bool, Run | None]:
    """On a rank: three steps with a slept compute of 40 ms, whose loss takes longer if `late`."""
    model: Any = torch.nn.Linear(3, 1)
    stragglers = (SlowMachines(factor_of={0: 1.5}),)
    compute = Compute(forward_s=0.02, backward_s=0.02, stragglers=stragglers)
    seconds = []

    def loss() -> torch.Tensor:
        time.sleep(0.08 * late)
        found: torch.Tensor = model(torch.ones(2, 3)).square().mean()
        return found

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, optimizer, SynchronousSGD(), record=True, compute=compute, compute_seed=3)
        for _ in range(3):
            begin = time.perf_counter()
            trainer.step(loss)
            seconds.append(time.perf_counter() - begin)
        run = trainer.finish()
    return seconds, any(f"{LATE} in 100 % of the steps" in str(one.message) for one in caught), run


def other_compute() -> None:
    """On a rank: only rank 0 sleeps."""
    model = torch.nn.Linear(3, 1)
    compute = Compute(forward_s=0.02, backward_s=0.02) if rank_here() == 0 else None
    Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), SynchronousSGD(), compute=compute, timeout_s=10)


@on_real_runtimes
def test_a_loop_of_your_own_sleeps_and_is_recorded(runtime: Literal["torch", "mpi"], runs: Any) -> None:
    pool = RankPool(runtime, 2)  # its ranks know this test's run store
    try:
        in_time, late = pool.run(own_loop, False), pool.run(own_loop, True)
        with pytest.raises(
            RankMismatch, match=r"compute is '.*backward 20 ms.*' on rank 0, and 'None, seed 0' on rank 1"
        ):
            pool.run(other_compute)
    finally:
        pool.close()
    for seconds, _, _ in in_time:
        assert_slept(seconds, 0.04 * 1.5)
    run = in_time[0][2]
    assert run is not None and run.slept and run.label == "SynchronousSGD, compute (slept)"
    assert run.info["settings"]["seed"] == 3 and run.info["notes"][0].startswith("compute (slept): forward 20 ms")
    (_, warned, run), (_, other_warned, _) = late
    assert warned and not other_warned, "rank 0 warns for all"
    assert run is not None and any(note.startswith(LATE) for note in run.info["notes"])
