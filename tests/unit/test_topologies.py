"""Topologies: degrees, weights, spectral gaps by closed forms; wrong graphs and weights are refused with the fix."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from workbench import plots, topologies
from workbench.errors import ConfigError
from workbench.topologies import (
    Complete,
    Exponential,
    FromAdjacency,
    Graph,
    OnePeerExponential,
    RandomPairs,
    RandomRegular,
    Ring,
    Star,
    Torus,
)

GRAPHS = [topologies.get(name) for name in topologies.names()] + [RandomRegular(degree=3, seed=5)]
DIRECTED_LISTS = ((1, 2), (2,), (3,), (0,))
"""Rank 0 sends to two ranks, and hears from one."""


def exists(graph: Graph, num_ranks: int) -> bool:
    try:
        graph.check(num_ranks)
    except ConfigError:
        return False
    return True


@settings(max_examples=60, deadline=None)
@given(graph=st.sampled_from(GRAPHS), num_ranks=st.integers(1, 20), step=st.integers(0, 9))
def test_the_weights_of_each_graph_keep_the_mean_and_find_it(graph: Graph, num_ranks: int, step: int) -> None:
    """Columns sum to 1: the mean is kept. Rows sum to 1 and the gap is above 0: all ranks come to it."""
    assume(exists(graph, num_ranks))
    weights = graph.mixing(num_ranks, step)
    assert weights.shape == (num_ranks, num_ranks)
    assert (weights >= 0).all() and (np.diag(weights) > 0).all()
    assert weights.sum(0) == pytest.approx(np.ones(num_ranks))
    assert weights.sum(1) == pytest.approx(np.ones(num_ranks)) and graph.is_balanced(num_ranks)
    assert graph.spectral_gap(num_ranks) > 0
    for rank in range(num_ranks):
        sources = graph.sources(rank, num_ranks, step)
        assert sources == tuple(j for j in range(num_ranks) if rank in graph.neighbours(j, num_ranks, step))
        assert set(np.flatnonzero(weights[rank])) == {rank, *sources}
        assert rank not in sources


@pytest.mark.parametrize("num_ranks", [3, 4, 7, 16])
def test_spectral_gaps_are_those_of_the_closed_forms(num_ranks: int) -> None:
    """A ring's eigenvalues are (1 + 2 cos(2 pi k / p)) / 3. With Metropolis's weights, a star's are 1 - 1/p, 1 and 0."""
    ring = [(1 + 2 * math.cos(2 * math.pi * k / num_ranks)) / 3 for k in range(1, num_ranks)]
    assert Ring().spectral_gap(num_ranks) == pytest.approx(1 - max(map(abs, ring)))
    assert Star().spectral_gap(num_ranks) == pytest.approx(1 / num_ranks)
    assert Complete().spectral_gap(num_ranks) == pytest.approx(1)


@pytest.mark.parametrize("power", [1, 2, 3, 4])
def test_a_period_of_the_one_peer_graph_is_an_exact_mean(power: int) -> None:
    num_ranks = 2**power
    product = np.eye(num_ranks)
    for step in range(power):
        product = OnePeerExponential().mixing(num_ranks, step) @ product
    assert product == pytest.approx(np.full((num_ranks, num_ranks), 1 / num_ranks))
    assert OnePeerExponential().spectral_gap(num_ranks) == 1
    assert OnePeerExponential().num_hops(num_ranks) == power


def test_an_irregular_graph_has_metropolis_s_weights() -> None:
    """On a path of three ranks the one in the middle has two neighbours: 1 / (1 + 2) for both edges."""
    path = FromAdjacency(lists=((1,), (0, 2), (1,)))
    third = 1 / 3
    assert path.mixing(3) == pytest.approx(
        np.array([[2 * third, third, 0], [third, third, third], [0, third, 2 * third]])
    )
    assert path.is_undirected(3) and path.num_hops(3) == 2


def test_a_directed_graph_divides_what_a_rank_sends() -> None:
    graph = FromAdjacency(lists=DIRECTED_LISTS)
    assert graph.mixing(4)[:, 0] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert graph.mixing(4).sum(0) == pytest.approx(np.ones(4))
    assert not graph.is_balanced(4) and not graph.is_undirected(4)


def test_your_own_weights_are_taken() -> None:
    weights = ((0.9, 0.1), (0.1, 0.9))
    assert FromAdjacency(lists=((1,), (0,)), weights=weights).mixing(2).tolist() == [list(row) for row in weights]
    assert FromAdjacency(lists=[[1], [0]]) == FromAdjacency(lists=((1,), (0,))), "lists become tuples"


@settings(max_examples=30, deadline=None)
@given(degree=st.integers(2, 6), num_ranks=st.integers(3, 24), seed=st.integers(0, 99))
def test_a_random_graph_is_regular_connected_and_a_function_of_its_seed(degree: int, num_ranks: int, seed: int) -> None:
    graph = RandomRegular(degree=degree, seed=seed)
    assume(exists(graph, num_ranks))
    assert {len(graph.neighbours(rank, num_ranks)) for rank in range(num_ranks)} == {degree}
    assert graph.is_undirected(num_ranks) and graph.num_hops(num_ranks) < num_ranks
    assert RandomRegular(degree=degree, seed=seed).adjacency(num_ranks).tolist() == graph.adjacency(num_ranks).tolist()


def test_seeds_draw_different_graphs() -> None:
    drawn = {str(RandomRegular(degree=3, seed=seed).adjacency(12).tolist()) for seed in range(5)}
    assert len(drawn) == 5


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 8])
def test_random_pairs_are_pairs_and_other_ones_in_each_step(num_ranks: int) -> None:
    """Of an odd number of ranks one is alone, in turn."""
    partners = [[RandomPairs().neighbours(rank, num_ranks, step) for rank in range(num_ranks)] for step in range(16)]
    for drawn in partners:
        assert [len(one) for one in drawn].count(0) == num_ranks % 2
        assert all(drawn[one[0]] == (rank,) for rank, one in enumerate(drawn) if one)
    alone = {rank for drawn in partners for rank, one in enumerate(drawn) if not one}
    assert len(alone) == (num_ranks if num_ranks % 2 else 0)
    if num_ranks > 2:
        assert len({str(drawn) for drawn in partners}) > 8
        assert any(
            RandomPairs(seed=1).adjacency(num_ranks, step).tolist() != RandomPairs().adjacency(num_ranks, step).tolist()
            for step in range(16)
        )


def test_random_pairs_halve_the_variance_in_a_step() -> None:
    """Of many ranks, whose partners are independent of them. So the distance from the mean is multiplied by sqrt(1/2)."""
    assert 1 - RandomPairs().spectral_gap(64) == pytest.approx(math.sqrt(0.5), abs=0.06)


def test_a_torus_is_as_square_as_it_can_be() -> None:
    assert Torus().neighbours(5, 12) == (1, 4, 6, 9), "three rows of four"
    assert Torus(rows=2).neighbours(0, 8) == (1, 3, 4)
    assert [Torus().neighbours(rank, 7) for rank in range(7)] == [Ring().neighbours(rank, 7) for rank in range(7)]


def test_a_line_describes_a_graph() -> None:
    assert OnePeerExponential().describe(8) == (
        "OnePeerExponential(), 8 ranks: each sends to 1, changes with period 3, spectral gap 1, rank 0 is heard after 3 steps"
    )
    assert (
        Star().describe(4) == "Star(), 4 ranks: each sends to 1 to 3, spectral gap 0.25, rank 0 is heard after 1 steps"
    )


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (Torus, {"rows": 0}, "1 or more, or None"),
    (RandomRegular, {"degree": 1}, "2 or more"),
    (RandomRegular, {"seed": -1}, "0 or more"),
    (FromAdjacency, {"lists": 3}, "such as"),
    (FromAdjacency, {"lists": ((1,), (2,))}, "rank 1 sends to 2: give other ranks of 0 to 1"),
    (FromAdjacency, {"lists": ((0,), (0,))}, "rank 0 sends to 0"),
    (FromAdjacency, {"lists": ((1,), (0,)), "weights": ((0.5, 0.5), (0.5, 0.6))}, "column 1.*let each column sum to 1"),
    (FromAdjacency, {"lists": ((1,), (0,)), "weights": ((1.5, -0.5), (-0.5, 1.5))}, "negative"),
    (FromAdjacency, {"lists": ((1,), (0,)), "weights": ((1.0,), (1.0,))}, "give 2 rows of 2 numbers"),
    (
        FromAdjacency,
        {"lists": ((1,), (2,), (0,)), "weights": ((0.5, 0.5, 0), (0.5, 0.5, 0), (0, 0, 1))},
        "rank 0 has a weight for rank 1, which does not send to it: set it to 0",
    ),
]


@pytest.mark.parametrize(("kind", "settings_of_it", "fix"), WRONG)
def test_a_wrong_setting_is_refused_with_the_fix(kind: Any, settings_of_it: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        kind(**settings_of_it)


@pytest.mark.parametrize(
    ("graph", "num_ranks", "fix"),
    [
        (Torus(rows=3), 8, "divisor of 8"),
        (RandomRegular(degree=4), 4, "at most 3"),
        (RandomRegular(degree=3), 7, "must be even"),
        (FromAdjacency(lists=((1,), (0,))), 3, "give 3 lists"),
        (FromAdjacency(lists=((1,), (0,), (3,), (2,))), 4, "rank 2 never hears from rank 0"),
    ],
)
def test_a_graph_that_does_not_exist_or_does_not_reach_all_is_refused(graph: Graph, num_ranks: int, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        graph.num_hops(num_ranks)


def test_names_are_those_of_the_command_line() -> None:
    assert topologies.get("random-regular:3:7") == RandomRegular(degree=3, seed=7)
    assert topologies.get("one-peer-exponential") == OnePeerExponential()
    assert topologies.get("Exponential()") == Exponential()
    for wrong, fix in [
        ("rong", "did you mean"),
        ("torus:a", "torus:ROWS, with whole numbers"),
        ("ring:2", "write it as ring,"),
        ("from-adjacency", "no topology"),
        ("names()", "no setting is called"),
    ]:
        with pytest.raises(ConfigError, match=fix):
            topologies.get(wrong)


def test_a_figure_has_each_edge_once() -> None:
    """Undirected edges are lines, directed ones are arrows from the rank that sends."""
    ring = plots.topology(Ring(), 6)
    assert sum(x is None for x in ring.data[0].x) == 6 and not ring.layout.annotations
    assert list(ring.data[1].text) == [str(rank) for rank in range(6)]
    assert ring.data[1].hovertext[0] == "rank 0: itself 0.333, rank 1 0.333, rank 5 0.333"
    assert ring.layout.title.text == "Ring() on 6 ranks: spectral gap 0.333"
    one_peer = plots.topology(OnePeerExponential(), 8, step=1)
    assert not one_peer.data[0].x and len(one_peer.layout.annotations) == 8
    places = list(zip(one_peer.data[1].x, one_peer.data[1].y, strict=True))
    for arrow in one_peer.layout.annotations:
        source, to = places.index((arrow.ax, arrow.ay)), places.index((arrow.x, arrow.y))
        assert to == (source + 2) % 8
    assert "step 1" in one_peer.layout.title.text
    assert plots.topology(Complete(), 64).data[1].mode == "markers", "numbers do not fit"


def test_the_record_is_of_these_graphs() -> None:
    rows = json.loads((Path(__file__).parents[2] / "records" / "topologies.json").read_text())["rows"]
    gaps = {(row["name"], row["workers"]): row["spectral_gap"] for row in rows if row["spectral_gap"] is not None}
    assert len(gaps) == 10
    for (name, workers), gap in gaps.items():
        assert topologies.get(name.removeprefix("D-PSGD, ")).spectral_gap(workers) == pytest.approx(gap, abs=1e-6)
