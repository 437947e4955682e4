"""Truncation: the high 16 bits of a float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Generator, Tensor

from workbench.codecs import kernels
from workbench.codecs.base import Codec
from workbench.codecs.groups import check_choice, tiles, typed

HALF = torch.tensor(16, dtype=torch.int32)  # bits, as a tensor: a number would be converted at every call


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Truncate16(Codec):
    """x -> sign, 8 bits of exponent, 7 of mantissa: bfloat16. 2 bytes a value.

    Toward zero, the other 16 bits are dropped: |x - y| < 2**-7 |x|, never larger than x, so biased. To nearest (ties
    to even): half that error, and float32's largest numbers, from 2**128 - 2**119 on, become infinite. Relative
    bounds hold from 2**-126 on. Infinities stay. A NaN stays a NaN; toward zero it may become an infinity. It does not
    affect other values.

    Attributes:
        rounding: toward-zero drops the last 16 bits; nearest halves the error.

    Paper: li2018pipesgd, section 3 (truncation).
    """

    rounding: Literal["toward-zero", "nearest"] = "toward-zero"

    def __post_init__(self) -> None:
        check_choice("rounding", self.rounding, ("toward-zero", "nearest"))

    def wire_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor, noise: Generator | None = None) -> Tensor:
        return self._encoded(values, noise)

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        return typed(wire, torch.bfloat16).to(like.dtype)

    @torch.inference_mode()
    def encode_into(self, values: Tensor, wire: Tensor, noise: Generator | None = None) -> None:
        if wire.is_meta:
            return
        if found := kernels.of(values):
            found.halve(values, wire, nearest=self.rounding == "nearest")
            return
        if values.dtype == torch.float32 and self.rounding == "nearest":
            wire.view(torch.bfloat16).copy_(values)
            return
        for part, halves, room in tiles(values, wire.view(torch.int16)):
            self._halve(part if part.dtype == torch.float32 else room.copy_(part), room, halves)

    @torch.inference_mode()
    def decode_into(self, wire: Tensor, out: Tensor) -> None:
        if wire.is_meta:
            return
        if found := kernels.of(out):
            found.widen(wire, out)
            return
        out.copy_(typed(wire, torch.bfloat16))

    @torch.inference_mode()
    def add(self, wire: Tensor, total: Tensor) -> None:
        if wire.is_meta:
            return
        if found := kernels.of(total):
            found.widen(wire, total, add=True)
            return
        for part, halves, room in tiles(total, typed(wire, torch.bfloat16)):
            part.add_(room.copy_(halves))

    @torch.inference_mode()
    def encode_sum(self, wire: Tensor, values: Tensor, out: Tensor, noise: Generator | None = None) -> None:
        if values.dtype != torch.float32 or wire.is_meta:
            Codec.encode_sum(self, wire, values, out)
            return
        if found := kernels.of(values):
            found.halve(values, out, nearest=self.rounding == "nearest", added=wire)
            return
        for part, halves, sums, room in tiles(values, typed(wire, torch.bfloat16), out.view(torch.int16)):
            torch.add(part, room.copy_(halves), out=room)
            self._halve(room, room, sums)

    def _halve(self, values: Tensor, room: Tensor, halves: Tensor) -> None:
        """Write the high halves of float32 values; `room` may be `values`."""
        if self.rounding == "nearest":
            halves.view(torch.bfloat16).copy_(values)
            return
        bits = room.view(torch.int32)
        # then narrow: quicker than taking every other half
        torch.bitwise_right_shift(values.view(torch.int32), HALF, out=bits)
        halves.copy_(bits)
