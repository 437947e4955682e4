"""Parses a cell: where it runs, and which kernel commands are written above it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import final

from workbench.errors import ConfigError
from workbench.naming import did_you_mean

COMMANDS = {  # name -> its help
    "ranks": "%ranks N: start N ranks.",
    "launcher": "%launcher TEXT: where further ranks start, as `launcher=` of Cluster.",
    "attach": "%attach NAME: use the ranks of a detached cluster.",
    "detach": "%detach: leave the ranks running without this notebook.",
    "status": "%status: show the ranks and their states.",
    "restart_ranks": "%restart_ranks: end the ranks, also attached ones, and start new ones. Their variables are lost.",
    "stop_ranks": "%stop_ranks: end the ranks, also attached ones. The next cell starts new ones.",
    "debug_rank": "%debug_rank 1: let breakpoints stop this rank; 0,2 for several, all for each.",
    "variables": "%variables, %variables x, y: show the ranks' variables, and which are equal on all ranks.",
}
CELL_COMMANDS = {
    "rank": "%%rank 0,2 or %%rank 1-3: run this cell on these ranks only. %%rank --tabs: a tab for each rank's output.",
    "local": "%%local x, y: run this cell in the notebook's own process, with copies of rank 0's variables.",
}
INSTALLERS = ("pip", "conda", "mamba", "uv")  # above a cell, they run once, in the notebook's own process


@final
@dataclass(frozen=True, slots=True)
class Cell:
    """A parsed cell.

    Attributes:
        commands: (name, argument) of the kernel's commands and of installers above the body, in order.
        body: the code.
        local: whether the body runs in the notebook's own process.
        ranks: the ranks that run the body, as written; None for all.
        names: for a local cell: variables to copy from rank 0.
        tabs: whether each rank has a tab for its output.
    """

    commands: tuple[tuple[str, str], ...] = ()
    body: str = ""
    local: bool = False
    ranks: str | None = None
    names: tuple[str, ...] = ()
    tabs: bool = False


def parse_cell(text: str) -> Cell:
    """Parse a cell.

    >>> parse_cell("%ranks 2\\n%%rank 0\\nprint(rank)")
    Cell(commands=(('ranks', '2'),), body='print(rank)', local=False, ranks='0', names=(), tabs=False)
    >>> parse_cell("%%local steps\\nprint(steps)")
    Cell(commands=(), body='print(steps)', local=True, ranks=None, names=('steps',), tabs=False)

    Raises:
        ConfigError: `%%rank` has no ranks, or a cell magic looks like a misspelt one of this kernel.
    """
    lines = text.split("\n")
    commands: list[tuple[str, str]] = []
    while lines:
        first = lines[0].strip()
        found = re.match(r"%(\w+)\b\s*(.*)$", first)
        if first == "" or (first.startswith("#") and commands):
            lines.pop(0)
        elif found and found[1] in (*COMMANDS, *INSTALLERS) and not found[2].startswith("?"):
            argument = found[2].strip()
            lines.pop(0)
            while argument.endswith("\\") and lines:  # continued in the next line
                argument = f"{argument[:-1].rstrip()} {lines.pop(0).strip()}"
            commands.append((found[1], argument))
        else:
            break
    first = lines[0].strip() if lines else ""
    rest = "\n".join(lines[1:])
    if re.match(r"%%local\b", first):
        names = tuple(filter(None, re.split(r"[,\s]+", first.removeprefix("%%local"))))
        for name in names:
            if not name.isidentifier():
                raise ConfigError(
                    f"{first}: {name!r} is no variable name; write %%local steps, seed to copy these variables from "
                    "rank 0"
                )
        return Cell(tuple(commands), rest, local=True, names=names)
    if re.match(r"%%ranks?\b", first):
        which, tabs = re.subn(r"(^|\s)--tabs\b", "", re.sub(r"^%%ranks?", "", first))
        which = which.strip().strip("[]()")
        if not which and not tabs:
            raise ConfigError("%%rank needs numbers of ranks: %%rank 0, %%rank 0,2 or %%rank 1-3; or %%rank --tabs")
        return Cell(tuple(commands), rest, ranks=which or None, tabs=bool(tabs))
    word = re.match(r"%%(\w+)", first)
    if word and (meant := did_you_mean(word[0], ("%%local", "%%rank"), cutoff=0.8)):
        raise ConfigError(f"there is no {word[0]}: {meant.strip()}")
    body = "\n".join(lines)
    code = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    loads_extensions = bool(code) and all(re.match(r"%(un)?load_ext\b", line) for line in code)
    return Cell(tuple(commands), body, local=loads_extensions)


def hide_commands(lines: list[str]) -> list[str]:
    """Return a cell's lines with this kernel's own lines left empty, so that the other lines keep their numbers.

    It is an input transformer of IPython on the ranks, which receive a cell as it was typed. Above a cell magic, the
    lines are removed: it must be in the first line.

    >>> hide_commands(["%ranks 2\\n", "%%rank 0\\n", "print(rank)\\n"])
    ['\\n', '\\n', 'print(rank)\\n']
    """
    text = "".join(lines)
    try:
        body = parse_cell(text).body
    except ConfigError:  # the notebook has refused such a cell
        return lines
    if body == text:
        return lines
    kept = body.splitlines(keepends=True)
    if body.startswith("%%"):
        return kept
    return ["\n"] * (text.count("\n") - body.count("\n")) + kept


def parse_ranks(text: str | None, num_ranks: int, command: str = "%%rank") -> list[int]:
    """Return numbers and ranges of ranks as a sorted list; all ranks for None.

    >>> parse_ranks("0,2-3", 4)
    [0, 2, 3]

    Args:
        command: what the text is the argument of, for the messages.

    Raises:
        ConfigError: there are no such ranks.
    """
    if text is None or text == "all":
        return list(range(num_ranks))
    chosen: set[int] = set()
    for item in filter(None, re.split(r"[,\s]+", text)):
        found = re.fullmatch(r"(\d+)(?:[-:](\d+))?", item)
        if not found:
            raise ConfigError(f"{command} {text}: {item!r} is no rank; write 0, or 0,2, or 1-3")
        first, last = int(found[1]), int(found[2] or found[1])
        if max(first, last) >= num_ranks:
            raise ConfigError(
                f"{command} {text}: there is no rank {max(first, last)}; the ranks are 0 to {num_ranks - 1}"
            )
        if last < first:
            raise ConfigError(f"{command} {text}: {item} is in the wrong order; write {last}-{first}")
        chosen.update(range(first, last + 1))
    if not chosen:
        raise ConfigError(f"{command} {text} names no rank; write {command} 0, {command} 0,2 or {command} 1-3")
    return sorted(chosen)


def format_ranks(ranks: list[int]) -> str:
    """Return ranks as numbers and ranges.

    >>> format_ranks([0, 1, 2, 5])
    '0-2,5'
    """
    ranges: list[str] = []
    for rank in sorted(ranks):
        if ranges and int(re.split(r"\D", ranges[-1])[-1]) == rank - 1:
            ranges[-1] = f"{re.split(r'-', ranges[-1])[0]}-{rank}"
        else:
            ranges.append(str(rank))
    return ",".join(ranges)
