"""Algorithms that sum by a collective."""

from __future__ import annotations

from abc import ABC
from typing import Any

from workbench.collectives.base import Collective
from workbench.gradients import Layout
from workbench.program import Algorithm, Requirements


class CollectiveAlgorithm(Algorithm, ABC):
    """An algorithm whose ranks sum with `collective`, one of its settings.

    Each algorithm declares the field itself, with its default: records show settings in the order of the fields.

    Attributes:
        collective: all-reduce that sums over the ranks, such as ring; ring:truncate16 also compresses its messages.
    """

    __slots__ = ()
    collective: Collective

    @property
    def requires(self) -> Requirements:
        return Requirements(link=self.collective.needs_link)

    def check(self, num_ranks: int) -> None:
        self.collective.check(num_ranks)

    @property
    def codec(self) -> Any:
        return getattr(self.collective, "codec", None)  # many collectives have none

    def messages_per_step(self, num_ranks: int, num_buckets: float) -> float | None:
        return float(self.collective.messages_sent(num_ranks) * num_buckets)

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> float | None:
        """Return the bytes of one sum of the gradient."""
        return float(self.collective.bytes_of(rank, num_ranks, layout))
