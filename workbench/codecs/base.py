"""The base of all codecs: values to fewer bytes and back, with a known error bound."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Generator, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec(ABC):
    """Writes 1-D floating-point values as bytes.

    It has settings and no state: the encoder's caller keeps an error-feedback residual. Codecs compute in float32:
    float64 values are rounded to it first. A NaN or an infinity never becomes a finite number: values with the same
    scale are decoded to NaN, so that divergence is visible.
    """

    @property
    def unbiased(self) -> bool:
        """Return True if the mean of the decoded values, over the noise, is the value itself."""
        return False

    @property
    def stochastic(self) -> bool:
        """Return True if `encode` draws from its generator."""
        return False

    @property
    def contracts(self) -> bool:
        """Return True if the mean squared error is below the mean square of the values, as error feedback needs."""
        return True

    @property
    def reencodes(self) -> bool:
        """Return True if a sum of decoded messages may be encoded again at about the same loss."""
        return True

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """Return the bytes of the message for any `numel` values; 0 for none."""

    @abstractmethod
    def encode(self, values: Tensor, noise: Generator | None = None) -> Tensor:
        """Encode (n,) float32 or float64 as (wire_bytes(n),) uint8, on the same device; `values` are not changed.

        `noise` is for stochastic codecs. On the meta device the result has the size and no content.
        """

    @abstractmethod
    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """Decode (wire_bytes(n),) uint8 to new (n,) values with `like`'s length, dtype and device."""

    # The following methods write into existing memory. They give the same bits as `encode`, `decode` and a sum of their
    # results. Codecs that process values in tiles override them. The memory of a wire begins at a multiple of 4 bytes.

    def encode_into(self, values: Tensor, wire: Tensor, noise: Generator | None = None) -> None:
        """wire <- `encode(values)`"""
        wire.copy_(self.encode(values, noise))

    def decode_into(self, wire: Tensor, out: Tensor) -> None:
        """out <- `decode(wire)`"""
        out.copy_(self.decode(wire, out))

    def add(self, wire: Tensor, total: Tensor) -> None:
        """total <- total + `decode(wire)`"""
        total.add_(self.decode(wire, total))

    def encode_sum(self, wire: Tensor, values: Tensor, out: Tensor, noise: Generator | None = None) -> None:
        """out <- `encode(values + decode(wire))`; then `values` are undefined.

        `out` is not `wire`.
        """
        self.add(wire, values)
        self.encode_into(values, out, noise)

    def _encoded(self, values: Tensor, noise: Generator | None) -> Tensor:
        """Implement `encode` with the codec's own `encode_into`."""
        wire = torch.empty(self.wire_bytes(values.numel()), dtype=torch.uint8, device=values.device)
        self.encode_into(values, wire, noise)
        return wire

    def _decoded(self, wire: Tensor, like: Tensor) -> Tensor:
        """Implement `decode` with the codec's own `decode_into`."""
        out = torch.empty_like(like)
        self.decode_into(wire, out)
        return out


class SummableCodec(Codec, ABC):
    """A codec whose messages may be summed without decoding: decoding the sum gives the sum of the decoded values.

    The ranks must first agree on a scale, the largest of their `magnitude`s. The sum must fit, so `encode_shared` gets
    the scale and the number of ranks.
    """

    __slots__ = ()

    @abstractmethod
    def check_ranks(self, num_ranks: int) -> None:
        """Raise `ConfigError` if the messages of this number of ranks cannot be summed."""

    @abstractmethod
    def message_itemsize(self) -> int:
        """Return the bytes of one integer of a shared message."""

    @abstractmethod
    def magnitude(self, values: Tensor) -> Tensor:
        """Return the scale that these values alone need, (n,) -> (1,) float32; NaN if one of them is not finite."""

    @abstractmethod
    def encode_shared(self, values: Tensor, scale: Tensor, num_ranks: int, noise: Generator | None = None) -> Tensor:
        """Encode (n,) -> (n,) integers; `num_ranks` of them add without overflow.

        `scale` has 1 element and is equal on all ranks.
        """

    @abstractmethod
    def decode_shared(self, total: Tensor, scale: Tensor, num_ranks: int, like: Tensor) -> Tensor:
        """Decode the sum of such messages to the sum of values, as `like`."""
