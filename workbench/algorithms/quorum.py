"""The number of gradients that an update of `FirstGradients` waits for: fixed, or chosen from arrival times and noise.

A quorum's `size` is the number for the present update. The server reports arrivals and its answers to the quorum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import final

import numpy as np
from torch import Tensor

from workbench.gradients import Gradient
from workbench.ops import Local, Program

MEMORY = 20  # samples in the mean, for each worker


@final
class FixedQuorum:
    """N gradients for every update. It ignores reports."""

    def __init__(self, size: int) -> None:
        self.size = size

    def arrived(self, worker: int, now_s: float) -> None:
        pass

    def accepted(self, gradient: Gradient) -> Program:
        yield from ()

    def complete(self, total: Gradient, count: int) -> None:
        pass

    def answered(self, worker: int, now_s: float) -> None:
        pass

    def left(self, worker: int) -> None:
        pass


@final
class OnlineQuorum:
    """The N with the least expected time to a goal, chosen for each update. N is p while times or noise are unknown.

    Args:
        num_workers: p.
        noise_scale: S; None to measure it.
        now_s: the time at which all workers begin.
    """

    def __init__(self, num_workers: int, noise_scale: float | None, now_s: float) -> None:
        self.size = num_workers
        self._num_workers = num_workers
        self._measures = noise_scale is None
        self._times, self._noise = ArrivalTimes(num_workers), NoiseScale(noise_scale)
        self._answered = dict.fromkeys(range(num_workers), now_s)

    def arrived(self, worker: int, now_s: float) -> None:
        """A worker's gradient has arrived, late or not."""
        self._times.add(worker, now_s - self._answered[worker])

    def accepted(self, gradient: Gradient) -> Program:
        """A gradient is part of the present update."""
        if self._measures:
            yield Local("sum", gradient.message_bytes, partial(self._noise.add, gradient.body()))

    def complete(self, total: Gradient, count: int) -> None:
        """Choose N for the next update. The present one is complete, with the sum of `count` gradients."""
        self._noise.close(total.body(), count)
        times = self._times.means()
        self.size = self._num_workers if times is None else best_quorum(times, self._noise.value())
        if self._measures:  # noise is measured between gradients: with N = 1 it would never be measured again
            self.size = min(max(self.size, 2), self._num_workers)

    def answered(self, worker: int, now_s: float) -> None:
        """A worker was sent parameters for its next gradient."""
        self._answered[worker] = now_s

    def left(self, worker: int) -> None:
        """A worker has left."""
        self._num_workers -= 1
        self._times.forget(worker)


@final
class ArrivalTimes:
    """Mean seconds until the k-th gradient, for each k, from recent arrivals.

    A sample is the last time of each worker, sorted. Every arrival makes a sample, and the newest `MEMORY` times p
    samples count. The sums over them are kept, with the oldest sample and the arrivals since. This takes memory for O(p)
    numbers, and two passes over p numbers for each arrival.
    """

    def __init__(self, num_workers: int) -> None:
        self._last: dict[int, float | None] = dict.fromkeys(range(num_workers))
        self._num_unknown = num_workers
        self._most = MEMORY * num_workers
        self._newest = self._oldest = SortedTimes([])
        # (time before, time after), for each sample after the oldest.
        self._arrivals: deque[tuple[float, float]] = deque()
        self._sums = np.zeros(0)  # (p,) over the samples that count
        self._num_samples = 0

    def add(self, worker: int, seconds: float) -> None:
        """Count the time that a worker took, late or not."""
        before = self._last.get(worker)
        self._num_unknown -= before is None and worker in self._last
        self._last[worker] = seconds
        if self._num_unknown:
            return
        if before is None or not self._num_samples:
            self._begin()
            return
        self._newest.replace(before, seconds)
        self._arrivals.append((before, seconds))
        self._sums += self._newest.seconds
        self._num_samples += 1
        if self._num_samples > self._most:
            self._sums -= self._oldest.seconds
            self._oldest.replace(*self._arrivals.popleft())
            self._num_samples -= 1

    def _begin(self) -> None:
        """Make the first sample, when all workers have arrived."""
        known = [value for value in self._last.values() if value is not None]
        self._newest, self._oldest = SortedTimes(known), SortedTimes(known)
        self._arrivals.clear()
        self._sums, self._num_samples = self._newest.seconds.copy(), 1

    def forget(self, worker: int) -> None:
        """Remove a worker that has left, and all samples so far."""
        self._num_unknown -= self._last.pop(worker) is None
        self._arrivals.clear()
        self._num_samples = 0

    def means(self) -> list[float] | None:
        """Mean seconds until the k-th gradient, k = 1 to p; None until every worker has arrived once."""
        if not self._num_samples:
            return None
        found: list[float] = (self._sums / self._num_samples).tolist()
        return found


@final
class SortedTimes:
    """The last time of each worker: `seconds`, (p,), ascending."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = np.sort(np.asarray(seconds, float))

    def replace(self, before: float, after: float) -> None:
        """Replace a worker's time."""
        seconds = self.seconds
        old = int(seconds.searchsorted(before))
        new = int(seconds.searchsorted(after))
        if new > old:  # the times in between move down by one
            seconds[old : new - 1] = seconds[old + 1 : new]
            seconds[new - 1] = after
        else:
            seconds[new + 1 : old + 1] = seconds[new:old]
            seconds[new] = after


@final
class NoiseScale:
    """S = tr(covariance) / |mean|^2 of single workers' gradients, from their norms and the norm of their mean.

    Moving averages of both parts over updates (McCandlish et al. 2018, appendix A.1). With k gradients,
    |G|^2 ~ (k |mean|^2 - mean |g|^2) / (k - 1)   and   tr ~ (mean |g|^2 - |mean|^2) k / (k - 1).

    Args:
        given: S, if it is known.
        decay: of the moving averages, for each update.
    """

    def __init__(self, given: float | None = None, decay: float = 0.9) -> None:
        self._given, self._decay = given, decay
        self._squares = 0.0  # of the present update's gradients
        self._signal = self._noise = 0.0

    def add(self, gradient: Tensor) -> None:
        """Add one worker's gradient of the present update. All have the same weight."""
        if not gradient.is_meta:
            self._squares += float(gradient.double().square().sum())

    def close(self, total: Tensor, count: int) -> None:
        """End the update, with the sum of `count` gradients."""
        if count > 1 and self._given is None and not total.is_meta:
            of_mean, mean_of = float(total.double().square().sum()) / count**2, self._squares / count
            self._signal = self._decay * self._signal + (1 - self._decay) * (count * of_mean - mean_of) / (count - 1)
            self._noise = self._decay * self._noise + (1 - self._decay) * (mean_of - of_mean) * count / (count - 1)
        self._squares = 0.0

    def value(self) -> float | None:
        """S; None before the first measurement, infinity if gradients are only noise."""
        if self._given is not None:
            return self._given
        if self._noise <= 0:
            return None
        return self._noise / self._signal if self._signal > 0 else float("inf")


def best_quorum(times: Sequence[float], noise_scale: float | None) -> int:
    """The N with the least expected time to a goal, t(N) (1 + S/N); p if S is not yet known.

    >>> best_quorum([1.0, 1.1, 1.2, 5.0], 10.0), best_quorum([1.0, 1.1, 1.2, 1.3], 10.0), best_quorum([1.0, 1.1], 0.0)
    (3, 4, 1)
    """
    if noise_scale is None:
        return len(times)
    if noise_scale == float("inf"):
        return min(range(1, len(times) + 1), key=lambda count: times[count - 1] / count)
    return min(range(1, len(times) + 1), key=lambda count: times[count - 1] * (1 + noise_scale / count))
