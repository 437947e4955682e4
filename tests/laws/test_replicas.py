"""Replicas are equal, or differ only as the algorithm declares, with any delays and overtaking.

For every algorithm, collective and codec that the package lists, and with one lane and several. An algorithm says when
its ranks have equal parameters (`replicas`): after every step, at the end, or never. If they may differ between steps,
they still take over equal values from others: of one version of a shard, or in one average. Equal means every bit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, ClassVar, final

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from tests.laws.covering import CODINGS, covering, pairs_of, takes, versions
from tests.laws.variants import SETTINGS, find_algorithms, name_of, representatives, runs_on
from workbench import codecs, collectives
from workbench.algorithms import (
    SPARTA,
    AsyncSGD,
    BackupSGD,
    DiLoCo,
    EagerDiLoCo,
    PipeSGD,
    SlowMo,
    StreamingDiLoCo,
    SynchronousSGD,
)
from workbench.algorithms.gossip import GossipAlgorithm
from workbench.algorithms.parameter_server import REPLY_TAG, ServerPort, stamp_of
from workbench.codecs import Codec
from workbench.collectives import Collective, Hierarchical, Once, PowerSGD, Ring
from workbench.errors import ConfigError
from workbench.laws.declared import check_equal
from workbench.laws.jitter import Seen, Situation, run
from workbench.laws.sentences import assert_equal_ranks
from workbench.ops import Apply, Backward, EndStep, PackParameters, Program, Send, Start, Ticket, Wait, WaitAny
from workbench.program import Algorithm, Card, Context, LaneMemory, Replicas, settings_of

LANES = (1, 2, 3)
SIZES = (3, 2, 4)  # ranks
CODECS = tuple(f"{type(codecs.get(name)).__name__}." for name in codecs.names())
PAUSES = (3.0, 1.0, 0.0)

# ---------------------------------------------------------------- all combinations, and few of them

Kind = type[Algorithm]
# Algorithm, collective, codec ("" for none), lanes (1 where the algorithm has no choice)
Row = tuple[Kind, str, str, int]


@cache
def variants_of(kind: Kind) -> tuple[Algorithm, ...]:
    """Those in which the laws are to hold; one of each that differ in more than collective and lanes."""
    found: dict[str, Algorithm] = {}
    for item in SETTINGS.get(kind, [kind()]):
        found.setdefault(
            repr({name: value for name, value in settings_of(item).items() if name not in ("collective", "lanes")}),
            item,
        )
    return tuple(found.values())


def made(row: Row) -> Iterator[tuple[Algorithm, tuple[str, str]]]:
    """The row's algorithm in each of its settings, with each version of its collective, and the names of both; none that is refused."""
    kind, collective, codec, lanes = row
    for setting, (name, version) in product(variants_of(kind), versions(collective, codec).items()):
        try:
            yield (
                replace(setting, collective=version, **({"lanes": lanes} if takes(setting, "lanes") else {})),  # type: ignore[call-arg]
                (repr(setting), name),
            )
        except ConfigError:
            continue


@cache
def rows() -> tuple[Row, ...]:
    """Every algorithm that sums, with every collective, codec and number of lanes that it takes."""
    found = []
    for kind in find_algorithms():
        plain = variants_of(kind)[0]
        if takes(plain, "collective"):
            lanes = LANES if takes(plain, "lanes") else (1,)
            found += [row for row in product([kind], collectives.names(), CODINGS, lanes) if any(made(row))]
    return tuple(found)


WITHOUT_SUMS = [
    setting for kind in find_algorithms() for setting in variants_of(kind) if not takes(setting, "collective")
]


def parts(row: Row) -> list[Hashable]:
    """Each two of algorithm, collective, codec and lanes; and the last three together, for what sums remember is each lane's own."""
    return [*pairs_of(row), row[1:]]


def cases() -> list[tuple[Algorithm, Situation]]:
    """A covering list of those that sum, each in a setting and with a version of its collective that are seldom in it; and the others."""
    used, found = Counter[str](), []
    for row in covering(rows(), parts):
        algorithm, names = min(made(row), key=lambda item: sum(used[name] for name in item[1]))
        used.update(names)
        found.append(algorithm)
    found += [*remembering(), *WITHOUT_SUMS]
    return [(algorithm, situation(number, algorithm)) for number, algorithm in enumerate(dict.fromkeys(found))]


def remembering() -> list[Algorithm]:
    """Those whose sums of one bucket overtake each other, with each version of a collective that remembers: lanes must not share that."""
    found: dict[tuple[Kind, str, str], Algorithm] = {}
    for row in rows():
        for algorithm, (_, version) in made(row):
            overtakes = algorithm.requires.num_lanes > 1 and algorithm.max_staleness
            if overtakes and versions(*row[1:3])[version].keeps_residual and not version.startswith(CODECS):
                found.setdefault((row[0], row[1], version), algorithm)
    return list(found.values())


def situation(number: int, algorithm: Algorithm) -> Situation:
    """Ranks and pauses in turns; with lanes, sums are late and there are many; what has groups has two of at least two ranks."""
    sizes, lanes = [size for size in SIZES if runs_on(algorithm, size)] or [1], algorithm.requires.num_lanes > 1
    collective = getattr(algorithm, "collective", None)
    if isinstance(collective, Hierarchical):
        sizes = [collective.group + 2]
    pauses = PAUSES[: 2 if lanes else 3]
    return Situation(
        num_ranks=sizes[number % len(sizes)],
        steps=11 if lanes else 7,
        pause_s=pauses[number % len(pauses)],
        seed=number,
    )


# ---------------------------------------------------------------- the law


def check(algorithm: Algorithm, situation: Situation) -> list[Seen]:
    """Raise unless ranks are equal when the algorithm says so, and take over equal values. Return their values."""
    ranks = run(algorithm, situation)
    if algorithm.replicas != Replicas.NEVER and takes_the_same_over(algorithm):
        check_taken(algorithm, ranks)
    check_equal(algorithm, situation, ranks)
    return ranks


def check_taken(algorithm: Algorithm, ranks: list[Seen]) -> None:
    """Values that are taken over under one name are equal on all ranks."""
    law = f"{name_of(algorithm)}: ranks take the same parameters over from others"
    for bucket, number in dict.fromkeys(name for rank in ranks for name in rank.taken):
        held = {place: rank.taken[bucket, number] for place, rank in enumerate(ranks) if (bucket, number) in rank.taken}
        steps = {place: step for place, (step, _) in held.items()}
        what = f"{'version' if algorithm.requires.servers else 'average'} {number} of {'all' if bucket < 0 else f'bucket {bucket}'}"
        assert_equal_ranks(
            law, [value for _, value in held.values()], f"{what}, by rank and step {steps}", names=list(held)
        )


def takes_the_same_over(algorithm: Algorithm) -> bool:
    """Unless its rule mixes in what is a rank's own, or each rank averages with its own neighbours."""
    if isinstance(algorithm, SlowMo):
        return takes_the_same_over(algorithm.inner)
    own = isinstance(algorithm, EagerDiLoCo | GossipAlgorithm | SPARTA)
    return not (own or (isinstance(algorithm, StreamingDiLoCo) and algorithm.mix))


def ids(case: Any) -> str:
    if isinstance(case, Situation):
        return f"{case.num_ranks} ranks, late by {case.pause_s:g}"
    return name_of(case)


@pytest.mark.parametrize(("algorithm", "situation"), cases(), ids=ids)
def test_replicas_are_equal_whatever_is_late(algorithm: Algorithm, situation: Situation) -> None:
    first = check(algorithm, situation)[0].steps
    assert not torch.equal(first[0], first[-1]), "nothing was learned"


ANY = st.one_of(
    st.deferred(
        lambda: st.sampled_from(rows()).flatmap(lambda row: st.sampled_from([algorithm for algorithm, _ in made(row)]))
    ),
    st.sampled_from(WITHOUT_SUMS),
)


@settings(max_examples=25)
@given(
    algorithm=ANY,
    situation=st.builds(
        Situation,
        num_ranks=st.integers(1, 5),
        steps=st.integers(1, 9),
        batch_size=st.integers(1, 6),
        pause_s=st.sampled_from([0.0, 0.5, 3.0, 8.0]),
        seed=st.integers(0, 999),
    ),
)
def test_replicas_are_equal_beyond_the_list(algorithm: Algorithm, situation: Situation) -> None:
    """Any combination, in any of its settings."""
    assume(runs_on(algorithm, situation.num_ranks))
    check(algorithm, situation)


# ---------------------------------------------------------------- the law covers what there is, and can fail


def test_the_list_has_all_that_the_package_lists() -> None:
    """With each number of lanes, and each way to declare when replicas are equal."""
    found = [algorithm for algorithm, _ in cases()]
    assert {type(algorithm) for algorithm in found} == set(find_algorithms())
    texts = " ".join(repr(getattr(algorithm, "collective", "")) for algorithm in found)
    wanted = [collectives.find(name).__name__ for name in collectives.names()]
    wanted += [type(codecs.get(name)).__name__ for name in codecs.names()]
    assert not [name for name in wanted if f"{name}(" not in texts]
    assert {algorithm.requires.num_lanes for algorithm in found} >= set(LANES)
    assert {algorithm.replicas for algorithm in found} == set(Replicas)


MAY_DIFFER = [
    item
    for item in representatives()
    if not item.replicas.equal_parameters and not (item.requires.servers and item.max_staleness == 0)
]


@pytest.mark.parametrize("algorithm", MAY_DIFFER, ids=name_of)
def test_replicas_that_may_differ_do(algorithm: Algorithm) -> None:
    """Else the algorithm could promise more."""
    one, other = (rank.steps[:-1] for rank in run(algorithm, Situation())[:2])
    assert any(not torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def test_sums_of_one_lane_overtake_those_of_another() -> None:
    """On some ranks more often than on others."""
    orders = [rank.finished for rank in run(PipeSGD(width=4, lanes=3), Situation())]
    assert all(order != sorted(order) for order in orders)
    assert len(set(map(tuple, orders))) > 1, "all ranks have seen the sums end in the same order"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ByArrival(Algorithm):
    """Pipe-SGD with the sum that is there, in place of the oldest."""

    card: ClassVar[Card] = PipeSGD.card
    lanes: int = 2

    @property
    def max_staleness(self) -> int:
        return 2

    def worker(self, ctx: Context) -> Program:
        in_flight: list[Ticket] = []
        for step in ctx.steps():
            gradient = yield Backward(step)
            in_flight.append((yield Start(Ring().all_reduce(ctx, gradient), lane=step % self.lanes)))
            if len(in_flight) == 3:
                position, total = yield WaitAny(tuple(in_flight))
                del in_flight[position]
                yield Apply(total)
            yield EndStep(step)
        for ticket in in_flight:
            yield Apply((yield Wait(ticket)))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OwnNoise(Codec):
    """The rank that decodes draws the noise."""

    noise: ClassVar[Generator] = Generator()

    def wire_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, values: Tensor, noise: Generator | None = None) -> Tensor:
        return values.float().view(torch.uint8)

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        values = wire.clone().view(torch.float32).to(like.dtype)
        return values + 1e-6 * torch.rand(len(values), generator=self.noise, dtype=like.dtype)


def broken(algorithm: Algorithm, **situation: Any) -> str:
    """What the law says; "" where it holds."""
    try:
        check(algorithm, Situation(**situation))
    except AssertionError as error:
        return str(error)
    return ""


def test_sums_applied_as_they_arrive_break_it_in_a_sentence() -> None:
    told = broken(ByArrival())
    assert re.match(
        r"ByArrival-2: replicas are equal after every step: after step \d, rank 1 unlike rank 0, coordinate \d+ is",
        told,
    ), told
    assert not broken(ByArrival(lanes=1)), "on one lane they arrive in the order of steps"


FACTORS = ("low-rank.p", "low-rank.q")


def test_a_basis_that_lanes_share_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which sum reads it first is chance, and another one on another rank."""
    algorithm = PipeSGD(width=4, lanes=2, collective=PowerSGD(rank=1, alternate=True, inner=Ring()))
    assert not broken(algorithm, steps=12)
    get, put = LaneMemory.__getitem__, LaneMemory.__setitem__

    def shared_get(memory: LaneMemory, name: str) -> Tensor:
        return memory._whole[name] if name.startswith(FACTORS) else get(memory, name)

    def shared_put(memory: LaneMemory, name: str, value: Tensor) -> None:
        memory._whole.update({name: value}) if name.startswith(FACTORS) else put(memory, name, value)

    monkeypatch.setattr(LaneMemory, "__getitem__", shared_get)
    monkeypatch.setattr(LaneMemory, "__setitem__", shared_put)
    assert "replicas are equal after every step: after step" in broken(algorithm, steps=12)


@pytest.mark.parametrize("collective", [Ring(codec=OwnNoise()), Once(codec=OwnNoise())], ids=repr)
def test_noise_of_whoever_decodes_breaks_it(collective: Collective) -> None:
    assert "after step 0, rank 1 unlike rank 0" in broken(SynchronousSGD(collective=collective))
    assert "average 0 of bucket 0, by rank and step" in broken(DiLoCo(every=2, collective=collective))


def test_a_server_that_answers_one_rank_otherwise_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrongly(port: ServerPort, source: int, version: int, flags: int = 0) -> Program:
        port._version = version
        packed = yield PackParameters(port.shard, server_copy=True)
        packed.flat[0] += 1e-9 * (source == 2)
        port._sending[source] = yield Start(
            Send(source, packed.flat, tag=REPLY_TAG + port.shard, stamp=stamp_of(version, flags))
        )
        return packed

    monkeypatch.setattr(ServerPort, "reply", wrongly)
    told = broken(BackupSGD(backups=0))
    assert (
        "version 1 of bucket 0, by rank and step {0: 0, 1: 0, 2: 0}, rank 2 unlike rank 0, coordinate 0 is" in told
    ), told
    assert "version 21 of bucket 0" in broken(AsyncSGD()), "until the end each version goes to one rank alone"
