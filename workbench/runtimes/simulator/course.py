"""What a run that was steered was told, and where: so that it can be run again the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from workbench.ops import EndStep, Ticket
from workbench.program import Algorithm
from workbench.runtimes.checkpoint.rank_state import begin_again
from workbench.runtimes.control.reconfigure import changed

if TYPE_CHECKING:
    from workbench.runtimes.simulator.process import SimProcess
    from workbench.runtimes.simulator.simulation import Simulation


@final
@dataclass(frozen=True, slots=True)
class Turn:
    """What took effect at one place.

    Attributes:
        step: the first step with it where ranks go in step; -1 where all programs had ended.
        changes: as they were set.
        stop: the run ended there.
        meeting: which time it was that all programs had ended, from 1 on; -1 for the next one.
    """

    step: int
    changes: tuple[dict[str, Any], ...] = ()
    stop: bool = False
    meeting: int = -1


def turns_of(info: dict[str, Any]) -> tuple[Turn, ...]:
    """From the `steering` of a `run.json`, in order."""
    places: dict[int, list[dict[str, Any]]] = {}
    for row in info.get("steering", ()):
        places.setdefault(row.get("meeting", row.get("step")), []).append(row)
    found = []
    for rows in places.values():
        step = -1 if "meeting" in rows[0] else rows[0]["step"]
        changes = tuple(row["set"] for row in rows if "set" in row and "refused" not in row)
        found.append(Turn(step, changes, any(row.get("stop") for row in rows), rows[0].get("meeting", -1)))
    return tuple(found)


@final
class Course:
    """The methods of a simulated run, one after the other.

    Args:
        algorithm: that it begins with.
        turns: where it changes.
    """

    def __init__(self, algorithm: Algorithm, num_ranks: int, turns: tuple[Turn, ...] = ()) -> None:
        self._num_ranks = num_ranks
        self._at = {turn.step: turn for turn in turns if turn.step >= 0}
        self._meetings = [turn for turn in turns if turn.step < 0]
        self._methods: list[tuple[int, Algorithm]] = [(0, algorithm)]  # first step, method
        self._rates: dict[int, float] = {}  # first step -> its learning rate, where one was set
        for turn in sorted(self._at.values(), key=lambda turn: turn.step):
            method, rate = self._turned(self._methods[-1][1], turn)
            self._methods.append((turn.step, method))
            if rate is not None:
                self._rates[turn.step] = rate

    def method_of(self, step: int) -> Algorithm:
        """With which that step is taken."""
        return next(method for first, method in reversed(self._methods) if first <= step)

    def rate_at(self, step: int) -> float | None:
        """The learning rate that was set to begin with that step, if one was."""
        return self._rates.get(step)

    def begins_at(self, step: int) -> bool:
        """Whether another method begins with that step."""
        return step in self._at and self.method_of(step) is not self.method_of(step - 1)

    def hears_at(self, meeting: int) -> bool:
        """Whether something was said the so many-th time that all programs had ended."""
        return bool(self._meetings) and self._meetings[0].meeting in (-1, meeting)

    def meet(self) -> tuple[Algorithm, float | None] | None:
        """All programs have ended: with what ranks go on, or None where the run is over."""
        if not self._meetings:
            return None
        turn = self._meetings.pop(0)
        method, rate = self._turned(self._methods[-1][1], turn)
        self._methods.append((0, method))
        return None if turn.stop else (method, rate)

    def _turned(self, method: Algorithm, turn: Turn) -> tuple[Algorithm, float | None]:
        rate = None
        for changes in turn.changes:
            method, lr = changed(method, changes, self._num_ranks, method.runtime or "simulated")
            rate = lr if lr is not None else rate
        return method, rate


def take_turn(thread: SimProcess, end: EndStep) -> bool:
    """Behind a step of ranks in step: take what was set for the next one; whether another program begins with it, as soon as all that

    is under way is complete.
    """
    simulation, worker, first = thread.simulation, thread.worker, end.step + 1
    if simulation.algorithm.asynchronous:
        return False
    rate = simulation.course.rate_at(first)
    if rate is not None:
        worker.trained.set_lr(rate)
    if not simulation.course.begins_at(first):
        return False

    def begin() -> None:
        ctx = simulation.contexts[worker.rank]
        begin_again(ctx, end)
        thread.take_up(simulation.program_of(simulation.course.method_of(first), ctx))
        simulation.clock.at(simulation.clock.now_s, thread.begin)

    when_complete(end.state, begin)
    return True


def goes_on(simulation: Simulation, threads: list[SimProcess]) -> bool:
    """Where ranks are at steps of their own, and all their programs have ended: begin the next ones, if the run went on from there."""
    simulation.num_meetings += 1
    rate = None
    if simulation.course.hears_at(simulation.num_meetings):
        found = simulation.course.meet()
        computing = simulation.workers[: simulation.algorithm.num_computing(simulation.num_workers)]
        if found is None or all(worker.last_end.step + 1 >= simulation.end_of(worker) for worker in computing):
            return False
        simulation.algorithm, rate = found
    elif not simulation.writer.at_rest():
        return False
    simulation.ending.clear()
    for thread, ctx in zip(threads, simulation.contexts, strict=True):
        worker = thread.worker
        if rate is not None:
            worker.trained.set_lr(rate)
        worker.trained.forget_words()
        ctx.stopping, ctx.num_steps = False, simulation.writer.end_of(worker)
        begin_again(ctx, worker.last_end)
        thread.take_up(simulation.program_of(simulation.algorithm, ctx))
    return True


def when_complete(state: tuple[Any, ...], action: Callable[[], None]) -> None:
    """When none of a simulated step's state is in flight any more."""
    tickets = [item for item in state if isinstance(item, Ticket) and not item.done]

    def look() -> None:
        if all(ticket.done for ticket in tickets):
            action()

    for ticket in tickets:
        ticket.runtime.append(look)
    if not tickets:
        action()
