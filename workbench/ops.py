"""The requests: everything that an algorithm may ask of the runtime. The list is closed.

An algorithm is a generator. It yields one of these requests and is resumed with the answer. It does not know
the kind of time (wall or virtual), the kind of its peers (processes or simulated workers), or the library that sends
its bytes.

| request | answer |
|---|---|
| `Backward` | the `Gradient` of this rank's next minibatch; with `on_bucket`, one ticket a bucket, in bucket order |
| `AllReduce`, `Broadcast` | the same value, summed over ranks or replaced by the root's, in place |
| `ReduceScatter`, `AllGather` | the same value, with this rank's block summed, or with every rank's block |
| ... with a `collective` | the same; the runtime decides how that collective takes the sum (`program.lower`) |
| `Barrier` | None |
| `Send`, `Recv` | None; a `Message`, or `PeerLeft` if the receive asked for departures |
| `Local` | what its action returned: encoding, decoding and summing, by name |
| `Start` | a `Ticket` for a request or sub-program that runs in the background |
| `Wait`, `WaitAny` | the ticket's value; (position, value) of one that is complete |
| `Apply` | None: the optimizer has taken its step, and the buffer is free; of a server, whether the run was asked to stop |
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
    """A frozen dataclass to the type checker.

    At run time nothing checks it: `frozen=True` doubles the time to make a request.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


class Request:
    """Base of the requests; `match` on the concrete class."""

    __slots__ = ()


Program = Generator[Request, Any, Any]


@final
class Ticket:
    """Background work, until `Wait`. `value` is set once `done`."""

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
        """Return a ticket of work that was done before this program began (it was resumed)."""
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
            returns the request, the sub-program or the `Start` of one to begin. The answer is then the tuple of
            tickets.
        before_forward: called with a bucket's number when the forward pass first needs its parameters. It returns a
            sub-program that ends before the pass continues: it waits for what must arrive, and applies it.
    """

    step: int
    on_bucket: Callable[[Gradient], Request | Program] | None = field(default=None, repr=False)
    before_forward: Callable[[int], Program] | None = field(default=None, repr=False)


class Collective(Protocol):
    """Takes a sum instead of the communication library (`workbench.collectives`); `ctx` is a `program.Context`."""

    def all_reduce(self, ctx: Any, value: Value) -> Request | Program:
        """Sum `value` over all ranks."""

    def reduce_scatter(self, ctx: Any, value: Value) -> Request | Program:
        """Sum this rank's block."""

    def all_gather(self, ctx: Any, value: Value) -> Request | Program:
        """Distribute every rank's block."""


@final
@_frozen
class AllReduce(Request):
    """Sum over all ranks. Consumes `value`: the sum is written into the same memory, which is the answer.

    Args:
        collective: how the sum is taken; None for the library's own all-reduce.
        lane: the lane with the collective's memory (`Context.on_lane`): sums of one bucket in flight at once need
            different lanes.
    """

    value: Value = field(repr=False)
    collective: Collective | None = field(default=None, repr=False)
    lane: int = field(default=0, repr=False)


@final
@_frozen
class ReduceScatter(Request):
    """Sum over all ranks, each rank its own block (`gradients.block_bounds`).

    The contents of the other blocks are lost.
    """

    value: Value = field(repr=False)
    collective: Collective | None = field(default=None, repr=False)


@final
@_frozen
class AllGather(Request):
    """Give every rank each rank's own block: after `ReduceScatter`, the whole sum."""

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
    """Return when every rank has reached it."""


@final
@_frozen
class Send(Request):
    """Send a copy of `value` to one rank. Rendezvous: it may return only when the receiver has asked for it,

    so two ranks that both send first and receive second deadlock. `Start` one of the two. A rank may send to itself.

    Args:
        tag: 0 to 999. Hops of collectives have 0 to 899; a program that shares its tags with a collective uses the
            others.
        stamp: a number from 0 to 2^40 - 1 that travels with the value, in a header of 8 bytes; the receiver then says
            `stamped`. None for none.
    """

    to: int
    value: Value = field(repr=False)
    tag: int = 0
    stamp: int | None = None


ANY = -1


@final
@_frozen
class PeerLeft:
    """The answer instead of a message: this rank's process has ended.

    Nothing more comes from it, and messages to it are lost.
    """

    rank: int


@final
@_frozen
class Recv(Request):
    """Receive one message. `like` says its size and dtype; the answer is a `Message` in new memory.

    Args:
        departures: of a receive from any rank: the answer is `PeerLeft` once for each rank that has left, on each tag.
    """

    source: int
    like: Tensor = field(repr=False)
    tag: int = 0
    stamped: bool = False
    departures: bool = False


@final
@_frozen
class Local(Request):
    """Work of this rank's processor within a communication, named and counted, so a record can show its time.

    Args:
        kind: "encode", "decode" or "sum"; "all_reduce" for another library's, with an unknown number of bytes.
        num_bytes: of the uncompressed values that it processes.
        action: does it, and returns the answer. That of a "sum" is None, and a simulation without values skips it.
    """

    kind: str
    num_bytes: int
    action: Callable[[], Any] = field(repr=False)


FREE = -1  # a separate lane


@final
@_frozen
class Start(Request):
    """Begin a request or sub-program in the background; every rank must start the same ones in the same order.

    Args:
        lane: the works of one lane run in the order in which they started; lanes run concurrently. `FREE`: a separate
            lane.
        priority: among the free sub-programs that can continue, the one with the lowest number does.
        shares_tags: it uses the program's own tags, as a server next to its worker does. Other sub-programs have
            separate tags.
    """

    work: Request | Program = field(repr=False)
    lane: int = 0
    priority: int = 0
    shares_tags: bool = False


@final
@_frozen
class Wait(Request):
    """Wait until the ticket's work is done, and return its value. An error of the work is raised here."""

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

    The answer to a server's (`server_copy=True`) is True if the run was asked to stop: the server ends it for all at
    one version.

    Args:
        lr_scale: factor on the learning rate of this step.
        local: this rank's gradient alone, which no other rank sees: the control value in it is not yet known to all.
        server_copy: update the server's copy of the parameters, not the replica that computes gradients.
        of: (source, version) of each gradient in the sum, if that is not the gradient's own version.
        dropped: (source, version) of the gradients since the last update that came too late and are not in it.
        completes: of a server's update: how many steps of the run it completes, as the schedule of evaluations counts
            them. None: a step is a minibatch of each worker, and each gradient is one of these, also a dropped one.
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
    """Give a gradient's buffer back unapplied: it was sent, and another rank applies it."""

    gradient: Gradient = field(repr=False)


@final
@_frozen
class ReadParameters(Request):
    """The trainable parameters as one flat tensor in layout order, without tails: a copy."""


@final
@_frozen
class WriteParameters(Request):
    """Overwrite the trainable parameters from such a tensor."""

    value: Tensor = field(repr=False)


@final
@_frozen
class PackParameters(Request):
    """The parameters of one bucket, or all, in the layout of a gradient: a `Gradient` of weight 1 in new memory.

    Summed over ranks and then unpacked, it is their average: the tail sums the weights.

    Args:
        server_copy: the server's copy, made from the replica at its first use.
        step: the step of the value if a collective sums it: codecs select their noise by it, and `PowerSGD` its
            beginning.
    """

    bucket: int | None = None
    server_copy: bool = False
    step: int = -1


@final
@_frozen
class UnpackParameters(Request):
    """Overwrite the replica's parameters with such a value, divided by its weight."""

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
        """This rank's gradients that are in no sum up to that step. Ranks that continue as fewer begin with them."""
        return None


@final
@_frozen
class EndStep(Request):
    """The end of a step. Metrics are recorded here, and only here a run stops, changes or is resumed.

    Args:
        step: the step that ends.
        state: what the program gets as `ctx.resumed` to continue from here; None if it needs nothing.
        dropped: this rank's gradient of the step came too late and was not used.
    """

    step: int
    state: State | None = None
    dropped: bool = False
