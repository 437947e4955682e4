"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        part: what.
        state: "ok"; "missing", an optional part that is not there; "warning", it works but may not for long; "fault", it should
            work and does not.
        found: what was found.
        mend: the command, or the step, that mends it; empty where nothing is to be mended.
        core: whether nothing can be trained without it.
    """

    part: str
    state: Literal["ok", "missing", "warning", "fault"]
    found: str
    mend: str = ""
    core: bool = False
