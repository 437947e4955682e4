"""Groups of values that share a scale, and the layout of numbers in a message."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from workbench.arguments import check_whole
from workbench.errors import ConfigError

SMALLEST = 2.0**-119  # the smallest scale: 127 / scale is a finite float32, and scale / 127 is not 0

TILE = 1 << 19  # values processed at a time: 2 MiB of float32, which stay in cache between operations
_THREAD_LOCAL = threading.local()


def check_group(group: Any) -> None:
    """Raise `ConfigError` unless it is a number of values or None."""
    if group is not None:
        what = "the number of values that share a scale, 1 or more, or None for one scale for each message"
        check_whole("group", group, 1, what)


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise `ConfigError` unless the value is one of the choices."""
    if value not in choices:
        raise ConfigError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")


def num_groups(numel: int, group: int | None) -> int:
    """Return the number of scales for `numel` values: the last group may be short.

    >>> num_groups(10, 4), num_groups(10, None), num_groups(0, None)
    (3, 1, 0)
    """
    return -(-numel // (group or max(numel, 1)))


def per_group(values: Tensor, group: int | None, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduce each group, (n,) -> (groups,): `reduce` maps (k, group) to (k,)."""
    size = values.numel()
    group = group or size
    full = size - size % group
    parts = [reduce(values[:full].view(-1, group))] if full else []
    if full < size:
        parts.append(reduce(values[full:].view(1, -1)))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def times(values: Tensor, factors: Tensor, group: int | None, out: Tensor | None = None) -> Tensor:
    """Multiply each value by its group's factor; `out` may be `values`."""
    size = values.numel()
    group = group or size
    full = size - size % group
    out = torch.empty_like(values) if out is None else out
    if full:
        torch.mul(values[:full].view(-1, group), factors[: full // group].view(-1, 1), out=out[:full].view(-1, group))
    if full < size:
        torch.mul(values[full:], factors[-1], out=out[full:])
    return out


def largest(values: Tensor, group: int | None) -> Tensor:
    """Return each group's largest magnitude, (n,) -> (groups,) float32, at least `SMALLEST`; NaN if not finite."""
    found = torch.empty(num_groups(values.numel(), group), device=values.device)
    for piece in pieces(values, group):
        keep_largest(values[piece.span], piece, found)
    return as_scales(found)


def keep_largest(part: Tensor, piece: Piece, found: Tensor) -> None:
    """Write the largest magnitudes of a piece's groups into `found`; combine a group that is in several pieces."""
    rows, here = part.view(piece.num, -1), found[piece.groups]
    magnitudes = torch.maximum(rows.amax(1), rows.amin(1).neg_())  # both propagate a NaN
    if piece.begins:
        here.copy_(magnitudes)
    else:
        torch.maximum(here, magnitudes, out=here)


def as_scales(found: Tensor) -> Tensor:
    """Convert largest magnitudes to divisors: at least `SMALLEST`, and NaN if not finite."""
    return torch.where(found.isfinite(), found, torch.nan).clamp_min_(SMALLEST)


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """A part of some values that is processed at a time: whole groups next to each other, or a part of one group.

    Attributes:
        span: slice of the values.
        groups: slice of the groups.
        begins, ends: whether the first group begins here, and the last one ends here.
    """

    span: slice
    groups: slice
    begins: bool = True
    ends: bool = True

    @property
    def num(self) -> int:
        """Number of groups."""
        return int(self.groups.stop - self.groups.start)

    @property
    def numel(self) -> int:
        return int(self.span.stop - self.span.start)


def pieces(values: Tensor, group: int | None) -> Iterator[Piece]:
    """Yield pieces of the values, in order: on a CPU at most `TILE` values each, elsewhere as few pieces as possible.

    >>> [(piece.span, piece.num) for piece in pieces(torch.empty(10), 4)]
    [(slice(0, 8, None), 2), (slice(8, 10, None), 1)]
    """
    size, tile = values.numel(), TILE if values.device.type == "cpu" else values.numel()
    group = min(group or size, size)
    if not size:
        return
    full, step = size - size % group, tile // group * group
    if step:
        for start in range(0, full, step):
            stop = min(start + step, full)
            yield Piece(slice(start, stop), slice(start // group, stop // group))
    for number in range(full // group if step else 0, num_groups(size, group)):
        begin, end = number * group, min(number * group + group, size)
        for start in range(begin, end, tile):
            stop = min(start + tile, end)
            yield Piece(slice(start, stop), slice(number, number + 1), start == begin, stop == end)


def tiles(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield equal parts of tensors of one length, at most `TILE` values each, with as much scratch memory."""
    first, room = tensors[0], scratch(tensors[0])
    size = TILE if first.device.type == "cpu" else max(first.numel(), 1)
    for parts in zip(*(tensor.split(size) for tensor in tensors), strict=True):
        numel = parts[0].numel()
        yield (*parts, room if numel == room.numel() else room[:numel])


def scratch(values: Tensor, name: str = "values", size: int = TILE) -> Tensor:
    """Return scratch memory.

    On a CPU it is (`size`,) float32 or more of the calling thread, the same at each call. Elsewhere it is (n,) new
    values. Its content is valid within one call of a codec. Give different names to two that are in use at the same
    time.
    """
    if values.device.type != "cpu":
        return torch.empty(values.numel(), device=values.device)
    tiles: dict[str, Tensor] = _THREAD_LOCAL.__dict__
    if name not in tiles or tiles[name].numel() < size:
        with torch.inference_mode(False):
            tiles[name] = torch.empty(size)
    return tiles[name]


def typed(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret bytes as another dtype; copies only if their address is not aligned for it."""
    return (wire.clone() if wire.storage_offset() % dtype.itemsize else wire).view(dtype)


def pack(symbols: Tensor, bits: int) -> Tensor:
    """Pack (n,) uint8 below 2**bits into (ceil(n * bits / 8),) uint8.

    Byte j holds symbols j, j + m, j + 2m, ...: slices are moved, not bits.

    >>> pack(torch.tensor([1, 0, 1, 1], dtype=torch.uint8), 4)
    tensor([17, 16], dtype=torch.uint8)
    """
    if bits == 8:
        return symbols
    length = -(-symbols.numel() * bits // 8)
    packed = symbols[:length].clone()
    for plane, start in enumerate(range(length, symbols.numel(), length or 1), 1):
        part = symbols[start : start + length]
        packed[: part.numel()] |= part << (plane * bits)
    return packed


def unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Return the inverse of `pack`, (numel,) uint8."""
    if bits == 8:
        return packed
    length = packed.numel()
    symbols = torch.empty(numel, dtype=torch.uint8, device=packed.device)
    for plane, start in enumerate(range(0, numel, length or 1)):
        part = symbols[start : start + length]
        torch.bitwise_right_shift(packed[: part.numel()], plane * bits, out=part)
    return symbols.bitwise_and_(2**bits - 1)
