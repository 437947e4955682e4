"""All collectives alone, without a codec: exact sums for any length, number of ranks and order of events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any, final

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import tiny
from tests.laws.world import Timed, World, hasty, world
from workbench import collectives
from workbench.codecs import Linear8, SharedInt8, Truncate16
from workbench.collectives import (
    Auto,
    Collective,
    Direct,
    HalvingDoubling,
    Hierarchical,
    Linear,
    Native,
    Once,
    PowerSGD,
    Ring,
    Tree,
    with_codec,
)
from workbench.costs import Network
from workbench.errors import ConfigError
from workbench.gradients import Gradient, Layout, block_bounds, build_layout, trainable
from workbench.ops import (
    AllGather,
    AllReduce,
    Local,
    Message,
    Program,
    Recv,
    ReduceScatter,
    Send,
    Start,
    Ticket,
    Value,
    Wait,
)
from workbench.program import Context, perform
from workbench.units import MIB

RING = Ring(chunks=2)  # of 1e8 bytes and nine ranks
LINK = Network(latency_s=1e-5, bandwidth_bytes_per_s=1e6, sum_s_per_byte=1e-7)
ALL: dict[str, Collective] = {
    "ring": Ring(),
    "ring-2": Ring(chunks=2),
    "ring-5": Ring(chunks=5),
    "direct": Direct(),
    "direct-3": Direct(chunks=3),
    "linear": Linear(),
    "tree": Tree(),
    "halving-doubling": HalvingDoubling(),
    "hierarchical-1": Hierarchical(group=1, outer=Tree()),
    "hierarchical-2": Hierarchical(group=2),
    "hierarchical-3": Hierarchical(group=3, inner=Tree(), outer=HalvingDoubling()),
    "hierarchical-20": Hierarchical(group=20),
    "three-levels": Hierarchical(group=2, outer=Hierarchical(group=2, outer=Linear())),
    "auto": Auto(),
}
EACH = pytest.mark.parametrize("collective", ALL.values(), ids=ALL.keys())
ranks, lengths, seeds = st.integers(1, 9), st.integers(0, 40), st.integers(0, 2**32 - 1)
layouts = st.sampled_from([None, 200.0, 0])


def values(num_ranks: int, numel: int, seed: int) -> np.ndarray:
    """(ranks, numel) integers whose sums stay exact in float32."""
    return np.random.default_rng(seed).integers(-1000, 1000, (num_ranks, numel))


def gradients(inputs: np.ndarray, layout: Layout) -> list[Value]:
    """A whole gradient a rank."""
    return [Gradient(torch.tensor(row, dtype=layout.dtype), layout, step=3, version=3) for row in inputs]


@EACH
@settings(max_examples=40)
@given(num_ranks=ranks, numel=lengths, seed=seeds, dtype=st.sampled_from([torch.float32, torch.float64, torch.int64]))
def test_sums_integers_exactly(
    collective: Collective, num_ranks: int, numel: int, seed: int, dtype: torch.dtype
) -> None:
    inputs = values(num_ranks, numel, seed)
    ran = world(collective, [torch.tensor(row).to(dtype) for row in inputs], seed, link=LINK)
    for result in ran.run():
        assert np.array_equal(result.numpy(), inputs.sum(0))
    assert ran.unfinished == [], "a library must be asked for the end of whatever it was asked to begin"


@EACH
@settings(max_examples=10)
@given(num_ranks=ranks, seed=seeds, bucket_bytes=layouts, bucket=st.none() | st.just(0))
def test_sums_gradients_of_one_bucket_and_of_several(
    collective: Collective, num_ranks: int, seed: int, bucket_bytes: float | None, bucket: int | None
) -> None:
    """It also sends the bytes of its closed form, bucket by bucket."""
    layout = build_layout(trainable(tiny.mlp()), bucket_bytes)
    inputs = values(num_ranks, layout.numel, seed)
    whole = gradients(inputs, layout)
    ran = world(
        collective, [item.bucket_view(bucket) for item in whole] if bucket is not None else whole, seed, link=LINK
    )
    piece = layout.buckets[bucket] if bucket is not None else None
    expected = inputs.sum(0)[piece.start : piece.stop] if piece else inputs.sum(0)
    for result in ran.run():
        assert np.array_equal(result.numpy(), expected)
    if not isinstance(collective, Auto) and bucket is None:
        assert ran.bytes_sent == [collective.bytes_of(rank, num_ranks, layout) for rank in range(num_ranks)]


@EACH
@settings(max_examples=40)
@given(num_ranks=ranks, numel=lengths, seed=seeds)
def test_sends_as_many_bytes_as_its_closed_form_says(
    collective: Collective, num_ranks: int, numel: int, seed: int
) -> None:
    ran = world(collective, [torch.zeros(numel) for _ in range(num_ranks)], seed, link=LINK)
    ran.run()
    if isinstance(collective, Auto):
        collective = collective.chosen(4 * numel, num_ranks, LINK)
    assert ran.bytes_sent == [collective.bytes_sent(rank, num_ranks, numel, 4) for rank in range(num_ranks)]


@EACH
def test_a_timing_only_value_is_summed_in_the_same_messages(collective: Collective) -> None:
    for numel in (1, 23):
        real = world(collective, [torch.zeros(numel) for _ in range(6)], 0, link=LINK)
        meta = world(collective, [torch.zeros(numel, device="meta") for _ in range(6)], 0, link=LINK)
        real.run(), meta.run()
        assert (meta.bytes_sent, meta.messages, meta.local_bytes) == (real.bytes_sent, real.messages, real.local_bytes)


@EACH
def test_more_ranks_than_tags(collective: Collective) -> None:
    """A rank among 600, whose messages arrive at once."""
    for rank in (0, 1, 512):
        program = perform(collective.all_reduce(Context(rank, 600, link=LINK), torch.zeros(1200, device="meta")))
        requests, answer = 0, None
        with suppress(StopIteration):
            while True:
                request = program.send(answer)
                requests += 1
                match request:
                    case Send(tag=tag) | Start(Send(tag=tag)) | Recv(tag=tag) | Start(Recv(tag=tag)):
                        assert 0 <= tag < 1000
                match request:
                    case Start(Recv() as recv) | (Recv() as recv):
                        message = Message(recv.source, recv.like.clone())
                        answer = Ticket.completed(message) if isinstance(request, Start) else message
                    case Start():
                        answer = Ticket.completed(None)
                    case Wait(ticket):
                        answer = ticket.value
                    case Local(action=action):
                        answer = action()
                    case _:
                        answer = None
        assert requests > 1


# ---------------------------------------------------------------- Ring


@given(num_ranks=ranks, numel=lengths)
def test_ring_and_direct_send_no_more_than_is_optimal(num_ranks: int, numel: int) -> None:
    """2 (p-1)/p n bytes in 2 (p-1) messages, to within the one element by which blocks differ."""
    for collective in (Ring(), Direct()):
        ran = world(collective, [torch.zeros(numel) for _ in range(num_ranks)], 0)
        ran.run()
        assert sum(ran.bytes_sent) == 2 * (num_ranks - 1) * numel * 4
        for sent, messages in zip(ran.bytes_sent, ran.messages, strict=True):
            assert abs(sent - 2 * (num_ranks - 1) / num_ranks * numel * 4) < num_ranks * 4 + 1e-9
            assert messages <= 2 * (num_ranks - 1)


@settings(max_examples=40)
@given(num_ranks=ranks, numel=lengths, seed=seeds, chunks=st.integers(1, 4), kind=st.sampled_from([Ring, Direct]))
def test_halves_make_the_whole(num_ranks: int, numel: int, seed: int, chunks: int, kind: type[Ring | Direct]) -> None:
    """Between the halves, rank r has block r of the sum."""
    inputs, bounds = values(num_ranks, numel, seed), block_bounds(numel, num_ranks)
    ring = kind(chunks=chunks)
    assert ring.splits

    def halves(ctx: Context, value: Value) -> Program:
        assert (yield from perform(ring.reduce_scatter(ctx, value))) is value
        assert isinstance(value, torch.Tensor)
        own = slice(bounds[ctx.rank], bounds[ctx.rank + 1])
        block = value[own].clone()
        value.fill_(-5)  # the other blocks belong to no rank
        value[own] = block
        assert (yield from perform(ring.all_gather(ctx, value))) is value
        return value

    programs = [hasty(halves(Context(rank, num_ranks), torch.tensor(row))) for rank, row in enumerate(inputs)]
    for result in World(programs, Random(seed)).run():
        assert np.array_equal(result.numpy(), inputs.sum(0))


def test_who_has_no_halves_says_so() -> None:
    ctx, value = Context(0, 2), torch.zeros(3)
    native = Native()
    assert native.splits
    assert isinstance(native.reduce_scatter(ctx, value), ReduceScatter) and isinstance(
        native.all_gather(ctx, value), AllGather
    )
    for collective in (Linear(), Tree(), HalvingDoubling(), Hierarchical(), Auto()):
        assert not collective.splits
        for half in (collective.reduce_scatter, collective.all_gather):
            with pytest.raises(ConfigError, match=r"Ring\(\)"):
                half(ctx, value)


@final
class Hasty(Collective):
    """A collective that never waits for what it sends."""

    def __init__(self, of: Collective) -> None:
        object.__setattr__(self, "of", of)

    def all_reduce(self, ctx: Context, value: Value) -> Program:
        program, answer = self.of.all_reduce(ctx, value), None
        while True:
            try:
                request = program.send(answer)
            except StopIteration as stop:
                return stop.value
            skipped = isinstance(request, Wait) and isinstance(request.ticket.request, Send)
            answer = None if skipped else (yield request)

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        raise NotImplementedError

    def seconds(self, num_bytes: float, num_workers: int, link: Any) -> float:
        raise NotImplementedError


@pytest.mark.parametrize(
    "collective",
    [Ring(), Ring(chunks=2), HalvingDoubling(), Direct()],
    ids=["ring", "ring-2", "halving-doubling", "direct"],
)
def test_a_collective_that_does_not_wait_for_its_sends_is_caught(collective: Collective) -> None:
    """The caller's next write then goes out in place of the sum, in some order of events."""
    inputs = values(3, 5, seed=0)
    wrong = 0
    for seed in range(50):
        results = world(Hasty(collective), [torch.tensor(row) for row in inputs], seed).run()
        wrong += any(not np.array_equal(result.numpy(), inputs.sum(0)) for result in results)
    assert wrong > 0


# ---------------------------------------------------------------- the others


@given(num_ranks=st.integers(1, 5), numel=st.integers(1, 30), cut=st.integers(0, 30), seed=seeds)
def test_linear_is_the_sum_in_rank_order_however_it_is_cut(num_ranks: int, numel: int, cut: int, seed: int) -> None:
    """Bit-identical, on numbers whose sum depends on the order."""
    generator = np.random.default_rng(seed)
    inputs = generator.standard_normal((num_ranks, numel)) * 10.0 ** generator.integers(-8, 8, (num_ranks, numel))
    expected = inputs[0].copy()
    for row in inputs[1:]:
        expected += row
    tensors = [torch.tensor(row) for row in inputs]
    for piece in (slice(0, min(cut, numel)), slice(min(cut, numel), numel)):
        for result in world(Linear(), [tensor[piece] for tensor in tensors], seed).run():
            assert np.array_equal(result.numpy(), expected[piece])


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_halving_and_doubling_send_a_ring_s_bytes_in_a_tree_s_messages(num_ranks: int) -> None:
    ran = world(HalvingDoubling(), [torch.zeros(40) for _ in range(num_ranks)], 0)
    ran.run()
    assert ran.bytes_sent == [2 * (num_ranks - 1) * 40 * 4 // num_ranks] * num_ranks
    assert ran.messages == [2 * (num_ranks.bit_length() - 1)] * num_ranks


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Ring(chunks=0),
        lambda: Direct(chunks=0),
        lambda: Ring(codec="truncate16"),  # type: ignore[arg-type]
        lambda: Hierarchical(group=0),
        lambda: Hierarchical(inner=Ring()),  # type: ignore[arg-type]
        lambda: Hierarchical(outer=Native()),
        lambda: Auto(candidates=()),
        lambda: Auto(candidates=(Ring(), Native())),
        lambda: Auto(candidates=(Ring(), PowerSGD())),
        lambda: Auto(candidates=(Ring(), Hierarchical(outer=Once(codec=Linear8())))),
        lambda: Hierarchical(outer=PowerSGD()),
        lambda: Hierarchical(outer=Once(codec=SharedInt8())),
    ],
)
def test_what_cannot_work_is_refused_with_the_fix(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"such as|1 or more|use |choose among|give one|cannot be a candidate"):
        wrong()


def test_names() -> None:
    made = {
        name: collectives.get(name)
        for name in ("native", "ring", "direct", "linear", "tree", "halving-doubling", "hierarchical", "auto")
    }
    assert [type(item) for item in made.values()] == [
        Native,
        Ring,
        Direct,
        Linear,
        Tree,
        HalvingDoubling,
        Hierarchical,
        Auto,
    ]
    assert repr(made["ring"]) == "Ring()" and repr(Ring(chunks=2)) == "Ring(chunks=2)"
    with pytest.raises(ConfigError, match="did you mean halving-doubling"):
        collectives.get("halving-doublin")


# ---------------------------------------------------------------- seconds


def virtual_seconds(collective: Collective, num_ranks: int, numel: int, link: Network = LINK) -> float:
    values = [torch.zeros(numel, device="meta") for _ in range(num_ranks)]
    return Timed(
        [perform(collective.all_reduce(Context(rank, num_ranks), value)) for rank, value in enumerate(values)], link
    ).run()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 8, 9])
@pytest.mark.parametrize("numel", [0, 8 * 9 * 7])
def test_seconds_are_those_of_virtual_time(num_ranks: int, numel: int) -> None:
    """Where blocks are of one size; a tree of other than 2^k ranks is not slower than its formula, which rounds up."""
    exact = [
        Linear(),
        HalvingDoubling(),
        Ring(),
        Hierarchical(group=1),
        Hierarchical(group=num_ranks),
        Hierarchical(group=3, inner=Linear()),
    ]
    for collective in exact:
        if numel == 0:
            assert virtual_seconds(collective, num_ranks, numel) == 0, "empty values make no messages"
        elif num_ranks % getattr(collective, "group", 1) == 0:
            assert virtual_seconds(collective, num_ranks, numel) == pytest.approx(
                collective.seconds(4 * numel, num_ranks, LINK)
            ), collective
    seconds, bound = virtual_seconds(Tree(), num_ranks, numel), Tree().seconds(4 * numel, num_ranks, LINK)
    assert seconds == pytest.approx(bound) if numel and num_ranks in (1, 2, 4, 8) else seconds <= bound


@pytest.mark.parametrize("latency_s", [1e-5, 1e-2])
@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_ring_in_chunks_hides_its_sums_as_its_formula_says(num_ranks: int, chunks: int, latency_s: float) -> None:
    """Bound by the wire, which is then never idle, and bound by latency."""
    numel, ring, link = 8 * 1000, Ring(chunks=chunks), replace(LINK, latency_s=latency_s)
    seconds = virtual_seconds(ring, num_ranks, numel, link)
    assert seconds == pytest.approx(ring.seconds(4 * numel, num_ranks, link))
    assert seconds < virtual_seconds(Ring(), num_ranks, numel, link)
    if latency_s == 1e-5:
        assert seconds == pytest.approx(
            2 * (num_ranks - 1) / num_ranks * 4 * numel / link.bandwidth_bytes_per_s + latency_s
        )


@pytest.mark.parametrize("latency_s", [1e-5, 1e-2])
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_direct_hides_its_sums_as_its_formula_says(num_ranks: int, chunks: int, latency_s: float) -> None:
    """All but the last, and that one too in chunks; where sums take longer than the wire, they are what it waits for."""
    numel, direct = 8 * 3 * 4 * 100, Direct(chunks=chunks)
    for sum_s_per_byte in (0.0, 1e-7, 5e-6):
        link = replace(LINK, latency_s=latency_s, sum_s_per_byte=sum_s_per_byte)
        assert virtual_seconds(direct, num_ranks, numel, link) == pytest.approx(
            direct.seconds(4 * numel, num_ranks, link), rel=0.02
        )
    if num_ranks > 2 and chunks == 1:
        assert virtual_seconds(direct, num_ranks, numel) < virtual_seconds(Ring(), num_ranks, numel)


# ---------------------------------------------------------------- Auto


@given(
    num_ranks=ranks,
    num_bytes=st.floats(0, 1e9),
    latency_s=st.floats(0, 1e-2),
    rate=st.floats(1e3, 1e12),
    sum_s=st.floats(0, 1e-6),
)
def test_auto_is_never_slower_than_a_candidate(
    num_ranks: int, num_bytes: float, latency_s: float, rate: float, sum_s: float
) -> None:
    link = Network(latency_s=latency_s, bandwidth_bytes_per_s=rate, sum_s_per_byte=sum_s)
    auto = Auto(candidates=(Linear(), Tree(), HalvingDoubling(), Ring(), Ring(chunks=4), Hierarchical(group=3)))
    times = [candidate.seconds(num_bytes, num_ranks, link) for candidate in auto.candidates]
    assert min(times) >= 0
    least_s = auto.seconds(num_bytes, num_ranks, link)
    assert least_s == auto.chosen(num_bytes, num_ranks, link).seconds(num_bytes, num_ranks, link) <= min(times)


def test_auto_takes_few_messages_for_short_values_and_few_bytes_for_long_ones() -> None:
    auto = Auto()
    assert auto.needs_link and not Ring().needs_link and Hierarchical(outer=auto).needs_link
    assert auto.chosen(8, 9, LINK) == HalvingDoubling() and auto.chosen(5e7, 9, LINK) == Ring()
    assert auto.chosen(0, 9, LINK) == Tree(), "the first of those that take the same time"
    assert Auto(candidates=(Ring(), Tree())).chosen(8, 9, LINK) == Tree()


@final
@dataclass(frozen=True, kw_only=True)
class Found:
    """A link that was measured."""

    latency_s: float = 1e-6
    bandwidth_bytes_per_s: float = 1e9
    sum_s_per_byte: float = 0.0
    own_s: float = 1e3
    slowdown: float = 1.0

    def native_s(self, num_bytes: float) -> float:
        return self.own_s


def test_auto_sends_a_long_ring_in_pieces() -> None:
    """A message for which memory is mapped again each time takes twice as long."""
    rings = Auto(candidates=(Tree(), Ring()))
    for link in (LINK, Found()):
        for mib, num_ranks, pieces in ((32, 4, 1), (33, 4, 2), (256, 4, 8), (256, 8, 4)):
            assert rings.chosen(mib * MIB, num_ranks, link) == Ring(chunks=pieces)
        assert Auto(candidates=(Ring(chunks=3), Tree())).chosen(256 * MIB, 4, link) == Ring(chunks=3), "the user's own"


def test_auto_knows_that_very_long_messages_come_into_new_memory() -> None:
    assert Auto().chosen(32 * MIB, 8, Found()) == HalvingDoubling()
    assert Auto().chosen(64 * MIB, 8, Found()) == Ring(), "halves are of 32 MiB"
    simulated = replace(LINK, sum_s_per_byte=0.0)
    assert Auto().chosen(64 * MIB, 8, simulated) == HalvingDoubling(), "a simulated wire has no memory"
    trees = Auto(candidates=(Tree(),))
    assert (
        trees.chosen(31 * MIB, 4, Found(own_s=0.25)) == Tree()
        and trees.chosen(32 * MIB, 4, Found(own_s=0.25)) == Native()
    )


def test_auto_remembers_what_it_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """For short sums formulas take longer than the sum."""
    asked: list[float] = []
    chosen = Auto.chosen

    def counted(self: Auto, num_bytes: float, num_workers: int, link: Any) -> Collective:
        asked.append(num_bytes)
        return chosen(self, num_bytes, num_workers, link)

    monkeypatch.setattr(Auto, "chosen", counted)
    auto, quick, slow = Auto(candidates=(Tree(), Ring())), Found(own_s=0.0), Found(latency_s=2e-6, own_s=1e9)
    for link, kind in ((quick, AllReduce), (slow, Iterator), (quick, AllReduce)):
        for length in (5, 5, 7, 5):
            assert isinstance(auto.all_reduce(Context(0, 9, link=link), torch.zeros(length)), kind)
    assert asked == [20, 28, 20, 28]


def test_auto_takes_what_has_no_hash() -> None:
    """A user's own link, or codec: `all_reduce` remembers by both."""
    link: Any = SimpleNamespace(latency_s=1e-5, bandwidth_bytes_per_s=1e9, sum_s_per_byte=0.0)
    with pytest.raises(TypeError):
        hash(link)
    assert isinstance(Auto().all_reduce(Context(0, 9, link=link), torch.zeros(5)), Iterator)


def test_leaders_sum_by_messages_whatever_is_known_of_the_library() -> None:
    """The library's own sum is of all ranks, and leaders are some of them: `Auto` among them has no such choice."""
    quick = Found(own_s=0.0)
    assert Auto().chosen(20, 3, quick) == Native()
    for group in (1, 2, 6):
        ran = world(Hierarchical(group=group, outer=Auto()), [torch.ones(5) for _ in range(6)], 0, link=quick)
        assert all(torch.equal(result, torch.full((5,), 6.0)) for result in ran.run())


def test_auto_takes_the_library_s_own_unless_a_formula_promises_more() -> None:
    facts = {name: getattr(LINK, name) for name in ("latency_s", "bandwidth_bytes_per_s", "sum_s_per_byte")}
    for share, margin in (
        (0.2, 1.4),
        (0.03, 1.4),
        (0.01, 1.05),
    ):  # of the time of a byte, what it takes to add it: little where a wire binds
        facts["sum_s_per_byte"] = share / facts["bandwidth_bytes_per_s"]
        ring_s = RING.seconds(1e8, 9, SimpleNamespace(**facts))
        for factor, chosen in ((1.0, Native()), (margin - 0.01, Native()), (margin + 0.01, RING)):
            measured: Any = SimpleNamespace(**facts, native_s=lambda _, time_s=factor * ring_s: time_s)
            assert Auto().chosen(1e8, 9, measured) == chosen
            assert with_codec(Auto(), Truncate16()).chosen(1e8, 9, measured) == Ring(codec=Truncate16()), (
                "the library has no codec"
            )
    slow: Any = SimpleNamespace(**facts, native_s=lambda _: 2.0 * ring_s, slowdown=1.95)
    assert Auto().chosen(1e8, 9, slow) == Native(), "rings take 1.95 of their formula here"
    short: Any = SimpleNamespace(**facts | {"latency_s": 1e-6}, native_s=lambda _: 1e-4)
    assert Auto().chosen(8, 2, short) == Native(), (
        "a tree of two messages would be there in no time, but for what it takes to ask for them"
    )
    quick: Any = SimpleNamespace(**facts, native_s=lambda _: 1.1 * ring_s, slowdown=0.5)
    assert Auto().chosen(1e8, 9, quick) == RING, "and here half of it"


def test_auto_without_a_link_says_what_to_use() -> None:
    with pytest.raises(ConfigError, match=r"name a collective, such as Ring\(\)"):
        Auto().all_reduce(Context(0, 2), torch.zeros(3))
    assert np.isnan(Auto().bytes_sent(0, 5, 100, 4)) and Auto(candidates=(Tree(),)).bytes_sent(1, 2, 100, 4) == 400
