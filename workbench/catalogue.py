"""The algorithms, collectives and codecs of this package, as tables and as JSON, with their settings."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import Enum
from types import MappingProxyType, NoneType
from typing import Any, cast, get_type_hints

from workbench import algorithms, codecs, collectives, topologies
from workbench.algorithms import Staleness
from workbench.codecs import Codec, SummableCodec
from workbench.collectives import Collective
from workbench.errors import ConfigError
from workbench.naming import describe_kinds, kebab, kinds_of
from workbench.program import Algorithm, Card
from workbench.topologies import Graph
from workbench.units import KIB, MIB

LEGEND = """\
p ranks (with servers: workers), n bytes of one gradient. Staleness in updates; bytes that a rank sends in one step, on average; memory
of a rank, beyond parameters and optimizer. K: width of a pipeline. d: delay in steps. M: servers, each with a shard of the
parameters; their bytes are those of a rank that is also a worker. N, b: gradients that an update uses, and that it drops.
H: steps between two averages. P: fragments of the parameters. C: share of the ranks in a round. lg: logarithm to base 2.
t_c, t_compute: seconds of an all-reduce, and of a step's compute."""

NO_CARD = Card(paper="none", staleness="not given", bytes_per_step="not given", memory="not given", roles="not given")
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"  # keeps text in parentheses on one line
# of a docstring without its indentation
SECTION = re.compile(r"^(?:Args|Attributes):\n(?:(?: {4}.*)?(?:\n|\Z))+", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {5,}.*)*)", re.MULTILINE)
CODED = 1_000_000  # number of values for which a codec's bytes are shown

FIND: MappingProxyType[str, tuple[Callable[[], tuple[str, ...]], Callable[[str], Callable[..., Any]]]] = (
    MappingProxyType(
        {
            "algorithms": (algorithms.names, algorithms.find),
            "collectives": (collectives.names, collectives.find),
            "codecs": (codecs.names, codecs.find),
        }
    )
)
SETTING_COLUMNS = ("name", "value", "default", "description")
COLUMNS = MappingProxyType(
    {
        "algorithms": {
            "name": "algorithm",
            "paper": "paper",
            "staleness": "staleness",
            "bytes_per_step": "bytes a step",
            "memory": "memory",
            "roles": "roles",
        },
        "collectives": {"name": "collective", "class": "class", "summary": "what it does", "codec": "codec"},
        "codecs": {
            "name": "codec",
            "class": "class",
            "summary": "what it does",
            "wire": "bytes of 1e6",
            "unbiased": "unbiased",
            "summable": "summable",
        },
    }
)


def describe(what: str, name: str) -> dict[str, Any]:
    """Return all facts about an algorithm, collective or codec, fit for JSON.

    >>> found = describe("algorithms", "pipe-sgd")
    >>> found["class"], found["staleness"], [setting["name"] for setting in found["settings"]]
    ('PipeSGD', 'K - 1', ['width', 'warmup_steps', 'first', 'collective', 'lanes'])

    Raises:
        ConfigError: unknown name.
    """
    names, find = FIND[what]
    make = find(name)
    sentences = setting_descriptions(make)
    known = next((known for known in names() if find(known) is make), name)  # or file.py:Class
    lines = description(make).splitlines()
    return {
        "name": known,
        "class": make.__name__,
        "summary": lines[0],
        "rule": rule_of(lines),
        **_special(what, known, make),
        "settings": [
            {**_setting(name, default, kinds), "description": sentences[name]}
            for name, default, kinds in _settings(make)
        ],
    }


def describe_all(what: str) -> list[dict[str, Any]]:
    """Return `describe` of each algorithm, collective or codec, in the order of the table."""
    return [describe(what, name) for name in FIND[what][0]()]


def _special(what: str, name: str, make: Callable[..., Any]) -> dict[str, Any]:
    if what == "algorithms":
        module = inspect.getmodule(make)
        return {
            "family": algorithms.family_of(name),
            "about": (inspect.getdoc(module) or "").split("\n")[0],
            **asdict(card_of(make)),
        }
    if what == "collectives":
        return {"codec": _codec_place(name)}
    codec = make()
    return {
        "wire_bytes": codec.wire_bytes(CODED),
        "raw_bytes": 4 * CODED,
        "unbiased": codec.unbiased,
        "summable": isinstance(codec, SummableCodec),
    }


def card_of(make: Callable[..., Any]) -> Card:
    """Return the card of an algorithm, or of the algorithm that a function makes."""
    algorithm: Any = make if isinstance(make, type) else make()
    card: Card = getattr(algorithm, "card", NO_CARD)  # your own algorithm may have none
    return card


def description(make: Callable[..., Any]) -> str:
    """Return the docstring without its example, and without the section about the settings."""
    text = inspect.getdoc(make) or ""
    return SECTION.sub("", text.split("\n\n>>>")[0]).strip()


def setting_descriptions(make: Callable[..., Any]) -> dict[str, str]:
    """Return setting -> its description in the docstring of the class, or else of the nearest base class that has one.

    For a function, the class that it returns is asked last.

    >>> setting_descriptions(algorithms.find("local-sgd"))["every"]
    'H, number of steps between two averages of the parameters.'
    """
    kind = make if isinstance(make, type) else get_type_hints(make).get("return")
    places: list[Any] = [] if make is kind else [make]
    found: dict[str, str] = {}
    for place in reversed([*places, *inspect.getmro(kind or object)]):
        found |= _entries(inspect.cleandoc(place.__doc__ or ""))
    return {name: found.get(name, "") for name in inspect.signature(make).parameters}


def _entries(text: str) -> dict[str, str]:
    """Return the entries of the sections `Attributes:` and `Args:` of a docstring: name -> text.

    >>> _entries("A rule.\\n\\nAttributes:\\n    width: iterations\\n        in flight.\\n    low, high: bounds.")
    {'width': 'iterations in flight.', 'low': 'bounds.', 'high': 'bounds.'}
    """
    found: dict[str, str] = {}
    for section in SECTION.findall(text):
        for names, about in ENTRY.findall(section):
            found |= dict.fromkeys(re.findall(r"\w+", names), " ".join(about.split()))
    return found


def rule_of(lines: Sequence[str]) -> list[str]:
    """Return the update rule of a docstring: its first line, and the indented lines after it if it ends in a colon."""
    rule = [lines[0]]
    if lines[0].endswith(":"):
        for line in lines[1:]:
            if line and not line.startswith(" "):
                break
            rule += [line.strip()] if line else []
    return rule


def _codec_place(name: str) -> str:
    """Return where a collective applies a codec that is written after its name and a colon."""
    try:
        collectives.get(f"{name}:truncate16")
    except ConfigError:
        return "none"
    return "once around the sum" if name == "once" else "inside its hops"


def _settings(make: Callable[..., Any]) -> list[tuple[str, Any, tuple[Any, ...]]]:
    kinds = kinds_of(make)
    return [(name, given.default, kinds[name]) for name, given in inspect.signature(make).parameters.items()]


def _setting(name: str, default: Any, kinds: tuple[Any, ...]) -> dict[str, Any]:
    plain = isinstance(default, bool | int | float | None)
    types = [kind for kind in kinds if isinstance(kind, type)]
    choices: list[Any] | None = [kind for kind in kinds if kind not in types] or None
    if any(issubclass(kind, Collective) for kind in types):
        choices = list(collectives.names())
    if Graph in types:
        choices = list(topologies.names())
    if Codec in types:
        choices = list(codecs.names())
    if Algorithm in types:
        choices = [inner for inner in algorithms.names() if _can_be_inner(inner)]
    required = default is inspect.Parameter.empty
    return {
        "name": name,
        "type": ["none" if kind is NoneType else kind.__name__ for kind in types],
        "choices": choices,
        "default": None if required else default if plain and not isinstance(default, Enum) else shell_word(default),
        "required": required,
    }


def _can_be_inner(name: str) -> bool:
    """Return whether `SlowMo` can be over that algorithm."""
    try:
        algorithms.SlowMo(inner=algorithms.get(name))
    except ConfigError:
        return False
    return True


def shell_word(value: Any) -> str:
    """Return a value as it is written after `--set NAME=`.

    >>> from workbench.algorithms import Uniform
    >>> [shell_word(value) for value in (None, True, 1048576, 0.5, collectives.HalvingDoubling(), Uniform(0, 8))]
    ['none', 'true', '1MiB', '0.5', 'halving-doubling', 'uniform:0:8']
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, int) and value and value % KIB == 0:
        return f"{value // MIB}MiB" if value % MIB == 0 else f"{value // KIB}KiB"
    if isinstance(value, Staleness):
        return ":".join([kebab(type(value).__name__), *map(str, asdict(cast(Any, value)).values())])
    if isinstance(value, Collective | Graph | Codec | Algorithm):
        return kebab(type(value).__name__)
    return repr(value) if isinstance(value, tuple) else str(value)


def show(what: str, name: str, width: int = 100) -> str:
    """Return the docstring of an algorithm, collective or codec, and a table of its settings of at most this width."""
    found, make = describe(what, name), FIND[what][1](name)
    parts = [f"{found['name']}: {found['class']}", textwrap.indent(_fitted(description(make), width - 2), "  ")]
    if what == "algorithms":
        facts = {title: found[key] for key, title in COLUMNS[what].items() if key != "name"}
        parts.append(textwrap.indent("\n".join(f"{title + ':':14}{fact}" for title, fact in facts.items()), "  "))
    rows = [
        (
            setting["name"],
            ", ".join(describe_kinds(kinds)),
            "" if default is inspect.Parameter.empty else shell_word(default),
            setting["description"],
        )
        for setting, (_, default, kinds) in zip(found["settings"], _settings(make), strict=True)
    ]
    if not rows:
        return "\n\n".join([*parts, "It has no settings."])
    title = "Settings, in Python"
    if what == "algorithms":
        title = f"Settings, given as --{rows[0][0].replace('_', '-')} VALUE or --set {rows[0][0]}=VALUE"
    parts.append(f"{title}:\n{textwrap.indent(grid(SETTING_COLUMNS, rows, width - 2), '  ')}")
    return "\n\n".join(parts)


def listing(what: str, width: int) -> str:
    """Return a table of all algorithms, collectives or codecs, at most `width` characters wide if no word is wider.

    Algorithms are in families, each with a heading.
    """
    columns = COLUMNS[what]
    rows: list[list[str]] = []
    family = None
    for found in describe_all(what):
        if found.get("family") != family:
            family = found["family"]
            rows.append([f"{family}:", *[""] * (len(columns) - 1)])
        rows.append([_cell(found, key) for key in columns])
    table = grid(tuple(columns.values()), rows, width)
    hints = {
        "algorithms": f"{LEGEND}\n\n`workbench algorithms NAME` shows one of them with its settings.",
        "collectives": "Written as ring, or with a codec as ring:truncate16, or once:top-k+feedback with error feedback.",
        "codecs": "Bytes on the wire of 1e6 float32 values, 4e6 uncompressed. Summable: messages are added undecoded.",
    }
    return f"{table}\n\n{_filled(hints[what], width)}"


def markdown(what: str) -> str:
    """Return the table as Markdown."""
    columns = COLUMNS[what]
    rows = [
        tuple(columns.values()),
        ["---"] * len(columns),
        *([_cell(found, key) for key in columns] for found in describe_all(what)),
    ]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


def _cell(found: dict[str, Any], key: str) -> str:
    if key == "wire":
        return f"{found['wire_bytes'] / 1e6:.3f}e6"
    value = found[key]
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _fitted(text: str, width: int) -> str:
    """Wrap paragraphs that are too wide, except the rule, equations and tables."""
    rule, *paragraphs = text.split("\n\n")
    for number, paragraph in enumerate(paragraphs):
        lines = paragraph.splitlines()
        if max(map(len, lines), default=0) > width and not any(line.startswith((" ", "|", "- ")) for line in lines):
            paragraphs[number] = textwrap.fill(" ".join(lines), width, break_on_hyphens=False)
    return "\n\n".join([rule, *paragraphs])


def _filled(text: str, width: int) -> str:
    return "\n\n".join(textwrap.fill(" ".join(part.split()), width) for part in text.split("\n\n"))


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Format rows of text under a head; break cells into lines if the table would be wider than `width`.

    >>> print(grid(("a", "words"), [("1", "one two three")], 12))
    a  words
    -  ---------
    1  one two
       three
    """
    tied = [
        [re.sub(r"\([^()]*\)", lambda found: found[0].replace(" ", NO_BREAK_SPACE), cell) for cell in row]
        for row in rows
    ]
    body, widths = tied, _widths([head, *tied], width)
    if sum(widths) + 2 * (len(widths) - 1) > width:
        body, widths = [list(row) for row in rows], _widths([head, *rows], width)
    lines = []
    for row in (head, ["-" * column for column in widths], *body):
        cells = [
            textwrap.wrap(cell, column, break_long_words=False, break_on_hyphens=False) or [""]
            for cell, column in zip(row, widths, strict=True)
        ]
        for line in range(max(map(len, cells))):
            words = [
                (cell[line] if line < len(cell) else "").ljust(column)
                for cell, column in zip(cells, widths, strict=True)
            ]
            lines.append("  ".join(words).replace(NO_BREAK_SPACE, " ").rstrip())
    return "\n".join(lines)


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the width of each column: that of its widest cell.

    If the sum exceeds `width`, the widest columns are narrowed until all fit, but not below their longest word.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    least = [max(len(word) for cell in column for word in cell.split(" ")) for column in columns]
    while sum(widths) + 2 * (len(widths) - 1) > width:
        able = [number for number in range(len(widths)) if widths[number] > least[number]]
        if not able:
            break
        widths[max(able, key=lambda number: widths[number])] -= 1
    return widths
