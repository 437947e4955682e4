"""Top-k: only the values of largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Generator, Tensor

from workbench.arguments import check_whole, is_number
from workbench.codecs import compiled, kernels
from workbench.codecs.base import Codec
from workbench.codecs.groups import typed
from workbench.errors import ConfigError

STRIDE = 64  # one value in this many is used to guess the threshold


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TopK(Codec):
    """y_i = x_i for the k largest |x_i|, else 0. 8 bytes for each of the k: its position (int32) and its value (float32).

    ||x - y||**2 <= (1 - k/n) ||x||**2. Biased: needs `ErrorFeedback`. Of equal magnitudes the first one is sent. NaN counts as larger than
    infinity, and infinity as larger than any number, so at least one of them is sent if there is any.

    Attributes:
        fraction: share of a message's values that are sent, k / n, rounded to the nearest k, 1 or more.
        k: number of a message's values that are sent, instead of a share.

    Paper: stich2018sparsified, definition 2.1 (k-contraction, top_k); lin2018deep (deep gradient compression).
    """

    fraction: float | None = None
    k: int | None = None

    def __post_init__(self) -> None:
        if self.fraction is not None and self.k is not None:
            raise ConfigError("TopK takes fraction=... or k=..., not both")
        if self.fraction is not None and not (is_number(self.fraction) and 0 < self.fraction <= 1):
            raise ConfigError(
                f"fraction={self.fraction!r}: give the share of the values that is sent, above 0 and at most 1"
            )
        if self.k is not None:
            check_whole("k", self.k, 1, "the number of values that are sent, 1 or more")

    @property
    def reencodes(self) -> bool:
        return False

    def num_kept(self, numel: int) -> int:
        """Return k for a message of `numel` values; without settings, one in a hundred."""
        if not numel:
            return 0
        wanted = self.k or max(1, round((self.fraction or 0.01) * numel))
        return min(wanted, numel)

    def wire_bytes(self, numel: int) -> int:
        return 8 * self.num_kept(numel)

    def encode(self, values: Tensor, noise: Generator | None = None) -> Tensor:
        return self._encoded(values, noise)

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        return self._decoded(wire, like)

    @torch.inference_mode()
    def encode_into(self, values: Tensor, wire: Tensor, noise: Generator | None = None) -> None:
        kept = self.num_kept(values.numel())
        if wire.is_meta or not kept or (kernels.on_cpu(values) and compiled.select(values, kept, wire)):
            return
        values = values.float().contiguous()
        positions = largest_positions(values, kept)
        wire[: 4 * kept].view(torch.int32).copy_(positions)
        wire[4 * kept :].view(torch.float32).copy_(values[positions])

    @torch.inference_mode()
    def decode_into(self, wire: Tensor, out: Tensor) -> None:
        if wire.is_meta or not out.numel():
            return
        kept = wire.numel() // 8
        positions, values = typed(wire[: 4 * kept], torch.int32), typed(wire[4 * kept :], torch.float32)
        out.zero_().index_copy_(0, positions.long(), values.to(out.dtype))


def largest_positions(values: Tensor, num: int) -> Tensor:
    """Return the positions, ascending, of the `num` float32 values of largest magnitude; of equal ones the first.

    Selecting among all values is slow. So one value in `STRIDE` gives a threshold that slightly more than `num` values
    should exceed, and these are the candidates. If they are too few, all values are candidates.
    """
    magnitudes = values.view(torch.int32) & 0x7FFFFFFF  # the order of the bits: NaN above infinity
    sample = magnitudes[::STRIDE]
    rank = 2 * num // STRIDE + 8
    candidates = (
        (magnitudes >= sample.kthvalue(sample.numel() - rank).values).nonzero().view(-1)
        if rank < sample.numel()
        else None
    )
    if candidates is None or candidates.numel() < num:
        candidates = torch.arange(values.numel(), device=values.device)
    chosen = magnitudes[candidates]
    threshold = chosen.kthvalue(chosen.numel() - num + 1).values
    above, equal = candidates[chosen > threshold], candidates[chosen == threshold]
    return torch.cat([above, equal[: num - above.numel()]]).sort().values
