"""Links that connections share fairly, as with TCP (`Network.fair`). Other links serve messages in order of arrival."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, final

from workbench.costs import Route

Connection = tuple[int, int]  # sender, receiver
Waiting = tuple[int, int, float, Any]  # priority, number in order of meeting, bytes, argument of `done`
MIN_BYTES = 1e-3  # a smaller remainder is a rounding error: the message has left


def fair_rates(routes: dict[Connection, Route]) -> dict[Connection, float]:
    """Return the max-min fair bytes a second of each connection: a rate can rise only if a lower or equal one falls.

    All rates rise together until a stage is full. Rates on that stage stay; the others continue to rise.

    >>> from workbench.costs import Network
    >>> net = Network(latency_s=0.0, bandwidth_bytes_per_s=8.0)
    >>> fair_rates({pair: net.route(*pair) for pair in ((0, 1), (0, 2), (0, 3), (0, 4), (5, 4))})
    {(0, 1): 2.0, (0, 2): 2.0, (0, 3): 2.0, (0, 4): 2.0, (5, 4): 6.0}
    """
    left: dict[int, float] = {}  # stage -> its free share
    on: dict[int, dict[Connection, float]] = {}  # stage -> connections whose rates still rise -> seconds a byte
    for pair, route in routes.items():
        for stage, per_byte in route.stages:
            if per_byte > 0:
                left[stage] = 1.0
                on.setdefault(stage, {})[pair] = per_byte
    rates: dict[Connection, float] = {}
    while on:
        level, full = min((left[stage] / sum(pairs.values()), stage) for stage, pairs in on.items())
        for pair in list(on[full]):
            rates[pair] = level
            for stage, per_byte in routes[pair].stages:
                if stage in on and on[stage].pop(pair, None) is not None:
                    left[stage] = max(0.0, left[stage] - level * per_byte)
                    if not on[stage]:
                        del on[stage]
    return {pair: rates[pair] for pair in routes}


@final
class FairLinks:
    """Messages on links that are shared fairly.

    On one connection they leave one after the other, the most urgent first.

    Args:
        at: posts an action at a time.
        done: called with a message's argument and its route's latency when its last byte has left.
    """

    def __init__(
        self, at: Callable[[float, Callable[[Any], None], Any], None], done: Callable[[Any, float], None]
    ) -> None:
        self._at, self._done = at, done
        self._now_s = 0.0
        self._left: dict[Connection, float] = {}  # bytes of its present message that have not left
        self._messages: dict[Connection, Any] = {}
        self._routes: dict[Connection, Route] = {}
        self._rates: dict[Connection, float] = {}
        # stage -> its active connections, each with its place in `_left`.
        self._on: dict[int, dict[Connection, int]] = {}
        self._place: dict[Connection, int] = {}  # place of each active connection in `_left`
        self._waiting: dict[Connection, list[Waiting]] = {}
        # Messages so far; messages begun; number of the valid `_finish_next`.
        self._num_met = self._num_begun = self._number = 0

    def begin(
        self, now_s: float, pair: Connection, route: Route, num_bytes: float, message: Any, priority: int
    ) -> None:
        """Begin a message that both sides have asked for."""
        if not any(per_byte > 0 for _, per_byte in route.stages):
            self._done(message, route.latency_s)
            return
        self._continue(now_s - self._now_s)
        self._now_s = now_s
        self._num_met += 1
        self._routes[pair] = route
        heapq.heappush(self._waiting.setdefault(pair, []), (priority, self._num_met, float(num_bytes), message))
        self._update_rates()

    def drained_s(self, now_s: float) -> float:
        """Return the time at which all present messages have left, if no message follows."""
        other = FairLinks(lambda *_: None, lambda *_: None)
        other._now_s, other._num_met = self._now_s, self._num_met
        other._left, other._messages, other._routes, other._rates = (
            dict(self._left),
            dict(self._messages),
            dict(self._routes),
            dict(self._rates),
        )
        other._on = {stage: dict(pairs) for stage, pairs in self._on.items()}
        other._place, other._num_begun = dict(self._place), self._num_begun
        other._waiting = {pair: list(line) for pair, line in self._waiting.items()}
        other._update_rates()
        while other._left:
            other._continue(other._soonest_s())
            other._update_rates()
        return max(now_s, other._now_s)

    def _continue(self, seconds: float) -> None:
        for pair in self._left:
            self._left[pair] -= self._rates[pair] * seconds
        self._now_s += seconds

    def _update_rates(self) -> None:
        """End messages that have left, begin the next ones, and share the links again."""
        changed: set[int] = set()  # stages
        through = [pair for pair, left in self._left.items() if left <= MIN_BYTES]
        for pair in through:
            del self._left[pair]
            self._leave(pair, changed)
            self._done(self._messages.pop(pair), self._routes[pair].latency_s)
        for pair in list(self._waiting):
            while pair not in self._left and self._waiting[pair]:
                _, _, num_bytes, message = heapq.heappop(self._waiting[pair])
                if num_bytes <= MIN_BYTES:
                    self._done(message, self._routes[pair].latency_s)
                else:
                    self._left[pair], self._messages[pair] = num_bytes, message
                    self._enter(pair, changed)
            if not self._waiting[pair]:
                del self._waiting[pair]
        self._share(changed)
        self._number += 1
        if self._left:
            self._at(self._now_s + self._soonest_s(), self._finish_next, self._number)

    def _enter(self, pair: Connection, changed: set[int]) -> None:
        self._num_begun += 1
        self._place[pair] = self._num_begun
        for stage, per_byte in self._routes[pair].stages:
            if per_byte > 0:
                self._on.setdefault(stage, {})[pair] = self._num_begun
                changed.add(stage)

    def _leave(self, pair: Connection, changed: set[int]) -> None:
        del self._place[pair], self._rates[pair]
        for stage, per_byte in self._routes[pair].stages:
            if per_byte > 0:
                self._on[stage].pop(pair, None)
                changed.add(stage)

    def _share(self, changed: set[int]) -> None:
        """Share again among the connections that a changed stage connects, directly or through others.

        No other rate can change. In a ring no two messages share a stage, so this takes the same time for any number of
        workers. The numbers are bit-identical to `fair_rates` of all connections, because a group's connections are in
        the same order.
        """
        todo = changed
        while todo:
            group: dict[Connection, int] = {}
            stages = [todo.pop()]
            while stages:
                for pair, place in self._on[stages.pop()].items():
                    if pair in group:
                        continue
                    group[pair] = place
                    for stage, per_byte in self._routes[pair].stages:
                        if per_byte > 0 and stage not in stages:
                            stages.append(stage)
                            todo.discard(stage)
            if len(group) == 1:
                (pair,) = group
                self._rates[pair] = min(1.0 / per_byte for _, per_byte in self._routes[pair].stages if per_byte > 0)
            elif group:
                self._rates.update(
                    fair_rates({pair: self._routes[pair] for pair in sorted(group, key=group.__getitem__)})
                )

    def _soonest_s(self) -> float:
        """Return the seconds until the next message has left."""
        return max(0.0, min(left / self._rates[pair] for pair, left in self._left.items()))

    def _finish_next(self, number: int) -> None:
        """End the next message, unless another message began or ended after this was posted."""
        if number == self._number:
            # Seconds, not the clock's time: adding a very short time may not change it.
            self._continue(self._soonest_s())
            self._update_rates()
