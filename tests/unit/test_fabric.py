"""The simulated network: which messages and receives match, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.costs import Network
from workbench.runtimes.simulator.fabric import Clock, Fabric

ANY = -1
NETWORK = Network(latency_s=0.0, bandwidth_bytes_per_s=1.0)


def fabric() -> tuple[Fabric, list[Any]]:
    """A network of four, and what has arrived: (sender, value)."""
    return Fabric(Clock(), NETWORK, 4), []


@pytest.mark.parametrize("source", [1, ANY])
@pytest.mark.parametrize("asked_first", [False, True])
def test_messages_of_one_sender_arrive_in_the_order_in_which_they_were_sent(source: int, asked_first: bool) -> None:
    net, arrived = fabric()

    def ask() -> None:
        for number in range(3):
            net.receive((0, 0, source, 0), lambda number, sender, value: arrived.append((number, value)), number)

    if asked_first:
        ask()
    for value in "abc":
        net.send((0, 0, 1, 0), 1, value, lambda _: None, None)
    if not asked_first:
        ask()
    net.clock.run()
    assert arrived == [(0, "a"), (1, "b"), (2, "c")]


def test_who_asks_anybody_hears_whoever_was_first() -> None:
    """Also where some of a sender's messages were asked for by name, and others came later."""
    net, arrived = fabric()

    def send(sender: int, value: str) -> None:
        net.send((0, 0, sender, 0), 1, value, lambda _: None, None)

    def hear(source: int = ANY) -> None:
        net.receive((0, 0, source, 0), lambda _, sender, value: arrived.append((sender, value)), None)

    for sender, value in ((3, "a"), (1, "b"), (2, "c"), (1, "d")):
        send(sender, value)
    hear()
    hear(source=1)
    send(3, "e")
    for _ in range(3):
        hear()
    net.clock.run()
    assert arrived == [(3, "a"), (1, "b"), (2, "c"), (1, "d"), (3, "e")]


def test_an_offer_goes_to_who_asked_for_its_sender_before_who_asked_anybody() -> None:
    """Whether it was asked for before anybody's was, or after."""
    net, arrived = fabric()

    def hear(name: str, source: int) -> None:
        net.receive((0, 0, source, 0), lambda _, sender, value: arrived.append((name, sender, value)), None)

    hear("by name", 2)
    hear("anybody", ANY)
    hear("by name later", 2)
    hear("nobody's", 1)
    for sender, value in ((2, "a"), (2, "b"), (3, "c"), (3, "d")):
        net.send((0, 0, sender, 0), 1, value, lambda _: None, None)
    hear("anybody", ANY)
    net.clock.run()
    assert arrived == [("by name", 2, "a"), ("by name later", 2, "b"), ("anybody", 3, "c"), ("anybody", 3, "d")]


def test_a_collective_of_the_library_and_messages_wait_for_each_other() -> None:
    """4 s for a message; then 5 s for the collective, asked for at 1 s; then 3 s for a message that was asked for at 2 s."""
    net, ended = fabric()

    def message(num_bytes: int) -> None:
        net.receive((0, 0, 1, 0), lambda *_: ended.append(net.clock.now_s), None)
        net.send((0, 0, 1, 0), num_bytes, None, lambda _: None, None)

    def collective(_: None) -> None:
        for rank in range(4):
            net.join(
                "lane 0", (rank, None, lambda came_s, error: ended.append(net.clock.now_s)), 5.0, lambda values: None
            )

    message(4)
    net.clock.at(1.0, collective)
    net.clock.at(2.0, lambda _: message(3))
    net.clock.run()
    assert ended == [4.0, 9.0, 9.0, 9.0, 9.0, 12.0]


def test_of_messages_that_wait_for_a_link_the_most_urgent_goes_first() -> None:
    """The lowest number of a priority that is not 0; the first has left before the others are there."""
    net, arrived = fabric()
    for tag, priority in enumerate((3, 2, 3, 1)):
        net.receive((0, tag, 1, 0), lambda tag, *_: arrived.append((tag, net.clock.now_s)), tag)
        net.send((0, tag, 1, 0), 2, None, lambda _: None, None, priority)
    net.clock.run()
    assert arrived == [(0, 2.0), (3, 4.0), (1, 6.0), (2, 8.0)]


def test_a_message_with_a_priority_does_not_queue_for_the_receivers_side() -> None:
    """Rank 1's waits until rank 0 is done with rank 2's; meanwhile rank 3 has a more urgent one."""
    net, arrived = fabric()

    def message(what: tuple[int, int, int]) -> None:
        sender, num_bytes, priority = what
        net.receive((0, 0, sender, 0), lambda _, sender, value: arrived.append((sender, net.clock.now_s)), None)
        net.send((0, 0, sender, 0), num_bytes, None, lambda _: None, None, priority)

    message((2, 4, 0))
    message((1, 2, 3))
    net.clock.at(1.0, message, (3, 2, 1))
    net.clock.run()
    assert arrived == [(2, 4.0), (3, 6.0), (1, 8.0)]
