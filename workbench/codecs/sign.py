"""Signs and one magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Generator, Tensor

from workbench.codecs.base import Codec
from workbench.codecs.groups import check_group, num_groups, pack, per_group, times, typed, unpack


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sign(Codec):
    """y_i = mean|x| * sign(x_i), with sign(0) = 1. 1 bit a value, and 4 bytes for the mean.

    ||x - y||**2 = (1 - ||x||_1**2 / (n ||x||_2**2)) ||x||_2**2, so at most (1 - 1/n) ||x||_2**2. Biased: needs `ErrorFeedback`.
    The group of a NaN or an infinity, or one whose sum float32 cannot hold, is decoded to NaN.

    Attributes:
        group: number of values that share a mean of 4 bytes; none: all values of a message (the paper: of a layer).

    Paper: karimireddy2019error, algorithm 1 and assumption A (EF-signSGD).
    """

    group: int | None = None

    def __post_init__(self) -> None:
        check_group(self.group)

    @property
    def reencodes(self) -> bool:
        return False

    def wire_bytes(self, numel: int) -> int:
        return 4 * num_groups(numel, self.group) + -(-numel // 8)

    def encode(self, values: Tensor, noise: Generator | None = None) -> Tensor:
        wire = torch.empty(self.wire_bytes(values.numel()), dtype=torch.uint8, device=values.device)
        if wire.is_meta or not values.numel():
            return wire
        values = values.float()
        means = per_group(values.abs(), self.group, lambda part: part.mean(1))
        head = 4 * means.numel()
        wire[:head].view(torch.float32).copy_(torch.where(means.isfinite(), means, torch.nan))
        wire[head:] = pack((values < 0).view(torch.uint8), 1)
        return wire

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        if wire.is_meta or not like.numel():
            return torch.empty_like(like)
        head = 4 * num_groups(like.numel(), self.group)
        values = unpack(wire[head:], 1, like.numel()).to(torch.float32).mul_(-2).add_(1)
        return times(values, typed(wire[:head], torch.float32), self.group, out=values).to(like.dtype)
