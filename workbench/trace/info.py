"""Read a run's `run.json`, written by this version or an earlier one, and check the entries that readers need."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from workbench.errors import RunNotFound
from workbench.trace.files.text import read_json

MEASURED = (
    "measured: "  # begins the compute of a simulated run that measured it, so that it differs between repetitions
)
FORMAT = 2  # format 1 has `method` for `algorithm`; earlier versions wrote no number
KINDS: dict[str, type] = {
    "id": str,
    "created": str,
    "status": str,
    "error": str,
    "clock": str,
    "runtime": str,
    "num_workers": int,
    "num_steps": int,
    "steps_per_epoch": int,
    "algorithm": dict,
    "problem": dict,
    "settings": dict,
    "sweep": dict,
    "model": dict,
    "result": dict,
    "versions": dict,
    "process": dict,
    "notes": list,
    "steering": list,
    "departures": list,
    "joined": list,
}
INNER: dict[str, dict[str, type]] = {
    "algorithm": {"name": str, "settings": dict, "defaults": list},
    "problem": {"name": str, "note": str},
}
WORDS = {str: "text", int: "a whole number", dict: "an object", list: "a list"}
NAME = re.compile(r"[^/\x00-\x1f\x7f]{1,255}")  # valid run ids: they name folders
MAX_LEFT = 4  # ranks that have left, in one line
FIX = "remove the folder, or restore it from a copy"


def read_info(folder: Path) -> dict[str, Any]:
    """Return the `run.json` of a run's folder.

    Raises:
        RunNotFound: the file is missing, is not a JSON object, or has the format of a later version.
    """
    path = Path(folder) / "run.json"
    try:
        info = read_json(path)
    except FileNotFoundError:
        raise RunNotFound(
            f"{folder} holds no run.json, so it is not a run's folder: `workbench runs` lists the runs"
        ) from None
    except (OSError, ValueError) as error:
        raise RunNotFound(f"{path} cannot be read ({error}): {FIX}") from None
    if not isinstance(info, dict):
        raise RunNotFound(f"{path} is not a JSON object: {FIX}")
    number = info.get("format", 1)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise RunNotFound(f"{path}: format {_brief(number)} is not a format number: {FIX}")
    if number > FORMAT:
        raise RunNotFound(
            f"{path} has format {number}, of a later version; this version reads up to {FORMAT}: update workbench"
        )
    info = _renamed(info)
    fault = fault_of(info)
    if fault:
        raise RunNotFound(f"{path}: {fault}: {FIX}")
    return info


def settings_changes(info: dict[str, Any], num_steps: int | None = None) -> list[tuple[int, dict[str, Any]]]:
    """Return the changes of settings during a run: (number of rank 0's steps before it, name -> new value).

    Args:
        num_steps: only those that a checkpoint after this number of steps has.
    """
    changes = []
    for row in info.get("steering") or ():
        if not isinstance(row, dict):
            continue
        new = row.get("became", row.get("set"))  # earlier versions recorded the command only
        if not isinstance(new, dict) or "refused" in row:
            continue
        steps = row.get("steps")
        after = row.get("step", steps[0] if isinstance(steps, list) and steps else 0)
        after = after if isinstance(after, int) else 0
        if num_steps is None or after <= num_steps:
            changes.append((after, new))
    return changes


def describe_changes(info: dict[str, Any]) -> list[str]:
    """Return a text for each change of settings during a run.

    >>> describe_changes({"steering": [{"set": {"lr": 0.05}, "step": 40, "became": {"lr": 0.05}}]})
    ['lr=0.05 after 40 steps']
    """
    return [
        f"{', '.join(f'{name}={value}' for name, value in changes.items())} after {after} steps"
        for after, changes in settings_changes(info)
    ]


def _renamed(info: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of format 1 in the present format."""
    if "algorithm" in info or "method" not in info:
        return info
    return {"algorithm" if name == "method" else name: value for name, value in info.items()} | {"format": FORMAT}


def fault_of(info: dict[str, Any]) -> str | None:
    """Return what is wrong with an entry; None if all entries are valid."""
    for name, inner in [("", info), *((name, info.get(name)) for name in INNER)]:
        for entry, kind in (INNER[name] if name else KINDS).items():
            value = inner.get(entry) if isinstance(inner, dict) else None
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                return f"{name}{'.' * bool(name)}{entry} is {_brief(value)}, not {WORDS[kind]}"
    identity, created = info.get("id"), info.get("created")
    if identity is not None and (not NAME.fullmatch(identity) or identity in (".", "..")):
        return f"id is {_brief(identity)}, which cannot name a folder"
    if created is not None:
        try:
            datetime.fromisoformat(created)
        except ValueError:
            return f"created is {_brief(created)}, not a time"
    return None


def _brief(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def ranks_that_left(info: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return rank -> its departure, for ranks of a run that have left and whose place is empty."""
    joined = Counter(row["rank"] for row in info.get("joined") or ())
    left: dict[int, dict[str, Any]] = {}
    for row in info.get("departures") or ():  # in order of time
        if joined[row["rank"]]:
            joined[row["rank"]] -= 1
        else:
            left[row["rank"]] = row
    return left


def format_departures(info: Mapping[str, Any]) -> str:
    """Return how many ranks remain in a run, and why the others have left; "" if all ranks remain.

    >>> rows = [{"rank": 2, "why": "its process has ended", "seconds": 1.5, "step": 7}]
    >>> format_departures({"num_workers": 3, "departures": rows})
    '2 of 3 ranks: rank 2 left at step 7 (its process has ended)'
    >>> format_departures({"num_workers": 3, "departures": rows, "joined": [{"rank": 2}]})
    ''
    """
    left = ranks_that_left(info)
    if not left:
        return ""
    num_ranks, parts = int(info.get("num_workers") or len(left)), []
    for rank, row in sorted(left.items()):
        when = f"at step {row['step']}" if "step" in row else f"after {row['seconds']:.3g} s"
        parts.append(f"rank {rank} left {when} ({row['why']})")
    more = [f"and {len(parts) - MAX_LEFT} more"] if len(parts) > MAX_LEFT else []
    return f"{num_ranks - len(left)} of {num_ranks} ranks: {', '.join([*parts[:MAX_LEFT], *more])}"


def num_remaining(info: Mapping[str, Any]) -> int | None:
    """Return the number of ranks that a run ends with, or has now; None if it is not recorded."""
    num_ranks = info.get("num_workers")
    return None if num_ranks is None else int(num_ranks) - len(ranks_that_left(info))
