"""Gossip: each algorithm against a NumPy simulation of p ranks, and the law that defines it.

The gradients are those of quadratics, c_i (w - x_i[t]), with other curvatures and minima on each rank, so the ranks'
data differ. Everything is in float64. In the simulations W is (p, p), and w, g, y are (p, n).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from workbench.algorithms import (
    DPSGD,
    ChocoSGD,
    GradientTracking,
    SerialSGD,
    StochasticGradientPush,
    SynchronousSGD,
    gossip,
)
from workbench.algorithms.gossip import Exchange, GossipAlgorithm
from workbench.codecs import QSGD, Codec, ErrorFeedback, Linear8, TopK, Truncate16
from workbench.collectives import Linear
from workbench.errors import ConfigError
from workbench.gradients import CONTROL, Gradient, build_layout
from workbench.program import Algorithm, Context
from workbench.runtimes.reference import ReferenceRuntime
from workbench.topologies import (
    Complete,
    Exponential,
    FromAdjacency,
    Graph,
    OnePeerExponential,
    RandomRegular,
    Ring,
    Star,
    Torus,
)

Array = npt.NDArray[np.float64]
Gradients = Callable[[int, Array], Array]

LR, STEPS, RANKS = 0.1, 25, 4
SIZES = (2, 3, 1)
PACKED = [5, 2, 3, 4, 0, 1]  # the order of a packed value: the last parameter is first
START = torch.tensor([1.0, -2.0, 3.0, 5.0, -7.0, 11.0], dtype=torch.float64)
CURVATURE = (0.5, 1.0, 2.0, 0.25)
MINIMUM = torch.randn(RANKS, len(START), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
NOISE = 1e-12
IRREGULAR = FromAdjacency(lists=((1, 2), (2,), (3,), (0,)))  # directed; rows of its mixing matrix do not sum to 1


def moved(rank: int, step: int) -> Tensor:
    """x_i[t]: a rank's minimum, which moves a little from step to step."""
    return MINIMUM[rank] + 0.1 * torch.sin(torch.arange(len(START), dtype=torch.float64) + step)


def gradient(rank: int, step: int, parameters: Tensor) -> Tensor:
    return CURVATURE[rank] * (parameters - moved(rank, step))


def still(rank: int, step: int, parameters: Tensor) -> Tensor:
    """The same, with minima that stay."""
    return CURVATURE[rank] * (parameters - MINIMUM[rank])


def gradients(step: int, parameters: Array) -> Array:
    """g, (p, n)."""
    return np.stack([gradient(rank, step, torch.tensor(row)).numpy() for rank, row in enumerate(parameters)])


def ran(
    algorithm: Algorithm,
    num_ranks: int = RANKS,
    of: Any = gradient,
    steps: int = STEPS,
    stop_after: int | None = None,
    **more: Any,
) -> ReferenceRuntime:
    runtime = ReferenceRuntime(algorithm, num_ranks, of, sizes=SIZES, lr=LR, start=START, **more)
    return runtime.run(steps, stop_after=stop_after)


def seen(runtime: ReferenceRuntime) -> Array:
    """[step, rank, coordinate]"""
    return np.stack([torch.stack(rank.seen).numpy() for rank in runtime.ranks], axis=1)


def begin() -> Array:
    return np.tile(START.numpy(), (RANKS, 1))


# ---------------------------------------------------------------- simulations


def simulated_dpsgd(graph: Graph, *, overlap: bool) -> Array:
    w, after = begin(), []
    for step in range(STEPS):
        mixing = graph.mixing(RANKS, step)
        g = gradients(step, w)
        w = mixing @ w - LR * g if overlap else mixing @ (w - LR * g)
        after.append(w)
    return np.stack(after)


def simulated_tracking(graph: Graph) -> Array:
    w, after = begin(), []
    y = before = np.zeros_like(w)
    for step in range(STEPS):
        mixing = graph.mixing(RANKS, step)
        g = gradients(step, w)
        y, before = mixing @ y + g - before, g
        w = mixing @ w - LR * y
        after.append(w)
    return np.stack(after)


def simulated_push(graph: Graph) -> Array:
    x, u, after = begin(), np.ones((RANKS, 1)), []
    for step in range(STEPS):
        mixing = graph.mixing(RANKS, step)
        x, u = mixing @ (x - LR * gradients(step, x / u)), mixing @ u
        after.append(x / u)
    return np.stack(after)


def simulated_choco(graph: Graph, codec: Codec, consensus_lr: float) -> Array:
    """As in the paper: each rank's copy is stored once here, because the copies at its neighbours are equal."""
    w, copy, mixing, after = begin(), begin(), graph.mixing(RANKS), []
    for step in range(STEPS):
        v = w - LR * gradients(step, w)
        for rank in range(RANKS):
            change = torch.tensor((v - copy)[rank, PACKED])
            copy[rank, PACKED] += codec.decode(codec.encode(change), change).numpy()
        w = v + consensus_lr * (mixing @ copy - copy)
        after.append(w)
    return np.stack(after)


GRAPHS: list[Graph] = [Ring(), Star(), Complete(), Exponential(), OnePeerExponential()]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_d_psgd_is_its_formula(graph: Graph, overlap: bool) -> None:
    found = seen(ran(DPSGD(topology=graph, overlap=overlap)))
    assert np.abs(found - simulated_dpsgd(graph, overlap=overlap)).max() < NOISE


@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_gradient_tracking_is_its_formula(graph: Graph) -> None:
    assert np.abs(seen(ran(GradientTracking(topology=graph))) - simulated_tracking(graph)).max() < NOISE


@pytest.mark.parametrize("graph", [*GRAPHS, IRREGULAR], ids=str)
def test_stochastic_gradient_push_is_its_formula(graph: Graph) -> None:
    assert np.abs(seen(ran(StochasticGradientPush(topology=graph))) - simulated_push(graph)).max() < NOISE


@pytest.mark.parametrize("codec", [TopK(k=2), Linear8(), Truncate16()], ids=str)
@pytest.mark.parametrize("graph", [Ring(), Star(), Complete()], ids=str)
def test_choco_sgd_is_its_formula(graph: Graph, codec: Codec) -> None:
    found = seen(ran(ChocoSGD(topology=graph, codec=codec, consensus_lr=0.3)))
    assert np.abs(found - simulated_choco(graph, codec, 0.3)).max() < NOISE


# ---------------------------------------------------------------- limiting cases


def test_on_a_complete_graph_d_psgd_is_synchronous_sgd() -> None:
    """And so is SGP; and Choco-SGD with a codec that loses nothing but the rounding to float32."""
    expected = seen(ran(SynchronousSGD()))
    for algorithm, rounding in [
        (DPSGD(topology=Complete(), overlap=False), NOISE),
        (StochasticGradientPush(topology=Complete()), NOISE),
        (ChocoSGD(topology=Complete(), codec=TopK(k=6), consensus_lr=1.0), 1e-5),
    ]:
        assert np.abs(seen(ran(algorithm)) - expected).max() < rounding


def test_it_is_bit_identical_if_both_sum_in_the_order_of_ranks() -> None:
    """With four ranks all weights are powers of two. One addition of shares and one of parameters round differently."""
    start = torch.zeros(len(START), dtype=torch.float64)

    def whole(rank: int, step: int, parameters: Tensor) -> Tensor:
        return 4.0 * (rank + 1) * torch.arange(1.0, len(parameters) + 1, dtype=torch.float64)

    both = [
        ReferenceRuntime(algorithm, RANKS, whole, sizes=SIZES, lr=0.5, start=start).run(8)
        for algorithm in (DPSGD(topology=Complete(), overlap=False), SynchronousSGD(collective=Linear()))
    ]
    for ours, theirs in zip(both[0].ranks, both[1].ranks, strict=True):
        assert torch.equal(ours.parameters, theirs.parameters)


def test_on_a_balanced_graph_push_is_d_psgd() -> None:
    for graph in (Ring(), Exponential(), OnePeerExponential()):
        one, other = ran(StochasticGradientPush(topology=graph)), ran(DPSGD(topology=graph, overlap=False))
        assert np.abs(seen(one) - seen(other)).max() < NOISE


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    "algorithm",
    [DPSGD(), DPSGD(overlap=False), GradientTracking(), StochasticGradientPush(), ChocoSGD(codec=TopK(k=1))],
    ids=str,
)
def test_one_worker_is_serial(algorithm: Algorithm, momentum: float) -> None:
    ours, serial = (ran(one, 1, momentum=momentum).ranks[0] for one in (algorithm, SerialSGD()))
    exact = not isinstance(algorithm, GradientTracking)  # y + g[t] - g[t-1] rounds
    for found, expected in zip(ours.seen, serial.seen, strict=True):
        assert torch.equal(found, expected) if exact else torch.allclose(found, expected, rtol=NOISE)


# ---------------------------------------------------------------- laws


def once(rank: int, step: int, parameters: Tensor) -> Tensor:
    """All ranks move apart in the first step, and then have no gradient."""
    return 10 * MINIMUM[rank % RANKS] * (1 + rank) * (step == 0)


def distances(runtime: ReferenceRuntime) -> Array:
    """[step]: the squared distance of all replicas from their mean."""
    after = seen(runtime)
    return ((after - after.mean(1, keepdims=True)) ** 2).sum((1, 2))


@pytest.mark.parametrize("num_ranks", [4, 5, 8])
@pytest.mark.parametrize("graph", [Ring(), Star(), Torus(), Exponential(), RandomRegular(degree=2, seed=1)], ids=str)
def test_mixing_contracts_the_distance_by_the_spectral_gap(graph: Graph, num_ranks: int) -> None:
    """At least by (1 - gap)^2 in each step; in the end by just that, because the slowest eigenvector is left."""
    factor = (1 - graph.spectral_gap(num_ranks)) ** 2
    for overlap in (True, False):
        found = distances(ran(DPSGD(topology=graph, overlap=overlap), num_ranks, once, 40))
        large = found[:-1] > 1e-12  # below, rounding counts
        ratios = found[1:][large] / found[:-1][large]
        assert (ratios <= factor * (1 + 1e-6)).all()
        assert ratios[-1] >= 0.5 * factor, "the gap is not larger than it is said to be"


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("graph", [Ring(), Torus(), RandomRegular(degree=2, seed=1)], ids=str)
def test_with_gradients_the_distance_is_bounded_by_the_spectral_gap(graph: Graph, num_ranks: int) -> None:
    """d[t+1] <= rho (d[t] + lr s[t]) if the step is mixed too, and rho d[t] + lr s[t] if it is taken after mixing.

    rho is 1 - gap, d the distance of all replicas from their mean, and s that of their gradients from theirs. The
    ranks' minima lie along the slowest eigenvector: it is an equality if its eigenvalue is positive. On these graphs
    SGP is D-PSGD, so the same bound holds.
    """
    rho = 1 - graph.spectral_gap(num_ranks)
    values, vectors = np.linalg.eigh(graph.mixing(num_ranks))
    slowest = int(np.flatnonzero(np.isclose(np.abs(values), rho))[-1])

    def quadratic(rank: int, step: int, parameters: Tensor) -> Tensor:
        return 0.5 * (parameters - float(vectors[rank, slowest]) * MINIMUM[0])

    for algorithm, mixes_step in [
        (DPSGD(topology=graph, overlap=False), True),
        (StochasticGradientPush(topology=graph), True),
        (DPSGD(topology=graph), False),
    ]:
        w = np.concatenate([np.tile(START.numpy(), (1, num_ranks, 1)), seen(ran(algorithm, num_ranks, quadratic))])
        g = 0.5 * (w - vectors[:, [slowest]] * MINIMUM[0].numpy())
        d, s = (np.sqrt(((each - each.mean(1, keepdims=True)) ** 2).sum((1, 2))) for each in (w, g))
        bound = (rho * (d + LR * s) if mixes_step else rho * d + LR * s)[:-1]
        after = d[1:]
        assert (after <= bound * (1 + 1e-9)).all(), algorithm
        if values[slowest] > 0:
            assert after == pytest.approx(bound, rel=1e-9), f"{algorithm}: the gap is not larger than it is said to be"


def test_a_period_of_the_one_peer_graph_brings_all_together() -> None:
    found = distances(ran(DPSGD(topology=OnePeerExponential(), overlap=False), 8, once, 6))
    assert found[0] > 1 and found[2] < 1e-24


def test_push_sum_weights_sum_to_p_and_the_weighted_sum_is_kept() -> None:
    runtime = ran(StochasticGradientPush(topology=IRREGULAR), of=once)
    for step in range(STEPS):
        weights = [float(rank.ends[step].state.weight) for rank in runtime.ranks]  # type: ignore[union-attr]
        assert sum(weights) == pytest.approx(RANKS, rel=NOISE)
        assert step < 2 or max(abs(weight - 1) for weight in weights) > 0.1, "the graph is not balanced"
        kept = sum(weight * rank.seen[step] for weight, rank in zip(weights, runtime.ranks, strict=True))
        expected = sum(START - LR * once(rank, 0, START) for rank in range(RANKS))
        assert torch.allclose(kept, expected, rtol=NOISE)  # type: ignore[arg-type]
    for rank in runtime.ranks:
        assert torch.allclose(rank.parameters, expected / RANKS, rtol=NOISE)  # type: ignore[operator]
    assert distances(runtime)[-1] < 1e-3 * distances(runtime)[0], "without weights they would not come together"


@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_the_mean_of_the_trackers_is_the_mean_of_the_gradients(graph: Graph) -> None:
    runtime = ran(GradientTracking(topology=graph))
    for step in range(STEPS):
        states: list[Any] = [rank.ends[step].state for rank in runtime.ranks]
        trackers = torch.stack([state.tracker for state in states])
        gradients_of_it = torch.stack([state.gradient for state in states])
        assert torch.allclose(trackers.mean(0), gradients_of_it.mean(0), rtol=NOISE, atol=NOISE)
    assert not torch.allclose(trackers, gradients_of_it, rtol=0.01), "each is its rank's own"


def test_gradient_tracking_finds_the_minimum_of_the_mean_and_d_psgd_stays_away() -> None:
    curvature = torch.tensor(CURVATURE, dtype=torch.float64)[:, None]
    minimum = (curvature * MINIMUM).sum(0) / curvature.sum()
    away = {
        type(algorithm).__name__: max(
            float((rank.seen[-1] - minimum).norm()) for rank in ran(algorithm, of=still, steps=600).ranks
        )
        for algorithm in (GradientTracking(), DPSGD(), DPSGD(overlap=False))
    }
    assert away["GradientTracking"] < 1e-9
    assert away["DPSGD"] > 0.01


@pytest.mark.parametrize("codec", [TopK(k=1), Linear8(), QSGD(group=16)], ids=str)
def test_choco_keeps_the_mean_and_its_residuals_are_bounded(codec: Codec) -> None:
    """Copies at the neighbours sum up the decoded messages; what the codec lost stays in v - c, and is sent later."""
    runtime = ran(ChocoSGD(codec=codec, consensus_lr=0.2), of=once, steps=300)
    mean = seen(runtime).mean(1)
    assert np.abs(mean - mean[0]).max() < 10 * NOISE
    left = [
        max(float((rank.seen[step][PACKED] - rank.ends[step].state.copy).norm()) for rank in runtime.ranks)  # type: ignore[union-attr]
        for step in range(300)
    ]
    apart = distances(runtime)
    assert max(left) <= 2 * left[0] and left[-1] < 1e-2 * left[0]
    assert apart[-1] < 1e-4 * apart[0], "compressed messages bring the ranks together"


def test_choco_copies_mix_as_the_graph_says() -> None:
    """The one vector that a rank keeps for its neighbours is the weighted sum of their copies."""
    runtime = ran(ChocoSGD(codec=TopK(k=2)))
    states: list[Any] = [rank.ends[-1].state for rank in runtime.ranks]
    copies = np.stack([state.copy.numpy() for state in states])
    mixed = np.stack([state.mixed.numpy() for state in states])
    assert np.abs(mixed - Ring().mixing(RANKS) @ copies).max() < NOISE


def test_choco_continues_on_another_topology() -> None:
    """The weighted sums of the copies are made again for the new weights, and the mean is kept."""
    first = ran(ChocoSGD(codec=TopK(k=2)), of=once, steps=20, stop_after=9)
    other = ReferenceRuntime(
        ChocoSGD(topology=Star(), codec=TopK(k=2), consensus_lr=0.2), RANKS, once, sizes=SIZES, lr=LR
    )
    for rank, before in zip(other.ranks, first.ranks, strict=True):
        rank.parameters.copy_(before.parameters)
    other.run(20, first_step=10, resumed=first.states)
    states: list[Any] = [rank.ends[-1].state for rank in other.ranks]
    copies = np.stack([state.copy.numpy() for state in states])
    mixed = np.stack([state.mixed.numpy() for state in states])
    assert np.abs(mixed - Star().mixing(RANKS) @ copies).max() < NOISE
    mean = [torch.stack([rank.seen[-1] for rank in runtime.ranks]).mean(0) for runtime in (first, other)]
    assert torch.allclose(*mean, rtol=NOISE)


# ---------------------------------------------------------------- the control value


class Driven:
    """The exchanges of all ranks, without a runtime: who knows rank 0's control value after which step."""

    def __init__(self, graph: Graph, num_ranks: int, first_step: int = 0) -> None:
        self.graph, self.num_ranks, self.step = graph, num_ranks, first_step
        self.exchanges = [Exchange(Context(rank, num_ranks), graph) for rank in range(num_ranks)]
        self.layout = build_layout([("w", torch.nn.Parameter(torch.zeros(3)))])

    def take_step(self, control: int) -> list[int]:
        packed = [Gradient(torch.zeros(self.layout.numel), self.layout, self.step, 0) for _ in self.exchanges]
        packed[0].tail()[CONTROL] = control
        for exchange, value in zip(self.exchanges, packed, strict=True):
            exchange.load_control(value, self.step)
        sent = [value.tail()[CONTROL].clone() for value in packed]
        for rank, exchange in enumerate(self.exchanges):
            sources = self.graph.sources(rank, self.num_ranks, self.step)
            exchange.hear([sent[source] for source in (rank, *sources)], packed[rank], self.step)
        self.step += 1
        return [int(value.tail()[CONTROL]) for value in packed]


@pytest.mark.parametrize("first_step", [0, 1, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 5, 8])
@pytest.mark.parametrize("graph", [Ring(), Star(), OnePeerExponential(), Complete()], ids=str)
def test_all_ranks_learn_a_command_in_the_same_step(graph: Graph, num_ranks: int, first_step: int) -> None:
    """Also if rank 0's value changes on the way, and if the program begins between two of its beginnings."""
    driven = Driven(graph, num_ranks, first_step)
    known = [driven.take_step(control=1 + step // 5) for step in range(30)]
    assert all(len(set(values)) == 1 for values in known)
    assert max(max(values) for values in known) >= 5, "the value arrives, and newer ones after it"


# ---------------------------------------------------------------- wrong versions are found


def check_the_mean(algorithm: GossipAlgorithm) -> None:
    """The mean over ranks is kept where nothing has a gradient."""
    mean = seen(ran(algorithm, of=once)).mean(1)
    assert np.abs(mean - mean[0]).max() < NOISE, "the mean moved"


KEEPING = [DPSGD(), DPSGD(overlap=False), ChocoSGD(codec=TopK(k=2), consensus_lr=0.2), DPSGD(topology=Star())]


@pytest.mark.parametrize("algorithm", KEEPING, ids=str)
def test_a_wrong_mixing_weight_is_found(algorithm: GossipAlgorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 gives its first neighbour 0.05 more than the graph says, and itself 0.05 less: its row sums to 1."""
    check_the_mean(algorithm)
    right = Graph.mixing

    def wrong(graph: Graph, num_ranks: int, step: int = 0) -> Array:
        weights = right(graph, num_ranks, step).copy()
        weights[0, :2] += (-0.05, 0.05)
        return weights

    monkeypatch.setattr(Graph, "mixing", wrong)
    monkeypatch.setattr(ChocoSGD, "check", lambda *_: None)  # it would see that the weights are not symmetric
    with pytest.raises(AssertionError, match="the mean moved"):
        check_the_mean(algorithm)


@pytest.mark.parametrize("algorithm", KEEPING, ids=str)
def test_a_stale_copy_is_found(algorithm: GossipAlgorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 uses the message of the step before of one of its neighbours."""
    right = Exchange.finish
    kept: dict[int, Tensor] = {}

    def wrong(exchange: Exchange) -> Any:
        messages = yield from right(exchange)
        if exchange.ctx.rank == 1:
            kept[0], messages[0] = messages[0], kept.get(0, messages[0])
        return messages

    check_the_mean(algorithm)
    monkeypatch.setattr(gossip.Exchange, "finish", wrong)
    with pytest.raises(AssertionError, match="the mean moved"):
        check_the_mean(algorithm)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda: DPSGD(topology="ring"), r"such as Ring\(\)"),
        (lambda: DPSGD(overlap=1), "give True or False"),
        (lambda: ChocoSGD(codec=ErrorFeedback(codec=TopK(k=3))), r"use codec=TopK\("),
        (lambda: ChocoSGD(codec=None), "use DPSGD"),
        (lambda: ChocoSGD(codec=QSGD()), "can be larger than the values"),
        (lambda: ChocoSGD(consensus_lr=0), "above 0 and up to 1"),
        (lambda: DPSGD(topology=IRREGULAR).check(4), "use StochasticGradientPush"),
        (lambda: ChocoSGD(topology=Exponential()).check(8), "directed or changes.*Ring"),
        (lambda: ChocoSGD(topology=OnePeerExponential()).check(8), "directed or changes.*Ring"),
        (lambda: DPSGD(topology=RandomRegular(degree=3)).check(7), "must be even"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_fix(make: Callable[[], Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        make()
