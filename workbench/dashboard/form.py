"""A form with a field for each setting of an algorithm."""

from __future__ import annotations

import html
from typing import Any, final

import ipywidgets

from workbench import codecs
from workbench.catalogue import describe
from workbench.naming import parse_value

LABEL = {"description_width": "110px"}
WIDE = {"width": "330px", "max_width": "100%"}


@final
class AlgorithmForm:
    """A field for each setting of an algorithm, below its update rule.

    Args:
        name: as `workbench algorithms` lists it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        known = describe("algorithms", name)
        self.fields = {setting["name"]: field_of(setting) for setting in known["settings"]}
        self._begin = {key: field.value for key, field in self.fields.items()}
        self.codec = ipywidgets.Dropdown(
            options=["none", *codecs.names()],
            description="codec",
            tooltip="compresses the collective's messages; or write it after the collective, such as ring:truncate16",
            style=LABEL,
            layout=WIDE,
        )
        coded = (self.codec,) if "collective" in self.fields else ()
        rule = html.escape(" ".join(known["rule"]))
        facts = html.escape(
            f"{known['about']} Staleness: {known['staleness']}. Bytes a step: {known['bytes_per_step']}."
        )
        about = ipywidgets.HTML(
            f'<div style="line-height: 1.35"><code>{rule}</code><br><small>{facts}</small></div>',
            layout={"max_width": "340px"},
        )
        self.widget = ipywidgets.VBox([about, *self.fields.values(), *coded])

    def options(self) -> dict[str, Any]:
        """Return the changed settings, for `algorithms.get`."""
        changed = {key: field.value for key, field in self.fields.items() if field.value != self._begin[key]}
        if self.codec.value != "none":
            changed["collective"] = f"{self.fields['collective'].value}:{self.codec.value}"
        return {key: parse_value(value) if isinstance(value, str) else value for key, value in changed.items()}


def field_of(setting: dict[str, Any]) -> Any:
    """Return a field for one setting of `catalogue.describe`: a checkbox, a choice, a number, or a text."""
    types, choices, default = setting["type"], setting["choices"], setting["default"]
    note = setting["description"]
    common = {"description": setting["name"], "style": LABEL, "layout": WIDE}
    options = [str(word) for word in choices or ()]
    kinds = ", ".join(
        [*options, *[{"int": "a whole number", "float": "a number"}.get(kind, kind.lower()) for kind in types]]
    )
    hint = {"tooltip": f"{note} ({kinds})" if note else kinds}
    if types == ["bool"]:
        return ipywidgets.Checkbox(value=bool(default), **common, **hint)
    if options and not types:
        return ipywidgets.Dropdown(options=options, value=str(default), **common, **hint)
    if types == ["int"] and not options:
        return ipywidgets.IntText(value=default, **common, **hint)
    if types == ["float"] and not options:
        return ipywidgets.FloatText(value=default, **common, **hint)
    text = "none" if default is None else str(default)
    if options:
        return ipywidgets.Combobox(
            options=[*options, *(["none"] if "none" in types else [])], value=text, **common, **hint
        )
    return ipywidgets.Text(value=text, placeholder=kinds, **common, **hint)


def optional_number(text: str) -> Any:
    """Parse a number that may be left out. None for an empty text; other text is returned for the caller to refuse.

    >>> optional_number(" "), optional_number("0.1"), optional_number("much")
    (None, 0.1, 'much')
    """
    return parse_value(text) if text.strip() else None
