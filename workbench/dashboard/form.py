"""Fields to fill in, made from what a method can be given."""

from __future__ import annotations

import html
import inspect
import re
from typing import Any, final

import ipywidgets

from workbench import algorithms
from workbench.catalogue import describe
from workbench.naming import parse_value

LABEL = {"description_width": "110px"}
WIDE = {"width": "330px"}


@final
class MethodForm:
    """A field for each setting of a method, and its rule above them.

    Args:
        name: as `workbench methods` lists it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        known = describe("methods", name)
        notes = comments_of(algorithms.find(name))
        self.fields = {setting["name"]: field_of(setting, notes.get(setting["name"], "")) for setting in known["settings"]}
        self._begin = {key: field.value for key, field in self.fields.items()}
        rule = html.escape(" ".join(known["rule"]))
        facts = html.escape(f"{known['about']} Staleness: {known['staleness']}. Bytes a step: {known['bytes_per_step']}.")
        about = ipywidgets.HTML(
            f'<div style="line-height: 1.35"><code>{rule}</code><br><small>{facts}</small></div>', layout={"max_width": "340px"}
        )
        self.widget = ipywidgets.VBox([about, *self.fields.values()])

    def options(self) -> dict[str, Any]:
        """What `algorithms.get` is given: the settings that were changed."""
        changed = {key: field.value for key, field in self.fields.items() if field.value != self._begin[key]}
        return {key: parse_value(value) if isinstance(value, str) else value for key, value in changed.items()}


def field_of(setting: dict[str, Any], note: str) -> Any:
    """A field for one setting of `catalogue.describe`: a tick, a choice, a number, or a text with what it may be."""
    types, choices, default = setting["type"], setting["choices"], setting["default"]
    common = {"description": setting["name"], "style": LABEL, "layout": WIDE}
    words = [str(word) for word in choices or ()]
    kinds = ", ".join([*words, *[{"int": "a whole number", "float": "a number"}.get(kind, kind.lower()) for kind in types]])
    hint = {"tooltip": f"{note} ({kinds})" if note else kinds}
    if types == ["bool"]:
        return ipywidgets.Checkbox(value=bool(default), **common, **hint)
    if words and not types:
        return ipywidgets.Dropdown(options=words, value=str(default), **common, **hint)
    if types == ["int"] and not words:
        return ipywidgets.IntText(value=default, **common, **hint)
    if types == ["float"] and not words:
        return ipywidgets.FloatText(value=default, **common, **hint)
    text = "none" if default is None else str(default)
    if words:
        return ipywidgets.Combobox(options=[*words, *(["none"] if "none" in types else [])], value=text, **common, **hint)
    return ipywidgets.Text(value=text, placeholder=kinds, **common, **hint)


def comments_of(make: Any) -> dict[str, str]:
    """setting -> the comment behind it in the method's source, where it has one."""
    found: dict[str, str] = {}
    for part in reversed(inspect.getmro(make)) if isinstance(make, type) else ():
        if part.__module__.startswith("workbench.algorithms"):
            lines = inspect.getsource(part).splitlines()
            found |= {match[1]: match[2] for line in lines if (match := re.fullmatch(r"    (\w+): [^#]+?  # (?!noqa|type:)(.+)", line))}
    return found


def optional_number(text: str) -> Any:
    """A number that may be left out: None for an empty text; what is no number is left to who takes it.

    >>> optional_number(" "), optional_number("0.1"), optional_number("much")
    (None, 0.1, 'much')
    """
    return parse_value(text) if text.strip() else None
