"""The contract between an algorithm and the runtime that runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, final

from workbench.ops import Program, Request, Ticket


@final
@dataclass(slots=True)
class Context:
    """What a program is told when it begins.

    Attributes:
        rank, num_workers: plain numbers; arithmetic takes them, nothing else of the cluster is visible.
        first_step: where to begin (more than 0 when resumed).
        num_steps: where to end; None for as long as the caller goes on (`Trainer`).
        resumed: the state of the last `EndStep`, its tickets completed; None at a fresh start.
    """

    rank: int
    num_workers: int
    first_step: int = 0
    num_steps: int | None = None
    resumed: tuple[Any, ...] | None = None

    def steps(self) -> Iterator[int]:
        """The steps to take; looks at `num_steps` anew each time, so that a caller can end the loop."""
        step = self.first_step
        while self.num_steps is None or step < self.num_steps:
            yield step
            step += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm(ABC):
    """A data-parallel training method: settings as data, behaviour as one generator.

    Subclasses are frozen keyword-only dataclasses; what happens during a run lives in local variables of `worker`.
    """

    @abstractmethod
    def worker(self, ctx: Context) -> Program:
        """The program of one rank."""

    @property
    def bucket_bytes(self) -> float | None:
        """How the gradient is cut (`gradients.build_layout`); None: not at all."""
        return None

    @property
    def applies_buckets(self) -> bool:
        """Whether `Apply` is given single buckets: then nothing may need the whole gradient (global clipping)."""
        return False

    @property
    def max_staleness(self) -> int:
        """Updates between the parameters a gradient was taken at and those it is applied to, at most."""
        return 0

    def settings(self) -> dict[str, Any]:
        """Field names and values, as recorded with a run."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def complete(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """`state` with each ticket replaced by a completed one that holds its value: what `ctx.resumed` is given."""
    return tuple(Ticket.completed(item.value) if isinstance(item, Ticket) else item for item in state)


def perform(work: Request | Program) -> Program:
    """Do a request or a sub-program in the foreground: `value = yield from perform(work)`."""
    if isinstance(work, Request):
        return (yield work)
    return (yield from work)
