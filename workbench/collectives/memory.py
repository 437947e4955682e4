"""What collectives and algorithms keep from step to step in `Context.memory`, and what of it stays valid when the ranks change.

Residuals are in units of the applied mean: a sum S of shares of total weight W is applied as S / W. A rank sends C(v)
of v = g + a e, where the share a is the expected W. The summed tail contains W. Then

    e <- (v - C(v)) / W + (1 - a / W) e,

so nothing is lost: what is applied and what all ranks keep always add up to all gradients. A rank of weight 0 sends
nothing of e and keeps it. Every rank keeps e for a parameter that no rank used, and if the sum is not finite.

If |1 - a / W| exceeds 1 in every step, e grows without a bound. If W is not known in advance (a `Trainer` whose ranks
count their samples), a = q w. w is the rank's own weight, and q its smallest recent W / w: see `share_of`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from workbench.gradients import USED, WEIGHT, BucketSlice
from workbench.program import LANE_PREFIX, Context

ONCE_RESIDUAL, LOW_RANK_RESIDUAL = "once.residual", "low-rank.residual"  # the error of this rank's own values
ONCE_OWNER = "once.owner"  # the codec's error of the sum of this rank's block
WEIGHT_RATIO = "weight-ratio"  # q: the weight of a sum over this rank's own weight in it
OWN = "own."  # prefix of an algorithm's values that are each rank's own, such as its momentum
PER_RANK = (ONCE_RESIDUAL, LOW_RANK_RESIDUAL, ONCE_OWNER, WEIGHT_RATIO, OWN)  # values under other names are equal
# The most that q grows in a sum. e stays bounded if W / w changes by a factor below 43 = Euler's number / this.
RATIO_GROWTH = 1 / 16


# -- the names in a memory -----------------------------------------------------------------------------------------


def forget_blocks(memory: MutableMapping[str, Tensor]) -> None:
    """Drop what depends on the number of ranks, after it has changed: errors of blocks, and ratios of weights."""
    for name in [name for name in memory if plain_name(name).startswith((ONCE_OWNER, WEIGHT_RATIO))]:
        del memory[name]


def of_all_ranks(memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what is equal on all ranks, for a rank that joins later: start factors of low-rank sums, outer momenta."""
    return {name: value for name, value in memory.items() if not plain_name(name).startswith(PER_RANK)}


def fold_lanes(memory: MutableMapping[str, Tensor], num_lanes: int) -> None:
    """Keep only this many lanes; lane 0 takes over the residuals of the others."""
    for name in list(memory):
        lane, plain = _split(name)
        if lane < num_lanes:
            continue
        value = memory.pop(name)
        if plain.startswith(PER_RANK) and not plain.startswith(WEIGHT_RATIO):
            memory[plain] = memory[plain] + value if plain in memory else value


def plain_name(name: str) -> str:
    """Return the name without its lane.

    >>> plain_name("lane-1/once.residual/bucket-0")
    'once.residual/bucket-0'
    """
    return _split(name)[1]


def _split(name: str) -> tuple[int, str]:
    lane, slash, plain = name.removeprefix(LANE_PREFIX).partition("/")
    if name.startswith(LANE_PREFIX) and slash and lane.isdigit():
        return int(lane), plain
    return 0, name


def count_sum(memory: MutableMapping[str, Tensor], name: str) -> int:
    """Return the number of earlier sums of that name."""
    counter = memory.get(name)
    if counter is None:
        counter = memory[name] = torch.zeros((), dtype=torch.int64)
    before = int(counter)
    counter += 1
    return before


# -- residuals -----------------------------------------------------------------------------------------------------


def share_of(ctx: Context, name: str, tail: Tensor, total_weight: float | None) -> float | Tensor:
    """Return the expected weight of the sum: how much of a residual in units of the mean belongs in this rank's share.

    That is `total_weight` if it is known in advance. Else it is this rank's own weight times the ratio that
    `remember_weight` keeps, at first the number of ranks. It is 0 on a rank of weight 0, and 1 without a tail.

    Args:
        name: of what is summed.
        tail: of this rank, before the sum.
    """
    if not tail.numel() or tail.is_meta:
        return 1.0
    own = tail[WEIGHT]
    ratio = ctx.memory.get(f"{WEIGHT_RATIO}/{name}")
    if tail.device.type != "cpu":  # without waiting for the device
        expected = (
            own * (ctx.num_workers if ratio is None else ratio)
            if total_weight is None
            else torch.full_like(own, total_weight)
        )
        return torch.where(own > 0, expected, torch.zeros_like(own))
    weight = float(own)
    if weight <= 0:
        return 0.0
    expected_weight = (
        weight * (ctx.num_workers if ratio is None else float(ratio)) if total_weight is None else total_weight
    )
    return 1.0 if _is_near(expected_weight, 1.0, tail.dtype) else expected_weight


def remember_weight(ctx: Context, name: str, tail: Tensor, share: float | Tensor) -> None:
    """Keep the ratio of a sum's weight to this rank's own, for the share of the next sum.

    Needed if no `total_weight` is known. A smaller ratio is taken at once, because a share above W makes a residual
    grow. A larger ratio is approached in small steps.

    Args:
        tail: of the bucket, after the sum.
        share: what `share_of` returned for this sum.
    """
    if not tail.numel() or tail.is_meta:
        return
    key = f"{WEIGHT_RATIO}/{name}"
    before = ctx.memory.get(key)
    weight = tail[WEIGHT]
    if isinstance(share, Tensor):
        ratio = torch.full_like(weight, ctx.num_workers) if before is None else before
        usable = (share > 0) & (weight > 0) & weight.isfinite()
        seen = ratio * weight / torch.where(share > 0, share, torch.ones_like(share))
        smallest = seen if before is None else torch.minimum(seen, ratio * (1 + RATIO_GROWTH))
        ctx.memory[key] = torch.where(usable, smallest, ratio)
        return
    total = float(weight)
    ratio_now = float(ctx.num_workers if before is None else before)
    if share > 0 and 0 < total < float("inf"):
        seen_ratio = ratio_now * total / share  # the share was the ratio times this rank's own weight
        ratio_now = seen_ratio if before is None else min(seen_ratio, ratio_now * (1 + RATIO_GROWTH))
    ctx.memory[key] = torch.tensor(ratio_now, dtype=torch.float64)


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """How the sum of a bucket is applied.

    Attributes:
        weight: W; None on another device than the CPU.
        ranges: the applied values, as ranges of the bucket; none if the sum is not finite or has no weight.
        on_device: instead of both, W and a mask of the values, so that the host does not wait for the device.
    """

    weight: float | None
    ranges: tuple[tuple[int, int], ...] = ()
    on_device: tuple[Tensor, Tensor] | None = None

    def update_residual(self, residual: Tensor, left: Tensor, share: float | Tensor, begin: int = 0) -> None:
        """Update `residual` in place, by the rule above.

        `left` is v - C(v) of the values from `begin` on, in any shape.
        """
        if self.on_device is not None:
            weight, mask = self.on_device
            owed = residual * (1 - share / weight) + left / weight
            residual.copy_(torch.where(mask[begin : begin + left.numel()].view(left.shape), owed, residual))
            return
        for first, last in self.ranges:
            start, stop = max(first - begin, 0), min(last - begin, left.numel())
            if stop - start == left.numel():
                _update_residual(residual, left, float(share), self.weight or 1.0)
            elif start < stop:
                _update_residual(
                    residual.view(-1)[start:stop], left.reshape(-1)[start:stop], float(share), self.weight or 1.0
                )


def outcome_of(tail: Tensor, total: Tensor, spans: tuple[tuple[int, int], ...] = ()) -> Outcome:
    """Return the outcome for a bucket's summed tail and values.

    `spans`: each parameter's place, in the order of the tail's counts. Without a tail (a plain tensor) the sum is
    applied unchanged.
    """
    if total.is_meta or not total.numel():
        return Outcome(1.0)
    if total.device.type != "cpu":
        return outcome_on_device(tail, total, spans)
    weight = float(tail[WEIGHT]) if tail.numel() else 1.0
    if weight <= 0 or not bool(total.sum().isfinite()):
        return Outcome(weight)
    if not spans:
        return Outcome(weight, ((0, total.numel()),))
    ranges: list[tuple[int, int]] = []
    for (start, stop), num_users in zip(spans, tail[USED:].tolist(), strict=True):
        if num_users > 0:
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, stop))
    return Outcome(weight, tuple(ranges))


def outcome_on_device(tail: Tensor, total: Tensor, spans: tuple[tuple[int, int], ...]) -> Outcome:
    """The same, with operations on tensors only."""
    weight = tail[WEIGHT] if tail.numel() else total.new_ones(())
    applied = (total.sum().isfinite() & (weight > 0)).expand(total.numel())
    if spans:
        lengths = torch.tensor([stop - start for start, stop in spans], device=total.device)
        applied = applied & (tail[USED:] > 0).repeat_interleave(lengths, output_size=total.numel())
    safe = torch.where(weight > 0, weight, torch.ones_like(weight))
    return Outcome(None, on_device=(safe, applied))


def spans_of(piece: BucketSlice) -> tuple[tuple[int, int], ...]:
    """Return each parameter's place in its bucket's values; empty if there is no tail that counts its users."""
    if piece.tail == piece.stop:
        return ()
    return tuple((slot.offset - piece.start, slot.offset - piece.start + slot.numel) for slot in piece.slots)


def _update_residual(residual: Tensor, left: Tensor, share: float, weight: float) -> None:
    if _is_near(share, weight, left.dtype):
        residual.copy_(left)
        if not _is_near(weight, 1.0, left.dtype):
            residual.div_(weight)
    else:
        residual.mul_(1 - share / weight).add_(left, alpha=1 / weight)


def _is_near(one: float, other: float, dtype: torch.dtype) -> bool:
    """Return True if weights are equal up to rounding, as `replica` decides whether to divide a sum."""
    return abs(one - other) <= 64 * torch.finfo(dtype).eps * other
