"""A codec once around a sum: the sum, the messages, and the memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from tests.laws.small_world import applied, contexts, gradients, same, world
from workbench.codecs import QSGD, Codec, ErrorFeedback, Linear8, SharedInt, SharedInt8, Sign, TopK, Truncate16
from workbench.collectives import Auto, Collective, Linear, Native, Once, PowerSGD, Ring, native_bytes
from workbench.errors import ConfigError
from workbench.gradients import CONTROL, WEIGHT, Layout, build_layout, trainable
from workbench.ops import Program, Value
from workbench.program import Context


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Raw(Codec):
    """Nothing is lost: the bytes of the values."""

    itemsize: Literal[4, 8] = 8

    def wire_bytes(self, numel: int) -> int:
        return self.itemsize * numel

    def encode(self, values: Tensor, noise: Generator | None = None) -> Tensor:
        return values.clone().view(torch.uint8)

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        return wire.clone().view(like.dtype)


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Pairs(Collective):
    """A sum over two ranks only."""

    def all_reduce(self, ctx: Context, value: Value) -> Program:
        return Linear().all_reduce(ctx, value)

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        return Linear().bytes_sent(rank, num_workers, numel, itemsize)

    def check(self, num_workers: int) -> None:
        if num_workers != 2:
            raise ConfigError("two ranks")


SPREADS = ["encoded", "raw", "gather"]
PLAIN: list[Codec | ErrorFeedback] = [
    Truncate16(),
    Linear8(),
    Linear8(rounding="stochastic", group=4),
    QSGD(levels=7, group=8),
    TopK(fraction=0.2),
    Sign(),
    ErrorFeedback(codec=TopK(fraction=0.2)),
    ErrorFeedback(codec=Sign()),
    ErrorFeedback(codec=Linear8()),
]
WAYS: list[Once] = [
    *(Once(codec=codec) for codec in PLAIN),
    *(Once(codec=codec, spread=spread) for codec in (Linear8(), ErrorFeedback(codec=TopK(k=1))) for spread in SPREADS),  # type: ignore[arg-type]
    Once(codec=SharedInt8()),
    Once(codec=SharedInt(bits=16, rounding="stochastic")),
    Once(codec=ErrorFeedback(codec=SharedInt8())),
    Once(codec=SharedInt(bits=32), inner=Ring()),
]
EVERY = pytest.mark.parametrize("way", WAYS, ids=repr)
SEEDS = st.integers(0, 2**32 - 1)


def layout_of(bucket_bytes: float | None = None, dtype: torch.dtype = torch.float32) -> Layout:
    """107 numbers in six tensors."""
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    return build_layout(trainable(model), bucket_bytes)


def flats(layout: Layout, num_ranks: int, seed: int) -> list[Tensor]:
    """Values of a gradient for each rank; tails like real ones: shares, a control value, ones and zeros."""
    generator = torch.Generator().manual_seed(seed)
    rows = list(torch.randn(num_ranks, layout.numel, generator=generator, dtype=layout.dtype) / 7)
    for rank, row in enumerate(rows):
        for piece in layout.buckets:
            tail = row[piece.tail : piece.stop]
            tail.copy_(torch.randint(0, 2, tail.shape, generator=generator))
            tail[WEIGHT], tail[CONTROL] = (1 + rank) / 7, 3.0 if rank == 0 else 0.0
    return rows


def in_rank_order(rows: list[Tensor]) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


@pytest.mark.parametrize("spread", SPREADS)
@settings(max_examples=25)
@given(
    num_ranks=st.integers(1, 7),
    numel=st.integers(0, 30),
    seed=SEEDS,
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_without_loss_it_is_the_sum_in_rank_order_to_the_last_bit(
    spread: Any, num_ranks: int, numel: int, seed: int, dtype: torch.dtype
) -> None:
    rows = list(torch.randn(num_ranks, numel, generator=torch.Generator().manual_seed(seed), dtype=dtype))
    collective = Once(codec=Raw(itemsize=dtype.itemsize), spread=spread)  # type: ignore[arg-type]
    ran = world(collective, contexts(num_ranks), [row.clone() for row in rows], seed)
    for result in ran.run():
        assert torch.equal(result, in_rank_order(rows))
    assert ran.bytes_sent == [
        collective.bytes_sent(rank, num_ranks, numel, dtype.itemsize) for rank in range(num_ranks)
    ]


@EVERY
@settings(max_examples=12)
@given(
    num_ranks=st.integers(1, 6),
    seed=SEEDS,
    bucket_bytes=st.sampled_from([None, 0, 200]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_replicas_stay_equal_tails_exact_and_bytes_as_foretold(
    way: Once, num_ranks: int, seed: int, bucket_bytes: float | None, dtype: torch.dtype
) -> None:
    """Over two steps, with all memory; a bucket of one bias of three numbers is among them."""
    layout = layout_of(bucket_bytes, dtype)
    ranks = contexts(num_ranks, layout, seed % 1000)
    for step in range(2):
        rows = flats(layout, num_ranks, seed + step)
        expected = in_rank_order(rows)
        ran = world(way, ranks, gradients(layout, rows, step), seed)
        results = ran.run()
        assert same(results)
        assert bool(results[0].isfinite().all())
        for piece in layout.buckets:
            tail, exact = results[0][piece.tail : piece.stop], expected[piece.tail : piece.stop]
            if way.inner == Ring():  # tails are sums in the order of its ring
                assert torch.allclose(tail, exact, rtol=4 * torch.finfo(dtype).eps, atol=0)
            else:
                assert torch.equal(tail, exact)
        if way.inner == Native():
            assert ran.bytes_sent == pytest.approx([way.bytes_of(rank, num_ranks, layout) for rank in range(num_ranks)])
    assert bool(ran.local_bytes["encode"]) and bool(ran.local_bytes["decode"])


@EVERY
def test_buckets_one_by_one_are_the_whole_gradient(way: Once) -> None:
    """Their memory has the same names, so a run may be resumed either way."""
    layout = layout_of(200)
    rows = flats(layout, 3, seed=5)
    whole, parts = contexts(3, layout), contexts(3, layout)
    together = world(way, whole, gradients(layout, rows)).run()[0]
    for piece in layout.buckets:
        slices = [row[piece.start : piece.stop] for row in rows]
        assert torch.equal(
            world(way, parts, gradients(layout, slices, bucket=piece.index)).run()[1],
            together[piece.start : piece.stop],
        )
    assert whole[2].memory.keys() == parts[2].memory.keys()
    assert all(torch.equal(value, parts[2].memory[name]) for name, value in whole[2].memory.items())


@pytest.mark.parametrize(
    "way", [way for way in WAYS if isinstance(way.codec, ErrorFeedback) and way.spread != "raw"], ids=repr
)
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_with_feedback_all_that_was_applied_and_all_residuals_are_all_gradients(way: Once, num_ranks: int) -> None:
    """Residuals of every rank, and with two shots of every owner: none of the two encodings forgets."""
    layout = layout_of(None, torch.float64)
    ranks, piece = contexts(num_ranks, layout), layout.buckets[0]
    sent = total = torch.zeros(layout.numel, dtype=torch.float64)
    for step in range(12):
        rows = flats(layout, num_ranks, 100 + step)
        total = total + applied(layout, in_rank_order(rows))
        sent = sent + applied(layout, world(way, ranks, gradients(layout, rows, step), step).run()[0])
    left = sum(ctx.memory["once.residual/bucket-0"] for ctx in ranks)
    owned = [ctx.memory.get("once.owner/bucket-0") for ctx in ranks]
    if owned[0] is not None:
        left = left + torch.cat(owned)
    body = slice(piece.start, piece.tail)
    assert torch.allclose(sent[body] + left, total[body], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(sent[body], total[body], rtol=1e-3), "nothing was left out, so nothing was tested"
    plain = world(
        Once(codec=way.plain, spread=way.spread, inner=way.inner), contexts(num_ranks, layout), gradients(layout, rows)
    ).run()[0]
    assert torch.equal(plain[piece.tail :], in_rank_order(rows)[piece.tail :])


def test_one_encoding_of_each_value_and_one_of_the_sum_bound_the_error() -> None:
    """p halves of a level of each value, and half a level of the sum's."""
    rows = list(torch.randn(5, 200, generator=torch.Generator().manual_seed(0)))
    exact = in_rank_order(rows).double()
    error = {
        spread: (
            world(Once(codec=Linear8(), spread=spread), contexts(5), [row.clone() for row in rows]).run()[0].double()
            - exact
        )  # type: ignore[arg-type]
        for spread in SPREADS
    }
    each = sum(float(row.abs().max()) for row in rows) / 254
    assert 0 < float(error["raw"].abs().max()) <= each * 1.001
    assert 0 < float(error["gather"].abs().max()) <= each * 1.001
    assert 0 < float(error["encoded"].abs().max()) <= (each + (float(exact.abs().max()) + each) / 254) * 1.001


def test_bytes_by_hand() -> None:
    """Ten values, two of them tail, over three ranks: blocks of 3, 3 and 2 (rank 2 owns the tail)."""
    encoded = [Once(codec=Linear8()).bytes_sent(rank, 3, 10, 4, tail=2) for rank in range(3)]
    assert encoded == [(7 + 6 + 8) + 2 * 7, (7 + 6 + 8) + 2 * 7, (7 + 7) + 2 * (6 + 8)]
    raw = [Once(codec=Linear8(), spread="raw").bytes_sent(rank, 3, 10, 4, tail=2) for rank in range(3)]
    assert raw == [21 + 2 * 12, 21 + 2 * 12, 14 + 2 * (8 + 8)]
    assert Once(codec=TopK(k=1)).bytes_sent(0, 3, 10, 4, tail=2) == 2 * (8 + 8)
    assert Once(codec=SharedInt8()).bytes_sent(0, 3, 10, 4, tail=2) == native_bytes(3, 5 * 4) + native_bytes(3, 8)


@EVERY
def test_a_nan_of_one_rank_reaches_all(way: Once) -> None:
    layout = layout_of()
    rows = flats(layout, 3, seed=1)
    rows[1][4] = float("nan")
    for result in world(way, contexts(3, layout), gradients(layout, rows)).run():
        assert not bool(result[4].isfinite())


@EVERY
def test_after_an_overflow_the_next_step_is_finite_again(way: Once) -> None:
    """Training in fp16 skips such a step and continues; a residual must not keep the overflow."""
    layout = layout_of()
    ranks = contexts(3, layout)
    for step in range(2):
        rows = flats(layout, 3, seed=step)
        if step == 0:
            rows[2][50] = float("inf")
        finite = bool(world(way, ranks, gradients(layout, rows, step)).run()[0].isfinite().all())
        assert finite == (step == 1)


@EVERY
def test_sizes_alone_travel_in_a_simulation_of_timing(way: Once) -> None:
    layout = layout_of(200)
    empty = [torch.empty(layout.numel, device="meta") for _ in range(3)]
    ranks = contexts(3, layout)
    ran = world(way, ranks, gradients(layout, empty))
    ran.run()
    if way.inner == Native():
        assert ran.bytes_sent == pytest.approx([way.bytes_of(rank, 3, layout) for rank in range(3)])
    assert all(value.is_meta for value in ranks[0].memory.values())
    real = world(way, contexts(3, layout), gradients(layout, flats(layout, 3, 0)))
    real.run()
    assert real.local_bytes == ran.local_bytes, "the same local work"


@pytest.mark.parametrize(
    "codec", [QSGD(levels=1, group=8), Linear8(rounding="stochastic"), SharedInt(rounding="stochastic")], ids=repr
)
def test_noise_differs_by_step_and_seed_and_by_nothing_else(codec: Codec) -> None:
    way, layout = Once(codec=codec), layout_of(0)
    row = flats(layout, 1, 3)[0]

    def summed(seed: int = 0, step: int = 0) -> Tensor:
        return world(way, contexts(1, layout, seed), gradients(layout, [row], step)).run()[0]

    assert torch.equal(summed(), summed())
    assert not torch.equal(summed(), summed(step=1))
    assert not torch.equal(summed(), summed(seed=1))


def test_noise_differs_by_rank_and_bucket() -> None:
    """Two ranks, or two buckets, of the same values: what is decoded of them is not the same."""
    way = Once(codec=QSGD(levels=1, group=None), spread="gather")
    layout = build_layout(trainable(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))), bucket_bytes=300)
    row = torch.ones(layout.numel)
    one, two = (world(way, contexts(ranks, layout), gradients(layout, [row] * ranks)).run()[0] for ranks in (1, 2))
    assert not torch.equal(two, 2 * one)
    first, second = layout.buckets
    assert first.tail - first.start == second.tail - second.start
    assert not torch.equal(one[first.start : first.tail], one[second.start : second.tail])
    integers = world(
        Once(codec=SharedInt(rounding="stochastic")),
        contexts(2),
        [(row[:50] * 0.3 + torch.eye(1, 50)[0]).clone() for _ in range(2)],
    )
    units = integers.run()[0] * (127 // 2) / 1.3  # the same noise would make every sum of two an even one
    assert bool((units.round() % 2 == 1).any())


def test_a_tensor_has_no_step_and_draws_anew_at_each_call() -> None:
    ranks, way, row = contexts(2), Once(codec=QSGD(levels=1, group=None)), torch.arange(1.0, 30.0)
    first, second = (world(way, ranks, [row.clone(), row.clone()]).run()[0] for _ in range(2))
    assert not torch.equal(first, second)


def test_the_mean_over_steps_of_unbiased_sums_is_the_sum() -> None:
    """Two roundings, both unbiased: deviations in units of their own standard error."""
    layout = layout_of()
    rows = flats(layout, 3, 9)
    body = slice(0, layout.buckets[0].tail)
    ranks = contexts(3, layout)
    draws = torch.stack(
        [
            world(Once(codec=Linear8(rounding="stochastic")), ranks, gradients(layout, rows, step)).run()[0]
            for step in range(300)
        ]
    )
    deviation = (draws.double().mean(0) - in_rank_order(rows).double())[body]
    z = deviation / (draws.double().std(0)[body] / 300**0.5 + 1e-7)
    assert float(z.abs().max()) < 5
    assert 0.5 < float(z.square().mean()) < 1.5


def test_a_residual_of_another_layout_is_refused() -> None:
    way, (ctx,) = Once(codec=ErrorFeedback(codec=Sign())), contexts(1)
    layout = layout_of()
    world(way, [ctx], gradients(layout, flats(layout, 1, 0))).run()
    other = layout_of(200)
    with pytest.raises(ConfigError, match="must have the same layout"):
        world(way, [ctx], gradients(other, flats(other, 1, 0))).run()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Once(codec=None), "give a codec"),  # type: ignore[arg-type]
        (lambda: Once(codec=Linear8(), spread="ring"), "'encoded', 'raw', 'gather'"),  # type: ignore[arg-type]
        (lambda: Once(codec=SharedInt8(), spread="gather"), "leave spread out"),
        (lambda: Once(codec=Linear8(), inner=Ring()), "leave inner out"),
        (lambda: Once(codec=SharedInt8(), inner="ring"), "such as Native"),  # type: ignore[arg-type]
        (lambda: Once(codec=SharedInt8(), inner=Once(codec=Linear8())), "is lossy, but must"),
        (lambda: Once(codec=SharedInt8(), inner=PowerSGD()), "is lossy, but must"),
        (lambda: Once(codec=SharedInt8()).check(128), "do not fit 8 bits"),
    ],
)
def test_what_cannot_work_is_refused(make: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


def test_as_many_ranks_as_fit() -> None:
    rows = list(torch.randn(127, 3, generator=torch.Generator().manual_seed(0)))
    result = world(Once(codec=SharedInt8()), contexts(127), [row.clone() for row in rows]).run()[0]
    scale = float(torch.stack(rows).abs().max())
    assert float((result - in_rank_order(rows)).abs().max()) <= 127 * scale / 2  # one level is left
    finer = world(
        replace(Once(codec=SharedInt(bits=16)), inner=Linear()), contexts(127), [row.clone() for row in rows]
    ).run()[0]
    assert float((finer - in_rank_order(rows)).abs().max()) <= 127 * scale / 2 / (32767 // 127)


def test_what_the_inner_sum_needs_is_asked_for() -> None:
    for way in (Once(codec=SharedInt8(), inner=Auto()), PowerSGD(inner=Auto())):
        assert way.needs_link
    assert not Once(codec=SharedInt8()).needs_link
    for way in (Once(codec=SharedInt8(), inner=Pairs()), PowerSGD(inner=Pairs())):
        way.check(2)
        with pytest.raises(ConfigError, match="two ranks"):
            way.check(3)
