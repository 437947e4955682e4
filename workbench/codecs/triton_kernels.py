"""Triton kernels for a GPU: 16-bit truncation and 8-bit levels, encoded, decoded and summed.

The only importer of triton. The kernels give the bits that `Truncate16` and `Linear8` give on a CPU. This needs:

- no multiply-add is fused (`enable_fp_fusion=False`), quotients are IEEE's (`div_rn`), subnormal numbers are kept;
- rounding to nearest is to even: by adding 3 * 2**22, or, for the high half of a float32, in integers;
- magnitudes are compared as integers. This orders all float32 numbers, with infinities and NaNs last, so the largest
  of a group does not depend on the order of its parts;
- the scale of a group that is not finite is the NaN 0x7fc00000, and its levels are 0.

A NaN stays a NaN. The sign and payload of a NaN from arithmetic depend on the CPU or GPU.

They gave these bits on an NVIDIA H100 (`make gpu`). `records/bench-codecs-h100.json` has their speed there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# The kernels: Triton compiles their source and types their arguments.

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from workbench.codecs.groups import num_groups, typed

BLOCK = 4096  # values of one program
MAX_ONE_PASS = 8192  # largest group that one program holds: it is read once for encoding, larger groups twice
LAUNCH_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}  # launch options of each kernel

# In a kernel, a name that is not an argument is a `constexpr`.
LOW_BITS = tl.constexpr(0x7FFF)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SMALLEST = tl.constexpr(0x04000000)  # 2**-119, `groups.SMALLEST`
INFINITE = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)
LEVELS = tl.constexpr(127.0)
OVER_LEVELS = tl.constexpr(1 / 127)
OVER_POWER = tl.constexpr(1 / 128)
ROUNDS = tl.constexpr(3.0 * 2**22)  # in a float32 of this size the last bit is worth 1


def halve(values: Tensor, out: Tensor, *, nearest: bool, added: Tensor | None = None) -> None:
    """out <- the high halves of (n,) float32 values, or of their sums with the halves of a message."""
    halves = out.view(torch.int16)
    other = halves if added is None else typed(added, torch.int16)
    programs = triton.cdiv(values.numel(), BLOCK)
    _launch(
        _halve, programs, values, other, halves, values.numel(), NEAREST=nearest, SUM=added is not None, BLOCK=BLOCK
    )


def widen(wire: Tensor, out: Tensor, *, add: bool = False) -> None:
    """out <- a message of halves as float32 values, or out <- out + these."""
    _launch(_widen, triton.cdiv(out.numel(), BLOCK), typed(wire, torch.int16), out, out.numel(), ADD=add, BLOCK=BLOCK)


def quantise(values: Tensor, out: Tensor, *, group: int | None, added: Tensor | None = None) -> None:
    """out <- scales and levels of (n,) float32 values, or of their sums with a message's values."""
    plan, other = _Plan.of(values.numel(), group), out if added is None else added
    given = (
        values,
        typed(other[: plan.head], torch.float32),
        other.view(torch.int8),
        out.view(torch.int8),
        values.numel(),
    )
    if plan.chunks > 1:
        out[: plan.head].zero_()
    for kernel in (_quantise_whole,) if plan.chunks == 1 else (_find_largest, _quantise_parts):
        _launch(kernel, plan.programs, *given, *plan.numbers, SUM=added is not None, **plan.shape)


def restore(wire: Tensor, out: Tensor, *, group: int | None, add: bool = False) -> None:
    """out <- the values of scales and levels, or out <- out + these."""
    plan = _Plan.of(out.numel(), group)
    given = typed(wire[: plan.head], torch.float32), wire.view(torch.int8), out, out.numel()
    _launch(_restore, plan.programs, *given, *plan.numbers, ADD=add, **plan.shape)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The division of grouped values among programs.

    A program has `rows` groups, or a group has several programs, in chunks of `columns`. The size of a single group is
    rounded up to a multiple of 16: Triton then knows the alignment of its chunks.
    """

    group: int
    groups: int
    rows: int
    columns: int

    @classmethod
    def of(cls, numel: int, group: int | None) -> _Plan:
        groups = num_groups(numel, group)
        size = group if group is not None and groups > 1 else max(-(-numel // 16), 1) * 16
        columns = 1 << (size - 1).bit_length() if size <= MAX_ONE_PASS else BLOCK
        return cls(group=size, groups=groups, rows=max(1, BLOCK // columns) if groups > 1 else 1, columns=columns)

    @property
    def chunks(self) -> int:
        return -(-self.group // self.columns)

    @property
    def programs(self) -> int:
        return -(-self.groups // self.rows) * self.chunks

    @property
    def head(self) -> int:
        """Bytes of the scales."""
        return 4 * self.groups

    @property
    def numbers(self) -> tuple[int, int, int]:
        return self.group, self.groups, self.chunks

    @property
    def shape(self) -> dict[str, int]:
        return {"ROWS": self.rows, "COLUMNS": self.columns}


def _launch(kernel: Any, programs: int, *given: Any, **named: Any) -> None:
    """Queue a kernel on the current stream of the first tensor's GPU; nothing is allocated."""
    if not programs:
        return
    with torch.cuda.device(given[0].device) if given[0].is_cuda else nullcontext():
        kernel[(programs,)](*given, **named, **LAUNCH_OPTIONS)


# -- truncation ------------------------------------------------------------------------------------------------


@triton.jit
def _halve(values, added, halves, numel, NEAREST: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    x = tl.load(values + at, mask=inside, other=0.0)
    if SUM:
        x += _widened(tl.load(added + at, mask=inside, other=0))
    bits = x.to(tl.int32, bitcast=True)
    if NEAREST:
        bits = tl.where(x == x, bits + LOW_BITS + ((bits >> 16) & 1), NAN)
    tl.store(halves + at, (bits >> 16).to(tl.int16), mask=inside)


@triton.jit
def _widen(halves, out, numel, ADD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    y = _widened(tl.load(halves + at, mask=inside, other=0))
    if ADD:
        y += tl.load(out + at, mask=inside, other=0.0)
    tl.store(out + at, y, mask=inside)


@triton.jit
def _widened(halves):
    return _as_number(halves.to(tl.int32) << 16)


# -- levels ----------------------------------------------------------------------------------------------------
# `scales` and `levels` are one message, which is read; `wire` is another one, which is written. Levels begin after 4
# bytes a group.


@triton.jit
def _quantise_whole(
    values,
    scales,
    levels,
    wire,
    numel,
    group,
    groups,
    chunks,
    SUM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Encode groups that one program holds."""
    row, at, inside = _tile(tl.program_id(0), numel, group, chunks, ROWS, COLUMNS)
    x = _summed(values, scales, levels, row, at, inside, groups, SUM)
    scale = _as_scale(tl.max(_magnitude(x), axis=1))
    tl.store(_numbers(wire) + row, scale, mask=row < groups)
    tl.store(wire + 4 * groups + at, _rounded(x, _as_number(scale)[:, None]), mask=inside)


@triton.jit
def _find_largest(
    values,
    scales,
    levels,
    wire,
    numel,
    group,
    groups,
    chunks,
    SUM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Reduce a group's largest magnitude into the place of its scale, over all chunks."""
    row, at, inside = _tile(tl.program_id(0), numel, group, chunks, ROWS, COLUMNS)
    x = _summed(values, scales, levels, row, at, inside, groups, SUM)
    tl.atomic_max(_numbers(wire) + row, tl.max(_magnitude(x), axis=1), mask=row < groups)


@triton.jit
def _quantise_parts(
    values,
    scales,
    levels,
    wire,
    numel,
    group,
    groups,
    chunks,
    SUM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Encode a chunk of a group. The last chunks come first, because they are still in cache.

    All chunks write the group's scale. A chunk that reads the written scale computes the same scale again.
    """
    row, at, inside = _tile(tl.num_programs(0) - 1 - tl.program_id(0), numel, group, chunks, ROWS, COLUMNS)
    x = _summed(values, scales, levels, row, at, inside, groups, SUM)
    scale = _as_scale(tl.load(_numbers(wire) + row, mask=row < groups, other=0))
    tl.store(_numbers(wire) + row, scale, mask=row < groups)
    tl.store(wire + 4 * groups + at, _rounded(x, _as_number(scale)[:, None]), mask=inside)


@triton.jit
def _restore(
    scales, levels, out, numel, group, groups, chunks, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, at, inside = _tile(tl.program_id(0), numel, group, chunks, ROWS, COLUMNS)
    y = _restored(scales, levels, row, at, inside, groups)
    if ADD:
        y += tl.load(out + at, mask=inside, other=0.0)
    tl.store(out + at, y, mask=inside)


@triton.jit
def _tile(program, numel, group, chunks, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a program's (ROWS,) groups, (ROWS, COLUMNS) places of their values, and which of these exist."""
    row = (program // chunks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (program % chunks).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    at = row[:, None] * group + column[None, :]
    return row, at, (column < group)[None, :] & (at < numel)


@triton.jit
def _summed(values, scales, levels, row, at, inside, groups, SUM: tl.constexpr):
    x = tl.load(values + at, mask=inside, other=0.0)
    if SUM:
        x += _restored(scales, levels, row, at, inside, groups)
    return x


@triton.jit
def _restored(scales, levels, row, at, inside, groups):
    """Compute q / 127 * M by q + q / 127 and M / 128, as `linear._decode`."""
    q = tl.load(levels + 4 * groups + at, mask=inside, other=0).to(tl.float32)
    factor = tl.load(scales + row, mask=row < groups, other=0.0) * OVER_POWER
    return (q + q * OVER_LEVELS) * factor[:, None]


@triton.jit
def _magnitude(x):
    return x.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def _as_scale(largest):
    """Convert the largest magnitude to a divisor, as `groups.as_scales`; both by their bits."""
    return tl.where(largest < INFINITE, tl.maximum(largest, SMALLEST), NAN)


@triton.jit
def _rounded(x, scale):
    """Compute round(127 x / M), 0 for NaN; 127 / M as torch computes it, 1 / M first.

    The level is in the last byte of the sum.
    """
    level = x * (tl.div_rn(1.0, scale) * LEVELS) + ROUNDS
    return tl.where(level == level, level.to(tl.int32, bitcast=True), 0).to(tl.int8)


@triton.jit
def _as_number(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _numbers(wire):
    """Return its memory as 32-bit numbers."""
    return wire.to(tl.pointer_type(tl.int32), bitcast=True)
