"""Compiled kernels for a CPU: 16-bit halves, 8-bit levels and the largest values, each in one pass of `compiled.c`.

`halve`, `widen`, `quantise` and `restore` take the same arguments as those of `triton_kernels`. They give the bits of
torch's operations; only the sign and payload of a NaN from arithmetic may differ. They release the interpreter's lock
and run on one core.
"""

from __future__ import annotations

from ctypes import c_int, c_size_t, c_void_p
from functools import cache
from math import sqrt
from typing import Any

from torch import Tensor

from workbench.codecs import compiler
from workbench.codecs.groups import num_groups, scratch

SAMPLE = 512  # sampled values that should be among the largest: enough for a threshold with a few candidates more
MOST_SAMPLED, LEAST_STRIDE = 1 << 16, 32
SPARE = 256  # places
POINTER, SIZE, FLAG = c_void_p, c_size_t, c_int
ARGUMENTS = {
    "workbench_halve": (POINTER, POINTER, POINTER, SIZE, FLAG),
    "workbench_widen": (POINTER, POINTER, SIZE, FLAG),
    "workbench_quantise": (POINTER, POINTER, POINTER, SIZE, SIZE),
    "workbench_restore": (POINTER, POINTER, SIZE, SIZE, FLAG),
    "workbench_select": (POINTER, SIZE, SIZE, SIZE, SIZE, POINTER, POINTER, POINTER, SIZE),
}


def halve(values: Tensor, out: Tensor, *, nearest: bool, added: Tensor | None = None) -> None:
    """out <- the high halves of (n,) float32 values, or of their sums with the halves of a message."""
    numel = values.numel()
    _call("workbench_halve", values, _message(added, 2 * numel), _message(out, 2 * numel), numel, nearest)


def widen(wire: Tensor, out: Tensor, *, add: bool = False) -> None:
    """out <- a message of halves as float32 values, or out <- out + these."""
    _call("workbench_widen", _message(wire, 2 * out.numel()), out, out.numel(), add)


def quantise(values: Tensor, out: Tensor, *, group: int | None, added: Tensor | None = None) -> None:
    """out <- scales and levels of (n,) float32 values, or of their sums with a message's values."""
    numel = values.numel()
    length = numel + 4 * num_groups(numel, group)
    _call("workbench_quantise", values, _message(added, length), _message(out, length), numel, group or numel)


def restore(wire: Tensor, out: Tensor, *, group: int | None, add: bool = False) -> None:
    """out <- the values of scales and levels, or out <- out + these."""
    numel = out.numel()
    length = numel + 4 * num_groups(numel, group)
    _call("workbench_restore", _message(wire, length), out, numel, group or numel, add)


def select(values: Tensor, num: int, out: Tensor) -> bool:
    """out <- positions and values of the `num` largest magnitudes of (n,) float32, ascending; of equal ones the first.

    Return False if a sample of the values misled: more or fewer than expected are large, or many are equal.
    """
    numel = values.numel()
    stride = max(LEAST_STRIDE, num // SAMPLE, numel // MOST_SAMPLED)
    expected = num / stride
    rank = int(expected + 4 * sqrt(expected)) + 8  # four standard deviations more than expected
    room = min(numel, max(numel // stride, rank * stride * 3 // 2)) + SPARE
    at, magnitudes = scratch(values, "positions", room), scratch(values, "magnitudes", room)
    return bool(
        _call("workbench_select", values, numel, num, stride, rank, _message(out, 8 * num), at, magnitudes, room)
    )


def _message(wire: Tensor | None, length: int) -> Tensor | None:
    """Return a message, after a check of its length: C code does not check."""
    if wire is not None and (wire.numel() * wire.element_size() != length or not wire.is_contiguous()):
        raise ValueError(f"a message of {wire.numel()} bytes in place of {length} next to each other")
    return wire


def _call(name: str, *arguments: Tensor | int | None) -> int:
    function = _functions()[name]
    return int(function(*(one.data_ptr() if isinstance(one, Tensor) else one for one in arguments)) or 0)


@cache
def _functions() -> dict[str, Any]:
    functions = compiler.library().functions
    assert functions is not None, "asked for without a library"
    found = {name: getattr(functions, name) for name in ARGUMENTS}
    for name, function in found.items():
        function.argtypes, function.restype = ARGUMENTS[name], c_int if name == "workbench_select" else None
    return found
