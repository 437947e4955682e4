"""Truncation: the high 16 bits of a float32."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Generator, Tensor

from workbench.codecs.base import Codec
from workbench.codecs.groups import check_choice, typed

HIGH = 1 if sys.byteorder == "little" else 0  # which half of a float32 in memory holds its sign and exponent


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Truncate16(Codec):
    """x -> sign, 8 bits of exponent, 7 of mantissa: bfloat16. 2 bytes a value.

    Toward zero, the other 16 bits are dropped: |x - y| < 2**-7 |x|, never larger than x, so biased. To nearest (ties to even):
    half that error, and float32's largest numbers, from 2**128 - 2**119 on, become infinite. Relative bounds hold from
    2**-126 on. Infinities stay; a NaN stays one or, toward zero, may become an infinity. No neighbour is touched.

    Paper: li2018pipesgd, section 3 (truncation).
    """

    rounding: Literal["toward-zero", "nearest"] = "toward-zero"

    def __post_init__(self) -> None:
        check_choice("rounding", self.rounding, ("toward-zero", "nearest"))

    def wire_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor, noise: Generator | None = None) -> Tensor:
        wire = torch.empty(2 * values.numel(), dtype=torch.uint8, device=values.device)
        if self.rounding == "nearest":
            wire.view(torch.bfloat16).copy_(values.float())
        else:
            wire.view(torch.int16).copy_(values.float().view(torch.int16)[HIGH::2])
        return wire

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        return typed(wire, torch.bfloat16).to(like.dtype)
