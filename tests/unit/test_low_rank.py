"""PowerSGD and its alternating form: against torch's own hook, exact where the sum is of low rank, nothing forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

from tests.laws.small_world import applied, contexts, gradients, same, world
from workbench.codecs import Linear8
from workbench.collectives import Native, Once, PowerSGD, Ring, native_bytes
from workbench.errors import ConfigError
from workbench.gradients import Gradient, Layout, build_layout, trainable

WAYS = [
    PowerSGD(),
    PowerSGD(rank=1),
    PowerSGD(rank=4, alternate=True),
    PowerSGD(error_feedback=False),
    PowerSGD(inner=Ring()),
]
EVERY = pytest.mark.parametrize("way", WAYS, ids=repr)


class Mixed(nn.Module):
    """A convolution in channels_last, matrices of several shapes (one too thin to gain), a vector and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(20, 9)
        self.thin = nn.Linear(2, 7)
        self.scalar = nn.Parameter(torch.tensor(0.5))


def layout_of(bucket_bytes: float | None = None, dtype: torch.dtype = torch.float64) -> Layout:
    return build_layout(trainable(Mixed().to(dtype)), bucket_bytes)


def flats(layout: Layout, num_ranks: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = list(torch.randn(num_ranks, layout.numel, generator=generator, dtype=layout.dtype))
    for rank, row in enumerate(rows):
        for piece in layout.buckets:
            row[piece.tail : piece.stop] = torch.arange(piece.stop - piece.tail) + (rank + 1) / 7
    return rows


def low_rank_flats(layout: Layout, num_ranks: int, rank: int, seed: int) -> list[Tensor]:
    """Gradients of which every matrix, and so their sum, spans the same few dimensions."""
    rows = flats(layout, num_ranks, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for slot in layout.slots:
        if len(slot.shape) > 1:
            left = torch.randn(slot.shape[0], rank, generator=generator, dtype=layout.dtype)
            right = torch.randn(rank, slot.numel // slot.shape[0], generator=generator, dtype=layout.dtype)
            for number, row in enumerate(rows):
                Gradient(row, layout, 0, 0).view(slot).copy_(((number + 1) * left @ right).view(slot.shape))
    return rows


class Bucket:
    """The part of DDP's bucket that torch's hook uses."""

    def __init__(self, flat: Tensor, shapes: list[tuple[int, ...]]) -> None:
        self.flat, self.shapes = flat, shapes

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        parts = self.flat.split([torch.Size(shape).numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


KEPT: list[dist.ProcessGroup] = []


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of this process.

    It is released and not destroyed. torch's hook keeps it in callbacks on the group's own thread. If that thread
    dropped the last reference, it would wait for its own end, and abort.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    KEPT.append(dist.group.WORLD)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_it_is_what_torch_does_step_by_step(
    alone: None, dtype: torch.dtype, rank: int, feedback: bool, num_ranks: int
) -> None:
    """From the same first Q. Torch gets the mean over ranks: its next Q depends on the mean alone, and so does ours."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(20, 9), nn.Linear(3, 2)).to(dtype)
    layout = build_layout(trainable(model))
    (piece,) = layout.buckets
    way, ranks = PowerSGD(rank=rank, error_feedback=feedback), contexts(num_ranks, layout, seed=11)
    state = hook.PowerSGDState(None, rank, 2, min_compression_rate=1, use_error_feedback=feedback)
    state.iter = 2
    # Torch takes them in the bucket's order, as we do
    compressed = [slot for slot in piece.slots if slot in way.matrices(piece)]
    for slot in compressed:
        factor = torch.randn(
            way.factor_shape(slot, "q"), generator=torch.Generator().manual_seed(slot.index), dtype=dtype
        )
        for ctx in ranks:
            ctx.memory[f"low-rank.q/{slot.index}"] = factor.clone()
    state.q_memory_dict[0] = torch.cat([ranks[0].memory[f"low-rank.q/{slot.index}"].view(-1) for slot in compressed])
    state.p_memory_dict[0] = torch.empty(sum(prod(way.factor_shape(slot, "p")) for slot in compressed), dtype=dtype)
    assert len(compressed) >= 2
    for step in range(6):
        rows = [row / num_ranks for row in flats(layout, num_ranks, step)]  # shares of a mean
        bucket = Bucket(torch.stack(rows).sum(0)[: piece.tail], [slot.shape for slot in piece.slots])
        expected = hook.powerSGD_hook(state, bucket).wait()  # type: ignore[arg-type]
        ours = world(way, ranks, gradients(layout, rows, step), step).run()[0]
        tolerance = 1e-10 if dtype == torch.float64 else 2e-3  # rounding that is fed back grows, about threefold a step
        assert torch.allclose(ours[: piece.tail], expected, rtol=tolerance, atol=tolerance), step
        exact = torch.stack(rows).sum(0)[: piece.tail]
        assert not torch.allclose(ours[: piece.tail], exact, rtol=0.05), "nothing was compressed"


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_sum_of_low_rank_comes_out_exact(rank: int, num_ranks: int) -> None:
    layout = layout_of()
    rows = low_rank_flats(layout, num_ranks, rank, seed=3)
    exact = torch.stack(rows).sum(0)
    result = world(PowerSGD(rank=rank), contexts(num_ranks, layout), gradients(layout, rows)).run()[0]
    assert torch.allclose(result, exact, rtol=1e-10, atol=1e-10)
    if rank > 1:
        less = world(PowerSGD(rank=rank - 1), contexts(num_ranks, layout), gradients(layout, rows)).run()[0]
        assert not torch.allclose(less, exact, rtol=0.01)


def test_alternating_is_exact_on_such_a_sum_every_two_steps() -> None:
    """An even step sees only a projection on Q; the odd one finds the rest in the residual, and leaves none."""
    layout = layout_of()
    rows = low_rank_flats(layout, 3, 2, seed=3)
    exact, ranks, body = torch.stack(rows).sum(0), contexts(3, layout), slice(0, layout.buckets[0].tail)
    sums = [world(PowerSGD(alternate=True), ranks, gradients(layout, rows, step)).run()[0] for step in range(4)]
    for even in (0, 2):
        assert not torch.allclose(sums[even], exact, rtol=0.01)
        assert torch.allclose((sums[even] + sums[even + 1])[body], 2 * exact[body], rtol=1e-9, atol=1e-9)
    assert float((sums[2] - exact).norm()) < 0.5 * float((sums[0] - exact).norm()), "Q is warm"


@EVERY
@settings(max_examples=15)
@given(
    num_ranks=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
    bucket_bytes=st.sampled_from([None, 0, 900]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_replicas_stay_equal_what_is_small_is_exact_and_bytes_as_foretold(
    way: PowerSGD, num_ranks: int, seed: int, bucket_bytes: float | None, dtype: torch.dtype
) -> None:
    layout = layout_of(bucket_bytes, dtype)
    ranks, sent = contexts(num_ranks, layout, seed % 1000), torch.zeros(num_ranks, dtype=torch.float64)
    for step in range(2):
        rows = flats(layout, num_ranks, seed + step)
        exact = rows[0].clone()
        for row in rows[1:]:
            exact += row
        ran = world(way, ranks, gradients(layout, rows, step), seed)
        results = ran.run()
        assert same(results)
        sent += torch.tensor(ran.bytes_sent)
        for piece in layout.buckets:
            small = [
                slice(slot.offset, slot.offset + slot.numel) for slot in piece.slots if slot not in way.matrices(piece)
            ]
            for part in [*small, slice(piece.tail, piece.stop)]:
                if way.inner == Native():
                    assert torch.equal(results[0][part], exact[part])
                else:  # in the order of its ring
                    assert torch.allclose(results[0][part], exact[part], rtol=1e-4, atol=1e-5)
    if way.inner == Native():
        assert sent.tolist() == pytest.approx([2 * way.bytes_of(rank, num_ranks, layout) for rank in range(num_ranks)])


def test_bytes_by_hand() -> None:
    """One 20 x 10 matrix and its bias of 20, tail of 4: P 40, Q 20 numbers of 8 bytes."""
    layout = build_layout(trainable(nn.Linear(10, 20).double()))
    assert PowerSGD().bytes_of(0, 4, layout) == native_bytes(4, 8 * (40 + 20 + 4)) + native_bytes(4, 8 * 20)
    assert (
        PowerSGD(alternate=True).bytes_of(0, 4, layout)
        == (native_bytes(4, 8 * (40 + 24)) + native_bytes(4, 8 * (20 + 24))) / 2
    )
    biases = build_layout(trainable(nn.LayerNorm(5).double()))
    assert PowerSGD().bytes_of(0, 4, biases) == native_bytes(4, 8 * biases.numel)


@pytest.mark.parametrize("way", [way for way in WAYS if way.error_feedback], ids=repr)
def test_with_feedback_all_that_was_applied_and_all_residuals_are_all_gradients(way: PowerSGD) -> None:
    layout = layout_of(900)
    ranks, sent, total = contexts(3, layout), torch.zeros(layout.numel).double(), torch.zeros(layout.numel).double()
    for step in range(9):
        rows = flats(layout, 3, step)
        total += applied(layout, torch.stack(rows).sum(0))
        sent += applied(layout, world(way, ranks, gradients(layout, rows, step), step).run()[0])
    left = Gradient(torch.zeros(layout.numel).double(), layout, 0, 0)
    for slot in layout.slots:
        for ctx in ranks:
            if f"low-rank.residual/{slot.index}" in ctx.memory:
                left.view(slot).add_(ctx.memory[f"low-rank.residual/{slot.index}"])
    assert torch.allclose(sent + left.flat, total, rtol=1e-11, atol=1e-11)
    assert not torch.allclose(sent, total, rtol=0.05)


def test_steps_before_the_start_are_summed_as_they_are_and_leave_nothing_in_memory() -> None:
    layout = layout_of()
    ranks, way = contexts(2, layout), PowerSGD(start_step=2)
    for step in range(4):
        rows = flats(layout, 2, step)
        result = world(way, ranks, gradients(layout, rows, step)).run()[0]
        assert torch.equal(result, rows[0] + rows[1]) == (step < 2)
        assert bool(ranks[0].memory) == (step >= 2)


@EVERY
def test_zero_and_deficient_gradients_have_finite_sums_and_do_no_harm_later(way: PowerSGD) -> None:
    layout = layout_of()
    ranks = contexts(2, layout)
    zeros = [torch.zeros(layout.numel, dtype=layout.dtype)] * 2
    for step in range(2):
        assert not world(way, ranks, gradients(layout, zeros, step)).run()[0].count_nonzero()
    rows = low_rank_flats(layout, 2, 1, seed=1)  # of rank 1, less than most ways' own
    sums = [world(way, ranks, gradients(layout, rows, 2 + step)).run()[0] for step in range(4)]
    assert torch.allclose(sums[2] + sums[3], 2 * (rows[0] + rows[1]), rtol=1e-8, atol=1e-8)


@EVERY
def test_a_nan_of_one_rank_reaches_all_and_is_gone_with_the_next_step(way: PowerSGD) -> None:
    layout = layout_of()
    ranks = contexts(3, layout)
    for step in range(4):
        rows = flats(layout, 3, step)
        slot = next(slot for slot in layout.slots if slot.name == "wide.weight")
        if step < 2:  # whichever factor's turn it is
            Gradient(rows[1], layout, 0, 0).view(slot)[3, 4] = float("nan") if step else float("inf")
        for result in world(way, ranks, gradients(layout, rows, step)).run():
            assert bool(Gradient(result, layout, 0, 0).view(slot)[3, 4].isfinite()) == (step >= 2)
            assert bool(result.isfinite().all()) == (step >= 2)


@EVERY
def test_sizes_alone_travel_in_a_simulation_of_timing(way: PowerSGD) -> None:
    layout = layout_of(900)
    ranks, real_ranks = contexts(3, layout), contexts(3, layout)
    for step in range(2):
        ran = world(
            way, ranks, gradients(layout, [torch.empty(layout.numel, dtype=layout.dtype, device="meta")] * 3, step)
        )
        real = world(way, real_ranks, gradients(layout, flats(layout, 3, 0), step))
        ran.run(), real.run()
        assert ran.bytes_sent == real.bytes_sent
        assert ran.local_bytes == real.local_bytes
    assert all(value.is_meta for name, value in ranks[0].memory.items() if not name.startswith("low-rank.sums"))
    assert {name: value.shape for name, value in ranks[0].memory.items()} == {
        name: value.shape for name, value in real_ranks[0].memory.items()
    }


@EVERY
def test_what_is_remembered_stands_alone(way: PowerSGD) -> None:
    """Saved with a checkpoint: no tensor drags a whole message's memory along, or shares the gradient's."""
    layout = layout_of()
    (ctx,) = contexts(1, layout)
    rows = gradients(layout, flats(layout, 1, 0))
    world(way, [ctx], rows).run()
    own = rows[0].flat.untyped_storage().data_ptr()
    for value in ctx.memory.values():
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size()
        assert value.untyped_storage().data_ptr() != own


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: PowerSGD(rank=0), "1 or more"),
        (lambda: PowerSGD(rank=1.5), "1 or more"),  # type: ignore[arg-type]
        (lambda: PowerSGD(start_step=-1), "0 or more"),
        (lambda: PowerSGD(alternate=True, error_feedback=False), "needs error_feedback=True"),
        (lambda: PowerSGD(inner=Once(codec=Linear8())), "is lossy, but must"),
        (lambda: PowerSGD(inner=PowerSGD()), "is lossy, but must"),
        (lambda: world(PowerSGD(), contexts(1), [torch.zeros(3)]).run(), "needs the shapes"),
    ],
)
def test_what_cannot_work_is_refused(make: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()
