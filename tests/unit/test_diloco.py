"""DiLoCo, StreamingDiLoCo and EagerDiLoCo, against the formulas written out over whole vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.numbered import common_factor, numbered, pull
from workbench import algorithms
from workbench.algorithms import DiLoCo, EagerDiLoCo, LocalSGD, StreamingDiLoCo, SynchronousSGD
from workbench.algorithms.outer_optimizer import OuterOptimizer
from workbench.analysis import summary
from workbench.errors import ConfigError
from workbench.gradients import CONTROL, Gradient, build_layout
from workbench.ops import PackParameters, Ticket, UnpackParameters
from workbench.program import Context
from workbench.runtimes.reference import ReferenceRuntime
from workbench.trace import FileRecorder, new_run, open_run, update_run

LR = 0.3


def constant(rank: int, step: int, parameters: Tensor) -> Tensor:
    """1, 2, 3 on ranks 0, 1, 2, twice that in the second coordinate, three times in the third: 2, 4, 6, ... on average."""
    return (rank + 1) * numbered(parameters)


def seen(driver: ReferenceRuntime, rank: int = 0) -> list[float]:
    """The first parameter after each step; coordinate k holds k + 1 times that."""
    return [common_factor(one) for one in driver.ranks[rank].seen]


def test_one_outer_step_in_the_head() -> None:
    """Two steps of 1, 2, 3: D = 4; m = 4; a = -0.5 (4 + 0.5 * 4) = -3. Then m = 0.5 * 4 + 4 = 6; a = -3 - 0.5 (4 + 3) = -6.5."""
    algorithm = DiLoCo(every=2, outer_lr=0.5, outer_momentum=0.5)
    driver = ReferenceRuntime(algorithm, 3, constant, lr=1.0, start=0.0).run(4)
    assert seen(driver, 0) == [-1, -3, -4, -6.5]
    assert seen(driver, 2) == [-3, -3, -6, -6.5]


def test_heavy_ball_in_the_head() -> None:
    """Without Nesterov: a = -0.5 * 4 = -2, then -2 - 0.5 * 6 = -5."""
    driver = ReferenceRuntime(
        DiLoCo(every=2, outer_lr=0.5, outer_momentum=0.5, nesterov=False), 3, constant, lr=1.0, start=0.0
    ).run(4)
    assert seen(driver) == [-1, -2, -3, -5]


def test_an_outer_step_may_come_late_and_be_mixed() -> None:
    """Turn after step 1, D = 4, used after step 2, where rank 0 is at -3 and rank 2 at -9: half of that and half of a = -4."""
    algorithm = StreamingDiLoCo(every=2, outer_lr=1.0, outer_momentum=0.0, fragments=1, delay=1, mix=0.5)
    driver = ReferenceRuntime(algorithm, 3, constant, lr=1.0, start=0.0).run(3)
    assert seen(driver, 0) == [-1, -2, -3.5]
    assert seen(driver, 2) == [-3, -6, -6.5]
    assert [common_factor(rank.parameters) for rank in driver.ranks] == [-5, -5, -5], "the mean of -3.5, -5, -6.5"


def test_the_end_takes_the_outer_step_in_flight() -> None:
    """Ranks at -2, -4, -6, D = 4, a = -0.5 * 4 = -2: half of that and half of the mean is -3."""
    algorithm = StreamingDiLoCo(every=2, outer_lr=0.5, outer_momentum=0.0, fragments=1, delay=1, mix=0.5)
    driver = ReferenceRuntime(algorithm, 3, constant, lr=1.0, start=0.0).run(2)
    assert [common_factor(rank.parameters) for rank in driver.ranks] == [-3, -3, -3]


def test_fragments_take_turns() -> None:
    """Four steps, two fragments: the front one, which is bucket 1, is due after steps 2, 6; the back one after 4, 8."""
    algorithm = StreamingDiLoCo(every=4, fragments=2, outer_lr=1.0, outer_momentum=0.0)
    driver = ReferenceRuntime(algorithm, 3, constant, sizes=(2, 2), lr=1.0, start=0.0).run(6)
    front, back = ([float((one / numbered(one))[which]) for one in driver.ranks[0].seen] for which in (0, -1))
    for one in driver.ranks[0].seen:
        assert one[1] == 2 * one[0] and 3 * one[3] == 4 * one[2], "each coordinate its own"
    assert front == [-1, -4, -5, -6, -7, -12]
    assert back == [-1, -2, -3, -8, -9, -10]


def test_an_eager_step_has_the_own_part_new_and_the_others_late() -> None:
    """p = 2, D = 1, 2 each turn; a rank's first D is D_i / 2, later ones D_i / 2 + (1.5 - D_i / 2) = 1.5."""
    driver = ReferenceRuntime(
        EagerDiLoCo(every=1, outer_lr=1.0, outer_momentum=0.0), 2, constant, lr=1.0, start=0.0
    ).run(3)
    assert seen(driver, 0) == [-0.5, -2, -3.5]
    assert seen(driver, 1) == [-1, -2.5, -4]
    assert [common_factor(rank.parameters) for rank in driver.ranks] == [-4.5, -4.5], (
        "three steps of 1.5, none lost at the end"
    )


def test_without_outer_optimizer_it_is_synchronous_or_local() -> None:
    plain = {"outer_lr": 1.0, "outer_momentum": 0.0}
    pairs = [
        (DiLoCo(every=1, **plain), SynchronousSGD()),
        (DiLoCo(every=3, **plain), LocalSGD(every=3)),
        (StreamingDiLoCo(every=3, fragments=1, **plain), LocalSGD(every=3)),
    ]
    for ours, theirs in pairs:
        found, expected = (
            ReferenceRuntime(ours, 3, pull, lr=LR).run(10),
            ReferenceRuntime(theirs, 3, pull, lr=LR).run(10),
        )
        for one, other in zip(found.ranks[1].seen, expected.ranks[1].seen, strict=True):
            assert torch.allclose(one, other, rtol=1e-13, atol=1e-15)


Outer = DiLoCo | StreamingDiLoCo | EagerDiLoCo


def oracle(algorithm: Outer, num_ranks: int, num_steps: int) -> list[Tensor]:
    """(ranks, n) after each step: whole vectors and a mask for each fragment; nothing of buckets, tails or tickets."""
    eager = isinstance(algorithm, EagerDiLoCo)
    delay, mix = (algorithm.delay, algorithm.mix) if isinstance(algorithm, StreamingDiLoCo) else (0, 0.0)
    sizes = (2, 3, 1)
    starts = [0, 2, 5]
    number = 1 if isinstance(algorithm, DiLoCo) else algorithm.fragments
    assert number in (1, 3)
    masks = (
        [torch.ones(6, dtype=torch.bool)]
        if number == 1
        else [torch.arange(6).ge(starts[k]) & torch.arange(6).lt(starts[k] + sizes[k]) for k in (2, 1, 0)]
    )
    local = torch.ones(num_ranks, 6, dtype=torch.float64)
    anchor, velocity = local.clone(), torch.zeros_like(local)
    own_before, mean_before = torch.zeros_like(local), torch.zeros(6, dtype=torch.float64)
    coming: list[tuple[int, int, Tensor]] = []
    seen = []

    def outer(mask: Tensor, direction: Tensor) -> None:
        velocity[:, mask] = algorithm.outer_momentum * velocity[:, mask] + direction[:, mask]
        step = direction + algorithm.outer_momentum * velocity if algorithm.nesterov else velocity
        anchor[:, mask] -= algorithm.outer_lr * step[:, mask]
        local[:, mask] = mix * local[:, mask] + (1 - mix) * anchor[:, mask]

    for count in range(1, num_steps + 1):
        for rank in range(num_ranks):
            local[rank] -= LR * pull(rank, count - 1, local[rank])
        for due, fragment, mean in [item for item in coming if item[0] == count]:
            coming.remove((due, fragment, mean))
            outer(masks[fragment], mean.expand(num_ranks, -1))
        for fragment, mask in enumerate(masks):
            if count % algorithm.every == fragment * algorithm.every // number:
                own = anchor - local
                if eager:
                    outer(mask, own / num_ranks + mean_before - own_before / num_ranks)
                    own_before[:, mask], mean_before[mask] = own[:, mask], own.mean(0)[mask]
                elif delay == 0:
                    outer(mask, own.mean(0).expand(num_ranks, -1))
                else:
                    coming.append((count + delay, fragment, own.mean(0)))
        seen.append(local.clone())
    return seen


FORMS = [
    DiLoCo(every=3),
    DiLoCo(every=2, nesterov=False),
    StreamingDiLoCo(every=4, fragments=3),
    StreamingDiLoCo(every=4, fragments=3, delay=2, mix=0.5),
    StreamingDiLoCo(every=2, fragments=3, delay=2, nesterov=False),
    StreamingDiLoCo(every=3, fragments=1, delay=1, mix=0.25),
    EagerDiLoCo(every=3),
    EagerDiLoCo(every=3, fragments=3, outer_momentum=0.5),
]


@pytest.mark.parametrize("algorithm", FORMS, ids=str)
def test_every_form_is_its_formula(algorithm: Outer) -> None:
    driver = ReferenceRuntime(algorithm, 3, pull, lr=LR).run(17)
    for step, expected in enumerate(oracle(algorithm, 3, 17)):
        for rank, here in enumerate(driver.ranks):
            assert torch.allclose(here.seen[step], expected[rank], rtol=1e-12, atol=1e-14), f"rank {rank}, step {step}"
    assert all(torch.equal(driver.ranks[0].parameters, here.parameters) for here in driver.ranks), "equal at the end"


@pytest.mark.parametrize("algorithm", FORMS, ids=str)
def test_resumed_at_any_step(algorithm: Outer) -> None:
    unbroken = ReferenceRuntime(algorithm, 3, pull, lr=LR).run(11)
    for stop in range(11):
        first = ReferenceRuntime(algorithm, 3, pull, lr=LR).run(11, stop_after=stop)
        for _ in range(2):  # the same state may be read twice
            second = ReferenceRuntime(algorithm, 3, pull, lr=LR)
            second.continue_from(first)
            second.run(11, first_step=stop + 1, resumed=first.states)
            assert torch.equal(second.ranks[1].parameters, unbroken.ranks[1].parameters), stop


def packed(values: list[float], control: float) -> Gradient:
    """Parameters of one bucket, of weight 1, or their sum."""
    layout = build_layout([("w", nn.Parameter(torch.zeros(len(values))))])
    flat = torch.tensor([*values, 1.0, control, 0.0])
    return Gradient(flat, layout, step=0, version=0, bucket=0)


def begun() -> OuterOptimizer:
    """With the anchor (1, 2)."""
    program = OuterOptimizer.begin(DiLoCo(), Context(0, 1))
    next(program)
    with pytest.raises(StopIteration) as end:
        program.send(packed([1.0, 2.0], control=7.0))
    outer: OuterOptimizer = end.value.value
    return outer


def test_a_rank_learns_the_command_of_a_sum_with_its_parameters() -> None:
    """And not its own: the others do not know that."""
    for total, control in ((None, 0.0), (packed([5.0, 5.0], control=3.0).flat, 3.0)):
        program = begun().unpack(total, mix=0.5)
        assert isinstance(next(program), PackParameters)
        request = program.send(packed([3.0, 4.0], control=7.0))
        assert isinstance(request, UnpackParameters)
        assert request.value.flat.tolist() == [2.0, 3.0, 1.0, control, 0.0]


def test_a_resumed_sum_is_without_the_command_that_stopped_the_run() -> None:
    total = packed([5.0, 6.0], control=3.0).flat
    ticket = begun().load_sum(Ticket.completed(total))
    assert ticket is not None and ticket.value.tolist() == [5.0, 6.0, 1.0, 0.0, 0.0]
    assert total[2 + CONTROL] == 3.0, "the checkpoint is as it was"
    assert begun().load_sum(None) is None


@pytest.mark.parametrize("kind", [DiLoCo, StreamingDiLoCo, EagerDiLoCo])
@pytest.mark.parametrize("wrong", [{"every": 0}, {"outer_lr": 0.0}, {"outer_momentum": 1.0}], ids=str)
def test_wrong_settings_are_refused(kind: type[Outer], wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        kind(**wrong)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (StreamingDiLoCo, {"fragments": 0}),
        (StreamingDiLoCo, {"delay": 31}),
        (StreamingDiLoCo, {"delay": -1}),
        (StreamingDiLoCo, {"mix": 1.5}),
        (EagerDiLoCo, {"fragments": 0}),
    ],
)
def test_wrong_settings_of_one_are_refused(kind: type[Outer], wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        kind(**wrong)


@pytest.mark.parametrize(
    ("kind", "setting", "instead"),
    [
        (DiLoCo, "fragments", "StreamingDiLoCo"),
        (DiLoCo, "delay", "StreamingDiLoCo"),
        (DiLoCo, "mix", "StreamingDiLoCo"),
        (DiLoCo, "eager", "EagerDiLoCo"),
        (StreamingDiLoCo, "eager", "EagerDiLoCo"),
        (EagerDiLoCo, "mix", "StreamingDiLoCo"),
    ],
)
def test_a_setting_of_another_is_refused_and_that_one_is_named(kind: type[Outer], setting: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=f"^{kind.__name__} has no setting {setting}: use {instead}$"):
        kind(**{setting: 1})
    with pytest.raises(ConfigError, match=f"use {instead}$"):
        algorithms.get(kind.__name__.replace("DiLoCo", "-diloco").lower().removeprefix("-"), **{setting: 1})


def test_a_recorded_run_with_such_settings_is_shown(runs: Path) -> None:
    """It has no algorithm of the package: its metrics need none."""
    settings = {"every": 30, "outer_lr": 0.7, "fragments": 1, "delay": 0, "mix": 0.0, "eager": True}
    info = {
        "algorithm": {"name": "DiLoCo", "settings": settings},
        "problem": {"name": "digits-mlp"},
        "num_workers": 1,
        "runtime": "torch",
    }
    folder = new_run({**info, "settings": {"seed": 0, "steps": 4}}, runs)
    recorder = FileRecorder(folder, 0, {"host": "node-1", "pid": 7, "device": "cpu", "origin_s": 0.0, "unix_s": 1.7e9})
    for step in range(4):
        recorder.metrics(
            {
                "step": step,
                "seconds": step + 1.0,
                "samples": 8,
                "bytes_sent": 0,
                "lr": 0.1,
                "loss": 4.0 - step,
                "num_samples": 4,
            }
        )
    recorder.close()
    update_run(folder, status="finished")
    run = open_run(folder)
    assert algorithms.recorded(run.info["algorithm"]) is None
    assert summary(run)["algorithm"] == "DiLoCo" and "eager" in run.label
