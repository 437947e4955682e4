"""The vocabulary: everything an algorithm may ask of the runtime that runs it. The list is closed.

An algorithm is a generator. It yields one of these requests and is resumed with the answer; it never learns whether
time is wall or virtual, whether a peer is a process or a simulated worker, or which library carries its bytes.

| request | answer |
|---|---|
| `Backward` | the `Gradient` of this rank's next minibatch; with `on_bucket`, one ticket a bucket, in bucket order |
| `AllReduce`, `Broadcast` | the same value, summed over ranks or replaced by the root's, in place |
| `Barrier` | None |
| `Send`, `Recv` | None; a `Message` |
| `Start` | a `Ticket` for a request or sub-program that now runs in the background |
| `Wait`, `WaitAny` | the ticket's value; (position, value) of one that is complete |
| `Apply` | None: the optimizer has taken its step with this gradient or bucket |
| `ReadParameters`, `WriteParameters` | flat copy of the parameters; None |
| `Now` | seconds since the run began |
| `EndStep` | None; the program may be closed here and resumed later from `state` |
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, final

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
    """What arrived: `value` is the receiver's own copy."""

    source: int
    value: Tensor


@final
@dataclass(frozen=True, slots=True)
class Backward(Request):
    """Forward and backward on this rank's minibatch of `step`; the gradients of micro-batches accumulate.

    The gradient is this rank's *share* of the global mean: its samples' summed gradients over the nominal global
    batch, so that the plain sum over ranks, divided by the summed `weight` of the tail, is the mean over all samples.

    Args:
        step: which minibatch.
        on_bucket: given each bucket the moment its gradients are final, inside backward and in bucket order,
            returns the request or sub-program to start on it. The answer is then the tuple of tickets.
    """

    step: int
    on_bucket: Callable[[Gradient], Request | Program] | None = field(default=None, repr=False)


@final
@dataclass(frozen=True, slots=True)
class AllReduce(Request):
    """Sum over all ranks. Consumes `value`: the sum is written into the same memory, which is the answer."""

    value: Value = field(repr=False)


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

    so two ranks that both send first and receive second deadlock. `Start` one of the two.
    """

    to: int
    value: Value = field(repr=False)
    tag: int = 0


ANY = -1


@final
@dataclass(frozen=True, slots=True)
class Recv(Request):
    """Receive one message. `like` says its size and dtype; the answer is a `Message` in memory of its own."""

    source: int
    like: Tensor = field(repr=False)
    tag: int = 0


@final
@dataclass(frozen=True, slots=True)
class Start(Request):
    """Begin a request or sub-program in the background; every rank must start the same ones in the same order."""

    work: Request | Program = field(repr=False)


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
    """One optimizer step with a summed gradient, or with one bucket of it. Consumes the gradient."""

    gradient: Gradient = field(repr=False)
    lr_scale: float = 1.0


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
class Now(Request):
    """Seconds since the run began, wall or virtual."""


@final
@dataclass(frozen=True, slots=True)
class EndStep(Request):
    """The end of a step: metrics are recorded here, and here alone a run stops, changes or is resumed.

    Args:
        step: the step that ends.
        state: what the program must be given as `ctx.resumed` to go on from here: a tuple of tickets, tensors, numbers.
    """

    step: int
    state: tuple[Any, ...] = ()
