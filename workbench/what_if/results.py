"""`Study`: the answer, with its reasons, intervals, figures, and what it does not know."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, final

import numpy as np
from scipy import stats

from workbench.analysis.table import Column, Table, percent, seconds
from workbench.calibration.effective import Setting
from workbench.calibration.model import Calibration
from workbench.errors import ConfigError
from workbench.program import Algorithm
from workbench.trace.run import Run
from workbench.units import GBIT_PER_S
from workbench.what_if.candidates import name_of
from workbench.what_if.interval import LEVELS
from workbench.what_if.recipe import Recipe
from workbench.what_if.step_time import StepTime, saved_seconds, step_run, step_time
from workbench.what_if.trainings import Trained

if TYPE_CHECKING:
    from workbench.clusters.cluster import Cluster
    from workbench.what_if.check import Check


EQUAL_WITHIN = 1.02  # within this factor, the plainer algorithm is the answer
OCTAVES = 4  # bandwidths from 1/16 to 16 times the network's
SHOWN_STEPS, SHOWN_RANKS = 3, 3  # of a timeline, after the warm-up
SHOWN_LINES = 5
COSTS = {
    "compute": "compute",
    "wire": "bytes on the wire",
    "latency": "the latency of messages",
    "stragglers": "stragglers",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """An algorithm with a number of workers on a network.

    Attributes:
        network: its name.
        setting: the conditions of the prediction.
        time: predicted seconds of a step.
        recipe: what changes its numerical results.
        trained: trainings of the recipe; None if there are none.
    """

    algorithm: Algorithm
    workers: int
    network: str
    setting: Setting
    time: StepTime
    recipe: Recipe
    trained: Trained | None = None

    @property
    def name(self) -> str:
        """Name in tables."""
        return name_of(self.algorithm)

    @property
    def steps(self) -> float | None:
        """Mean number of steps to the target; None if it is unknown or a seed did not reach it."""
        return float(np.mean(self.trained.steps)) if self.trained and self.trained.reached else None  # type: ignore[arg-type]

    @property
    def target_s(self) -> float | None:
        """Seconds to the target: mean steps times mean seconds of a step."""
        return None if self.steps is None else self.steps * self.time.step_s

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """5 % and 95 % quantiles of the seconds to the target.

        They combine the mean over seeds, the steps between two evaluations, and the prediction's error.
        """
        if self.target_s is None or self.trained is None:
            return None
        values = [float(steps) for steps in self.trained.steps if steps is not None]
        spread = 0.0
        if len(values) > 1:
            quantile = float(stats.t.ppf(LEVELS[1], len(values) - 1))
            spread = quantile * float(np.std(values, ddof=1)) / math.sqrt(len(values)) / float(np.mean(values))
        fewer, more = bracket_of(self)
        low = math.hypot(math.log(self.time.step_s / self.time.low_s), spread, fewer)
        high = math.hypot(math.log(self.time.high_s / self.time.step_s), spread, more)
        return self.target_s * math.exp(-low), self.target_s * math.exp(high)

    def as_record(self) -> dict[str, Any]:
        """Return plain values, fit for JSON."""
        trained = self.trained
        outcome = "not trained"
        if trained is not None:
            met = sum(steps is not None for steps in trained.steps)
            diverged = sum(run is None for run in trained.runs)
            outcome = f"{met} of {len(trained.steps)}" + (f", {diverged} diverged" if diverged else "")
        return {
            "algorithm": self.name,
            "workers": self.workers,
            "network": self.network,
            "step_s": self.time.step_s,
            "step_interval_s": (self.time.low_s, self.time.high_s),
            "overlap": self.time.overlap,
            "how": self.time.how,
            "recipe": self.recipe.name,
            "lr": trained.lr if trained else None,
            "reached": outcome,
            "steps": self.steps,
            "target_s": self.target_s,
            "interval_s": self.interval_s,
        }


def _interval(low_s: float, high_s: float) -> str:
    return f"{seconds(low_s)} to {seconds(high_s)}"


COLUMNS = (
    Column("workers", "workers"),
    Column("network", "network"),
    Column("algorithm", "algorithm"),
    Column("step_s", "step", seconds),
    Column("step_interval_s", "5 to 95 %", lambda interval: _interval(*interval)),
    Column("speedup", "speed-up", "{:.2f}".format),
    Column("overlap", "overlap", percent),
    Column("recipe", "gradients"),
)
TARGET_COLUMNS = (
    Column("reached", "seeds at the target"),
    Column("steps", "steps", lambda value: f"{value:.0f}"),
    Column("target_s", "time to target", seconds),
    Column("interval_s", "5 to 95 %", lambda interval: _interval(*interval)),
)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Study:
    """The result of `wb.study`.

    Attributes:
        problem: the problem's name.
        target: what was to be reached: "test_loss", "accuracy" or a metric of the problem, and its value; or None.
        calibration: the cost model of compute and messages.
        cells: one for each algorithm, number of workers and network.
        trainings: one for each recipe and number of workers that was trained.
        unknown: what the study does not know, in sentences.
        seconds: how long the study took.
    """

    problem: str
    target: tuple[str, float] | None
    calibration: Calibration
    cells: tuple[Cell, ...]
    trainings: tuple[Trained, ...] = ()
    unknown: tuple[str, ...] = ()
    seconds: float = 0.0
    problem_object: Any = field(default=None, repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    _reasons: dict[tuple[int, str], list[str]] = field(default_factory=dict, repr=False)

    # -- the answer ------------------------------------------------------------------------------------------------

    @property
    def places(self) -> list[tuple[int, str]]:
        """Numbers of workers and networks, in the order of the question."""
        return list(dict.fromkeys((cell.workers, cell.network) for cell in self.cells))

    @property
    def runs(self) -> list[Run]:
        """All trainings that did not diverge, as runs."""
        return [run for trained in self.trainings for run in trained.runs if run is not None]

    def at(self, workers: int | None = None, network: str | None = None) -> list[Cell]:
        """Return the cells of one number of workers and one network; without arguments, those of the first.

        Raises:
            ConfigError: there is no such place.
        """
        places = [
            (p, name)
            for p, name in self.places
            if workers in (None, p) and (network is None or network in _names(name))
        ]
        if not places:
            asked = " on ".join(
                [*([f"{workers} workers"] if workers is not None else []), *([network] if network else [])]
            )
            known = "; ".join(f"{_workers(p)} on {name}" for p, name in self.places)
            raise ConfigError(f"{asked}: the study has {known}")
        return [cell for cell in self.cells if (cell.workers, cell.network) == places[0]]

    def best(self, workers: int | None = None, network: str | None = None) -> Cell:
        """Return the cell with the shortest time to the target.

        If no time is known, it is the one with the shortest step among those with exact gradients. Among cells within
        2 % of the shortest time, it is the plainest: the one that comes first among the candidates.
        """
        return _best(self.at(workers, network))

    def speedup(self, workers: int | None = None, network: str | None = None) -> float:
        """Return how many times as fast as plain synchronous SGD the best one reaches the target; a step, if no time is known."""
        cells = self.at(workers, network)
        return ratio_of(plain_of(cells), _best(cells))[0]

    def reasons(self, workers: int | None = None, network: str | None = None) -> list[str]:
        """Return the answer for one place, in sentences: which, how much, why, and until when."""
        cells = self.at(workers, network)
        place = (cells[0].workers, cells[0].network)
        if place not in self._reasons:
            self._reasons[place] = self._find_reasons(cells)
        return self._reasons[place]

    def _find_reasons(self, cells: Sequence[Cell]) -> list[str]:
        best, plain = _best(cells), plain_of(cells)
        words = [f"{_workers(best.workers)}, {best.network}: **{best.name}**"]
        if len(cells) == 1:
            words[0] += (
                f" takes {seconds(best.time.step_s)} a step. Nothing was compared: give more minutes, or fewer places"
            )
            return [*words, self._bound(best)]
        if best.target_s is not None and self.target is not None and best.interval_s is not None:
            low_s, high_s = best.interval_s
            words[0] += (
                f" reaches {_words(*self.target)} in {seconds(best.target_s)} [{seconds(low_s)}, {seconds(high_s)}]"
            )
            if plain is not best and plain.target_s is not None:
                ratio, low, high = ratio_of(plain, best)
                words[0] += (
                    f", {ratio:.2f} [{low:.2f}, {high:.2f}] times as fast as {plain.name} ({seconds(plain.target_s)})"
                )
                if low <= 1:
                    words.append("The interval of this ratio contains 1: the two cannot be told apart")
        else:
            among = " of those with exact, uncompressed gradients" if best.recipe.name == "exact" else ""
            words[0] += f" has the shortest step{among}, {seconds(best.time.step_s)}"
            if plain is not best:
                ratio = plain.time.step_s / best.time.step_s
                words[0] += f", {ratio:.2f} times as fast as {plain.name} ({seconds(plain.time.step_s)})"
            if not among:
                words.append("How many steps it needs is not known")
        words += _untrained(cells, best, plain, "is ahead" if self.target is None else "reaches the target first")
        words.append(self._bound(best))
        words += self._cost_of_staleness(best, plain)
        words += self._turning_points(cells, best)
        return words

    def _bound(self, cell: Cell) -> str:
        saved = saved_seconds(self.calibration, cell.algorithm, cell.setting)
        cost = max(saved, key=lambda name: saved[name])
        rest = max(cell.time.step_s - saved[cost], 0.0)
        took = f"A step of {cell.name} takes {seconds(cell.time.step_s)} and is bound by {cost}"
        return f"{took}: if {COSTS[cost]} took no time, {seconds(rest)}"

    def _cost_of_staleness(self, best: Cell, plain: Cell) -> list[str]:
        if best.steps is None or plain.steps is None or best.recipe == plain.recipe:
            return []
        more, faster = best.steps / plain.steps, plain.time.step_s / best.time.step_s
        steps = f"Its gradients ({best.recipe.name}) need {more:.2f} times as many steps"
        return [f"{steps}, and a step is {faster:.2f} times as fast"]

    def _turning_points(self, cells: Sequence[Cell], best: Cell) -> list[str]:
        rate = rate_of(self.calibration, best.setting)
        if best.workers < 2 or not math.isfinite(rate):
            return []
        regions = self._regions(cells)
        here = max(number for number, (begin, _) in enumerate(regions) if begin <= rate)
        words = []
        if here > 0:
            words.append(f"Below about {_rate(regions[here][0])} {regions[here - 1][1].name} is ahead, or within 2 %")
        if here + 1 < len(regions):
            begin, other = regions[here + 1]
            words.append(f"Above about {_rate(begin)} {other.name} is ahead, or within 2 %")
        if not words:
            of_known = " of those that reached the target" if best.target_s is not None else ""
            words.append(f"It stays ahead{of_known} from {_rate(rate / 2**OCTAVES)} to {_rate(rate * 2**OCTAVES)}")
        return words

    def _regions(self, cells: Sequence[Cell]) -> list[tuple[float, Cell]]:
        """Return where the best changes: (bytes per second from which it is the best, cell), ascending from 0.

        Between two bandwidths that were tried, the change is where the two lines cross on logarithmic axes.
        """
        curves = self.by_bandwidth(cells)
        rates = list(next(iter(curves.values())))
        winners = [_plainest(list(curves), {number: curve[rate] for number, curve in curves.items()}) for rate in rates]
        found = [(0.0, cells[winners[0]])]
        for (low, high), (one, other) in zip(pairwise(rates), pairwise(winners), strict=True):
            if one != other:
                gap = math.log(curves[one][low] / curves[other][low])
                then = math.log(curves[one][high] / curves[other][high])
                share = 0.5 if gap == then else min(1.0, max(0.0, gap / (gap - then)))
                found.append((low * (high / low) ** share, cells[other]))
        return found

    def by_bandwidth(self, cells: Sequence[Cell]) -> dict[int, dict[float, float]]:
        """Return cell number -> bandwidth (bytes per second) -> seconds to the target, or of a step if none is known."""
        pool = _comparable(cells)
        chosen = [number for number, cell in enumerate(cells) if cell in pool]
        quick = _distinct(sorted(chosen, key=lambda number: badness(cells[number])), cells)[:SHOWN_LINES]
        plain = cells.index(plain_of(cells))
        shown = sorted({*quick, plain} & set(chosen))
        rate = rate_of(self.calibration, cells[0].setting)
        rates = [rate * 2.0**octave for octave in range(-OCTAVES, OCTAVES + 1)]
        return {
            number: {at: (cells[number].steps or 1.0) * self._step_s_at(cells[number], at) for at in rates}
            for number in shown
        }

    def _step_s_at(self, cell: Cell, bytes_per_s: float) -> float:
        if math.isclose(bytes_per_s, rate_of(self.calibration, cell.setting)):
            return cell.time.step_s
        setting = replace(cell.setting, line_bytes_per_s=bytes_per_s)
        return step_time(self.calibration, cell.algorithm, setting).step_s

    # -- as text, tables and figures -------------------------------------------------------------------------------

    def table(self, workers: int | None = None, network: str | None = None) -> Table:
        """Return one row for each algorithm, the best first; of one place if it is given, else of all."""
        places = [(workers, network)] if workers is not None or network is not None else self.places
        rows = []
        for place in places:
            cells = self.at(*place)
            plain = plain_of(cells)
            rows += [
                {**cell.as_record(), "speedup": plain.time.step_s / cell.time.step_s}
                for cell in sorted(cells, key=badness)
            ]
        columns = COLUMNS + (TARGET_COLUMNS if self.target is not None and self.trainings else ())
        return Table(rows, columns, caption=self._caption())

    def _caption(self) -> str:
        goal = "" if self.target is None else f"; target: {_words(*self.target)}"
        return (
            f"{self.problem}{goal}; predicted, intervals from 5 % to 95 %; speed-up of a step over plain "
            "synchronous SGD"
        )

    @property
    def answer(self) -> str:
        """The answer for every place, and what is not known, as text."""
        parts = [". ".join(self.reasons(*place)) + "." for place in self.places]
        if self.unknown:
            parts.append(
                "\n".join(["What the study does not know, and what it assumes:", *(f"- {one}" for one in self.unknown)])
            )
        return "\n\n".join(parts)

    def __str__(self) -> str:
        return f"{self.answer.replace('**', '')}\n\n{self.table()}\n\nThe study took {seconds(self.seconds)}."

    __repr__ = __str__

    def _repr_html_(self) -> str:
        shown = "".join(f"<p>{_bold(html.escape('. '.join(self.reasons(*place))))}.</p>" for place in self.places)
        listed = "".join(f"<li>{html.escape(one)}</li>" for one in self.unknown)
        left = (
            f"<details><summary>What the study does not know, and what it assumes</summary><ul>{listed}</ul></details>"
        )
        return shown + self.table()._repr_html_() + (left if self.unknown else "")

    def front(self, workers: int | None = None, network: str | None = None, *, num: int = 6) -> Any:
        """Draw the target's metric against predicted seconds, for the `num` best algorithms and synchronous SGD.

        A line is the mean over seeds, its band the range. The lowest line at a time is the front.

        Raises:
            ConfigError: nothing was trained.
        """
        from workbench.plots.studies import curves_of

        cells = [cell for cell in sorted(self.at(workers, network), key=badness) if cell.trained and cell.trained.runs]
        if not cells:
            raise ConfigError("nothing was trained, so there is no loss to show: give target=, or more minutes=")
        plain = plain_of(cells)
        quickest: dict[str, Cell] = {}
        for cell in cells:  # sorted: the first of a recipe is its fastest
            quickest.setdefault(cell.recipe.name, cell)
        shown = list(dict.fromkeys([*list(quickest.values())[:num], plain]))
        metric = self.target[0] if self.target else "test_loss"
        curves = {cell.name: _curve(cell, metric) for cell in shown}
        what = {"test_loss": "test loss"}.get(metric, metric)
        return curves_of(
            {name: curve for name, curve in curves.items() if curve},
            title=f"{self.problem}, {plain.workers} workers, {plain.network}",
            x="predicted seconds",
            y=what,
            log_x=True,
            log_y=metric == "test_loss",
            reference=self.target[1] if self.target else None,
        )

    def sensitivity(self, workers: int | None = None, network: str | None = None) -> Any:
        """Draw the time to the target (or of a step) against the bandwidth, from 1/16 to 16 times the network's."""
        from workbench.plots.studies import curves_of

        cells = self.at(workers, network)
        curves = self.by_bandwidth(cells)
        known = any(cells[number].target_s is not None for number in curves)
        return curves_of(
            {
                cells[number].name: {rate / GBIT_PER_S: value for rate, value in curve.items()}
                for number, curve in curves.items()
            },
            title=f"{self.problem}, {cells[0].workers} workers",
            x="bandwidth (Gbit/s)",
            y="predicted seconds to the target" if known else "predicted seconds of a step",
            log_x=True,
            log_y=True,
        )

    def timelines(self, workers: int | None = None, network: str | None = None) -> Any:
        """Draw predicted steps on one time axis: of plain synchronous SGD, the best, and the one with the shortest step."""
        from workbench.plots.gantt.figures import timelines

        cells = self.at(workers, network)
        best, plain = _best(cells), plain_of(cells)
        runs, names = [], []
        quickest = cells[_plainest(range(len(cells)), {number: cell.time.step_s for number, cell in enumerate(cells)})]
        for cell in dict.fromkeys((plain, best, quickest)):
            run, _ = step_run(self.calibration, cell.algorithm, cell.setting)
            runs.append(run)
            names.append(f"predicted: {cell.name}, {seconds(cell.time.step_s)} a step")
        first = [max(1, len(run.metrics[0]) - SHOWN_STEPS) for run in runs]
        windows = [slice(at, at + SHOWN_STEPS) for at in first]
        return timelines(runs, windows, range(min(SHOWN_RANKS, best.workers)), names=names)

    # -- against real ranks ----------------------------------------------------------------------------------------

    def check(
        self,
        cluster: Cluster,
        *,
        top: int = 3,
        algorithms: Sequence[Algorithm] | None = None,
        network: str | float | None = None,
        to_target: bool = False,
        slept: bool = False,
        steps: int = 24,
        rounds: int = 2,
        calibrated: Calibration | None = None,
        timeout_s: float = 600.0,
        quiet: bool = False,
    ) -> Check:
        """Train the best few algorithms on the ranks of a cluster, in turn, and compare with predictions for these ranks.

        The predictions are made before the trainings that they predict, and for the conditions of the cluster. On ranks
        that have separate machines the costs are those of the study. Ranks of this machine, also those on an emulated
        network, share its cores, which the study's hosts do not; so the costs are fitted to a run of synchronous SGD on
        them, and the others are predicted. With `slept=True` such ranks sleep for the study's seconds of compute, as if
        each had a host, and the predictions are those of the study.

        Args:
            cluster: real ranks.
            top: how many algorithms, the best of the study first; plain synchronous SGD is added, if the study has it.
            algorithms: these, instead of the best.
            network: rate of the links ("1gbit"), if the cluster is not emulated: an emulated one has it.
            to_target: train until the study's target, and compare these times too. The study must have trained these
                algorithms with as many workers.
            slept: the ranks compute the gradient of one sample in a step, and sleep until the study's seconds are over
                (slept compute). The ranks must be able to compute that in these seconds.
            steps: of each training, without `to_target`.
            rounds: trainings of each algorithm.
            calibrated: costs on the cluster, instead of these.
            timeout_s: limit for each training.
            quiet: print no progress.

        Raises:
            ConfigError: an argument does not fit the study or the cluster; the message says what to give.
        """
        from workbench.what_if.check import check

        return check(
            self,
            cluster,
            top=top,
            algorithms=algorithms,
            network=network,
            to_target=to_target,
            slept=slept,
            steps=steps,
            rounds=rounds,
            calibrated=calibrated,
            timeout_s=timeout_s,
            quiet=quiet,
        )


def rate_of(calibration: Calibration, setting: Setting) -> float:
    """Return the nominal rate of a setting's network, in bytes per second."""
    if setting.line_bytes_per_s is not None:
        return setting.line_bytes_per_s
    return calibration.line.line_bytes_per_s or 1 / calibration.line.s_per_byte.value


def _distinct(order: Sequence[int], cells: Sequence[Cell]) -> list[int]:
    """Return the cells without those that take as long as another one with the same gradients, which come later."""
    seen: dict[tuple[str, float], int] = {}
    for number in sorted(order):  # of equal ones the plainest
        seen.setdefault((cells[number].recipe.name, round(math.log(cells[number].time.step_s), 3)), number)
    return [number for number in order if number in seen.values()]


def _names(name: str) -> tuple[str, ...]:
    return name, name.lower(), name.replace(" ", "").removesuffix("/s").lower()


def _rate(bytes_per_s: float) -> str:
    bits = float(f"{bytes_per_s * 8:.2g}")
    unit, scale = ("Gbit/s", 1e9) if bits >= 1e9 else ("Mbit/s", 1e6) if bits >= 1e6 else ("kbit/s", 1e3)
    return f"{bits / scale:.4g} {unit}"


def _workers(number: int) -> str:
    return f"{number} worker{'s' if number > 1 else ''}"


def badness(cell: Cell) -> tuple[int, float]:
    """Sort key: first the cells with a time to the target, by it; then the others, by the time of a step."""
    return (0, cell.target_s) if cell.target_s is not None else (1, cell.time.step_s)


def _best(cells: Sequence[Cell]) -> Cell:
    known = _comparable(cells)
    order = list(range(len(known)))
    return known[_plainest(order, {number: badness(known[number])[1] for number in order})]


def _comparable(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells whose time to the target is known; if there are none, those with exact gradients."""
    known = [cell for cell in cells if cell.target_s is not None]
    return known or [cell for cell in cells if cell.recipe.name == "exact"] or list(cells)


def _plainest(order: Sequence[int], values: Mapping[int, float]) -> int:
    least = min(values.values())
    return next(number for number in order if values[number] <= least * EQUAL_WITHIN)


def plain_of(cells: Sequence[Cell]) -> Cell:
    """Return plain synchronous SGD, or the first candidate with exact gradients, or the first."""
    exact = [cell for cell in cells if cell.recipe.name == "exact"]
    return next((cell for cell in exact if cell.name == "SynchronousSGD"), (exact or list(cells))[0])


def _untrained(cells: Sequence[Cell], best: Cell, plain: Cell, wins: str) -> list[str]:
    """Say which algorithm without a known number of steps has the shortest step, and how many steps it may need."""
    steps = 1.0 if best.target_s is None else plain.steps or math.inf
    limit_s = best.target_s or best.time.step_s
    unknown = [cell for cell in cells if cell.steps is None and (cell.trained is None or best.target_s is None)]
    left = [cell for cell in unknown if cell.time.step_s * steps * EQUAL_WITHIN < limit_s]
    if not left:
        return []
    one = left[_plainest(range(len(left)), {number: cell.time.step_s for number, cell in enumerate(left)})]
    ratio, gradients = limit_s / (one.time.step_s * steps), f"its gradients ({one.recipe.name})"
    words = f"A step of {one.name} takes {seconds(one.time.step_s)}: it {wins} if {gradients} need less than "
    return [f"{words}{ratio:.2f} times as many steps as exact ones, which is not known"]


def ratio_of(plain: Cell, best: Cell) -> tuple[float, float, float]:
    """Return how many times as fast `best` is, with the 5 % and 95 % quantiles: paired by seed, with both predictions' errors.

    Without known steps, it is the ratio of the times of a step.
    """
    spread, ratio = 0.0, plain.time.step_s / best.time.step_s
    of_plain = of_best = (0.0, 0.0)
    if plain.trained and best.trained and plain.steps is not None and best.steps is not None:
        pairs = [(float(a), float(b)) for a, b in zip(plain.trained.steps, best.trained.steps, strict=False) if a and b]
        logs = [math.log(a / b) for a, b in pairs]
        ratio *= plain.steps / best.steps
        of_plain, of_best = bracket_of(plain), bracket_of(best)
        if len(logs) > 1:
            quantile = float(stats.t.ppf(LEVELS[1], len(logs) - 1))
            spread = quantile * float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    down = math.hypot(
        spread,
        math.log(plain.time.step_s / plain.time.low_s),
        math.log(best.time.high_s / best.time.step_s),
        of_plain[0],
        of_best[1],
    )
    up = math.hypot(
        spread,
        math.log(plain.time.high_s / plain.time.step_s),
        math.log(best.time.step_s / best.time.low_s),
        of_plain[1],
        of_best[0],
    )
    return ratio, ratio * math.exp(-down), ratio * math.exp(up)


def bracket_of(cell: Cell) -> tuple[float, float]:
    """Return how far the evaluations leave the mean steps to the target open: ln(steps / fewest), ln(most / steps)."""
    assert cell.trained is not None
    assert cell.steps is not None
    low, high = cell.trained.mean_bracket
    return math.log(cell.steps / low), math.log(high / cell.steps)


def _curve(cell: Cell, metric: str) -> dict[float, list[float]]:
    """Return predicted seconds -> values of the seeds."""
    found: dict[float, list[float]] = {}
    assert cell.trained is not None
    for run in filter(None, cell.trained.runs):
        for row in run.evaluations():
            if row[metric] is not None and row["step"] >= 0:
                found.setdefault((row["step"] + 1) * cell.time.step_s, []).append(row[metric])
    return found


def _words(metric: str, value: float) -> str:
    """Return a target in words: 'a test loss of 3.2'; 'f1 of 0.8' for a metric of the user's own."""
    words = {"test_loss": "a test loss of", "accuracy": "an accuracy of"}.get(metric, f"{metric} of")
    return f"{words} {value:g}"


def _bold(text: str) -> str:
    parts = text.split("**")
    return "".join(f"<b>{part}</b>" if number % 2 else part for number, part in enumerate(parts))
