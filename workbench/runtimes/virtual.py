"""Virtual time: an event queue, and a network on which simulated workers meet.

Nothing here knows of algorithms or gradients; a value is whatever the meeting's `combine` makes of it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

from workbench.costs import Network


@final
class Clock:
    """Events in order of time; ties in order of posting, so that a run is a pure function of its inputs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._posted = 0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do something at a time that is not past."""
        assert time_s >= self.now_s, "an event in the past"
        self._posted += 1
        heapq.heappush(self._events, (time_s, self._posted, action))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now_s, _, action = heapq.heappop(self._events)
            action()


Arrival = tuple[int, Any, Callable[[float], None]]  # rank, value, what to call at the end with the time of arrival
_Offer = tuple[int, float, Arrival, int]  # bytes, when it was offered, from whom, priority


@final
@dataclass(slots=True)
class _Meeting:
    arrivals: list[tuple[float, Arrival]] = field(default_factory=list)


@final
class Fabric:
    """Where simulated workers meet: collectives of all ranks, and messages between two.

    Each worker has one full-duplex interface. A collective begins when the last rank has come and every interface is
    free, and holds all interfaces until it ends; a message holds its sender's way out and its receiver's way in.
    """

    def __init__(self, clock: Clock, network: Network, num_workers: int) -> None:
        self._clock, self._network, self._num_workers = clock, network, num_workers
        self._meetings: dict[tuple[str, int], _Meeting] = defaultdict(_Meeting)
        self._counts: dict[tuple[str, int], int] = defaultdict(int)  # collectives each rank has joined on each channel
        self._out_free_s = [0.0] * num_workers
        self._in_free_s = [0.0] * num_workers
        self._urgent: list[tuple[int, int, Any]] = []  # transfers with a priority that wait for an interface
        self._num_urgent = 0
        self._sends: dict[tuple[Any, ...], deque[_Offer]] = defaultdict(deque)
        self._receives: dict[tuple[Any, ...], deque[tuple[int, float, Arrival]]] = defaultdict(deque)

    def join(self, channel: str, arrival: Arrival, seconds: float, combine: Callable[[list[Any]], None]) -> None:
        """Take part in the channel's next collective, which lasts `seconds` once all are there.

        `combine` is called once, at the end, with every rank's value in order of rank.
        """
        number = self._counts[channel, arrival[0]]
        self._counts[channel, arrival[0]] += 1
        meeting = self._meetings[channel, number]
        meeting.arrivals.append((self._clock.now_s, arrival))
        if len(meeting.arrivals) < self._num_workers:
            return
        del self._meetings[channel, number]
        end = max(self._clock.now_s, *self._out_free_s, *self._in_free_s) + seconds
        self._out_free_s = [end] * self._num_workers
        self._in_free_s = [end] * self._num_workers
        arrivals = sorted(meeting.arrivals, key=lambda item: item[1][0])

        def finish() -> None:
            combine([value for _, (_, value, _) in arrivals])
            for came_s, (_, _, then) in arrivals:
                then(came_s)

        self._clock.at(end, finish)

    def send(self, key: tuple[Any, ...], to: int, num_bytes: float, arrival: Arrival, priority: int = 0) -> None:
        """Offer a message to rank `to`; `key` names channel and tag. Rendezvous: it leaves when it is asked for.

        Messages take their interfaces in the order in which they met; those with a priority in order of it, when they are free.
        """
        self._sends[(*key, to)].append((int(num_bytes), self._clock.now_s, arrival, priority))
        self._match(key, to)

    def receive(self, key: tuple[Any, ...], source: int, arrival: Arrival) -> None:
        """Ask for a message from rank `source` (-1: from any)."""
        self._receives[(*key, arrival[0])].append((source, self._clock.now_s, arrival))
        self._match(key, arrival[0])

    def _match(self, key: tuple[Any, ...], to: int) -> None:
        """Let the oldest request meet the oldest offer that suits it."""
        offers, requests = self._sends[(*key, to)], self._receives[(*key, to)]
        for request in list(requests):
            source = request[0]
            offer = next((item for item in offers if source < 0 or item[2][0] == source), None)
            if offer is None:
                continue
            offers.remove(offer)
            requests.remove(request)
            if offer[3] == 0 or offer[2][0] == to:
                self._transfer(offer, request, to)
            else:
                self._num_urgent += 1
                heapq.heappush(self._urgent, (offer[3], self._num_urgent, (offer, request, to)))
                self._dispatch()

    def _dispatch(self) -> None:
        """Let the urgent messages go whose interfaces are free, the most urgent first; look again when the next one is."""
        waiting, now, again = [], self._clock.now_s, float("inf")
        while self._urgent:
            item = heapq.heappop(self._urgent)
            offer, request, to = item[2]
            free_s = max(self._out_free_s[offer[2][0]], self._in_free_s[to])
            if free_s <= now:
                self._transfer(offer, request, to)
                again = min(again, self._in_free_s[to])
            else:
                waiting.append(item)
                again = min(again, free_s)
        self._urgent = waiting
        heapq.heapify(self._urgent)
        if waiting:
            self._clock.at(max(again, now), self._dispatch)

    def _transfer(self, offer: _Offer, request: tuple[int, float, Arrival], to: int) -> None:
        num_bytes, offered_s, (sender, value, sent), _ = offer
        _, asked_s, (_, receive_into, received) = request
        end = self._clock.now_s
        if sender != to:  # what a rank sends itself touches no interface
            start = max(end, self._out_free_s[sender], self._in_free_s[to])
            on_wire = num_bytes / self._network.bandwidth_bytes_per_s
            self._out_free_s[sender] = self._in_free_s[to] = start + on_wire
            end = start + self._network.latency_s + on_wire

        def finish() -> None:
            receive_into(sender, value)
            received(asked_s)
            sent(offered_s)

        self._clock.at(end, finish)
