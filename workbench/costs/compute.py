"""The cost model of a worker's compute."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from math import isfinite
from typing import TypeVar, final

import numpy as np

from workbench.costs.stragglers import Array, Failures, Finish, Stragglers
from workbench.costs.stragglers.base import full_speed_finish_s
from workbench.errors import ConfigError
from workbench.gradients import Layout
from workbench.rng import derive_seed

Number = TypeVar("Number", float, Array)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Seconds of forward, backward and update of one full minibatch. Fewer samples shorten forward and backward.

    Attributes:
        forward_s, backward_s, update_s: seconds without stragglers.
        stragglers: distributions that slow forward and backward. Each draws independently; their factors multiply.
        forward_shares, backward_shares: each parameter's share of the pass, in order of registration; empty: in
            proportion to the number of elements.
        fixed_share: share of forward and backward that does not depend on the number of samples; the rest is
            proportional to the number of samples.
    """

    forward_s: float
    backward_s: float
    update_s: float = 0.0
    stragglers: tuple[Stragglers, ...] = ()
    forward_shares: tuple[float, ...] = ()
    backward_shares: tuple[float, ...] = ()
    fixed_share: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.stragglers, Stragglers):
            object.__setattr__(self, "stragglers", (self.stragglers,))
        for distribution in self.stragglers:
            if not isinstance(distribution, Stragglers):
                raise ConfigError(
                    f"Compute(stragglers={distribution!r}): give a distribution, such as Lognormal(sigma=0.3), "
                    f"or costs.stragglers.get({distribution!r})"
                )
        for name in ("forward_s", "backward_s", "update_s"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"Compute({name}={getattr(self, name)!r}): seconds must be 0 or more, and finite")
        if not 0 <= self.fixed_share <= 1:
            raise ConfigError(f"Compute(fixed_share={self.fixed_share!r}): give a share of the pass, from 0 to 1")
        for name in ("forward_shares", "backward_shares"):
            shares = getattr(self, name)
            if shares and not (all(isfinite(share) and share >= 0 for share in shares) and abs(sum(shares) - 1) < 1e-6):
                raise ConfigError(
                    f"Compute({name}=...): shares of one pass, 0 or more, must sum to 1; these sum to {sum(shares):g}"
                )
        kinds = [type(distribution) for distribution in self.stragglers if distribution.timed]
        if len(set(kinds)) < len(kinds):
            raise ConfigError(
                "Compute: two distributions of one kind depend on time "
                f"({', '.join(kind.__name__ for kind in kinds)}): "
                "combine them into one"
            )

    def __str__(self) -> str:
        parts = (
            f"forward {self.forward_s * 1e3:.3g} ms, backward {self.backward_s * 1e3:.3g} ms, update "
            f"{self.update_s * 1e3:.3g} ms"
        )
        fixed = f", {self.fixed_share:.0%} of forward and backward for any batch" if self.fixed_share else ""
        return parts + fixed + "".join(f", {distribution}" for distribution in self.stragglers)

    @property
    def timed(self) -> bool:
        """Return True if the time of work depends on when it begins."""
        return any(distribution.timed for distribution in self.stragglers)

    def time_share(self, share_of_batch: Number) -> Number:
        """Return the time of a share of a minibatch's samples, divided by the full minibatch's time; 0 for no samples.

        >>> Compute(forward_s=1.0, backward_s=2.0, fixed_share=0.5).time_share(0.5)
        0.75
        """
        return (share_of_batch > 0) * (self.fixed_share + (1 - self.fixed_share) * share_of_batch)

    def seconds(self, share_of_batch: float) -> tuple[float, float]:
        """Return (forward, backward) seconds of a share of a full minibatch, without stragglers."""
        time_share = self.time_share(share_of_batch)
        return self.forward_s * time_share, self.backward_s * time_share

    def factors(self, seed: int, step: int, num_workers: int) -> Array:
        """Return each worker's slowdown of forward and backward in this step, shape (num_workers,)."""
        found = np.ones(num_workers)
        for position, distribution in enumerate(self.stragglers):
            if not distribution.timed:
                found *= distribution.factors(_seed_of(seed, position), step, num_workers)
        return found

    def finish_s(self, seed: int, rank: int, begin_s: float, seconds: float) -> float:
        """Return when this worker ends work that begins at `begin_s` and takes `seconds`.

        After a failure, the slowed work is repeated.
        """
        work: Finish = full_speed_finish_s
        timed = [
            (position, distribution) for position, distribution in enumerate(self.stragglers) if distribution.timed
        ]
        if len(timed) == 1:
            return timed[0][1].finish_s(_seed_of(seed, timed[0][0]), rank, begin_s, seconds)
        for position, distribution in sorted(timed, key=lambda item: isinstance(item[1], Failures)):
            work = partial(distribution.finish_s, _seed_of(seed, position), rank, work=work)
        return work(begin_s, seconds)

    def ready_shares(self, layout: Layout) -> tuple[float, ...]:
        """Return the share of backward after which each bucket's gradients are final, in order, ascending to 1."""
        return _cumulative(layout, self.backward_shares)

    def forward_parts(self, layout: Layout) -> tuple[float, ...]:
        """Return the share of forward in which each bucket's parameters are used, in order of index."""
        ends = (0.0, *_cumulative(layout, self.forward_shares))
        return tuple(after - before for before, after in pairwise(ends))


@lru_cache(maxsize=64)
def _seed_of(seed: int, position: int) -> int:
    """Return a different seed for each position, so that two distributions of one kind draw different numbers."""
    return derive_seed(seed, "stragglers", position) if position else seed


def _cumulative(layout: Layout, shares: tuple[float, ...]) -> tuple[float, ...]:
    if shares and len(shares) != len(layout.slots):
        raise ConfigError(
            f"Compute has shares of {len(shares)} parameters and the model has {len(layout.slots)}: measure this model"
        )
    weights = shares or tuple(slot.numel for slot in layout.slots)
    total = sum(weights) or 1.0
    sums = accumulate(sum(weights[slot.index] for slot in piece.slots) / total for piece in layout.buckets)
    return tuple(min(1.0, value) for value in sums)
