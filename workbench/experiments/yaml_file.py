"""YAML files as their writer means them: 1e-3 is a number, and a key that is written twice is an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from workbench.errors import ConfigError


class _Loader(yaml.SafeLoader):  # type: ignore[misc] # PyYAML ships no types
    """YAML 1.1 as PyYAML reads it, but for numbers such as 1e-3, which it takes for words, and keys given twice, of which it takes one."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        if key_node.value in seen and isinstance(key_node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, f"{key_node.value!r} is given twice", key_node.start_mark)
        seen.add(key_node.value if isinstance(key_node, yaml.ScalarNode) else id(key_node))
    loader.flatten_mapping(node)
    found: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return found


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds; an empty file holds none.

    Raises:
        ConfigError: no such file, not YAML (with line and column), or no mapping.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give the path of a YAML file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no text: give the path of a YAML file") from None
    try:
        found = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{place}: {getattr(error, 'problem', None) or error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"{path}: give `name: value` lines")
    return found
