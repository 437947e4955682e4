"""Virtual time and the simulated network: an event queue, collectives, and messages between two ranks.

This module does not depend on algorithms or gradients. It passes values on unchanged.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import Any, final

from workbench.costs import AnyNetwork, Route
from workbench.runtimes.simulator.fair_sharing import FairLinks
from workbench.runtimes.simulator.mailboxes import AnySourceQueue, PostedRecv, PostedSend, every, put, take


@final
class Clock:
    """Runs events in order of time; ties in order of posting, so that a run is a pure function of its inputs."""

    __slots__ = ("events", "now_s", "num_events")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0  # posted so far
        self.events: list[tuple[float, int, Callable[[Any], None], Any]] = []

    def at(self, time_s: float, action: Callable[[Any], None], argument: Any = None) -> None:
        """Call `action` with `argument` at this time, which is not in the past."""
        assert time_s >= self.now_s, "an event in the past"
        self.num_events = number = self.num_events + 1
        heappush(self.events, (time_s, number, action, argument))

    def run(self) -> None:
        """Run events until none is left."""
        events, pop = self.events, heappop
        while events:
            self.now_s, _, action, argument = pop(events)
            action(argument)


Box = tuple[int, int, int, int]
"""Which messages and receives match: key (equal for the programs that exchange them), tag, sender, receiver."""

SENDER_LEFT = object()  # in place of a message's value: the rank has left
# Rank, value, what to call at the end with the time of arrival and the error of the collective.
Arrival = tuple[int, Any, Callable[[float, Exception | None], None]]
Combine = Callable[[list[Any]], Exception | None]


@final
class Fabric:
    """The network of a simulated cluster: collectives of all ranks, and messages between two.

    A message is sent when sender and receiver have both asked for it. It passes all stages of its route (`costs.Route`)
    at the same time, as its packets do. Each stage serves messages in the order in which both sides had asked for them.
    The message arrives when its last stage is done. A collective of the library begins when the last rank has joined
    and every stage is idle. It occupies all stages until it ends.

    If the network is `fair`, connections that use a stage at the same time share its rate
    (`runtimes.simulator.fair_sharing`).

    Attributes:
        num_messages: messages so far that both sides have asked for.
        may_lose: ranks may leave.
        gone: rank -> when it left, in order of leaving. Its messages are lost.
    """

    def __init__(self, clock: Clock, network: AnyNetwork, num_workers: int) -> None:
        self.clock, self._network, self._num_workers = clock, network, num_workers
        self.num_messages = self._num_offers = 0
        self._meetings: dict[tuple[str, int], list[tuple[float, Arrival]]] = defaultdict(list)
        self._counts: dict[tuple[str, int], int] = defaultdict(int)  # collectives each rank has joined on each channel
        self._routes: dict[int, Route] = {}  # sender * num_workers + receiver -> route
        self._free_s: dict[int, float] = {}  # stage -> when it is idle; not before `_all_free_s`
        self._all_free_s = self._last_free_s = 0.0
        self._fair = FairLinks(clock.at, self._schedule_arrival) if network.fair else None
        # (priority, number, message) that wait for a stage.
        self._urgent: list[tuple[int, int, tuple[PostedSend, PostedRecv, int]]] = []
        self._again_s = 0.0  # when `_dispatch` runs next; in the past if nothing waits
        self._offers: dict[Box, Any] = {}  # an offer, or a deque of several
        self._asked: dict[Box, Any] = {}  # a receive, or a deque of several
        self._open_tags: set[int] = set()
        self._open: dict[Any, AnySourceQueue] = {}  # (key, tag, receiver) that has asked for any rank's message
        self.may_lose = False
        self.gone: dict[int, float] = {}
        self._num_departures_reported: dict[Any, int] = {}  # (key, tag, receiver) -> departures reported to it
        self._listening: dict[Any, PostedRecv] = {}  # the same -> the last receive that a departure may answer

    # -- collectives -------------------------------------------------------------------------------------------

    def join(self, channel: str, arrival: Arrival, seconds: float, combine: Combine) -> None:
        """Take part in the channel's next collective. It ends `seconds` after the last rank has joined.

        `combine` is called once, at the end, with every rank's value in order of rank. It returns the error of the
        collective if it has one.
        """
        number = self._counts[channel, arrival[0]]
        self._counts[channel, arrival[0]] += 1
        meeting = self._meetings[channel, number]
        meeting.append((self.clock.now_s, arrival))
        if len(meeting) < self._num_workers:
            return
        del self._meetings[channel, number]
        start = self.clock.now_s if self._fair is None else self._fair.drained_s(self.clock.now_s)
        end = max(start, self._last_free_s) + seconds
        self._all_free_s = self._last_free_s = end
        self._free_s.clear()
        self.clock.at(end, self._finish, (sorted(meeting, key=lambda item: item[1][0]), combine))

    def _finish(self, meeting: tuple[list[tuple[float, Arrival]], Combine]) -> None:
        arrivals, combine = meeting
        error = combine([value for _, (_, value, _) in arrivals])
        for came_s, (_, _, then) in arrivals:
            then(came_s, error)

    # -- messages ----------------------------------------------------------------------------------------------

    def send(
        self,
        box: Box,
        num_bytes: int,
        value: Any,
        sent: Callable[[Any], None],
        argument: Any,
        priority: int = 0,
    ) -> None:
        """Offer a message. It leaves when the receiver asks for it.

        Args:
            sent: called with `argument` when the message has arrived.
        """
        key, tag, sender, to = box
        if self.gone and (sender in self.gone or to in self.gone):
            if sender not in self.gone:
                self.clock.at(self.clock.now_s, sent, argument)
            return
        self._num_offers = number = self._num_offers + 1
        offer = (sender, num_bytes, value, sent, argument, number, priority)
        there = self._open.get((key, tag, to)) if tag in self._open_tags else None
        if there is None:
            asked = self._asked.pop(box, None)
            if asked is None:
                put(self._offers, box, offer)
                return
            if asked.__class__ is deque:
                self._asked[box] = asked
                asked = take(self._asked, box)
        else:
            asked = there.ask(sender) if there.asked else None
            if asked is None:
                there.offers.append(offer)
                return
        if priority == 0 and self._fair is None:
            self._transfer(offer, asked, to)
        else:
            self._match(offer, asked, to)

    def receive(self, box: Box, received: Callable[[Any, int, Any], None], argument: Any) -> None:
        """Ask for a message from the box's sender (-1: the oldest from any).

        `received` is called with `argument`, sender and value.
        """
        key, tag, source, to = box
        there = self._open.get((key, tag, to)) if tag in self._open_tags else None
        if there is None and source < 0:
            there = self._opened(key, tag, to)
        if there is not None:
            offer = there.take(source) if there.offers else None
            if offer is None:
                there.asked.append((source, (received, argument)))
                return
        else:
            offer = self._offers.pop(box, None)
            if offer is None:
                put(self._asked, box, (received, argument))
                return
            if offer.__class__ is deque:
                self._offers[box] = offer
                offer = take(self._offers, box)
        if offer[6] == 0 and self._fair is None:
            self._transfer(offer, (received, argument), to)
        else:
            self._match(offer, (received, argument), to)

    def receive_or_departure(self, box: Box, received: Callable[[Any, int, Any], None], argument: Any) -> None:
        """Ask for the oldest message from any rank, or for the departure of a rank.

        In that case the value is `SENDER_LEFT`.
        """
        key, tag, _, to = box
        target, asked = (key, tag, to), (received, argument)
        if self._num_departures_reported.get(target, 0) < len(self.gone):
            self._report_departure(target, asked)
            return
        self._listening[target] = asked
        self.receive((key, tag, -1, to), received, argument)

    def _report_departure(self, target: Any, asked: PostedRecv) -> None:
        """Answer a receive with the first departure that was not yet reported for its key, tag and receiver."""
        number = self._num_departures_reported.get(target, 0)
        self._num_departures_reported[target] = number + 1
        self.clock.at(self.clock.now_s, _answer_departure, (asked, list(self.gone)[number]))

    def leave(self, rank: int) -> None:
        """Withdraw the rank's offers and receives.

        A message to it is lost, but its sender continues as if it had arrived.
        """
        self.gone[rank] = self.clock.now_s
        lost: list[PostedSend] = []
        for box in [box for box in self._offers if rank in box[2:]]:
            lost.extend(every(self._offers.pop(box)))
        for box in [box for box in self._asked if box[3] == rank]:
            del self._asked[box]
        for target, there in self._open.items():
            if target[2] == rank:
                lost.extend(there.offers)
                there.offers, there.asked = deque(), []
            else:
                there.offers = deque(offer for offer in there.offers if offer[0] != rank)
        for offer in lost:
            if offer[0] != rank:
                self.clock.at(self.clock.now_s, offer[3], offer[4])
        for target, asked in list(self._listening.items()):
            if self._withdraw(target, asked):
                self._report_departure(target, asked)

    def _withdraw(self, target: Any, asked: PostedRecv) -> bool:
        """Withdraw a receive from any rank. Return True if no message had been matched to it."""
        there = self._open.get(target)
        for position, (_, other) in enumerate(there.asked if there is not None else ()):
            if other[1] is asked[1]:
                assert there is not None
                del there.asked[position]
                return True
        return False

    def _opened(self, key: Any, tag: int, to: int) -> AnySourceQueue:
        """Keep offers of all ranks in one queue from now on. Those that already wait are first."""
        there, target = AnySourceQueue(), (key, tag, to)
        for box in [box for box in self._offers if (box[0], box[1], box[3]) == target]:
            there.offers.extend(every(self._offers.pop(box)))
        there.offers = deque(sorted(there.offers, key=itemgetter(5)))
        for box in [box for box in self._asked if (box[0], box[1], box[3]) == target]:
            there.asked.extend((box[2], asked) for asked in every(self._asked.pop(box)))
        self._open[target] = there
        self._open_tags.add(tag)
        return there

    def _match(self, offer: PostedSend, asked: PostedRecv, to: int) -> None:
        if self._fair is not None and offer[0] != to:
            self.num_messages += 1
            self._share((offer, asked, to))
        elif offer[6] == 0 or offer[0] == to:
            self._transfer(offer, asked, to)
        else:
            heappush(self._urgent, (offer[6], offer[5], (offer, asked, to)))
            self._dispatch()

    def _route(self, sender: int, to: int) -> Route:
        number = sender * self._num_workers + to
        route = self._routes.get(number)
        if route is None:
            route = self._routes[number] = self._network.route(sender, to)
        return route

    def _transfer(self, offer: PostedSend, asked: PostedRecv, to: int) -> None:
        """Occupy the stages of the route, each after the messages that it serves before. Runs once a message."""
        clock, sender, num_bytes = self.clock, offer[0], offer[1]
        end = clock.now_s
        if sender != to:  # a message to the same rank uses no interface
            route = self._routes.get(sender * self._num_workers + to) or self._route(sender, to)
            free, start = self._free_s, self._all_free_s
            if end > start:
                start = end
            for stage, per_byte in route.stages:
                before = free.get(stage, start)
                after = free[stage] = (before if before > start else start) + num_bytes * per_byte
                if after > end:
                    end = after
            if end > self._last_free_s:
                self._last_free_s = end
            end += route.latency_s
        self.num_messages += 1
        clock.num_events = number = clock.num_events + 1
        heappush(clock.events, (end, number, _arrive, (offer, asked)))

    def _share(self, meeting: tuple[PostedSend, PostedRecv, int]) -> None:
        """Send a message on links that are shared fairly, when no collective occupies them."""
        offer, asked, to = meeting
        if self.clock.now_s < self._all_free_s:
            self.clock.at(self._all_free_s, self._share, meeting)
            return
        assert self._fair is not None
        self._fair.begin(
            self.clock.now_s, (offer[0], to), self._route(offer[0], to), offer[1], (offer, asked), offer[6]
        )

    def _schedule_arrival(self, meeting: tuple[PostedSend, PostedRecv], latency_s: float) -> None:
        self.clock.at(self.clock.now_s + latency_s, _arrive, meeting)

    def _dispatch(self, _: None = None) -> None:
        """Send the waiting messages whose stages are idle, the most urgent first.

        Run again when the next stage is idle.
        """
        waiting, now, again = [], self.clock.now_s, float("inf")
        while self._urgent:
            item = heappop(self._urgent)
            offer, asked, to = item[2]
            stages = [stage for stage, _ in self._route(offer[0], to).stages]
            if max(self._all_free_s, *(self._free_s.get(stage, 0.0) for stage in stages)) <= now:
                self._transfer(offer, asked, to)
            else:
                waiting.append(item)
            again = min(again, max(self._all_free_s, *(self._free_s.get(stage, 0.0) for stage in stages)))
        self._urgent = waiting
        heapify(self._urgent)
        if waiting and not now < self._again_s <= again:
            self._again_s = again
            self.clock.at(again, self._dispatch)


def _answer_departure(news: tuple[PostedRecv, int]) -> None:
    (received, argument), rank = news
    received(argument, rank, SENDER_LEFT)


def _arrive(meeting: tuple[PostedSend, PostedRecv]) -> None:
    offer, asked = meeting
    asked[0](asked[1], offer[0], offer[2])
    offer[3](offer[4])
