"""Simulated workers whose process ends: what they were at is lost, and who asked to be told is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from workbench import ops
from workbench.errors import ConfigError
from workbench.ops import PeerLeft, Program

if TYPE_CHECKING:
    from workbench.runtimes.simulator.process import SimProcess
    from workbench.runtimes.simulator.simulation import Simulation

Then = Callable[[Any], None]


@final
class Halted:
    """Yielded by a program whose process has ended; never answered. The simulator's own marker, and no request."""


@final
class Departures:
    """Who leaves a simulation, and when; kept by it.

    Attributes:
        gone: (rank, virtual seconds) of who has left, in order.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._at_s: dict[int, float] = {}
        self.gone: list[tuple[int, float]] = []
        self._told: dict[Any, int] = {}  # box -> of how many departures its receives have been told
        self._hearing: dict[Any, tuple[Any, Any, Then]] = {}  # box -> the last receive from any rank, and what to call instead

    def plan(self, rank: int, at_s: float) -> None:
        """This worker's process is to end then.

        Raises:
            ConfigError: the method cannot do without it.
        """
        method, num_ranks = self._simulation.algorithm, self._simulation.num_workers
        if not method.can_lose(rank, num_ranks):
            raise ConfigError(
                f"{method} on {num_ranks} ranks cannot go on without rank {rank}: choose a worker that serves nothing, not rank 0"
            )
        self._at_s[rank] = at_s

    def begin(self) -> None:
        """The clock stands at the beginning."""
        for rank, at_s in self._at_s.items():
            self._simulation.clock.at(at_s, self._leave, rank)

    def _leave(self, rank: int) -> None:
        simulation = self._simulation
        mine = [thread for thread in simulation.threads if thread.worker.rank == rank]
        if not mine:
            return  # it had ended
        for thread in mine:
            thread.take_up(_nothing())
            del simulation.threads[thread]
        self.gone.append((rank, simulation.clock.now_s))
        simulation.fabric.leave(rank)
        for box, (received, argument, then) in list(self._hearing.items()):
            if simulation.fabric.withdraw(box, received, argument):
                self._tell(box, then)

    def receive(self, thread: SimProcess, request: ops.Recv, received: Any, argument: Any, then: Then) -> bool:
        """Whether a receive from any rank is answered by a departure; else it may be, until its message comes."""
        box = (thread.key, request.tag, thread.worker.rank)
        if self._told.get(box, 0) < len(self.gone):
            self._tell(box, then)
            return True
        self._hearing[box] = (received, argument, then)
        return False

    def _tell(self, box: Any, then: Then) -> None:
        rank = self.gone[self._told.get(box, 0)][0]
        self._told[box] = self._told.get(box, 0) + 1
        now_s = self._simulation.clock.now_s
        self._simulation.workers[box[2]].recorder.events.append({"left": rank, "seconds": now_s, "tag": box[1]})
        self._simulation.clock.at(now_s, then, PeerLeft(rank))

    def record(self) -> list[dict[str, Any]]:
        """For `run.json`."""
        return [{"rank": rank, "seconds": seconds, "why": "as was planned"} for rank, seconds in self.gone]


def _nothing() -> Program:
    """A program that has begun, and asks for nothing more."""

    def program() -> Program:
        while True:
            yield Halted()  # type: ignore[misc]  # no algorithm sees it

    begun = program()
    next(begun)
    return begun
