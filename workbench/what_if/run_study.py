"""`study`: measures or reads costs, predicts steps, trains as much as the minutes allow, and returns a `Study`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from workbench.analysis.table import num_bytes, seconds
from workbench.arguments import is_number
from workbench.calibration.effective import Cores, Setting, make_setting
from workbench.calibration.model import Calibration
from workbench.clusters.emulated.rates import rate_text
from workbench.content import UnreadableContent
from workbench.costs import Network, Stragglers
from workbench.errors import ConfigError
from workbench.problems.base import Problem
from workbench.problems.loading import ENDLESS
from workbench.program import Algorithm
from workbench.what_if.budget import Budget
from workbench.what_if.candidates import default_candidates, name_of
from workbench.what_if.measure import HERE, Calibrated, calibration_of, gradient_here, measure_here
from workbench.what_if.question import Question, line_rate, make_question
from workbench.what_if.recipe import Recipe, one_worker_stands_for_all, recipe_of
from workbench.what_if.results import Cell, Study
from workbench.what_if.saved import Saved
from workbench.what_if.step_time import step_time
from workbench.what_if.trainings import Trainings, own_rate

TIMED_SHARE = 0.5  # of the minutes that are left, for the times of steps
NOTES = {
    "latency_s cannot be separated": "the costs are of messages of one size: their latency is taken as 0",
    "gamma alone": "the additions of the library's own sums are part of the time of their bytes",
    "by the probe": "the handling of messages was measured apart",
}
MEASURED_SHARE = 0.1  # of the minutes, for the compute
OVERRUN = 1.1  # of the minutes, from which the answer says so
MOST_MINUTES = 10_000
COUNTED = 64  # samples of test data that are read at once, where only reading tells how many there are
RESERVED_SHARE, RESERVED_S = 0.1, 8.0  # of the minutes, and at most, for the reasons, which simulate a few steps more


def study(
    problem: Problem,
    *,
    algorithms: Sequence[Algorithm] | None = None,
    calibrated: Calibrated | None = None,
    networks: Sequence[Network | str] | Network | str = ("1gbit",),
    workers: Sequence[int] | int = (4, 16),
    target: tuple[str, float] | None = None,
    seeds: int | Sequence[int] = 5,
    minutes: float = 2.0,
    batch_size: int | None = None,
    search: int = 0,
    stragglers: Sequence[Stragglers] = (),
    threads: int | None = None,
    cores: Cores = "own",
    name: str | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Study:
    """Ask which algorithm reaches a target first, for your model, before you rent the machines.

    The time to a target is the number of steps, from trainings with real gradients, times the seconds of a step, from a
    cost model. Both have intervals. What the minutes do not allow is left out, and the answer says so: first further
    seeds, then trainings. Without trainings, algorithms are compared by the time of a step.

    Args:
        problem: the model, the loss and the data, your own or one of `workbench.problems`.
        algorithms: the candidates; None: a dozen, with and without codecs.
        calibrated: where the costs come from: a run, its name, torch.profiler's traces of a DDP loop, a `Calibration`
            or its file. None: the problem's compute and the handling of messages are measured on this machine.
        networks: rates ("1gbit"), names in `workbench.costs` ("ethernet-10g") or networks, of which
            latency and bandwidth count.
        workers: numbers of workers, each on a separate host.
        target: ("loss", 3.2), ("accuracy", 0.9) or one of the problem's metrics, on the test data. None: only step
            times are compared; all train equally long.
        seeds: number of trainings of each kind, with the seeds 0, 1, ...; or the seeds.
        minutes: limit of the whole study.
        batch_size: samples of a worker in a step; None: the problem's.
        search: trainings that search the learning rate of each recipe (needs Optuna). 0: late gradients have the better
            of lr and lr / (1 + staleness), all others lr.
        stragglers: of each worker, if the costs are measured here.
        threads: of a worker, if the costs are measured here; None: one, or all cores of this machine, whichever is
            faster.
        cores: "own": each worker has its own cores. A number: all workers share them. "measured": as in `calibrated`.
        name: keep the study in the folder `study-NAME` of the store of runs, and its trainings as runs of this store.
            The same question with the same name continues it, with new minutes. Functions and objects of the question
            count by their content; data that a data set loads, by eight items. If some content cannot be read, such as
            a compiled function, nothing is kept or reused, and the answer says so.
        quiet: print no progress.
        settings: of the trainings: optimizer, lr, schedule, clip_norm, ema_decay, num_micro, as in `Settings`.

    Returns:
        The answer: print it, or show it in a notebook. Its methods draw figures and check it on real ranks.

    Raises:
        ConfigError: an argument cannot be used; the message says what to give.

    Example:
        >>> import workbench as wb
        >>> found = wb.study(
        ...     wb.problems.digits_softmax(),
        ...     algorithms=[wb.SynchronousSGD(), wb.LocalSGD(every=4)],
        ...     calibrated=wb.simulate(wb.SynchronousSGD(), wb.problems.digits_softmax(), workers=2, steps=12, network="wan-100m",
        ...         compute=wb.costs.Compute(forward_s=1e-3, backward_s=2e-3)),
        ...     networks="10mbit", workers=4, target=("accuracy", 0.8), seeds=2, quiet=True)
        >>> found.best().name, found.best().trained.reached
        ('LocalSGD(every=4)', True)
    """
    budget = Budget(_minutes(minutes) * 60, quiet)
    question = make_question(
        problem,
        algorithms=algorithms,
        calibrated=calibrated,
        networks=networks,
        workers=workers,
        target=target,
        seeds=seeds,
        batch_size=batch_size,
        search=search,
        stragglers=stragglers,
        threads=threads,
        settings=settings,
    )
    saved, unkept = _saved(name, question)
    calibration = _calibration(question, saved, budget)
    sample_s, threads_here = _gradient(question, calibration)
    cells, left_out = _time_candidates(question, calibration, _places(question, calibration, cores), budget)
    if not cells:
        raise ConfigError(f"no candidate can run: {left_out[0]}" if left_out else "algorithms=: give at least one")
    trainings = Trainings(
        problem=problem,
        compute=calibration.compute(),
        settings=settings,
        target=question.target,
        lr=own_rate(problem, settings, late=any(cell.recipe.staleness for cell in cells)),
        tries=search,
        seeds=question.seeds,
        budget=Budget(max(0.0, budget.left_s - min(RESERVED_S, RESERVED_SHARE * budget.seconds)), quiet),
        saved=saved,
        threads=threads_here,
        sample_s=sample_s,
        num_tested=_num_tested(problem),
    )
    if problem.test is not None:
        recipes, slower = _worth_training(cells)
        trainings.train(recipes)
        left_out += slower
    cells = [replace(cell, trained=trainings.done.get(cell.recipe.key)) for cell in cells]
    budget.report("looking for reasons", now=True)
    found = Study(
        problem=problem.name,
        target=question.target,
        calibration=calibration,
        cells=tuple(cells),
        trainings=tuple(trainings.done.values()),
        unknown=(*unkept, *left_out, *_limits(question, calibration, cells, trainings)),
        problem_object=problem,
        settings={**settings, "batch_size": question.batch_size},
    )
    for place in found.places:
        found.reasons(*place)
    if budget.spent_s > budget.seconds * OVERRUN:
        late = f"the study took {budget.spent_s:.0f} s instead of {budget.seconds:.0f}: this model needs more minutes"
        found = replace(found, unknown=(late, *found.unknown))
    return replace(found, seconds=budget.spent_s)


def _saved(name: str | None, question: Question) -> tuple[Saved, list[str]]:
    """Return the trainings that are kept, and why a named study keeps none if something in it cannot be read."""
    if name is None:
        return Saved(), []
    try:
        return Saved.open(name, question.as_record()), []
    except UnreadableContent as error:
        why = f"{error} cannot be read, so a later call could not tell whether it asks the same"
        return Saved(), [f"nothing was kept or reused under the name {name}: the content of {why}"]


def _calibration(question: Question, saved: Saved, budget: Budget) -> Calibration:
    """Return the costs: those with which the study began, the given ones, or measured ones."""
    calibration = saved.calibration()
    if calibration is not None:
        return calibration
    if question.calibrated is not None:
        budget.report("reading the costs", now=True)
        calibration = calibration_of(question.calibrated, question.problem, question.batch_size)
    else:
        budget.report("measuring compute and messages", now=True)
        calibration = measure_here(
            question.problem,
            question.batch_size,
            optimizer=question.settings.get("optimizer"),
            threads=question.threads,
            stragglers=question.stragglers,
            limit_s=MEASURED_SHARE * budget.seconds,
        )
    saved.set_calibration(calibration)
    return calibration


def _plain_words(note: str) -> str:
    """Return a calibration's note without the names of its fitted numbers."""
    for name, words in NOTES.items():
        if name in note:
            return words
    return note


def _minutes(minutes: float) -> float:
    if not is_number(minutes) or not 0 < minutes <= MOST_MINUTES:
        raise ConfigError(f"minutes={minutes!r}: give a number above 0, {MOST_MINUTES} at most")
    return float(minutes)


def _places(question: Question, calibration: Calibration, cores: Cores) -> list[Setting]:
    """Return the conditions of each number of workers on each network.

    Raises:
        ConfigError: two have the same workers and name.
    """
    settings = [_setting(calibration, p, network, cores) for p in question.workers for network in question.networks]
    places = [(setting.workers, setting.name) for setting in settings]
    twice = next((place for place in places if places.count(place) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"{twice[0]} workers on {twice[1]}: twice among workers= and networks=; give networks different names"
        )
    return settings


def _time_candidates(
    question: Question, calibration: Calibration, settings: Sequence[Setting], budget: Budget
) -> tuple[list[Cell], list[str]]:
    """Predict the step of each candidate at each place, the plainest candidates first; also say which were left out."""
    size = calibration.shapes.num_bytes
    lists = [
        question.algorithms if question.algorithms is not None else default_candidates(setting.workers, size)
        for setting in settings
    ]
    turns = [
        (number, setting, algorithm)
        for number, row in enumerate(zip_longest(*lists))
        for setting, algorithm in zip(settings, row, strict=True)
        if algorithm is not None
    ]
    one_worker = one_worker_stands_for_all(question.problem, question.batch_size)
    limit_s = budget.spent_s + budget.left_s * TIMED_SHARE
    cells: list[Cell] = []
    late: dict[str, set[int]] = {}
    cannot: dict[str, str] = {}
    for number, setting, algorithm in turns:
        name, p = name_of(algorithm), setting.workers
        if number and budget.spent_s > limit_s:
            late.setdefault(name, set()).add(p)
            continue
        budget.report(f"timing {name} with {p} workers on {setting.name}")
        try:
            time = step_time(calibration, algorithm, setting)
        except ConfigError as error:
            cannot.setdefault(f"{name} with {p} workers", str(error).splitlines()[0])
            continue
        recipe = recipe_of(algorithm, p, question.batch_size, one_worker=one_worker)
        cells.append(
            Cell(algorithm=algorithm, workers=p, network=setting.name, setting=setting, time=time, recipe=recipe)
        )
    places = [(setting.workers, setting.name) for setting in settings]
    cells.sort(key=lambda cell: places.index((cell.workers, cell.network)))  # stable: candidates stay in order
    left_out = [f"{who} cannot run: {why}" for who, why in cannot.items()]
    if late:
        left_out.append(f"not timed everywhere, because the minutes were used up: {by_workers(late)}")
    return cells, left_out


def _setting(calibration: Calibration, workers: int, network: Network | str, cores: Cores) -> Setting:
    if isinstance(network, str) and network[:1].isdigit():
        rate = line_rate(network)
        setting = make_setting(calibration, workers, None, rate / 8, None, cores)
        return replace(setting, name=rate_text(rate))
    return make_setting(calibration, workers, network, None, None, cores)


def _gradient(question: Question, calibration: Calibration) -> tuple[float, int]:
    """Return the seconds of a sample's gradient in this process, and its threads."""
    if calibration.origin.source != HERE:
        return gradient_here(question.problem, question.batch_size, optimizer=question.settings.get("optimizer"))
    pace = calibration.pace
    step_s = pace.forward_s.value + pace.backward_s.value + pace.update_s.value
    return step_s / question.batch_size, calibration.host.threads


def _num_tested(problem: Problem) -> int:
    tested = problem.test_source()
    if tested is None:
        return 0
    return tested.num_samples if tested.num_samples < ENDLESS else sum(number for _, number in tested.batches(COUNTED))


def _worth_training(cells: Sequence[Cell]) -> tuple[list[Recipe], list[str]]:
    """Return the recipes to train, exact gradients first, then by the time of a step; and what is not worth it.

    An algorithm that makes one update a step, as exact ones do, but of other gradients, is worth it only if its step is
    shorter than that of every exact one, somewhere. Others (asynchronous servers, local steps) may need fewer steps.
    """
    exact: dict[tuple[int, str], float] = {}
    for cell in cells:
        if cell.recipe.name == "exact":
            place = (cell.workers, cell.network)
            exact[place] = min(exact.get(place, math.inf), cell.time.step_s)
    found: dict[str, tuple[float, Recipe]] = {}
    slower: dict[str, set[int]] = {}
    for cell in cells:
        gain = cell.time.step_s / exact.get((cell.workers, cell.network), cell.time.step_s)
        plain = cell.recipe.name == "exact"
        if not plain and gain >= 1 and (cell.workers, cell.network) in exact and _updates_once(cell.algorithm):
            slower.setdefault(cell.recipe.name, set()).add(cell.workers)
            continue
        rank = -1.0 if plain else round(gain, 1)  # of equal ones the plainer first
        if cell.recipe.key not in found or rank < found[cell.recipe.key][0]:
            found[cell.recipe.key] = (rank, cell.recipe)
    trained = {(recipe.name, recipe.num_workers) for _, recipe in found.values()}
    never = {name: {p for p in numbers if (name, p) not in trained} for name, numbers in slower.items()}
    said = by_workers({name: numbers for name, numbers in never.items() if numbers})
    words = [f"not trained, because a step takes longer than one of an exact algorithm: {said}"] if said else []
    return [recipe for _, recipe in sorted(found.values(), key=lambda item: item[0])], words


def _updates_once(algorithm: Algorithm) -> bool:
    """Whether all workers together make one update in each step."""
    return algorithm.replicas.equal_parameters and (not algorithm.requires.servers or algorithm.max_staleness == 0)


def by_workers(names: Mapping[str, set[int]]) -> str:
    """Return names with their numbers of workers, as text.

    >>> by_workers({"late by 1": {16}, "late by 2": {16}, "linear8": {4, 16}})
    'late by 1 and late by 2 (16 workers); linear8 (4 and 16 workers)'
    >>> by_workers({"exact": {1}})
    'exact (1 worker)'
    """
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, numbers in names.items():
        groups.setdefault(tuple(sorted(numbers)), []).append(name)
    return "; ".join(
        f"{_and(group)} ({_and([str(number) for number in numbers])} worker{'s' if numbers != (1,) else ''})"
        for numbers, group in groups.items()
    )


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _limits(question: Question, calibration: Calibration, cells: Sequence[Cell], trainings: Trainings) -> list[str]:
    """Return what the study does not know, in sentences."""
    words = []
    if trainings.left_out:
        words.append(f"not trained, because the minutes were used up: {by_workers(trainings.left_out)}")
    late = dict[str, set[int]]()
    for cell in cells:
        if cell.recipe.staleness and cell.workers in trainings.left_out.get(cell.recipe.name, ()):
            late.setdefault(cell.recipe.name, set()).add(cell.workers)
    if late:
        words.append(
            f"late gradients that were not trained may diverge at a learning rate of {trainings.lr:.3g}, with momentum "
            f"above all: {by_workers(late)}; begin with lr / (1 + staleness), or give more minutes"
        )
    if question.problem.test is None:
        words.append("without test data nothing was trained, so nobody knows how many steps an algorithm needs")
    num_seeds = len(question.seeds)
    few, alone = dict[str, set[int]](), dict[str, set[int]]()
    for trained in trainings.done.values():
        who = f"{trained.recipe.name} ({trained.recipe.num_workers} workers)"
        diverged = sum(run is None for run in trained.runs)
        missed = sum(steps is None for steps in trained.steps) - diverged
        rate = "" if trained.lr is None else f" at a learning rate of {trained.lr:.3g}"
        if diverged:
            words.append(f"{who}: {diverged} of {len(trained.runs)} trainings diverged{rate}")
        if question.target is not None and missed:
            words.append(
                f"{who}: {missed} of {len(trained.runs)} trainings did not reach the target in {trained.num_steps} "
                f"steps{rate}"
            )
        if len(trained.runs) < num_seeds:
            few.setdefault(trained.recipe.name, set()).add(trained.recipe.num_workers)
        if question.target is not None and len(trained.runs) == 1 and trained.reached:
            alone.setdefault(trained.recipe.name, set()).add(trained.recipe.num_workers)
    if alone:
        words.append(f"trained with one seed, so the interval lacks the difference between seeds: {by_workers(alone)}")
    if few:
        words.append(f"fewer than {num_seeds} seeds, because the minutes were used up: {by_workers(few)}")
    if any(trained.recipe.staleness and not trainings.tries for trained in trainings.done.values()):
        words.append(
            "rates were not searched: late gradients have the better of lr and lr / (1 + staleness) (search=6 searches)"
        )
    if any(cell.time.how == "closed form" for cell in cells):
        words.append("steps with many messages are closed forms, in which all workers are in step")
    return [*words, _costs(calibration), *(_plain_words(note) for note in calibration.notes)]


def _costs(calibration: Calibration) -> str:
    """Return the compute of a step, and the size of a gradient, in a sentence."""
    pace = calibration.pace
    forward_s, backward_s, update_s = (part.value for part in (pace.forward_s, pace.backward_s, pace.update_s))
    return (
        f"a step computes {seconds(forward_s + backward_s + update_s)} (forward {seconds(forward_s)}, backward "
        f"{seconds(backward_s)}, update {seconds(update_s)}); a gradient has {num_bytes(calibration.shapes.num_bytes)}"
    )
