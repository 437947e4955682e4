"""Natural compression: the sign, and one of the two nearest powers of two at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Generator, Tensor

from workbench.codecs.base import Codec
from workbench.codecs.groups import pack, unpack

MANTISSA_BITS = 23
MAGNITUDE = 0x7FFFFFFF
INFINITE = 0x7F800000


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NaturalCompression(Codec):
    """y = sign(x) 2**e or sign(x) 2**(e+1), for 2**e <= |x| < 2**(e+1), up with probability |x| / 2**e - 1. 9 bits a value.

    Unbiased; E (x - y)**2 <= x**2 / 8 from 2**-126 on, for each value, without a scale. Below 2**-126 it is 0 or
    2**-126, unbiased too. Zero and powers of two are kept. From 2**127 on a value may become infinite. Infinities stay,
    and a NaN becomes one.

    A float32 has the probability in its mantissa m: adding a random 23-bit number to its bits carries into the exponent
    with probability m / 2**23. The sign and the 8 bits of the exponent are sent.

    Paper: horvath2019natural, definition 1 and theorem 1.
    """

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def stochastic(self) -> bool:
        return True

    def wire_bytes(self, numel: int) -> int:
        return numel + -(-numel // 8)

    def encode(self, values: Tensor, noise: Generator | None = None) -> Tensor:
        size = values.numel()
        wire = torch.empty(self.wire_bytes(size), dtype=torch.uint8, device=values.device)
        if wire.is_meta or not size:
            return wire
        bits = values.float().view(torch.int32)
        draws = torch.randint(2**MANTISSA_BITS, (size,), generator=noise, dtype=torch.int32, device=values.device)
        magnitudes = bits & MAGNITUDE
        rounded = torch.where(magnitudes < INFINITE, magnitudes + draws, INFINITE)
        wire[:size] = rounded >> MANTISSA_BITS
        wire[size:] = pack((bits < 0).view(torch.uint8), 1)
        return wire

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        if wire.is_meta or not like.numel():
            return torch.empty_like(like)
        size = like.numel()
        exponents = wire[:size].to(torch.int32) << MANTISSA_BITS
        signs = unpack(wire[size:], 1, size).to(torch.int32) << 31
        return (exponents | signs).view(torch.float32).to(like.dtype)
