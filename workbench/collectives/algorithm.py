"""Algorithms that sum by a collective."""

from __future__ import annotations

from abc import ABC

from workbench.collectives.base import Collective
from workbench.gradients import Layout
from workbench.program import Algorithm, Requirements


class CollectiveAlgorithm(Algorithm, ABC):
    """An algorithm whose ranks sum with `collective`, one of its settings.

    Each algorithm declares the field itself, with its default: records show settings in the order of the fields.
    """

    __slots__ = ()
    collective: Collective

    @property
    def num_lanes(self) -> int:
        """Number of lanes on which it starts sums."""
        return 1

    @property
    def requires(self) -> Requirements:
        return Requirements(num_lanes=self.num_lanes, link=self.collective.needs_link)

    def check(self, num_ranks: int) -> None:
        self.collective.check(num_ranks)

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> float | None:
        """Return the bytes of one sum of the gradient."""
        return float(self.collective.bytes_of(rank, num_ranks, layout))
