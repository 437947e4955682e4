"""`CheckResult`: the result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

State = Literal["ok", "missing", "warning", "fault"]


@final
@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check.

    Attributes:
        part: what was checked.
        state: "ok". "missing": an optional part is not installed. "warning": it works, but it may fail later.
            "fault": it should work and does not.
        found: what was found.
        fix: the command or the step that fixes it; empty if there is nothing to fix.
        core: whether training is impossible without it.
    """

    part: str
    state: State
    found: str
    fix: str = ""
    core: bool = False
