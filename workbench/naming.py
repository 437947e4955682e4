"""Names at the edges (command line, notebook parameters): found or refused in one way, with the near miss named."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from inspect import signature
from typing import Any

from workbench.errors import ConfigError, WorkbenchError
from workbench.units import GB, GIB, KB, KIB, MB, MIB

SIZES = {"kb": KB, "mb": MB, "gb": GB, "kib": KIB, "mib": MIB, "gib": GIB}


def kebab(name: str) -> str:
    """How a class is called on the command line.

    >>> kebab("PipeSGD"), kebab("SynchronousSGD"), kebab("Ring")
    ('pipe-sgd', 'synchronous-sgd', 'ring')
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()


def unknown(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that is none of `known`.

    >>> print(unknown("method", "pipe-sdg", ["pipe-sgd", "layerwise-sgd"]))
    no method is called 'pipe-sdg': did you mean pipe-sgd? There are pipe-sgd, layerwise-sgd
    """
    names = list(known)
    near = get_close_matches(name, names, n=2, cutoff=0.5)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return ConfigError(f"no {what} is called {name!r}: {meant}There are {', '.join(names) or 'none'}")


def call_checked(what: str, make: Callable[..., Any], options: dict[str, Any]) -> Any:
    """`make(**options)`, refusing an option that it does not take.

    Raises:
        ConfigError: no such option (the near miss and the valid ones are named), or a value that it refuses.
    """
    valid = list(signature(make).parameters)
    for option in options:
        if option not in valid:
            near = get_close_matches(option, valid, n=1, cutoff=0.5)
            meant = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{what} has no option {option!r}: {meant}It takes {', '.join(valid) or 'none'}")
    try:
        return make(**options)
    except WorkbenchError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}({', '.join(f'{key}={value!r}' for key, value in options.items())}): {error}") from error


def parse_value(text: str) -> Any:
    """A value written on the command line: a number, a size, true, false, none, a list, or else a word.

    >>> [parse_value(text) for text in ("2", "1e-3", "4MiB", "true", "none", "ring", "[64, 32]")]
    [2, 0.001, 4194304.0, True, None, 'ring', [64, 32]]
    """
    plain = text.strip()
    word = {"true": True, "false": False, "none": None}.get(plain.lower(), plain)
    if word is not plain:
        return word
    size = re.fullmatch(r"([0-9.]+)\s*([kmg]i?b)", plain.lower())
    if size:
        return float(size[1]) * SIZES[size[2]]
    try:
        return literal_eval(plain)
    except (ValueError, SyntaxError):
        return plain


def parse_pairs(pairs: Iterable[str], option: str) -> dict[str, Any]:
    """`key=value` words to a dictionary.

    Raises:
        ConfigError: a word without "=".
    """
    parsed = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"{option} {pair!r}: write it as name=value, for example {option} width=2")
        parsed[key.strip().replace("-", "_")] = parse_value(value)
    return parsed
