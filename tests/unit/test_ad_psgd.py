"""AD-PSGD: pairs that average at any time keep the sum over ranks, come together, and never wait for each other."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.laws import tiny
from workbench.algorithms import ADPSGD, SerialSGD, ad_psgd
from workbench.costs import Compute, Lognormal
from workbench.errors import ConfigError
from workbench.gradients import Gradient, build_layout, trainable
from workbench.ops import Send
from workbench.runtimes.reference import Costs, ReferenceRuntime
from workbench.runtimes.simulator.simulate import simulate
from workbench.topologies import Complete, Exponential, Graph, OnePeerExponential, RandomRegular, Ring, Star, Torus

LR, SIZES = 0.1, (2, 3, 1)
STAMP_BYTES = 8
START = torch.tensor([1.0, -2.0, 3.0, 5.0, -7.0, 11.0], dtype=torch.float64)
GRAPHS: list[Graph] = [Ring(), Star(), Torus(), Complete(), RandomRegular(degree=2)]


def drawn(rank: int, step: int, parameters: Tensor) -> Tensor:
    """A number for each coordinate, rank and step, whatever the parameters are."""
    return torch.randn(len(START), generator=torch.Generator().manual_seed(100 * rank + step), dtype=torch.float64)


def apart(rank: int, step: int, parameters: Tensor) -> Tensor:
    """Ranks move apart in the first step, and then have no gradient."""
    return 10 * drawn(rank, 0, parameters) * (step == 0)


def ran(graph: Graph, num_ranks: int, gradient: Any, steps: int, **more: Any) -> ReferenceRuntime:
    return ReferenceRuntime(ADPSGD(topology=graph), num_ranks, gradient, sizes=SIZES, lr=LR, start=START, **more).run(
        steps
    )


def check_the_sum(graph: Graph, num_ranks: int, steps: int, shuffle: int | None) -> None:
    """The mean at the end is the start minus all steps of all ranks, divided by p."""
    runtime = ran(graph, num_ranks, drawn, steps, shuffle=shuffle)
    moved = sum(drawn(rank, step, START) for rank in range(num_ranks) for step in range(steps))
    expected = START - LR * moved / num_ranks
    for rank in runtime.ranks:
        assert torch.allclose(rank.parameters, expected, rtol=1e-12, atol=1e-12), "the sum over ranks was not kept"


@settings(max_examples=60, deadline=None)
@given(
    graph=st.sampled_from(GRAPHS), num_ranks=st.integers(1, 7), steps=st.integers(0, 9), shuffle=st.integers(0, 9999)
)
def test_no_update_is_lost_in_any_order_of_events(graph: Graph, num_ranks: int, steps: int, shuffle: int) -> None:
    """And no two ranks wait for each other: the reference runtime would report the deadlock."""
    check_the_sum(graph, num_ranks, steps, shuffle)


@pytest.mark.parametrize("graph", GRAPHS, ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_pairs_are_of_an_active_and_a_passive_rank(graph: Graph, num_ranks: int) -> None:
    algorithm, passive = ADPSGD(topology=graph), ad_psgd._passive(graph, num_ranks)
    assert passive[0]
    for rank in range(num_ranks):
        partners = algorithm.partners(rank, num_ranks)
        assert partners and all(passive[rank] != passive[other] for other in partners)
        assert all(rank in algorithm.partners(other, num_ranks) for other in partners)


def test_ranks_come_together() -> None:
    runtime = ran(Ring(), 6, apart, 60)
    after = torch.stack([torch.stack(rank.seen) for rank in runtime.ranks])
    spread = after.max(0).values - after.min(0).values
    assert float(spread[-1].max()) < 1e-3 * float(spread[0].max())


def test_a_slow_rank_delays_no_other() -> None:
    """On a path 0 - 1 - 2 - 3 the passive rank 2 takes ten times as long. Its neighbours end as early as without it."""
    costs = Costs(backward=lambda rank, step: 10.0 if rank == 2 else 1.0)
    runtime = ReferenceRuntime(ADPSGD(), 4, drawn, sizes=SIZES, lr=LR, start=START, costs=costs)
    ends: dict[int, float] = {}
    resume = runtime._resume

    def watched(process: Any) -> None:
        resume(process)
        if process.ticket is None and len(runtime.ranks[process.rank].ends) == 20:
            ends.setdefault(process.rank, process.now)

    runtime._resume = watched  # type: ignore[method-assign]
    runtime.run(20)
    assert ends[2] >= 200.0
    assert max(ends[rank] for rank in (0, 1, 3)) == pytest.approx(20.0)


def test_one_worker_is_serial() -> None:
    ours = ran(Ring(), 1, drawn, 9).ranks[0]
    serial = ReferenceRuntime(SerialSGD(), 1, drawn, sizes=SIZES, lr=LR, start=START).run(9).ranks[0]
    assert all(torch.equal(found, expected) for found, expected in zip(ours.seen, serial.seen, strict=True))


def closed_form(graph: Graph, num_ranks: int, steps: int) -> tuple[int, int, int]:
    """Messages of all ranks that carry a stamp, messages that carry none, and elements of the mean at the end, in n.

    Each step of an active rank sends n and gets n back, whichever partner it draws. At its end it tells each partner.
    """
    passive = ad_psgd._passive(graph, num_ranks)
    active = [rank for rank in range(num_ranks) if not passive[rank]]
    closing = sum(len(ADPSGD(topology=graph).partners(rank, num_ranks)) for rank in active)
    return steps * len(active) + closing, steps * len(active), 2 * (num_ranks - 1)


@pytest.mark.parametrize("num_ranks", [2, 5, 8])
@pytest.mark.parametrize("graph", [Ring(), Star(), Torus()], ids=str)
def test_bytes_of_all_ranks_are_the_closed_form(graph: Graph, num_ranks: int) -> None:
    """On simulated ranks of varying speed; on which rank they fall is chance. And as many messages by hand."""
    steps = 7
    stamped, plain, in_mean = closed_form(graph, num_ranks, steps)
    run = simulate(
        ADPSGD(topology=graph),
        tiny.problem(),
        workers=num_ranks,
        compute=Compute(forward_s=0.01, backward_s=0.02, stragglers=(Lognormal(sigma=0.5),)),
        steps=steps,
        batch_size=2,
        evaluate_every=0,
        trace_steps=None,
    )
    num_bytes = build_layout(trainable(tiny.mlp()), None, 1).message_bytes
    spans = run.to_pandas("spans")
    sent = spans[spans.kind.isin(["send", "all_reduce"])].bytes.sum()
    expected = stamped * (num_bytes + STAMP_BYTES) + (plain + in_mean) * num_bytes
    assert abs(sent - expected) <= num_ranks, "the part of a rank in the mean is a whole number of bytes"
    runtime = ReferenceRuntime(ADPSGD(topology=graph), num_ranks, drawn, sizes=SIZES, lr=LR, start=START, shuffle=1)
    counted: Counter[bool] = Counter()
    communicate = runtime._communicate

    def counting(process: Any, request: Any, ticket: Any) -> None:
        if isinstance(request, Send) and request.to != process.rank:
            counted[request.stamp is not None] += 1
        communicate(process, request, ticket)

    runtime._communicate = counting  # type: ignore[method-assign]
    runtime.run(steps)
    assert (counted[True], counted[False]) == (stamped, plain)


def test_a_lost_update_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A passive rank that overwrites its parameters by its worker's, as if nobody had averaged with it meanwhile."""

    def wrong(model: Gradient, received: Tensor, *, own: bool) -> None:
        begun.setdefault(id(model), model.flat.clone())
        theirs = received.clone()
        if own:
            model.flat.copy_(begun[id(model)] + theirs)
            begun[id(model)] = model.flat.clone()
        else:
            model.flat.add_(theirs).mul_(0.5)

    begun: dict[int, Tensor] = {}
    check_the_sum(Ring(), 4, 6, None)
    monkeypatch.setattr(ad_psgd, "_take", wrong)
    with pytest.raises(AssertionError, match="was not kept"):
        check_the_sum(Ring(), 4, 6, None)


@pytest.mark.parametrize("graph", [Exponential(), OnePeerExponential()], ids=str)
def test_a_directed_graph_is_refused_with_the_fix(graph: Graph) -> None:
    with pytest.raises(ConfigError, match="averages pairs: use Ring"):
        ADPSGD(topology=graph).check(8)
