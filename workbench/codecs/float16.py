"""IEEE half precision: float16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Generator, Tensor

from workbench.codecs.base import Codec
from workbench.codecs.groups import typed


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Float16(Codec):
    """x -> the nearest IEEE half: sign, 5 bits of exponent, 10 of mantissa. 2 bytes a value.

    To nearest, ties to even: |x - y| <= 2**-11 |x| from 2**-14 to 65504, and at most 2**-25 below 2**-14. Values up to
    2**-25 become 0, and from 65520 on they become infinite, so divergence stays visible. Biased. Compared with
    `Truncate16(rounding="nearest")` (bfloat16) the error is an eighth, in a smaller range: small gradients need a
    scaled loss (`precision="fp16"`), or a scale of their own (`Linear8`).

    Paper: micikevicius2017mixed, section 3 (half precision, and the range of gradients).
    """

    def wire_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor, noise: Generator | None = None) -> Tensor:
        return self._encoded(values, noise)

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        return typed(wire, torch.float16).to(like.dtype)

    @torch.inference_mode()
    def encode_into(self, values: Tensor, wire: Tensor, noise: Generator | None = None) -> None:
        wire.view(torch.float16).copy_(values.float())

    @torch.inference_mode()
    def decode_into(self, wire: Tensor, out: Tensor) -> None:
        out.copy_(typed(wire, torch.float16))
