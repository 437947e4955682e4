"""Memory of collectives: units, lanes, and values that must not be compressed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.laws import owed, tiny
from tests.laws.owed import Situation
from tests.laws.small_world import applied, contexts, gradients, same, world
from tests.laws.train import train
from workbench.algorithms import (
    DiLoCo,
    EagerDiLoCo,
    LayerwiseSGD,
    LocalSGD,
    PartialAllReduce,
    PipeSGD,
    StreamingDiLoCo,
    SynchronousSGD,
)
from workbench.codecs import QSGD, ErrorFeedback, Linear8, SharedInt, SharedInt8, Sign, TopK
from workbench.collectives import Auto, Collective, Hierarchical, Native, Once, PowerSGD, Ring, Tree
from workbench.collectives.memory import (
    fold_lanes,
    forget_blocks,
    of_all_ranks,
    outcome_of,
    outcome_on_device,
    remember_weight,
    share_of,
)
from workbench.costs import Compute, Lognormal, Network
from workbench.errors import ConfigError
from workbench.gradients import USED, WEIGHT, build_layout, trainable
from workbench.program import Algorithm
from workbench.runtimes.reference import ReferenceRuntime
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings

FED = Once(codec=ErrorFeedback(codec=TopK(fraction=0.1)))
LATE = Compute(forward_s=0.3, backward_s=0.7, stragglers=(Lognormal(sigma=1.0),))
SLOW = Network(latency_s=0.5, bandwidth_bytes_per_s=2e3)


def late(algorithm: Algorithm, steps: int = 17, lr: float = 0.1, num_ranks: int = 3) -> Simulation:
    """Workers of which some are late now and then, on a network on which sums take longer than steps."""
    how = Settings(steps=steps, batch_size=3, optimizer=partial(torch.optim.SGD, lr=lr), seed=2)
    simulation = Simulation(algorithm, tiny.problem(), how, num_ranks, network=SLOW, compute=LATE)
    simulation.run()
    return simulation


# -- units ---------------------------------------------------------------------------------------------------------


def test_a_short_batch_applies_no_more_than_is_owed() -> None:
    """Of a constant positive gradient, top-k has never sent more of any value than there was."""
    for steps in range(1, 9):
        ended = owed.run(SynchronousSGD(collective=FED), Situation(33, constant=True), steps)
        most = float(ended.applied[0].max())
        assert most <= steps + 1e-6, f"by step {steps - 1} a value has got {most:.1f}, and {steps} were owed"
        assert ended.left.min() >= -1e-6


PATTERNS: dict[str, Callable[[int, np.random.Generator], list[float]]] = {
    "always unequal": lambda step, draw: [32, 1, 1, 1],
    "mildly unequal": lambda step, draw: [32, 16, 16, 16],
    "short on most ranks now and then": lambda step, draw: [32, 1, 1, 1] if step % 4 == 3 else [32, 32, 32, 32],
    "in turns": lambda step, draw: [32, 1, 1, 1] if step % 2 else [32, 32, 32, 32],
    "short on all ranks": lambda step, draw: [1, 1, 1, 1] if step % 10 == 9 else [32, 32, 32, 32],
    "none on some ranks": lambda step, draw: [32, 0, 32, 0] if step % 3 == 2 else [32, 32, 32, 32],
    "by chance": lambda step, draw: list(32 * draw.lognormal(0.0, 0.7, 4)),
}


@pytest.mark.parametrize(
    "collective", [FED, Once(codec=ErrorFeedback(codec=Sign())), PowerSGD(rank=1, inner=Ring())], ids=repr
)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_residual_stays_bounded_if_nobody_knows_the_weights_beforehand(pattern: str, collective: Collective) -> None:
    """As in a Trainer whose ranks count their samples.

    Of a constant gradient, about what is owed is applied, at any step.
    """
    layout = build_layout(trainable(nn.Linear(4, 5, bias=False).double()))
    size = layout.buckets[0].tail
    gradient = torch.linspace(1, 2, size, dtype=torch.float64)
    ranks, draw, num_steps = contexts(4, layout), np.random.default_rng(1), 80
    total_applied, furthest = torch.zeros(size, dtype=torch.float64), 0.0
    for step in range(num_steps):
        flats = []
        for weight in PATTERNS[pattern](step, draw):
            flat = torch.zeros(layout.numel, dtype=torch.float64)
            flat[:size] = weight * gradient
            flat[size + WEIGHT], flat[size + USED :] = weight, float(weight > 0)
            flats.append(flat)
        sums = world(collective, ranks, gradients(layout, flats, step, planned=False)).run()
        assert same(sums)
        total_applied += applied(layout, sums[0])[:size]
        furthest = max(furthest, float((total_applied / gradient / (step + 1)).abs().max()))
    kept = [value for ctx in ranks for name, value in ctx.memory.items() if ".residual" in name]
    left = torch.stack([value.reshape(-1) for value in kept]).sum(0)
    torch.testing.assert_close(total_applied + left, num_steps * gradient, rtol=1e-9, atol=1e-9)
    assert furthest < 2, f"up to {furthest:.3g} times what was owed was applied"
    assert float((total_applied / gradient / num_steps - 1).abs().max()) < 0.25, "most of what is owed is applied"


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 32.0]), st.sampled_from([0.0, 2.0, 35.0, 128.0])), max_size=9))
def test_the_ratio_of_weights_is_the_same_without_waiting_for_a_device(sums: list[tuple[float, float]]) -> None:
    plain, other = contexts(2)
    for own, weight in sums:
        own_tail, tail = torch.tensor([own, 0.0], dtype=torch.float64), torch.tensor([weight, 0.0], dtype=torch.float64)
        share = share_of(plain, "bucket-0", own_tail, None)
        remember_weight(plain, "bucket-0", tail, share)
        remember_weight(other, "bucket-0", tail, torch.tensor(share, dtype=torch.float64))
        kept, on_device = (float(ctx.memory.get("weight-ratio/bucket-0", torch.tensor(2.0))) for ctx in (plain, other))
        assert kept == pytest.approx(on_device, rel=1e-12)


@given(
    num_slots=st.integers(0, 4),
    weight=st.sampled_from([0.0, 1 / 32, 0.5, 1.0, 3.0]),
    share=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    bad=st.booleans(),
    seed=st.integers(0, 999),
)
def test_without_waiting_for_a_device_it_is_the_same(
    num_slots: int, weight: float, share: float, bad: bool, seed: int
) -> None:
    """The slow readable twin is the one for the CPU."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 5, (max(num_slots, 1),), generator=generator).tolist()
    ends = np.cumsum([0, *sizes]).tolist()
    spans = tuple(pairwise(ends)) if num_slots else ()
    users = torch.randint(0, 3, (num_slots,), generator=generator).double()
    tail = (
        torch.cat([torch.tensor([weight, 0.0], dtype=torch.float64), users])
        if num_slots
        else torch.empty(0, dtype=torch.float64)
    )
    total, residual, left = torch.randn(3, ends[-1], generator=generator, dtype=torch.float64)
    if bad:
        total[0] = float("nan")
        left[0] = float("inf")
    begin = int(torch.randint(0, ends[-1], (), generator=generator))
    plain, other = residual[begin:].clone(), residual[begin:].clone()
    outcome_of(tail, total, spans).update_residual(plain, left[begin:].clone(), share, begin)
    outcome_on_device(tail, total, spans).update_residual(
        other, left[begin:].clone(), torch.tensor(share).double(), begin
    )
    torch.testing.assert_close(plain, other, rtol=1e-12, atol=1e-12)
    if bad or (num_slots and weight == 0):
        assert torch.equal(plain, residual[begin:]), "nothing was applied, so all is still owed"


# -- lanes ---------------------------------------------------------------------------------------------------------


def test_each_lane_remembers_for_itself_and_lane_0_under_the_plain_names() -> None:
    names = set(
        late(PipeSGD(width=3, lanes=2, collective=PowerSGD(rank=1, alternate=True, inner=Ring()))).contexts[0].memory
    )
    plain = {name for name in names if not name.startswith("lane-")}
    assert "low-rank.sums/0" in plain and {f"lane-1/{name}" for name in plain} == names - plain


def test_both_factors_have_their_turn_on_every_lane() -> None:
    """By the step's parity, lane 0 of two would have even steps alone."""
    memory = (
        late(PipeSGD(width=3, lanes=2, collective=PowerSGD(rank=1, alternate=True, inner=Ring())), steps=16)
        .contexts[0]
        .memory
    )
    assert int(memory["low-rank.sums/0"]) == int(memory["lane-1/low-rank.sums/0"]) == 8
    for lane in ("", "lane-1/"):
        factors = [name for name in memory if name.startswith((f"{lane}low-rank.p/", f"{lane}low-rank.q/"))]
        assert {name.split("/")[-2][-1] for name in factors} == {"p", "q"}


def test_what_vanished_lanes_owe_is_lane_0s() -> None:
    one = torch.ones(2)
    memory = {
        "once.residual/bucket-0": one,
        "lane-1/once.residual/bucket-0": 2 * one,
        "lane-2/once.residual/bucket-0": 4 * one,
        "lane-2/once.owner/bucket-0": 8 * one,
        "lane-2/low-rank.q/0": one,
    }
    fold_lanes(memory, 2)
    assert {name: value.tolist() for name, value in memory.items()} == {
        "once.residual/bucket-0": [5, 5],
        "lane-1/once.residual/bucket-0": [2, 2],
        "once.owner/bucket-0": [8, 8],
    }


def test_names_of_lanes_are_understood_where_ranks_change() -> None:
    names = [
        "once.residual/a",
        "once.owner/a",
        "low-rank.residual/0",
        "weight-ratio/a",
        "low-rank.q/0",
        "low-rank.sums/0",
        "once.calls/b",
    ]
    memory = {f"{lane}{name}": torch.zeros(1) for lane in ("", "lane-3/") for name in names}
    assert set(of_all_ranks(memory)) == {f"{lane}{name}" for lane in ("", "lane-3/") for name in names[4:]}
    forget_blocks(memory)
    assert set(memory) == {
        f"{lane}{name}" for lane in ("", "lane-3/") for name in names if name not in ("once.owner/a", "weight-ratio/a")
    }


def test_a_resumed_run_on_fewer_lanes_loses_nothing() -> None:
    """From three lanes to one: all that was owed is applied or left over."""
    situation, steps = Situation(40), 11
    three, one = (PipeSGD(width=4, lanes=lanes, collective=FED) for lanes in (3, 1))
    how = situation.settings(steps, 0)
    first = Simulation(three, situation.problem(), how, 4, network=owed.NETWORK, compute=owed.COMPUTE)
    first.run(stop_after=5)
    second = Simulation(one, situation.problem(), how, 4, network=owed.NETWORK, compute=owed.COMPUTE)
    second.run(resume=first.checkpoints.at_stop)
    assert not any(name.startswith("lane-") for name in second.contexts[0].memory)
    ended = owed.ended(second)
    np.testing.assert_allclose(ended.applied[0] + ended.left, situation.owed(one, steps, 0), rtol=1e-10, atol=1e-10)


# -- parameters ----------------------------------------------------------------------------------------------------

PAIRS: list[tuple[Collective, Collective]] = [
    (Ring(codec=Linear8(), chunks=2), Ring(chunks=2)),
    (Ring(), Ring()),
    (FED, Native()),
    (Once(codec=SharedInt8(), inner=Tree()), Tree()),
    (PowerSGD(inner=Ring()), Ring()),
    (Auto(candidates=(Tree(codec=Linear8()), Ring(codec=Linear8()))), Auto(candidates=(Tree(), Ring()))),
    (Hierarchical(group=2, codec=Linear8()), Hierarchical(group=2)),
]


@pytest.mark.parametrize(("collective", "exact"), PAIRS, ids=repr)
def test_every_collective_names_its_exact_counterpart(collective: Collective, exact: Collective) -> None:
    assert collective.exact == exact and not exact.lossy


@pytest.mark.parametrize(
    "algorithm",
    [
        DiLoCo(every=4),
        StreamingDiLoCo(every=4, fragments=2),
        StreamingDiLoCo(every=4, fragments=1, delay=1),
        EagerDiLoCo(every=4),
    ],
    ids=str,
)
@pytest.mark.parametrize("collective", [FED, PowerSGD(rank=1, inner=Ring()), Ring(codec=Linear8())], ids=repr)
def test_the_last_average_of_diloco_is_exact(
    collective: Collective, algorithm: DiLoCo | StreamingDiLoCo | EagerDiLoCo
) -> None:
    """The mean of where ranks are before it; residuals are as they were."""
    algorithm = replace(algorithm, outer_lr=0.5, outer_momentum=0.3)
    found = train("simulated", 3, replace(algorithm, collective=collective), tiny.problem(), HOW)
    if isinstance(algorithm, DiLoCo):  # nothing is in flight
        before = torch.stack([steps[-2] for steps in found.parameters]).mean(0)
        torch.testing.assert_close(found.final, before, rtol=1e-12, atol=1e-12)
    assert same([steps[-1] for steps in found.parameters])
    exact = train("simulated", 3, algorithm, tiny.problem(), HOW)
    assert float((found.final - exact.final).norm()) < 0.5 * float(exact.final.norm())


HOW = Settings(steps=22, batch_size=3, optimizer=tiny.sgd, seed=5)


@pytest.mark.parametrize("collective", [Ring(codec=Linear8()), Once(codec=QSGD()), FED, PowerSGD()], ids=repr)
def test_local_sgd_refuses_to_compress_parameters_and_names_what_trains(collective: Collective) -> None:
    with pytest.raises(ConfigError, match="use DiLoCo") as found:
        LocalSGD(every=2, collective=collective)
    named = str(found.value).split("use ")[1].split("; otherwise")[0]
    instead = DiLoCo(every=2, outer_lr=1.0, outer_momentum=0.0, nesterov=False, collective=collective)
    assert named == f"DiLoCo(every=2, outer_lr=1.0, outer_momentum=0.0, nesterov=False, collective={collective})"
    losses = [row["loss"] for row in train("simulated", 3, instead, tiny.problem(), replace(HOW, steps=60)).rows(0)]
    assert np.mean(losses[-10:]) < 0.75 * np.mean(losses[:10])


# -- cost ----------------------------------------------------------------------------------------------------------


class Cleared(TorchDispatchMode):
    """Counts the large tensors that are filled with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.num_tensors = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.num_tensors += "zero" in str(function) and result.numel() > 100
        return result


@pytest.mark.parametrize(
    "collective",
    [*(Once(codec=ErrorFeedback(codec=codec)) for codec in (Linear8(), Sign(), SharedInt8())), PowerSGD(inner=Ring())],
    ids=repr,
)
def test_a_residual_is_cleared_in_the_first_step_only(collective: Collective) -> None:
    """A look-up that makes a tensor of zeros in case the residual is not there writes a whole gradient at each step."""
    layout, ranks = build_layout(trainable(nn.Linear(40, 7))), contexts(2)
    cleared = []
    for step in range(3):
        with Cleared() as counter:
            world(collective, ranks, gradients(layout, [torch.ones(layout.numel)] * 2, step)).run()
        cleared.append(counter.num_tensors)
    assert cleared[0] > 0
    assert cleared[1:] == [0, 0]


# -- steps ---------------------------------------------------------------------------------------------------------


def test_low_rank_sums_of_packed_values_begin_at_their_step() -> None:
    algorithm = DiLoCo(every=2, collective=PowerSGD(rank=1, start_step=4, inner=Ring()))
    momentum = {"outer.momentum/bucket-0"}
    memory = late(algorithm, steps=5).contexts[0].memory
    assert memory.keys() == momentum, "steps before the start are summed as they are"
    assert late(algorithm, steps=6).contexts[0].memory.keys() > momentum


@pytest.mark.parametrize("collective", [Once(codec=QSGD(levels=1)), Ring(codec=QSGD(levels=1))], ids=repr)
def test_noise_of_packed_values_and_of_plain_tensors_is_drawn_again_each_time(collective: Collective) -> None:
    ranks, value = contexts(2), torch.linspace(-1, 1, 40)
    sums = [world(collective, ranks, [value.clone(), value.clone()]).run()[0] for _ in range(12)]
    assert len({tuple(total.tolist()) for total in sums}) == 12

    def constant(rank: int, step: int, parameters: Tensor) -> Tensor:
        return torch.linspace(0.5, 1.0, 6, dtype=torch.float64)

    driver = ReferenceRuntime(
        DiLoCo(every=1, outer_lr=1.0, outer_momentum=0.0, collective=collective), 2, constant, lr=1.0
    ).run(12)
    seen = driver.ranks[0].seen
    updates = [after - before for before, after in pairwise(seen)]
    assert len({tuple(update.tolist()) for update in updates}) > 4


# -- rounds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", [FED, PowerSGD(inner=Ring()), Hierarchical(group=2, outer=FED)], ids=repr)
def test_rounds_of_unknown_ranks_refuse_what_keeps_a_residual(collective: Collective) -> None:
    for quorum in ("solo", "majority", 2, 0.5):
        with pytest.raises(ConfigError, match="use quorum='all'"):
            PartialAllReduce(quorum=quorum, collective=collective)
    assert PartialAllReduce(quorum="all", collective=collective).max_staleness == 0


@pytest.mark.parametrize("collective", [Native(), PowerSGD(), Once(codec=SharedInt(bits=32)), Auto()], ids=repr)
def test_what_may_call_the_library_is_refused_beside_other_messages(collective: Collective) -> None:
    for make in (PartialAllReduce, partial(LayerwiseSGD, order="priority")):
        with pytest.raises(ConfigError, match=r"library's own all-reduce.*use Ring\(\)"):
            make(collective=collective)


@pytest.mark.parametrize("collective", [Once(codec=QSGD()), Ring(codec=QSGD())], ids=repr)
@pytest.mark.parametrize("quorum", ["solo", "majority"])
def test_ranks_agree_on_the_step_of_a_round(quorum: Any, collective: Collective) -> None:
    simulation = late(PartialAllReduce(quorum=quorum, collective=collective))
    assert same([worker.trained.read_parameters() for worker in simulation.workers])
