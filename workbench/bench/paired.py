"""Paired measurements: each alternative (way) once per round, in an order that rotates from round to round."""

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
    """Return seconds of a step of each way, one number for each round.

    A drift of the machine (clock rate, other load) affects all ways of a round, and no way always follows the same
    other way.

    Args:
        steps: way -> one step of it.
        block: number of consecutive steps that are timed together; a mapping if the ways differ.
        warm: number of warm-up rounds, which are not counted.
        lead: steps before each block, which are not counted. If an algorithm has work in flight from step to step, the
            block then begins and ends with the same amount of work in flight.
        meet: called before each block, so that ranks begin together.
        settle: called after each block, outside of the measured time. It waits for work in flight, which would
            otherwise use the network during the next block.
        slowest: converts this rank's seconds to those of the slowest rank.
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
