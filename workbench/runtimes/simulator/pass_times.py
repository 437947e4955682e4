"""Times of simulated workers' passes, and when buckets of a gradient are final."""

from __future__ import annotations

from typing import final

from workbench.costs import Compute
from workbench.gradients import Layout
from workbench.problems.base import Sampler
from workbench.settings import Settings

KEPT_STEPS = 256  # steps whose factors are kept; a slower worker draws them again


@final
class PassTimes:
    """The compute times of all workers of a simulation.

    Attributes:
        early: (bucket, share of backward after which its gradients are final), for buckets that are final before its
            end.
        late: buckets that are final at the end of backward.
        forward_parts: shares of the forward pass, by bucket.
    """

    __slots__ = (
        "_factors",
        "_num_computing",
        "_num_workers",
        "_sampler",
        "_seed",
        "_timed",
        "compute",
        "early",
        "forward_parts",
        "late",
    )

    def __init__(
        self,
        compute: Compute,
        layout: Layout,
        settings: Settings,
        sampler: Sampler,
        *,
        num_workers: int,
        num_computing: int,
        served: bool = False,
    ) -> None:
        self.compute = compute
        shares = list(enumerate(ready_shares(compute, layout, settings, served=served)))
        self.early = tuple((bucket, share) for bucket, share in shares if share < 1)
        self.late = tuple(bucket for bucket, share in shares if share >= 1)
        self.forward_parts = compute.forward_parts(layout)
        self._timed = compute.timed  # the duration of work depends on when it begins
        self._seed, self._sampler = settings.seed, sampler
        self._num_workers, self._num_computing = num_workers, num_computing
        self._factors: dict[int, list[float]] = {}  # step -> factor of each worker

    def slowness(self, step: int, rank: int) -> float:
        """The time of this worker's minibatch, divided by the usual time of a full one."""
        factors = self._factors.get(step)
        if factors is None:
            factors = self._draw(step)
        return factors[rank]

    def _draw(self, step: int) -> list[float]:
        if len(self._factors) > KEPT_STEPS:
            del self._factors[next(iter(self._factors))]
        drawn = self.compute.factors(self._seed, step, self._num_workers)
        drawn[: self._num_computing] *= self.compute.time_share(self._sampler.shares(step))
        factors: list[float] = drawn.tolist()
        self._factors[step] = factors
        return factors

    def finish_s(self, rank: int, seconds: float, begin_s: float) -> float:
        """The time at which this worker ends work of `seconds` that begins at `begin_s`."""
        return self.compute.finish_s(self._seed, rank, begin_s, seconds) if self._timed else begin_s + seconds

    def passes_s(self, step: int, rank: int, part: float, begin_s: float) -> tuple[float, float]:
        """The end times of forward and backward, if the last `part` of forward begins at `begin_s`."""
        slow = (self._factors.get(step) or self._draw(step))[rank]
        forward_s, backward_s = self.compute.forward_s * slow * part, self.compute.backward_s * slow
        if self._timed:
            middle_s = self.finish_s(rank, forward_s, begin_s)
            return middle_s, self.finish_s(rank, backward_s, middle_s)
        return begin_s + forward_s, begin_s + forward_s + backward_s


def ready_shares(compute: Compute, layout: Layout, settings: Settings, *, served: bool = False) -> tuple[float, ...]:
    """Return the share of backward after which each bucket may leave: 1 for all if the whole gradient must be known.

    `served`: servers sum the gradients, so a rank looks for an overflow before it sends.
    """
    shares = compute.ready_shares(layout)
    whole = settings.max_grad_norm is not None or (served and settings.precision == "fp16")
    return (1.0,) * len(shares) if whole else shares
