"""Speed-ups over synchronous SGD at several ratios of communication to compute, on real ranks.

The seconds c of compute are those of a step without communication. The seconds m of communication are those by which a
step of synchronous SGD is longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np

from workbench.algorithms import NoCommunication
from workbench.analysis.table import Column, Table, seconds, three_digits
from workbench.papers.studies.paired_runs import paired, rotated, step_s, with_interval
from workbench.papers.studies.training import compute_cost
from workbench.papers.studies.wires import Wire, mlp_of_size
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.theory import pipe_speedup

if TYPE_CHECKING:
    from workbench.clusters import Cluster

NO_COMM, SYNC = "no communication", "SGD"
TIMING: Mapping[str, Any] = {"evaluate_every": 0, "trace_steps": 0, "lr": 1e-4}  # steps are timed and need not learn
PROBE_BATCH, PROBE_STEPS = 64, 12  # of the training that measures the seconds of a sample


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Times of a step of each algorithm, at one ratio of communication to compute.

    Attributes:
        wire: where the ranks run.
        wanted: communication over compute, by which the time of compute was chosen.
        times: name -> seconds of a step for each seed; with `SYNC` and `NO_COMM`.
    """

    wire: Wire
    wanted: float
    times: Mapping[str, Sequence[float]]

    @property
    def compute_s(self) -> list[float]:
        """c of each seed: a step without communication."""
        return list(self.times[NO_COMM])

    @property
    def communication_s(self) -> list[float]:
        """m of each seed: by how much a step of SGD is longer."""
        return [max(0.0, both - alone) for both, alone in zip(self.times[SYNC], self.times[NO_COMM], strict=True)]

    @property
    def ratio(self) -> float:
        """Measured m / c."""
        return float(np.mean(self.communication_s) / np.mean(self.compute_s))

    @property
    def limits(self) -> list[float]:
        """(c + m) / max(c, m) of each seed: the speed-up of complete overlap."""
        return [pipe_speedup(c, m) for c, m in zip(self.compute_s, self.communication_s, strict=True)]

    def speedups(self, name: str) -> list[float]:
        """Return the speed-up of an algorithm over SGD, for each seed."""
        return paired(self.times[SYNC], self.times[name])


def sweep_ratio(
    wire: Wire,
    algorithms: Callable[[Wire], Mapping[str, Algorithm]],
    ratios: Sequence[float],
    seeds: Sequence[int],
    *,
    sum_s: float,
    steps: int,
    slept: bool = True,
) -> list[Point]:
    """Measure steps with compute of `sum_s` / ratio, for each ratio of communication to compute.

    Args:
        wire: where the ranks run.
        algorithms: wire -> name -> algorithm, with `SYNC` and `NO_COMM`.
        ratios: communication over compute.
        seeds: one training of each algorithm per seed.
        sum_s: seconds of a sum on the wire; it determines the size of the gradient.
        steps: of each training.
        slept: whether ranks sleep the seconds of compute. Otherwise the batch size is chosen so that they compute as
            long.
    """
    problem = mlp_of_size(wire.megabytes(sum_s))
    points = []
    with wire.cluster() as cluster:
        for ratio in ratios:
            compute_s = sum_s / ratio
            settings: dict[str, Any] = (
                {"batch_size": 1, "compute": compute_cost(compute_s)}
                if slept
                else {"batch_size": _batch_size(cluster, problem, compute_s)}
            )
            runs = rotated(cluster, algorithms(wire), problem, seeds, steps=steps, **settings, **TIMING)
            times = {name: [step_s(run) for run in found] for name, found in runs.items()}
            points.append(Point(wire=wire, wanted=ratio, times=times))
    return points


def _batch_size(cluster: Cluster, problem: Problem, compute_s: float) -> int:
    """The batch size whose compute takes about this many seconds on these ranks, without communication."""
    run = cluster.train(NoCommunication(), problem, steps=PROBE_STEPS, batch_size=PROBE_BATCH, **TIMING).wait().run
    return max(1, round(PROBE_BATCH * compute_s / step_s(run)))


def points_table(points: Sequence[Point], names: Sequence[str], caption: str = "") -> Table:
    """Return a row for each point: c, m, and speed-ups over SGD with their intervals; "-" where one was not measured."""
    rows = [
        {
            "wire": str(point.wire),
            "c": float(np.mean(point.compute_s)),
            "m": float(np.mean(point.communication_s)),
            "ratio": point.ratio,
            "limit": float(np.mean(point.limits)),
            **{name: with_interval(point.speedups(name)) if name in point.times else "-" for name in names},
        }
        for point in points
    ]
    columns = (
        Column("wire", "hosts"),
        Column("c", "compute c", seconds),
        Column("m", "communication m", seconds),
        Column("ratio", "m / c", three_digits),
        Column("limit", "(c + m) / max(c, m)", three_digits),
        *(Column(name, name) for name in names),
    )
    return Table(rows, columns, caption=caption or "Speed-ups over SGD, mean and 95 % interval")


def speedup_curves(points: Sequence[Point], name: str) -> dict[str, dict[float, list[float]]]:
    """Return hosts -> measured m / c -> speed-ups of an algorithm, for a logarithmic axis of `plots.curves_of`.

    Hosts on which it was not measured are left out.
    """
    curves: dict[str, dict[float, list[float]]] = {}
    for point in (point for point in points if point.ratio > 0 and name in point.times):
        curves.setdefault(f"{name}, {point.wire}", {})[point.ratio] = point.speedups(name)
    return curves


def overlap_limit(points: Sequence[Point], number: int = 60) -> dict[float, float]:
    """Return m / c -> (1 + m/c) / max(1, m/c) over the range of the points, with the peak at 1."""
    return {ratio: pipe_speedup(1.0, ratio) for ratio in _grid(points, number)}


def no_communication_bound(points: Sequence[Point], number: int = 60) -> dict[float, float]:
    """Return m / c -> 1 + m/c over the range of the points: the speed-up of training without communication."""
    return {ratio: 1.0 + ratio for ratio in _grid(points, number)}


def _grid(points: Sequence[Point], number: int) -> list[float]:
    """Ratios over the range of the points, 1 among them."""
    found = [point.ratio for point in points if point.ratio > 0]
    return sorted({1.0, *np.geomspace(min([*found, 0.5]), max([*found, 2.0]), number).tolist()})


def nearest(points: Sequence[Point], ratio: float = 1.0) -> list[Point]:
    """Return each wire's point whose wanted ratio is nearest to this one."""
    by_wire: dict[Wire, list[Point]] = {}
    for point in points:
        by_wire.setdefault(point.wire, []).append(point)
    return [min(found, key=lambda point: abs(math.log(point.wanted / ratio))) for found in by_wire.values()]


def mean_over(points: Sequence[Point], numbers: Callable[[Point], Sequence[float]]) -> list[float]:
    """Return, for each seed, the mean over points."""
    return [float(value) for value in np.mean([numbers(point) for point in points], axis=0)]
