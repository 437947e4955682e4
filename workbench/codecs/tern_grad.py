"""TernGrad: -1, 0 or 1 at random, times a group's largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import final

import torch
from torch import Generator, Tensor

from workbench.codecs.base import Codec
from workbench.codecs.groups import check_group, largest, num_groups, pack, times, typed, unpack

BITS = 2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TernGrad(Codec):
    """y_i = s sign(x_i) b_i,   s = max|x|,   b_i = 1 with probability |x_i| / s, else 0. 2 bits a value, and 4 bytes for s.

    Unbiased; E ||x - y||**2 = s ||x||_1 - ||x||**2, at most (sqrt(d) - 1) / 2 times ||x||**2 for d values with one s.
    `QSGD(levels=1)` is the same with the norm in place of s, so it sends fewer values that are not 0, with a larger
    error. The group of a NaN or an infinity is decoded to NaN.

    The paper has one s for each layer: use one bucket for each parameter (`bucket_bytes=0`), or `group`. It also clips
    gradients and shares s among workers; neither is done here.

    Attributes:
        group: d, number of values that share a scale of 4 bytes; none: all values of a message.

    Paper: wen2017terngrad, eq. 2-4.
    """

    group: int | None = None

    def __post_init__(self) -> None:
        check_group(self.group)

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
        """Return an upper bound of E ||x - y||**2 / ||x||**2 for one group of this size.

        It is reached by one value of 1, and numel - 1 values of 1 / (sqrt(numel) + 1).
        """
        return (sqrt(numel) - 1) / 2

    def wire_bytes(self, numel: int) -> int:
        return 4 * num_groups(numel, self.group) + -(-numel * BITS // 8)

    def encode(self, values: Tensor, noise: Generator | None = None) -> Tensor:
        size = values.numel()
        wire = torch.empty(self.wire_bytes(size), dtype=torch.uint8, device=values.device)
        if wire.is_meta or not size:
            return wire
        values = values.float()
        scales = largest(values, self.group)
        probabilities = times(values, 1 / scales, self.group).abs_()
        is_sent = probabilities > torch.rand(size, generator=noise, device=values.device)
        symbols = torch.where(is_sent, values.sign(), 0.0).add_(1).to(torch.uint8)
        head = 4 * scales.numel()
        wire[:head].view(torch.float32).copy_(scales)
        wire[head:] = pack(symbols, BITS)
        return wire

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        if wire.is_meta or not like.numel():
            return torch.empty_like(like)
        head = 4 * num_groups(like.numel(), self.group)
        signs = unpack(wire[head:], BITS, like.numel()).to(torch.float32).sub_(1)
        return times(signs, typed(wire[:head], torch.float32), self.group, out=signs).to(like.dtype)
