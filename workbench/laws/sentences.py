"""The message of a law that fails: property, ranks, step and coordinate, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.program import Algorithm, settings_of


class NotTried(Exception):
    """The law does not hold for this kind of algorithm; the text says why."""


class Broken(AssertionError):
    """A law does not hold; the text says which property, on which rank and in which step, seen against expected."""


def assert_near(law: str, found: Tensor, expected: Tensor, tolerance: float, where: str) -> None:
    """The largest difference is at most `tolerance` times the largest expected value, or 1; with 0, no bit differs."""
    if found.shape != expected.shape:
        raise Broken(f"{law}: {where}, {tuple(found.shape)} values in place of {tuple(expected.shape)}")
    if tolerance == 0 and torch.equal(found, expected):
        return
    difference = (found - expected).abs().reshape(-1).nan_to_num(nan=torch.inf)
    if tolerance > 0 and float(difference.max()) <= tolerance * max(1.0, float(expected.abs().max())):
        return
    worst = int(difference.argmax())
    ours, theirs = float(found.reshape(-1)[worst]), float(expected.reshape(-1)[worst])
    num_wrong = int((difference > tolerance * max(1.0, float(expected.abs().max()))).sum())
    digits = 6 if f"{ours:.6g}" != f"{theirs:.6g}" else 17
    raise Broken(
        f"{law}: {where}, coordinate {worst} is {ours:.{digits}g} and should be {theirs:.{digits}g} "
        f"({num_wrong} of {difference.numel()} coordinates are wrong, the largest difference is {float(difference.max()):.2e})"
    )


def assert_equal_ranks(
    law: str, values: Sequence[Tensor], when: str, tolerance: float = 0.0, names: Sequence[int] = ()
) -> None:
    """All ranks hold what the first does; `names` are their numbers, if not 0, 1, 2, ..."""
    names = names or range(len(values))
    apart: dict[int, str] = {}
    for rank, value in zip(names, values, strict=True):
        try:
            assert_near(law, value, values[0], tolerance, f"{when}, rank {rank} unlike rank {names[0]}")
        except Broken as error:
            apart[rank] = str(error)
    if apart:
        others = f"; ranks {list(apart)} differ from rank {names[0]}" if len(apart) > 1 else ""
        raise Broken(f"{next(iter(apart.values()))}{others}")


def assert_same_rows(law: str, found: Sequence[Any], expected: Sequence[Any], where: str) -> None:
    """Rows of a record, steps say, are equal one by one; the first that differs is named, with what differs in it."""
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=False)):
        if ours == theirs:
            continue
        if isinstance(ours, dict) and isinstance(theirs, dict):
            differ = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
            place = f"step {theirs['step']}" if "step" in theirs else f"row {number}"
            ours, theirs = ({name: row.get(name) for name in differ} for row in (ours, theirs))
        else:
            place = f"row {number}"
        raise Broken(f"{law}: {where}, {place} has {ours} and should have {theirs}")
    if len(found) != len(expected):
        raise Broken(f"{law}: {where}, {len(found)} rows in place of {len(expected)}")


def assert_holds(law: str, holds: bool, where: str) -> None:
    """Any other property."""
    if not holds:
        raise Broken(f"{law}: not so {where}")


def steps_that(rows: Sequence[bool]) -> list[int]:
    """Numbers of the steps of which it is true: for a message."""
    return [step for step, value in enumerate(rows) if value]


def name_of(algorithm: Algorithm) -> str:
    """Short, for a test's id: PipeSGD-3-Ring."""
    words = [word_of(value) for value in settings_of(algorithm).values()]
    return "-".join([type(algorithm).__name__, *words])


def word_of(value: object) -> str:
    """Return a setting in such a name."""
    if not hasattr(value, "all_reduce"):
        return str(value)
    return str(value).replace("()", "")
