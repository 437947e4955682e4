"""Checkpoints of a simulated run, in memory: of each worker, after a step or at a stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from workbench.ops import EndStep, State, Ticket
from workbench.program import Algorithm, Context, leaves
from workbench.runtimes.checkpoint.rank_state import take_checkpoint
from workbench.runtimes.checkpoint.staging import StagingBuffers
from workbench.runtimes.simulator.worker import SimWorker


def is_complete(state: State | None) -> bool:
    """Return True if no ticket of a step's state is in flight."""
    return all(item.done for item in leaves(state) if isinstance(item, Ticket))


def when_complete(state: State | None, action: Callable[[], None]) -> None:
    """Call `action` when all tickets of a step's state are complete."""
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
        contexts: contexts of the workers' programs.

    Attributes:
        kept: step -> checkpoint of each worker.
        at_stop: checkpoint of each worker where the run was stopped.
    """

    def __init__(self, algorithm: Algorithm, workers: list[SimWorker], contexts: list[Context]) -> None:
        self._algorithm, self._workers, self._contexts = algorithm, workers, contexts
        self.kept: dict[int, list[dict[str, Any]]] = {}
        self.at_stop: list[dict[str, Any]] = [{} for _ in workers]

    def keep(self, worker: SimWorker, end: EndStep, place: int | None) -> None:
        """Keep the worker's part of the checkpoint of step `place`; None: of a stop."""
        memory = self._contexts[worker.rank].memory
        saved = take_checkpoint(self._algorithm, worker.trained, len(self._workers), end, memory, worker.sampler)
        kept = self.at_stop if place is None else self.kept.setdefault(place, [{} for _ in self._workers])
        kept[worker.rank] = StagingBuffers().take(saved)
