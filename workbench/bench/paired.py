"""Measurements in pairs: every way once a round, in an order that turns from round to round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

Step = Callable[[], object]


def alternate(
    steps: Mapping[str, Step],
    rounds: int,
    *,
    block: int | Mapping[str, int] = 1,
    warm: int = 2,
    lead: int = 0,
    meet: Callable[[], object] = lambda: None,
    settle: Callable[[], object] = lambda: None,
    slowest: Callable[[float], float] = float,
) -> dict[str, list[float]]:
    """Seconds of a step of each way, one number a round.

    Whatever drifts in the machine (its clock, its neighbours) touches all ways of a round alike, and no way always comes behind the
    same one.

    Args:
        steps: way -> one step of it.
        block: how many steps in a row are timed together; of each way, if they differ.
        warm: rounds before the first that counts.
        lead: steps before each block that do not count: of a method that has something under way from step to step, the block then
            begins and ends with as much of it.
        meet: called before each block, for ranks to begin together.
        settle: called after each block, behind its time: to wait for what a method has under way, which would be on the next one's wire.
        slowest: of this rank's seconds makes those of the slowest rank.
    """
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            step, times_in_a_row = steps[name], block if isinstance(block, int) else block[name]
            meet()
            for _ in range(lead):
                step()
            begin = time.perf_counter()
            for _ in range(times_in_a_row):
                step()
            took = (time.perf_counter() - begin) / times_in_a_row
            settle()
            took = slowest(took)
            if number >= 0:
                times[name].append(took)
    return times
