"""What a study asks: the checked arguments of `study`, and the record by which a continued study knows them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, final

from workbench.arguments import check_whole, is_number, is_whole
from workbench.clusters.emulated.rates import RATES
from workbench.content import content_digest
from workbench.costs import Network, Stragglers
from workbench.errors import ConfigError
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.runtimes.rank.fingerprint import source_digest
from workbench.what_if.candidates import name_of
from workbench.what_if.measure import Calibrated, content_of

SETTINGS = ("optimizer", "lr", "schedule", "clip_norm", "ema_decay", "num_micro")
EXTENDED = ("algorithms", "networks", "workers", "seeds")  # a continued study may have others: each training names them
METRICS = {"loss": "test_loss", "test_loss": "test_loss", "accuracy": "accuracy"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The arguments of `study`, checked. Made by `make_question`.

    Attributes:
        target: column of an evaluation, and the value to reach; None: only step times are compared.
    """

    problem: Problem
    batch_size: int
    algorithms: tuple[Algorithm, ...] | None
    calibrated: Calibrated | None
    networks: tuple[Network | str, ...]
    workers: tuple[int, ...]
    target: tuple[str, float] | None
    seeds: tuple[int, ...]
    search: int
    stragglers: tuple[Stragglers, ...]
    threads: int | None
    settings: Mapping[str, Any]

    def as_record(self) -> dict[str, Any]:
        """Return what must be the same in a study that is continued, by name, as values for JSON.

        These are all fields of the question, of its problem and of its settings, except `EXTENDED`. Objects count by
        their content (`content_digest`).

        Raises:
            UnreadableContent: an object whose content cannot be read; the algorithms count, too.
        """
        parts = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in EXTENDED}
        problem, settings = parts.pop("problem"), parts.pop("settings")
        parts |= {f"problem.{item.name}": getattr(problem, item.name) for item in fields(problem)}
        parts |= {f"settings.{name}": value for name, value in settings.items()}
        if self.calibrated is not None:
            parts["calibrated"] = content_of(self.calibrated)
        for name, source in (("train", problem.train_source()), ("test", problem.test_source())):
            parts[f"problem.{name}"] = (parts[f"problem.{name}"], source_digest(source, whole=True))
        content_digest(self.algorithms)
        return {name: _recorded(value) for name, value in parts.items()}


def _recorded(value: Any) -> Any:
    """Return a number or a text itself, and anything else as its digest."""
    return value if isinstance(value, int | float | str | None) else content_digest(value)


def make_question(
    problem: Problem,
    *,
    algorithms: Sequence[Algorithm] | None,
    calibrated: Calibrated | None,
    networks: Sequence[Network | str] | Network | str,
    workers: Sequence[int] | int,
    target: tuple[str, float] | None,
    seeds: int | Sequence[int],
    batch_size: int | None,
    search: int,
    stragglers: Sequence[Stragglers],
    threads: int | None,
    settings: Mapping[str, Any],
) -> Question:
    """Check the arguments of `study`, whose docstring describes them.

    Raises:
        ConfigError: an argument cannot be used; the message says what to give.
    """
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
    candidates = None if algorithms is None else _algorithms(algorithms)
    goal = _target(target, problem)
    chosen = list(range(seeds)) if is_whole(seeds) else _wholes("seeds", seeds, 0)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ConfigError(f"seeds={seeds!r}: give at least one, and each once")
    return Question(
        problem=problem,
        batch_size=size,
        algorithms=candidates,
        calibrated=calibrated,
        networks=tuple(_networks(networks)),
        workers=tuple(numbers),
        target=goal,
        seeds=tuple(chosen),
        search=search,
        stragglers=tuple(stragglers),
        threads=threads,
        settings=settings,
    )


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


def _algorithms(algorithms: Any) -> tuple[Algorithm, ...]:
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
    return tuple(found)


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


def line_rate(given: str | float) -> float:
    """Return bits per second of a rate such as "200gbit": any above 0, because nothing is emulated.

    >>> line_rate("200gbit"), line_rate("2.5 Gbit/s")
    (200000000000.0, 2500000000.0)

    Raises:
        ConfigError: `given` is not a rate.
    """
    if is_number(given):
        rate = float(given)
    else:
        found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]+?)(?:/s)?", str(given).strip().lower())
        rate = float(found[1]) * RATES.get(found[2], 0.0) if found else 0.0
    if not 0 < rate < math.inf:
        raise ConfigError(f"{given!r} is not a rate: write 1gbit or 100mbit, in bits a second")
    return rate


def _target(target: tuple[str, float] | None, problem: Problem) -> tuple[str, float] | None:
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
