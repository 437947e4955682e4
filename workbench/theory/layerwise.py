"""Layer-wise SGD as recurrences: when each bucket is ready, on the wire, complete and applied.

Buckets are in the order in which backward finishes them (last layer first), as everywhere in this package. One
all-reduce runs at a time, first come, first served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, final

from workbench.errors import ConfigError

Order = Literal["all", "backward", "any"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Seconds of each bucket since the step's begin, in the order of backward.

    Attributes:
        ready_s: when its gradients are final.
        begin_s, end_s: begin and end of its all-reduce.
        applied_s: end of its update, or of the one update of all buckets.
        step_s: length of the step.
    """

    ready_s: tuple[float, ...]
    begin_s: tuple[float, ...]
    end_s: tuple[float, ...]
    applied_s: tuple[float, ...]
    step_s: float


def lane(ready_s: Sequence[float], communication_s: Sequence[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return begin and end of each all-reduce on one first-in-first-out lane: s_l = max(r_l, e_(l+1)), e_l = s_l + c_l.

    >>> lane([1.0, 2.0, 3.0], [2.5, 0.5, 1.0])
    ((1.0, 3.5, 4.0), (3.5, 4.0, 5.0))
    """
    begin, end, free_s = [], [], 0.0
    for ready, seconds in zip(ready_s, communication_s, strict=True):
        begin.append(max(ready, free_s))
        free_s = begin[-1] + seconds
        end.append(free_s)
    return tuple(begin), tuple(end)


def apply_times(
    arrived_s: Sequence[float], from_s: float, update_s: Sequence[float], order: Order
) -> tuple[float, ...]:
    """Return when each bucket's update ends. It can begin at `from_s` (backward's end), and when its sum has arrived.

    | `order` | the paper's | rule |
    |---|---|---|
    | "all" | B1 | wait for every bucket, then update all |
    | "backward" | B2, layer-wise | in the order of backward: a_l = max(e_l, a_(l+1), t_f + t_b) + u_l |
    | "any" | B3, task-wise | in the order of arrival; if several have arrived, in the order of backward |

    Recurrences derived here. On one first-in-first-out lane buckets arrive in the order of backward and B3 is B2.

    Paper: daily2016leveraging, section 4.2 (the three policies).

    >>> [max(apply_times([5.0, 1.0], 2.0, [1.0, 1.0], order)) for order in ("all", "backward", "any")]
    [7.0, 7.0, 6.0]

    Raises:
        ConfigError: the order is none of these.
    """
    if order == "all":
        return (max(*arrived_s, from_s) + sum(update_s),) * len(arrived_s)
    if order not in ("backward", "any"):
        raise ConfigError(f'order={order!r}: choose one of "all", "backward", "any"')
    waiting, now, done = list(range(len(arrived_s))), from_s, [0.0] * len(arrived_s)
    while waiting:
        there = [bucket for bucket in waiting if arrived_s[bucket] <= now]
        if order == "backward":
            bucket = waiting[0]
        else:
            bucket = there[0] if there else min(waiting, key=lambda item: arrived_s[item])
        waiting.remove(bucket)
        now = done[bucket] = max(now, arrived_s[bucket]) + update_s[bucket]
    return tuple(done)


def layerwise(
    forward_s: float,
    backward_s: Sequence[float],
    communication_s: Sequence[float],
    update_s: Sequence[float],
    order: Order = "all",
) -> Schedule:
    """Return one step of layer-wise SGD: each bucket's all-reduce begins when the bucket is ready and the lane is free.

    r_l = t_f + sum of b_j up to l;  then `lane`;  then `apply_times`.

    Communication hides under the rest of backward and, with "backward" and "any", under updates, but never under
    forward. Compared with one all-reduce after backward, it saves at most t_b - b_L and costs L - 1 more starts.

    Args:
        forward_s: t_f.
        backward_s: b_l of each bucket, in the order of backward.
        communication_s: c_l of its all-reduce.
        update_s: u_l of its update.
        order: the order of the updates.

    Derived here. Paper: daily2016leveraging, section 4.2 (the algorithm).

    >>> step = layerwise(1.0, [1.0, 1.0], [1.5, 0.5], [0.1, 0.1])
    >>> step.ready_s, step.end_s, round(step.step_s, 9)  # 1 s + 2 s + 2 s + 0.2 s without overlap
    ((2.0, 3.0), (3.5, 4.0), 4.2)

    Raises:
        ConfigError: the numbers of buckets differ, or there are none.
    """
    if not len(backward_s) == len(communication_s) == len(update_s) or not backward_s:
        raise ConfigError(
            f"{len(backward_s)} backward_s, {len(communication_s)} communication_s, {len(update_s)} update_s: give one "
            "of each for each bucket"
        )
    ready = tuple(accumulate(backward_s, initial=forward_s))[1:]
    begin, end = lane(ready, communication_s)
    applied = apply_times(end, ready[-1], update_s, order)
    return Schedule(ready_s=ready, begin_s=begin, end_s=end, applied_s=applied, step_s=max(applied))


def dear_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    scatter_s: Sequence[float],
    gather_s: Sequence[float],
    update_s: Sequence[float],
) -> float:
    """Return a step of DeAR in the long run: buckets are gathered during forward, and scattered during backward.

    When all are scattered, the gathers run in the order of forward (the reverse of backward's). Forward of a bucket
    begins when the bucket has arrived and is applied, and the layers before it are done. Backward follows, with the
    scatters on one lane as in `layerwise`.

    Args:
        forward_s, backward_s: of each bucket, in the order of backward.
        scatter_s, gather_s: of its reduce-scatter and of its all-gather.
        update_s: of its update.

    Derived here. Paper: zhang2023dear (the algorithm).

    >>> dear_s([1.0, 1.0], [1.0, 1.0], [0.5, 0.5], [0.5, 0.5], [0.0, 0.0])  # only the first gather and the last scatter are exposed
    5.0
    """
    now = gathered_s = 0.0
    for bucket in reversed(range(len(forward_s))):
        gathered_s += gather_s[bucket]
        now = max(now, gathered_s) + update_s[bucket] + forward_s[bucket]
    ready = tuple(accumulate(backward_s, initial=now))[1:]
    return lane(ready, scatter_s)[1][-1]
