"""Links that connections share fairly: max-min, one connection's messages in turn, and collectives that hold the network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from workbench.collectives import Ring
from workbench.costs import Compute, Network, Route, Topology
from workbench.runtimes.simulator.fabric import Clock, Fabric
from workbench.runtimes.simulator.fair_sharing import FairLinks, fair_rates

ALPHA = 0.25
FAIR = Network(latency_s=ALPHA, bandwidth_bytes_per_s=1.0, fair=True)
Message = tuple[float, int, int, int]  # offered when, from whom, to whom, bytes


def arrivals(messages: list[Message], network: Any = FAIR, priorities: tuple[int, ...] = ()) -> list[float]:
    """When each of these messages is there."""
    net, found = Fabric(Clock(), network, 8), [0.0] * len(messages)

    def offer(number: int) -> None:
        _, sender, to, size = messages[number]
        priority = priorities[number] if priorities else 0
        net.receive((number, 0, sender, to), lambda *_: found.__setitem__(number, net.clock.now_s), None)
        net.send((number, 0, sender, to), size, None, lambda _: None, None, priority)

    for number, message in enumerate(messages):
        net.clock.at(message[0], offer, number)
    net.clock.run()
    return found


def test_replies_of_one_server_share_its_interface_and_end_together() -> None:
    replies = [(0.0, 0, to, 6) for to in (1, 2, 3)]
    assert arrivals(replies) == pytest.approx([18 + ALPHA] * 3)
    assert arrivals(replies, replace(FAIR, fair=False)) == pytest.approx([6 + ALPHA, 12 + ALPHA, 18 + ALPHA])
    assert arrivals(replies, Topology(between=FAIR)) == pytest.approx([18 + ALPHA] * 3)


def test_who_comes_later_takes_its_share_from_then_on() -> None:
    """Alone for 4 seconds, then by halves until the first has its 6 bytes; the second has 2 by then, and the rest alone."""
    assert arrivals([(0.0, 0, 1, 6), (4.0, 0, 2, 6)]) == pytest.approx([8 + ALPHA, 12 + ALPHA])


def test_messages_of_one_connection_go_one_behind_the_other_the_most_urgent_first() -> None:
    assert arrivals([(0.0, 0, 1, 2), (0.0, 0, 1, 3), (0.0, 1, 0, 4)]) == pytest.approx(
        [2 + ALPHA, 5 + ALPHA, 4 + ALPHA]
    )
    late = arrivals([(0.0, 0, 1, 2), (0.0, 0, 1, 3), (0.0, 0, 1, 1)], priorities=(2, 2, 1))
    assert late == pytest.approx([2 + ALPHA, 6 + ALPHA, 3 + ALPHA])


def test_what_takes_no_time_or_hardly_any_arrives() -> None:
    """Also late in a run, where the clock cannot tell so short a time from none."""
    for quick in (float("inf"), 1e18):
        assert arrivals([(1e6, 0, 1, 6), (1e6, 0, 2, 0)], replace(FAIR, bandwidth_bytes_per_s=quick)) == pytest.approx(
            [1e6 + ALPHA] * 2
        )


def test_a_collective_waits_for_messages_and_messages_for_a_collective() -> None:
    net, ends, came = Fabric(Clock(), FAIR, 2), [], []

    def message(value: str) -> None:
        net.receive((value, 0, 0, 1), lambda *_: came.append(net.clock.now_s), None)
        net.send((value, 0, 0, 1), 6, value, lambda _: None, None)

    def join(_: None) -> None:
        for rank in (0, 1):
            net.join("sum", (rank, None, lambda *_: ends.append(net.clock.now_s)), 10.0, lambda _: None)

    net.clock.at(0.0, message, "before")
    net.clock.at(1.0, join)
    net.clock.at(2.0, message, "after")
    net.clock.run()
    assert ends == pytest.approx([16.0, 16.0])
    assert came == pytest.approx([6 + ALPHA, 22 + ALPHA])


@pytest.mark.parametrize("collective", [Ring(), Ring(chunks=3)])
def test_where_each_interface_has_one_connection_nothing_is_to_share(collective: Ring) -> None:
    def seconds(network: Network) -> float:
        algorithm, compute = wb.PipeSGD(collective=collective), Compute(forward_s=1e-3, backward_s=2e-3)
        run = wb.simulate(
            algorithm,
            wb.problems.digits_softmax(),
            workers=4,
            network=network,
            compute=compute,
            timing_only=True,
            steps=6,
            batch_size=16,
        )
        return float(run.metrics[0][-1]["seconds"])

    slow = Network(latency_s=1e-4, bandwidth_bytes_per_s=1e6)
    assert seconds(replace(slow, fair=True)) == pytest.approx(seconds(slow), rel=1e-9)


@given(st.dictionaries(st.tuples(st.integers(0, 5), st.integers(0, 5)), st.floats(0.1, 10.0), min_size=1, max_size=12))
def test_nobody_can_have_more_without_less_for_who_has_no_more(pairs: dict[tuple[int, int], float]) -> None:
    routes = {pair: Route(0.0, ((2 * pair[0], per_byte), (2 * pair[1] + 1, 1.0))) for pair, per_byte in pairs.items()}
    rates = fair_rates(routes)
    taken: dict[int, float] = {}
    for pair, route in routes.items():
        for stage, per_byte in route.stages:
            taken[stage] = taken.get(stage, 0.0) + rates[pair] * per_byte
    assert all(part <= 1 + 1e-9 for part in taken.values())
    for pair, route in routes.items():
        full = [stage for stage, _ in route.stages if taken[stage] > 1 - 1e-9]
        others = [max(rates[other] for other in routes if stage in dict(routes[other].stages)) for stage in full]
        assert any(rates[pair] >= most * (1 - 1e-9) for most in others)


@given(
    st.lists(
        st.tuples(st.sampled_from((0.0, 1.0, 1.5, 4.0)), st.integers(0, 4), st.integers(0, 4), st.integers(1, 9)),
        max_size=25,
    )
)
def test_rates_shared_group_by_group_are_those_of_all_connections_bit_identical(
    messages: list[tuple[float, int, int, int]],
) -> None:
    """The readable twin shares all connections again whenever one begins or ends."""
    clock = Clock()
    links = FairLinks(clock.at, lambda *_: None)

    def look(_: Any = None) -> None:
        assert links._rates == fair_rates({pair: links._routes[pair] for pair in links._left})

    def begin(message: tuple[float, int, int, int]) -> None:
        _, sender, receiver, size = message
        route = Route(0.0, ((2 * sender, 1.0), (2 * receiver + 1, 0.75), (100 + sender % 2, 0.3)))
        links.begin(clock.now_s, (sender, receiver), route, size, None, 0)
        look()

    for message in messages:
        clock.at(message[0], begin, message)
    for moment in range(1, 30):
        clock.at(moment / 3, look)
    clock.run()
    assert not links._left and not links._rates


def test_the_messages_of_a_ring_need_no_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two messages of a ring meet on an interface: no shares are computed, and an event costs the same with more workers."""
    solved = list[int]()
    monkeypatch.setattr(
        "workbench.runtimes.simulator.fair_sharing.fair_rates",
        lambda routes: solved.append(len(routes)) or fair_rates(routes),
    )
    ring = [(float(turn), rank, (rank + 1) % 8, 3) for turn in range(4) for rank in range(8)]
    assert arrivals(ring) == pytest.approx([3.0 * (turn + 1) + ALPHA for turn in range(4) for _ in range(8)])
    assert not solved
    arrivals([(0.0, 0, to, 6) for to in (1, 2, 3)])
    assert solved
