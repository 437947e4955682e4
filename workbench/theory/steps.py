"""Seconds of a step of each algorithm, from constant seconds of compute and communication.

c is all compute of a step (forward, backward, update: t_f + t_b + t_u), and m is all communication. T steps take T
times as long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from workbench.errors import ConfigError


def synchronous_s(compute_s: float, communication_s: float) -> float:
    """Return D-Sync's step: c + m, without overlap. As recalled from li2018pipesgd: T (l_up + l_comp + l_comm).

    >>> synchronous_s(3.0, 2.0)
    5.0
    """
    _check(compute_s, communication_s)
    return compute_s + communication_s


def pipe_s(compute_s: float, communication_s: float, width: int = 2) -> float:
    """Return Pipe-SGD's step with one processor and interface a worker: c + m with width 1, max(c, m) from width 2 on.

    As recalled from li2018pipesgd: T max(l_up + l_comp, l_comm). A width above 2 makes no step shorter, but makes
    gradients staler.

    >>> pipe_s(3.0, 2.0), pipe_s(3.0, 4.0, width=4), pipe_s(3.0, 2.0, width=1)
    (3.0, 4.0, 5.0)
    """
    _check(compute_s, communication_s)
    _check_whole("width", width)
    return compute_s + communication_s if width == 1 else max(compute_s, communication_s)


def pipe_unlimited_s(compute_s: float, communication_s: float, width: int) -> float:
    """Return Pipe-SGD's step with a processor and an interface for each step in flight: (c + m) / K.

    As recalled from li2018pipesgd.

    >>> pipe_unlimited_s(3.0, 2.0, width=2)
    2.5
    """
    _check(compute_s, communication_s)
    _check_whole("width", width)
    return (compute_s + communication_s) / width


def pipe_speedup(compute_s: float, communication_s: float) -> float:
    """Return the speed-up of Pipe-SGD over D-Sync: (c + m) / max(c, m), at most 2.

    Overlap alone cannot give a factor above 2.

    Derived here.

    >>> pipe_speedup(3.0, 3.0), pipe_speedup(3.0, 1.0) < 2
    (2.0, True)
    """
    longer = pipe_s(compute_s, communication_s)
    return synchronous_s(compute_s, communication_s) / longer if longer else 1.0


def per_layer_pipe_s(compute_s: float, communication_s: Sequence[float]) -> float:
    """Return Pipe-SGD's step if its gradient is summed in L all-reduces, one after another: max(c, their sum).

    As recalled from li2018pipesgd, with a ring: max(l_up + l_comp, 2 L (p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n
    gamma + L S). If communication is the bound, it is 2 (L-1) (p-1) alpha slower than one all-reduce of the whole
    gradient; otherwise equal. So Pipe-SGD should use one all-reduce, while D-Sync gains by layers (`layerwise`).

    >>> per_layer_pipe_s(3.0, [1.0, 1.0, 2.0])
    4.0
    """
    return pipe_s(compute_s, math.fsum(communication_s))


def parameter_server_step_s(compute_s: float, update_s: float, communication_s: float) -> float:
    """Return PS-Sync's step without overlap: workers compute (c without the update), servers gather, update, scatter.

    Derived here.

    `communication_s` is `collectives.parameter_server_s`. With M servers the update is M times as short.
    """
    _check(compute_s, communication_s)
    return compute_s + update_s + communication_s


def delayed_s(compute_s: float, communication_s: float, wire_s: float, delay: int) -> float:
    """Return the step of AGD(d) with d concurrent all-reduces: max(c, t_bw, t_c / d).

    t_bw, the bandwidth part of t_c, is shared by concurrent all-reduces: threads hide latency, not bytes. For d = 0
    it is c + t_c. Derived here; the paper has no timing model.

    >>> [delayed_s(1.0, 2.4, 0.9, delay) for delay in (0, 1, 2, 3, 9)]
    [3.4, 2.4, 1.2, 1.0, 1.0]

    Paper: daily2016leveraging, section 4.3 (the algorithm).
    """
    _check(compute_s, communication_s)
    if not isinstance(delay, int) or delay < 0:
        raise ConfigError(f"delay={delay}: give a whole number of steps, 0 or more")
    return max(compute_s, wire_s, communication_s / delay) if delay else compute_s + communication_s


def smallest_useful_delay(compute_s: float, communication_s: float, wire_s: float) -> int:
    """Return d*: the smallest delay with the shortest step, ceil(t_c / max(c, t_bw)), at least 1.

    It is 0 if there is nothing to hide.

    If bandwidth is not the bound, it is ceil(t_c / c). If it is, a delay above ceil(t_c / t_bw) only makes gradients
    staler. Derived here: daily2016leveraging, section 1, names such a choice and gives no rule.

    >>> smallest_useful_delay(1.0, 2.4, 0.9), smallest_useful_delay(1.0, 2.4, 2.4), smallest_useful_delay(1.0, 0.1, 0.1)
    (3, 1, 1)
    """
    _check(compute_s, communication_s)
    if communication_s == 0:
        return 0
    floor = max(compute_s, wire_s)
    if floor == 0:
        raise ConfigError("without compute and bandwidth every longer delay is faster: give compute_s or wire_s")
    return max(1, math.ceil(communication_s / floor * (1 - 1e-12)))


def _check(compute_s: float, communication_s: float) -> None:
    if not (compute_s >= 0 and communication_s >= 0):
        raise ConfigError(f"compute_s={compute_s}, communication_s={communication_s}: seconds must be 0 or more")


def _check_whole(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value}: give a whole number, 1 or more")
