"""The sizes of a notebook, from `notebooks/sizes/NOTEBOOK.yaml`: the parameters of "smoke", "ci" and "full"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from workbench.errors import ConfigError
from workbench.experiments.notebook_catalogue import parameters_of
from workbench.experiments.yaml_file import read_yaml
from workbench.naming import unknown
from workbench.papers.claims import SIZES, Size

RANKS = "ranks"
CLOCK = "clock"


@final
@dataclass(frozen=True, slots=True)
class Sizes:
    """A notebook's parameters at each size, and how it is executed.

    Attributes:
        parameters: size -> values that replace the notebook's defaults.
        ranks: ranks that a pool can lend to it: keys such as "local:4", see `pool_client.pool_key`.
        virtual: sizes at which its results are the same on a busy machine, because it measures nothing on a real clock.
            The file says so by `clock: virtual`, or for single sizes by `clock: {ci: virtual}`.
    """

    parameters: Mapping[Size, Mapping[str, Any]]
    ranks: tuple[str, ...]
    virtual: frozenset[str] = frozenset()


def sizes_file(notebook: Path) -> Path:
    """Return the path of a notebook's file of sizes."""
    return notebook.parent / "sizes" / f"{notebook.stem}.yaml"


def check_size(size: str) -> Size:
    """Return a size by its name.

    Raises:
        ConfigError: there is no such size; the message names the nearest one.
    """
    if size not in SIZES:
        raise unknown("size", size, SIZES)
    return size


def parse_ranks(key: str) -> tuple[int, str]:
    """Return the number of ranks and the launcher of a pool's key.

    >>> parse_ranks("emulated:1gbit:4")
    (4, 'emulated:1gbit')

    Raises:
        ConfigError: the key does not end in a number of ranks.
    """
    launcher, colon, number = key.rpartition(":")
    if not colon or not launcher or not number.isdigit() or int(number) < 1:
        raise ConfigError(f"ranks {key!r}: write LAUNCHER:NUMBER, such as local:4")
    return int(number), launcher


def read_sizes(notebook: Path) -> Sizes | None:
    """Read the sizes of a notebook; None if it has no file of sizes.

    Raises:
        ConfigError: a size or a parameter is unknown, or one of the three sizes is missing.
    """
    path = sizes_file(notebook)
    if not path.is_file():
        return None
    content = read_yaml(path)
    for name in content:
        if name not in (*SIZES, RANKS, CLOCK):
            raise ConfigError(f"{path}: {unknown('size', name, (*SIZES, RANKS, CLOCK))}")
    known = {parameter.name for parameter in parameters_of(notebook)}
    parameters: dict[Size, Mapping[str, Any]] = {}
    for size in SIZES:
        if size not in content:
            raise ConfigError(f"{path} has no `{size}`: write `{size}: {{}}` for the notebook's own values")
        values = content[size] or {}
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {size} is a mapping of parameters to values")
        for name in values:
            if name == "size":
                raise ConfigError(f"{path}: {size}: `size` is set automatically: leave it out")
            if name not in known:
                raise ConfigError(
                    f"{path}: {size}: {unknown(f'parameter of {notebook.stem}', str(name), sorted(known))}"
                )
        parameters[size] = values
    ranks = content.get(RANKS) or []
    if not isinstance(ranks, list) or not all(isinstance(item, str) for item in ranks):
        raise ConfigError(f"{path}: {RANKS} must be a list of texts, such as [local:4]")
    for item in ranks:
        try:
            parse_ranks(item)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    virtual = _virtual_sizes(path, content.get(CLOCK, "real"))
    if virtual and ranks:
        raise ConfigError(f"{path}: ranks have a real clock: leave out `{CLOCK}: virtual`, or `{RANKS}`")
    return Sizes(parameters, tuple(ranks), virtual)


def _virtual_sizes(path: Path, clock: object) -> frozenset[str]:
    """Return the sizes with a virtual clock. `clock`: a word for all sizes, or size -> word."""
    clocks = clock if isinstance(clock, dict) else dict.fromkeys(SIZES, clock)
    for size, word in clocks.items():
        if size not in SIZES or word not in ("real", "virtual"):
            raise ConfigError(f"{path}: {CLOCK}: {clock!r}: write real or virtual, or SIZE: virtual for some sizes")
    return frozenset(size for size, word in clocks.items() if word == "virtual")


def values_at(notebook: Path, size: Size) -> dict[str, Any]:
    """Return the parameters of a notebook at a size. They include `size` if the notebook has such a parameter.

    Raises:
        ConfigError: the notebook has no sizes.
    """
    sizes = read_sizes(notebook)
    if sizes is None and size != "smoke":
        raise ConfigError(
            f"{notebook.stem} has no sizes ({sizes_file(notebook).name} is not in {sizes_file(notebook).parent}): "
            "leave size out"
        )
    values = dict(sizes.parameters[size]) if sizes else {}
    named = any(parameter.name == "size" for parameter in parameters_of(notebook))
    return {**values, "size": size} if named else values
