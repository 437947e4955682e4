"""Laws of every codec, for any values: known length, no hidden state, divergence seen, all devices, errors bounded."""

from __future__ import annotations

from itertools import product
from math import sqrt
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from workbench import codecs
from workbench.codecs import (
    QSGD,
    Codec,
    ErrorFeedback,
    Float16,
    Linear8,
    NaturalCompression,
    RandomK,
    SharedInt,
    Sign,
    TernGrad,
    TopK,
    Truncate16,
    groups,
)

ALL: list[Codec] = [
    Truncate16(),
    Truncate16(rounding="nearest"),
    Float16(),
    Linear8(),
    Linear8(group=3),
    Linear8(rounding="stochastic"),
    Linear8(rounding="stochastic", group=5),
    QSGD(),
    QSGD(levels=1, group=4),
    QSGD(levels=5, group=None),
    QSGD(levels=127, group=7),
    TernGrad(),
    TernGrad(group=5),
    NaturalCompression(),
    TopK(),
    TopK(fraction=0.3),
    TopK(k=3),
    RandomK(),
    RandomK(fraction=0.3),
    Sign(),
    Sign(group=3),
    SharedInt(),
    SharedInt(bits=16, rounding="stochastic"),
    SharedInt(bits=32),
]
EVERY = pytest.mark.parametrize("codec", ALL, ids=repr)
CONTRACTING = [codec for codec in ALL if codec.contracts]
LENGTHS = st.one_of(st.sampled_from([0, 1, 2, 7, 8, 9]), st.integers(0, 300))
DTYPES = st.sampled_from([torch.float32, torch.float64])
SEEDS = st.integers(0, 2**32 - 1)


def noise(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def draw(numel: int, seed: int, dtype: torch.dtype = torch.float32, spread: float = 4.0) -> Tensor:
    """Values of many magnitudes, some of them zero and some equal."""
    generator = noise(seed)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    values *= 10.0 ** (spread * (torch.rand(numel, generator=generator, dtype=torch.float64) - 0.5))
    values[torch.rand(numel, generator=generator) < 0.1] = 0.0
    values[torch.rand(numel, generator=generator) < 0.1] = 1.5
    return values.to(dtype)


@EVERY
@settings(max_examples=30)
@given(numel=LENGTHS, seed=SEEDS, dtype=DTYPES)
def test_a_message_is_as_long_as_foretold_and_comes_back_in_kind(
    codec: Codec, numel: int, seed: int, dtype: torch.dtype
) -> None:
    values = draw(numel, seed, dtype)
    before = values.clone()
    wire = codec.encode(values, noise(seed))
    assert wire.dtype == torch.uint8 and wire.shape == (codec.wire_bytes(numel),)
    assert torch.equal(values, before), "values stay as they are"
    decoded = codec.decode(wire, values)
    assert decoded.shape == values.shape and decoded.dtype == dtype and bool(decoded.isfinite().all())
    assert decoded.data_ptr() != values.data_ptr() or not numel
    assert torch.equal(codec.encode(values, noise(seed)), wire), "the same noise, the same bytes"


@EVERY
@settings(max_examples=15)
@given(numel=st.integers(1, 100), seed=SEEDS, offset=st.integers(1, 7), dtype=DTYPES)
def test_a_message_is_read_wherever_it_lies(
    codec: Codec, numel: int, seed: int, offset: int, dtype: torch.dtype
) -> None:
    """Within another message, at an address that float32 cannot have."""
    values = draw(numel, seed, dtype)
    wire = codec.encode(values, noise())
    larger = torch.cat([torch.zeros(offset, dtype=torch.uint8), wire, torch.zeros(3, dtype=torch.uint8)])
    within = larger[offset : offset + wire.numel()]
    assert torch.equal(codec.decode(within, values), codec.decode(wire, values))
    part = torch.cat([values[:1], values])[1:]  # values that do not begin their storage
    assert torch.equal(codec.encode(part, noise()), wire)


def bits(values: Tensor) -> Tensor:
    return values.view({4: torch.int32, 8: torch.int64}[values.element_size()])


@EVERY
@settings(max_examples=40)
@given(
    numel=LENGTHS,
    seed=SEEDS,
    dtype=DTYPES,
    tile=st.sampled_from([groups.TILE, 64, 17, 1]),
    bad=st.sampled_from([1.0, float("nan"), float("inf"), 1e-42, 3e38]),
    offset=st.sampled_from([0, 1, 3]),
)
def test_what_writes_into_memory_gives_the_same_bits(
    codec: Codec, numel: int, seed: int, dtype: torch.dtype, tile: int, bad: float, offset: int
) -> None:
    """With any tile, as for all values at once: encoded, decoded, added to a sum, and the sum encoded again."""
    values, total = draw(numel, seed, dtype), draw(numel, seed + 1, dtype)
    values[numel // 2 : numel // 2 + 1] *= bad
    for name in ("values", "noise"):
        groups.scratch(values, name)  # of the tile's true size
    wire = codec.encode(values, noise(seed))
    decoded = codec.decode(wire, values)
    summed = total + decoded
    again = codec.encode(summed, noise(seed + 1))
    padded = torch.cat([torch.zeros(offset, dtype=torch.uint8), wire])[offset:]  # read where float32 cannot be
    with mock.patch.object(groups, "TILE", tile):
        into = torch.full_like(wire, 77)
        codec.encode_into(values, into, noise(seed))
        assert torch.equal(into, wire)
        out = torch.full_like(values, 77)
        codec.decode_into(padded, out)
        assert torch.equal(bits(out), bits(decoded))
        mine, theirs = total.clone(), total.clone()
        codec.add(padded, mine)
        assert torch.equal(bits(mine), bits(summed))
        codec.encode_sum(padded, theirs, into, noise(seed + 1))
        assert torch.equal(into, again)


@EVERY
def test_on_the_meta_device_sizes_are_right_and_nothing_is_read(codec: Codec) -> None:
    for numel in (0, 1, 13):
        values = torch.empty(numel, device="meta")
        wire = codec.encode(values)
        assert wire.is_meta and wire.shape == (codec.wire_bytes(numel),) and wire.dtype == torch.uint8
        decoded = codec.decode(wire, values)
        assert decoded.is_meta and decoded.shape == values.shape and decoded.dtype == values.dtype
        codec.encode_into(values, wire)
        codec.decode_into(wire, values)
        codec.add(wire, values)
        codec.encode_sum(wire, values, torch.empty_like(wire))


@EVERY
def test_what_is_not_finite_stays_visible(codec: Codec) -> None:
    for bad, numel, dtype in product(
        (float("nan"), float("inf"), -float("inf")), (1, 2, 9, 64), (torch.float32, torch.float64)
    ):
        for where in {0, numel // 2, numel - 1}:
            values = draw(numel, where, dtype)
            values[where] = bad
            decoded = codec.decode(codec.encode(values, noise()), values)
            assert not decoded[where].isfinite(), f"{bad} at {where} of {numel} values of {dtype} became {decoded}"


def test_a_nan_of_any_payload_stays_visible() -> None:
    bits = torch.tensor([0x7F800001, 0x7FC00000, -1, 0x7FFFFFFF], dtype=torch.int32)  # the first loses its last bit
    for codec in ALL:
        for value in bits.view(torch.float32).split(1):
            assert not codec.decode(codec.encode(value, noise()), value).isfinite().any(), codec


@EVERY
def test_zeros_come_back_as_zeros(codec: Codec) -> None:
    values = torch.zeros(11)
    assert torch.equal(codec.decode(codec.encode(values, noise()), values), values)


@pytest.mark.parametrize("codec", [codec for codec in ALL if not codec.stochastic], ids=repr)
@settings(max_examples=30)
@given(numel=LENGTHS, seed=SEEDS, scale=st.sampled_from([1e-45, 1e-39, 1e-30, 1.0, 1e30]))
def test_what_rounds_to_nearest_is_not_changed_by_encoding_again(
    codec: Codec, numel: int, seed: int, scale: float
) -> None:
    values = draw(numel, seed) * scale
    wire = codec.encode(values)
    once = codec.decode(wire, values)
    again = codec.encode(once)
    if isinstance(codec, Sign):  # its mean is a sum, which rounds
        assert torch.allclose(codec.decode(again, values), once, rtol=1e-6, atol=1e-44)
    else:
        assert torch.equal(again, wire)


@pytest.mark.parametrize("codec", CONTRACTING, ids=repr)
@settings(max_examples=30)
@given(numel=st.integers(1, 300), seed=SEEDS)
def test_a_codec_that_says_so_contracts(codec: Codec, numel: int, seed: int) -> None:
    """The squared error is below the squared values, in the mean over noise: what error feedback relies on."""
    values = draw(numel, seed)
    assume(bool(values.count_nonzero()))
    errors = [error(codec, values, number) for number in range(20 if codec.stochastic else 1)]
    assert sum(errors) / len(errors) < 1 + 1e-6


def error(codec: Codec, values: Tensor, seed: int = 0) -> float:
    """||x - y||**2 / ||x||**2"""
    exact = values.double()
    return float(
        (codec.decode(codec.encode(values, noise(seed)), values).double() - exact).square().sum() / exact.square().sum()
    )


@pytest.mark.parametrize("codec", [codec for codec in ALL if codec.unbiased], ids=repr)
def test_an_unbiased_codec_is(codec: Codec) -> None:
    """The mean of many draws, in its own standard errors; the largest of `numel` normal deviates is below 5.5 but for one in 10**6.

    The last group is short, for every codec that has groups; it is one value for groups of 3 and 7.
    """
    numel, num_draws = 43, 2000
    generator = noise(1)
    values = (0.3 + 0.7 * torch.rand(numel, generator=generator)) * (
        1 - 2 * (torch.rand(numel, generator=generator) < 0.5).float()
    )
    draws = torch.stack([codec.decode(codec.encode(values, generator), values) for _ in range(num_draws)]).double()
    deviation = draws.mean(0) - values.double()
    rounding = 2.0**-22 * values.double().abs().max()  # of float32 arithmetic, which is no noise
    assert bool((deviation.abs() <= 5.5 * draws.std(0) / sqrt(num_draws) + rounding).all()), deviation
    assert draws.std(0).max() > 0, "not random at all"


def test_a_stochastic_codec_is_one_that_changes_with_its_noise() -> None:
    values = draw(100, 3)
    for codec in ALL:
        changes = not torch.equal(codec.encode(values, noise(1)), codec.encode(values, noise(2)))
        assert changes == codec.stochastic, codec


@pytest.mark.parametrize("codec", CONTRACTING, ids=repr)
@settings(max_examples=20)
@given(numel=st.integers(1, 40), seed=SEEDS, steps=st.integers(1, 12))
def test_error_feedback_forgets_nothing(codec: Codec, numel: int, seed: int, steps: int) -> None:
    """sum of what was sent + residual = sum of the gradients."""
    feedback, residual, sent, total = (
        ErrorFeedback(codec=codec),
        torch.zeros(numel).double(),
        torch.zeros(numel).double(),
        0.0,
    )
    for step in range(steps):
        gradient = draw(numel, seed + step, torch.float64)
        total = total + gradient
        wire = feedback.encode(gradient.clone(), residual, noise(step))
        sent += codec.decode(wire, gradient)
    assert torch.allclose(sent + residual, torch.as_tensor(total), rtol=1e-12, atol=1e-12 * steps * 300)


def test_without_feedback_top_k_forgets_what_it_never_sends() -> None:
    """The law above can fail: a constant gradient's smaller half never arrives without feedback, and with it does."""
    gradient, codec = torch.tensor([1.0, 0.9, 0.2, 0.1]), TopK(k=1)
    residual, plain, fed = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    for _ in range(100):
        plain += codec.decode(codec.encode(gradient), gradient)
        fed += codec.decode(ErrorFeedback(codec=codec).encode(gradient.clone(), residual), gradient)
    assert torch.equal(plain, torch.tensor([100.0, 0, 0, 0]))
    assert torch.allclose(fed / 100, gradient, atol=0.05)


def test_an_overflow_does_not_stay_in_the_residual_for_ever() -> None:
    for codec in (codec for codec in ALL if codec.contracts):
        residual = torch.zeros(8)
        bad = draw(8, 0)
        bad[3] = float("inf")
        feedback = ErrorFeedback(codec=codec)
        wire = feedback.encode(bad, residual, noise())
        assert not codec.decode(wire, bad).isfinite().all()
        assert residual.isfinite().all()
        after = codec.decode(feedback.encode(draw(8, 1), residual, noise()), bad)
        assert after.isfinite().all()


def test_every_codec_is_found_by_its_name() -> None:
    kinds = {type(codecs.get(name)) for name in codecs.names()}
    assert kinds == {type(codec) for codec in ALL}
