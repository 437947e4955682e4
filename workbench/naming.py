"""Names and values from the command line and notebook parameters: parsed, checked, refused with similar names."""

from __future__ import annotations

import json
import re
import warnings
from ast import AST, Call, Name, Tuple, literal_eval, parse
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from enum import Enum
from inspect import signature
from math import inf, isfinite
from sys import float_info
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from workbench.errors import ConfigError, WorkbenchError
from workbench.units import GB, GIB, KB, KIB, MB, MIB

MAX_NAME_LENGTH = 4096  # longest text of an argument or a name, in characters
SIZES = {"kb": KB, "mb": MB, "gb": GB, "kib": KIB, "mib": MIB, "gib": GIB}


def kebab(name: str) -> str:
    """Return the command-line name of a class.

    >>> kebab("PipeSGD"), kebab("SynchronousSGD"), kebab("Ring")
    ('pipe-sgd', 'synchronous-sgd', 'ring')
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()


def same_name(one: str, other: str) -> bool:
    """Return whether two names, of a class and on the command line, differ only in case, hyphens and underscores.

    >>> same_name("DiLoCo", "diloco"), same_name("PipeSGD", "pipe-sgd"), same_name("PipeSGD", "pipe")
    (True, True, False)
    """
    return re.sub("[-_]", "", one).lower() == re.sub("[-_]", "", other).lower()


def shorten(value: Any) -> str:
    """Return a value for a message, shortened if it is long.

    >>> shorten("width"), len(shorten("x" * 10**6))
    ("'width'", 79)
    """
    try:
        text = repr(value[:200] if isinstance(value, str | bytes) else value)
    except (ValueError, RecursionError):  # an integer with too many digits, or a list that contains itself
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:60]} ... {text[-14:]}"


def json_line(value: Any) -> str:
    """Return a value as one line of JSON. NaN and infinite numbers, which JSON does not have, become null.

    >>> json_line({"loss": float("nan"), "steps": (3, inf)})
    '{"loss": null, "steps": [3, null]}'
    """
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value))


def _finite(value: Any) -> Any:
    """Return a JSON value with None in place of each number that is not finite."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def listed(value: Any) -> Any:
    """Return a list or tuple unchanged; put anything else into a list."""
    return value if isinstance(value, list | tuple) else [value]


def did_you_mean(name: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.5) -> str:
    """Return a question with the names that are similar to `name`, and a space at its end; "" if there are none.

    >>> did_you_mean("pipe-sdg", ["pipe-sgd", "layerwise-sgd"]), did_you_mean("x", ["pipe-sgd"])
    ('did you mean pipe-sgd? ', '')

    Args:
        most: how many names at most.
        cutoff: how similar they must be, from 0 to 1.
    """
    near = get_close_matches(name[:MAX_NAME_LENGTH], list(known), n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}? " if near else ""


def unknown(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a name that is not in `known`.

    >>> print(unknown("algorithm", "pipe-sdg", ["pipe-sgd", "layerwise-sgd"]))
    no algorithm is called 'pipe-sdg': did you mean pipe-sgd? There are pipe-sgd, layerwise-sgd
    """
    names = list(known)
    meant = did_you_mean(name, names, most=2)
    return ConfigError(f"no {what} is called {shorten(name)}: {meant}There are {', '.join(names) or 'none'}")


def call_checked(what: str, make: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Return `make(**options)`; refuse an option that it does not take.

    Raises:
        ConfigError: unknown option (similar and valid ones are named), or a value that `make` refuses.
    """
    try:
        return make(**options)
    except WorkbenchError:
        raise
    except (
        TypeError,
        ValueError,
        ArithmeticError,
        AttributeError,
        LookupError,
    ) as error:  # any error of an unexpected value
        valid = list(signature(make).parameters)
        for option in options:
            if option not in valid:
                meant = did_you_mean(option, valid)
                raise ConfigError(
                    f"{what} has no option {shorten(option)}: {meant}It takes {', '.join(valid) or 'none'}"
                ) from None
        raise ConfigError(
            f"{what}({', '.join(f'{key}={shorten(value)}' for key, value in options.items())}): {error}"
        ) from error


def kinds_of(make: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """Return the allowed kinds of each option of a class or function: types, and literal values.

    >>> def make(*, width: int | None = None, how: Literal["once", "twice"] = "once") -> None: ...
    >>> kinds_of(make)
    {'width': (<class 'int'>, <class 'NoneType'>), 'how': ('once', 'twice')}
    """
    hints = get_type_hints(make)
    return {name: tuple(_alternatives(hints[name])) for name in signature(make).parameters if name in hints}


def _alternatives(hint: Any) -> list[Any]:
    if get_origin(hint) in (UnionType, Union):
        return [kind for part in get_args(hint) for kind in _alternatives(part)]
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [item.value for item in hint]
    return [get_origin(hint) or hint]


def describe_kinds(kinds: Iterable[Any]) -> list[str]:
    """Return kinds as words for a reader.

    >>> describe_kinds([int, "once", NoneType])
    ['a whole number', 'once', 'none']
    """
    plain = {bool: ["true", "false"], int: ["a whole number"], float: ["a number"], NoneType: ["none"]}
    return [
        word
        for kind in kinds
        for word in (plain.get(kind, [kind.__name__.lower()]) if isinstance(kind, type) else [str(kind)])
    ]


def check_kinds(what: str, make: Callable[..., Any], options: dict[str, Any]) -> None:
    """Refuse a value that has none of its option's kinds, such as text for a number, or "yes" for true.

    Options that take objects (a collective) are not checked here.

    Raises:
        ConfigError: the option, the value and the allowed kinds are named.
    """
    known = kinds_of(make)
    for option, value in options.items():
        kinds = known.get(option, ())
        if not kinds or any(isinstance(kind, type) and kind not in (bool, int, float, str, NoneType) for kind in kinds):
            continue
        if not any(_is(value, kind) for kind in kinds):
            raise ConfigError(f"{what}: {option}={shorten(value)}: give {', or '.join(describe_kinds(kinds))}")


def _is(value: Any, kind: Any) -> bool:
    if not isinstance(kind, type):
        return bool(value == kind)
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def parse_value(text: str) -> Any:
    """Parse a value from the command line: a number, a size, true, false, none, a list, or otherwise text.

    >>> [parse_value(text) for text in ("2", "1e-3", "4MiB", "true", "none", "ring", "[64, 32]")]
    [2, 0.001, 4194304.0, True, None, 'ring', [64, 32]]
    """
    plain = text.strip()
    word = {"true": True, "false": False, "none": None}.get(plain.lower(), plain)
    if word is not plain:
        return word
    size = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([kmg]i?b)", plain.lower())
    if size:
        return float(size[1]) * SIZES[size[2]]
    if len(plain) > MAX_NAME_LENGTH:
        return plain
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for text that looks like code
            value = literal_eval(plain)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return plain
    return value if _is_plain(value) else plain


def _is_plain(value: Any) -> bool:
    """Return whether a record and a command line can hold the value: no set, bytes, NaN or too large integer."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, int | float):
        return abs(value) <= float_info.max or value in (inf, -inf)
    return value is None or isinstance(value, str)


Classes = Mapping[str, Callable[..., Any]]


def build(text: str, classes: Classes, of_setting: Mapping[str, Classes] = MappingProxyType({})) -> Any:
    """Evaluate an expression of calls and plain values, such as "Ring(codec=TopK(k=5))"; nothing else is evaluated.

    >>> build("Fraction(numerator=1, denominator=3)", {"Fraction": __import__("fractions").Fraction})
    Fraction(1, 3)

    Args:
        classes: by name.
        of_setting: name of a keyword argument -> the classes of its value, if these are others.

    Raises:
        ConfigError: the expression has another form, or calls a name that is not in `classes`.
    """
    try:
        if len(text) > MAX_NAME_LENGTH:
            raise ValueError("it is too long")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _built(parse(text, mode="eval").body, classes, of_setting)
    except WorkbenchError as error:
        raise ConfigError(str(error)) from None
    except (
        SyntaxError,
        ValueError,
        TypeError,
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
    ) as error:
        raise ConfigError(
            f"{shorten(text)} cannot be read as a setting ({error}): write it as in Ring(chunks=2)"
        ) from None


def _built(node: AST, classes: Classes, of_setting: Mapping[str, Classes]) -> Any:
    match node:
        case Call(func=Name(id=name), args=args, keywords=keywords):
            if name not in classes:
                raise unknown("setting", name, classes)
            return classes[name](
                *(_built(item, classes, of_setting) for item in args),
                **{
                    str(key.arg): _built(key.value, of_setting.get(str(key.arg), classes), of_setting)
                    for key in keywords
                },
            )
        case Tuple(elts=items):
            return tuple(_built(item, classes, of_setting) for item in items)
        case _:
            return literal_eval(node)


def parse_pairs(pairs: Iterable[str], option: str) -> dict[str, Any]:
    """Parse arguments of the form `key=value` into a dictionary.

    Raises:
        ConfigError: an argument without "=", or a name given twice.
    """
    parsed: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"{option} {shorten(pair)}: write it as name=value, for example {option} width=2")
        name = key.strip().replace("-", "_")
        if name in parsed:
            raise ConfigError(
                f"{option} {name}: given twice, as {shorten(parsed[name])} and as {shorten(parse_value(value))}: give "
                "it once"
            )
        parsed[name] = parse_value(value)
    return parsed
