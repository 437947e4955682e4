"""The base of all collectives: a collective is a request to the library, or a sub-program of `Send` and `Recv`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, final

from torch import Tensor

from workbench.errors import ConfigError
from workbench.gradients import Gradient, Layout
from workbench.ops import AllGather, AllReduce, Program, ReduceScatter, Request, Value
from workbench.program import Context


class Link(Protocol):
    """The costs of a network in the alpha-beta-gamma model: a `costs.Network`, or measured (`ctx.link`)."""

    @property
    def latency_s(self) -> float:
        """alpha, of one message."""

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """1 / beta, of one interface in one direction."""

    @property
    def sum_s_per_byte(self) -> float:
        """gamma, to add a received byte to one of this rank."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlainLink:
    """A `Link` without measurements of the library's own sums."""

    latency_s: float = 1.0
    bandwidth_bytes_per_s: float = 1.0
    sum_s_per_byte: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Collective(ABC):
    """A way to sum a value over all ranks. A gradient of several buckets is summed bucket by bucket."""

    def __repr__(self) -> str:
        """Show the settings that differ from the defaults; legends and records contain it."""
        changed = [
            f"{item.name}={given!r}" for item in fields(self) if (given := getattr(self, item.name)) != item.default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"

    @property
    def needs_link(self) -> bool:
        """Return True if it needs the network's costs in `ctx.link`."""
        return False

    @property
    def lossy(self) -> bool:
        """Return True if the result differs from the sum by more than rounding.

        A lossy collective cannot be inside another compression, whose messages must be summed exactly.
        """
        return getattr(self, "codec", None) is not None

    @property
    def exact(self) -> Collective:
        """The same sum without loss, for values such as parameters; itself if it is not lossy."""
        if not self.lossy:
            return self
        if "codec" in {item.name for item in fields(self)}:
            plain: Any = self
            without: Collective = replace(plain, codec=None)
            return without
        return Native()

    @property
    def uncorrected(self) -> str:
        """What each sum loses permanently, if training fails because of it; otherwise "".

        Rounding does not count as a loss, nor does what error feedback adds to the next sum. `records/combinations.md`
        has the losses.
        """
        codec = getattr(self, "codec", None)
        return f"{codec}" if codec is not None and not codec.reencodes else ""

    @property
    def keeps_residual(self) -> bool:
        """Return True if the loss of a sum is added to the next sum of that value.

        Then all ranks must take part in each sum.
        """
        return False

    @property
    def calls_library(self) -> bool:
        """Return True if it may call the library's own all-reduce, which cannot run during other messages of a rank."""
        return False

    @property
    def splits(self) -> bool:
        """Return True if it has two halves: `reduce_scatter` and `all_gather`."""
        return False

    @property
    def fixed_schedule(self) -> bool:
        """Return True if its messages depend only on the rank, the number of ranks and the value's size.

        A simulation without values then records them once and repeats the schedule.
        """
        return False

    def select(self, ctx: Context, value: Value) -> Collective:
        """Return the collective for this sum: itself, except for `Auto`."""
        return self

    @abstractmethod
    def all_reduce(self, ctx: Context, value: Value) -> Request | Program:
        """Sum `value` over all ranks, in place, and return it. Start it in the same order on every rank."""

    def reduce_scatter(self, ctx: Context, value: Value) -> Request | Program:
        """Do the first half: rank r gets the sum of block r (`gradients.block_bounds`); other blocks are undefined.

        Raises:
            ConfigError: it has no halves.
        """
        raise _no_halves(self)

    def all_gather(self, ctx: Context, value: Value) -> Request | Program:
        """Do the second half: send rank r's block r to all ranks, in place, and return `value`.

        Raises:
            ConfigError: it has no halves.
        """
        raise _no_halves(self)

    @abstractmethod
    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        """Return the bytes that `rank` sends for a bucket of `numel` elements, the last `tail` uncompressed."""

    def messages_sent(self, num_workers: int) -> int:
        """Return the number of messages of a rank in the sum of one bucket, roughly; the library's own are none."""
        return 2 * (num_workers - 1)

    def mean_bytes(self, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        """Return the mean of `bytes_sent` over the ranks. A root and a leaf, for example, differ much."""
        return (
            sum(self.bytes_sent(rank, num_workers, numel, itemsize, tail) for rank in range(num_workers)) / num_workers
        )

    def bytes_of(self, rank: int, num_workers: int, layout: Layout) -> float:
        """Return the bytes that `rank` sends for a whole gradient, bucket by bucket."""
        return float(
            sum(
                self.bytes_sent(
                    rank, num_workers, piece.stop - piece.start, layout.itemsize, tail=piece.stop - piece.tail
                )
                for piece in layout.buckets
            )
        )

    def seconds(self, num_bytes: float, num_workers: int, link: Link) -> float:
        """Return the seconds for `num_bytes` of float32 by the alpha-beta-gamma model, without encoding and decoding.

        p ranks, n bytes, alpha = `latency_s`, beta = 1 / `bandwidth_bytes_per_s`, gamma = `sum_s_per_byte`. With a
        codec, n beta counts the encoded bytes. The formulas are written without a codec.

        Paper: thakur2005optimization (the cost model).
        """
        raise ConfigError(f"no formula predicts the time of {self}: it cannot be a candidate of Auto")

    def check(self, num_workers: int) -> None:  # noqa: B027 - most run on any number
        """Raise `ConfigError` unless it can sum over this many ranks."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Native(Collective):
    """The library's own all-reduce (gloo, NCCL, MPI).

    Its bytes are those of a bandwidth-optimal algorithm, 2 (p-1)/p n a rank; the library may send more.
    """

    @property
    def calls_library(self) -> bool:
        return True

    @property
    def splits(self) -> bool:
        return True

    def all_reduce(self, ctx: Context, value: Value) -> Request | Program:
        return AllReduce(value)

    def reduce_scatter(self, ctx: Context, value: Value) -> Request | Program:
        return ReduceScatter(value)

    def all_gather(self, ctx: Context, value: Value) -> Request | Program:
        return AllGather(value)

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        return native_bytes(num_workers, numel * itemsize)

    def messages_sent(self, num_workers: int) -> int:
        return 0

    def seconds(self, num_bytes: float, num_workers: int, link: Link) -> float:
        """Return a ring's 2 (p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma; the library may be faster."""
        share = (num_workers - 1) / num_workers * num_bytes
        return (
            2 * (num_workers - 1) * link.latency_s
            + 2 * share / link.bandwidth_bytes_per_s
            + share * link.sum_s_per_byte
        )


def native_bytes(num_workers: int, message_bytes: float) -> float:
    """2 (p-1)/p n: the least that a rank must send to all-reduce n bytes over p ranks (patarasuk2009bandwidth)."""
    return 2 * (num_workers - 1) / num_workers * message_bytes


def flat_of(value: Value) -> Tensor:
    """Return the 1-D tensor of a gradient or tensor; it shares memory."""
    if isinstance(value, Gradient):
        return value.flat
    # A view of a view takes a microsecond.
    return value if value.dim() == 1 and value.is_contiguous() else value.view(-1)


def _no_halves(collective: Collective) -> ConfigError:
    return ConfigError(f"{collective} has no separate halves: use Ring() or Native()")
