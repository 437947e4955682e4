"""Which method, width, bucket size, codec and number of backups to use, and why: the best of a grid without simulating all of it."""

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

SHORT_STEPS = 12  # of a simulation that only ranks
AS_GOOD = 1.02  # of what differs by less, the method is taken that changes the numbers least
RUNNERS_UP = 3


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A method and what is said of it.

    Attributes:
        steps_to_loss: None where no run told.
        loss_s: seconds to the loss; None likewise.
    """

    algorithm: Algorithm
    prediction: Prediction
    steps_to_loss: float | None = None
    loss_s: float | None = None

    def as_record(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        said = describe(self.algorithm, self.prediction.setting)
        shown = {"recipe": recipe(self.algorithm), "steps_to_loss": self.steps_to_loss, "loss_s": self.loss_s}
        return {**said, **self.prediction.as_record(), "label": label(self.algorithm, self.prediction.method), **shown}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The best choice first, then the runners-up.

    Attributes:
        reason: why, in a few sentences.
        num_candidates, num_simulated: of the grid, and of these how many were simulated: the others cannot be better.
        convergence: what steps to the loss were taken from; None: ranked by the step's time alone.
        num_left_out: candidates that might be better and were not simulated, for the time was over.
        not_reached: recipes whose runs did not reach the loss; they are no candidates.
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
        """Plain values, fit for JSON."""
        return {
            "choices": [choice.as_record() for choice in self.choices],
            "reason": self.reason,
            "num_candidates": self.num_candidates,
            "num_simulated": self.num_simulated,
            "num_left_out": self.num_left_out,
            "not_reached": list(self.not_reached),
            "convergence": None if self.convergence is None else {"source": self.convergence.source, "steps": self.convergence.steps},
        }

    def table(self) -> Table:
        """One row a choice."""
        cores = cores_lines([choice.prediction for choice in self.choices])
        return Table([choice.as_record() for choice in self.choices], COLUMNS, caption="\n".join([self.reason, *cores]))

    def __str__(self) -> str:
        lines = [str(self.table())]
        for name in self.not_reached:
            assert self.convergence is not None
            lines.append(
                f"not reached: {name} did not reach a test loss of {self.convergence.target_loss:g} in its runs, and is no candidate"
            )
        others = "the others cannot be better"
        if self.num_left_out:
            others = f"the time was over: {self.num_left_out} others might be better (--budget gives more time)"
        return "\n".join([*lines, f"{self.num_simulated} of {self.num_candidates} candidates were simulated; {others}"])


COLUMNS = (
    Column("label", "method"),
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
    """The method of the shortest step, or of the shortest time to a loss, for this model on this cluster.

    Candidates are looked at in the order of a bound from below of their time, and simulated until the bound of the next is
    above the best that was found: so most need no simulation. Of those within 2 % of the best, the one is taken that changes
    the numbers least. A step that does without b of p gradients counts p / (p - b) times, where steps to a loss are not known.

    Args:
        workers, network, bandwidth_bytes_per_s, latency_s, cores: where, as for `predict`.
        among: the candidates; None: `candidates.candidates`, with the codecs whose cost the calibration knows.
        convergence: steps that each recipe needs to a loss, from runs; recipes that it does not know are left out. None: steps
            are not compared, and all count alike.
        exact: only methods that change no numbers.
        runners_up: how many to tell of beside the best.
        draws: of the calibration, for the band of the best.
        budget_s: no further candidate is simulated after so many seconds; the result says how many were left out.
        progress: called after each candidate with the number simulated, the most that there can be, and the most seconds left.

    Raises:
        ConfigError: nothing is left to choose among, or the place is unknown.
    """
    setting = make_setting(calibration, workers, network, bandwidth_bytes_per_s, latency_s, cores)
    kept = _kept(list(among) if among is not None else _grid(calibration, workers), convergence, exact)

    def counted(one: Algorithm) -> float:
        """By what a step's time is multiplied to be compared: steps to the loss, or how many steps give p gradients."""
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
    predictions = [predict_at(calibration, one, setting, draws=0 if place else draws, seed=seed) for place, one in enumerate(order)]
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
    """Recipes whose runs did not get to the loss."""
    return () if convergence is None else tuple(name for name, steps in convergence.steps.items() if steps is None)


def _in_order(found: list[tuple[float, Algorithm]]) -> list[Algorithm]:
    """The plainest of the best, then the others, quickest first."""
    ordered = sorted(found, key=lambda item: item[0])
    plainest = min((item for item in ordered if item[0] <= ordered[0][0] * AS_GOOD), key=lambda item: (_change(item[1]), item[0]))[1]
    return [plainest, *(one for _, one in ordered if one is not plainest)]


def _choice(algorithm: Algorithm, prediction: Prediction, convergence: Convergence | None) -> Choice:
    steps = None if convergence is None else convergence.of(algorithm)
    loss_s = None if steps is None else steps * prediction.step_s
    return Choice(algorithm=algorithm, prediction=prediction, steps_to_loss=steps, loss_s=loss_s)


def _kept(chosen: list[Algorithm], convergence: Convergence | None, exact: bool) -> list[Algorithm]:
    """The candidates that may be compared."""
    kept = [one for one in chosen if not exact or recipe(one) == EXACT]
    if convergence is not None:
        kept = [one for one in kept if convergence.of(one) is not None]
    if not kept:
        told = f"the steps of {', '.join(convergence.steps) or 'nothing'} are known ({convergence.source})" if convergence else "exact=True"
        raise ConfigError(f"none of {len(chosen)} candidates is left: {told}")
    return kept


def label(algorithm: Algorithm, method: str) -> str:
    """A method as a row of a table shows it: with its collective and codec, which its short name leaves out."""
    collective = getattr(algorithm, "collective", None)
    if collective is None or isinstance(collective, Native) or "collective" in method:
        return method
    codec = codec_of(algorithm)
    return f"{method}, {type(collective).__name__}" + (f" of {codec}" if codec else "")


def backups_of(algorithm: Algorithm) -> int:
    """b, the gradients that an update does without."""
    backups = getattr(algorithm, "backups", 0)
    return backups if isinstance(backups, int) else 0


def _change(algorithm: Algorithm) -> tuple[int, int, int]:
    """How much a method changes the numbers: gradients it drops, staleness, whether a codec."""
    late = 0 if algorithm.has_servers else algorithm.max_staleness or 0
    return backups_of(algorithm), late, int(codec_of(algorithm) is not None)


def _grid(calibration: Calibration, workers: int) -> list[Algorithm]:
    known = tuple(name for name, *_ in calibration.line.codecs)
    return candidates(workers, num_bytes=calibration.shapes.num_bytes, codecs=known)


def _reason(choices: Sequence[Choice], convergence: Convergence | None) -> str:
    """Numbers of the best and of the next, and what is not known."""
    best = choices[0]
    saved = best.prediction.saved_s.get(best.prediction.bound, 0.0)
    words = [f"{label(best.algorithm, best.prediction.method)}: {seconds(best.prediction.step_s)} a step, bound by {best.prediction.bound}"]
    words[0] += f" (without it {seconds(max(best.prediction.step_s - saved, 0.0))})" if saved else ""
    if len(choices) > 1:
        other = choices[1]
        ratio = other.prediction.step_s / best.prediction.step_s
        words.append(
            f"next {label(other.algorithm, other.prediction.method)}, {ratio:.2f} times as long a step, bound by {other.prediction.bound}"
        )
    if convergence is None:
        words.append("nothing is known of how many steps each needs: this ranks by the time of a step alone")
        if recipe(best.algorithm) != EXACT:
            words.append(f"its gradients are not the exact ones ({recipe(best.algorithm)}), so it may need more steps")
    else:
        words.append(f"steps to a test loss of {convergence.target_loss:g} are of {convergence.source}")
    return "; ".join(words)
