"""The code of a program after its loop runs in a `Trainer` too, and may communicate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import pytest
import torch
from torch import nn

from tests.distributed.pool import shared_pool
from workbench.errors import WorkbenchError
from workbench.gradients import Layout
from workbench.ops import Apply, Backward, EndStep, Message, Program, Recv, Send
from workbench.program import Algorithm, Card, Context, Replicas
from workbench.runtimes.user_loop.trainer import Trainer

DONE, STEP = 1, 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Followed(Algorithm):
    """Rank 1 reports each step to rank 0, and after its loop that it takes no more. Rank 0 waits for one report a step."""

    own_steps: bool = True
    card: ClassVar[Card] = Card(paper="", staleness="0", bytes_per_step="0", memory="none")

    @property
    def asynchronous(self) -> bool:
        return self.own_steps

    @property
    def replicas(self) -> Replicas:
        return Replicas.NEVER

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> None:
        return None

    def worker(self, ctx: Context) -> Program:
        like, ended = torch.zeros(1), False
        for step in ctx.steps():
            yield Apply((yield Backward(step)), local=True)
            if ctx.rank == 1 and step > 0:  # each report is one step late: the last one comes after the loop
                yield Send(0, like, stamp=STEP)
            elif ctx.rank == 0 and not ended:
                message: Message = yield Recv(1, like=like, stamped=True)
                ended = message.stamp == DONE
            yield EndStep(step)
        if ctx.rank == 1:
            yield Send(0, like, stamp=DONE)
        elif not ended:
            yield Recv(1, like=like, stamped=True)


def take_steps(own_steps: bool, num_steps: tuple[int, int], timeout_s: float) -> tuple[int, str]:
    """On a rank: that many steps. Returns the steps taken, and the error's text."""
    import torch.distributed as dist

    model = nn.Linear(2, 1)
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Followed(own_steps=own_steps), timeout_s=timeout_s
    )
    taken = 0
    try:
        for _ in range(num_steps[dist.get_rank()]):
            trainer.step(lambda: model(torch.ones(2)).sum())
            taken += 1
        trainer.finish()
    except WorkbenchError as error:
        return taken, str(error)
    return taken, ""


@pytest.mark.parametrize("num_steps", [(3, 3), (5, 3)])
def test_ranks_at_their_own_steps_run_it_when_their_own_loop_ends(num_steps: tuple[int, int]) -> None:
    found = shared_pool("torch", 2, compiler=True).run(take_steps, True, num_steps, 20.0)
    assert found == [(num_steps[0], ""), (num_steps[1], "")]


def test_ranks_in_step_that_need_it_earlier_are_told_the_rule() -> None:
    (_, waits), (_, finishes) = shared_pool("torch", 2, compiler=True).run(take_steps, False, (3, 3), 3.0)
    assert "asynchronous" in finishes and "after its loop" in finishes, (waits, finishes)
    assert waits
