"""Checkpoints of a simulated run: kept by each worker behind a step, or where all have come to rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from workbench.ops import EndStep, State, Ticket
from workbench.program import leaves
from workbench.runtimes.checkpoint.rank_state import take_checkpoint
from workbench.runtimes.checkpoint.staging import StagingBuffers
from workbench.runtimes.control.generations import needs_sync_point, sync_point_after
from workbench.runtimes.simulator.worker import SimWorker

if TYPE_CHECKING:
    from workbench.runtimes.simulator.process import SimProcess
    from workbench.runtimes.simulator.simulation import Simulation


def when_complete(state: State | tuple[Any, ...], action: Callable[[], None]) -> None:
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
    """A simulation's.

    Attributes:
        kept: step -> what each worker needs to go on behind it.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.kept: dict[int, list[dict[str, Any]]] = {}
        self._rest: int | None = None  # the step before which ranks at steps of their own come to rest next

    def begin(self) -> None:
        """Contexts are made: say until where the workers go at first."""
        simulation = self._simulation
        self._rest_from(max(ctx.first_step for ctx in simulation.contexts))
        for worker, ctx in zip(simulation.workers, simulation.contexts, strict=True):
            ctx.num_steps = self.end_of(worker)

    def end_of(self, worker: SimWorker) -> int:
        """Until where a worker goes next."""
        end = self._simulation.end_of(worker)
        return end if self._rest is None else min(self._rest, end)

    def _rest_from(self, step: int) -> None:
        simulation, self._rest = self._simulation, None
        every = simulation.settings.checkpoint_every
        if every is not None and needs_sync_point(simulation.algorithm):
            end = simulation.end_of(simulation.workers[0])
            rest = sync_point_after(step, every, end)
            self._rest = rest if rest < end else None

    def at_rest(self) -> bool:
        """All programs have ended: whether that was for a checkpoint, which is kept then."""
        if self._rest is None:
            return False
        for worker in self._simulation.workers:
            self.keep(worker, worker.last_end, self._rest - 1)
        self._rest_from(self._rest)
        return True

    def keep(self, worker: SimWorker, end: EndStep, place: int | None = None) -> None:
        """Keep what the worker needs to go on from there; for a stop, or as one of those of step `place`."""
        simulation = self._simulation
        memory = simulation.contexts[worker.rank].memory
        saved = take_checkpoint(simulation.algorithm, worker.trained, simulation.num_workers, end, memory, worker.sampler)
        kept = simulation.checkpoints if place is None else self.kept.setdefault(place, [{} for _ in simulation.workers])
        kept[worker.rank] = StagingBuffers().take(saved)

    def _due(self, step: int) -> bool:
        """Whether each worker keeps one behind that step, for which the workers need not meet."""
        simulation, every = self._simulation, self._simulation.settings.checkpoint_every
        within = every is not None and (step + 1) % every == 0 and step + 1 < simulation.workers[0].num_steps
        return within and not needs_sync_point(simulation.algorithm)

    def behind(self, thread: SimProcess, end: EndStep) -> bool:
        """Keep a checkpoint if one is due; whether the program waits for that."""
        if not self._due(end.step):
            return False
        when_complete(end.state, lambda: self.keep(thread.worker, end, end.step))
        if all(item.done for item in leaves(end.state) if isinstance(item, Ticket)):
            return False
        when_complete(end.state, lambda: thread.resume(None))  # a checkpoint is of sums that are complete
        return True
