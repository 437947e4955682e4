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


Envelope = tuple[int, int, int, int]
"""What a message and a receive must have in common: key (equal for the programs that exchange them), tag, sender, receiver."""

PostedSend = tuple[int, int, Any, Callable[[Any], None], Any, int, int]
"""A message that can be sent: sender, bytes, value, callback and its argument, number, priority. The callback runs on arrival. Messages
and receives are plain tuples, because a simulation makes a hundred thousand of them in a second."""

PostedRecv = tuple[Callable[[Any, int, Any], None], Any]
"""A receive: callback and its first argument. On arrival it is called with this argument, the sender and the value."""


@final
class AnySourceQueue:
    """Messages and receives of a receiver and tag with receives from any rank, the oldest first."""

    __slots__ = ("messages", "receives")

    def __init__(self) -> None:
        self.messages: deque[PostedSend] = deque()
        self.receives: list[tuple[int, PostedRecv]] = []  # (source, or -1 for any; receive)

    def pop_message(self, source: int) -> PostedSend | None:
        """Remove and return the oldest message of a rank (-1: of any)."""
        if source < 0:
            return self.messages.popleft()
        for position, message in enumerate(self.messages):
            if message[0] == source:
                del self.messages[position]
                return message
        return None

    def pop_receive(self, sender: int) -> PostedRecv | None:
        """Remove and return the oldest receive from this rank, or else the oldest from any rank."""
        if len(self.receives) == 1:  # nearly always
            return self.receives.pop()[1] if self.receives[0][0] in (sender, -1) else None
        for wanted in (sender, -1):
            for position, (source, receive) in enumerate(self.receives):
                if source == wanted:
                    del self.receives[position]
                    return receive
        return None


# Messages, or receives, wait in a dictionary by envelope: a single one itself, or several in a deque.


def push(waiting: dict[Envelope, Any], envelope: Envelope, item: Any) -> None:
    """Add a message or a receive."""
    found = waiting.setdefault(envelope, item)
    if found is item:
        return
    if found.__class__ is deque:
        found.append(item)
    else:
        waiting[envelope] = deque((found, item))


def pop_oldest(waiting: dict[Envelope, Any], envelope: Envelope, items: deque[Any]) -> Any:
    """Return the oldest of several items that were removed together, and put the others back."""
    oldest = items.popleft()
    waiting[envelope] = items if len(items) > 1 else items[0]
    return oldest


def items_of(entry: Any) -> Any:
    """Return all items of an entry."""
    return entry if entry.__class__ is deque else (entry,)


SENDER_LEFT = object()  # in place of a message's value: the rank has left
# Rank, value, what to call at the end with the time of arrival and the error of the collective.
Arrival = tuple[int, Any, Callable[[float, Exception | None], None]]
Combine = Callable[[list[Any]], Exception | None]


@final
class Fabric:
    """The network of a simulated cluster: collectives of all ranks, and messages between two.

    A message is sent when it and its receive are posted. It passes all stages of its route (`costs.Route`)
    at the same time, as its packets do. Each stage serves messages in the order in which both were posted.
    The message arrives when its last stage is done. A collective of the library begins when the last rank has joined
    and every stage is idle. It occupies all stages until it ends.

    If the network is `fair`, connections that use a stage at the same time share its rate
    (`runtimes.simulator.fair_sharing`).

    Attributes:
        num_messages: messages so far that had a receive.
        may_lose: ranks may leave.
        gone: rank -> when it left, in order of leaving. Its messages are lost.
    """

    def __init__(self, clock: Clock, network: AnyNetwork, num_workers: int) -> None:
        self.clock, self._network, self._num_workers = clock, network, num_workers
        self.num_messages = self._num_posted = 0
        self._meetings: dict[tuple[str, int], list[tuple[float, Arrival]]] = defaultdict(list)
        self._counts: dict[tuple[str, int], int] = defaultdict(int)  # collectives each rank has joined on each channel
        self._routes: dict[int, Route] = {}  # sender * num_workers + receiver -> route
        self._free_s: dict[int, float] = {}  # stage -> when it is idle; not before `_all_free_s`
        self._all_free_s = self._last_free_s = 0.0
        self._fair = FairLinks(clock.at, self._schedule_arrival) if network.fair else None
        # (priority, number, message) that wait for a stage.
        self._urgent: list[tuple[int, int, tuple[PostedSend, PostedRecv, int]]] = []
        self._again_s = 0.0  # when `_dispatch` runs next; in the past if nothing waits
        self._messages: dict[Envelope, Any] = {}  # those that wait for a receive
        self._receives: dict[Envelope, Any] = {}  # those that wait for a message
        self._any_source_tags: set[int] = set()
        self._any_source: dict[Any, AnySourceQueue] = {}  # (key, tag, receiver) with receives from any rank
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
        envelope: Envelope,
        num_bytes: int,
        value: Any,
        sent: Callable[[Any], None],
        argument: Any,
        priority: int = 0,
    ) -> None:
        """Post a message. It leaves when its receive is posted, too.

        Args:
            sent: called with `argument` when the message has arrived.
        """
        key, tag, sender, to = envelope
        if self.gone and (sender in self.gone or to in self.gone):
            if sender not in self.gone:
                self.clock.at(self.clock.now_s, sent, argument)
            return
        self._num_posted = number = self._num_posted + 1
        message = (sender, num_bytes, value, sent, argument, number, priority)
        queue = self._any_source.get((key, tag, to)) if tag in self._any_source_tags else None
        if queue is None:
            receive = self._receives.pop(envelope, None)
            if receive is None:
                push(self._messages, envelope, message)
                return
            if receive.__class__ is deque:
                receive = pop_oldest(self._receives, envelope, receive)
        else:
            receive = queue.pop_receive(sender) if queue.receives else None
            if receive is None:
                queue.messages.append(message)
                return
        if priority == 0 and self._fair is None:
            self._transfer(message, receive, to)
        else:
            self._match(message, receive, to)

    def receive(self, envelope: Envelope, received: Callable[[Any, int, Any], None], argument: Any) -> None:
        """Post a receive from the envelope's sender (-1: of the oldest message of any).

        `received` is called with `argument`, sender and value.
        """
        key, tag, source, to = envelope
        queue = self._any_source.get((key, tag, to)) if tag in self._any_source_tags else None
        if queue is None and source < 0:
            queue = self._any_source_queue(key, tag, to)
        if queue is not None:
            message = queue.pop_message(source) if queue.messages else None
            if message is None:
                queue.receives.append((source, (received, argument)))
                return
        else:
            message = self._messages.pop(envelope, None)
            if message is None:
                push(self._receives, envelope, (received, argument))
                return
            if message.__class__ is deque:
                message = pop_oldest(self._messages, envelope, message)
        if message[6] == 0 and self._fair is None:
            self._transfer(message, (received, argument), to)
        else:
            self._match(message, (received, argument), to)

    def receive_or_departure(
        self, envelope: Envelope, received: Callable[[Any, int, Any], None], argument: Any
    ) -> None:
        """Post a receive of the oldest message from any rank, or of the departure of a rank.

        In that case the value is `SENDER_LEFT`.
        """
        key, tag, _, to = envelope
        target, receive = (key, tag, to), (received, argument)
        if self._num_departures_reported.get(target, 0) < len(self.gone):
            self._report_departure(target, receive)
            return
        self._listening[target] = receive
        self.receive((key, tag, -1, to), received, argument)

    def _report_departure(self, target: Any, receive: PostedRecv) -> None:
        """Answer a receive with the first departure that was not yet reported for its key, tag and receiver."""
        number = self._num_departures_reported.get(target, 0)
        self._num_departures_reported[target] = number + 1
        self.clock.at(self.clock.now_s, _answer_departure, (receive, list(self.gone)[number]))

    def leave(self, rank: int) -> None:
        """Withdraw the rank's messages and receives.

        A message to it is lost, but its sender continues as if it had arrived.
        """
        self.gone[rank] = self.clock.now_s
        lost: list[PostedSend] = []
        for envelope in [envelope for envelope in self._messages if rank in envelope[2:]]:
            lost.extend(items_of(self._messages.pop(envelope)))
        for envelope in [envelope for envelope in self._receives if envelope[3] == rank]:
            del self._receives[envelope]
        for target, queue in self._any_source.items():
            if target[2] == rank:
                lost.extend(queue.messages)
                queue.messages, queue.receives = deque(), []
            else:
                queue.messages = deque(message for message in queue.messages if message[0] != rank)
        for message in lost:
            if message[0] != rank:
                self.clock.at(self.clock.now_s, message[3], message[4])
        for target, receive in list(self._listening.items()):
            if self._withdraw(target, receive):
                self._report_departure(target, receive)

    def _withdraw(self, target: Any, receive: PostedRecv) -> bool:
        """Withdraw a receive from any rank. Return True if no message had been matched to it."""
        queue = self._any_source.get(target)
        for position, (_, other) in enumerate(queue.receives if queue is not None else ()):
            if other[1] is receive[1]:
                assert queue is not None
                del queue.receives[position]
                return True
        return False

    def _any_source_queue(self, key: Any, tag: int, to: int) -> AnySourceQueue:
        """Keep messages of all ranks in one queue from now on. Those that already wait are first."""
        queue, target = AnySourceQueue(), (key, tag, to)
        for envelope in [envelope for envelope in self._messages if (envelope[0], envelope[1], envelope[3]) == target]:
            queue.messages.extend(items_of(self._messages.pop(envelope)))
        queue.messages = deque(sorted(queue.messages, key=itemgetter(5)))
        for envelope in [envelope for envelope in self._receives if (envelope[0], envelope[1], envelope[3]) == target]:
            queue.receives.extend((envelope[2], receive) for receive in items_of(self._receives.pop(envelope)))
        self._any_source[target] = queue
        self._any_source_tags.add(tag)
        return queue

    def _match(self, message: PostedSend, receive: PostedRecv, to: int) -> None:
        if self._fair is not None and message[0] != to:
            self.num_messages += 1
            self._share((message, receive, to))
        elif message[6] == 0 or message[0] == to:
            self._transfer(message, receive, to)
        else:
            heappush(self._urgent, (message[6], message[5], (message, receive, to)))
            self._dispatch()

    def _route(self, sender: int, to: int) -> Route:
        number = sender * self._num_workers + to
        route = self._routes.get(number)
        if route is None:
            route = self._routes[number] = self._network.route(sender, to)
        return route

    def _transfer(self, message: PostedSend, receive: PostedRecv, to: int) -> None:
        """Occupy the stages of the route, each after the messages that it serves before. Runs once a message."""
        clock, sender, num_bytes = self.clock, message[0], message[1]
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
        heappush(clock.events, (end, number, _arrive, (message, receive)))

    def _share(self, matched: tuple[PostedSend, PostedRecv, int]) -> None:
        """Send a message on links that are shared fairly, when no collective occupies them."""
        message, receive, to = matched
        if self.clock.now_s < self._all_free_s:
            self.clock.at(self._all_free_s, self._share, matched)
            return
        assert self._fair is not None
        self._fair.begin(
            self.clock.now_s, (message[0], to), self._route(message[0], to), message[1], (message, receive), message[6]
        )

    def _schedule_arrival(self, matched: tuple[PostedSend, PostedRecv], latency_s: float) -> None:
        self.clock.at(self.clock.now_s + latency_s, _arrive, matched)

    def _dispatch(self, _: None = None) -> None:
        """Send the waiting messages whose stages are idle, the most urgent first.

        Run again when the next stage is idle.
        """
        waiting, now, again = [], self.clock.now_s, float("inf")
        while self._urgent:
            item = heappop(self._urgent)
            message, receive, to = item[2]
            stages = [stage for stage, _ in self._route(message[0], to).stages]
            if max(self._all_free_s, *(self._free_s.get(stage, 0.0) for stage in stages)) <= now:
                self._transfer(message, receive, to)
            else:
                waiting.append(item)
            again = min(again, max(self._all_free_s, *(self._free_s.get(stage, 0.0) for stage in stages)))
        self._urgent = waiting
        heapify(self._urgent)
        if waiting and not now < self._again_s <= again:
            self._again_s = again
            self.clock.at(again, self._dispatch)


def _answer_departure(answer: tuple[PostedRecv, int]) -> None:
    (received, argument), rank = answer
    received(argument, rank, SENDER_LEFT)


def _arrive(matched: tuple[PostedSend, PostedRecv]) -> None:
    message, receive = matched
    receive[0](receive[1], message[0], message[2])
    message[3](message[4])
