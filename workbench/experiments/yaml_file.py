"""Read YAML files. 1e-3 is a number, and a repeated key is an error."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml

from workbench.errors import ConfigError
from workbench.trace.files.text import open_file

MAX_BYTES = 1024 * 1024
MAX_VALUES = 100_000


class _Loader(yaml.SafeLoader):  # type: ignore[misc] # PyYAML ships no types
    """PyYAML's loader with two changes: 1e-3 is a number and not a text, and a repeated key is an error."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        if isinstance(key_node, yaml.ScalarNode) and key_node.value in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"{key_node.value!r} is given twice", key_node.start_mark
            )
        seen.add(key_node.value if isinstance(key_node, yaml.ScalarNode) else id(key_node))
    loader.flatten_mapping(node)
    found: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return found


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _value(text: str) -> Any:
    """Return the value of a YAML text. The number of values is limited, with aliases expanded."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > MAX_VALUES:
            raise yaml.constructor.ConstructorError(
                None, None, f"its aliases expand to more than {MAX_VALUES} values", node.start_mark
            )
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _size(node: yaml.Node, known: dict[int, float]) -> float:
    """Return the number of values in a node with its aliases expanded; infinite if the node contains itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1.0
    if id(node) not in known:
        known[id(node)] = math.inf
        children = [child for item in node.value for child in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1.0 + sum(_size(child, known) for child in children)
    return known[id(node)]


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; empty for an empty file.

    Raises:
        ConfigError: the file does not exist, is not YAML (the message names line and column), or is not a mapping.
    """
    try:
        with open_file(path) as file:
            text = file.read(MAX_BYTES + 1).decode()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}): give the path of a YAML file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file: give the path of a YAML file") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, path: str) -> dict[str, Any]:
    """Return the mapping in a YAML text; empty for an empty text.

    Args:
        text: the text.
        path: the text's file, for messages.

    Raises:
        ConfigError: the text is not YAML (the message names line and column), or is not a mapping.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_BYTES} bytes: split it")
    try:
        found = _value(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{place}: {getattr(error, 'problem', None) or error}: correct it there") from None
    except RecursionError:
        raise ConfigError(f"{path}: the nesting is too deep: use fewer levels") from None
    except (
        ValueError,
        KeyError,
        IndexError,
        AttributeError,
        TypeError,
        OverflowError,
    ) as error:  # a value does not fit its tag
        raise ConfigError(f"{path}: a value in it cannot be read ({error}): write it in quotes") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"{path}: give `name: value` lines")
    return found
