"""The order in which collectives post receives and sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workbench.collectives import Collective, Direct, HalvingDoubling, Ring
from workbench.ops import Local, Message, Recv, Send, Start, Ticket, Wait
from workbench.program import Context


def started(collective: Collective, num_workers: int) -> list[type]:
    """The kinds of the messages that rank 0 starts, in order."""
    program: Any = collective.all_reduce(Context(0, num_workers), torch.zeros(16))
    kinds, answer = [], None
    while True:
        try:
            request = program.send(answer)
        except StopIteration:
            return kinds
        match request:
            case Start(work):
                kinds.append(type(work))
                answer = Ticket(len(kinds), work)
            case Wait(ticket) if isinstance(ticket.request, Recv):
                answer = Message(ticket.request.source, torch.zeros_like(ticket.request.like))
            case Local(_, _, action):
                answer = action()
            case _:
                answer = None


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("collective", [Ring(), Ring(chunks=2), Direct(), HalvingDoubling()], ids=str)
def test_each_send_comes_after_the_receive_of_its_exchange(collective: Collective, num_workers: int) -> None:
    """gloo has one stream of bytes to a neighbour: a later receive would wait until the message has left."""
    kinds = started(collective, num_workers)
    assert kinds.count(Send) == kinds.count(Recv) > 0
    for position in range(1, len(kinds) + 1):
        assert kinds[:position].count(Send) <= kinds[:position].count(Recv)
