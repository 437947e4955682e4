"""The reference runtime answers every request of the closed list as its docstring says; the numbers are worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import pytest
import torch
from torch import Tensor

from workbench import ops
from workbench.ops import (
    ANY,
    FREE,
    AllGather,
    AllReduce,
    Apply,
    Backward,
    Barrier,
    Broadcast,
    Discard,
    EndStep,
    Local,
    Now,
    PackParameters,
    Program,
    ReadParameters,
    Recv,
    ReduceScatter,
    Request,
    Send,
    Start,
    Ticket,
    UnpackParameters,
    Wait,
    WaitAny,
    WriteParameters,
)
from workbench.program import Algorithm, Card, Context, perform
from workbench.runtimes.reference import Costs, ReferenceRuntime

Rank = Callable[[Context], Program]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Script(Algorithm):
    """One program for each rank; their answers are kept."""

    programs: tuple[Rank, ...]
    answers: dict[int, Any]
    card: ClassVar[Card] = Card(paper="", staleness="", bytes_per_step="", memory="")

    def worker(self, ctx: Context) -> Program:
        self.answers[ctx.rank] = yield from self.programs[ctx.rank](ctx)


def gradient(rank: int, step: int, parameters: Tensor) -> Tensor:
    return torch.tensor([1.0, 2.0], dtype=torch.float64) * (rank + 1) * (step + 1)


def answers(*programs: Rank, shuffle: int | None = None) -> tuple[dict[int, Any], ReferenceRuntime]:
    """What each rank's program returned. A backward pass takes 1 s (rank 0) or 3 s, a message 0.25 s, a sum 0.5 s."""
    script = Script(programs=programs, answers={})
    costs = Costs(backward=lambda rank, step: 1.0 + 2 * rank, message=0.25, collective=0.5)
    runtime = ReferenceRuntime(
        script, len(programs), gradient, sizes=(2,), lr=1.0, start=10.0, costs=costs, shuffle=shuffle
    )
    runtime.run(1)
    return script.answers, runtime


def one(request: Callable[[Context], Request]) -> Rank:
    """A program that makes one request and returns the answer."""

    def program(ctx: Context) -> Program:
        return (yield request(ctx))

    return program


def flat(rank: int) -> Tensor:
    return torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64) * 10**rank


def both(kind: Callable[[Tensor], Request]) -> list[Any]:
    found, _ = answers(*[one(lambda ctx: kind(flat(ctx.rank)))] * 2)
    return [found[rank].tolist() for rank in range(2)]


def check_backward() -> None:
    def program(ctx: Context) -> Program:
        found = yield Backward(ctx.rank)
        values = found.body().tolist()
        yield Discard(found)
        return values

    assert answers(program, program)[0] == {0: [0.5, 1], 1: [2, 4]}, "each rank's share of the mean"


def check_all_reduce() -> None:
    assert both(AllReduce) == [[11, 22, 33, 44]] * 2


def check_reduce_scatter() -> None:
    found = both(ReduceScatter)
    assert found[0][:2] == [11, 22] and found[1][2:] == [33, 44]


def check_all_gather() -> None:
    assert both(AllGather) == [[1, 2, 30, 40]] * 2


def check_broadcast() -> None:
    assert both(lambda value: Broadcast(value, root=1)) == [[10, 20, 30, 40]] * 2


def check_barrier() -> None:
    def program(ctx: Context) -> Program:
        yield Discard((yield Backward(0)))
        yield Barrier()
        return (yield Now())

    assert answers(program, program)[0] == {0: 3.5, 1: 3.5}, "when the last rank has come, and a collective's time"


def check_messages() -> None:
    def sender(ctx: Context) -> Program:
        yield Send(1, flat(0), tag=7, stamp=5)
        return (yield Now())

    def receiver(ctx: Context) -> Program:
        yield Discard((yield Backward(0)))
        message = yield Recv(ANY, like=flat(0), tag=7, stamped=True, departures=True)
        return message.source, message.value.tolist(), message.stamp

    assert answers(sender, receiver)[0] == {0: 3.25, 1: (0, [1, 2, 3, 4], 5)}, "a send is a rendezvous"


def check_local() -> None:
    assert answers(one(lambda ctx: Local("sum", 8, lambda: "summed")))[0] == {0: "summed"}


def check_start() -> None:
    """Work on one lane is in the order of its starts; of programs that can continue, the lowest number does."""
    order: list[str] = []

    def noted(name: str) -> Program:
        order.append(name)
        yield Local("sum", 0, lambda: None)

    def program(ctx: Context) -> Program:
        tickets = [
            (yield Start(noted("second"), lane=FREE, priority=2)),
            (yield Start(noted("first"), lane=FREE, priority=1)),
        ]
        for ticket in tickets:
            yield Wait(ticket)
        return order

    assert answers(program)[0] == {0: ["first", "second"]}


def check_wait() -> None:
    def program(ctx: Context) -> Program:
        ticket = yield Start(perform(Local("sum", 0, lambda: 7)))
        assert isinstance(ticket, Ticket)
        return (yield Wait(ticket))

    assert answers(program)[0] == {0: 7}


def check_wait_any() -> None:
    """Rank 0 waits for 0.5 s, then for 9 s; the message is sent at 3 s and takes 0.25 s."""

    def waiting(ctx: Context) -> Program:
        never = yield Start(Recv(1, like=flat(0), tag=1))
        soon = yield Start(Recv(1, like=flat(0), tag=2))
        timed_out = yield WaitAny((never, soon), timeout_s=0.5)
        at = yield Now()
        position, message = yield WaitAny((never, soon), timeout_s=9.0)
        arrived = yield Now()
        yield Wait(never)
        return timed_out, at, position, message.source, arrived

    def sending(ctx: Context) -> Program:
        yield Discard((yield Backward(0)))
        yield Send(0, flat(1), tag=2)
        yield Discard((yield Backward(0)))
        yield Send(0, flat(1), tag=1)

    assert answers(waiting, sending)[0][0] == (None, 0.5, 1, 1, 3.25)


def check_apply() -> None:
    def program(ctx: Context) -> Program:
        yield Apply((yield Backward(0)), lr_scale=0.5)

    assert answers(program)[1].ranks[0].parameters.tolist() == [9.5, 9.0]


def check_discard() -> None:
    def program(ctx: Context) -> Program:
        found = yield Backward(0)
        yield Discard(found)
        return bool(found.flat.isnan().all())

    found, runtime = answers(program)
    assert found[0] and runtime.ranks[0].parameters.tolist() == [10, 10] and not runtime.ranks[0].out


def check_read_and_write() -> None:
    def program(ctx: Context) -> Program:
        before = yield ReadParameters()
        yield WriteParameters(before + 1)
        return before.tolist()

    found, runtime = answers(program)
    assert found[0] == [10, 10] and runtime.ranks[0].parameters.tolist() == [11, 11]


def check_pack_and_unpack() -> None:
    """The sum of two packed replicas is unpacked as their mean."""

    def program(ctx: Context) -> Program:
        yield WriteParameters(torch.tensor([1.0, 2.0], dtype=torch.float64) * (1 + 2 * ctx.rank))
        yield UnpackParameters((yield AllReduce((yield PackParameters()))))

    assert [rank.parameters.tolist() for rank in answers(program, program)[1].ranks] == [[2, 4]] * 2


def check_now() -> None:
    assert answers(one(lambda ctx: Now()))[0] == {0: 0}


def check_end_step() -> None:
    def program(ctx: Context) -> Program:
        return (yield EndStep(0))

    found, runtime = answers(program)
    assert found[0] is None and [end.step for end in runtime.ranks[0].ends] == [0]


CHECKS: dict[type[Request], Callable[[], None]] = {
    Backward: check_backward,
    AllReduce: check_all_reduce,
    ReduceScatter: check_reduce_scatter,
    AllGather: check_all_gather,
    Broadcast: check_broadcast,
    Barrier: check_barrier,
    Send: check_messages,
    Recv: check_messages,
    Local: check_local,
    Start: check_start,
    Wait: check_wait,
    WaitAny: check_wait_any,
    Apply: check_apply,
    Discard: check_discard,
    ReadParameters: check_read_and_write,
    WriteParameters: check_read_and_write,
    PackParameters: check_pack_and_unpack,
    UnpackParameters: check_pack_and_unpack,
    Now: check_now,
    EndStep: check_end_step,
}


@pytest.mark.parametrize("kind", CHECKS, ids=lambda kind: kind.__name__)
def test_the_answer_is_that_of_the_docstring(kind: type[Request]) -> None:
    CHECKS[kind]()


def test_no_request_of_the_closed_list_is_left_out() -> None:
    everything = {kind for kind in vars(ops).values() if isinstance(kind, type) and issubclass(kind, Request)}
    assert set(CHECKS) == everything - {Request}


def test_a_server_s_copy_is_not_the_replica() -> None:
    """It begins as a copy of the replica, and `Apply` answers whether the run was asked to stop."""

    def program(ctx: Context) -> Program:
        stops = yield Apply((yield Backward(0)), server_copy=True)
        packed = yield PackParameters(server_copy=True)
        replica = yield ReadParameters()
        return stops, packed.body().tolist(), replica.tolist()

    assert answers(program)[0] == {0: (False, [9, 8], [10, 10])}


def test_a_ticket_that_is_done_at_the_time_out_counts_and_a_later_one_does_not() -> None:
    """The message arrives at 3.25 s."""

    def waiting(timeout_s: float) -> Rank:
        def program(ctx: Context) -> Program:
            ticket = yield Start(Recv(1, like=flat(0)))
            found = yield WaitAny((ticket,), timeout_s=timeout_s)
            at = yield Now()
            yield Wait(ticket)
            return found is None, at

        return program

    def sending(ctx: Context) -> Program:
        yield Discard((yield Backward(0)))
        yield Send(0, flat(1))

    assert answers(waiting(3.25), sending)[0][0] == (False, 3.25)
    assert answers(waiting(3.2), sending)[0][0] == (True, 3.2)


def test_wait_any_takes_the_ticket_that_is_done_first_whatever_its_position() -> None:
    """Rank 1 sends at 3 s, rank 2 at 5 s: the second receive ends first."""

    def waiting(ctx: Context) -> Program:
        tickets = ((yield Start(Recv(2, like=flat(0)))), (yield Start(Recv(1, like=flat(0)))))
        yield Discard((yield Backward(0)))
        order = [(yield WaitAny(tickets))[0]]
        order.append((yield WaitAny(tickets[:1]))[0])
        return order, (yield Now())

    def sending(ctx: Context) -> Program:
        yield Discard((yield Backward(0)))
        yield Send(0, flat(ctx.rank))

    assert answers(waiting, sending, sending)[0][0] == ([1, 0], 5.25)


def test_a_time_out_that_is_repeated_ends_in_a_random_order_too() -> None:
    def polling(ctx: Context) -> Program:
        ticket = yield Start(Recv(1, like=flat(0)))
        while (found := (yield WaitAny((ticket,), timeout_s=0.1))) is None:
            pass
        return found[0]

    def sending(ctx: Context) -> Program:
        yield Discard((yield Backward(0)))
        yield Send(0, flat(1))

    for seed in range(5):
        assert answers(polling, sending, shuffle=seed)[0][0] == 0


def test_no_tickets_are_refused() -> None:
    with pytest.raises(ValueError, match="give at least one"):
        answers(one(lambda ctx: WaitAny(())))


def test_a_value_that_is_written_while_it_is_sent_is_an_error() -> None:
    def sending(ctx: Context) -> Program:
        value = flat(0)
        ticket = yield Start(Send(1, value))
        value.zero_()
        yield Wait(ticket)

    def receiving(ctx: Context) -> Program:
        yield Discard((yield Backward(0)))
        yield Recv(0, like=flat(0))

    with pytest.raises(AssertionError, match="rank 0 in step 0 wrote a value while it was sent"):
        answers(sending, receiving)
