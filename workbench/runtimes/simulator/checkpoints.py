"""Checkpoints of a simulated run: of each worker at the end of a step, or of all workers at a sync point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from workbench.ops import EndStep, State, Ticket
from workbench.program import Algorithm, Context, leaves
from workbench.runtimes.checkpoint.rank_state import take_checkpoint
from workbench.runtimes.checkpoint.staging import StagingBuffers
from workbench.runtimes.control.generations import needs_sync_point, sync_point_after
from workbench.runtimes.simulator.state import SimProcess
from workbench.runtimes.simulator.worker import SimWorker


def when_complete(state: State | None, action: Callable[[], None]) -> None:
    """Call `action` when no ticket of a step's state is in flight any more."""
    in_flight = [item for item in leaves(state) if isinstance(item, Ticket) and not item.done]

    def one_is_done() -> None:
        if all(ticket.done for ticket in in_flight):
            action()

    for ticket in in_flight:
        ticket.runtime.append(one_is_done)
    if not in_flight:
        action()


@final
class SimCheckpoints:
    """The checkpoints of a simulation.

    Args:
        every: a checkpoint is kept after so many steps; None for none.
        contexts: of the workers' programs.
        end_of: how many steps a worker takes in this run.

    Attributes:
        kept: step -> what each worker needs to continue after it.
        at_stop: what each worker needs to continue from where the run was stopped.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        every: int | None,
        workers: list[SimWorker],
        contexts: list[Context],
        end_of: Callable[[SimWorker], int],
    ) -> None:
        self._algorithm, self._workers, self._contexts, self._end_of = algorithm, workers, contexts, end_of
        self._every = every
        self._all_meet = needs_sync_point(algorithm)
        self._sync_point: int | None = None  # the step before which asynchronous workers meet next
        self.kept: dict[int, list[dict[str, Any]]] = {}
        self.at_stop: list[dict[str, Any]] = [{} for _ in workers]

    def begin(self) -> None:
        """Set the first sync point, when the contexts are made."""
        self._sync_after(max(ctx.first_step for ctx in self._contexts))
        for worker, ctx in zip(self._workers, self._contexts, strict=True):
            ctx.num_steps = self.end_of(worker)

    def end_of(self, worker: SimWorker) -> int:
        """How many steps a worker takes before its program ends."""
        end = self._end_of(worker)
        return end if self._sync_point is None else min(self._sync_point, end)

    def _sync_after(self, step: int) -> None:
        self._sync_point = None
        if self._every is not None and self._all_meet:
            end = self._end_of(self._workers[0])
            found = sync_point_after(step, self._every, end)
            self._sync_point = found if found < end else None

    def at_sync_point(self) -> bool:
        """All programs have ended: return True if that was for a checkpoint, and keep it."""
        if self._sync_point is None:
            return False
        for worker in self._workers:
            self.keep(worker, worker.last_end, self._sync_point - 1)
        self._sync_after(self._sync_point)
        return True

    def keep(self, worker: SimWorker, end: EndStep, step: int | None = None) -> None:
        """Keep what the worker needs to continue from there, as part of a step's checkpoint, or (None) for a stop."""
        memory = self._contexts[worker.rank].memory
        saved = take_checkpoint(self._algorithm, worker.trained, len(self._workers), end, memory, worker.sampler)
        kept = self.at_stop if step is None else self.kept.setdefault(step, [{} for _ in self._workers])
        kept[worker.rank] = StagingBuffers().take(saved)

    def waits_for_checkpoint(self, process: SimProcess, end: EndStep) -> bool:
        """Keep a checkpoint if one is due after this step; return True if the program waits until its sums are complete."""
        step = end.step
        due = self._every is not None and (step + 1) % self._every == 0 and step + 1 < self._workers[0].num_steps
        if self._all_meet or not due:
            return False
        when_complete(end.state, lambda: self.keep(process.worker, end, step))
        if all(item.done for item in leaves(end.state) if isinstance(item, Ticket)):
            return False
        when_complete(end.state, process.resume)
        return True
