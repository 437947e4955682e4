"""Virtual time: an event queue, and a network on which simulated workers meet.

Nothing here knows of algorithms or gradients; a value is whatever the receiver makes of it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from operator import itemgetter
from typing import Any, final

from workbench.costs import AnyNetwork, Route
from workbench.runtimes.fair import FairLinks


@final
class Clock:
    """Events in order of time; ties in order of posting, so that a run is a pure function of its inputs."""

    __slots__ = ("_events", "now_s", "num_events")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0  # posted so far
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []

    def at(self, time_s: float, action: Callable[[Any], None], argument: Any = None) -> None:
        """Do something at a time that is not past."""
        assert time_s >= self.now_s, "an event in the past"
        self.num_events += 1
        heapq.heappush(self._events, (time_s, self.num_events, action, argument))

    def run(self) -> None:
        """Until nothing is left to happen."""
        events, pop = self._events, heapq.heappop
        while events:
            self.now_s, _, action, argument = pop(events)
            action(argument)


Offer = tuple[int, int, Any, Callable[[Any], None], Any, int, int]
"""A message that can be sent: sender, bytes, value, what to call with which argument when it has arrived, number, priority. A plain tuple,
as `Asked` is: they are made a hundred thousand times a second."""

Asked = tuple[Callable[[Any, int, Any], None], Any]
"""A receive: what to call with which argument, and the sender and the value, when its message has arrived."""

Arrival = tuple[int, Any, Callable[[float], None]]  # rank, value, what to call at the end with the time of arrival


@final
class Fabric:
    """Where simulated workers meet: collectives of all ranks, and messages between two.

    A message leaves when both sides have asked for it. It passes the stages of its route (`costs.Route`) side by side, as
    packets do: each stage works off its messages in the order in which they met, and the message is there when the last
    stage is done with it. A collective of the library begins when the last rank has come and every stage is idle, and holds all
    of them until it ends.

    Where the network is `fair`, connections that are on a stage at once share its rate instead (`runtimes.fair`).
    """

    def __init__(self, clock: Clock, network: AnyNetwork, num_workers: int) -> None:
        self.clock, self._network, self._num_workers = clock, network, num_workers
        self.num_messages = self._num_offers = 0
        self._meetings: dict[tuple[str, int], list[tuple[float, Arrival]]] = defaultdict(list)
        self._counts: dict[tuple[str, int], int] = defaultdict(int)  # collectives each rank has joined on each channel
        self._routes: dict[int, Route] = {}  # sender * num_workers + receiver -> how
        self._free_s: dict[int, float] = {}  # stage -> when it is done with what it has; not before `_all_free_s`
        self._all_free_s = self._last_free_s = 0.0
        self._fair = FairLinks(clock.at, self._let_go) if network.fair else None
        self._urgent: list[tuple[int, int, tuple[Offer, Asked, int]]] = []  # messages with a priority that wait for a stage
        self._again_s = 0.0  # when they are looked at next; past where nothing waits
        self._offers: dict[Any, Any] = {}  # (key, tag, sender, receiver) -> box of offers
        self._asked: dict[Any, Any] = {}  # the same -> box of receives
        self._asked_any: dict[Any, Any] = {}  # (key, tag, receiver) -> box of receives
        self._by_time: dict[Any, deque[tuple[int, int]]] = {}  # the same -> (sender, number) of offers, where anybody's may be asked for

    # -- collectives -------------------------------------------------------------------------------------------

    def join(self, channel: str, arrival: Arrival, seconds: float, combine: Callable[[list[Any]], None]) -> None:
        """Take part in the channel's next collective, which lasts `seconds` once all are there.

        `combine` is called once, at the end, with every rank's value in order of rank.
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

    def _finish(self, meeting: tuple[list[tuple[float, Arrival]], Callable[[list[Any]], None]]) -> None:
        arrivals, combine = meeting
        combine([value for _, (_, value, _) in arrivals])
        for came_s, (_, _, then) in arrivals:
            then(came_s)

    # -- messages ----------------------------------------------------------------------------------------------

    def send(
        self,
        key: Any,
        tag: int,
        to: int,
        sender: int,
        num_bytes: int,
        value: Any,
        sent: Callable[[Any], None],
        argument: Any,
        priority: int = 0,
    ) -> None:
        """Offer a message to rank `to`; `key` names whose messages they are. Rendezvous: it leaves when it is asked for."""
        self._num_offers += 1
        offer = (sender, num_bytes, value, sent, argument, self._num_offers, priority)
        box = (key, tag, sender, to)
        asked = _take(self._asked, box)
        if asked is None and self._asked_any:
            asked = _take(self._asked_any, (key, tag, to))
        if asked is not None:
            self._meet(offer, asked, to)
            return
        _put(self._offers, box, offer)
        if self._by_time and (key, tag, to) in self._by_time:
            self._by_time[key, tag, to].append((sender, self._num_offers))

    def receive(self, key: Any, tag: int, source: int, to: int, received: Callable[[Any, int, Any], None], argument: Any) -> None:
        """Ask for a message from rank `source` (-1: the oldest from any)."""
        if source < 0:
            source = self._oldest(key, tag, to)
            if source < 0:
                _put(self._asked_any, (key, tag, to), (received, argument))
                return
        box = (key, tag, source, to)
        offer = _take(self._offers, box)
        if offer is None:
            _put(self._asked, box, (received, argument))
        else:
            self._meet(offer, (received, argument), to)

    def _oldest(self, key: Any, tag: int, to: int) -> int:
        """Who made the oldest offer of these; -1 for nobody."""
        target = (key, tag, to)
        known = self._by_time.get(target)
        if known is None:
            boxes = [_all(self._offers[box]) for box in self._offers if box[0] == key and box[1] == tag and box[3] == to]
            known = self._by_time[target] = deque(sorted(((offer[0], offer[5]) for box in boxes for offer in box), key=itemgetter(1)))
        while known:
            sender, number = known.popleft()
            offers = self._offers.get((key, tag, sender, to))
            if offers is not None and _all(offers)[0][5] == number:
                return sender
        return -1

    def _meet(self, offer: Offer, asked: Asked, to: int) -> None:
        if self._fair is not None and offer[0] != to:
            self.num_messages += 1
            self._share((offer, asked, to))
        elif offer[6] == 0 or offer[0] == to:
            self._transfer(offer, asked, to)
        else:
            heapq.heappush(self._urgent, (offer[6], offer[5], (offer, asked, to)))
            self._dispatch()

    def _route(self, sender: int, to: int) -> Route:
        number = sender * self._num_workers + to
        route = self._routes.get(number)
        if route is None:
            route = self._routes[number] = self._network.route(sender, to)
        return route

    def _transfer(self, offer: Offer, asked: Asked, to: int) -> None:
        now = end = self.clock.now_s
        sender, num_bytes = offer[0], offer[1]
        if sender != to:  # what a rank sends itself touches no interface
            route = self._routes.get(sender * self._num_workers + to) or self._route(sender, to)
            free, start = self._free_s, max(now, self._all_free_s)
            for stage, per_byte in route.stages:
                before = free.get(stage, start)
                after = free[stage] = (before if before > start else start) + num_bytes * per_byte
                if after > end:
                    end = after
            if end > self._last_free_s:
                self._last_free_s = end
            end += route.latency_s
        self.num_messages += 1
        self.clock.at(end, _arrive, (offer, asked))

    def _share(self, meeting: tuple[Offer, Asked, int]) -> None:
        """Send a message on links that are shared fairly, when no collective holds them."""
        offer, asked, to = meeting
        if self.clock.now_s < self._all_free_s:
            self.clock.at(self._all_free_s, self._share, meeting)
            return
        assert self._fair is not None
        self._fair.begin(self.clock.now_s, (offer[0], to), self._route(offer[0], to), offer[1], (offer, asked), offer[6])

    def _let_go(self, meeting: tuple[Offer, Asked], latency_s: float) -> None:
        self.clock.at(self.clock.now_s + latency_s, _arrive, meeting)

    def _dispatch(self, _: None = None) -> None:
        """Let the urgent messages go whose stages are idle, the most urgent first; look again when the next one is."""
        waiting, now, again = [], self.clock.now_s, float("inf")
        while self._urgent:
            item = heapq.heappop(self._urgent)
            offer, asked, to = item[2]
            stages = [stage for stage, _ in self._route(offer[0], to).stages]
            if max(self._all_free_s, *(self._free_s.get(stage, 0.0) for stage in stages)) <= now:
                self._transfer(offer, asked, to)
            else:
                waiting.append(item)
            again = min(again, max(self._all_free_s, *(self._free_s.get(stage, 0.0) for stage in stages)))
        self._urgent = waiting
        heapq.heapify(self._urgent)
        if waiting and not now < self._again_s <= again:
            self._again_s = again
            self.clock.at(again, self._dispatch)


def _arrive(meeting: tuple[Offer, Asked]) -> None:
    offer, asked = meeting
    asked[0](asked[1], offer[0], offer[2])
    offer[3](offer[4])


# A box of waiting offers or receives: the one that there is, nearly always, or a queue of them.


def _put(boxes: dict[Any, Any], box: Any, item: Any) -> None:
    there = boxes.get(box)
    if there is None:
        boxes[box] = item
    elif there.__class__ is deque:
        there.append(item)
    else:
        boxes[box] = deque((there, item))


def _take(boxes: dict[Any, Any], box: Any) -> Any:
    """The oldest; None where there is none."""
    there = boxes.pop(box, None)
    if there.__class__ is deque:
        first = there.popleft()
        boxes[box] = there if len(there) > 1 else there[0]
        return first
    return there


def _all(box: Any) -> Any:
    return box if box.__class__ is deque else (box,)
