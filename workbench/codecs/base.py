"""What every codec has in common: values to fewer bytes and back, with an error one can tell beforehand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Generator, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec(ABC):
    """Writes 1-D floating-point values as bytes. Settings as data; no state: what feeds back is kept by who encodes.

    Codecs compute in float32: float64 values are rounded to it first. A NaN or an infinity never becomes a finite number:
    what shares a scale with it is decoded to NaN, so that a run that diverges is seen to.
    """

    @property
    def unbiased(self) -> bool:
        """Whether the mean over the noise of what is decoded is the value itself."""
        return False

    @property
    def stochastic(self) -> bool:
        """Whether `encode` draws from its generator."""
        return False

    @property
    def contracts(self) -> bool:
        """Whether the squared error is, in the mean, less than the squared values: what error feedback needs to stay bounded."""
        return True

    @property
    def reencodes(self) -> bool:
        """Whether a sum of decoded messages may be encoded once more at about the same loss."""
        return True

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """Length of the message for so many values, whatever they are; 0 for none."""

    @abstractmethod
    def encode(self, values: Tensor, noise: Generator | None = None) -> Tensor:
        """(n,) float32 or float64 -> (wire_bytes(n),) uint8, on the same device; `values` stay as they are.

        `noise` is given to stochastic codecs. On the meta device the answer has the size and no content.
        """

    @abstractmethod
    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """(wire_bytes(n),) uint8 -> new (n,) values of `like`'s length, dtype and device."""

    # What follows writes into memory that is there, and gives the same bits as `encode`, `decode` and a sum of what they give.
    # Codecs that go through their values tile by tile have their own; a wire's memory begins at a multiple of 4 bytes.

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
        """out <- `encode(values + decode(wire))`. `values` are used up: what they hold then is not told. `out` is not `wire`."""
        self.add(wire, values)
        self.encode_into(values, out, noise)

    def _encoded(self, values: Tensor, noise: Generator | None) -> Tensor:
        """`encode` of a codec that has an `encode_into` of its own."""
        wire = torch.empty(self.wire_bytes(values.numel()), dtype=torch.uint8, device=values.device)
        self.encode_into(values, wire, noise)
        return wire

    def _decoded(self, wire: Tensor, like: Tensor) -> Tensor:
        """`decode` of a codec that has a `decode_into` of its own."""
        out = torch.empty_like(like)
        self.decode_into(wire, out)
        return out


class SummableCodec(Codec, ABC):
    """A codec whose messages may be summed undecoded: decoding the sum gives the sum of what would be decoded.

    The ranks must agree on a scale first, the largest of their `magnitude`s, and the sum must fit: both are told to
    `encode_shared`.
    """

    __slots__ = ()

    @abstractmethod
    def check_ranks(self, num_ranks: int) -> None:
        """Raise `ConfigError` if the messages of so many ranks cannot be summed."""

    @abstractmethod
    def message_itemsize(self) -> int:
        """Bytes of one integer of a shared message."""

    @abstractmethod
    def magnitude(self, values: Tensor) -> Tensor:
        """(n,) -> (1,) float32: the scale that these values alone would need; NaN if one of them is not finite."""

    @abstractmethod
    def encode_shared(self, values: Tensor, scale: Tensor, num_ranks: int, noise: Generator | None = None) -> Tensor:
        """(n,) -> (n,) integers of which `num_ranks` may be added without overflow; `scale` is a 1-element tensor equal on all ranks."""

    @abstractmethod
    def decode_shared(self, total: Tensor, scale: Tensor, num_ranks: int, like: Tensor) -> Tensor:
        """The sum of such messages -> the sum of values, as `like`."""
