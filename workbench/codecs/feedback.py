"""Error feedback: the codec's error is added to the next gradient."""

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

    Values that were left out are sent later: the sum of all sent values, plus the last e, is the sum of all
    gradients. With a codec that contracts (||v - C(v)||**2 <= (1 - delta) ||v||**2), e stays bounded and the loss
    decreases at the rate of SGD.

    It is not a codec, because it has memory: the caller keeps the residual e of the same values from one step to the
    next. It therefore goes once around a sum, `Once(codec=ErrorFeedback(codec=...))`, and not inside a collective's
    hops, whose partial sums have no next step. If v is not finite (a step that diverged, or an overflow in fp16
    training that is skipped), e does not change.

    A sum over ranks is divided by its weight W, so e is kept in units of the mean. Then v = g + a e, where the share a
    is the expected W. Once W is known, e[t+1] = (v - C(v)) / W + (1 - a / W) e[t]. So nothing is lost or applied twice,
    for any W.

    Paper: karimireddy2019error, algorithm 2; seide2014onebit.
    """

    codec: Codec

    def __post_init__(self) -> None:
        given: object = self.codec
        if isinstance(given, ErrorFeedback):
            raise ConfigError(
                "codec=ErrorFeedback(...): give ErrorFeedback a codec without feedback, such as TopK(fraction=0.01)"
            )
        if not isinstance(given, Codec):
            raise ConfigError(
                f"codec={given!r}: error feedback goes around a codec, such as ErrorFeedback(codec=TopK(fraction=0.01))"
            )
        if not given.contracts:
            raise ConfigError(
                f"errors of {given!r} can be larger than the values, so with feedback they would grow: use it without "
                "feedback, or with a smaller group, more levels, or rounding to nearest"
            )

    def encode(self, values: Tensor, residual: Tensor, noise: Generator | None = None) -> Tensor:
        """Apply the rule above without a division by a weight. In place, `values` become v and `residual` the error."""
        wire, left = self.encode_share(values, residual, 1.0, noise)
        if bool(left.sum().isfinite()):
            residual.copy_(left)
        return wire

    def encode_share(
        self,
        values: Tensor,
        residual: Tensor,
        share: float | Tensor,
        noise: Generator | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Encode v = `values` + share * `residual`; the answer is (C(v), v - C(v)). In place, `values` become v.

        `residual` stays as it is until the sum's weight is known. `out` is memory for v - C(v).
        """
        add_share(values, residual, share)
        wire = self.codec.encode(values, noise)
        sent = self.codec.decode(wire, values)
        return wire, torch.sub(values, sent, out=sent if out is None else out)


def add_share(values: Tensor, residual: Tensor, share: float | Tensor) -> None:
    """values <- values + share * residual"""
    if isinstance(share, Tensor):
        values.addcmul_(residual, share)
    elif share:
        values.add_(residual, alpha=share)
