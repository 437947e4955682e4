"""Bucket times of simulated runs, whose steps the recurrences give to the last digits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch

import workbench as wb
from workbench.algorithms import ApplyOrder, bucket_plans
from workbench.analysis.buckets import bucket_times
from workbench.costs import Compute, Network
from workbench.errors import ConfigError
from workbench.gradients import build_layout, trainable
from workbench.ops import Backward, Now, Program, Request
from workbench.program import Context

NETWORK = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e6)
COMPUTE = Compute(forward_s=0.01, backward_s=0.02, update_s=0.004)


def simulated(algorithm: wb.Algorithm) -> wb.Run:
    problem = wb.problems.get("digits-mlp", hidden=[64, 64])
    return wb.simulate(algorithm, problem, workers=4, network=NETWORK, compute=COMPUTE, timing_only=True, steps=5)


@pytest.mark.parametrize("order", list(ApplyOrder))
def test_recurrences_of_a_trace_are_its_steps(order: ApplyOrder) -> None:
    algorithm = wb.LayerwiseSGD(bucket_bytes=0, apply=order)
    found = bucket_times(simulated(algorithm))
    assert (found.forward_s, found.backward_s) == pytest.approx((0.01, 0.02))
    assert sum(found.update_s) == pytest.approx(0.004, rel=1e-3)
    layout = build_layout(trainable(wb.problems.get("digits-mlp", hidden=[64, 64]).model()), 0)
    schedule = found.recurrences(COMPUTE.ready_shares(layout), order.value)
    assert schedule.begin_s == pytest.approx(found.begin_s, rel=1e-6)
    assert schedule.end_s == pytest.approx(found.end_s, rel=1e-6)
    assert schedule.step_s == pytest.approx(found.step_s, rel=1e-6)


def test_a_run_without_buckets_is_refused() -> None:
    with pytest.raises(ConfigError, match="no sums by bucket"):
        bucket_times(simulated(wb.SynchronousSGD()))


@pytest.mark.parametrize("latency_s", [1e-5, 1e-3, 1e-2])
def test_the_chosen_plan_is_as_fast_as_the_best_bucket_size(latency_s: float) -> None:
    """Within 3 % of a sweep, whether short sums cost much or nothing."""
    problem = wb.problems.get("digits-mlp", hidden=[64, 64, 64, 64])
    how = {
        "workers": 4,
        "compute": COMPUTE,
        "timing_only": True,
        "network": Network(latency_s=latency_s, bandwidth_bytes_per_s=1e7),
    }

    def step_s(bucket_bytes: float | Literal["auto"] | None, steps: int) -> float:
        run = wb.simulate(wb.LayerwiseSGD(bucket_bytes=bucket_bytes), problem, steps=steps, **how)
        before, last = run.steps()[-2:]
        return float(last["seconds"] - before["seconds"])

    fixed = [step_s(size, 4) for size in (0, 8_000, 16_000, 32_000, 64_000, None)]
    assert step_s("auto", 55) <= 1.03 * min(fixed)


def chosen(monkeypatch: pytest.MonkeyPatch, step_s: Callable[[int, int], float]) -> tuple[int, Counter[int]]:
    """The plan that a trial chooses, and how often each was tried; `step_s(plan, how often before)` are its times."""
    clock, tried = [0.0], Counter[int]()

    def planned_step(_step: int, plan: int, *_: object, **__: object) -> Iterator[Request]:
        clock[0] += step_s(plan, tried[plan])
        tried[plan] += 1
        yield from ()

    monkeypatch.setattr(bucket_plans, "planned_step", planned_step)
    layout = build_layout(trainable(wb.problems.get("digits-mlp", hidden=[64, 64]).model()), num_buckets=16)
    ctx = Context(0, 1, layout=layout)
    trial = bucket_plans.PlanTrial(ctx, wb.collectives.Native(), singly=False)
    trial.plans = list(range(len(bucket_plans.PLANS)))  # type: ignore[arg-type]  # `planned_step` gets their positions

    for step in range(bucket_plans.TRIAL_STEPS):
        answer_all(trial.step(step), lambda: clock[0])
    return bucket_plans.next_plan(ctx.memory[bucket_plans.SECONDS].tolist()), tried


def answer_all(program: Program, now: Callable[[], float]) -> list[Request]:
    """Run a program of one rank to its end; return its requests."""
    answer, requests = None, []
    while True:
        try:
            requests.append(program.send(answer))
        except StopIteration:
            return requests
        answer = now() if isinstance(requests[-1], Now) else getattr(requests[-1], "value", None)


def test_the_fastest_plan_is_chosen_and_slow_ones_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step with each plan, in which memory is made, does not count."""
    seconds = [1.3, 1.0, 1.2, 1.1, 1.4, 1.5]
    plan, tried = chosen(monkeypatch, lambda plan, before: seconds[plan] + (9 if before == 0 and plan == 1 else 0))
    assert plan == 1
    assert tried == {0: 4, 1: 16, 2: 8, 3: 16, 4: 4, 5: 4}


def test_a_noisy_machine_seldom_leads_to_a_plan_that_is_five_percent_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """With three steps a plan, whose times vary by 10 %, about 48 of 200 trials ended with a slow plan."""
    generator = random.Random(5)
    seconds = [1.0, 1.05, 1.0, 1.05, 1.0, 1.05]
    slow = 0
    for _ in range(200):
        plan, _ = chosen(monkeypatch, lambda plan, _: seconds[plan] * generator.lognormvariate(0, 0.1))
        slow += plan % 2
    assert slow < 30


def test_plans_do_not_change_the_result_of_two_ranks() -> None:
    """From the first step on, in which each plan is tried."""
    problem = wb.problems.get("digits-mlp", hidden=[64, 64])
    runs = [
        wb.simulate(algorithm, problem, workers=2, compute=COMPUTE, network=NETWORK, steps=55, seed=3)
        for algorithm in (wb.LayerwiseSGD(bucket_bytes="auto"), wb.SynchronousSGD())
    ]
    losses = [run.curve("steps")[1].tolist() for run in runs]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"collective": wb.collectives.Once(codec=wb.codecs.Truncate16())},
        {"apply": "any"},
        {"lanes": 2},
    ],
)
def test_settings_that_a_plan_decides_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="bucket_bytes='auto'"):
        wb.LayerwiseSGD(bucket_bytes="auto", **settings)


def test_a_trial_continues_in_a_later_program_and_ends_once() -> None:
    """Blocks of 12 steps, as those of SlowMo: each begins a program, and the trial of 52 steps goes through them."""
    algorithm = wb.SlowMo(every=12, inner=wb.LayerwiseSGD(bucket_bytes="auto"))
    problem = wb.problems.get("digits-mlp", hidden=[64, 64, 64, 64])
    run = wb.simulate(
        algorithm, problem, workers=2, compute=COMPUTE, network=NETWORK, timing_only=True, steps=80, trace_steps=80
    )
    table = run.spans.select(kinds=["all_reduce"]).table
    sums = Counter(table["step"][table["rank"] == 0].tolist())
    assert len({sums[step] for step in range(10)}) > 3, "a trial"
    assert len({sums[step] for step in range(52, 80) if (step + 1) % 12}) == 1, f"sums of steps: {sums}"


def test_a_resumed_program_keeps_the_plan_of_its_checkpoint() -> None:
    layout = build_layout(trainable(wb.problems.get("digits-mlp", hidden=[64, 64]).model()), num_buckets=16)
    algorithm = wb.LayerwiseSGD(bucket_bytes="auto")
    done = {bucket_plans.SECONDS: torch.ones(bucket_plans.TRIAL_STEPS, dtype=torch.float64)}
    first = [next(algorithm.worker(Context(0, 2, layout=layout, memory=memory))) for memory in ({}, done)]
    assert [type(request) for request in first] == [Now, Backward], "a fresh one measures"
