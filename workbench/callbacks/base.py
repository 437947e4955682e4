"""Callbacks: told of each step and evaluation of a run, with the numbers of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, final

from workbench.trace.run import Run

Row = Mapping[str, Any]


class Callback:
    """Told what happens in a run; give it as `Settings(callbacks=[...])`. Subclasses define what they need.

    On real ranks a thread of rank 0 reads the run's records and calls it, twice a second. So it does not hold up the
    training, and may be a moment late. After a simulation it is called for all that happened. If it asks to stop after
    a step, it receives no later row, and the simulation is made again up to that step. An exception in a callback ends
    this callback, not the run: it is printed, and noted in the run's record.

    Asynchronous ranks usually leave their evaluations to the end of the run, where none of them waits. If a callback
    has `on_evaluation` and may stop the run, rank 0 makes them between its steps. If servers are on other ranks too,
    the evaluations stay at the end.

    Attributes:
        may_stop: whether a method may return True. A callback that only logs says False.
    """

    may_stop: ClassVar[bool] = True

    def on_begin(self, run: Run) -> None:
        """The run begins: `run.info` has its algorithm, problem and settings."""

    def on_step(self, row: Row) -> bool | None:
        """All ranks have ended a step: a row of `Run.steps`. Return True to stop the run, with a checkpoint."""

    def on_evaluation(self, row: Row) -> bool | None:
        """The model was evaluated: a row of `Run.evaluations`. Return True to stop the run, with a checkpoint."""

    def on_end(self, run: Run) -> None:
        """The run has ended: `run.info["status"]` is finished, stopped or failed."""


def stops_at_evaluations(callbacks: Sequence[Callback]) -> bool:
    """Return True if one of the callbacks may stop a run because of an evaluation."""
    return any(item.may_stop and type(item).on_evaluation is not Callback.on_evaluation for item in callbacks)


@final
class Notifier:
    """Calls callbacks for what is new in a run.

    Args:
        callbacks: what to call.
        note: called with the text of an exception in a callback.
    """

    def __init__(self, callbacks: Sequence[Callback], note: Callable[[str], None]) -> None:
        self._callbacks, self._note = list(callbacks), note
        self._begun = False
        self._taken: dict[int, int] = {}  # rank -> number of its rows that were told
        self._step = -1  # the last step that was told
        self._newest: dict[int, dict[str, Any]] = {}  # rank -> its row of the last step that was told

    def update(self, run: Run, *, ended: bool = False) -> bool:
        """Tell what is new: steps that every rank has ended, complete evaluations, and at the end all the rest.

        Return True if a callback asks to stop the run.
        """
        stop = self._tell(run, ended=ended, until_stop=False)
        if ended:
            self.end(run)
        return stop is not None

    def tell_simulated(self, run: Run) -> int | None:
        """Tell a simulated run, up to the step after which a callback asks to stop. Return that step.

        None: the run ends as it is. `end` comes after it.
        """
        stop = self._tell(run, ended=True, until_stop=True)
        return stop if stop is not None and stop < run.info["result"]["last_step"] else None

    def end(self, run: Run) -> None:
        """Tell that the run has ended."""
        self._call("on_end", run)
        self._callbacks.clear()

    def _tell(self, run: Run, *, ended: bool, until_stop: bool) -> int | None:
        """Tell what is new. Return the first step after which a callback asks to stop; None if none does."""
        if not self._begun and self._callbacks:
            self._begun = True
            self._call("on_begin", run)
        new = {rank: rows[self._taken.get(rank, 0) :] for rank, rows in run.metrics.items()}
        if not ended:
            reached = {rank: rows[-1]["step"] if rows else -1 for rank, rows in run.metrics.items()}
            there = run.ranks_at(max(reached.values(), default=-1), set(reached))
            whole = min((step for rank, step in reached.items() if rank in there), default=-1)
            new = {rank: _before(rows, whole) for rank, rows in new.items()}
        # A rank without a new row counts with the bytes of its last one.
        found = replace(
            run, metrics={rank: [*filter(None, [self._newest.get(rank)]), *rows] for rank, rows in new.items()}
        )
        evaluations = {rank: [row for row in rows if "evaluation" in row] for rank, rows in new.items()}
        late = any(row["step"] <= self._step for rows in evaluations.values() for row in rows)
        told = [("on_step", row) for row in found.steps() if row["step"] > self._step]
        self._step = max((row["step"] for _, row in told), default=self._step)
        if late:  # made after the training: other ranks' bytes at that time are in rows that were told before
            steps = {rank: [row for row in rows if "evaluation" not in row] for rank, rows in run.metrics.items()}
            found = replace(run, metrics={rank: [*rows, *evaluations[rank]] for rank, rows in steps.items()})
        told += [("on_evaluation", row) for row in found.evaluations()]
        for rank, rows in new.items():
            self._taken[rank] = self._taken.get(rank, 0) + len(rows)
            for row in rows:
                if "evaluation" not in row:
                    self._newest[rank] = row
        stop: int | None = None
        for name, row in sorted(told, key=lambda item: (item[1]["step"], item[0] != "on_step")):
            if self._call(name, row) and stop is None:
                stop = row["step"]
            if stop is not None and until_stop:
                break
        return stop

    def _call(self, name: str, given: Any) -> bool:
        """Call all callbacks; one that fails is left out from then on. Return True if one returns True."""
        stops = False
        for callback in list(self._callbacks):
            try:
                stops |= getattr(callback, name)(given) is True
            except Exception as error:  # noqa: BLE001 - of the user's code, which must not end the run
                self._callbacks.remove(callback)
                kind = type(callback).__name__
                self._note(f"callback {kind}.{name} failed, and is not called again: {type(error).__name__}: {error}")
        return stops


def _before(rows: Sequence[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """The first rows, up to the first one of this step or a later one."""
    for place, row in enumerate(rows):
        if row["step"] >= step:
            return list(rows[:place])
    return list(rows)
