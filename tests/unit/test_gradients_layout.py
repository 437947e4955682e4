"""Laws of `Layout`: how the parameters of any module lie in one flat buffer; and of the buffers themselves."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from workbench.errors import ConfigError
from workbench.gradients import USED, BufferPool, Gradient, Layout, build_layout, trainable, whole

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NAN = float("nan")


class Mixed(nn.Module):
    """Some layers, of which later ones may share the weight of an earlier one, and any may be frozen."""

    def __init__(self, layers: list[nn.Module], shared: list[tuple[int, int]], frozen: set[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        for source, target in shared:
            self.layers[target].weight = self.layers[source].weight
        for index, param in enumerate(self.parameters()):
            param.requires_grad_(index not in frozen)


@st.composite
def modules(draw: st.DrawFn) -> Mixed:
    size = st.integers(1, 6)
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["linear", "conv", "norm", "embedding"]))
        dtype = draw(st.sampled_from(DTYPES))
        if kind == "linear":
            layer = nn.Linear(draw(size), draw(size), bias=draw(st.booleans()), dtype=dtype)
        elif kind == "conv":
            layer = nn.Conv2d(draw(size), draw(size), draw(st.integers(1, 3)), dtype=dtype)
            if draw(st.booleans()):
                layer.to(memory_format=torch.channels_last)
        elif kind == "norm":
            layer = nn.LayerNorm(draw(size), dtype=dtype)
        else:
            layer = nn.Embedding(draw(size), draw(size), dtype=dtype)
        layers.append(layer)
    pairs = st.tuples(st.integers(0, len(layers) - 1), st.integers(0, len(layers) - 1)).filter(
        lambda pair: pair[0] < pair[1]
    )
    shared = draw(st.lists(pairs, max_size=2)) if len(layers) > 1 else []
    frozen = draw(st.sets(st.integers(1, 12), max_size=4))  # never the first, so that one is left to train
    return Mixed(layers, shared, frozen)


bucket_sizes = st.one_of(st.none(), st.just(0), st.integers(1, 600))


@given(modules(), bucket_sizes)
def test_slots_and_tails_tile_the_buffer(module: Mixed, bucket_bytes: int | None) -> None:
    layout = build_layout(trainable(module), bucket_bytes)
    position = 0
    for number, bucket in enumerate(layout.buckets):
        assert (bucket.index, bucket.start) == (number, position)
        for slot in bucket.slots:
            assert (slot.offset, slot.bucket) == (position, number)
            assert slot.numel == math.prod(slot.shape)
            position += slot.numel
        assert bucket.tail == position
        position += USED + bucket.num_params
        assert bucket.stop == position
    assert position == layout.numel
    assert layout.message_bytes == sum(layout.bucket_bytes(number) for number in range(len(layout.buckets)))
    assert layout.parameter_numel == sum(slot.numel for slot in layout.slots)


@given(modules(), bucket_sizes)
def test_every_trainable_parameter_once_in_order_and_buckets_in_reverse(
    module: Mixed, bucket_bytes: int | None
) -> None:
    layout = build_layout(trainable(module), bucket_bytes)
    expected: dict[int, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if param.requires_grad:
            expected.setdefault(id(param), name)
    assert [slot.name for slot in layout.slots] == list(expected.values())
    assert [slot.index for slot in layout.slots] == list(range(len(expected)))
    assert [slot.index for bucket in layout.buckets for slot in bucket.slots] == list(range(len(expected)))[::-1]


@given(modules(), bucket_sizes)
def test_buckets_are_as_full_as_they_may_be(module: Mixed, bucket_bytes: int | None) -> None:
    layout = build_layout(trainable(module), bucket_bytes)
    filled = [sum(slot.numel for slot in bucket.slots) * layout.itemsize for bucket in layout.buckets]
    if bucket_bytes is None:
        assert len(layout.buckets) == 1
    elif bucket_bytes == 0:
        assert all(bucket.num_params == 1 for bucket in layout.buckets)
    else:
        assert all(
            size <= bucket_bytes or bucket.num_params == 1 for size, bucket in zip(filled, layout.buckets, strict=True)
        )
        for (size, _), (_, after) in pairwise(zip(filled, layout.buckets, strict=True)):
            assert size + after.slots[0].numel * layout.itemsize > bucket_bytes, "a bucket was closed too early"


@pytest.mark.parametrize(("bucket_bytes", "sizes"), [(31, [1, 1, 1]), (32, [2, 1]), (47, [2, 1]), (48, [3])])
def test_a_bucket_may_be_exactly_full(bucket_bytes: int, sizes: list[int]) -> None:
    three = [(str(index), nn.Parameter(torch.zeros(4))) for index in range(3)]
    assert [bucket.num_params for bucket in build_layout(three, bucket_bytes).buckets] == sizes


@given(modules())
def test_the_buffer_is_of_the_widest_type_and_never_below_float32(module: Mixed) -> None:
    params = trainable(module)
    layout = build_layout(params)
    assert layout.dtype == (
        torch.float64 if any(param.dtype == torch.float64 for _, param in params) else torch.float32
    )
    assert [slot.dtype for slot in layout.slots] == [param.dtype for _, param in params]


@given(modules(), bucket_sizes, st.integers(0, 5))
def test_views_have_the_parameters_strides_and_touch_nothing_else(
    module: Mixed, bucket_bytes: int | None, before: int
) -> None:
    params = trainable(module)
    layout = build_layout(params, bucket_bytes)
    memory = torch.full((before + layout.numel + 1,), NAN, dtype=layout.dtype)
    flat = memory[before : before + layout.numel]
    for slot, (_, param) in zip(layout.slots, params, strict=True):
        view = slot.view(flat)
        assert (view.shape, view.stride()) == (param.shape, param.stride())
        view.copy_(param.detach())
    for slot, (_, param) in zip(layout.slots, params, strict=True):
        assert torch.equal(slot.view(flat), param.detach().to(layout.dtype))
    assert memory[:before].isnan().all() and memory[-1].isnan(), "nothing is written outside of the buffer"
    assert all(flat[bucket.tail : bucket.stop].isnan().all() for bucket in layout.buckets)


@given(modules(), bucket_sizes)
def test_a_part_is_the_same_memory_as_the_whole(module: Mixed, bucket_bytes: int | None) -> None:
    layout = build_layout(trainable(module), bucket_bytes)
    gradient = Gradient(torch.zeros(layout.numel, dtype=layout.dtype), layout, step=3, version=2)
    parts = [gradient.bucket_view(number) for number in range(len(layout.buckets))]
    assert whole(parts) is gradient
    assert sum(part.message_bytes for part in parts) == gradient.message_bytes == layout.message_bytes
    for part, (bucket, piece) in zip(parts, gradient.slices(), strict=True):
        assert (part.step, part.version) == (3, 2)
        [(own_bucket, own_piece)] = part.slices()
        assert own_bucket is bucket
        assert own_piece.data_ptr() == piece.data_ptr() and own_piece.shape == piece.shape
        tail = part.tail()
        assert len(tail) == USED + bucket.num_params
        assert tail.data_ptr() == gradient.tail(bucket.index).data_ptr()
        for slot in bucket.slots:
            inside, outside = part.view(slot), gradient.view(slot)
            assert inside.data_ptr() == outside.data_ptr() == slot.view(gradient.flat).data_ptr()
            assert inside.stride() == outside.stride() == slot.stride
            inside.fill_(1)
        assert not tail.any()
        tail.fill_(1)
    assert gradient.flat.all(), "views and tails together are the whole buffer"


def test_a_channels_last_weight_keeps_its_strides() -> None:
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    layout = build_layout(trainable(conv))
    assert layout.slots[0].stride == (27, 1, 9, 3)


def test_a_parameter_with_gaps_in_memory_gets_contiguous_strides() -> None:
    gappy = nn.Parameter(torch.zeros(4, 6)[:, ::2])
    [slot] = build_layout([("gappy", gappy)]).slots
    assert (slot.numel, slot.stride) == (12, (3, 1))


def test_a_tied_embedding_is_one_slot_under_its_first_name() -> None:
    embedding, head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
    head.weight = embedding.weight
    layout = build_layout(trainable(nn.Sequential(embedding, head)))
    assert [(slot.name, slot.numel) for slot in layout.slots] == [("0.weight", 21)]


def test_the_description_tells_layouts_apart() -> None:
    def describe(module: nn.Module, bucket_bytes: float | None = None) -> list[str]:
        return build_layout(trainable(module), bucket_bytes).describe()

    base = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    assert describe(base) == describe(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    assert describe(base) != describe(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)))
    assert describe(base) != describe(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)).double())
    assert describe(base) != describe(base, bucket_bytes=0)


def no_parameter() -> list[tuple[str, nn.Parameter]]:
    return trainable(nn.Linear(2, 2).requires_grad_(False))


def two_devices() -> list[tuple[str, nn.Parameter]]:
    return trainable(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


def complex_parameter() -> list[tuple[str, nn.Parameter]]:
    return [("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))]


@pytest.mark.parametrize(
    ("make", "bucket_bytes", "message"),
    [
        (no_parameter, None, "no trainable parameter"),
        (two_devices, None, r"several devices \(.*meta.*\): move it to one"),
        (complex_parameter, None, "phase is torch.complex64"),
        (lambda: trainable(nn.Linear(2, 2)), -1, "bucket_bytes is -1: use None"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(make, bucket_bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_layout(make(), bucket_bytes)


def layout_of(num_params: int) -> Layout:
    return build_layout(trainable(nn.Linear(num_params, 1, bias=False)))


@given(st.lists(st.booleans(), max_size=30))
def test_the_pool_never_hands_out_a_buffer_that_is_out(takes: list[bool]) -> None:
    pool, out, most = BufferPool(layout_of(3)), [], 0
    for take in takes:
        if take:
            buffer = pool.take()
            assert buffer.shape == (layout_of(3).numel,)
            assert all(buffer.data_ptr() != other.data_ptr() for other in out)
            out.append(buffer)
        elif out:
            pool.give_back(out.pop(0))
        most = max(most, len(out))
    assert pool.num_allocated == most, "no more buffers than were ever out at once"


def test_a_buffer_given_back_twice_is_noticed() -> None:
    pool = BufferPool(layout_of(3))
    buffer = pool.take()
    pool.give_back(buffer)
    with pytest.raises(AssertionError, match="not in use"):
        pool.give_back(buffer)
    with pytest.raises(AssertionError, match="not in use"):
        pool.give_back(torch.zeros(6))
