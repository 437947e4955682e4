"""Collectives with a codec inside every hop: equal replicas, exact tails, bounded errors, bytes by the closed form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, final

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from tests.laws import tiny
from tests.laws.world import World, hasty, world
from workbench import codecs
from workbench.codecs.base import Codec
from workbench.collectives import (
    Auto,
    Collective,
    Direct,
    HalvingDoubling,
    Hierarchical,
    Linear,
    Native,
    Once,
    Ring,
    Tree,
    with_codec,
)
from workbench.collectives.wire import Wire, wires
from workbench.costs import Network
from workbench.errors import ConfigError
from workbench.gradients import BucketSlice, Gradient, Layout, build_layout, trainable
from workbench.laws.sentences import assert_equal_ranks, assert_near
from workbench.ops import Program, Value
from workbench.program import Context

LINK = Network(latency_s=1e-5, bandwidth_bytes_per_s=1e6)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Half(Codec):
    """bfloat16, to nearest."""

    def wire_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor, noise: Generator | None = None) -> Tensor:
        return values.to(torch.bfloat16).view(torch.uint8)

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        return wire.view(torch.bfloat16).to(like.dtype)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes(Codec):
    """8 bits a value, stochastically rounded, after one float32 scale a message."""

    @property
    def stochastic(self) -> bool:
        return True

    def wire_bytes(self, numel: int) -> int:
        return numel + 4 if numel else 0

    def encode(self, values: Tensor, noise: Generator | None = None) -> Tensor:
        assert noise is not None and values.numel()
        scale = (values.abs().amax().float() / 127).clamp(min=1e-30)
        draws = (
            torch.rand(values.numel(), generator=noise, dtype=values.dtype)
            if not values.is_meta
            else torch.zeros_like(values)
        )
        levels = (values / scale.to(values.dtype) + draws).floor().clamp(-127, 127).to(torch.int8)
        return torch.cat([scale.view(1).view(torch.uint8), levels.view(torch.uint8)])

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        return wire[4:].view(torch.int8).to(like.dtype) * wire[:4].view(torch.float32).to(like.dtype)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shrinking(Codec):
    """(1 - 2**-7) x, in full: encoding what was decoded changes it again."""

    def wire_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, values: Tensor, noise: Generator | None = None) -> Tensor:
        return (values * (1 - 2**-7)).float().view(torch.uint8)

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        return wire.view(torch.float32).to(like.dtype)


# Error of one encoding, by the largest
CODECS: dict[Codec, float] = {
    Half(): 2**-8,
    Bytes(): 1.01 / 127,
    Shrinking(): 2**-7 + 2**-23,
}
EACH_CODEC = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
PLAIN: dict[str, Collective] = {
    "ring": Ring(),
    "ring-3": Ring(chunks=3),
    "direct": Direct(),
    "direct-3": Direct(chunks=3),
    "linear": Linear(),
    "tree": Tree(),
    "halving-doubling": HalvingDoubling(),
    "hierarchical-2": Hierarchical(group=2),
    "hierarchical-3": Hierarchical(group=3, inner=Tree(), outer=HalvingDoubling()),
    "auto": Auto(),
}
EACH = pytest.mark.parametrize("plain", PLAIN.values(), ids=PLAIN.keys())
MAX_ENCODINGS = 3  # of the whole sum: as a block, by a leader, and once to spare
seeds = st.integers(0, 2**32 - 1)
shapes = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), min_size=1, max_size=3)


def layout_of(shape: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> Layout:
    """Buckets with these numbers of parameters and these lengths of tails."""
    buckets, start = [], 0
    for index, (body, tail) in enumerate(shape):
        buckets.append(BucketSlice(index, (), start, start + body, start + body + tail))
        start += body + tail
    return Layout((), tuple(buckets), start, dtype, torch.device("cpu"))


def is_tail(layout: Layout) -> np.ndarray:
    found = np.zeros(layout.numel, bool)
    for piece in layout.buckets:
        found[piece.tail : piece.stop] = True
    return found


def inputs_of(num_ranks: int, layout: Layout, seed: int) -> np.ndarray:
    """(ranks, n): parameters of one bucket have similar sizes; a tail has whole numbers that no codec would keep."""
    generator = np.random.default_rng(seed)
    inputs = generator.standard_normal((num_ranks, layout.numel)).astype(np.float32).astype(np.float64)
    inputs[:, is_tail(layout)] = generator.integers(1, 4099, (num_ranks, is_tail(layout).sum()))
    return inputs


def gradients(inputs: np.ndarray, layout: Layout, step: int = 3) -> list[Value]:
    return [Gradient(torch.tensor(row, dtype=layout.dtype), layout, step=step, version=step) for row in inputs]


def check(results: list[Tensor], inputs: np.ndarray, layout: Layout, error: float) -> None:
    """The law. A value is encoded once on each of the p - 1 ways by which it comes together, and the sum a few times more.

    Each encoding errs by `error` of the largest number of its message, which is at most the largest of all sums of
    magnitudes, grown by the errors before it.
    """
    p, tail = len(inputs), is_tail(layout)
    assert_equal_ranks("replicas do not drift apart", results, "in the sum")
    got, exact = results[0].double().numpy(), inputs.sum(0)
    assert np.array_equal(got[tail], exact[tail]), "tails are summed exactly"
    encodings = p - 1 + MAX_ENCODINGS
    largest = np.abs(inputs).sum(0)[~tail].max(initial=0)
    bound = encodings * error * (1 + error) ** encodings * largest + 1e-5 * largest
    assert np.abs(got - exact)[~tail].max(initial=0) <= (bound if p > 1 else 0)


@EACH
@EACH_CODEC
@settings(max_examples=15)
@given(num_ranks=st.integers(1, 9), shape=shapes, seed=seeds, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_replicas_are_equal_tails_exact_and_errors_bounded(
    plain: Collective, codec: Codec, num_ranks: int, shape: list[tuple[int, int]], seed: int, dtype: torch.dtype
) -> None:
    """And the bytes those of the closed form."""
    collective, layout = with_codec(plain, codec), layout_of(shape, dtype)
    inputs = inputs_of(num_ranks, layout, seed)
    ran = world(collective, gradients(inputs, layout), seed, link=LINK)
    check(ran.run(), inputs, layout, CODECS[codec])
    if not isinstance(collective, Auto):
        assert ran.bytes_sent == [collective.bytes_of(rank, num_ranks, layout) for rank in range(num_ranks)]


@EACH
@EACH_CODEC
def test_the_same_for_a_model_s_gradient_and_for_a_tensor(plain: Collective, codec: Codec) -> None:
    collective = with_codec(plain, codec)
    for num_ranks in (2, 3, 4, 7):
        for bucket_bytes in (None, 200.0, 0):
            layout = build_layout(trainable(tiny.mlp()), bucket_bytes)
            inputs = inputs_of(num_ranks, layout, 1)
            check(world(collective, gradients(inputs, layout), 1, link=LINK).run(), inputs, layout, CODECS[codec])
        for numel in (0, 1, 3, 29):
            layout = layout_of([(numel, 0)])
            inputs = inputs_of(num_ranks, layout, 2)
            ran = world(collective, [torch.tensor(row, dtype=torch.float32) for row in inputs], 2, link=LINK)
            check(ran.run(), inputs, layout, CODECS[codec])
            if not isinstance(collective, Auto):
                assert ran.bytes_sent == [collective.bytes_sent(rank, num_ranks, numel, 4) for rank in range(num_ranks)]


@contextmanager
def planted(name: str, bug: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wire, name, bug)
        yield


def keep_exact(wire: Wire, start: int, stop: int, message: Tensor) -> Program:
    yield from ()


@EACH
def test_an_owner_who_keeps_its_exact_sum_is_caught(plain: Collective) -> None:
    layout = layout_of([(30, 4)])
    inputs = inputs_of(4, layout, 0)
    with planted("adopt", keep_exact), pytest.raises(AssertionError, match="drift apart"):
        check(
            world(with_codec(plain, Half()), gradients(inputs, layout), 0, link=LINK).run(),
            inputs,
            layout,
            CODECS[Half()],
        )


def test_a_leader_alone_in_its_group_must_encode_too() -> None:
    """Five ranks in groups of two: rank 4 sends the sum to no rank, and the others have its decoded form."""
    layout = layout_of([(30, 4)])
    inputs = inputs_of(5, layout, 0)
    collective = with_codec(Hierarchical(group=2), Shrinking())
    check(world(collective, gradients(inputs, layout), 0).run(), inputs, layout, CODECS[Shrinking()])


@pytest.mark.parametrize(
    "plain", [Ring(), Ring(chunks=2), Linear(), Tree(), HalvingDoubling()], ids=lambda plain: type(plain).__name__
)
def test_each_level_may_have_a_codec_of_its_own(plain: Collective) -> None:
    layout = layout_of([(17, 3)])
    inputs = inputs_of(7, layout, 0)
    for collective in (
        Hierarchical(group=3, outer=with_codec(plain, Half())),
        Hierarchical(group=3, inner=Tree(codec=Bytes()), outer=with_codec(plain, Half())),
        Hierarchical(group=3, inner=Tree(codec=Bytes()), outer=plain),
    ):
        assert collective.lossy
        ran = world(collective, gradients(inputs, layout), 0)
        check(ran.run(), inputs, layout, CODECS[Bytes()])
        assert ran.bytes_sent == [collective.bytes_of(rank, 7, layout) for rank in range(7)]


@EACH
@pytest.mark.parametrize("name", ["truncate16", "linear8", "qsgd", "top-k", "sign", "shared-int8"])
def test_the_package_s_codecs_keep_replicas_equal_and_tails_exact(plain: Collective, name: str) -> None:
    collective = with_codec(plain, codecs.get(name))
    for num_ranks in (2, 5):
        layout = layout_of([(29, 3), (1, 4), (0, 2)])
        inputs = inputs_of(num_ranks, layout, 0)
        ran = world(collective, gradients(inputs, layout), 0, link=LINK)
        check(ran.run(), inputs, layout, error=np.inf)
        if not isinstance(collective, Auto):
            assert ran.bytes_sent == [collective.bytes_of(rank, num_ranks, layout) for rank in range(num_ranks)]


def test_leaders_may_sum_with_a_codec_once_around() -> None:
    layout = layout_of([(29, 3)])
    inputs = inputs_of(7, layout, 0)
    for outer in (Once(codec=codecs.Linear8()), Once(codec=codecs.SharedInt8(), inner=Ring())):
        collective = Hierarchical(group=2, outer=outer)
        ran = world(collective, gradients(inputs, layout), 0)
        check(ran.run(), inputs, layout, CODECS[Bytes()])
        assert ran.bytes_sent == [collective.bytes_of(rank, 7, layout) for rank in range(7)]


@settings(max_examples=15)
@given(num_ranks=st.integers(1, 9), shape=shapes, seed=seeds, chunks=st.integers(1, 3))
def test_a_ring_s_halves_are_its_whole_to_the_last_bit(
    num_ranks: int, shape: list[tuple[int, int]], seed: int, chunks: int
) -> None:
    ring, layout = Ring(codec=Bytes(), chunks=chunks), layout_of(shape)
    inputs = inputs_of(num_ranks, layout, seed)

    def halves(ctx: Context, value: Value) -> Program:
        yield from ring.reduce_scatter(ctx, value)
        return (yield from ring.all_gather(ctx, value))

    programs = [hasty(halves(Context(rank, num_ranks), value)) for rank, value in enumerate(gradients(inputs, layout))]
    whole = world(ring, gradients(inputs, layout), seed).run()
    for rank, (got, expected) in enumerate(zip(World(programs, Random(seed)).run(), whole, strict=True)):
        assert_near("Ring: its halves are the whole", got, expected, 0.0, f"in the sum, rank {rank} of {num_ranks}")


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_a_ring_s_local_work_is_that_of_the_paper(num_ranks: int) -> None:
    """(p-1)/p n encoded, decoded and summed by each rank in the first half; n/p encoded and n decoded in the second."""
    n, p = 4 * 23, num_ranks
    ran = world(Ring(codec=Half()), [torch.zeros(23) for _ in range(p)], 0)
    ran.run()
    assert ran.local_bytes == {"encode": (p - 1) * n + n, "decode": (p - 1) * n + p * n, "sum": (p - 1) * n}
    ran = world(Ring(), [torch.zeros(23) for _ in range(p)], 0)
    ran.run()
    assert ran.local_bytes == {"sum": (p - 1) * n}


@EACH
@EACH_CODEC
def test_a_timing_only_value_is_summed_in_the_same_messages(plain: Collective, codec: Codec) -> None:
    layout = layout_of([(20, 3), (1, 3)])
    collective = with_codec(plain, codec)
    seen = []
    for device in ("cpu", "meta"):
        values: list[Value] = [Gradient(torch.zeros(layout.numel, device=device), layout, 0, 0) for _ in range(6)]
        ran = world(collective, values, 0, link=LINK)
        ran.run()
        seen.append((ran.bytes_sent, ran.messages, ran.local_bytes))
    assert seen[0] == seen[1]


def test_noise_is_by_seed_rank_step_bucket_hop_and_range() -> None:
    """By nothing more: two encodings of one run never draw the same, and a run can be repeated."""

    def drawn(hop: int = 0, start: int = 0, bucket: int = 0, rank: int = 0, **told: int) -> tuple[int, ...]:
        layout = layout_of([(60, 1), (60, 1)])
        value = Gradient(torch.full((122,), 0.4), layout, step=told.pop("step", 0), version=0)
        value.flat[0::20] = 127.0
        wire = wires(Context(rank, 4, **told), value, Bytes())[bucket]
        program = wire.pack(start, start + 20, hop)
        action = next(program).action
        return tuple(action().tolist())

    assert drawn() == drawn()
    changes: list[dict[str, int]] = [{"hop": 1}, {"start": 20}, {"bucket": 1}, {"rank": 1}, {"seed": 1}, {"step": 1}]
    assert len({drawn(), *(drawn(**change) for change in changes)}) == 1 + len(changes)


def test_members_of_different_groups_draw_different_noise() -> None:
    """Or their errors would add up instead of averaging out."""
    collective = Hierarchical(group=2, codec=Bytes())

    def first_message(rank: int) -> tuple[int, ...]:
        value = torch.full((60,), 0.4)
        value[::20] = 127.0
        return tuple(next(collective.all_reduce(Context(rank, 6), value)).action().tolist())

    assert len({first_message(rank) for rank in (1, 3, 5)}) == 3 and first_message(3) == first_message(3)


def test_what_has_no_hops_or_no_numbers_to_encode_says_so() -> None:
    with pytest.raises(ConfigError, match=r"takes no codec.*Ring\(codec"):
        with_codec(Native(), Half())
    with pytest.raises(ConfigError, match="floating-point"):
        world(Ring(codec=Half()), [torch.zeros(3, dtype=torch.int64)] * 2, 0).run()
    with pytest.raises(ConfigError, match="give each level its own"):
        Hierarchical(codec=Half(), inner=Linear(codec=Half()))
    assert (
        not Ring().lossy and Ring(codec=Half()).lossy and with_codec(Auto(), Half()).lossy and not Hierarchical().lossy
    )
