"""A study's predictions against trainings on real ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from workbench.algorithms import SynchronousSGD
from workbench.analysis.summary import step_seconds, time_to
from workbench.analysis.table import Column, Table, percent, seconds
from workbench.arguments import check_whole
from workbench.calibration.effective import Cores, make_setting
from workbench.calibration.from_run import calibrate
from workbench.calibration.model import Calibration
from workbench.calibration.probe import probe_here, with_probe
from workbench.clusters.cluster import Cluster
from workbench.errors import ConfigError
from workbench.machine import num_cores
from workbench.program import Algorithm
from workbench.trace.run import Run
from workbench.what_if.candidates import name_of
from workbench.what_if.measure import CODECS
from workbench.what_if.question import line_rate
from workbench.what_if.results import Study, badness, plain_of
from workbench.what_if.step_time import StepTime, step_time
from workbench.what_if.trainings import EVALUATIONS, Trained

if TYPE_CHECKING:
    from workbench.problems.base import Problem

FEWEST_STEPS = 8
PROBE_S = 120.0
SLEPT_OPTIMIZER = partial(torch.optim.SGD, lr=1e-3)  # its update fits into the slept seconds of any other


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Check:
    """Predicted and measured times of a step on real ranks.

    Attributes:
        rows: a row for each algorithm: predicted and measured seconds of a step, the error of the prediction relative
            to the measurement, and whether the measurement is inside the prediction's interval.
        runs: name -> the runs on the ranks.
        about: the ranks, in words.
    """

    rows: tuple[dict[str, Any], ...]
    runs: dict[str, list[Run]]
    about: str

    @property
    def _judged(self) -> list[dict[str, Any]]:
        """The rows that were predicted and not fitted; all, if there is no other."""
        return [row for row in self.rows if not row.get("fitted")] or list(self.rows)

    @property
    def worst(self) -> float:
        """The largest error of a prediction, relative to the measurement."""
        return max(abs(float(row["error"])) for row in self._judged)

    @property
    def order_holds(self) -> bool:
        """Whether the algorithm that was predicted to be the fastest is it, or within 5 % of the fastest."""
        first = min(self.rows, key=lambda row: row["predicted_s"])
        return bool(first["measured_s"] <= 1.05 * min(row["measured_s"] for row in self.rows))

    def table(self) -> Table:
        """Return the rows as a table."""
        columns = COLUMNS + (TARGET_COLUMNS if any("target_measured_s" in row for row in self.rows) else ())
        rows = [{"target_predicted_s": None, "target_measured_s": None, **row} for row in self.rows]
        return Table(rows, columns, caption=f"{self.about}; {self.verdict}")

    @property
    def verdict(self) -> str:
        """What the measurements say about the predictions, in a sentence."""
        outside = [row["algorithm"] for row in self._judged if not row["inside"]]
        words = f"largest error {self.worst:.0%}"
        words += f"; outside the interval: {', '.join(outside)}" if outside else "; all are inside their intervals"
        return words + ("" if self.order_holds else "; the algorithm that was predicted to be the fastest is not")

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


COLUMNS = (
    Column("algorithm", "algorithm"),
    Column("predicted_s", "predicted step", seconds),
    Column("low_s", "5 %", seconds),
    Column("high_s", "95 %", seconds),
    Column("measured_s", "measured", seconds),
    Column("error", "error", percent),
    Column("inside", "inside", lambda inside: "yes" if inside else "no"),
)
TARGET_COLUMNS = (
    Column("target_predicted_s", "predicted time to target", seconds),
    Column("target_measured_s", "measured", seconds),
)


def check(
    study: Study,
    cluster: Cluster,
    *,
    top: int,
    algorithms: Sequence[Algorithm] | None,
    network: str | float | None,
    to_target: bool,
    slept: bool,
    steps: int,
    rounds: int,
    calibrated: Calibration | None,
    timeout_s: float,
    quiet: bool,
) -> Check:
    """See `Study.check`."""
    problem: Problem = study.problem_object
    ranks = cluster.num_ranks
    if slept and to_target:
        raise ConfigError("slept=True trains with one sample a step: leave to_target out")
    check_whole("rounds", rounds, 1)
    check_whole("steps", steps, FEWEST_STEPS)
    if ranks < 2:
        raise ConfigError("a check needs a cluster of at least 2 ranks: a study is about communication")
    hosts = {rank["host"] for rank in cluster.ranks}
    together = cluster.emulated is not None or len(hosts) == 1
    rate, latency_s = _link_of(cluster, network)
    chosen = list(algorithms) if algorithms is not None else _best_few(study, ranks, top)
    if not chosen or len({name_of(one) for one in chosen}) < len(chosen):
        raise ConfigError("algorithms=: give at least one, and none twice")
    trained = {cell.name: cell.trained for cell in study.cells if cell.workers == ranks and cell.trained is not None}
    lengths = {name_of(one): _length(name_of(one), trained, study) for one in chosen if to_target}
    brief: dict[str, Any] = {"steps": steps, "evaluate_every": 0}
    calibration = calibrated or study.calibration
    if slept:
        brief |= {"compute": calibration.compute(), "batch_size": 1, "optimizer": SLEPT_OPTIMIZER}

    def train(one: Algorithm, seed: int) -> Run:
        settings = {**study.settings, **lengths.get(name_of(one), brief), **_rate(name_of(one), trained), "seed": seed}
        return cluster.train(one, problem, **settings).wait(timeout_s).run

    fitted = together and calibrated is None and not slept
    report = _Progress(fitted + rounds * len(chosen), quiet)
    if fitted:
        run = (
            cluster.train(SynchronousSGD(), problem, **{**study.settings, **brief, "seed": rounds}).wait(timeout_s).run
        )
        report("costs fitted to SynchronousSGD", run)
        calibration = _fit(cluster, problem, run, rate)
    cores: Cores = float(num_cores()) if together and not slept else "own"
    setting = make_setting(calibration, ranks, None, rate, latency_s, cores)
    predicted = {name_of(one): step_time(calibration, one, setting) for one in chosen}
    runs: dict[str, list[Run]] = {name: [] for name in predicted}
    for number in range(rounds):
        for one in chosen[number % len(chosen) :] + chosen[: number % len(chosen)]:
            name = name_of(one)
            runs[name].append(train(one, number))
            report(f"{name}, predicted {seconds(predicted[name].step_s)}", runs[name][-1])
    rows = [_row(name, found, runs[name], trained.get(name), study, to_target) for name, found in predicted.items()]
    for row, one in zip(rows, chosen, strict=True):
        row["fitted"] = fitted and one == SynchronousSGD()
    about = f"{ranks} ranks ({cluster.runtime}), {len(hosts)} host{'s' if len(hosts) > 1 else ''}, {setting.name}"
    if fitted:
        about += "; costs fitted to a run of SynchronousSGD on these ranks"
    if slept:
        about += "; compute (slept)"
    return Check(rows=tuple(rows), runs=runs, about=about)


@final
@dataclass(slots=True)
class _Progress:
    """A line for the number of trainings, and one for each training."""

    total: int
    quiet: bool
    done: int = 0

    def __post_init__(self) -> None:
        self._print(f"{self.total} trainings")

    def __call__(self, words: str, run: Run) -> None:
        self.done += 1
        self._print(f"{self.done} of {self.total}: {words}, measured {seconds(float(np.mean(step_seconds(run))))}")

    def _print(self, words: str) -> None:
        if not self.quiet:
            print(f"check: {words}", file=sys.stderr, flush=True)


def _fit(cluster: Cluster, problem: Problem, run: Run, rate: float | None) -> Calibration:
    """Fit the costs on these ranks, whose cores are shared with each other and with the network, and add their probe."""
    found = calibrate(run, problem=problem, line_bytes_per_s=rate)
    return with_probe(found, cluster.client[:].apply_async(probe_here, CODECS).get(PROBE_S)[0])


def _row(
    name: str, found: StepTime, runs: Sequence[Run], trained: Trained | None, study: Study, to_target: bool
) -> dict[str, Any]:
    times = [float(np.mean(step_seconds(run))) for run in runs]
    measured = float(np.mean(times))
    row: dict[str, Any] = {
        "algorithm": name,
        "predicted_s": found.step_s,
        "low_s": found.low_s,
        "high_s": found.high_s,
        "measured_s": measured,
        "measured_each_s": times,
        "error": found.step_s / measured - 1,
        "inside": bool(found.low_s <= measured <= found.high_s),
    }
    if to_target and trained is not None and study.target is not None:
        met = [time_to(run, *study.target) for run in runs]
        steps = [count for count in trained.steps if count is not None]
        row["target_predicted_s"] = found.step_s * float(np.mean(steps)) if trained.reached else None
        row["target_measured_s"] = None if None in met else float(np.mean([one["seconds"] for one in met if one]))
    return row


def _link_of(cluster: Cluster, network: str | float | None) -> tuple[float | None, float | None]:
    """Return bytes per second and latency of the ranks' links; None: those of the calibration."""
    if network is not None:
        return line_rate(network) / 8, None
    emulated = cluster.emulated
    if emulated is None:
        return None, None
    return min(min(host.up, host.down) for host in emulated.hosts) / 8, emulated.latency_s


def _best_few(study: Study, ranks: int, top: int) -> list[Algorithm]:
    """Return the best algorithms of the place with this number of workers, or of the first, with plain synchronous SGD."""
    cells = study.at(ranks) if any(p == ranks for p, _ in study.places) else study.at()
    chosen = [cell.algorithm for cell in sorted(cells, key=badness) if _fits(cell.algorithm, ranks)][:top]
    plain = plain_of(cells).algorithm
    return chosen if plain in chosen else [plain, *chosen]


def _fits(algorithm: Algorithm, ranks: int) -> bool:
    try:
        algorithm.check(ranks)
    except ConfigError:
        return False
    return True


def _length(name: str, trained: dict[str, Trained], study: Study) -> dict[str, int]:
    if study.target is None or name not in trained:
        known = ", ".join(trained) or "no algorithm"
        raise ConfigError(
            f"to_target=True: {name} was not trained to a target for this number of workers (but {known}); leave "
            "to_target out"
        )
    length = trained[name].num_steps
    return {"steps": length, "evaluate_every": max(1, length // EVALUATIONS)}


def _rate(name: str, trained: dict[str, Trained]) -> dict[str, float]:
    lr = trained[name].lr if name in trained else None
    return {} if lr is None else {"lr": lr}
