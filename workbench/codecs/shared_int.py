"""Integers on a scale that all ranks share: they are summed without decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Generator, Tensor

from workbench.codecs.base import SummableCodec
from workbench.codecs.groups import SMALLEST, check_choice, largest, scratch, tiles, typed
from workbench.errors import ConfigError

TYPES = {8: torch.int8, 16: torch.int16, 32: torch.int32}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SharedInt(SummableCodec):
    """q = round(L x / M), M = max over all ranks of max|x|, L = (2**(bits-1) - 1) // p, so p of them fit; y = M / L * sum q.

    An all-reduce of integers sums without decoding, exactly, in any order. To nearest, |error| <= p M / (2 L) of the
    sum; stochastic, twice that, and unbiased. bits / 8 bytes a value. More ranks leave fewer levels: 8 bits have 31
    levels at 4 ranks, 7 at 16 and none beyond 127. If any rank has a NaN or an infinity, the sum is NaN on all ranks.

    gloo's own all-reduce has no 16-bit integers: use 8 or 32 bits there, or `Once(codec=..., inner=Ring())`.
    As a plain codec, p = 1.

    Attributes:
        bits: bits a value; fewer send less, with a larger error and fewer ranks.
        rounding: nearest (smaller error, biased) or stochastic (unbiased).

    Paper: xin2023globalqsgd (global-norm scaling); mishchenko2022intsgd.
    """

    bits: Literal[8, 16, 32] = 8
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, (8, 16, 32))
        check_choice("rounding", self.rounding, ("nearest", "stochastic"))

    @property
    def unbiased(self) -> bool:
        return self.stochastic

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def contracts(self) -> bool:
        return not self.stochastic

    def check_ranks(self, num_ranks: int) -> None:
        if num_ranks > 2 ** (self.bits - 1) - 1:
            wider = next(bits for bits in (16, 32, 64) if num_ranks < 2 ** (bits - 1))
            raise ConfigError(f"sums of {num_ranks} ranks do not fit {self.bits} bits: use SharedInt(bits={wider})")

    def message_itemsize(self) -> int:
        return self.bits // 8

    def wire_bytes(self, numel: int) -> int:
        return numel * self.message_itemsize() + 4 if numel else 0

    def magnitude(self, values: Tensor) -> Tensor:
        if values.is_meta or not values.numel():
            return torch.full((1,), SMALLEST, device=values.device)
        return largest(values, None)

    def encode_shared(self, values: Tensor, scale: Tensor, num_ranks: int, noise: Generator | None = None) -> Tensor:
        levels = self._levels(num_ranks)
        if values.is_meta:
            return torch.empty_like(values, dtype=TYPES[self.bits])
        work = torch.float64 if self.bits == 32 else torch.float32  # a float32 cannot hold 31 bits
        scaled = values.to(work) * (levels / scale.to(work))
        if self.stochastic:
            scaled.add_(torch.rand(values.numel(), generator=noise, device=values.device, dtype=work)).floor_()
        else:
            scaled.round_()
        return scaled.clamp_(-levels, levels).to(TYPES[self.bits])

    def decode_shared(self, total: Tensor, scale: Tensor, num_ranks: int, like: Tensor) -> Tensor:
        if total.is_meta:
            return torch.empty_like(like)
        work = torch.float64 if self.bits == 32 else like.dtype
        return (total.to(work).div_(self._levels(num_ranks)) * scale.to(work)).to(like.dtype)

    def encode(self, values: Tensor, noise: Generator | None = None) -> Tensor:
        return self._encoded(values, noise)

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        return self._decoded(wire, like)

    @torch.inference_mode()
    def encode_into(self, values: Tensor, wire: Tensor, noise: Generator | None = None) -> None:
        if wire.is_meta or not values.numel():
            return
        scale, integers = self.magnitude(values), wire[4:].view(TYPES[self.bits])
        wire[:4].view(torch.float32).copy_(scale)
        if self.bits == 32:
            integers.copy_(self.encode_shared(values.float(), scale, 1, noise))
            return
        levels = self._levels(1)
        factor = levels / scale
        for part, out, room in tiles(values, integers):
            torch.mul(part if part.dtype == torch.float32 else room.copy_(part), factor, out=room)
            if self.stochastic:
                room.add_(scratch(values, "noise")[: room.numel()].uniform_(generator=noise)).floor_()
            else:
                room.round_()
            out.copy_(room.clamp_(-levels, levels))

    @torch.inference_mode()
    def decode_into(self, wire: Tensor, out: Tensor) -> None:
        if wire.is_meta or not out.numel():
            return
        integers, scale = typed(wire[4:], TYPES[self.bits]), typed(wire[:4], torch.float32)
        if self.bits == 32:
            out.copy_(self.decode_shared(integers, scale, 1, out))
            return
        levels, scale = self._levels(1), scale.to(out.dtype)
        for part, whole, _ in tiles(out, integers):
            part.copy_(whole).div_(levels).mul_(scale)

    def _levels(self, num_ranks: int) -> int:
        self.check_ranks(num_ranks)
        return int(2 ** (self.bits - 1) - 1) // num_ranks


def SharedInt8(*, rounding: Literal["nearest", "stochastic"] = "nearest") -> SharedInt:  # noqa: N802 - named as a class
    """`SharedInt` of 8 bits.

    >>> SharedInt8()
    SharedInt(bits=8, rounding='nearest')
    """
    return SharedInt(bits=8, rounding=rounding)
