"""Error feedback: what a codec leaves out is added to what comes next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Generator, Tensor

from workbench.codecs.base import Codec
from workbench.errors import ConfigError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFeedback:
    """v = g[t] + e[t],  send C(v),  e[t+1] = v - C(v)

    Whatever was left out is sent later: the sum of all that was sent, and the last e, is the sum of all gradients. With a codec
    that contracts (||v - C(v)||**2 <= (1 - delta) ||v||**2), e stays bounded and the loss falls at the rate of SGD.

    No codec, but one that remembers: the residual e is kept by who encodes, from one step to the next of the same values. So it
    goes once around a sum, `Once(codec=ErrorFeedback(codec=...))`, and not inside a collective's hops, whose partial sums have
    no next step. What of e is not finite (a step that diverged, or an overflow in fp16 training that is skipped) is forgotten.

    Paper: karimireddy2019error, algorithm 2; seide2014onebit.
    """

    codec: Codec

    def __post_init__(self) -> None:
        given: object = self.codec
        if isinstance(given, ErrorFeedback):
            raise ConfigError("error feedback around error feedback: the inner one leaves nothing out; give ErrorFeedback the codec itself")
        if not isinstance(given, Codec):
            raise ConfigError(f"codec={given!r}: error feedback goes around a codec, such as ErrorFeedback(codec=TopK(fraction=0.01))")
        if not given.contracts:
            raise ConfigError(
                f"{given!r} may err by more than the values themselves, and fed back the error would grow: use it without "
                f"feedback, or with a smaller group, more levels, or rounding to nearest"
            )

    def encode(self, values: Tensor, residual: Tensor, noise: Generator | None = None) -> Tensor:
        """Encode `values` + `residual`. In place, `values` become that sum and `residual` what is left out of it."""
        values.add_(residual)
        wire = self.codec.encode(values, noise)
        leave(values, self.codec.decode(wire, values), residual)
        return wire


def leave(values: Tensor, sent: Tensor, residual: Tensor) -> None:
    """residual <- values - sent, and 0 where that is not finite: one overflow must not stay for ever."""
    torch.sub(values, sent, out=residual)
    residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
