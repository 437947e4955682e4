"""The requests: everything that an algorithm may ask of the runtime. The list is closed.

An algorithm is a generator. It yields one of these requests and is resumed with the answer. It does not know whether
time is wall or virtual, whether a peer is a process or simulated, or which library sends its bytes.

| request | answer |
|---|---|
| `Backward` | the `Gradient` of this rank's next minibatch; with `on_bucket`, a ticket of each work that it returned |
| `AllReduce`, `Broadcast` | the same value, summed over ranks or replaced by the root's, in place |
| `ReduceScatter`, `AllGather` | the same value, with this rank's block summed, or with every rank's block |
| ... with a `collective` | the same; the runtime can run the collective's sub-program instead (`program.lower`) |
| `Barrier` | None |
| `Send`, `Recv` | None; a `Message`, or `PeerLeft` if the receive asked for departures |
| `Local` | what its action returned: encoding, decoding and summing, by name |
| `Start` | a `Ticket` for a request or sub-program that runs in the background |
| `Wait`, `WaitAny` | the ticket's value; (position, value) of one that is complete |
| `Apply` | None: the optimizer has taken its step, and the buffer is free; for a server, whether the run was asked to stop |
| `Discard` | None: the buffer is free |
| `ReadParameters`, `WriteParameters` | flat copy of the parameters; None |
| `PackParameters`, `UnpackParameters` | the parameters in a gradient's layout, to be sent or averaged; None |
| `Now` | seconds since the run began |
| `EndStep` | None; the program may be closed here and resumed later from `state` |
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, dataclass_transform, final

from torch import Tensor

from workbench.gradients import Gradient

Value = Gradient | Tensor
Kind = TypeVar("Kind")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def _frozen(cls: type[Kind]) -> type[Kind]:
    """Make a dataclass that is frozen for the type checker only.

    At run time it is not frozen, because `frozen=True` doubles the time to make a request.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


class Request:
    """Base of the requests; `match` on the concrete class."""

    __slots__ = ()


Program = Generator[Request, Any, Any]


@final
class Ticket:
    """Background work. When it is `done`, `value` is set. `Wait` returns the value."""

    __slots__ = ("done", "error", "key", "request", "runtime", "value")

    def __init__(self, key: int, request: Request | Program, runtime: Any = None) -> None:
        self.key = key
        self.request = request
        self.runtime = runtime  # the runtime's own handle; algorithms leave it alone
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None

    @classmethod
    def completed(cls, value: Any) -> Ticket:
        """Return a ticket of work that was done before this program was resumed."""
        ticket = cls(-1, Barrier())
        ticket.done, ticket.value = True, value
        return ticket

    def __repr__(self) -> str:
        return f"Ticket({self.key}, {'done' if self.done else 'in flight'}: {self.request})"


@final
@_frozen
class Message:
    """A received message: `value` is the receiver's own copy, `stamp` the number that was sent with it."""

    source: int
    value: Tensor
    stamp: int = 0


@final
@_frozen
class Backward(Request):
    """Forward and backward on this rank's minibatch of `step`; the gradients of micro-batches accumulate.

    The gradient is this rank's *share* of the global mean: the summed gradients of its samples, divided by the nominal
    global batch. The mean over all samples is the sum over ranks, divided by the summed `weight` of the tail.

    Args:
        step: the step of the minibatch.
        on_bucket: called with each bucket as soon as its gradients are final, inside backward and in bucket order. It
            returns the request or sub-program to begin, or a `Start` of one, or None to begin nothing. The answer to
            `Backward` is then the tuple of tickets.
        before_forward: called with a bucket's number when the forward pass first needs its parameters. It returns a
            sub-program, for example one that waits for the bucket's sum and applies it. The forward pass continues
            when the sub-program has ended.
    """

    step: int
    on_bucket: Callable[[Gradient], Request | Program | None] | None = field(default=None, repr=False)
    before_forward: Callable[[int], Program] | None = field(default=None, repr=False)


class Collective(Protocol):
    """Computes a sum instead of the communication library (`workbench.collectives`). `ctx` is a `program.Context`."""

    def all_reduce(self, ctx: Any, value: Value) -> Request | Program:
        """Sum `value` over all ranks."""

    def reduce_scatter(self, ctx: Any, value: Value) -> Request | Program:
        """Sum this rank's block."""

    def all_gather(self, ctx: Any, value: Value) -> Request | Program:
        """Distribute every rank's block."""


@final
@_frozen
class AllReduce(Request):
    """Sum over all ranks. Consumes `value`: the sum overwrites it and is the answer.

    Args:
        collective: how the sum is taken; None for the library's own all-reduce.
        lane: the lane with the collective's memory (`Context.on_lane`). Concurrent sums of one bucket need different
            lanes.
    """

    value: Value = field(repr=False)
    collective: Collective | None = field(default=None, repr=False)
    lane: int = field(default=0, repr=False)


@final
@_frozen
class ReduceScatter(Request):
    """Sum over all ranks; each rank receives the sum of its own block (`gradients.block_bounds`).

    The contents of the other blocks are lost.
    """

    value: Value = field(repr=False)
    collective: Collective | None = field(default=None, repr=False)


@final
@_frozen
class AllGather(Request):
    """Send each rank's own block to every rank. After `ReduceScatter`, this gives every rank the whole sum."""

    value: Value = field(repr=False)
    collective: Collective | None = field(default=None, repr=False)


@final
@_frozen
class Broadcast(Request):
    """Replace every rank's `value` by the root's, in place."""

    value: Value = field(repr=False)
    root: int = 0


@final
@_frozen
class Barrier(Request):
    """Wait until every rank has reached its barrier."""


@final
@_frozen
class Send(Request):
    """Send a copy of `value` to one rank, or to itself.

    It may be answered only when the receiver has posted its `Recv` (a rendezvous). So two ranks that both send first
    and receive second deadlock: `Start` one of the two requests.

    Args:
        tag: 0 to 999. Hops of collectives use 0 to 899; a program that shares its tags with a collective uses 900 to
            999.
        stamp: a number from 0 to 2^40 - 1 that is sent with the value, in a header of 8 bytes; the receiver then sets
            `stamped`. None: no header.
    """

    to: int
    value: Value = field(repr=False)
    tag: int = 0
    stamp: int | None = None


ANY = -1


@final
@_frozen
class PeerLeft:
    """The answer in place of a message if a rank's process has ended. It sends no more, and messages to it are lost."""

    rank: int


@final
@_frozen
class Recv(Request):
    """Receive one message, with the size and dtype of `like`. The answer is a `Message` in new memory.

    Args:
        departures: for a receive from any rank: answer `PeerLeft` once for each rank that has left, on each tag.
    """

    source: int
    like: Tensor = field(repr=False)
    tag: int = 0
    stamped: bool = False
    departures: bool = False


@final
@_frozen
class Local(Request):
    """Work of this rank's processor within a communication, named and counted, so the trace can show its time.

    Args:
        kind: "encode", "decode" or "sum"; "all_reduce" for another library's sum, with an unknown number of bytes.
        num_bytes: bytes of the uncompressed values that it processes.
        action: does the work and returns the answer. For a "sum" it returns None, and a simulation without values
            does not call it. `is_done`: the request before it did this work in the same pass over memory. A simulator
            charges for it, and a real rank records no span of it.
    """

    kind: str
    num_bytes: int
    action: Callable[[], Any] = field(repr=False)


def is_done() -> None:
    """Do nothing. See `Local`."""


FREE = -1  # a separate lane for each start


@final
@_frozen
class Start(Request):
    """Begin a request or sub-program in the background; every rank must start the same ones in the same order.

    Args:
        lane: the work of one lane runs in the order of its starts; lanes run concurrently. `FREE`: a separate lane.
        priority: of the sub-programs on `FREE` lanes that can continue, the one with the lowest number continues.
        shares_tags: the work uses the program's tags, as a server next to its worker does. Otherwise a sub-program
            has separate tags.
    """

    work: Request | Program = field(repr=False)
    lane: int = 0
    priority: int = 0
    shares_tags: bool = False


@final
@_frozen
class Wait(Request):
    """Wait until the ticket's work is done, and return its value.

    An error of the work is raised in the program, at this request. A program may handle it; otherwise the run ends.
    """

    ticket: Ticket


@final
@_frozen
class WaitAny(Request):
    """Wait until one of the tickets is done, and return (position, value), or None after `timeout_s`."""

    tickets: tuple[Ticket, ...]
    timeout_s: float | None = None


@final
@_frozen
class Apply(Request):
    """One optimizer step with a summed gradient, or with one bucket of it. Consumes the gradient.

    For a server (`server_copy=True`), the answer is True if the run was asked to stop. The server then ends the run
    for all ranks at one version.

    Args:
        lr_scale: factor on the learning rate of this step.
        local: the gradient is this rank's alone, not a sum. Other ranks do not know the control value in it.
        server_copy: update the server's copy of the parameters, not the replica that computes gradients.
        of: (source, version) of each gradient in the sum. Empty: one gradient, of `gradient.version`.
        dropped: (source, version) of the gradients since the last update that came too late and are not in the sum.
        completes: for a server: how many steps of the run the update completes, for the schedule of evaluations.
            None: a step is one minibatch of each worker, and every gradient counts as one minibatch, also if dropped.
    """

    gradient: Gradient = field(repr=False)
    lr_scale: float = 1.0
    local: bool = False
    server_copy: bool = False
    of: tuple[tuple[int, int], ...] = ()
    dropped: tuple[tuple[int, int], ...] = ()
    completes: float | None = None


@final
@_frozen
class Discard(Request):
    """Give a gradient's buffer back without an update, for example if the gradient was sent to a server."""

    gradient: Gradient = field(repr=False)


@final
@_frozen
class ReadParameters(Request):
    """The trainable parameters as one flat tensor in layout order, without tails: a copy."""


@final
@_frozen
class WriteParameters(Request):
    """Overwrite the trainable parameters from a tensor of the form that `ReadParameters` returns."""

    value: Tensor = field(repr=False)


@final
@_frozen
class PackParameters(Request):
    """The parameters of one bucket, or all, in the layout of a gradient: a `Gradient` of weight 1 in new memory.

    Summed over ranks and then unpacked, it is their average: the tail sums the weights.

    Args:
        server_copy: pack the server's copy, which is made from the replica at its first use.
        step: the step of the value, if a collective sums it. A codec's noise depends on it; `PowerSGD` compares it
            with its `start_step`.
    """

    bucket: int | None = None
    server_copy: bool = False
    step: int = -1


@final
@_frozen
class UnpackParameters(Request):
    """Overwrite the replica's parameters with a value of the form of `PackParameters`, divided by its weight."""

    value: Gradient = field(repr=False)


@final
@_frozen
class Now(Request):
    """Seconds since the run began, wall or virtual."""


@dataclass(frozen=True, slots=True)
class State:
    """What a program is resumed from: a frozen dataclass in the algorithm's file.

    Its fields are tickets, gradients, tensors, plain numbers, None, or tuples of these: a checkpoint keeps them by
    name.
    """

    def unused(self, step: int) -> State | None:
        """Return a state with this rank's gradients that are in no sum up to that step.

        After a rank has left, the remaining ranks start from this state.
        """
        return None


@final
@_frozen
class EndStep(Request):
    """The end of a step. Metrics are recorded here. Only here can a run stop, change or be resumed.

    Args:
        step: the step that ends.
        state: what the program gets as `ctx.resumed` to continue from here; None if it needs nothing.
        dropped: this rank's gradient of the step came too late and was not used.
    """

    step: int
    state: State | None = None
    dropped: bool = False
