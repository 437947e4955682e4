"""What a cell asks for: where it runs, and which of the notebook's own commands stand above it."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import final

from workbench.errors import ConfigError

COMMANDS = ("ranks", "launcher", "attach", "detach", "status", "restart_ranks", "stop_ranks")
INSTALLERS = ("pip", "conda", "mamba", "uv")  # above a cell they run once, in the notebook's own process


@final
@dataclass(frozen=True, slots=True)
class Cell:
    """A cell, taken apart.

    Attributes:
        commands: (name, argument) of the kernel's own commands above it, and of installers, in order.
        body: the rest.
        local: whether the body runs in the notebook's own process.
        ranks: which ranks it is for, as written; None for all.
        names: of a local cell: what it is given of rank 0's variables.
    """

    commands: tuple[tuple[str, str], ...] = ()
    body: str = ""
    local: bool = False
    ranks: str | None = None
    names: tuple[str, ...] = ()


def parse_cell(text: str) -> Cell:
    """Take a cell apart.

    >>> parse_cell("%ranks 2\\n%%rank 0\\nprint(rank)")
    Cell(commands=(('ranks', '2'),), body='print(rank)', local=False, ranks='0', names=())
    >>> parse_cell("%%local steps\\nprint(steps)")
    Cell(commands=(), body='print(steps)', local=True, ranks=None, names=('steps',))

    Raises:
        ConfigError: `%%rank` without ranks, or a cell magic that was probably meant to be one of ours.
    """
    lines = text.split("\n")
    commands: list[tuple[str, str]] = []
    while lines:
        first = lines[0].strip()
        found = re.match(r"%(\w+)\b\s*(.*)$", first)
        if first == "" or (first.startswith("#") and commands):
            lines.pop(0)
        elif found and found[1] in (*COMMANDS, *INSTALLERS):
            argument = found[2].strip()
            lines.pop(0)
            while argument.endswith("\\") and lines:  # goes on in the next line
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
                    f"{first}: {name!r} is no name of a variable; write %%local steps, seed to have those of rank 0 in the cell"
                )
        return Cell(tuple(commands), rest, local=True, names=names)
    if re.match(r"%%ranks?\b", first):
        which = re.sub(r"^%%ranks?", "", first).strip().strip("[]()")
        if not which:
            raise ConfigError("%%rank wants to know which: %%rank 0, %%rank 0,2 or %%rank 1-3")
        return Cell(tuple(commands), rest, ranks=which)
    word = re.match(r"%%(\w+)", first)
    if word and difflib.get_close_matches(word[1], ("local", "rank"), cutoff=0.75):
        near = difflib.get_close_matches(word[1], ("local", "rank"), n=1)[0]
        raise ConfigError(f"there is no %%{word[1]}: did you mean %%{near}?")
    body = "\n".join(lines)
    said = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    return Cell(tuple(commands), body, local=bool(said) and all(re.match(r"%(un)?load_ext\b", line) for line in said))


def parse_ranks(words: str | None, num_ranks: int) -> list[int]:
    """Numbers and ranges of ranks as a sorted list; None for all.

    >>> parse_ranks("0,2-3", 4)
    [0, 2, 3]

    Raises:
        ConfigError: no such ranks.
    """
    if words is None or words == "all":
        return list(range(num_ranks))
    chosen: set[int] = set()
    for part in filter(None, re.split(r"[,\s]+", words)):
        found = re.fullmatch(r"(\d+)(?:[-:](\d+))?", part)
        if not found:
            raise ConfigError(f"%%rank {words}: {part!r} is no rank; write 0, or 0,2, or 1-3")
        first, last = int(found[1]), int(found[2] or found[1])
        if max(first, last) >= num_ranks:
            raise ConfigError(f"%%rank {words}: there is no rank {max(first, last)}; the ranks are 0 to {num_ranks - 1}")
        if last < first:
            raise ConfigError(f"%%rank {words}: {part} goes backwards; write {last}-{first}")
        chosen.update(range(first, last + 1))
    if not chosen:
        raise ConfigError(f"%%rank {words} names no rank; write %%rank 0, %%rank 0,2 or %%rank 1-3")
    return sorted(chosen)


def spoken_ranks(ranks: list[int]) -> str:
    """Ranks, briefly.

    >>> spoken_ranks([0, 1, 2, 5])
    '0-2,5'
    """
    parts: list[str] = []
    for rank in sorted(ranks):
        if parts and int(re.split(r"\D", parts[-1])[-1]) == rank - 1:
            parts[-1] = f"{re.split(r'-', parts[-1])[0]}-{rank}"
        else:
            parts.append(str(rank))
    return ",".join(parts)
