"""Small selections of all combinations that still contain every combination of a few choices."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import combinations
from random import Random
from typing import Any, TypeVar

from workbench import codecs, collectives
from workbench.codecs import ErrorFeedback
from workbench.collectives import Collective, Ring, Tree
from workbench.errors import ConfigError
from workbench.naming import kinds_of
from workbench.program import Algorithm

Row = TypeVar("Row", bound=Hashable)
TRIED = 12  # rows of which the best is taken


def pairs_of(row: Sequence[Hashable]) -> set[Hashable]:
    """What two columns of the row hold, for each two: with these in `covering` a selection is pairwise.

    >>> sorted(pairs_of("ab"))
    [(0, 'a', 1, 'b')]
    """
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}


def covering(rows: Sequence[Row], parts: Callable[[Row], Iterable[Hashable]], seed: int = 0) -> list[Row]:
    """Few of the rows, which together have every part of any row; always the same ones.

    >>> rows = [(a, b, c) for a in "01" for b in "01" for c in "01"]
    >>> len(rows), len(covering(rows, pairs_of)) <= 6
    (8, True)
    """
    random, parts_of = Random(seed), {row: frozenset(parts(row)) for row in rows}
    having: dict[Hashable, list[Row]] = {}
    for row in rows:
        for part in sorted(parts_of[row], key=repr):
            having.setdefault(part, []).append(row)
    missing, found = dict.fromkeys(having), []
    for part in sorted(having, key=lambda part: len(having[part])):  # those of which there are few first
        if part in missing:
            tried = random.sample(having[part], min(TRIED, len(having[part])))
            best = max(tried, key=lambda row: sum(part in missing for part in parts_of[row]))
            found.append(best)
            for covered in parts_of[best]:
                missing.pop(covered, None)
    return found


def alternatives(item: Any) -> dict[str, Any]:
    """A frozen dataclass with one of its settings at another value, by what was changed, for each such value that it accepts.

    >>> alternatives(Ring())
    {'Ring.chunks=2': Ring(chunks=2)}
    """
    found = {}
    for field in fields(item):
        for value in _others(kinds_of(type(item)).get(field.name, ()), getattr(item, field.name)):
            try:
                found[f"{type(item).__name__}.{field.name}={value}"] = replace(item, **{field.name: value})
            except ConfigError:
                continue
    return found


def _others(kinds: tuple[Any, ...], present: Any) -> list[Any]:
    """A few other values of these kinds (`naming.kinds_of`)."""
    found: list[Any] = []
    for kind in kinds:
        if not isinstance(kind, type):
            found.append(kind)  # one of the words or numbers of a list
        elif kind is bool:
            found += [False, True]
        elif kind is int:
            found.append(2 if present != 2 else 3)
        elif issubclass(kind, Collective):
            found += [Ring(), Tree()]
    return [value for value in found if value != present]


CODINGS = ("", *codecs.names(), *(f"{name}+feedback" for name in codecs.names()))


@cache
def versions(collective: str, codec: str) -> dict[str, Collective]:
    """That collective with that codec: as it is, and with one setting of either at another value; none where it takes no such codec."""
    try:
        plain: Any = collectives.get(f"{collective}:{codec}" if codec else collective)
    except ConfigError:
        return {}
    coded = getattr(plain, "codec", None)
    fed = isinstance(coded, ErrorFeedback)
    codings = alternatives(coded.codec if fed else coded) if coded is not None else {}
    found = {
        name: replace(plain, codec=ErrorFeedback(codec=other) if fed else other)
        for name, other in codings.items()
        if other.contracts or not fed
    }
    return {"": plain, **alternatives(plain), **found}


def takes(algorithm: Algorithm, setting: str) -> bool:
    """Whether the algorithm has such a setting."""
    return setting in {field.name for field in fields(algorithm)}
