"""Trainings with real gradients: how many steps each recipe needs to a target, within a budget."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from workbench.analysis.summary import time_to
from workbench.costs import Compute
from workbench.errors import ConfigError, Diverged
from workbench.problems.base import Problem
from workbench.replica.optimizer_step import build_optimizer, check_schedule_takes_rate, set_first_rates
from workbench.runtimes.simulator.simulate import simulate
from workbench.trace.run import Run
from workbench.what_if.budget import Budget
from workbench.what_if.recipe import Recipe
from workbench.what_if.saved import Saved

FIRST_STEPS, FEWEST_STEPS = 48, 12  # of the first training; fewer are not worth a training
LONGER, ROOM = 2, 1.5  # factor between lengths of the first training; of its steps to the target, for the others
EVALUATIONS, FEWEST_EVALUATIONS = 24, 8  # of a training
EVALUATED_SHARE = 0.3  # of a training's work, for evaluations, if they are more than the fewest
GRADIENT = 3  # work of a sample's gradient, in forward passes
STALLED = 3.0  # times longer than expected
FIRST_SHARE = 0.35  # of the time that is left, for the first training
SEARCH_SEED = 1000  # far from the seeds that count
SEARCH_OCTAVES = 2.0  # a search tries rates up to this power of 2 above and below the rule's


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The trainings of a recipe.

    Attributes:
        recipe: what was trained.
        lr: the learning rate; None: the optimizer's own.
        runs: one for each seed; None if a training diverged.
        steps: steps to the target for each seed, interpolated between evaluations; None if it was not reached.
        brackets: the fewest and the most steps that the evaluations of each seed allow; None if it was not reached.
        num_steps: length of the trainings.
    """

    recipe: Recipe
    lr: float | None
    runs: tuple[Run | None, ...]
    steps: tuple[float | None, ...]
    num_steps: int
    brackets: tuple[tuple[float, float] | None, ...] = ()

    @property
    def mean_bracket(self) -> tuple[float, float]:
        """The fewest and the most mean steps to the target that the evaluations allow."""
        known = [bracket for bracket in self.brackets if bracket is not None]
        if not known:
            known = [(steps, steps) for steps in self.steps if steps is not None]
        low, high = (sum(ends) / len(known) for ends in zip(*known, strict=True))
        return low, high

    @property
    def reached(self) -> bool:
        """Whether all seeds reached the target."""
        return bool(self.steps) and None not in self.steps


@final
@dataclass(slots=True, kw_only=True)
class Trainings:
    """Trains recipes, the first seed of each before the second of any, while the budget lasts.

    Attributes:
        target: name and value, or None: then every training has the same length.
        lr: rate of exact gradients, of the optimizer's first parameter group; others keep their proportion to it. A
            recipe of staleness tau has the better of lr and lr / (1 + tau), or the best of a search near the latter.
        tries: trainings of a search for the rate of each recipe; 0: the rule alone.
    """

    problem: Problem
    compute: Compute
    settings: Mapping[str, Any]
    target: tuple[str, float] | None
    lr: float
    tries: int
    seeds: Sequence[int]
    budget: Budget
    saved: Saved
    threads: int
    sample_s: float  # seconds of a sample's gradient here, corrected by each training
    num_tested: int  # samples of the test data
    done: dict[str, Trained] = field(default_factory=dict)  # by the recipe's key
    _first_share: float = FIRST_SHARE
    left_out: dict[str, set[int]] = field(default_factory=dict)  # recipe -> numbers of workers

    def train(self, recipes: Sequence[Recipe]) -> None:
        """Train all recipes. The first is the reference, whose steps to the target limit the length of the others."""
        lengths: dict[int, int] = {}
        self._first_share = FIRST_SHARE / max(1, len({recipe.num_workers for recipe in recipes}))
        for recipe in sorted(recipes, key=lambda one: one.num_workers):  # stable: the reference stays first
            reference = recipe.num_workers not in lengths
            length = self._first_length(recipe, lengths) if reference else lengths[recipe.num_workers]
            lengths[recipe.num_workers] = length
            if length < FEWEST_STEPS:
                self._leave_out(recipe)
                continue
            is_saved = not self.tries and self._first_seed_s(recipe, length) == 0
            if not (is_saved or self._affords(recipe, length, trainings=1 + (0 if reference else self.tries))):
                self._leave_out(recipe)
                continue
            self._extend(recipe, self._rate(recipe, length), length, self.seeds[:1])
        for count in range(2, len(self.seeds) + 1):
            for one in list(self.done.values()):
                cost_s = self._costs_s(one.recipe, one.lr, one.num_steps, self.seeds[count - 1])
                if len(one.runs) == count - 1 and cost_s <= self.budget.left_s:
                    self._extend(one.recipe, one.lr, one.num_steps, self.seeds[:count])

    def _first_length(self, reference: Recipe, known: Mapping[int, int]) -> int:
        """Return the steps of the trainings with this number of workers: some more than the reference needs."""
        first = length = max(known.values(), default=0) or FIRST_STEPS * (1 if self.target else 4)
        while self.target is not None and self._costs_s(reference, None, length, self.seeds[0]) <= self._first_s:
            run = self._run(reference, None, length, self.seeds[0])
            met = None if run is None else self._met(run)
            if met is not None:
                return max(FEWEST_STEPS, math.ceil(ROOM * met[0]))
            if run is None:  # a longer training diverges, too
                return length
            length *= LONGER
        length = length // LONGER if length > first else first
        while length >= FEWEST_STEPS and self._costs_s(reference, None, length, self.seeds[0]) > self._first_s:
            length //= LONGER
        return length

    @property
    def _first_s(self) -> float:
        """Seconds that the first training with a number of workers may take."""
        return self._first_share * self.budget.left_s

    def _rates(self, recipe: Recipe) -> tuple[float | None, ...]:
        """Return the learning rates of the rule; None: the optimizer's own."""
        return (self.lr / (1 + recipe.staleness), self.lr) if recipe.staleness else (None,)

    def _rate(self, recipe: Recipe, length: int) -> float | None:
        """Return the learning rate of a recipe; None: the optimizer's own."""
        rates = self._rates(recipe)
        rule = rates[0]
        if not self.tries:
            cost_s = sum(self._costs_s(recipe, lr, length, SEARCH_SEED) for lr in rates)
            if rule is None or cost_s + self._first_seed_s(recipe, length) > self.budget.left_s:
                return rule
            runs = {lr: self._run(recipe, lr, length, SEARCH_SEED) for lr in rates}
            return min(runs, key=lambda lr: self._badness(runs[lr], length))
        try:
            import optuna
        except ImportError:
            raise ConfigError(
                'search= needs Optuna: pip install "sgd-workbench[search]", or leave search= out'
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        middle = rule or self.lr
        most = max(SEARCH_OCTAVES, math.log2(self.lr / middle))
        search = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=min(5, self.tries)))
        for octaves in {0.0, math.log2(self.lr / middle)}:  # the rule's rate, and the given one
            search.enqueue_trial({"octaves": octaves})

        def badness(trial: Any) -> float:
            lr = middle * 2 ** trial.suggest_float("octaves", -SEARCH_OCTAVES, most)
            return self._badness(self._run(recipe, lr, length, SEARCH_SEED), length)

        for _ in range(self.tries):
            if not self._affords(recipe, length):
                break
            search.optimize(badness, n_trials=1)
        tried = [trial for trial in search.trials if trial.value is not None]
        if not tried or not math.isfinite(search.best_value):  # no minutes were left, or all diverged
            return rule
        return float(middle * 2 ** search.best_params["octaves"])

    def _badness(self, run: Run | None, length: int) -> float:
        """Return the steps to the target; if it is not reached, more than the length, by the loss at the end."""
        if run is None:
            return math.inf
        met = self._met(run)
        if met is not None:
            return met[0]
        loss = float(run.evaluations()[-1]["test_loss"])  # may be negative, as of a density
        return math.inf if math.isnan(loss) else length + 0.5 + math.atan(loss) / math.pi

    def _extend(self, recipe: Recipe, lr: float | None, length: int, seeds: Sequence[int]) -> None:
        runs = tuple(self._run(recipe, lr, length, seed) for seed in seeds)
        met = [None if run is None else self._met(run) for run in runs]
        found = Trained(
            recipe=recipe,
            lr=lr,
            runs=runs,
            steps=tuple(None if one is None else one[0] for one in met),
            brackets=tuple(None if one is None else one[1:] for one in met),
            num_steps=length,
        )
        self.done[recipe.key] = found

    def _run(self, recipe: Recipe, lr: float | None, length: int, seed: int) -> Run | None:
        """Train once, or read the training if the study's folder has it. None: it diverged."""
        known = self._known(recipe, lr, length, seed)
        if self.saved.has(known):
            return self.saved.run(known)
        words = f"training {recipe.name}, {recipe.num_workers} workers, seed {seed}, {length} steps"
        self.budget.report(words)
        every, expected_s = self._evaluate_every(recipe, length), self._seconds(recipe, length)
        begin = time.monotonic()
        try:
            run = simulate(
                recipe.algorithm,
                self.problem,
                workers=recipe.workers,
                network="free",
                compute=self.compute,
                **{**self.settings, "batch_size": recipe.batch_size, **({} if lr is None else {"lr": lr})},
                steps=length,
                seed=seed,
                evaluate_every=every,
                trace_steps=0,
                threads=self.threads,
            )
        except Diverged:
            run = None
        else:
            slower = (time.monotonic() - begin) / expected_s  # by a busy machine, codecs, messages
            if slower > STALLED and self.threads > 1:  # threads wait for each other
                self.threads = 1
            self.sample_s *= 1 + (slower - 1) / 2 if slower < 1 else slower
        self.saved.add_run(known, run)
        return run

    def _known(self, recipe: Recipe, lr: float | None, length: int, seed: int) -> dict[str, Any]:
        """Return what identifies a training in the study's folder."""
        return {"recipe": recipe.key, "lr": lr or self.lr, "steps": length, "seed": seed}

    def _met(self, run: Run) -> tuple[float, float, float] | None:
        """Return the steps to the target, and the fewest and the most that the evaluations allow."""
        if self.target is None:
            return None
        met = time_to(run, *self.target)
        return None if met is None else (met["step"] + 1.0, met["step_low"] + 1.0, met["step_high"] + 1.0)

    def _affords(self, recipe: Recipe, length: int, trainings: int = 1) -> bool:
        return trainings * self._seconds(recipe, length) <= self.budget.left_s

    def _costs_s(self, recipe: Recipe, lr: float | None, length: int, seed: int) -> float:
        """Return the seconds of a training; 0 if the study's folder has it."""
        return 0.0 if self.saved.has(self._known(recipe, lr, length, seed)) else self._seconds(recipe, length)

    def _first_seed_s(self, recipe: Recipe, length: int) -> float:
        """Return the seconds of the first seed's training, at one of the rates of the rule."""
        return min(self._costs_s(recipe, lr, length, self.seeds[0]) for lr in self._rates(recipe))

    def _seconds(self, recipe: Recipe, length: int) -> float:
        tested = self.num_tested * length / self._evaluate_every(recipe, length) / GRADIENT
        return (length * recipe.samples_per_step + tested) * self.sample_s

    def _evaluate_every(self, recipe: Recipe, length: int) -> int:
        """Return the steps between evaluations: the same for all seeds, and in a study that is continued."""
        # In evaluations of the test data.
        gradients = length * recipe.samples_per_step * GRADIENT / max(1, self.num_tested)
        return max(1, length // min(EVALUATIONS, max(FEWEST_EVALUATIONS, int(EVALUATED_SHARE * gradients))))

    def _leave_out(self, recipe: Recipe) -> None:
        self.left_out.setdefault(recipe.name, set()).add(recipe.num_workers)


def own_rate(problem: Problem, settings: Mapping[str, Any], *, late: bool) -> float:
    """Return the learning rate of the optimizer's first parameter group in a training with these settings.

    Args:
        late: whether late gradients will be trained, at other rates.

    Raises:
        ConfigError: other rates would have no effect, because the schedule sets its own.
    """
    make = settings.get("optimizer") or problem.optimizer
    with torch.random.fork_rng(devices=[]):
        optimizer = build_optimizer(make, list(problem.model().parameters()))
    if settings.get("lr") is not None:
        set_first_rates(optimizer, float(settings["lr"]))
    lr = float(optimizer.param_groups[0]["lr"])
    if late and settings.get("schedule") is not None:
        settings["schedule"](optimizer)
        check_schedule_takes_rate(optimizer, lr)
    return lr
