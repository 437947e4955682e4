"""Slept compute: at the same seed, a real rank is asked to take the seconds that a simulated one takes. No test here sleeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.laws import tiny
from workbench.algorithms import LayerwiseSGD
from workbench.costs import (
    Bimodal,
    Compute,
    Failures,
    Lognormal,
    Pareto,
    ShiftedExponential,
    SlowMachines,
    TimeVarying,
    Uniform,
)
from workbench.errors import ConfigError
from workbench.replica.local_training import LocalTraining
from workbench.runtimes.execution.slept_compute import LatePasses, SleptCompute, SleptPass, gather_late_passes
from workbench.runtimes.liveness.membership import LEFT_TEXT
from workbench.runtimes.simulator.pass_times import PassTimes
from workbench.runtimes.transport.base import SoloTransport
from workbench.settings import Settings

NUM_RANKS = 4
BEGIN_S = 3.25
PLAIN = Compute(forward_s=0.3, backward_s=0.7)
COMPUTES = [
    PLAIN,
    replace(PLAIN, fixed_share=0.4),
    *(
        replace(PLAIN, stragglers=(stragglers,))
        for stragglers in (
            Lognormal(sigma=0.5),
            ShiftedExponential(shift=1.0, scale=0.5),
            Pareto(shape=2.5, scale=1.0),
            Uniform(low=0.5, high=2.0),
            Bimodal(probability=0.3, factor=4.0),
            SlowMachines(share=0.5, factor=3.0),
            TimeVarying(sigma=0.5, correlation=0.5),
            Failures(mean_between_s=2.0, repair_s=1.0),
        )
    ),
    replace(PLAIN, stragglers=(Lognormal(sigma=0.5), Lognormal(sigma=0.2), SlowMachines(share=0.5, factor=3.0))),
]


class Asked:
    """Stands for the sleep: notes until when the rank was to sleep."""

    def __init__(self) -> None:
        self.until_s: list[float] = []

    def until(self, end_s: float) -> float:
        self.until_s.append(end_s)
        return 0.0


def worker(rank: int, compute: Compute, **more: Any) -> LocalTraining:
    settings = Settings(steps=9, batch_size=5, seed=7, compute=compute, **more)
    return LocalTraining(
        LayerwiseSGD(bucket_bytes=200.0), tiny.problem(), settings, rank, NUM_RANKS, torch.device("cpu")
    )


def slept(training: LocalTraining) -> SleptCompute:
    found = SleptCompute.of(training, training.rank)
    assert found is not None
    return found


def begin(found: SleptCompute, step: int, num_samples: list[int], asked: Any, *, in_parts: bool = False) -> SleptPass:
    return SleptPass(found, step, num_samples, BEGIN_S, asked, in_parts=in_parts)


@pytest.mark.parametrize("compute", COMPUTES, ids=str)
def test_a_real_rank_is_asked_for_the_seconds_of_a_simulated_one(compute: Compute) -> None:
    for rank in range(NUM_RANKS):
        training = worker(rank, compute)
        layout, sampler = training.replica.layout, training.sampler
        assert len(layout.buckets) > 2
        times = PassTimes(compute, layout, training.settings, sampler, num_workers=NUM_RANKS, num_computing=NUM_RANKS)
        for step in range(9):
            number, asked = sampler.share_size(step, rank), Asked()
            taken = begin(slept(training), step, [number] if number else [], asked)
            if number:
                taken.turn("forward")
            taken.turn("backward")
            for bucket in range(len(layout.buckets)):
                taken.wait_for_bucket(bucket)
            taken.turn("")
            middle_s, end_s = times.passes_s(step, rank, 1.0, BEGIN_S)
            ready = [middle_s + (end_s - middle_s) * share for _, share in times.early] + [end_s] * len(times.late)
            expected = [middle_s, *ready, end_s] if number else [BEGIN_S] * len(layout.buckets)
            assert asked.until_s == pytest.approx(expected, abs=1e-12), f"rank {rank}, step {step}"


def test_these_steps_have_whole_batches_short_ones_and_none() -> None:
    sampler = worker(0, PLAIN).sampler
    assert {sampler.share_size(step, rank) for step in range(9) for rank in range(NUM_RANKS)} == {5, 1, 0}


def test_a_slow_machine_stays_slow_when_ranks_are_renumbered() -> None:
    compute = replace(PLAIN, stragglers=(SlowMachines(share=0.5, factor=3.0),))
    training = worker(2, compute)
    found, before = slept(training), slept(training).seconds(0)
    training.set_rank(1, 3, (0, 0))
    assert found.seconds(0) == pytest.approx(before)


def test_a_part_of_forward_begins_after_the_update_that_it_waits_for() -> None:
    training = worker(0, PLAIN)
    found, asked = slept(training), Asked()
    taken = begin(found, 0, [5], asked, in_parts=True)
    taken.turn("forward")
    ends = []
    for bucket in reversed(range(len(found.forward_parts))):
        taken.end_forward_part()
        begin_s = (ends[-1] if ends else BEGIN_S) + 5.0  # the update comes 5 s later
        taken.begin_forward_part(bucket, begin_s)
        ends.append(begin_s + 0.3 * found.forward_parts[bucket])
    taken.turn("backward")
    taken.turn("")
    assert asked.until_s == pytest.approx([*ends, ends[-1] + 0.7])


def test_micro_batches_share_the_seconds_and_the_last_one_sends() -> None:
    found, asked = slept(worker(0, PLAIN)), Asked()
    taken = begin(found, 0, [2, 1], asked)
    for phase in ("forward", "backward", "forward", "backward"):
        taken.turn(phase)
    taken.wait_for_bucket(0)
    taken.turn("")
    last_s = BEGIN_S + 1.0 - 0.7 / 3
    ends = [BEGIN_S + 0.2, BEGIN_S + 0.2 + 1.4 / 3, last_s, last_s + 0.7 / 3 * found.ready_shares[0], BEGIN_S + 1.0]
    assert asked.until_s == pytest.approx(ends)


def test_communication_in_the_foreground_does_not_count() -> None:
    found, asked = slept(worker(0, PLAIN)), Asked()
    taken = begin(found, 0, [5], asked)
    taken.turn("forward")
    taken.turn("backward")
    taken.wait_for_bucket(0)
    taken.interrupt(2.0)
    taken.turn("")
    assert asked.until_s[-1] == pytest.approx(BEGIN_S + 1.0 + 2.0)


def test_no_bucket_leaves_early_if_the_whole_norm_is_checked() -> None:
    assert set(slept(worker(0, PLAIN, max_grad_norm=1.0)).ready_shares) == {1.0}


def test_late_passes_are_counted_after_the_first() -> None:
    found = slept(worker(0, PLAIN))
    for late_s in (5.0, 0.0, 0.009, 0.5, 0.3):  # a warm-up, two in time (9 ms are under a hundredth), two late
        found.end_pass(late_s)
    assert (found.late.num_passes, found.late.num_late, found.late.seconds) == (4, 2, pytest.approx(0.8))
    assert found.late.loud and "in 50 % of the steps (by 400 ms)" in found.late.note


def test_an_update_ends_after_its_share_of_the_seconds() -> None:
    training, asked = worker(0, replace(PLAIN, update_s=0.1)), Asked()
    numel = training.replica.layout.numel
    slept(training).end_update(numel // 2, BEGIN_S, asked, server=False)  # type: ignore[arg-type]
    assert asked.until_s == pytest.approx([BEGIN_S + 0.1 * (numel // 2) / numel])


class Delayed(Asked):
    """A rank that always comes 8 ms too late."""

    def until(self, end_s: float) -> float:
        super().until(end_s)
        return 0.008


def test_a_rank_that_wakes_late_does_not_delay_what_follows() -> None:
    found, delayed = slept(worker(0, PLAIN)), Delayed()
    taken = begin(found, 0, [2, 1], delayed)
    for phase in ("forward", "backward", "forward", "backward", ""):
        taken.turn(phase)
    assert delayed.until_s == pytest.approx([BEGIN_S + end for end in (0.2, 0.2 + 1.4 / 3, 0.3 + 1.4 / 3, 1.0)])


def test_late_updates_count_with_the_next_pass_and_those_of_a_server_alone() -> None:
    found, delayed = slept(worker(0, PLAIN)), Delayed()
    found.end_pass(0.0)  # the warm-up
    found.end_update(1, BEGIN_S, delayed, server=False)  # type: ignore[arg-type]
    found.end_update(1, BEGIN_S, delayed, server=False)  # type: ignore[arg-type]
    found.end_pass(0.0)
    found.end_pass(0.0)
    found.end_update(1, BEGIN_S, delayed, server=True)  # type: ignore[arg-type]
    assert (found.late.num_passes, found.late.num_late, found.late.seconds) == (3, 1, pytest.approx(0.016))


class ThreeRanks(SoloTransport):
    """Gathers from two more ranks, of which one has left."""

    def gather_texts(self, text: str, deadline: Any) -> list[str]:
        return [text, LEFT_TEXT, "[100, 7, 0.5]"]


def test_late_passes_are_those_of_all_ranks_that_have_not_left() -> None:
    late = LatePasses(num_passes=100, num_late=1, seconds=0.25)
    assert gather_late_passes(late, ThreeRanks(), None) == LatePasses(num_passes=200, num_late=8, seconds=0.75)  # type: ignore[arg-type]


def test_seconds_must_be_a_cost_model() -> None:
    with pytest.raises(ConfigError, match=r"compute=0.1: give seconds, such as"):
        Settings(steps=1, compute=0.1)  # type: ignore[arg-type]
