"""A notebook's parameters that break a rule are refused, with the parameter, its value and the rule."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from workbench.errors import ConfigError
from workbench.papers import require

KEPT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"at_least": 2}, {"workers": 2, "more": [2, 3]}),
    ({"above": 0, "below": 1}, {"share": 0.5, "shares": [0.1, 0.9]}),
    ({"num_at_least": 2}, {"rates": [0.1, 0.2]}),
    ({"ascending": True, "distinct": True}, {"widths": [1, 2, 4]}),
    ({"including": [1, 2]}, {"widths": [4, 2, 1]}),
    ({"among": ("none", "8 bits")}, {"codec": "none", "codecs": ["8 bits", "none"]}),
    ({"equally_many": True}, {"models": ["a", "b"], "batches": [8, 16]}),
    ({"at_least": 2}, {"workers": []}),
]
BROKEN: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"at_least": 2}, {"workers": 1}, "workers=1: give 2 or more"),
    ({"at_least": 2}, {"fine": 2, "workers": [4, 1]}, "workers=[4, 1]: give 2 or more"),
    ({"at_least": 2}, {"rate": math.nan}, "rate=nan: give 2 or more"),
    ({"above": 0}, {"rate": 0.0}, "rate=0.0: give more than 0"),
    ({"below": 1}, {"shares": [0.5, 1.0]}, "shares=[0.5, 1.0]: give less than 1"),
    ({"num_at_least": 3}, {"rates": [0.1, 0.2]}, "rates=[0.1, 0.2]: give 3 values or more"),
    ({"ascending": True}, {"widths": [1, 2, 2]}, "widths=[1, 2, 2]: give each value larger than the one before"),
    ({"distinct": True}, {"seeds": [0, 1, 0]}, "seeds=[0, 1, 0]: give each value once"),
    ({"including": [1, 4]}, {"workers": [2, 4]}, "workers=[2, 4]: give 1 too"),
    ({"among": ["none", "8 bits"]}, {"codec": "8bits"}, "codec='8bits': did you mean 8 bits? give one or more of none, 8 bits"),
    ({"equally_many": True}, {"models": ["a"], "batches": [8, 16]}, "models=['a'], batches=[8, 16]: give equally many values of each"),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "parameters"), KEPT, ids=repr)
def test_parameters_that_keep_the_rules_pass(rules: dict[str, Any], parameters: dict[str, Any]) -> None:
    require(**rules, **parameters)


@pytest.mark.parametrize(("rules", "parameters", "message"), BROKEN, ids=repr)
def test_a_broken_rule_is_named(rules: dict[str, Any], parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        require(**rules, **parameters)


def test_a_rule_of_the_notebook_has_its_own_text() -> None:
    require(1 < 4, "fewer backups than workers", backups=1, workers=4)
    with pytest.raises(ConfigError, match=r"^backups=4, workers=4: give fewer backups than workers$"):
        require(4 < 4, "fewer backups than workers", backups=4, workers=4)
