"""How many gradients to wait for: arrival times, gradient noise, and the number that makes the most of its time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import final

from torch import Tensor

MEMORY = 20  # rounds that count


@final
class ArrivalTimes:
    """When the first, second, ... gradient comes, from what each worker last took, averaged over recent arrivals."""

    def __init__(self, num_workers: int) -> None:
        self._last: dict[int, float | None] = dict.fromkeys(range(num_workers))
        self._rounds: deque[list[float]] = deque(maxlen=MEMORY * num_workers)

    def add(self, worker: int, seconds: float) -> None:
        """A worker took so long, late or not."""
        self._last[worker] = seconds
        known = [value for value in self._last.values() if value is not None]
        if len(known) == len(self._last):
            self._rounds.append(sorted(known))

    def forget(self, worker: int) -> None:
        """It has left: what counts are the rounds of the others, from here on."""
        del self._last[worker]
        self._rounds.clear()

    def means(self) -> list[float] | None:
        """Mean seconds until the k-th gradient, k = 1 to p; None until every worker has come once."""
        if not self._rounds:
            return None
        return [sum(column) / len(self._rounds) for column in zip(*self._rounds, strict=True)]


@final
class NoiseScale:
    """S = tr(covariance) / |mean|^2 of single workers' gradients, from their norms and the norm of their mean.

    Moving averages of both parts over updates (McCandlish et al. 2018, appendix A.1). With k gradients,
    |G|^2 ~ (k |mean|^2 - mean |g|^2) / (k - 1)   and   tr ~ (mean |g|^2 - |mean|^2) k / (k - 1).

    Args:
        given: S where it is known.
    """

    def __init__(self, given: float | None = None, decay: float = 0.9) -> None:
        self._given, self._decay = given, decay
        self._squares = 0.0  # of the present update's gradients
        self._signal = self._noise = 0.0

    def add(self, gradient: Tensor) -> None:
        """One worker's gradient of the present update; all alike in weight."""
        if not gradient.is_meta:
            self._squares += float(gradient.double().square().sum())

    def close(self, total: Tensor, count: int) -> None:
        """The update is complete with the sum of `count` gradients."""
        if count > 1 and self._given is None and not total.is_meta:
            of_mean, mean_of = float(total.double().square().sum()) / count**2, self._squares / count
            self._signal = self._decay * self._signal + (1 - self._decay) * (count * of_mean - mean_of) / (count - 1)
            self._noise = self._decay * self._noise + (1 - self._decay) * (mean_of - of_mean) * count / (count - 1)
        self._squares = 0.0

    def value(self) -> float | None:
        """S; None before anything is known, infinity where the gradients are nothing but noise."""
        if self._given is not None:
            return self._given
        if self._noise <= 0:
            return None
        return self._noise / self._signal if self._signal > 0 else float("inf")


def best_quorum(times: Sequence[float], noise_scale: float | None) -> int:
    """The N of least expected time to a goal, t(N) (1 + S/N); all of them where S is not known yet.

    >>> best_quorum([1.0, 1.1, 1.2, 5.0], 10.0), best_quorum([1.0, 1.1, 1.2, 1.3], 10.0), best_quorum([1.0, 1.1], 0.0)
    (3, 4, 1)
    """
    if noise_scale is None:
        return len(times)
    if noise_scale == float("inf"):
        return min(range(1, len(times) + 1), key=lambda count: times[count - 1] / count)
    return min(range(1, len(times) + 1), key=lambda count: times[count - 1] * (1 + noise_scale / count))
