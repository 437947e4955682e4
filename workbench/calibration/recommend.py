"""Recommend an algorithm, width, bucket size, codec and number of backups, with the reason: the best of a grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any, final

from workbench.analysis.table import Column, Table, seconds
from workbench.calibration.candidates import candidates, describe, least_s
from workbench.calibration.convergence import EXACT, Convergence, recipe
from workbench.calibration.effective import Cores, codec_of, make_setting
from workbench.calibration.model import Calibration
from workbench.calibration.predict import NUM_DRAWS, Prediction, cores_lines, predict_at, step_s
from workbench.collectives import Native
from workbench.costs import Network
from workbench.errors import ConfigError
from workbench.program import Algorithm

SHORT_STEPS = 12  # steps of a simulation that is only used for the ranking
EQUAL_WITHIN = 1.02  # within this factor, the algorithm that changes the numerical results least wins
RUNNERS_UP = 3


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An algorithm and its prediction.

    Attributes:
        steps_to_loss: steps to the loss; None if no run shows it.
        loss_s: seconds to the loss, or None.
    """

    algorithm: Algorithm
    prediction: Prediction
    steps_to_loss: float | None = None
    loss_s: float | None = None

    def as_record(self) -> dict[str, Any]:
        """Return plain values, fit for JSON."""
        said = describe(self.algorithm, self.prediction.setting)
        shown = {"recipe": recipe(self.algorithm), "steps_to_loss": self.steps_to_loss, "loss_s": self.loss_s}
        return {
            **said,
            **self.prediction.as_record(),
            "label": label(self.algorithm, self.prediction.algorithm),
            **shown,
        }


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The best choice, then the runners-up.

    Attributes:
        reason: the reason, in a few sentences.
        num_candidates, num_simulated: size of the grid, and how many candidates were simulated.
        convergence: source of the steps to the loss; None: ranked by the time of a step.
        num_left_out: candidates that might be better, but were not simulated within `budget_s`.
        not_reached: recipes whose runs did not reach the loss; they are not candidates.
    """

    choices: tuple[Choice, ...]
    reason: str
    num_candidates: int
    num_simulated: int
    convergence: Convergence | None
    num_left_out: int = 0
    not_reached: tuple[str, ...] = ()

    @property
    def best(self) -> Choice:
        return self.choices[0]

    def as_record(self) -> dict[str, Any]:
        """Return plain values, fit for JSON."""
        return {
            "choices": [choice.as_record() for choice in self.choices],
            "reason": self.reason,
            "num_candidates": self.num_candidates,
            "num_simulated": self.num_simulated,
            "num_left_out": self.num_left_out,
            "not_reached": list(self.not_reached),
            "convergence": None
            if self.convergence is None
            else {"source": self.convergence.source, "steps": self.convergence.steps},
        }

    def table(self) -> Table:
        """Return one row for each choice."""
        cores = cores_lines([choice.prediction for choice in self.choices])
        return Table([choice.as_record() for choice in self.choices], COLUMNS, caption="\n".join([self.reason, *cores]))

    def __str__(self) -> str:
        lines = [str(self.table())]
        for name in self.not_reached:
            assert self.convergence is not None
            lines.append(
                f"not reached: {name} did not reach a test loss of {self.convergence.target_loss:g} in its runs, and "
                "is not a candidate"
            )
        others = "the others cannot be better"
        if self.num_left_out:
            others = (
                f"the time limit was reached: {self.num_left_out} others were not simulated and might be better "
                "(raise --budget)"
            )
        return "\n".join([*lines, f"{self.num_simulated} of {self.num_candidates} candidates were simulated; {others}"])


COLUMNS = (
    Column("label", "algorithm"),
    Column("codec", "codec"),
    Column("step_s", "step", seconds),
    Column("low_s", "10 %", seconds),
    Column("high_s", "90 %", seconds),
    Column("bound", "bound by"),
    Column("recipe", "changes the numbers by"),
    Column("steps_to_loss", "steps to the loss"),
    Column("loss_s", "time to the loss", seconds),
)


def recommend(
    calibration: Calibration,
    *,
    workers: int,
    network: Network | str | None = None,
    bandwidth_bytes_per_s: float | None = None,
    latency_s: float | None = None,
    cores: Cores = None,
    among: Sequence[Algorithm] | None = None,
    convergence: Convergence | None = None,
    exact: bool = False,
    runners_up: int = RUNNERS_UP,
    draws: int = NUM_DRAWS,
    seed: int = 0,
    budget_s: float = inf,
    progress: Callable[[int, int, float], None] | None = None,
) -> Recommendation:
    """Recommend the algorithm with the shortest step, or the shortest time to a loss, for this model on this cluster.

    Candidates are simulated in the order of a lower bound of their time, until the next bound is above the best time
    found. So most candidates are not simulated. Among candidates within 2 % of the best time, the one that changes the
    numerical results least wins. If steps to a loss are not known, the time of a step that drops b of p gradients is
    multiplied by p / (p - b).

    Args:
        workers, network, bandwidth_bytes_per_s, latency_s, cores: the conditions, as for `predict`.
        among: the candidates; None: `candidates.candidates`, with the codecs whose cost is in the calibration.
        convergence: steps that each recipe needs to a loss, from runs; other recipes are left out. None: every step
            counts the same.
        exact: only algorithms that do not change the numerical results.
        runners_up: number of further choices to return.
        draws: draws of the calibration for the band of the best choice.
        budget_s: no further candidate is simulated after this time; the result says how many were left out.
        progress: called after each candidate with the number simulated, the largest possible number, and the largest
            number of seconds left.

    Raises:
        ConfigError: no candidate is left, or the conditions are unknown.
    """
    setting = make_setting(calibration, workers, network, bandwidth_bytes_per_s, latency_s, cores)
    kept = _comparable(list(among) if among is not None else _grid(calibration, workers), convergence, exact)

    def counted(one: Algorithm) -> float:
        """Return the factor of a step's time in the comparison: steps to the loss, or steps that give p gradients."""
        if convergence is not None:
            return float(convergence.of(one) or 0.0)
        return workers / max(1, workers - backups_of(one))

    bounds = sorted(((least_s(calibration, one, setting) * counted(one), number) for number, one in enumerate(kept)))
    found: list[tuple[float, Algorithm]] = []
    begin_s, left_out = monotonic(), 0
    for place, (bound, number) in enumerate(bounds):
        best_s = min((item[0] for item in found), default=inf)
        if bound >= best_s:
            break
        spent_s = monotonic() - begin_s
        if found and spent_s > budget_s:
            left_out = sum(other < best_s for other, _ in bounds[place:])
            break
        one = kept[number]
        found.append((step_s(calibration, one, setting, SHORT_STEPS, seed) * counted(one), one))
        if progress is not None:
            best_s = min(item[0] for item in found)
            rest = sum(other < best_s for other, _ in bounds[place + 1 :])
            spent_s = monotonic() - begin_s
            progress(len(found), len(found) + rest, min(spent_s / len(found) * rest, max(0.0, budget_s - spent_s)))
    order = _in_order(found)[: 1 + runners_up]
    predictions = [
        predict_at(calibration, one, setting, draws=0 if place else draws, seed=seed) for place, one in enumerate(order)
    ]
    choices = [_choice(one, prediction, convergence) for one, prediction in zip(order, predictions, strict=True)]
    return Recommendation(
        choices=tuple(choices),
        reason=_reason(choices, convergence),
        num_candidates=len(kept),
        num_simulated=len(found),
        convergence=convergence,
        num_left_out=left_out,
        not_reached=_not_reached(convergence),
    )


def _not_reached(convergence: Convergence | None) -> tuple[str, ...]:
    """Return the recipes whose runs did not reach the loss."""
    return () if convergence is None else tuple(name for name, steps in convergence.steps.items() if steps is None)


def _in_order(found: list[tuple[float, Algorithm]]) -> list[Algorithm]:
    """Return the one of the best that changes the numerical results least, then the others, fastest first."""
    ordered = sorted(found, key=lambda item: item[0])
    plainest = min(
        (item for item in ordered if item[0] <= ordered[0][0] * EQUAL_WITHIN),
        key=lambda item: (_change(item[1]), item[0]),
    )[1]
    return [plainest, *(one for _, one in ordered if one is not plainest)]


def _choice(algorithm: Algorithm, prediction: Prediction, convergence: Convergence | None) -> Choice:
    steps = None if convergence is None else convergence.of(algorithm)
    loss_s = None if steps is None else steps * prediction.step_s
    return Choice(algorithm=algorithm, prediction=prediction, steps_to_loss=steps, loss_s=loss_s)


def _comparable(chosen: list[Algorithm], convergence: Convergence | None, exact: bool) -> list[Algorithm]:
    """Return the candidates that may be compared."""
    kept = [one for one in chosen if not exact or recipe(one) == EXACT]
    if convergence is not None:
        kept = [one for one in kept if convergence.of(one) is not None]
    if not kept:
        known = (
            f"steps to the loss are known for {_known(convergence)} ({convergence.source}): give runs of more "
            "algorithms"
            if convergence
            else "all change the numerical results: leave exact=True out"
        )
        raise ConfigError(f"none of {len(chosen)} candidates can be compared: {known}")
    return kept


def _known(convergence: Convergence) -> str:
    """Return the recipes whose runs reached the loss, for a message."""
    return ", ".join(name for name, steps in convergence.steps.items() if steps is not None) or "no recipe"


def label(algorithm: Algorithm, name: str) -> str:
    """Return an algorithm's label in a table: with its collective and codec, which its short name leaves out."""
    collective = getattr(algorithm, "collective", None)
    if collective is None or isinstance(collective, Native) or "collective" in name:
        return name
    codec = codec_of(algorithm)
    return f"{name}, {type(collective).__name__}" + (f" of {codec}" if codec else "")


def backups_of(algorithm: Algorithm) -> int:
    """Return b, the number of gradients that an update drops."""
    backups = getattr(algorithm, "backups", 0)
    return backups if isinstance(backups, int) else 0


def _change(algorithm: Algorithm) -> tuple[int, int, int]:
    """Return how much an algorithm changes the numerical results: dropped gradients, staleness, a codec."""
    late = 0 if algorithm.requires.servers else algorithm.max_staleness or 0
    return backups_of(algorithm), late, int(codec_of(algorithm) is not None)


def _grid(calibration: Calibration, workers: int) -> list[Algorithm]:
    known = tuple(name for name, *_ in calibration.line.codecs)
    return candidates(workers, num_bytes=calibration.shapes.num_bytes, codecs=known)


def _reason(choices: Sequence[Choice], convergence: Convergence | None) -> str:
    """Return sentences on the times of the best and the next choice, and on what is unknown."""
    best = choices[0]
    saved = best.prediction.saved_s.get(best.prediction.bound, 0.0)
    words = [
        (
            f"{label(best.algorithm, best.prediction.algorithm)}: {seconds(best.prediction.step_s)} a step, bound by "
            f"{best.prediction.bound}"
        )
    ]
    words[0] += f" (without it {seconds(max(best.prediction.step_s - saved, 0.0))})" if saved else ""
    if len(choices) > 1:
        other = choices[1]
        ratio = other.prediction.step_s / best.prediction.step_s
        words.append(
            f"next {label(other.algorithm, other.prediction.algorithm)}, {ratio:.2f} times as long a step, bound by "
            f"{other.prediction.bound}"
        )
    if convergence is None:
        words.append("the number of steps that each needs is unknown: the ranking is by the time of a step alone")
        if recipe(best.algorithm) != EXACT:
            words.append(f"its gradients are not exact ({recipe(best.algorithm)}), so it may need more steps")
    else:
        words.append(f"steps to a test loss of {convergence.target_loss:g} are from {convergence.source}")
    return "; ".join(words)
