"""All-reduce in two levels: in groups of neighbouring ranks (a machine), then among one leader of each group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, final

from workbench.arguments import check_whole
from workbench.codecs.base import Codec, SummableCodec
from workbench.collectives.base import Collective, Link, Native, PlainLink
from workbench.collectives.linear import Linear
from workbench.collectives.ring import Ring
from workbench.collectives.rooted import Rooted
from workbench.collectives.wire import check_codec
from workbench.errors import ConfigError
from workbench.ops import Local, Program, Recv, Request, Send, Start, Value, Wait
from workbench.program import Context, lower, perform, replace_requests
from workbench.rng import derive_seed


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Hierarchical(Collective):
    """Each group of `group` consecutive ranks sums at its first rank. These leaders sum, and send the sum back.

    With group = 1 it is `outer`; with one group of all ranks it is `inner`. The last group may be smaller.

    Attributes:
        group: number of consecutive ranks that sum first, such as those of a host.
        codec: compression of the messages on both levels; or give codecs to `inner`, to `outer` or to both.
        inner: sums within a group: `Linear` or `Tree`.
        outer: sums among the groups' first ranks: any but `Native`; another `Hierarchical` makes three levels.
    """

    group: int = 4
    codec: Codec | None = None
    inner: Rooted = Linear()
    outer: Collective = Ring()

    def __post_init__(self) -> None:
        check_codec(self.codec)
        ranks = "the number of ranks of a group, 1 or more, such as those of one machine"
        check_whole("group", self.group, 1, ranks)
        if not isinstance(self.inner, Rooted):
            raise ConfigError(f"inner={self.inner} does not sum at the first rank of a group: use Linear() or Tree()")
        if not isinstance(self.outer, Collective) or isinstance(self.outer, Native):
            raise ConfigError(
                f"outer={self.outer} does not sum over the first ranks of the groups: use Ring(), Tree() or "
                "HalvingDoubling()"
            )
        if isinstance(getattr(self.outer, "inner", None), Native) and isinstance(
            getattr(self.outer, "plain", None), SummableCodec | None
        ):
            raise ConfigError(
                f"outer={self.outer} sums over all ranks, not only the first ranks of the groups: use it with "
                "inner=Ring()"
            )
        if self.codec is not None:
            for name, level in (("inner", self.inner), ("outer", self.outer)):
                if not hasattr(level, "codec") or level.codec is not None:
                    raise ConfigError(
                        f"codec={self.codec} is for both levels, and {name} is {level}: give each level its own codec"
                    )

    @property
    def needs_link(self) -> bool:
        return self.outer.needs_link

    @property
    def lossy(self) -> bool:
        return any(level.lossy for level in self._levels())

    @property
    def exact(self) -> Collective:
        if not self.lossy:
            return self
        return Hierarchical(group=self.group, inner=replace(self.inner, codec=None), outer=self.outer.exact)

    @property
    def uncorrected(self) -> str:
        inner, outer = self._levels()
        return inner.uncorrected or outer.uncorrected

    @property
    def keeps_residual(self) -> bool:
        return self.outer.keeps_residual

    @property
    def calls_library(self) -> bool:
        return self.outer.calls_library

    @property
    def fixed_schedule(self) -> bool:
        return self.outer.fixed_schedule

    def check(self, num_workers: int) -> None:
        self.outer.check(-(-num_workers // self.group))

    def all_reduce(self, ctx: Context, value: Value) -> Program:
        inner, outer = self._levels()
        first = ctx.rank // self.group * self.group
        members = range(first, min(first + self.group, ctx.num_workers))
        leaders = range(0, ctx.num_workers, self.group)
        grouped = min(self.group, ctx.num_workers) > 1
        if grouped:
            yield from among(members, inner.reduce(_group_context(ctx, members, f"within {first}"), value))
        if ctx.rank == first:
            part = _group_context(ctx, leaders, "leaders")
            yield from among(leaders, lower(part, perform(outer.all_reduce(part, value))))
        if grouped:  # also in a group of one: leaders hold the same sum and encode it with the same noise
            yield from among(members, inner.broadcast(_group_context(ctx, members, "back"), value))
        return value

    def _levels(self) -> tuple[Rooted, Collective]:
        levels: tuple[Any, Any] = (self.inner, self.outer)
        if self.codec is None:
            return levels
        return replace(levels[0], codec=self.codec), replace(levels[1], codec=self.codec)

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        inner, outer = self._levels()
        leader, place = divmod(rank, self.group)
        members = min(self.group, num_workers - leader * self.group)
        sent = inner.bytes_sent(place, members, numel, itemsize, tail)
        if place == 0:
            sent += outer.bytes_sent(leader, -(-num_workers // self.group), numel, itemsize, tail)
        return sent

    def seconds(self, num_bytes: float, num_workers: int, link: Link) -> float:
        """`inner` among min(group, p) ranks, then `outer` among ceil(p / group); both levels have the same link."""
        inner, outer = self._levels()
        within_s = inner.seconds(num_bytes, min(self.group, num_workers), link)
        return within_s + outer.seconds(num_bytes, -(-num_workers // self.group), link)


def among(ranks: Sequence[int], program: Program) -> Program:
    """Run a sub-program written for ranks 0, 1, ... on these ranks."""
    return replace_requests(program, lambda request: _translated(ranks, request))


def _translated(ranks: Sequence[int], request: Request) -> Request:
    match request:
        case Send(to):
            return replace(request, to=ranks[to])
        case Recv(source):
            return replace(request, source=ranks[source])
        case Start(work) if isinstance(work, Send | Recv):
            return replace(request, work=_translated(ranks, work))
        case _:
            assert isinstance(request, Local | Wait), f"{request} cannot be answered among some of the ranks"
            return request


def _group_context(ctx: Context, ranks: range, purpose: str) -> Context:
    """Return the context of a rank in a group. Each purpose draws its own noise.

    It has no measurements of the library's all-reduce, which needs all ranks: otherwise `Auto` would choose it.
    """
    link = ctx.link
    if hasattr(link, "native_s"):
        link = PlainLink(**{item.name: getattr(link, item.name) for item in fields(PlainLink)})
    return replace(
        ctx,
        rank=ranks.index(ctx.rank),
        num_workers=len(ranks),
        link=link,
        seed=derive_seed(ctx.seed, f"codec {purpose}"),
    )
