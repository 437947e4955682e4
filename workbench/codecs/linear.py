"""Linear quantisation to 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Generator, Tensor

from workbench.codecs.base import Codec
from workbench.codecs.groups import check_choice, check_group, largest, num_groups, times, typed

LEVELS = 127


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Linear8(Codec):
    """q = round(127 x / M), M = max|x|, y = q M / 127. 1 byte a value, and 4 for M.

    To nearest: |x - y| <= M/254, biased. Stochastic, floor(127 x / M + u) with u uniform on [0, 1): |x - y| < M/127, unbiased.
    The group of a NaN or an infinity is decoded to NaN.

    The paper does not say whether M is a message's or a tensor's. `group=None` takes one M for all values that are encoded
    together: with a collective that cuts its value, of a block. One M a tensor: one bucket a parameter (`bucket_bytes=0`)
    and a collective that does not cut; `group` asks for one M per so many values, at 4 / group bytes a value, which is finer
    than either and independent of how values are cut into messages that are multiples of it.

    Paper: li2018pipesgd, section 3 (scalar quantisation).
    """

    rounding: Literal["nearest", "stochastic"] = "nearest"
    group: int | None = None

    def __post_init__(self) -> None:
        check_choice("rounding", self.rounding, ("nearest", "stochastic"))
        check_group(self.group)

    @property
    def unbiased(self) -> bool:
        return self.stochastic

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def contracts(self) -> bool:
        """To nearest, no error is larger than its value. Stochastic, n values err by n (M/127)**2 / 4, less than M**2 in small groups."""
        return not self.stochastic or (self.group is not None and self.group < 4 * LEVELS**2)

    def wire_bytes(self, numel: int) -> int:
        return numel + 4 * num_groups(numel, self.group)

    def encode(self, values: Tensor, noise: Generator | None = None) -> Tensor:
        size = values.numel()
        wire = torch.empty(self.wire_bytes(size), dtype=torch.uint8, device=values.device)
        if wire.is_meta or not size:
            return wire
        values = values.float()
        scales = largest(values, self.group)
        head = 4 * scales.numel()
        wire[:head].view(torch.float32).copy_(scales)  # M itself, not M/127: M is then decoded exactly, and encoding again changes nothing
        scaled = times(values, LEVELS / scales, self.group)
        if self.stochastic:
            scaled.add_(torch.rand(size, generator=noise, device=values.device)).floor_()
        else:
            scaled.round_()
        wire[head:].view(torch.int8).copy_(scaled.clamp_(-LEVELS, LEVELS))
        return wire

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        if wire.is_meta or not like.numel():
            return torch.empty_like(like)
        head = 4 * num_groups(like.numel(), self.group)
        values = wire[head:].view(torch.int8).to(torch.float32).div_(LEVELS)
        return times(values, typed(wire[:head], torch.float32), self.group, out=values).to(like.dtype)
