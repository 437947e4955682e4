"""Seconds of a step of each method, from seconds of compute and of communication, where nothing is left to chance.

c is all compute of a step (forward, backward, update: t_f + t_b + t_u), m all communication; T steps take T times as long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from workbench.errors import ConfigError


def synchronous_s(compute_s: float, communication_s: float) -> float:
    """D-Sync: c + m, nothing overlaps. As recalled from li2018pipesgd: T (l_up + l_comp + l_comm).

    >>> synchronous_s(3.0, 2.0)
    5.0
    """
    _check(compute_s, communication_s)
    return compute_s + communication_s


def pipe_s(compute_s: float, communication_s: float, width: int = 2) -> float:
    """Pipe-SGD where a worker has one processor and one interface: max(c, m) from width 2 on, c + m with width 1.

    As recalled from li2018pipesgd: T max(l_up + l_comp, l_comm). A width of more than 2 makes no step shorter, only gradients later.

    >>> pipe_s(3.0, 2.0), pipe_s(3.0, 4.0, width=4), pipe_s(3.0, 2.0, width=1)
    (3.0, 4.0, 5.0)
    """
    _check(compute_s, communication_s)
    _check_whole("width", width)
    return compute_s + communication_s if width == 1 else max(compute_s, communication_s)


def pipe_unlimited_s(compute_s: float, communication_s: float, width: int) -> float:
    """Pipe-SGD with as many processors and interfaces as steps in flight: (c + m) / K. As recalled from li2018pipesgd.

    >>> pipe_unlimited_s(3.0, 2.0, width=2)
    2.5
    """
    _check(compute_s, communication_s)
    _check_whole("width", width)
    return (compute_s + communication_s) / width


def pipe_speedup(compute_s: float, communication_s: float) -> float:
    """Of Pipe-SGD over D-Sync: (c + m) / max(c, m), at most 2. What is above 2 in a measurement is not overlap. Derived here.

    >>> pipe_speedup(3.0, 3.0), pipe_speedup(3.0, 1.0) < 2
    (2.0, True)
    """
    longer = pipe_s(compute_s, communication_s)
    return synchronous_s(compute_s, communication_s) / longer if longer else 1.0


def per_layer_pipe_s(compute_s: float, communication_s: Sequence[float]) -> float:
    """Pipe-SGD whose gradient goes in L all-reduces, one after the other: max(c, sum of theirs).

    As recalled from li2018pipesgd, with a ring: max(l_up + l_comp, 2 L (p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma + L S).
    Bound by communication, it is 2 (L-1) (p-1) alpha slower than one all-reduce of the whole, and otherwise equal: so in Pipe-SGD
    one all-reduce is preferred, while D-Sync gains by layers (`layerwise`).

    >>> per_layer_pipe_s(3.0, [1.0, 1.0, 2.0])
    4.0
    """
    return pipe_s(compute_s, math.fsum(communication_s))


def parameter_server_step_s(compute_s: float, update_s: float, communication_s: float) -> float:
    """PS-Sync: workers compute (c without the update), servers gather, update and scatter, nothing overlaps. Derived here.

    `communication_s` is `collectives.parameter_server_s`; the update of M servers is M times as short.
    """
    _check(compute_s, communication_s)
    return compute_s + update_s + communication_s


def delayed_s(compute_s: float, communication_s: float, wire_s: float, delay: int) -> float:
    """AGD(d) with d all-reduces side by side: max(c, t_bw, t_c / d).

    t_bw, the part of t_c that is bandwidth, is shared by those side by side: threads hide latency, not bytes. d = 0 is c + t_c.
    Derived here; the paper has no timing model.

    >>> [delayed_s(1.0, 2.4, 0.9, delay) for delay in (0, 1, 2, 3, 9)]
    [3.4, 2.4, 1.2, 1.0, 1.0]

    Paper: daily2016leveraging, section 4.3 (the method).
    """
    _check(compute_s, communication_s)
    if not isinstance(delay, int) or delay < 0:
        raise ConfigError(f"delay={delay}: a whole number of steps, 0 or more")
    return max(compute_s, wire_s, communication_s / delay) if delay else compute_s + communication_s


def smallest_useful_delay(compute_s: float, communication_s: float, wire_s: float) -> int:
    """d*: the smallest delay of the shortest step, ceil(t_c / max(c, t_bw)), at least 1; 0 where there is nothing to hide.

    Where bandwidth does not bind, it is ceil(t_c / c); where it does, more than ceil(t_c / t_bw) only makes gradients later.
    Derived here: daily2016leveraging, section 1, names such a choice and gives no rule.

    >>> smallest_useful_delay(1.0, 2.4, 0.9), smallest_useful_delay(1.0, 2.4, 2.4), smallest_useful_delay(1.0, 0.1, 0.1)
    (3, 1, 1)
    """
    _check(compute_s, communication_s)
    if communication_s == 0:
        return 0
    floor = max(compute_s, wire_s)
    if floor == 0:
        raise ConfigError("without compute and bandwidth every longer delay is quicker: give compute_s or wire_s")
    return max(1, math.ceil(communication_s / floor * (1 - 1e-12)))


def _check(compute_s: float, communication_s: float) -> None:
    if not (compute_s >= 0 and communication_s >= 0):
        raise ConfigError(f"compute_s={compute_s}, communication_s={communication_s}: seconds must be 0 or more")


def _check_whole(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value}: a whole number, 1 or more")
