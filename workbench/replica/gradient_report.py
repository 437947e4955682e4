"""What was found in a rank's gradients and losses: words for errors, entries of the record."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor

from workbench.errors import ConfigError, Diverged
from workbench.gradients import BucketSlice

MOST_NAMED = 3
LEFT_OUT = "on_bad_gradient='skip' leaves such a gradient out"


class GradientReport(Protocol):
    """What a rank found in one of its gradients, or may have found: on a GPU that is known when the device has come so far."""

    @property
    def rank(self) -> int:
        """Whose gradient it is."""

    def read(self) -> Finding | None:
        """What it was; None if nothing was wrong. Raises `Diverged` where the run is to stop."""


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """What was wrong with a gradient, and what was done.

    Attributes:
        words: what, and in which parameter: "nan in 0.weight".
        norm: its global norm, where it was clipped; None where it was left out.
    """

    rank: int
    words: str
    norm: float | None = None

    def read(self) -> Finding:
        return self


@final
class DeferredCheck:
    """A gradient that is looked at on the device; what was found is read later."""

    def __init__(self, rank: int, step: int, policy: str, device: torch.device, advice: Callable[[], str]) -> None:
        self.rank, self._step, self._policy, self._advice = rank, step, policy, advice
        self.ok = torch.ones((), dtype=torch.bool, device=device)
        self.too_large = torch.zeros((), dtype=torch.bool, device=device)
        self.norm: Tensor | None = None
        self._losses: list[Tensor] = []
        self._largest: list[tuple[BucketSlice, Tensor]] = []  # of each bucket, the largest absolute value of each of its parameters

    def hear(self, loss: Tensor) -> None:
        """A micro-batch's loss."""
        self._losses.append(loss)
        self.ok &= torch.isfinite(loss)

    def look(self, piece: BucketSlice, views: list[Tensor]) -> None:
        """A bucket's parameters."""
        largest = torch.stack(torch._foreach_norm(views, math.inf))
        self._largest.append((piece, largest))
        self.ok &= torch.isfinite(largest).all()

    def read(self) -> Finding | None:
        if bool(self.ok):
            return Finding(self.rank, "norm", float(self.norm)) if self.norm is not None and bool(self.too_large) else None
        words = self._words()
        if self._policy == "stop":
            raise Diverged(f"the gradient of rank {self.rank} at step {self._step} cannot be used: {words}. {self._advice()}; {LEFT_OUT}")
        return Finding(self.rank, words)

    def _words(self) -> str:
        bad = next((value for loss in self._losses if not math.isfinite(value := float(loss))), None)
        if bad is not None:
            return f"loss {bad}"
        for piece, largest in self._largest:
            values = largest.tolist()
            bad_ones = [f"{value} in {slot.name}" for slot, value in zip(piece.slots, values, strict=True) if not math.isfinite(value)]
            if bad_ones:
                return named(bad_ones)
        assert self.norm is not None, "a gradient was left out in which nothing is wrong"
        return f"norm {float(self.norm):g}, above max_grad_norm"


def entries_of(found: Sequence[GradientReport], loss: float | None) -> dict[str, Any]:
    """Of a row of metrics: its loss, None where it is no number because of which a gradient was left out; and what was found.

    Raises:
        Diverged: the run is to stop because of it.
    """
    known = [finding for item in found if (finding := item.read()) is not None]
    skipped = [finding.words for finding in known if finding.norm is None]
    clipped = [finding.norm for finding in known if finding.norm is not None]
    entries: dict[str, Any] = {"loss": None if skipped and loss is not None and not math.isfinite(loss) else loss}
    if skipped:
        entries["skipped"] = "; ".join(skipped)
    if clipped:
        entries["clipped"] = clipped[-1]
    return entries


@final
class LossWatch:
    """Ends a run whose loss is no number, or many times what it began with.

    Args:
        ratio: the largest loss over the rank's first one; None for any.
        lr: the learning rate now, for the message.
    """

    def __init__(self, ratio: float | None, lr: Callable[[], float]) -> None:
        self._ratio, self._lr = ratio, lr
        self._first: dict[int, float] = {}  # of each rank

    def first(self, rank: int) -> float | None:
        """That loss, if there was one."""
        return self._first.get(rank)

    def begin(self, rank: int, first: float | None) -> None:
        """That rank began with this loss: it had another number, or another began for it."""
        self._first = {} if first is None else {rank: first}

    def check(self, value: float | None, step: int, rank: int) -> None:
        """Raise `Diverged` unless a rank's loss is a finite number, and not too large."""
        if value is None:
            return
        advice = f"Lower the learning rate (now {self._lr():g}), clip gradients (clip_norm=1.0), or use less delay or momentum"
        if not math.isfinite(value):
            raise Diverged(f"the loss of rank {rank} is {value} at step {step}: training diverged. {advice}")
        if self._ratio is None:
            return
        first = self._first.setdefault(rank, value)
        if first <= 0:
            raise ConfigError(
                f"divergence_ratio={self._ratio:g} is of a loss that begins above 0, and that of rank {rank} begins with {first:g}"
            )
        if value > self._ratio * first:
            raise Diverged(
                f"the loss of rank {rank} is {value:g} at step {step}, more than {self._ratio:g} times the {first:g} that it began with "
                f"(divergence_ratio): training diverged. {advice}"
            )


def named(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f", and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
