"""The list of laws, and a check of one algorithm against all of them."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import final

from workbench.errors import ConfigError
from workbench.laws.convergence import check_convergence
from workbench.laws.counts import check_counts
from workbench.laws.declared import (
    check_buffers,
    check_late_rank,
    check_replicas,
    check_staleness,
    check_timing,
    check_traffic,
)
from workbench.laws.identities import check_one_worker, check_unequal_batches
from workbench.laws.means import averages_parameters, check_mean, check_rest
from workbench.laws.resume import check_resume
from workbench.laws.sentences import Broken, NotTried, name_of
from workbench.naming import unknown
from workbench.program import Algorithm

SIZES = (4, 3, 2, 5, 8, 1)  # ranks, in the order in which they are tried
LIMIT_S = 60.0  # of one law, on a processor: a program may poll without an end


def check_averages(algorithm: Algorithm, num_ranks: int) -> None:
    """Averages of equal parameters are those parameters, and averages keep the mean over ranks."""
    if algorithm.asynchronous or algorithm.depends_on_timing or not averages_parameters(algorithm):
        raise NotTried("it does not average parameters in step")
    check_rest(algorithm, num_ranks)
    check_mean(algorithm, num_ranks)


@final
@dataclass(frozen=True, slots=True)
class Law:
    """One property of algorithms.

    Attributes:
        name: for the options `--only` and `--skip`.
        check: (algorithm, number of ranks) -> None; raises AssertionError with rank, step and numbers, or `NotTried`.
    """

    name: str
    check: Callable[[Algorithm, int], None]

    @property
    def statement(self) -> str:
        """The first sentence of the check's docstring."""
        return (self.check.__doc__ or "").strip().splitlines()[0]

    @property
    def description(self) -> str:
        """The rest of that docstring, in one line."""
        return " ".join(" ".join((self.check.__doc__ or "").strip().splitlines()[1:]).split())


LAWS = (
    Law("replicas", check_replicas),
    Law("staleness", check_staleness),
    Law("traffic", check_traffic),
    Law("timing", check_timing),
    Law("counts", check_counts),
    Law("unequal-batches", check_unequal_batches),
    Law("one-worker", check_one_worker),
    Law("averages", check_averages),
    Law("buffers", check_buffers),
    Law("late-rank", check_late_rank),
    Law("resume", check_resume),
    Law("convergence", check_convergence),
)


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """What one law says of an algorithm.

    Attributes:
        broken: one line, with property, rank, step, what was seen and what was expected; "" if the law holds.
        not_tried: why the law says nothing of the algorithm; "" if it does.
        details: the last lines of a traceback, if the program raised an error.
    """

    law: Law
    seconds: float
    broken: str = ""
    not_tried: str = ""
    details: str = ""


def chosen(only: Collection[str] = (), skip: Collection[str] = ()) -> list[Law]:
    """Return the laws with these names.

    Raises:
        ConfigError: no law has that name.
    """
    names = [law.name for law in LAWS]
    for name in (*only, *skip):
        if name not in names:
            raise unknown("law", name, names)
    return [law for law in LAWS if (not only or law.name in only) and law.name not in skip]


def ranks_for(algorithm: Algorithm, sizes: Sequence[int] = SIZES) -> int:
    """Return the first number of ranks on which the algorithm runs.

    Raises:
        ConfigError: it runs on none of them.
    """
    errors = []
    for num_ranks in sizes:
        try:
            algorithm.check(num_ranks)
        except ConfigError as error:
            errors.append(str(error))
        else:
            return num_ranks
    raise ConfigError(f"{algorithm} runs on none of {sorted(sizes)} ranks: {errors[0]}")


def verdict_of(law: Law, algorithm: Algorithm, num_ranks: int) -> Verdict:
    """Check one law, for at most a minute."""
    begin = time.perf_counter()
    broken = not_tried = details = ""
    try:
        with _limited(LIMIT_S):
            law.check(algorithm, num_ranks)
    except NotTried as reason:
        not_tried = str(reason)
    except Broken as error:
        broken = str(error)
    except Exception as error:  # noqa: BLE001 - the program, or a runtime that checks it, may raise anything
        broken = f"{name_of(algorithm)}: {law.statement} The program ended with {type(error).__name__}: {error}"
        details = _last_lines(error)
    return Verdict(law, time.perf_counter() - begin, " ".join(broken.split()), not_tried, details)


def check(
    algorithm: Algorithm, num_ranks: int | None = None, *, only: Collection[str] = (), skip: Collection[str] = ()
) -> Iterator[Verdict]:
    """Check an algorithm against the laws, one after the other, on simulated ranks.

    >>> from workbench.algorithms import SynchronousSGD
    >>> [(verdict.law.name, verdict.broken) for verdict in check(SynchronousSGD(), 2, only=["staleness", "counts"])]
    [('staleness', ''), ('counts', '')]

    Args:
        num_ranks: 4 by default, or another number if it does not run on 4.
        only, skip: names of laws.

    Raises:
        ConfigError: no law has that name, or the algorithm does not run on that many ranks.
    """
    laws = chosen(only, skip)
    if num_ranks is None:
        num_ranks = ranks_for(algorithm)
    else:
        algorithm.check(num_ranks)
    for law in laws:
        yield verdict_of(law, algorithm, num_ranks)


def _last_lines(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return "\n".join(f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in the block after that many seconds of this process, if it is on the main thread."""

    def end(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"it has not ended after {seconds:.0f} s of computing: does a rank poll without an end?")

    try:
        before = signal.signal(signal.SIGPROF, end)
    except ValueError:  # not the main thread: no limit
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
