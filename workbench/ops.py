"""The vocabulary: everything an algorithm may ask of the runtime that runs it. The list is closed.

An algorithm is a generator. It yields one of these requests and is resumed with the answer; it never learns whether
time is wall or virtual, whether a peer is a process or a simulated worker, or which library carries its bytes.

| request | answer |
|---|---|
| `Backward` | the `Gradient` of this rank's next minibatch; with `on_bucket`, one ticket a bucket, in bucket order |
| `AllReduce`, `Broadcast` | the same value, summed over ranks or replaced by the root's, in place |
| `ReduceScatter`, `AllGather` | the same value, of which this rank's block is summed, or every rank's block is there |
| ... with a `collective` | the same; the runtime decides how that collective's sum is taken (`program.lower`) |
| `Barrier` | None |
| `Send`, `Recv` | None; a `Message`, or `PeerLeft` where it was asked for |
| `Local` | what its action returned: encoding, decoding and summing, by name |
| `Start` | a `Ticket` for a request or sub-program that now runs in the background |
| `Wait`, `WaitAny` | the ticket's value; (position, value) of one that is complete |
| `Apply` | None: the optimizer has taken its step, and the buffer is free; of a server, whether the run was asked to stop |
| `Discard` | None: the buffer is free |
| `ReadParameters`, `WriteParameters` | flat copy of the parameters; None |
| `PackParameters`, `UnpackParameters` | the parameters laid out as a gradient, to be sent or averaged; None |
| `Now` | seconds since the run began |
| `EndStep` | None; the program may be closed here and resumed later from `state` |
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from torch import Tensor

from workbench.gradients import Gradient

Value = Gradient | Tensor


class Request:
    """Base of the requests; `match` on the concrete class."""

    __slots__ = ()


Program = Generator[Request, Any, Any]


@final
class Ticket:
    """Stands for background work until it is waited for. `value` is set once `done`."""

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
        """A ticket whose work was done before this program began (a resumed one)."""
        ticket = cls(-1, Barrier())
        ticket.done, ticket.value = True, value
        return ticket

    def __repr__(self) -> str:
        return f"Ticket({self.key}, {'done' if self.done else 'in flight'}: {self.request})"


@final
@dataclass(frozen=True, slots=True)
class Message:
    """What arrived: `value` is the receiver's own copy, `stamp` the number sent with it."""

    source: int
    value: Tensor
    stamp: int = 0


@final
@dataclass(frozen=True, slots=True)
class Backward(Request):
    """Forward and backward on this rank's minibatch of `step`; the gradients of micro-batches accumulate.

    The gradient is this rank's *share* of the global mean: its samples' summed gradients over the nominal global
    batch, so that the plain sum over ranks, divided by the summed `weight` of the tail, is the mean over all samples.

    Args:
        step: which minibatch.
        on_bucket: given each bucket the moment its gradients are final, inside backward and in bucket order,
            returns the request, sub-program or `Start` of one to begin on it. The answer is then the tuple of tickets.
        before_forward: given a bucket's number the moment the forward pass first needs its parameters, returns a
            sub-program that is run to its end before the pass continues: wait for what must arrive, apply it.
    """

    step: int
    on_bucket: Callable[[Gradient], Request | Program] | None = field(default=None, repr=False)
    before_forward: Callable[[int], Program] | None = field(default=None, repr=False)


class Collective(Protocol):
    """What takes a sum in place of the communication library (`workbench.collectives`); `ctx` is a `program.Context`."""

    def all_reduce(self, ctx: Any, value: Value) -> Request | Program:
        """Sum `value` over all ranks."""

    def reduce_scatter(self, ctx: Any, value: Value) -> Request | Program:
        """Sum this rank's block."""

    def all_gather(self, ctx: Any, value: Value) -> Request | Program:
        """Spread every rank's block."""


@final
@dataclass(frozen=True, slots=True)
class AllReduce(Request):
    """Sum over all ranks. Consumes `value`: the sum is written into the same memory, which is the answer.

    Args:
        collective: how the sum is taken; None for the library's own all-reduce.
        lane: whose memory the collective uses (`Context.on_lane`): sums of one bucket that are in flight at once need one each.
    """

    value: Value = field(repr=False)
    collective: Collective | None = field(default=None, repr=False)
    lane: int = field(default=0, repr=False)


@final
@dataclass(frozen=True, slots=True)
class ReduceScatter(Request):
    """Sum over all ranks, each rank its own block (`gradients.block_bounds`). The other blocks' content is lost."""

    value: Value = field(repr=False)
    collective: Collective | None = field(default=None, repr=False)


@final
@dataclass(frozen=True, slots=True)
class AllGather(Request):
    """Give every rank each rank's own block: after `ReduceScatter`, the whole sum."""

    value: Value = field(repr=False)
    collective: Collective | None = field(default=None, repr=False)


@final
@dataclass(frozen=True, slots=True)
class Broadcast(Request):
    """Replace every rank's `value` by the root's, in place."""

    value: Value = field(repr=False)
    root: int = 0


@final
@dataclass(frozen=True, slots=True)
class Barrier(Request):
    """Return when every rank has come here."""


@final
@dataclass(frozen=True, slots=True)
class Send(Request):
    """Send a copy of `value` to one rank. Rendezvous: it may return only when the receiver has asked for it,

    so two ranks that both send first and receive second deadlock. `Start` one of the two. A rank may send to itself.

    Args:
        tag: 0 to 999. Hops of collectives have 0 to 899; a program that shares its tags with a collective uses the others.
        stamp: a number from 0 to 2^40 - 1 that travels with the value, in a header of 8 bytes; the receiver then says `stamped`. None
            for none.
    """

    to: int
    value: Value = field(repr=False)
    tag: int = 0
    stamp: int | None = None


ANY = -1


@final
@dataclass(frozen=True, slots=True)
class PeerLeft:
    """In place of a message: this rank's process has ended, and nothing comes from it any more. What is sent to it is lost."""

    rank: int


@final
@dataclass(frozen=True, slots=True)
class Recv(Request):
    """Receive one message. `like` says its size and dtype; the answer is a `Message` in memory of its own.

    Args:
        departures: of a receive from any rank: the answer is `PeerLeft` once for each rank that has left, on each tag.
    """

    source: int
    like: Tensor = field(repr=False)
    tag: int = 0
    stamped: bool = False
    departures: bool = False


@final
@dataclass(frozen=True, slots=True)
class Local(Request):
    """Work of this rank's processor inside a communication: named and counted, so that a record can say where time went.

    Args:
        kind: "encode", "decode" or "sum"; "all_reduce" for another library's, of whose bytes nothing is known.
        num_bytes: of uncompressed values that it goes through.
        action: does it; the answer is what it returns. That of a "sum" is None, and a simulation without values skips it.
    """

    kind: str
    num_bytes: int
    action: Callable[[], Any] = field(repr=False)


FREE = -1  # a lane of its own


@final
@dataclass(frozen=True, slots=True)
class Start(Request):
    """Begin a request or sub-program in the background; every rank must start the same ones in the same order.

    Args:
        lane: works of one lane run one after the other, in order of starting; lanes run side by side. `FREE`: a lane of its own.
        priority: among free sub-programs that could continue, the one of the lowest number does.
        shares_tags: its messages are the program's own: a server next to its worker. Other sub-programs have tags of their own.
    """

    work: Request | Program = field(repr=False)
    lane: int = 0
    priority: int = 0
    shares_tags: bool = False


@final
@dataclass(frozen=True, slots=True)
class Wait(Request):
    """Until the ticket's work is done; the answer is its value. An error of the work is raised here."""

    ticket: Ticket


@final
@dataclass(frozen=True, slots=True)
class WaitAny(Request):
    """Until one of the tickets is done; the answer is (position, value), or None after `timeout_s`."""

    tickets: tuple[Ticket, ...]
    timeout_s: float | None = None


@final
@dataclass(frozen=True, slots=True)
class Apply(Request):
    """One optimizer step with a summed gradient, or with one bucket of it. Consumes the gradient.

    The answer of a server's (`master`) is True if the run was asked to stop: the server ends it for all at one version.

    Args:
        lr_scale: factor on the learning rate of this step.
        local: this rank's gradient alone, which no other rank sees: a word of control in it is not yet known to all.
        master: update the server's copy of the parameters, and not the replica with which gradients are computed.
        of: (source, version) of each gradient that was summed, where that is not the gradient's own version.
        dropped: (source, version) of gradients that came too late and are not in it, since the last update.
        completes: of a server's: how many steps of the run this update completes. The schedule of evaluations counts in these. None:
            a step is a minibatch of each worker, and each gradient is one, also a dropped one.
    """

    gradient: Gradient = field(repr=False)
    lr_scale: float = 1.0
    local: bool = False
    master: bool = False
    of: tuple[tuple[int, int], ...] = ()
    dropped: tuple[tuple[int, int], ...] = ()
    completes: float | None = None


@final
@dataclass(frozen=True, slots=True)
class Discard(Request):
    """Give a gradient's buffer back unapplied: it was sent, and is another's to apply."""

    gradient: Gradient = field(repr=False)


@final
@dataclass(frozen=True, slots=True)
class ReadParameters(Request):
    """The trainable parameters as one flat tensor in layout order, without tails: a copy."""


@final
@dataclass(frozen=True, slots=True)
class WriteParameters(Request):
    """Overwrite the trainable parameters from such a tensor."""

    value: Tensor = field(repr=False)


@final
@dataclass(frozen=True, slots=True)
class PackParameters(Request):
    """The parameters of one bucket, or of all, laid out as its gradient is: a `Gradient` of weight 1 in memory of its own.

    Summed over ranks it is their average once unpacked: the tail sums the weights.

    Args:
        master: the server's copy, made at its first use from the replica.
        step: that of the value, where it goes through a collective: codecs draw their noise by it, and `PowerSGD` begins by it.
    """

    bucket: int | None = None
    master: bool = False
    step: int = -1


@final
@dataclass(frozen=True, slots=True)
class UnpackParameters(Request):
    """Overwrite the replica's parameters by such a value, divided by its weight."""

    value: Gradient = field(repr=False)


@final
@dataclass(frozen=True, slots=True)
class Now(Request):
    """Seconds since the run began, wall or virtual."""


@dataclass(frozen=True, slots=True)
class State:
    """What a program is resumed from: a frozen dataclass in the algorithm's file.

    Its fields are tickets, gradients, tensors, plain numbers, None, or tuples of these: a checkpoint keeps them by name.
    """

    def unused(self, step: int) -> State | None:
        """This rank's gradients that are in none of the sums up to that step: ranks that continue as fewer begin from these."""
        return None


@final
@dataclass(frozen=True, slots=True)
class EndStep(Request):
    """The end of a step: metrics are recorded here, and here alone a run stops, changes or is resumed.

    Args:
        step: the step that ends.
        state: what the program is given as `ctx.resumed` to continue from here; None where it needs nothing.
        dropped: this rank's gradient of the step came too late and was not used.
    """

    step: int
    state: State | None = None
    dropped: bool = False
