"""Linear quantisation to 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Generator, Tensor

from workbench.codecs import kernels
from workbench.codecs.base import Codec
from workbench.codecs.groups import (
    Piece,
    as_scales,
    check_choice,
    check_group,
    keep_largest,
    largest,
    num_groups,
    pieces,
    scratch,
    typed,
)

LEVELS = 127
POWER = 128  # a power of two: scale / POWER is exact, also for `SMALLEST`


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Linear8(Codec):
    """q = round(127 x / M), M = max|x|, y = q M / 127. 1 byte a value, and 4 for M.

    To nearest: |x - y| <= M/254, biased. Stochastic, floor(127 x / M + u) with u uniform on [0, 1): |x - y| < M/127,
    unbiased. The group of a NaN or an infinity is decoded to NaN.

    The paper does not say whether M is that of a message or of a tensor. `group=None` uses one M for all values that
    are encoded together. With a collective that cuts its value, these are the values of a block. For one M for each
    tensor, use one bucket for each parameter (`bucket_bytes=0`) and a collective that does not cut. `group` uses one M
    for this number of values, at 4 / group bytes a value. The result then does not depend on how values are cut into
    messages, if message sizes are multiples of `group`.

    Attributes:
        rounding: nearest (smaller error, biased) or stochastic (unbiased).
        group: number of values that share a scale of 4 bytes; none: all values of a message.

    Paper: li2018pipesgd, section 3 (scalar quantisation).
    """

    rounding: Literal["nearest", "stochastic"] = "nearest"
    group: int | None = None

    def __post_init__(self) -> None:
        check_choice("rounding", self.rounding, ("nearest", "stochastic"))
        check_group(self.group)

    @property
    def unbiased(self) -> bool:
        return self.stochastic

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def contracts(self) -> bool:
        """Return True if the mean squared error is below the mean square of the values.

        With rounding to nearest, no error exceeds its value. With stochastic rounding, the squared errors of n values
        add up to at most n (M/127)**2 / 4 on average. In small groups that is less than M**2.
        """
        return not self.stochastic or (self.group is not None and self.group < 4 * LEVELS**2)

    def wire_bytes(self, numel: int) -> int:
        return numel + 4 * num_groups(numel, self.group)

    def encode(self, values: Tensor, noise: Generator | None = None) -> Tensor:
        return self._encoded(values, noise)

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        return self._decoded(wire, like)

    @torch.inference_mode()
    def encode_into(self, values: Tensor, wire: Tensor, noise: Generator | None = None) -> None:
        if wire.is_meta or not values.numel():
            return
        if not self.stochastic and (found := kernels.of(values)):
            found.quantise(values, wire, group=self.group)
            return
        room, scales, (head, levels) = scratch(values), largest(values, self.group), self._parts(wire, values.numel())
        # M, not M/127: M is then decoded exactly, and encoding it again changes nothing
        head.view(torch.float32).copy_(scales)
        todo, factors = list(pieces(values, self.group)), LEVELS / scales
        # reversed: the last values are still in cache; with noise, in order
        for piece in todo if self.stochastic else reversed(todo):
            self._quantise(values[piece.span], factors[piece.groups], room[: piece.numel], levels[piece.span], noise)

    @torch.inference_mode()
    def decode_into(self, wire: Tensor, out: Tensor) -> None:
        if wire.is_meta or not out.numel():
            return
        if found := kernels.of(out):
            found.restore(wire, out, group=self.group)
            return
        head, levels = self._parts(wire, out.numel())
        factors, room = typed(head, torch.float32) / POWER, None if out.dtype == torch.float32 else scratch(out)
        for piece in pieces(out, self.group):
            part = out[piece.span]
            decoded = _decode(levels[piece.span], factors[piece.groups], part if room is None else room[: piece.numel])
            if room is not None:
                part.copy_(decoded)

    @torch.inference_mode()
    def add(self, wire: Tensor, total: Tensor) -> None:
        if wire.is_meta or not total.numel():
            return
        if found := kernels.of(total):
            found.restore(wire, total, group=self.group, add=True)
            return
        room, (head, levels) = scratch(total), self._parts(wire, total.numel())
        factors = typed(head, torch.float32) / POWER
        for piece in pieces(total, self.group):
            total[piece.span].add_(_decode(levels[piece.span], factors[piece.groups], room[: piece.numel]))

    @torch.inference_mode()
    def encode_sum(self, wire: Tensor, values: Tensor, out: Tensor, noise: Generator | None = None) -> None:
        if self.stochastic or values.dtype != torch.float32 or wire.is_meta or not values.numel():
            Codec.encode_sum(self, wire, values, out, noise)
            return
        if found := kernels.of(values):
            found.quantise(values, out, group=self.group, added=wire)
            return
        room, (head, levels), (new_head, new_levels) = (
            scratch(values),
            *(self._parts(each, values.numel()) for each in (wire, out)),
        )
        factors, scales = typed(head, torch.float32) / POWER, new_head.view(torch.float32)
        later: list[Piece] = []  # pieces of a larger group: it must be summed before its largest value is known
        for piece in pieces(values, self.group):
            part, own = values[piece.span], _decode(levels[piece.span], factors[piece.groups], room[: piece.numel])
            if piece.begins and piece.ends:
                keep_largest(torch.add(part, own, out=own), piece, scales)
                self._quantise(own, LEVELS / as_scales(scales[piece.groups]), own, new_levels[piece.span])
            else:
                keep_largest(part.add_(own), piece, scales)
                later.append(piece)
        factors = LEVELS / scales.copy_(as_scales(scales))
        for piece in reversed(later):
            self._quantise(values[piece.span], factors[piece.groups], room[: piece.numel], new_levels[piece.span])

    def _parts(self, wire: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return the bytes of a message that hold scales, and its levels."""
        head = 4 * num_groups(numel, self.group)
        return wire[:head], wire[head:].view(torch.int8)

    def _quantise(
        self, values: Tensor, factors: Tensor, room: Tensor, levels: Tensor, noise: Generator | None = None
    ) -> None:
        """levels <- values times their groups' factors, rounded. `room` is float32, and may be `values`."""
        num = factors.numel()
        narrow = values if values.dtype == torch.float32 else room.copy_(values)
        torch.mul(narrow.view(num, -1), factors.view(num, 1), out=room.view(num, -1))
        if self.stochastic:
            noises = scratch(values, "noise")[: room.numel()].uniform_(generator=noise)
            room.add_(noises).floor_().clamp_(-LEVELS, LEVELS)
        else:
            room.round_()  # at most 127, because x / M is at most 1
        levels.copy_(room)


def _decode(levels: Tensor, factors: Tensor, room: Tensor) -> Tensor:
    """room <- q / 127 * M, rounded twice, with factors M / 128; returns `room`.

    q + q / 127 is q / 127 * 128. A division would cost more than everything else. The float32 result is the same for
    each q from -128 to 127, with and without a fused multiply-add.
    """
    num = factors.numel()
    room.copy_(levels).add_(room, alpha=1 / LEVELS)
    room.view(num, -1).mul_(factors.view(num, 1))
    return room
