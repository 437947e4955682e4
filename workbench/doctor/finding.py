"""`Finding`: the result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        part: what was checked.
        state: "ok". "missing": an optional part is not installed. "warning": it works, but it may fail later.
            "fault": it should work and does not.
        found: what was found.
        mend: the command or the step that fixes it; empty if there is nothing to fix.
        core: whether training is impossible without it.
    """

    part: str
    state: Literal["ok", "missing", "warning", "fault"]
    found: str
    mend: str = ""
    core: bool = False
