"""Trainings of several algorithms on the same ranks, paired by seed in rotating order, and their times.

The compute of a rank may be slept (`Settings(compute=)`), so its seconds c are known. The seconds m of communication are
those by which a step of synchronous SGD is longer than a step without communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
import torch

from workbench import problems
from workbench.analysis.parts import PART_NAMES
from workbench.analysis.summary import run_parts, time_to, time_to_accuracy, time_to_loss
from workbench.analysis.table import Column, Table, seconds, three_digits
from workbench.clusters.emulated.check import PAYLOAD
from workbench.collectives import native_bytes
from workbench.costs import Compute, Lognormal, Stragglers
from workbench.errors import ConfigError, Diverged
from workbench.naming import unknown
from workbench.papers import pool_client
from workbench.papers.claims import Size, find_claim
from workbench.papers.findings import Where, finding
from workbench.papers.pool_client import ranks, within_reach
from workbench.papers.studies.training import train
from workbench.papers.verdicts import Verdict, interval
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.runtimes.rank.main import RuntimeName
from workbench.schedules import linear_to_zero
from workbench.theory import (
    Backlog,
    BackupChoice,
    Iterations,
    QuantileTime,
    best_backups,
    pipe_s,
    pipe_speedup,
    synchronous_s,
)
from workbench.trace.run import Run
from workbench.units import MB

if TYPE_CHECKING:
    from workbench.clusters import Cluster

LIBRARIES: Mapping[str, RuntimeName] = {"gloo": "torch", "MPI": "mpi"}
# Of the rate limit: the timers of a virtual machine are late by more than the usual burst lasts.
BURST = "burst=1ms"
TIMING_LR = 1e-4  # of trainings whose steps are timed and that need not learn
SKIPPED = 2  # first steps, in which a pipeline fills
WINDOW = 5  # steps over which a training loss is averaged
LAYERS = 5  # inner layers of `equal_layers`
NUM_INPUTS, NUM_CLASSES = {"digits": 64, "mnist1d": 40}, 10


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A library on the hosts of an emulated network, or on this machine.

    Attributes:
        library: "gloo" or "MPI".
        hosts: number of hosts.
        mbit: megabits per second of each host's interface; 0: ranks of this machine without a network.
        ranks_per_host: ranks on each host.
    """

    library: str
    hosts: int
    mbit: float = 0.0
    ranks_per_host: int = 1

    @classmethod
    def parse(cls, text: str) -> Wire:
        """Make it from a text.

        >>> str(Wire.parse("gloo:4:200")), str(Wire.parse("MPI:2x2:1000")), str(Wire.parse("gloo:2"))
        ('gloo, 4 hosts, 200 Mbit/s', 'MPI, 2 hosts of 2 ranks, 1000 Mbit/s', 'gloo, 2 ranks')

        Raises:
            ConfigError: it is no such text.
        """
        library, _, rest = text.partition(":")
        places, _, mbit = rest.partition(":")
        hosts, _, ranks_per_host = places.partition("x")
        try:
            numbers = int(hosts), float(mbit or 0), int(ranks_per_host or 1)
        except ValueError:
            numbers = 0, 0.0, 0
        if library not in LIBRARIES or min(numbers[0], numbers[2]) < 1 or not 0 <= numbers[1] < math.inf:
            raise ConfigError(f"{text!r}: write LIBRARY:HOSTS:MBIT, such as gloo:4:200, MPI:2x2:1000, or gloo:2")
        return cls(library=library, hosts=numbers[0], mbit=numbers[1], ranks_per_host=numbers[2])

    def __str__(self) -> str:
        if not self.mbit:
            return f"{self.library}, {self.num_ranks} ranks"
        each = f" of {self.ranks_per_host} ranks" if self.ranks_per_host > 1 else ""
        return f"{self.library}, {self.hosts} hosts{each}, {self.mbit:g} Mbit/s"

    @property
    def num_ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def launcher(self) -> str:
        """The launcher, as in `Cluster`; "local", with a message, if this user may not emulate a network."""
        if not self.mbit:
            return "local"
        each = f",ranks-per-host={self.ranks_per_host}" if self.ranks_per_host > 1 else ""
        return within_reach(f"emulated:{self.mbit:g}mbit,{BURST}{each}")

    def megabytes(self, sum_s: float, otherwise_mbit: float = 1000.0) -> float:
        """Return the size of a gradient whose all-reduce takes `sum_s` on the wire alone.

        >>> round(Wire(library="gloo", hosts=2, mbit=800).megabytes(0.01), 2)
        0.96
        """
        bytes_per_s = (self.mbit or otherwise_mbit) * 1e6 / 8 * PAYLOAD
        sent_share = native_bytes(self.num_ranks, int(MB)) / MB
        return float(sum_s * bytes_per_s / sent_share / MB)

    @contextmanager
    def cluster(self) -> Iterator[Cluster]:
        """Start its ranks for a `with` block."""
        with ranks(self.num_ranks, self.launcher, LIBRARIES[self.library]) as cluster:
            yield cluster


def equal_layers(megabytes: float, *, data: str = "digits", layers: int = LAYERS) -> Problem:
    """Return an MLP with equally wide inner layers and a gradient of about this size, on "digits" or "mnist1d".

    >>> problem = equal_layers(1.0, data="mnist1d")
    >>> round(4e-6 * sum(weight.numel() for weight in problem.model().parameters()), 2)
    1.0
    """
    if data not in NUM_INPUTS:
        raise unknown("data set", data, NUM_INPUTS)
    linear = NUM_INPUTS[data] + NUM_CLASSES + layers
    square = layers - 1
    numel = megabytes * MB / 4
    width = max(1, round((math.sqrt(linear**2 + 4 * square * numel) - linear) / (2 * square)))
    return problems.get(f"{data}-mlp", hidden=(width,) * layers)


def slept(compute_s: float, stragglers: Stragglers | tuple[Stragglers, ...] = ()) -> Compute:
    """Return compute of this many seconds, a third of it forward."""
    return Compute(forward_s=compute_s / 3, backward_s=2 * compute_s / 3, stragglers=stragglers)  # type: ignore[arg-type]


# -- trainings -----------------------------------------------------------------------------------------------


def rotated(
    cluster: Cluster,
    algorithms: Mapping[str, Algorithm],
    problem: Problem,
    seeds: Sequence[int],
    *,
    rates: Mapping[str, Sequence[float]] | None = None,
    **settings: Any,
) -> dict[str, list[Run]]:
    """Train by each algorithm once per seed. The order rotates from seed to seed.

    A short training goes before, because the first one on new ranks opens connections and loads libraries.

    Args:
        cluster: the ranks.
        algorithms: name -> algorithm.
        problem: what to train.
        seeds: of weights, data order and stragglers.
        rates: name -> learning rate, and momentum if given; the problem's optimizer for other names.
        settings: fields of `Settings`.

    Returns:
        name -> a run for each seed.
    """
    names = list(algorithms)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    warm_up = {**settings, **sgd((rates or {}).get(names[0], ())), "steps": SKIPPED}
    cluster.train(algorithms[names[0]], problem, **warm_up).wait()
    for turn, seed in enumerate(seeds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            how = {**settings, **sgd((rates or {}).get(name, ())), "seed": seed}
            runs[name].append(cluster.train(algorithms[name], problem, **how).wait().run)
    return runs


def simulated(
    algorithms: Mapping[str, Algorithm],
    problem: Problem,
    seeds: Sequence[int],
    *,
    rates: Mapping[str, Sequence[float]],
    **settings: Any,
) -> dict[str, list[Run | None]]:
    """Train by each algorithm once per seed on simulated workers; None for a run that diverged. See `rotated`."""

    def one(name: str, seed: int) -> Run | None:
        try:
            return train(algorithms[name], problem, seed=seed, **settings, **sgd(rates.get(name, ())))
        except Diverged:
            return None

    return {name: [one(name, seed) for seed in seeds] for name in algorithms}


def sgd(rate: Sequence[float]) -> dict[str, Any]:
    """Return settings: the learning rate, or a rate and a momentum of SGD; none for the problem's own optimizer.

    >>> sgd([0.1]), sgd([])
    ({'lr': 0.1}, {})
    """
    match rate:
        case []:
            return {}
        case [lr]:
            return {"lr": lr}
        case [lr, momentum]:
            return {"optimizer": partial(torch.optim.SGD, lr=lr, momentum=momentum)}
    raise ConfigError(f"{rate}: give a learning rate, or a learning rate and a momentum")


# -- times ---------------------------------------------------------------------------------------------------


def step_s(run: Run) -> float:
    """Return mean seconds of a step, without the first ones. A step ends when its slowest rank ends it."""
    ends = [row["seconds"] for row in run.steps()]
    if len(ends) < SKIPPED + 2:
        raise ConfigError(f"{len(ends)} steps: give {SKIPPED + 2} or more to measure the time of one")
    return float((ends[-1] - ends[SKIPPED]) / (len(ends) - 1 - SKIPPED))


def seconds_to_loss(run: Run, target: float, window: int = WINDOW) -> float:
    """Return when the mean training loss of the last `window` steps first was at most `target`; infinite if never."""
    ends, losses = run.curve("seconds", "loss")
    means = np.convolve(losses, np.ones(window) / window, mode="valid")
    met = np.flatnonzero(means <= target)
    return float(ends[met[0] + window - 1]) if len(met) else math.inf


def paired(
    over: Iterable[float], under: Iterable[float], apart: Callable[[float, float], float] = lambda a, b: a / b
) -> list[float]:
    """Return a number for each seed from two algorithms' numbers: their ratio, or the result of `apart`."""
    return [apart(one, other) for one, other in zip(over, under, strict=True)]


def with_interval(values: Sequence[float]) -> str:
    """Return the mean and its 95 % interval as text.

    >>> with_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    '3.00 [1.04, 4.96]'
    """
    low, high = interval(values)
    return f"{three_digits(float(np.mean(values)))} [{three_digits(low)}, {three_digits(high)}]"


# -- communication over compute -------------------------------------------------------------------------------

NO_COMM, SYNC = "no communication", "SGD"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Times of a step of each algorithm, at one ratio of communication to compute.

    Attributes:
        wire: where.
        wanted: communication over compute, by which the slept time was chosen.
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
        """m of each seed: what a step of SGD takes longer."""
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
) -> list[Point]:
    """Measure steps with slept compute of `sum_s` / ratio, for each ratio of communication to compute.

    Args:
        wire: where.
        algorithms: wire -> name -> algorithm, with `SYNC` and `NO_COMM`.
        ratios: communication over compute.
        seeds: one training of each algorithm per seed.
        sum_s: seconds of a sum on the wire; it determines the size of the gradient.
        steps: of each training.
    """
    problem = equal_layers(wire.megabytes(sum_s))
    how: dict[str, Any] = {"steps": steps, "batch_size": 1, "evaluate_every": 0, "trace_steps": 0, "lr": TIMING_LR}
    points = []
    with wire.cluster() as cluster:
        for ratio in ratios:
            runs = rotated(cluster, algorithms(wire), problem, seeds, compute=slept(sum_s / ratio), **how)
            times = {name: [step_s(run) for run in found] for name, found in runs.items()}
            points.append(Point(wire=wire, wanted=ratio, times=times))
    return points


def batch_of(cluster: Cluster, problem: Problem, compute_s: float, *, probe: int = 64, steps: int = 12) -> int:
    """Return the batch size whose compute takes about this many seconds on these ranks, without communication."""
    from workbench.algorithms import NoCommunication

    how: dict[str, Any] = {"steps": steps, "batch_size": probe, "evaluate_every": 0, "trace_steps": 0, "lr": TIMING_LR}
    took_s = step_s(cluster.train(NoCommunication(), problem, **how).wait().run)
    return max(1, round(probe * compute_s / took_s))


def points_table(points: Sequence[Point], names: Sequence[str], caption: str = "") -> Table:
    """Return a row for each point: c, m, and speed-ups over SGD with their intervals."""
    rows = [
        {
            "wire": str(point.wire),
            "c": float(np.mean(point.compute_s)),
            "m": float(np.mean(point.communication_s)),
            "ratio": point.ratio,
            "limit": float(np.mean(point.limits)),
            **{name: with_interval(point.speedups(name)) for name in names},
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
    """Return hosts -> measured m / c -> speed-ups of an algorithm, for a logarithmic axis of `plots.curves_of`."""
    curves: dict[str, dict[float, list[float]]] = {}
    for point in (point for point in points if point.ratio > 0):
        curves.setdefault(f"{name}, {point.wire}", {})[point.ratio] = point.speedups(name)
    return curves


def overlap_limit(points: Sequence[Point], number: int = 60) -> dict[float, float]:
    """Return m / c -> (1 + m/c) / max(1, m/c) over the range of the points, with the peak at 1."""
    found = [point.ratio for point in points if point.ratio > 0]
    grid = {1.0, *np.geomspace(min([*found, 0.5]), max([*found, 2.0]), number).tolist()}
    return {ratio: pipe_speedup(1.0, ratio) for ratio in sorted(grid)}


def nearest(points: Sequence[Point], ratio: float = 1.0) -> list[Point]:
    """Return each wire's point whose wanted ratio is nearest to this one."""
    by_wire: dict[Wire, list[Point]] = {}
    for point in points:
        by_wire.setdefault(point.wire, []).append(point)
    return [min(found, key=lambda point: abs(math.log(point.wanted / ratio))) for found in by_wire.values()]


def mean_over(points: Sequence[Point], numbers: Callable[[Point], Sequence[float]]) -> list[float]:
    """Return, for each seed, the mean over points."""
    return [float(value) for value in np.mean([numbers(point) for point in points], axis=0)]


def computed_points(
    wire: Wire,
    algorithms: Callable[[Wire], Mapping[str, Algorithm]],
    ratios: Sequence[float],
    seeds: Sequence[int],
    *,
    sum_s: float,
    steps: int,
) -> list[Point]:
    """Measure as `sweep_ratio`, but ranks compute in real time: a batch size is chosen for each ratio."""
    problem = equal_layers(wire.megabytes(sum_s))
    points = []
    with wire.cluster() as cluster:
        for ratio in ratios:
            batch_size = batch_of(cluster, problem, sum_s / ratio)
            how: dict[str, Any] = {
                "steps": steps,
                "batch_size": batch_size,
                "evaluate_every": 0,
                "trace_steps": 0,
                "lr": TIMING_LR,
            }
            runs = rotated(cluster, algorithms(wire), problem, seeds, **how)
            times = {name: [step_s(run) for run in found] for name, found in runs.items()}
            points.append(Point(wire=wire, wanted=ratio, times=times))
    return points


# -- curves and verdicts --------------------------------------------------------------------------------------


def mean_losses(runs: Sequence[Run], window: int = WINDOW, number: int = 40) -> dict[float, list[float]]:
    """Return seconds -> training loss of each seed, mean of the last `window` steps, interpolated on one grid."""
    curves = []
    for run in runs:
        ends, losses = run.curve("seconds", "loss")
        curves.append((ends[window - 1 :], np.convolve(losses, np.ones(window) / window, mode="valid")))
    grid = np.linspace(max(ends[0] for ends, _ in curves), min(ends[-1] for ends, _ in curves), number)
    return {float(at): [float(np.interp(at, ends, means)) for ends, means in curves] for at in grid}


def final_accuracy(run: Run | None, guessing: float = 10.0) -> float:
    """Return the last test accuracy in per cent; that of guessing for a run that diverged."""
    return guessing if run is None else 100 * float(run.evaluations()[-1]["accuracy"])


def final_accuracies(
    algorithms: Mapping[str, Algorithm],
    problem: Problem,
    seeds: Sequence[int],
    *,
    rates: Mapping[str, Sequence[float]],
    workers: int,
    epochs: int,
) -> dict[str, list[float]]:
    """Return each algorithm's last test accuracy in per cent, for each seed, of simulated runs with real gradients.

    The learning rate falls linearly to 0 over the last half of the steps. See `simulated`.
    """
    steps = epochs * -(-problem.num_samples() // (problem.batch_size * workers))
    falling = linear_to_zero(steps, steps // 2)
    how: dict[str, Any] = {"workers": workers, "compute": slept(1.0), "evaluate_every": 0, "trace_steps": 0}
    runs = simulated(algorithms, problem, seeds, rates=rates, steps=steps, schedule=falling, **how)
    return {name: [final_accuracy(run) for run in found] for name, found in runs.items()}


def where_of(wire: Wire) -> Where:
    """Return a finding's `where` for the ranks of this wire."""
    return pool_client.where_of(wire.launcher, slept=True)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Reports findings of one paper. A claim that is not tested at this size is named and left out.

    Attributes:
        paper: its key.
        size, where, seeds: as in `finding`.
    """

    paper: str
    size: Size
    where: Where
    seeds: Sequence[int]

    def __call__(self, claim: str, values: Sequence[float] | float, how: str) -> Verdict | None:
        """Report the values, as `finding` does; one number for a deterministic claim. None if not tested at this size."""
        name = f"{self.paper}/{claim}"
        if find_claim(name).expectation_at(self.size) is None:
            print(f"{name} is not tested at size {self.size}")
            return None
        seeds = () if isinstance(values, int | float) else self.seeds
        return finding(name, values, size=self.size, where=self.where, how=how, seeds=seeds)


def mean_errors(runs: Sequence[Run | None], number: int = 40) -> dict[float, list[float]]:
    """Return seconds -> test error in per cent of each run that did not diverge, interpolated on one grid."""
    found = on_one_grid(runs, "accuracy", number)
    return {at: [100 * (1 - value) for value in values] for at, values in found.items()}


def on_one_grid(
    runs: Sequence[Run | None], y: Literal["accuracy", "test_loss"], number: int = 40
) -> dict[float, list[float]]:
    """Return seconds -> accuracy or test loss of each run that did not diverge, interpolated on one grid."""
    curves = [run.curve("seconds", y) for run in runs if run is not None]
    if not curves:
        return {}
    grid = np.linspace(max(ends[0] for ends, _ in curves), min(ends[-1] for ends, _ in curves), number)
    return {float(at): [float(np.interp(at, *curve)) for curve in curves] for at in grid}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds to a target of each algorithm, one for each seed.

    Attributes:
        seconds: name -> seconds; `cap_s` for a run that does not reach the target.
        cap_s: the longest run.
    """

    seconds: Mapping[Any, Sequence[float]]
    cap_s: float

    def ratios(self, over: Any, under: Any) -> list[float]:
        """Return the time of one algorithm over that of another, seed by seed."""
        return paired(self.seconds[over], self.seconds[under])

    def num_reached(self, name: Any) -> int:
        """Return how many runs of an algorithm reach the target."""
        return sum(value < self.cap_s for value in self.seconds[name])

    def censored(self, *names: Any) -> list[bool]:
        """Return for each seed whether a run of these algorithms does not reach the target; of all if none is named."""
        chosen = [self.seconds[name] for name in names or self.seconds]
        return [any(value >= self.cap_s for value in of_seed) for of_seed in zip(*chosen, strict=True)]

    def table(self, caption: str) -> Table:
        """Return a row for each algorithm: its seconds, and how many runs reach the target."""
        rows = [
            {"name": name, "seconds": with_interval(values), "reached": f"{self.num_reached(name)} of {len(values)}"}
            for name, values in self.seconds.items()
        ]
        columns = (Column("name", "algorithm"), Column("seconds", "seconds"), Column("reached", "reached by"))
        return Table(rows, columns, caption=f"{caption}. A target that is not reached counts as {self.cap_s:.3g} s.")


def times_to_accuracy(runs: Mapping[Any, Sequence[Run | None]], target: float) -> Times:
    """Return seconds to a test accuracy (0 to 1)."""

    def one(run: Run) -> float:
        found = time_to_accuracy(run, target)
        return math.inf if found is None else found

    return _times(runs, one)


def times_to_test_loss(runs: Mapping[Any, Sequence[Run | None]], target: float) -> Times:
    """Return seconds to a test loss."""

    def one(run: Run) -> float:
        found = time_to_loss(run, target)
        return math.inf if found is None else found

    return _times(runs, one)


def times_to_loss(runs: Mapping[str, Sequence[Run | None]], target: float) -> Times:
    """Return seconds to a training loss: see `seconds_to_loss`."""
    return _times(runs, lambda run: seconds_to_loss(run, target))


def _times(runs: Mapping[Any, Sequence[Run | None]], one: Callable[[Run], float]) -> Times:
    ends = [run.steps()[-1]["seconds"] for found in runs.values() for run in found if run is not None]
    cap_s = float(max(ends))
    taken = {name: [cap_s if run is None else min(cap_s, one(run)) for run in found] for name, found in runs.items()}
    return Times(seconds=taken, cap_s=cap_s)


# -- backups and staleness ------------------------------------------------------------------------------------


def best_backups_by_rule(
    machines: int, updates: Iterations, sigma: float, num_steps: int
) -> tuple[BackupChoice, BackupChoice]:
    """Return the best b for lognormal arrivals: of fresh arrivals, and with stragglers carried into the next step."""
    distribution = Lognormal(sigma=sigma)
    arrival = QuantileTime(quantile_of=distribution.quantile, scale_s=1 / distribution.mean)
    return best_backups(machines, updates, arrival), best_backups(
        machines, updates, Backlog(arrival=arrival, num_steps=num_steps)
    )


def backups_table(choices: Mapping[float, tuple[BackupChoice, BackupChoice]], caption: str) -> Table:
    """Return a row for each spread: the best b and its gain, fresh and carried."""
    rows = [
        {
            "spread": spread,
            "fresh": fresh.backups,
            "fresh_gain": fresh.gain,
            "carried": carried.backups,
            "carried_gain": carried.gain,
        }
        for spread, (fresh, carried) in choices.items()
    ]
    columns = (
        Column("spread", "spread of arrivals", three_digits),
        Column("fresh", "best b"),
        Column("fresh_gain", "times as fast as b = 0", three_digits),
        Column("carried", "best b, stragglers carried"),
        Column("carried_gain", "times as fast", three_digits),
    )
    return Table(rows, columns, caption=caption)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StaleUpdates:
    """Updates to a test loss for each staleness.

    Attributes:
        best: staleness -> updates of each seed, at the rate with the smallest mean.
        rate: staleness -> that rate.
        at_edge: the stalenesses whose best rate is the smallest or the largest that was tried.
        capped: the stalenesses for which no rate reaches the loss with all seeds; they count with all updates.
    """

    best: Mapping[int, Sequence[float]]
    rate: Mapping[int, float]
    at_edge: tuple[int, ...]
    capped: tuple[int, ...]

    def table(self, caption: str) -> Table:
        """Return a row for each staleness."""
        rows = [
            {
                "staleness": staleness,
                "updates": with_interval(values),
                "rate": self.rate[staleness],
                "note": ", ".join(
                    word
                    for word, there in (("rate at an edge", self.at_edge), ("not reached by all", self.capped))
                    if staleness in there
                ),
            }
            for staleness, values in self.best.items()
        ]
        columns = (
            Column("staleness", "staleness"),
            Column("updates", "updates"),
            Column("rate", "best rate", three_digits),
            Column("note", ""),
        )
        return Table(rows, columns, caption=caption)


def updates_by_staleness(
    problem: Problem,
    staleness: Sequence[int],
    seeds: Sequence[int],
    *,
    lr: float,
    updates: int,
    target: float,
    factors: Sequence[float] = (0.5, 1.0, 2.0),
    evaluations: int = 50,
) -> StaleUpdates:
    """Count the updates of one worker to a test loss, at the best of the rates `factors` * lr / (1 + staleness), without momentum.

    Args:
        problem: what to train.
        staleness: of each gradient, constant.
        seeds: of weights and data order.
        lr: rate without staleness.
        updates: of each run; a run that does not reach the loss counts with all.
        target: test loss.
        factors: of the rate, ascending.
        evaluations: number of evaluations in a run.
    """
    from workbench.algorithms import Constant, StaleSGD

    every = max(1, updates // evaluations)
    how: dict[str, Any] = {"workers": 1, "compute": slept(1.0), "steps": updates, "trace_steps": 0}
    best: dict[int, list[float]] = {}
    rate: dict[int, float] = {}
    for stale in staleness:
        rates = {f"{factor:g}": factor * lr / (1 + stale) for factor in factors}
        algorithms = dict.fromkeys(rates, StaleSGD(staleness=Constant(stale)))
        own = {name: [value, 0.0] for name, value in rates.items()}
        runs = simulated(algorithms, problem, seeds, rates=own, evaluate_every=every, **how)
        needed = {name: [_updates_to(run, target, updates) for run in found] for name, found in runs.items()}
        name = min(needed, key=lambda each: float(np.mean(needed[each])))
        best[stale], rate[stale] = needed[name], rates[name]
    ends = {stale: (factors[0] * lr / (1 + stale), factors[-1] * lr / (1 + stale)) for stale in staleness}
    return StaleUpdates(
        best=best,
        rate=rate,
        at_edge=tuple(stale for stale in staleness if rate[stale] in ends[stale]),
        capped=tuple(stale for stale in staleness if updates in best[stale]),
    )


def _updates_to(run: Run | None, target: float, updates: int) -> float:
    met = None if run is None else time_to(run, "test_loss", target)
    return float(met["step"] + 1) if met else float(updates)


# -- the parts of a step and of a sum --------------------------------------------------------------------------


def predicted_steps(
    runs: Mapping[str, Mapping[str, Sequence[Run]]],
    wires: Mapping[str, Wire],
    megabytes: float,
    compute_s: float,
    names: Sequence[str],
) -> dict[tuple[str, str], list[float]]:
    """Return (wire, algorithm) -> measured over predicted time of a step, for each seed.

    Args:
        runs: text of a wire -> algorithm -> runs.
        wires: text -> wire; those without a network are left out.
        megabytes: size of the gradient.
        compute_s: c.
        names: of "PS-Sync" (server on one of the hosts), "D-Sync" and "Pipe-SGD".
    """
    found: dict[tuple[str, str], list[float]] = {}
    for text, wire in wires.items():
        sum_s = 1 / wire.megabytes(1.0) * megabytes  # of a ring
        predicted = {
            "PS-Sync": compute_s + wire.num_ranks * sum_s,
            "D-Sync": synchronous_s(compute_s, sum_s),
            "Pipe-SGD": pipe_s(compute_s, sum_s),
        }
        for name in names:
            found[str(wire), name] = [step_s(run) / predicted[name] for run in runs[text][name]]
    return found


def predictions_table(rows: Mapping[tuple[str, str], Sequence[float]], caption: str) -> Table:
    """Return a row for each network and algorithm of `predicted_steps`."""
    shown = [{"wire": wire, "name": name, "over": with_interval(values)} for (wire, name), values in rows.items()]
    columns = (Column("wire", "network"), Column("name", "algorithm"), Column("over", "measured over predicted"))
    return Table(shown, columns, caption=caption)


def parts_of_a_sum(run: Run, skipped: int = SKIPPED) -> dict[str, float]:
    """Return seconds of each part of a sum, mean over ranks and steps after the first `skipped` ones."""
    steps, num_ranks = len(run.steps()) - skipped, run.num_ranks
    total = run_parts(run, slice(skipped, None)).total()
    return {name.removesuffix("_s"): total[name] / steps / num_ranks for name in PART_NAMES}
