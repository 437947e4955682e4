"""QSGD: stochastic levels of a group's norm."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import final

import torch
from torch import Generator, Tensor

from workbench.arguments import check_whole
from workbench.codecs.base import Codec
from workbench.codecs.groups import SMALLEST, check_group, largest, num_groups, pack, per_group, times, typed, unpack


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class QSGD(Codec):
    """q_i = sign(x_i) * (s |x_i| / ||x|| rounded up or down at random), y = q ||x|| / s, in groups of d values with a norm each.

    Unbiased; E ||x - y||**2 <= min(d / s**2, sqrt(d) / s) ||x||**2 in each group. The code is not the paper's Elias
    code: it has a fixed width, so the length is known in advance. It takes 2 bits a value for s = 1 (ternary), 4 for
    s <= 7, 8 for s <= 127, and 4 bytes a group. A group with a NaN or an infinity, or with a norm that float32 cannot
    hold, is decoded to NaN.

    Attributes:
        levels: s, number of magnitudes above 0; 1, 7 and 127 fill 2, 4 and 8 bits a value.
        group: d, number of values that share a norm of 4 bytes; none: all values of a message.

    Paper: alistarh2017qsgd, section 3.1 and lemma 3.1; its "buckets" are the groups here.
    """

    levels: int = 7
    group: int | None = 512

    def __post_init__(self) -> None:
        check_whole("levels", self.levels, 1, "1 to 127; 1, 7 and 127 fill their 2, 4 and 8 bits", most=127)
        check_group(self.group)

    @property
    def bits(self) -> int:
        """Bits of one value: -levels to levels must fit."""
        return next(bits for bits in (2, 4, 8) if 2 * self.levels + 1 <= 2**bits)

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def stochastic(self) -> bool:
        return True

    @property
    def contracts(self) -> bool:
        return self.group is not None and self.variance_bound(self.group) < 1

    def variance_bound(self, numel: int) -> float:
        """Return an upper bound of E ||x - y||**2 / ||x||**2 for one group of this size (lemma 3.1)."""
        return min(numel / self.levels**2, sqrt(numel) / self.levels)

    def wire_bytes(self, numel: int) -> int:
        return 4 * num_groups(numel, self.group) + -(-numel * self.bits // 8)

    def encode(self, values: Tensor, noise: Generator | None = None) -> Tensor:
        size = values.numel()
        wire = torch.empty(self.wire_bytes(size), dtype=torch.uint8, device=values.device)
        if wire.is_meta or not size:
            return wire
        values = values.float()
        scales = largest(values, self.group)  # norms are those of x / max|x|: squares of x may overflow or underflow
        scaled = times(values, 1 / scales, self.group)
        norms = per_group(scaled, self.group, lambda part: torch.linalg.vector_norm(part, dim=1))
        times(scaled, self.levels / norms.clamp_min(SMALLEST), self.group, out=scaled)
        # for both signs: up with the right probability
        scaled.add_(torch.rand(size, generator=noise, device=values.device)).floor_()
        symbols = scaled.clamp_(-self.levels, self.levels).add_(self.levels).to(torch.uint8)
        head = 4 * scales.numel()
        norms.mul_(scales)
        wire[:head].view(torch.float32).copy_(torch.where(norms.isfinite(), norms, torch.nan))
        wire[head:] = pack(symbols, self.bits)
        return wire

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        if wire.is_meta or not like.numel():
            return torch.empty_like(like)
        head = 4 * num_groups(like.numel(), self.group)
        values = unpack(wire[head:], self.bits, like.numel()).to(torch.float32).sub_(self.levels).div_(self.levels)
        return times(values, typed(wire[:head], torch.float32), self.group, out=values).to(like.dtype)
