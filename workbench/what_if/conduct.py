"""`study`: measures or reads costs, predicts steps, trains as much as the minutes allow, and returns a `Study`."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from workbench.arguments import check_whole, is_number, is_whole
from workbench.calibration.effective import Cores, Setting, make_setting
from workbench.calibration.model import Calibration
from workbench.clusters.emulated.rates import parse_rate, rate_text
from workbench.costs import Network, Stragglers
from workbench.errors import ConfigError
from workbench.problems.base import Problem
from workbench.problems.loading import ENDLESS
from workbench.program import Algorithm, Replicas
from workbench.runtimes.rank.fingerprint import code_digest, source_digest
from workbench.settings import describe
from workbench.trace.run import Run
from workbench.what_if.budget import Budget
from workbench.what_if.candidates import default_candidates, name_of
from workbench.what_if.here import HERE, Calibrated, calibration_of, gradient_here, measure_here
from workbench.what_if.recipe import Recipe, one_worker_stands_for_all, recipe_of
from workbench.what_if.results import Cell, Study
from workbench.what_if.saved import Saved
from workbench.what_if.step_time import step_time
from workbench.what_if.trainings import Trainings, own_rate

SETTINGS = ("optimizer", "lr", "schedule", "clip_norm", "ema_decay", "num_micro")
METRICS = {"loss": "test_loss", "test_loss": "test_loss", "accuracy": "accuracy"}
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
        name: keep the study in the folder `study-NAME` of the store of runs. The same question with the same name
            continues it, with new minutes.
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
    unknown = [key for key in settings if key not in SETTINGS]
    if unknown:
        raise ConfigError(f"{unknown[0]}= is not an argument of study: its settings are {', '.join(SETTINGS)}")
    if not isinstance(problem, Problem):
        raise ConfigError("problem=: give a Problem, such as Problem(model=..., loss=..., train=..., test=...)")
    size = problem.batch_size if batch_size is None else batch_size
    check_whole("batch_size", size, 1)
    check_whole("search", search, 0)
    if threads is not None:
        check_whole("threads", threads, 1)
    numbers = _wholes("workers", workers, 1)
    if calibrated is not None and (stragglers or threads is not None):
        raise ConfigError(
            "stragglers= and threads= are for costs that are measured here: leave out these, or calibrated="
        )
    if not isinstance(stragglers, list | tuple):
        raise ConfigError("stragglers=: give a list, such as [costs.Lognormal(sigma=0.1)]")
    if algorithms is not None:
        _check_algorithms(algorithms)
    goal = _goal(target, problem)
    chosen = list(range(seeds)) if is_whole(seeds) else _wholes("seeds", seeds, 0)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ConfigError(f"seeds={seeds!r}: give at least one, and each once")
    places = _networks(networks)
    asked = _asked(problem, size, settings, goal, stragglers, search, calibrated, threads)
    saved = Saved.open(name, asked)
    calibration = saved.calibration()
    if calibration is None:
        budget.say("measuring compute and messages" if calibrated is None else "reading the costs", now=True)
        calibration = (
            calibration_of(calibrated, problem, size)
            if calibrated is not None
            else measure_here(
                problem,
                size,
                optimizer=settings.get("optimizer"),
                threads=threads,
                stragglers=stragglers,
                limit_s=MEASURED_SHARE * budget.seconds,
            )
        )
        saved.set_calibration(calibration)
    sample_s, threads_here = _gradient(calibration, problem, size, settings)
    one_worker = one_worker_stands_for_all(problem, size)
    cells, left_out = _timed(calibration, algorithms, numbers, places, cores, size, one_worker, budget)
    if not cells:
        raise ConfigError(f"no candidate can run: {left_out[0]}" if left_out else "algorithms=: give at least one")
    trainings = Trainings(
        problem=problem,
        compute=calibration.compute(),
        settings=settings,
        target=goal,
        lr=own_rate(problem, settings),
        tries=search,
        seeds=chosen,
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
    budget.say("looking for reasons", now=True)
    found = Study(
        problem=problem.name,
        target=goal,
        calibration=calibration,
        cells=tuple(cells),
        trainings=tuple(trainings.done.values()),
        unknown=(*left_out, *_limits(cells, trainings, goal, calibration, len(chosen), problem)),
        problem_object=problem,
        settings={**settings, "batch_size": size},
    )
    for place in found.places:
        found.reasons(*place)
    if budget.spent_s > budget.seconds * OVERRUN:
        late = f"the study took {budget.spent_s:.0f} s instead of {budget.seconds:.0f}: this model needs more minutes"
        found = replace(found, unknown=(late, *found.unknown))
    return replace(found, seconds=budget.spent_s)


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


def _wholes(name: str, given: Any, least: int) -> list[int]:
    """Return the whole numbers of an argument, which may be one of them."""
    if is_whole(given):
        given = [given]
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(f"{name}={given!r}: give a whole number or a list of them")
    found = list(given)
    for number in found:
        check_whole(name, number, least)
    if not found:
        raise ConfigError(f"{name}={given!r}: give at least one")
    return found


def _check_algorithms(algorithms: Any) -> None:
    if isinstance(algorithms, Algorithm) or not isinstance(algorithms, Iterable):
        raise ConfigError("algorithms=: give a list, such as [SynchronousSGD(), PipeSGD(width=2)]")
    found = list(algorithms)
    for one in found:
        if not isinstance(one, Algorithm):
            raise ConfigError(f"algorithms=: {one!r} is not an algorithm, such as PipeSGD(width=2)")
    if not found:
        raise ConfigError("algorithms=: give at least one")
    names = [name_of(one) for one in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"algorithms=: two have the name {twice}: give one of them")


def _networks(networks: Any) -> list[Network | str]:
    found = (
        [networks] if isinstance(networks, str | Network) else list(networks) if isinstance(networks, Iterable) else []
    )
    for one in found:
        if not isinstance(one, str | Network):
            raise ConfigError(
                f'networks=: {one!r}: give rates ("1gbit"), names ("ethernet-10g") or costs.Network objects with equal links; '
                "`simulate` takes hosts and switches"
            )
    if not found:
        raise ConfigError(f"networks={networks!r}: give at least one rate, name or Network")
    return found


def _goal(target: tuple[str, float] | None, problem: Problem) -> tuple[str, float] | None:
    if target is None:
        return None
    names = {**METRICS, **{name: name for name in problem.named_metrics()}}
    pair = isinstance(target, tuple | list) and len(target) == 2
    if not pair or target[0] not in names or not is_number(target[1]):
        own = "".join(f', ("{name}", ...)' for name in problem.named_metrics())
        raise ConfigError(f'target={target!r}: give ("loss", 3.2) or ("accuracy", 0.9){own}')
    name, value = names[target[0]], target[1]
    if problem.test is None:
        raise ConfigError("target= is reached on test data: give the Problem test=, or leave target out")
    if not math.isfinite(value):
        raise ConfigError(f"target={target!r}: give a finite number")
    if name == "accuracy":
        if problem.correct is None:
            raise ConfigError('target=("accuracy", ...): the problem has correct=None; give ("loss", ...)')
        if not 0 < value <= 1:
            raise ConfigError(f"target={target!r}: an accuracy is from 0 to 1")
    return name, float(value)


def _asked(
    problem: Problem,
    batch_size: int,
    settings: Mapping[str, Any],
    goal: tuple[str, float] | None,
    stragglers: Sequence[Stragglers],
    search: int,
    calibrated: Any,
    threads: int | None,
) -> dict[str, Any]:
    """Return what must be the same in a study that is continued."""
    shown = {key: describe(value) if callable(value) else value for key, value in settings.items()}
    return {
        "problem": problem.name,
        "code": code_digest(
            problem.model,
            problem.loss,
            problem.optimizer,
            *(metric.function for metric in problem.named_metrics().values()),
        ),
        "parameters": problem.num_parameters(),
        "optimizer": describe(problem.optimizer),
        "data": [
            source_digest(problem.train_source()),
            None if problem.test is None else source_digest(problem.test_source()),
        ],
        "calibrated": _called(calibrated),
        "threads": threads,
        "batch_size": batch_size,
        "settings": shown,
        "target": None if goal is None else list(goal),
        "stragglers": [str(one) for one in stragglers],
        "search": search,
    }


def _called(calibrated: Any) -> str | None:
    """Return words that differ for different sources of costs."""
    if calibrated is None:
        return None
    if isinstance(calibrated, Calibration):
        return hashlib.sha256(json.dumps(calibrated.as_record(), sort_keys=True, default=str).encode()).hexdigest()[:12]
    return calibrated.id if isinstance(calibrated, Run) else str(calibrated)


def _timed(
    calibration: Calibration,
    algorithms: Sequence[Algorithm] | None,
    workers: Sequence[int],
    networks: Sequence[Network | str],
    cores: Cores,
    batch_size: int,
    one_worker: bool,
    budget: Budget,
) -> tuple[list[Cell], list[str]]:
    """Predict the step of each candidate at each place; also say which were left out."""
    cells: list[Cell] = []
    left_out: list[str] = []
    limit_s = budget.spent_s + budget.left_s * TIMED_SHARE
    late: dict[str, set[int]] = {}
    settings = [_setting(calibration, p, network, cores) for p in workers for network in networks]
    places = [(setting.workers, setting.name) for setting in settings]
    twice = next((place for place in places if places.count(place) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"{twice[0]} workers on {twice[1]}: twice among workers= and networks=; give networks different names"
        )
    num_bytes = calibration.shapes.num_bytes
    lists = [
        list(algorithms) if algorithms is not None else default_candidates(one.workers, num_bytes) for one in settings
    ]
    cannot: dict[str, str] = {}
    for number in range(max(map(len, lists))):  # the plainest at every place first
        for setting, candidates in zip(settings, lists, strict=True):
            if number >= len(candidates):
                continue
            algorithm, p = candidates[number], setting.workers
            name = name_of(algorithm)
            if number and budget.spent_s > limit_s:
                late.setdefault(name, set()).add(p)
                continue
            budget.say(f"timing {name} with {p} workers on {setting.name}")
            try:
                time = step_time(calibration, algorithm, setting)
            except ConfigError as error:
                cannot.setdefault(f"{name} with {p} workers", str(error).splitlines()[0])
                continue
            recipe = recipe_of(algorithm, p, batch_size, one_worker=one_worker)
            cells.append(
                Cell(algorithm=algorithm, workers=p, network=setting.name, setting=setting, time=time, recipe=recipe)
            )
    left_out += [f"{who} cannot run: {why}" for who, why in cannot.items()]
    cells.sort(key=lambda cell: places.index((cell.workers, cell.network)))  # stable: candidates stay in order
    if late:
        left_out.append(f"not timed everywhere, because the minutes were used up: {by_workers(late)}")
    return cells, left_out


def _setting(calibration: Calibration, workers: int, network: Network | str, cores: Cores) -> Setting:
    if isinstance(network, str) and network[:1].isdigit():
        rate = parse_rate(network)
        setting = make_setting(calibration, workers, None, rate / 8, None, cores)
        return replace(setting, name=rate_text(rate))
    return make_setting(calibration, workers, network, None, None, cores)


def _gradient(
    calibration: Calibration, problem: Problem, batch_size: int, settings: Mapping[str, Any]
) -> tuple[float, int]:
    """Return the seconds of a sample's gradient in this process, and its threads."""
    if calibration.origin.source != HERE:
        return gradient_here(problem, batch_size, optimizer=settings.get("optimizer"))
    pace = calibration.pace
    step_s = pace.forward_s.value + pace.backward_s.value + pace.update_s.value
    return step_s / batch_size, calibration.host.threads


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
    return algorithm.replicas == Replicas.EVERY_STEP and (
        not algorithm.requires.servers or algorithm.max_staleness == 0
    )


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


def _limits(
    cells: Sequence[Cell],
    trainings: Trainings,
    goal: tuple[str, float] | None,
    calibration: Calibration,
    num_seeds: int,
    problem: Problem,
) -> list[str]:
    """Return what the study does not know, in sentences."""
    words = []
    if trainings.left_out:
        words.append(f"not trained, because the minutes were used up: {by_workers(trainings.left_out)}")
    if problem.test is None:
        words.append("without test data nothing was trained, so nobody knows how many steps an algorithm needs")
    few: dict[str, set[int]] = {}
    for trained in trainings.done.values():
        who = f"{trained.recipe.name} ({trained.recipe.num_workers} workers)"
        diverged = sum(run is None for run in trained.runs)
        missed = sum(steps is None for steps in trained.steps) - diverged
        rate = "" if trained.lr is None else f" at a learning rate of {trained.lr:.3g}"
        if diverged:
            words.append(f"{who}: {diverged} of {len(trained.runs)} trainings diverged{rate}")
        if goal is not None and missed:
            words.append(
                f"{who}: {missed} of {len(trained.runs)} trainings did not reach the target in {trained.num_steps} "
                f"steps{rate}"
            )
        if len(trained.runs) < num_seeds:
            few.setdefault(trained.recipe.name, set()).add(trained.recipe.num_workers)
    if few:
        words.append(f"fewer than {num_seeds} seeds, because the minutes were used up: {by_workers(few)}")
    if any(trained.recipe.staleness and not trainings.tries for trained in trainings.done.values()):
        words.append(
            "rates were not searched: late gradients have the better of lr and lr / (1 + staleness) (search=6 searches)"
        )
    if any(cell.time.how == "closed form" for cell in cells):
        words.append("steps with many messages are closed forms, in which all workers are in step")
    return [*words, *(_plain_words(note) for note in calibration.notes)]
