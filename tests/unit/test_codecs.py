"""Each codec alone: bytes, errors and the claims of its paper."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import sqrt
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from workbench import bench, codecs
from workbench.bench.codecs import steps_of
from workbench.codecs import (
    QSGD,
    Codec,
    ErrorFeedback,
    Float16,
    Linear8,
    NaturalCompression,
    RandomK,
    SharedInt,
    SharedInt8,
    Sign,
    TernGrad,
    TopK,
    Truncate16,
    check_codec,
    compiled,
    compiler,
    groups,
    kernels,
)
from workbench.codecs.groups import pack, unpack
from workbench.errors import ConfigError

SEEDS = st.integers(0, 2**32 - 1)
DTYPES = st.sampled_from([torch.float32, torch.float64])


@pytest.fixture(autouse=True, scope="module")
def by_torch() -> Iterator[None]:
    """The formulas are torch's operations. test_compiled_codecs.py compares the compiled ones with them."""
    with mock.patch.object(kernels, "of", return_value=None), mock.patch.object(kernels, "on_cpu", return_value=False):
        yield


def noise(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def draw(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = noise(seed)
    exponents = torch.rand(numel, generator=generator, dtype=torch.float64) * 8 - 4
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * 10.0**exponents).to(dtype)


def through(codec: Codec, values: Tensor, seed: int = 0) -> Tensor:
    return codec.decode(codec.encode(values, noise(seed)), values)


# -- lengths one can do in the head ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "numel", "expected"),
    [
        (Truncate16(), 10, 20),
        (Float16(), 10, 20),
        (Linear8(), 10, 14),
        (Linear8(group=4), 10, 22),  # three scales
        (QSGD(levels=1, group=4), 10, 12 + 3),  # 2 bits
        (QSGD(levels=2, group=4), 10, 12 + 5),  # 4 bits
        (QSGD(levels=7, group=None), 11, 4 + 6),
        (QSGD(levels=8, group=None), 11, 4 + 11),
        (TernGrad(group=4), 10, 12 + 3),  # three scales, 2 bits a value
        (NaturalCompression(), 9, 9 + 2),  # a byte and a bit
        (RandomK(fraction=0.3), 10, 8 + 12),  # a seed
        (RandomK(), 3, 8 + 4),  # at least one
        (TopK(fraction=0.3), 10, 24),
        (TopK(), 1000, 80),  # one in a hundred
        (TopK(), 3, 8),  # at least one
        (TopK(k=5), 3, 24),
        (Sign(), 9, 4 + 2),
        (SharedInt8(), 10, 14),
        (SharedInt(bits=32), 10, 44),
    ],
    ids=repr,
)
def test_length(codec: Codec, numel: int, expected: int) -> None:
    assert codec.wire_bytes(numel) == expected
    assert codec.wire_bytes(0) == 0


# -- truncation ------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(numel=st.integers(0, 200), seed=SEEDS)
def test_truncation_keeps_the_high_half_of_the_bits(numel: int, seed: int) -> None:
    values = (
        torch.randint(-(2**31), 2**31, (numel,), generator=noise(seed), dtype=torch.int64)
        .to(torch.int32)
        .view(torch.float32)
    )
    bits = through(Truncate16(), values).view(torch.int32)
    numbers = ~values.isnan()
    assert torch.equal(bits[numbers], (values.view(torch.int32) & ~0xFFFF)[numbers])


@settings(max_examples=50)
@given(numel=st.integers(1, 200), seed=SEEDS)
def test_truncation_is_toward_zero_and_within_two_to_the_minus_seven(numel: int, seed: int) -> None:
    values = draw(numel, seed)
    decoded = through(Truncate16(), values)
    assert bool((decoded.abs() <= values.abs()).all()) and bool((decoded * values >= 0).all())
    assert bool(((values - decoded).abs() < 2.0**-7 * values.abs()).logical_or(values == 0).all())


@settings(max_examples=50)
@given(numel=st.integers(1, 200), seed=SEEDS, dtype=DTYPES)
def test_rounding_to_nearest_is_bfloat16(numel: int, seed: int, dtype: torch.dtype) -> None:
    values = draw(numel, seed, dtype)
    decoded = through(Truncate16(rounding="nearest"), values)
    assert torch.equal(decoded, values.float().to(torch.bfloat16).to(dtype))
    assert bool(((values - decoded).abs() <= 2.0**-8 * values.abs()).all())


def test_truncation_at_its_ends() -> None:
    largest, half = torch.finfo(torch.float32).max, 1 + 2.0**-8  # halfway between two bfloat16: to even
    values = torch.tensor([largest, 2.0**128 - 2.0**119, half, -half, 1e-45, -0.0])
    toward = through(Truncate16(), values)
    assert toward.tolist()[:4] == [2.0**128 - 2.0**120, 2.0**128 - 2.0**120, 1.0, -1.0]
    nearest = through(Truncate16(rounding="nearest"), values)
    assert nearest.tolist()[:4] == [float("inf"), float("inf"), 1.0, -1.0]
    assert torch.signbit(toward[-1]) and torch.signbit(nearest[-1])


# -- linear ----------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(numel=st.integers(1, 200), seed=SEEDS, dtype=DTYPES, group=st.sampled_from([None, 1, 3, 64, 1000]))
def test_linear_errs_by_half_a_level_of_its_group_or_a_whole_one_at_random(
    numel: int, seed: int, dtype: torch.dtype, group: int | None
) -> None:
    values = draw(numel, seed, dtype)
    for start in range(0, numel, group or numel):
        part = slice(start, start + (group or numel))
        level = float(values[part].abs().max()) / 127 * (1 + 1e-4)  # float32 arithmetic on up to 127 levels
        for rounding, bound in (("nearest", 0.5), ("stochastic", 1.0)):
            decoded = through(Linear8(rounding=rounding, group=group), values, seed)
            assert float((decoded - values)[part].abs().max()) <= bound * level
            assert float(decoded[part].abs().max()) <= float(values[part].float().abs().max()), "beyond the range"


def test_linear_decodes_its_largest_value_exactly_and_the_levels_in_between() -> None:
    values = torch.tensor([-127.0, -126.4, 0.5, 1.5, 126.6])
    assert through(Linear8(), values).tolist() == [-127, -126, 0, 2, 127]  # ties to even


def test_a_scale_a_group_resolves_what_one_scale_loses() -> None:
    values = torch.tensor([1000.0, -1000.0, 0.001, -0.002])
    assert through(Linear8(), values).tolist() == [1000, -1000, 0, 0]
    assert torch.allclose(through(Linear8(group=2), values), values, rtol=0.01)


def test_a_nan_stays_within_its_group() -> None:
    values = torch.tensor([1.0, float("nan"), 3.0, 4.0, 5.0])
    for codec in (Linear8(group=2), QSGD(group=2), Sign(group=2)):
        assert through(codec, values).isnan().tolist() == [True, True, False, False, False]
    assert through(Truncate16(), values).isnan().tolist() == [False, True, False, False, False]


# -- the bits of a message, by the book ------------------------------------------------------------------------


def hard(numel: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Values of any bits at all: NaN of all payloads, infinities, denormals; and some of one scale."""
    generator = noise(seed)
    values = (
        torch.randint(-(2**31), 2**31, (numel,), generator=generator, dtype=torch.int64)
        .to(torch.int32)
        .view(torch.float32)
    )
    common = torch.randn(numel, generator=generator)
    return torch.where(torch.rand(numel, generator=generator) < min(1.0, 2 / max(numel, 1)), values, common).to(dtype)


def truncated_by_the_book(values: Tensor, rounding: str) -> np.ndarray:
    bits = values.float().numpy().view(np.uint32).astype(np.uint64)
    if rounding == "nearest":
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
    return (bits >> 16).astype(np.uint16)


def linear_by_the_book(values: Tensor, codec: Linear8, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(scales, levels, decoded) of whole values at once, group by group, as the class says it."""
    narrow, size = values.float().numpy(), values.numel()
    draws = torch.rand(size, generator=noise(seed)).numpy() if codec.stochastic else None
    scales, levels, decoded = [], np.zeros(size, np.int8), np.zeros(size, np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, size, codec.group or size):
            part = slice(start, start + (codec.group or size))
            largest = np.abs(narrow[part]).max()
            scale = np.maximum(largest, np.float32(2.0**-119)) if np.isfinite(largest) else np.float32(np.nan)
            scaled = narrow[part] * (np.float32(1) / scale * np.float32(127))  # torch divides a number so
            scaled = np.rint(scaled) if draws is None else np.floor(scaled + draws[part])
            levels[part] = np.nan_to_num(np.clip(scaled, -127, 127)).astype(np.int8)
            decoded[part] = levels[part].astype(np.float32) / np.float32(127) * scale
            scales.append(scale)
    return np.array(scales, np.float32), levels, decoded


@settings(max_examples=100)
@given(numel=st.integers(0, 300), seed=SEEDS, dtype=DTYPES, tile=st.sampled_from([groups.TILE, 64, 7]))
@pytest.mark.parametrize("rounding", ["toward-zero", "nearest"])
def test_truncation_by_the_book(rounding: str, numel: int, seed: int, dtype: torch.dtype, tile: int) -> None:
    values, codec = hard(numel, seed, dtype), Truncate16(rounding=rounding)  # type: ignore[arg-type]
    groups.scratch(values)
    with mock.patch.object(groups, "TILE", tile):
        message = codec.encode(values).view(torch.int16).numpy().view(np.uint16)
    expected = truncated_by_the_book(values, rounding)
    counts = ~values.isnan().numpy() if rounding == "nearest" else np.full(numel, True)  # any NaN does
    assert np.array_equal(message[counts], expected[counts])


@settings(max_examples=100)
@given(numel=st.integers(0, 300), seed=SEEDS, dtype=DTYPES, tile=st.sampled_from([groups.TILE, 64, 7]))
@example(numel=117, seed=57, dtype=torch.float32, tile=groups.TILE)  # a value in the middle of two levels
@pytest.mark.parametrize("group", [None, 1, 3, 64, 100])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_linear_by_the_book(
    rounding: str, group: int | None, numel: int, seed: int, dtype: torch.dtype, tile: int
) -> None:
    values, codec = hard(numel, seed, dtype), Linear8(rounding=rounding, group=group)  # type: ignore[arg-type]
    scales, levels, decoded = (
        linear_by_the_book(values, codec, seed) if numel else (np.empty(0), np.empty(0), np.empty(0, np.float32))
    )
    for name in ("values", "noise"):
        groups.scratch(values, name)
    with mock.patch.object(groups, "TILE", tile):
        wire = codec.encode(values, noise(seed))
        found = codec.decode(wire, values)
    head = 4 * len(scales)
    assert np.array_equal(wire[:head].view(torch.float32).numpy(), scales, equal_nan=True)
    assert np.array_equal(wire[head:].view(torch.int8).numpy(), levels)
    assert np.array_equal(found.numpy(), decoded.astype(found.numpy().dtype), equal_nan=True)


def test_a_level_over_127_is_exact_for_each_level_with_a_fused_multiply_add_and_without() -> None:
    """q + q / 127 is q / 127 * 128, rounded once or twice."""
    levels = np.arange(-128, 128, dtype=np.float32)
    expected, part = levels / np.float32(127) * np.float32(128), np.float32(1 / 127)
    assert np.array_equal(levels + levels * part, expected)
    once = levels.astype(np.float64) + levels.astype(np.float64) * np.float64(part)  # exact: 7 bits times 24
    assert np.array_equal(once.astype(np.float32), expected)


# -- memory ----------------------------------------------------------------------------------------------------


def bytes_allocated(action: Callable[[], object], folder: Path) -> list[int]:
    """What torch's allocator of the processor is asked for."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        action()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [
        event["args"]["Bytes"] for event in events if event.get("name") == "[memory]" and event["args"]["Bytes"] > 0
    ]


@pytest.mark.parametrize(
    "codec",
    [
        Truncate16(),
        Truncate16(rounding="nearest"),
        Linear8(),
        Linear8(group=1024),
        Linear8(group=10**6),
        Linear8(rounding="stochastic"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_nothing_is_allocated_a_call_but_some_numbers_a_group(
    codec: Codec, is_compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's own copy of a message, of which there are two tiles and a half here, would show at once."""
    if is_compiled and compiler.library().functions is None:
        pytest.skip(f"no compiled codecs: {compiler.library().message}")
    if is_compiled:
        monkeypatch.setattr(kernels, "of", lambda values: compiled)
    numel = 5 * groups.TILE // 2 + 3
    a_group = 0 if isinstance(codec, Truncate16) else 4 * groups.num_groups(numel, codec.group)  # type: ignore[attr-defined]
    for name, step in steps_of(codec, numel).items():
        step()  # scratch is made once a thread
        asked = bytes_allocated(step, tmp_path)
        assert max(asked, default=0) <= max(a_group, 64), name
        assert sum(asked) <= 20 * a_group + (0 if isinstance(codec, Truncate16) else 2048), name
    values = torch.ones(numel)
    assert max(bytes_allocated(lambda: codec.decode(codec.encode(values, noise()), values), tmp_path)) >= 4 * numel, (
        "nothing is seen"
    )


def test_the_benchmark_measures_each_codec_beside_a_copy() -> None:
    with mock.patch("workbench.bench.codecs.SIZES_MB", {0.01: 1}):
        rows = list(bench.run("codecs", bench.BenchOptions(rounds=2, only=("Truncate16(rounding='nearest')", "Sign"))))
    operations = ["encode", "decode", "decode and sum", "decode, sum and encode"]
    assert [row.what for row in rows if "compiled" not in row.case] == [*operations, "encode", "decode"]
    has_library = compiler.library().functions is not None
    assert [row.what for row in rows if "compiled" in row.case] == (operations if has_library else [])
    for row in rows:
        assert row.kind == "limit" and row.unit == "B/s" and row.ours > 0 and row.low <= row.ratio <= row.high


# -- QSGD ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codec", [QSGD(levels=1, group=16), QSGD(levels=7, group=64), QSGD(levels=127, group=None)], ids=repr
)
def test_qsgd_is_within_its_variance_bound_and_not_far_below(codec: QSGD) -> None:
    """E ||x - y||**2 <= min(d/s**2, sqrt(d)/s) ||x||**2 (lemma 3.1), with the mean's own standard error."""
    values, num_draws = torch.randn(64, generator=noise(3)), 500
    generator = noise(4)
    for start in range(0, 64, codec.group or 64):
        part = values[start : start + (codec.group or 64)]
        draws = torch.stack([codec.decode(codec.encode(part, generator), part) for _ in range(num_draws)]).double()
        ratios = (draws - part.double()).square().sum(1) / part.double().square().sum()
        bound = codec.variance_bound(part.numel())
        assert float(ratios.mean()) <= bound + 4 * float(ratios.std()) / sqrt(num_draws)
        assert float(ratios.mean()) >= bound / 20  # a codec that rounded to nearest, or had more levels, would be


def test_qsgd_sends_only_whole_levels_of_the_norm() -> None:
    values = torch.tensor([3.0, -4.0, 0.0])  # norm 5
    for seed in range(50):
        first, second, third = through(QSGD(levels=1, group=None), values, seed).tolist()
        assert first in (0.0, 5.0) and second in (0.0, -5.0) and third == 0.0


def test_qsgd_of_one_value_is_that_value() -> None:
    for value in (2.5, -1e-30, 1e30, -3.4e38, 1e-45):
        values = torch.tensor([value])
        assert torch.allclose(through(QSGD(levels=7), values), values, rtol=1e-6, atol=0)


@settings(max_examples=50)
@given(numel=st.integers(0, 70), bits=st.sampled_from([1, 2, 4, 8]), seed=SEEDS)
def test_packing_is_undone(numel: int, bits: int, seed: int) -> None:
    symbols = torch.randint(0, 2**bits, (numel,), generator=noise(seed), dtype=torch.uint8)
    packed = pack(symbols, bits)
    assert packed.numel() == -(-numel * bits // 8)
    assert torch.equal(unpack(packed, bits, numel), symbols)


# -- half precision --------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(numel=st.integers(0, 300), seed=SEEDS, dtype=DTYPES)
def test_float16_is_numpys_half(numel: int, seed: int, dtype: torch.dtype) -> None:
    """Bits of the message, also of values that no half can have; a NaN may have any payload."""
    values = hard(numel, seed, dtype)
    message = Float16().encode(values).view(torch.int16).numpy().view(np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.float().numpy().astype(np.float16)
    numbers = ~np.isnan(expected)
    assert np.array_equal(message[numbers], expected.view(np.uint16)[numbers])
    found = through(Float16(), values).numpy()
    assert np.array_equal(found, expected.astype(found.dtype), equal_nan=True)


@settings(max_examples=50)
@given(numel=st.integers(1, 200), seed=SEEDS)
def test_float16_errs_as_it_says(numel: int, seed: int) -> None:
    values = draw(numel, seed).clamp(-65504, 65504)
    error = (through(Float16(), values).double() - values.double()).abs()
    assert bool((error <= torch.where(values.abs() >= 2.0**-14, 2.0**-11 * values.abs().double(), 2.0**-25)).all())


def test_float16_at_its_ends() -> None:
    values = torch.tensor([65519.996, 65520.0, 2.0**-25, 2.0**-25 * 1.001, 1 + 2.0**-11])
    assert through(Float16(), values).tolist() == [65504, float("inf"), 0, 2.0**-24, 1]  # ties to even


# -- TernGrad --------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(numel=st.integers(1, 200), seed=SEEDS, group=st.sampled_from([None, 1, 3, 64]))
def test_terngrad_is_its_formula_in_numpy(numel: int, seed: int, group: int | None) -> None:
    """s sign(x) b, with b = 1 where the draw is below |x| / s: group by group, in float64."""
    values = draw(numel, seed)
    draws, exact = torch.rand(numel, generator=noise(seed)).double().numpy(), values.double().numpy()
    found = through(TernGrad(group=group), values, seed).double().numpy()
    for start in range(0, numel, group or numel):
        part = slice(start, start + (group or numel))
        scale = np.abs(exact[part]).max()
        near = np.abs(draws[part] - np.abs(exact[part]) / scale) < 1e-6  # rounding may decide these
        expected = scale * np.sign(exact[part]) * (draws[part] < np.abs(exact[part]) / scale)
        assert np.array_equal(found[part][~near], expected[~near])


@pytest.mark.parametrize("numel", [1, 4, 9, 64])
def test_terngrad_reaches_its_variance_bound_and_no_more(numel: int) -> None:
    """On the vector that the bound is from: E ||x - y||**2 = s ||x||_1 - ||x||**2."""
    values = torch.full((numel,), 1 / (sqrt(numel) + 1))
    values[0] = 1.0
    bound = TernGrad().variance_bound(numel)
    exact = values.double()
    squared = float(exact.square().sum())
    assert float(exact.max() * exact.abs().sum() - exact.square().sum()) == pytest.approx(bound * squared, abs=1e-6)
    draws = torch.stack([through(TernGrad(), values, seed) for seed in range(2000)]).double()
    errors = (draws - exact).square().sum(1) / squared
    assert float(errors.mean()) == pytest.approx(bound, abs=5 * float(errors.std()) / sqrt(2000) + 1e-6)
    assert TernGrad(group=numel).contracts == (bound < 1)


# -- natural compression ---------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(numel=st.integers(1, 200), seed=SEEDS)
def test_natural_compression_sends_one_of_the_two_nearest_powers_of_two(numel: int, seed: int) -> None:
    values = draw(numel, seed)
    decoded = through(NaturalCompression(), values, seed).double().numpy()
    exact = values.double().numpy()
    mantissa, exponent = np.frexp(np.abs(exact))  # |x| = mantissa 2**exponent, mantissa in [1/2, 1)
    below = np.where(mantissa > 0, np.ldexp(0.5, exponent), 0.0)
    assert np.array_equal(np.sign(decoded), np.sign(exact))
    up = np.abs(decoded) == 2 * below
    assert np.all(up | (np.abs(decoded) == below))
    assert not np.any(up & (mantissa == 0.5)), "a power of two is kept"


def test_natural_compression_goes_up_as_often_as_it_says() -> None:
    """|x| / 2**e - 1, and the squared error is at most x**2 / 8, which it reaches at 4/3 of a power of two."""
    num_draws = 20_000
    for value, probability in ((1.0, 0.0), (-1.25, 0.25), (4 / 3, 1 / 3), (-3.5, 0.75), (2.0**-100 * 1.5, 0.5)):
        values = torch.full((num_draws,), value)
        decoded = through(NaturalCompression(), values).double()
        low = 2.0 ** np.floor(np.log2(abs(value)))
        share = float((decoded.abs() == 2 * low).double().mean())
        spread = 5 * sqrt(probability * (1 - probability) / num_draws)
        assert share == pytest.approx(probability, abs=spread + 1e-9)
        squared = float((decoded - values.double()).square().mean()) / value**2
        assert squared <= 1 / 8 + 2 * spread
        if value == 4 / 3:
            assert squared == pytest.approx(1 / 8, abs=2 * spread)


def test_natural_compression_at_its_ends() -> None:
    infinity = float("inf")
    values = torch.tensor([0.0, -0.0, 2.0**-126, 2.0**127, infinity, -infinity])
    for seed in range(20):
        decoded = through(NaturalCompression(), values, seed)
        assert torch.equal(decoded, values) and bool(torch.signbit(decoded[1]))
        assert set(through(NaturalCompression(), torch.tensor([1e-42, 3e38]), seed).tolist()) <= {
            0.0,
            2.0**-126,
            2.0**127,
            infinity,
        }


# -- random-k --------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(numel=st.integers(1, 3000), fraction=st.floats(0.001, 1), seed=SEEDS)
def test_random_k_sends_k_values_and_positions_that_the_receiver_draws_too(
    numel: int, fraction: float, seed: int
) -> None:
    values, codec = draw(numel, seed) + 1e6, RandomK(fraction=fraction)  # none is 0
    kept = codec.num_kept(numel)
    decoded = through(codec, values, seed)
    places = decoded.nonzero().view(-1)
    assert len(places) == kept and codec.wire_bytes(numel) == 8 + 4 * kept
    assert torch.equal(decoded[places], values[places])


def test_random_k_chooses_every_position_equally_often() -> None:
    """And so loses 1 - k/n of the squares on average."""
    values, num_draws, share = draw(20, 1), 4000, 0.25
    exact = values.double()
    draws = torch.stack([through(RandomK(fraction=share), values, seed) for seed in range(num_draws)]).double()
    chosen = (draws != 0).double().mean(0)
    assert float((chosen - share).abs().max()) < 5 * sqrt(share * (1 - share) / num_draws)
    errors = (draws - exact).square().sum(1) / exact.square().sum()
    assert float(errors.mean()) == pytest.approx(1 - share, abs=5 * float(errors.std()) / sqrt(num_draws))


def test_random_k_hides_no_value_that_is_not_finite() -> None:
    """It may be at a position that is not sent."""
    for bad in (float("nan"), float("inf")):
        values = torch.ones(100)
        values[17] = bad
        assert bool(through(RandomK(), values).isnan()[17])
        assert not bool(through(RandomK(fraction=1.0), values).isfinite()[17])


# -- top-k -----------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(numel=st.integers(1, 3000), share=st.floats(0.001, 1), seed=SEEDS, ties=st.booleans(), order=st.booleans())
def test_top_k_is_the_readable_one(numel: int, share: float, seed: int, ties: bool, order: bool) -> None:
    """The first k of a stable sort by magnitude, for any order of the values and any number of equal ones."""
    values = draw(numel, seed)
    if ties:
        values = values.sign() * values.abs().log2().round().exp2()
    if order:
        values = values[values.abs().argsort()]
    codec = TopK(fraction=share)
    kept = values.abs().sort(descending=True, stable=True).indices[: codec.num_kept(numel)]
    expected = torch.zeros(numel)
    expected[kept] = values[kept]
    decoded = through(codec, values)
    assert torch.equal(decoded, expected)
    kept_share = codec.num_kept(numel) / numel
    assert float((values - decoded).double().square().sum()) <= (1 - kept_share) * float(
        values.double().square().sum()
    ) * (1 + 1e-9)


@pytest.mark.parametrize("period", [64, 63])
def test_top_k_holds_where_its_guess_is_misled(period: int) -> None:
    """Large values just where, or just where not, the sample looks."""
    values = torch.rand(6400, generator=noise(1))
    values[::period] += 10
    for k in (1, 50, 100, 101, 400, 6400):
        kept = through(TopK(k=k), values).nonzero().view(-1)
        assert kept.tolist() == sorted(values.sort(descending=True, stable=True).indices[:k].tolist())


def test_top_k_sends_a_nan_before_an_infinity_before_a_number() -> None:
    values = torch.tensor([1e38, float("inf"), float("nan"), 5.0])
    assert through(TopK(k=1), values).isnan().tolist() == [False, False, True, False]
    assert through(TopK(k=2), values).isfinite().tolist() == [True, False, False, True]


# -- sign ------------------------------------------------------------------------------------------------------


def test_sign_by_hand() -> None:
    assert through(Sign(), torch.tensor([1.0, -2.0, 0.0, 5.0])).tolist() == [2, -2, 2, 2]
    assert through(Sign(group=2), torch.tensor([1.0, -2.0, 0.0, 5.0])).tolist() == [1.5, -1.5, 2.5, 2.5]


@settings(max_examples=50)
@given(numel=st.integers(1, 200), seed=SEEDS)
def test_sign_contracts_by_exactly_what_its_paper_says(numel: int, seed: int) -> None:
    values = draw(numel, seed)
    exact = values.double()
    squared = float(exact.square().sum())
    expected = squared - float(exact.abs().sum()) ** 2 / numel
    assert float((exact - through(Sign(), values).double()).square().sum()) == pytest.approx(
        expected, rel=1e-4, abs=1e-5 * squared
    )


# -- integers that are summed ----------------------------------------------------------------------------------


@settings(max_examples=50)
@given(
    num_ranks=st.integers(1, 127),
    numel=st.integers(1, 50),
    seed=SEEDS,
    bits=st.sampled_from([8, 16, 32]),
    rounding=st.sampled_from(["nearest", "stochastic"]),
)
def test_integers_of_all_ranks_never_overflow_and_their_sum_decodes_to_the_sum(
    num_ranks: int, numel: int, seed: int, bits: int, rounding: str
) -> None:
    codec = SharedInt(bits=bits, rounding=rounding)  # type: ignore[arg-type]
    values = [draw(numel, seed + rank) for rank in range(num_ranks)]
    values[-1] = values[0].clone()
    for row in values:
        row[0] = values[0].abs().max() * 3  # all at the top of the range at once
    scale = torch.stack([codec.magnitude(row) for row in values]).amax(0)
    integers = [codec.encode_shared(row, scale, num_ranks, noise(seed + rank)) for rank, row in enumerate(values)]
    total = integers[0].clone()
    for item in integers[1:]:
        total += item
    assert torch.equal(total.long(), torch.stack(integers).long().sum(0)), "wrapped round"
    decoded = codec.decode_shared(total, scale, num_ranks, values[0])
    levels = (2 ** (bits - 1) - 1) // num_ranks
    bound = (0.5 if rounding == "nearest" else 1.0) * num_ranks * float(scale) / levels
    error = (decoded.double() - torch.stack(values).double().sum(0)).abs().max()
    assert float(error) <= bound * (1 + 1e-4) + 1e-6 * num_ranks * float(scale)


def test_more_ranks_than_levels_are_refused_with_the_width_that_suits() -> None:
    SharedInt8().check_ranks(127)
    with pytest.raises(ConfigError, match=r"128 ranks do not fit 8 bits: use SharedInt\(bits=16\)"):
        SharedInt8().encode_shared(torch.ones(2), torch.ones(1), 128)
    with pytest.raises(ConfigError, match=r"use SharedInt\(bits=32\)"):
        SharedInt().check_ranks(40_000)


# -- settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Truncate16(rounding="up"), "'toward-zero', 'nearest'"),  # type: ignore[arg-type]
        (lambda: Linear8(rounding="up"), "'nearest', 'stochastic'"),  # type: ignore[arg-type]
        (lambda: Linear8(group=0), "1 or more, or None"),
        (lambda: QSGD(levels=0), "give 1 to 127"),
        (lambda: QSGD(levels=128), "give 1 to 127"),
        (lambda: QSGD(group=2.5), "1 or more, or None"),  # type: ignore[arg-type]
        (lambda: TopK(fraction=0.1, k=3), "not both"),
        (lambda: TopK(fraction=0.0), "above 0 and at most 1"),
        (lambda: TopK(k=0), "1 or more"),
        (lambda: RandomK(fraction=0.0), "above 0 and at most 1"),
        (lambda: RandomK(fraction=True), "above 0 and at most 1"),
        (lambda: TernGrad(group=0), "1 or more, or None"),
        (lambda: ErrorFeedback(codec=TernGrad(group=9)), "would grow"),
        (lambda: Sign(group=True), "1 or more, or None"),
        (lambda: SharedInt(bits=7), "8, 16, 32"),  # type: ignore[arg-type]
        (lambda: ErrorFeedback(codec=ErrorFeedback(codec=Sign())), "without feedback, such as TopK"),  # type: ignore[arg-type]
        (lambda: ErrorFeedback(codec="sign"), "goes around a codec"),  # type: ignore[arg-type]
        (lambda: ErrorFeedback(codec=QSGD(levels=1, group=512)), "would grow"),
        (lambda: ErrorFeedback(codec=Linear8(rounding="stochastic")), "would grow"),
        (lambda: check_codec(ErrorFeedback(codec=Sign())), "use Once"),
        (lambda: check_codec("sign"), "give one of truncate16, float16"),
        (lambda: codecs.get("linear-8"), "did you mean linear8"),
        (lambda: codecs.get("top-k", fracton=0.1), "did you mean fraction"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(make: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()  # type: ignore[operator]


def test_feedback_around_a_codec_that_does_not_contract_would_grow() -> None:
    """What the refusal is for: the residual of ternary QSGD on large groups grows without bound."""
    codec, gradient, residual = QSGD(levels=1, group=None), torch.randn(512, generator=noise(0)), torch.zeros(512)
    for step in range(30):
        value = gradient + residual
        residual = value - through(codec, value, step)
    assert float(residual.norm()) > 1e4 * float(gradient.norm())
    residual = torch.zeros(512)
    for step in range(200):
        ErrorFeedback(codec=QSGD(levels=127, group=512)).encode(gradient.clone(), residual, noise(step))
    assert float(residual.norm()) < float(gradient.norm())


def test_names_are_found_with_their_settings() -> None:
    assert codecs.get("QSGD", levels=3) == QSGD(levels=3)
    assert codecs.get("shared-int8") == SharedInt(bits=8)
    check_codec(codecs.get("truncate16", rounding="nearest"))
