"""Checkpoints of a simulated run, in memory: of each worker after a step, and where the run was stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from workbench.ops import EndStep, State, Ticket
from workbench.program import Algorithm, Context, leaves
from workbench.runtimes.checkpoint.rank_state import take_checkpoint
from workbench.runtimes.checkpoint.staging import StagingBuffers
from workbench.runtimes.simulator.worker import SimWorker


def is_complete(state: State | tuple[Any, ...]) -> bool:
    """Return True if no ticket of a step's state is in flight."""
    return all(item.done for item in leaves(state) if isinstance(item, Ticket))


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
    """The checkpoints of a simulation.

    Args:
        contexts: of the workers' programs.

    Attributes:
        kept: step -> what each worker needs to continue after it.
        at_stop: what each worker needs to continue from where the run was stopped.
    """

    def __init__(self, algorithm: Algorithm, workers: list[SimWorker], contexts: list[Context]) -> None:
        self._algorithm, self._workers, self._contexts = algorithm, workers, contexts
        self.kept: dict[int, list[dict[str, Any]]] = {}
        self.at_stop: list[dict[str, Any]] = [{} for _ in workers]

    def keep(self, worker: SimWorker, end: EndStep, place: int | None) -> None:
        """Keep what the worker needs to continue from there, as part of the checkpoint of step `place`; None: of a stop."""
        memory = self._contexts[worker.rank].memory
        saved = take_checkpoint(self._algorithm, worker.trained, len(self._workers), end, memory, worker.sampler)
        kept = self.at_stop if place is None else self.kept.setdefault(place, [{} for _ in self._workers])
        kept[worker.rank] = StagingBuffers().take(saved)
