"""The sizes of a notebook, read from `notebooks/sizes/NOTEBOOK.yaml` and checked: which parameters "smoke", "ci" and "full" stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from workbench.errors import ConfigError
from workbench.experiments.catalogue import parameters_of
from workbench.experiments.yaml_file import read_yaml
from workbench.naming import unknown
from workbench.papers.claims import SIZES, Size

RANKS = "ranks"


@final
@dataclass(frozen=True, slots=True)
class Sizes:
    """What a notebook is run with at each size, and which ranks can be lent to it.

    Attributes:
        parameters: size -> values that go before the notebook's defaults.
        ranks: such as "local:4", as `lending.lent_key` spells them.
    """

    parameters: Mapping[Size, Mapping[str, Any]]
    ranks: tuple[str, ...]


def sizes_file(notebook: Path) -> Path:
    """Where the sizes of a notebook are, beside it."""
    return notebook.parent / "sizes" / f"{notebook.stem}.yaml"


def check_size(size: str) -> Size:
    """A size by its name.

    Raises:
        ConfigError: it is none; the nearest is named.
    """
    if size not in SIZES:
        raise unknown("size", size, SIZES)
    return size


def parse_ranks(words: str) -> tuple[int, str]:
    """How many ranks, and their launcher.

    >>> parse_ranks("emulated:1gbit:4")
    (4, 'emulated:1gbit')

    Raises:
        ConfigError: it does not end in a number of ranks.
    """
    launcher, colon, number = words.rpartition(":")
    if not colon or not launcher or not number.isdigit() or int(number) < 1:
        raise ConfigError(f"ranks {words!r}: write LAUNCHER:NUMBER, such as local:4")
    return int(number), launcher


def read_sizes(notebook: Path) -> Sizes | None:
    """The sizes of a notebook; None where it has no file of them.

    Raises:
        ConfigError: a size or a parameter that there is not, or one of the three sizes is missing.
    """
    path = sizes_file(notebook)
    if not path.is_file():
        return None
    words = read_yaml(path)
    for name in words:
        if name not in (*SIZES, RANKS):
            raise ConfigError(f"{path}: {unknown('size', name, (*SIZES, RANKS))}")
    known = {parameter.name for parameter in parameters_of(notebook)}
    parameters: dict[Size, Mapping[str, Any]] = {}
    for size in SIZES:
        if size not in words:
            raise ConfigError(f"{path} has no `{size}`: write `{size}: {{}}` where the notebook's own values are meant")
        values = words[size] or {}
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {size} is a mapping of parameters to values")
        for name in values:
            if name == "size":
                raise ConfigError(f"{path}: {size}: `size` is set by itself: leave it out")
            if name not in known:
                raise ConfigError(f"{path}: {size}: {unknown(f'parameter of {notebook.stem}', str(name), sorted(known))}")
        parameters[size] = values
    ranks = words.get(RANKS) or []
    if not isinstance(ranks, list) or not all(isinstance(item, str) for item in ranks):
        raise ConfigError(f"{path}: {RANKS} is a list of words, such as [local:4]")
    for item in ranks:
        try:
            parse_ranks(item)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    return Sizes(parameters, tuple(ranks))


def values_at(notebook: Path, size: Size) -> dict[str, Any]:
    """What a notebook is run with at a size, `size` itself among it where that is one of its parameters.

    Raises:
        ConfigError: it has no such size.
    """
    sizes = read_sizes(notebook)
    if sizes is None and size != "smoke":
        raise ConfigError(
            f"{notebook.stem} knows no sizes ({sizes_file(notebook).name} is not in {sizes_file(notebook).parent}): leave size out"
        )
    values = dict(sizes.parameters[size]) if sizes else {}
    named = any(parameter.name == "size" for parameter in parameters_of(notebook))
    return {**values, "size": size} if named else values
