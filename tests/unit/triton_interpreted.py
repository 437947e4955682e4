"""Kernels of codecs in Triton's interpreter, on a CPU. Only test_triton_codecs.py runs it, with TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch

from tests.unit.kernel_cases import CODECS, KINDS, check, values_of
from workbench.codecs import Codec, Linear8, Truncate16, kernels, triton_kernels

CPU = torch.device("cpu")


@contextmanager
def by_kernels() -> Iterator[None]:
    """As if the processor were a GPU. NumPy, in the interpreter, would warn of what is no number."""
    with mock.patch.object(kernels, "of", return_value=triton_kernels), np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_the_bits_are_a_processors(codec: Codec) -> None:
    """With programs of so few values that one has neighbours, and some groups are read twice."""
    with mock.patch.multiple(triton_kernels, BLOCK=32, MAX_ONE_PASS=64):
        for kind, numel, offset in zip(KINDS, (130, 65, 33, 64, 97, 64, 150), (0, 1, 2, 4, 0, 3, 0), strict=True):
            check(codec, kind, numel, CPU, offset, by_kernels())
        for numel in (0, 1):
            check(codec, "plain", numel, CPU, kernels=by_kernels())


@pytest.mark.parametrize(
    ("codec", "numel"),
    [
        (Truncate16(), 8200),
        (Linear8(), 8192),
        (Linear8(), 8200),
        (Linear8(group=1024), 5000),
        (Linear8(group=9000), 9999),
    ],
)
def test_programs_of_their_true_size_give_the_bits_too(codec: Codec, numel: int) -> None:
    check(codec, "any", numel, CPU, kernels=by_kernels())


def test_a_nan_that_is_truncated_keeps_its_high_half() -> None:
    values = values_of("any", 200, 3)
    values[:2] = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    wire = torch.empty(400, dtype=torch.uint8)
    with by_kernels():
        Truncate16().encode_into(values, wire)
    assert torch.equal(wire, Truncate16().encode(values)) and wire.view(torch.int16)[:2].tolist() == [0x7F80, -1]


def test_a_message_that_is_written_twice_is_the_same() -> None:
    """What an earlier message left where scales are found must not be taken for a magnitude."""
    wire = torch.empty(Linear8().wire_bytes(300), dtype=torch.uint8)
    with by_kernels(), mock.patch.multiple(triton_kernels, BLOCK=32, MAX_ONE_PASS=64):
        for factor in (100.0, 1.0):
            values = factor * values_of("plain", 300, 4)
            Linear8().encode_into(values, wire)
    assert torch.equal(wire, Linear8().encode(values))


def test_a_scale_is_inverted_before_it_is_multiplied() -> None:
    """As torch does with a number over a tensor.

    One rounding fewer gives another level, once in some thousand values at half a level.
    """
    scales = 1 + torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    halfway = (torch.arange(100_000) % 127 + 0.5) * scales / 127
    twice, once = (
        (halfway * factor).round() for factor in (scales.reciprocal() * 127, torch.full_like(scales, 127) / scales)
    )
    apart = (twice != once).nonzero().view(-1)[:50]
    assert apart.numel() == 50
    values = torch.stack([scales[apart], halfway[apart]], 1).view(-1)
    wire = torch.empty(Linear8(group=2).wire_bytes(100), dtype=torch.uint8)
    with by_kernels():
        Linear8(group=2).encode_into(values, wire)
    assert torch.equal(wire, Linear8(group=2).encode(values))
