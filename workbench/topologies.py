"""Topologies of gossip: which ranks send to which in a step, and the weights with which a rank mixes what it receives.

A topology is data and is given to an algorithm: `DPSGD(topology=Torus())`. Of p ranks, rank i receives from rank j with
weight W[i, j] of its mixing matrix:

- A rank that sends to another one also receives from it (undirected). The weights are Metropolis and Hastings's,
  W[i, j] = 1 / (1 + max(d_i, d_j)), with d_i neighbours of rank i. Rows and columns sum to 1.
- Otherwise (directed) a rank with d neighbours divides its value by 1 + d, W[i, j] = 1 / (1 + d_j). Columns sum to 1;
  rows too if every rank receives from as many ranks as it sends to.

The network's hosts and switches are something else: `costs.Topology`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, final

import numpy as np
import numpy.typing as npt

from workbench.arguments import check_whole, is_whole
from workbench.errors import ConfigError
from workbench.naming import build, call_checked, kebab, unknown
from workbench.rng import generator

Matrix = npt.NDArray[np.float64]

__all__ = [
    "Complete",
    "Exponential",
    "FromAdjacency",
    "Graph",
    "OnePeerExponential",
    "RandomPairs",
    "RandomRegular",
    "Ring",
    "Star",
    "Torus",
    "check_graph",
    "find",
    "get",
    "names",
]

ROUNDING = 1e-9  # by which sums of weights may differ from 1
NUM_PAIRINGS = 16  # drawings of `RandomPairs`, before the first one comes again


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph(ABC):
    """Which ranks send to which. A subclass gives `neighbours`; everything else follows from it.

    A graph that changes from step to step repeats after `period` steps.
    """

    @abstractmethod
    def neighbours(self, rank: int, num_ranks: int, step: int = 0) -> tuple[int, ...]:
        """Return the ranks to which a rank sends in that step, in rising order, without itself."""

    def check(self, num_ranks: int) -> None:  # noqa: B027 - most exist for any number
        """Raise `ConfigError` unless the graph exists for that many ranks."""

    def period(self, num_ranks: int) -> int:
        """Return the number of steps after which the graph repeats; 1 for a graph that does not change."""
        return 1

    def weights_at(self, num_ranks: int, step: int) -> Matrix:
        """Return the mixing matrix of a step, (p, p), not yet checked. Call `mixing`."""
        sends = self.adjacency(num_ranks, step)
        return _metropolis(sends) if bool((sends == sends.T).all()) else _divided(sends)

    # -- what follows ------------------------------------------------------------------------------------------

    def sources(self, rank: int, num_ranks: int, step: int = 0) -> tuple[int, ...]:
        """Return the ranks from which a rank receives in that step, in rising order, without itself."""
        return tuple(int(source) for source in np.flatnonzero(self.adjacency(num_ranks, step)[rank]))

    def adjacency(self, num_ranks: int, step: int = 0) -> npt.NDArray[np.bool_]:
        """Return A, (p, p): A[i, j] is True if rank i receives from rank j in that step."""
        return _adjacency(self, num_ranks, step % self.period(num_ranks))

    def mixing(self, num_ranks: int, step: int = 0) -> Matrix:
        """Return W, (p, p), of that step: rank i receives from rank j with weight W[i, j].

        >>> Ring().mixing(4).round(2).tolist()[0]
        [0.33, 0.33, 0.0, 0.33]

        Raises:
            ConfigError: a column does not sum to 1, a weight is negative, or the ranks of one do not exchange.
        """
        return _mixing(self, num_ranks, step % self.period(num_ranks))

    def is_undirected(self, num_ranks: int) -> bool:
        """Return True if each rank receives from the ranks to which it sends, with equal weights."""
        return all(np.allclose(one, one.T, atol=ROUNDING) for one in self._of_a_period(num_ranks))

    def is_balanced(self, num_ranks: int) -> bool:
        """Return True if the weights with which a rank receives sum to 1, as an average of parameters needs."""
        return all(np.allclose(one.sum(1), 1.0, atol=ROUNDING) for one in self._of_a_period(num_ranks))

    def spectral_gap(self, num_ranks: int) -> float:
        """Return 1 - |lambda_2|, with the second largest eigenvalue of the mixing matrix by modulus.

        In the long run, mixing alone multiplies the ranks' distance from their mean by 1 - gap in a step, or by less.
        For an undirected graph that does not change, and for `Exponential`, this is so in every step. For one that
        changes, such as `RandomPairs`, it is the geometric mean over periods: a step may leave the distance as it is.
        A gap of 1 is an exact mean, after a period.

        >>> [round(graph.spectral_gap(16), 3) for graph in (Ring(), Torus(), Exponential(), Complete())]
        [0.051, 0.4, 0.4, 1.0]
        """
        if num_ranks == 1:
            return 1.0
        product = np.linalg.multi_dot([np.eye(num_ranks), *reversed(self._of_a_period(num_ranks)), np.eye(num_ranks)])
        moduli = np.sort(np.abs(np.linalg.eigvals(product)))
        second = float(moduli[-2])
        return 1.0 if second < ROUNDING else 1.0 - second ** (1.0 / self.period(num_ranks))

    def num_hops(self, num_ranks: int) -> int:
        """Return the number of steps after which every rank has heard from rank 0, from whatever step on.

        >>> [graph.num_hops(16) for graph in (Ring(), Torus(), Exponential(), OnePeerExponential(), Complete())]
        [8, 4, 4, 4, 1]

        Raises:
            ConfigError: a rank never hears from rank 0.
        """
        return _num_hops(self, num_ranks)

    def describe(self, num_ranks: int) -> str:
        """Return a line with the degree and the spectral gap.

        >>> print(Torus().describe(16))
        Torus(rows=None), 16 ranks: each sends to 4, spectral gap 0.4, rank 0 is heard after 4 steps
        """
        degrees = {
            len(self.neighbours(rank, num_ranks, step))
            for rank in range(num_ranks)
            for step in range(self.period(num_ranks))
        }
        several = str(min(degrees)) if len(degrees) == 1 else f"{min(degrees)} to {max(degrees)}"
        changes = f", changes with period {self.period(num_ranks)}" if self.period(num_ranks) > 1 else ""
        return (
            f"{self}, {num_ranks} rank{'s' * (num_ranks != 1)}: each sends to {several}{changes}, spectral gap "
            f"{self.spectral_gap(num_ranks):.3g}, rank 0 is heard after {self.num_hops(num_ranks)} steps"
        )

    def _of_a_period(self, num_ranks: int) -> list[Matrix]:
        return [self.mixing(num_ranks, step) for step in range(self.period(num_ranks))]


# -- weights, for a graph and a number of ranks -------------------------------------------------------------------


@cache
def _adjacency(graph: Graph, num_ranks: int, step: int) -> npt.NDArray[np.bool_]:
    graph.check(num_ranks)
    receives = np.zeros((num_ranks, num_ranks), dtype=bool)
    for source in range(num_ranks):
        for to in graph.neighbours(source, num_ranks, step):
            receives[to, source] = True
    receives.flags.writeable = False
    return receives


@cache
def _mixing(graph: Graph, num_ranks: int, step: int) -> Matrix:
    weights = np.array(graph.weights_at(num_ranks, step), dtype=float)
    _check_mixing(graph, weights, _adjacency(graph, num_ranks, step))
    weights.flags.writeable = False
    return weights


def _metropolis(receives: npt.NDArray[np.bool_]) -> Matrix:
    """W[i, j] = 1 / (1 + max(d_i, d_j)) for neighbours; the rest of a row is a rank's own."""
    degree = receives.sum(0)
    weights: Matrix = receives / (1.0 + np.maximum(degree[:, None], degree[None, :]))
    np.fill_diagonal(weights, 1.0 - weights.sum(1))
    return weights


def _divided(receives: npt.NDArray[np.bool_]) -> Matrix:
    """W[i, j] = 1 / (1 + d_j) for the d_j ranks that hear from rank j, and for itself."""
    with_own = receives | np.eye(len(receives), dtype=bool)
    weights: Matrix = with_own / with_own.sum(0)
    return weights


def _check_mixing(graph: Graph, weights: Matrix, receives: npt.NDArray[np.bool_]) -> None:
    num_ranks = len(receives)
    if not bool(np.isfinite(weights).all()) or bool((weights < -ROUNDING).any()):
        raise ConfigError(f"{graph}: a weight is negative or not finite: give numbers from 0 to 1")
    strangers = (weights > ROUNDING) & ~receives & ~np.eye(num_ranks, dtype=bool)
    if bool(strangers.any()):
        to, source = (int(one) for one in np.argwhere(strangers)[0])
        raise ConfigError(f"{graph}: rank {to} has a weight for rank {source}, which does not send to it: set it to 0")
    sums = weights.sum(0)
    wrong = np.flatnonzero(np.abs(sums - 1.0) > ROUNDING)
    if len(wrong):
        raise ConfigError(
            f"{graph}: the weights of what rank {wrong[0]} sends and keeps (column {wrong[0]}) sum to "
            f"{sums[wrong[0]]:.6g}, so the mean over ranks would change: let each column sum to 1"
        )


@cache
def _num_hops(graph: Graph, num_ranks: int) -> int:
    graph.check(num_ranks)
    longest = 0
    for first in range(graph.period(num_ranks)):
        heard = np.arange(num_ranks) == 0
        hops = 0
        while not heard.all():
            heard = heard | (graph.adjacency(num_ranks, first + hops) & heard[None, :]).any(1)
            hops += 1
            if hops > num_ranks * graph.period(num_ranks):
                silent = int(np.flatnonzero(~heard)[0])
                raise ConfigError(
                    f"{graph}: rank {silent} never hears from rank 0, so the ranks cannot agree: add an edge on a path "
                    "from rank 0 to it"
                )
        longest = max(longest, hops)
    return longest


# -- the graphs ---------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ring(Graph):
    """Each rank exchanges with the one before it and the one after it.

    >>> Ring().neighbours(0, 8)
    (1, 7)
    """

    def neighbours(self, rank: int, num_ranks: int, step: int = 0) -> tuple[int, ...]:
        """Return the ranks before and after it."""
        return _others(rank, {rank - 1, rank + 1}, num_ranks)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Torus(Graph):
    """A grid of ranks, closed in both directions. Each rank exchanges with four.

    Args:
        rows: number of rows, which divides the number of ranks. None: as square as possible.

    >>> Torus().neighbours(0, 16)
    (1, 3, 4, 12)
    """

    rows: int | None = None

    def __post_init__(self) -> None:
        if self.rows is not None:
            check_whole("rows", self.rows, 1, "the number of rows, 1 or more, or None")

    def check(self, num_ranks: int) -> None:
        """Raise `ConfigError` unless the rows are equally long."""
        if self.rows is not None and num_ranks % self.rows:
            raise ConfigError(f"rows={self.rows} of {num_ranks} ranks: use a divisor of {num_ranks}, or None")

    def neighbours(self, rank: int, num_ranks: int, step: int = 0) -> tuple[int, ...]:
        """Return the ranks above, below, left and right."""
        rows = self.rows or max(rows for rows in range(1, math.isqrt(num_ranks) + 1) if num_ranks % rows == 0)
        columns = num_ranks // rows
        row, column = divmod(rank, columns)
        beside = {row * columns + (column + move) % columns for move in (-1, 1)}
        above = {(row + move) % rows * columns + column for move in (-1, 1)}
        return _others(rank, beside | above, num_ranks)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential(Graph):
    """Rank i sends to the ranks i + 1, i + 2, i + 4, ... (modulo p): ceil(log2 p) of them. Directed.

    >>> Exponential().neighbours(0, 16)
    (1, 2, 4, 8)

    Paper: assran2019stochastic, Appendix A.
    """

    def neighbours(self, rank: int, num_ranks: int, step: int = 0) -> tuple[int, ...]:
        """Return the ranks at distances 1, 2, 4, ..."""
        return _others(rank, {rank + 2**power for power in range(_num_powers(num_ranks))}, num_ranks)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OnePeerExponential(Graph):
    """In step t rank i sends to rank i + 2^(t mod ceil(log2 p)) (modulo p) alone. Directed, and changes.

    If p is a power of two, ceil(log2 p) steps of mixing are an exact mean.

    >>> [OnePeerExponential().neighbours(0, 16, step) for step in range(5)]
    [(1,), (2,), (4,), (8,), (1,)]

    Paper: assran2019stochastic, Appendix A (1-peer).
    """

    def period(self, num_ranks: int) -> int:
        """Return ceil(log2 p)."""
        return max(1, _num_powers(num_ranks))

    def neighbours(self, rank: int, num_ranks: int, step: int = 0) -> tuple[int, ...]:
        """Return the one rank at this step's distance."""
        return _others(rank, {rank + 2 ** (step % self.period(num_ranks))}, num_ranks)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Star(Graph):
    """Rank 0 exchanges with every other rank, as a server does. Its link carries all messages.

    >>> Star().neighbours(0, 4), Star().neighbours(2, 4)
    ((1, 2, 3), (0,))
    """

    def neighbours(self, rank: int, num_ranks: int, step: int = 0) -> tuple[int, ...]:
        """Return rank 0; of rank 0, all others."""
        return _others(rank, set(range(num_ranks)) if rank == 0 else {0}, num_ranks)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Complete(Graph):
    """Each rank exchanges with every other rank: mixing is the mean.

    >>> Complete().neighbours(1, 4)
    (0, 2, 3)
    """

    def neighbours(self, rank: int, num_ranks: int, step: int = 0) -> tuple[int, ...]:
        """Return all other ranks."""
        return _others(rank, set(range(num_ranks)), num_ranks)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRegular(Graph):
    """A random connected graph in which each rank exchanges with `degree` others.

    It is a function of the seed and of the number of ranks: a ring with longer chords, whose edges change ends at
    random ten times each.

    >>> [len(RandomRegular(degree=4).neighbours(rank, 16)) for rank in (0, 7)]
    [4, 4]
    """

    degree: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("degree", self.degree, 2, "the number of neighbours of each rank, 2 or more")
        check_whole("seed", self.seed, 0)

    def check(self, num_ranks: int) -> None:
        """Raise `ConfigError` unless such a graph exists. One rank is alone, and two have each other."""
        if num_ranks > 2 and not self.degree < num_ranks:
            raise ConfigError(f"degree={self.degree} of {num_ranks} ranks: use at most {num_ranks - 1}, or Complete()")
        if num_ranks > 2 and self.degree * num_ranks % 2:
            raise ConfigError(
                f"degree={self.degree} of {num_ranks} ranks: one of the two must be even, because an edge has two ends"
            )

    def neighbours(self, rank: int, num_ranks: int, step: int = 0) -> tuple[int, ...]:
        """Return the ranks at the other ends of its edges."""
        if num_ranks <= 2:
            return _others(rank, set(range(num_ranks)), num_ranks)
        return _random_regular(self.degree, self.seed, num_ranks)[rank]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPairs(Graph):
    """In each step the ranks are drawn into pairs that exchange. Of an odd number, one rank stays alone.

    The pairs are a function of the seed, the number of ranks and the step. They repeat after 16 steps.

    >>> [RandomPairs().neighbours(0, 8, step) for step in range(4)]
    [(2,), (1,), (6,), (3,)]
    """

    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("seed", self.seed, 0)

    def period(self, num_ranks: int) -> int:
        """Return 16."""
        return NUM_PAIRINGS

    def neighbours(self, rank: int, num_ranks: int, step: int = 0) -> tuple[int, ...]:
        """Return the other rank of its pair in this step."""
        return _others(rank, {_partners(self.seed, num_ranks, step % NUM_PAIRINGS)[rank]}, num_ranks)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FromAdjacency(Graph):
    """Your own graph, of a fixed number of ranks.

    Args:
        lists: for each rank, the ranks to which it sends.
        weights: p rows of p mixing weights, W[i][j] of what rank i receives from rank j. None: those of the module.

    >>> FromAdjacency(lists=((1,), (2,), (0,))).mixing(3).tolist()  # directed: each sends to the next one
    [[0.5, 0.0, 0.5], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    """

    lists: Sequence[Sequence[int]]
    weights: Sequence[Sequence[float]] | None = None

    def __post_init__(self) -> None:
        try:
            lists = tuple(tuple(sorted(one)) for one in self.lists)
            weights = None if self.weights is None else tuple(tuple(map(float, row)) for row in self.weights)
        except (TypeError, ValueError):
            raise ConfigError(
                "lists: give for each rank the ranks to which it sends, such as ((1,), (2,), (0,))"
            ) from None
        for rank, one in enumerate(lists):
            for to in one:
                if not is_whole(to) or not 0 <= to < len(lists) or to == rank or one.count(to) > 1:
                    raise ConfigError(
                        f"lists: rank {rank} sends to {to!r}: give other ranks of 0 to {len(lists) - 1}, each once"
                    )
        if weights is not None and {len(weights), *map(len, weights)} != {len(lists)}:
            raise ConfigError(f"weights: give {len(lists)} rows of {len(lists)} numbers")
        object.__setattr__(self, "lists", lists)  # tuples, so that it is a key of a cache
        object.__setattr__(self, "weights", weights)
        self.mixing(len(lists))

    def check(self, num_ranks: int) -> None:
        """Raise `ConfigError` unless it is the number of lists."""
        if num_ranks != len(self.lists):
            raise ConfigError(
                f"lists are of {len(self.lists)} ranks, and there are {num_ranks}: give {num_ranks} lists"
            )

    def neighbours(self, rank: int, num_ranks: int, step: int = 0) -> tuple[int, ...]:
        """Return its list."""
        return tuple(self.lists[rank])

    def weights_at(self, num_ranks: int, step: int) -> Matrix:
        """Return the given weights, or those of the module."""
        if self.weights is None:
            return Graph.weights_at(self, num_ranks, step)
        return np.array(self.weights, dtype=float)


def _others(rank: int, ranks: set[int], num_ranks: int) -> tuple[int, ...]:
    return tuple(sorted({other % num_ranks for other in ranks} - {rank}))


def _num_powers(num_ranks: int) -> int:
    """Return ceil(log2 p)."""
    return (num_ranks - 1).bit_length()


@cache
def _partners(seed: int, num_ranks: int, step: int) -> tuple[int, ...]:
    """Return the partner of each rank. A rank that stays alone is its own."""
    drawn = generator(seed, "random-pairs", num_ranks, step).permutation(num_ranks).tolist()
    partners = list(range(num_ranks))
    for one, other in zip(drawn[::2], drawn[1::2], strict=False):
        partners[one], partners[other] = other, one
    return tuple(partners)


@cache
def _random_regular(degree: int, seed: int, num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the neighbours of each rank: a ring with chords, after random swaps of ends that leave it connected."""
    draw = generator(seed, "random-regular", num_ranks)
    edges = {
        frozenset((rank, (rank + hop) % num_ranks)) for rank in range(num_ranks) for hop in range(1, degree // 2 + 1)
    }
    if degree % 2:
        edges |= {frozenset((rank, rank + num_ranks // 2)) for rank in range(num_ranks // 2)}
    ends = sorted(sorted(edge) for edge in edges)
    left = 10 * len(ends)
    while left > 0 or not _is_connected(ends, num_ranks):
        one, other = (int(number) for number in draw.integers(len(ends), size=2))
        (a, b), (c, d) = ends[one], ends[other] if draw.integers(2) else ends[other][::-1]
        new = frozenset((a, d)), frozenset((c, b))
        if len({a, b, c, d}) == 4 and not edges & set(new):
            edges -= {frozenset((a, b)), frozenset((c, d))}
            edges |= set(new)
            ends[one], ends[other] = [a, d], [c, b]
        left -= 1
    found: list[list[int]] = [[] for _ in range(num_ranks)]
    for a, b in ends:
        found[a].append(b)
        found[b].append(a)
    return tuple(tuple(sorted(one)) for one in found)


def _is_connected(ends: Sequence[Sequence[int]], num_ranks: int) -> bool:
    group = list(range(num_ranks))
    for a, b in ends:
        old, new = group[a], group[b]
        group = [new if one == old else one for one in group]
    return len(set(group)) == 1


# -- names --------------------------------------------------------------------------------------------------------

_GRAPHS: dict[str, Callable[..., Graph]] = {
    kebab(graph.__name__): graph
    for graph in (
        Ring,
        Torus,
        Exponential,
        OnePeerExponential,
        Star,
        Complete,
        RandomRegular,
        RandomPairs,
        FromAdjacency,
    )
}


def names() -> tuple[str, ...]:
    """Return the names that `get` accepts.

    >>> names()[:4]
    ('ring', 'torus', 'exponential', 'one-peer-exponential')
    """
    return tuple(name for name in _GRAPHS if name != "from-adjacency")


def find(name: str) -> Callable[..., Graph]:
    """Return the class of a topology by name.

    Raises:
        ConfigError: no such topology.
    """
    if name.lower() not in names():
        raise unknown("topology", name, names())
    return _GRAPHS[name.lower()]


def get(name: str) -> Graph:
    """Return a topology by name, with its settings after colons, or written in full.

    >>> get("torus"), get("random-regular:3")
    (Torus(rows=None), RandomRegular(degree=3, seed=0))
    >>> get("FromAdjacency(lists=((1,), (0,)))").neighbours(0, 2)
    (1,)

    Raises:
        ConfigError: no such topology or setting.
    """
    if name.endswith(")"):
        made: Any = build(name, {graph.__name__: graph for graph in _GRAPHS.values()})
        return check_graph(made)
    word, *values = name.split(":")
    kind = find(word)
    settings = [item.name for item in fields(kind)]  # type: ignore[arg-type]
    if len(values) > len(settings) or not all(value.isdigit() for value in values):
        forms = ":".join([word, *(setting.upper() for setting in settings)])
        raise ConfigError(f"topology={name}: write it as {forms}, with whole numbers")
    graph: Graph = call_checked(word, kind, dict(zip(settings, map(int, values), strict=False)))
    return graph


def check_graph(topology: object) -> Graph:
    """Return the topology; raise `ConfigError` if it is none."""
    if not isinstance(topology, Graph):
        raise ConfigError(f"topology={topology!r}: give one of {', '.join(names())}, such as Ring()")
    return topology
