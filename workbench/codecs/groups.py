"""Values in groups that share a scale, and how numbers lie in a message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.errors import ConfigError

SMALLEST = 2.0**-119  # a scale is at least this: 127 and more of them over it is still a finite float32, and it over that no zero


def check_group(group: Any) -> None:
    """Raise `ConfigError` unless it is a number of values or None."""
    if group is not None and (not isinstance(group, int) or isinstance(group, bool) or group < 1):
        raise ConfigError(f"group={group!r}: values that share a scale, 1 or more, or None for one scale a message")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise `ConfigError` unless the value is one of the choices."""
    if value not in choices:
        raise ConfigError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")


def num_groups(numel: int, group: int | None) -> int:
    """How many scales so many values have: the last group may be short.

    >>> num_groups(10, 4), num_groups(10, None), num_groups(0, None)
    (3, 1, 0)
    """
    return -(-numel // (group or max(numel, 1)))


def per_group(values: Tensor, group: int | None, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """(n,) -> (groups,): `reduce` maps (k, group) to (k,)."""
    size = values.numel()
    group = group or size
    full = size - size % group
    parts = [reduce(values[:full].view(-1, group))] if full else []
    if full < size:
        parts.append(reduce(values[full:].view(1, -1)))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def times(values: Tensor, factors: Tensor, group: int | None, out: Tensor | None = None) -> Tensor:
    """Each value times its group's factor; `out` may be `values`."""
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
    """(n,) float32 -> (groups,): the largest magnitude of each, at least `SMALLEST`; NaN where one is not finite."""
    found = per_group(values, group, lambda part: torch.maximum(part.amax(1), -part.amin(1)))  # both carry a NaN on
    return torch.where(found.isfinite(), found, torch.nan).clamp_min_(SMALLEST)


def typed(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes read as another dtype; a copy only where they lie at an address that the dtype cannot have."""
    return (wire.clone() if wire.storage_offset() % dtype.itemsize else wire).view(dtype)


def pack(symbols: Tensor, bits: int) -> Tensor:
    """(n,) uint8 below 2**bits -> (ceil(n * bits / 8),) uint8. Byte j holds symbols j, j + m, j + 2m, ...: slices, not bits, are moved.

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
    """The inverse, (numel,) uint8."""
    if bits == 8:
        return packed
    length = packed.numel()
    symbols = torch.empty(numel, dtype=torch.uint8, device=packed.device)
    for plane, start in enumerate(range(0, numel, length or 1)):
        part = symbols[start : start + length]
        torch.bitwise_right_shift(packed[: part.numel()], plane * bits, out=part)
    return symbols.bitwise_and_(2**bits - 1)
