"""Seconds that a worker's compute costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from math import isfinite
from typing import TypeVar, final

import numpy as np

from workbench.costs.stragglers import Array, Failures, Finish, Stragglers
from workbench.costs.stragglers.base import plainly
from workbench.errors import ConfigError
from workbench.gradients import Layout
from workbench.rng import derive_seed

Number = TypeVar("Number", float, Array)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Forward, backward and update of one full minibatch; of fewer samples, forward and backward take less.

    Attributes:
        forward_s, backward_s, update_s: seconds where nothing is in the way.
        stragglers: what is in the way of forward and backward; several multiply, and each draws numbers of its own.
        forward_shares, backward_shares: of each parameter in order of registration, what part of the pass is spent where it is
            used; empty: in proportion to its elements.
        fixed_share: of forward and backward, what part they take however few the samples are; the rest is in proportion to them.
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
        for law in self.stragglers:
            if not isinstance(law, Stragglers):
                raise ConfigError(f"Compute(stragglers={law!r}): a law, such as Lognormal(sigma=0.3), or costs.stragglers.get({law!r})")
        for name in ("forward_s", "backward_s", "update_s"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"Compute({name}={getattr(self, name)!r}): seconds must be 0 or more, and finite")
        if not 0 <= self.fixed_share <= 1:
            raise ConfigError(f"Compute(fixed_share={self.fixed_share!r}): a part of the pass, from 0 to 1")
        for name in ("forward_shares", "backward_shares"):
            shares = getattr(self, name)
            if shares and not (all(isfinite(share) and share >= 0 for share in shares) and abs(sum(shares) - 1) < 1e-6):
                raise ConfigError(f"Compute({name}=...): parts of one pass, 0 or more, that sum to 1; these sum to {sum(shares):g}")
        kinds = [type(law) for law in self.stragglers if law.timed]
        if len(set(kinds)) < len(kinds):
            raise ConfigError(
                f"Compute: two laws of one kind that know the clock ({', '.join(kind.__name__ for kind in kinds)}): put both in one"
            )

    def __str__(self) -> str:
        parts = f"forward {self.forward_s * 1e3:.3g} ms, backward {self.backward_s * 1e3:.3g} ms, update {self.update_s * 1e3:.3g} ms"
        fixed = f", of forward and backward {self.fixed_share:.0%} whatever the batch" if self.fixed_share else ""
        return parts + fixed + "".join(f", {law}" for law in self.stragglers)

    @property
    def timed(self) -> bool:
        """Whether how long work takes depends on when it begins."""
        return any(law.timed for law in self.stragglers)

    def part(self, share_of_batch: Number) -> Number:
        """What forward and backward of so many samples, over those of a full minibatch, take of its seconds; none take none.

        >>> Compute(forward_s=1.0, backward_s=2.0, fixed_share=0.5).part(0.5)
        0.75
        """
        return (share_of_batch > 0) * (self.fixed_share + (1 - self.fixed_share) * share_of_batch)

    def seconds(self, share_of_batch: float) -> tuple[float, float]:
        """(forward, backward) of so many samples over those of a full minibatch, where nothing is in the way."""
        part = self.part(share_of_batch)
        return self.forward_s * part, self.backward_s * part

    def factors(self, seed: int, step: int, num_workers: int) -> Array:
        """(num_workers,) by what each worker's forward and backward are slower in this step."""
        found = np.ones(num_workers)
        for position, law in enumerate(self.stragglers):
            if not law.timed:
                found *= law.factors(_seed_of(seed, position), step, num_workers)
        return found

    def finish_s(self, seed: int, rank: int, begin_s: float, seconds: float) -> float:
        """When this worker ends work of so many seconds that it begins at `begin_s`; who fails does slowed work again."""
        work: Finish = plainly
        timed = [(position, law) for position, law in enumerate(self.stragglers) if law.timed]
        if len(timed) == 1:
            return timed[0][1].finish_s(_seed_of(seed, timed[0][0]), rank, begin_s, seconds)
        for position, law in sorted(timed, key=lambda item: isinstance(item[1], Failures)):
            work = partial(law.finish_s, _seed_of(seed, position), rank, work=work)
        return work(begin_s, seconds)

    def ready_shares(self, layout: Layout) -> tuple[float, ...]:
        """Of each bucket in order, after what part of backward its gradients are final; ascending to 1."""
        return _cumulative(layout, self.backward_shares)

    def forward_parts(self, layout: Layout) -> tuple[float, ...]:
        """Of each bucket in order of index, what part of forward is spent where its parameters are used."""
        ends = (0.0, *_cumulative(layout, self.forward_shares))
        return tuple(after - before for before, after in pairwise(ends))


@lru_cache(maxsize=64)
def _seed_of(seed: int, position: int) -> int:
    """Two laws of one kind would draw the same numbers from one seed."""
    return derive_seed(seed, "stragglers", position) if position else seed


def _cumulative(layout: Layout, shares: tuple[float, ...]) -> tuple[float, ...]:
    if shares and len(shares) != len(layout.slots):
        raise ConfigError(f"Compute has shares of {len(shares)} parameters and the model has {len(layout.slots)}: measure this model")
    weights = shares or tuple(slot.numel for slot in layout.slots)
    total = sum(weights) or 1.0
    sums = accumulate(sum(weights[slot.index] for slot in piece.slots) / total for piece in layout.buckets)
    return tuple(min(1.0, value) for value in sums)
