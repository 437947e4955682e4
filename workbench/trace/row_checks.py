"""Checks of record lines: a valid line has the entries that readers need, with numbers in range."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from workbench.trace.kinds import CODES, SPAN

MAX_FIELDS = (
    sys.float_info.max,
    sys.float_info.max,
    *(int(np.iinfo(SPAN[name]).max) for name in ("step", "bucket", "bytes", "peer")),
)
ANSWERS = ("any", "source", "position", "now", "control")


def is_metrics_row(row: Any) -> bool:
    """Return whether a JSON value is a row of metrics with valid numbers."""
    if not (isinstance(row, dict) and isinstance(row.get("step"), int) and abs(row["step"]) <= MAX_FIELDS[2]):
        return False
    if not all(is_number(row.get(name)) for name in ("seconds", "samples", "bytes_sent")):
        return False
    shares = row.get("evaluation")
    if shares is None:
        loss, num_samples = row.get("loss"), row.get("num_samples")
        if row.get("staleness") is not None and not is_number(row["staleness"]):
            return False
        plain = (loss is None or is_number(loss, nan=True)) and (num_samples is None or is_number(num_samples))
        return plain and "evaluation" not in row and row.keys() >= {"loss", "num_samples"}
    if not (
        isinstance(shares, dict) and is_number(shares.get("loss_sum"), nan=True) and is_number(shares.get("count"))
    ):
        return False
    if not is_number(shares.get("loss_weight", 0)):
        return False
    if "distance_squared" in shares and not _is_sum(shares["distance_squared"], nan=True):
        return False
    own = shares.get("metrics", {})
    if not (isinstance(own, dict) and all(_is_sum(value) for value in own.values())):
        return False
    return all(name in shares and (shares[name] is None or is_number(shares[name])) for name in ("correct", "judged"))


def _is_sum(value: Any, nan: bool = False) -> bool:
    """Return whether a value is a sum and the number of what was summed. `nan`: the sum may be NaN."""
    return isinstance(value, list) and len(value) == 2 and is_number(value[0], nan) and is_number(value[1])


def is_number(value: Any, nan: bool = False) -> bool:
    """Return whether a value is a number that an array can hold."""
    if isinstance(value, float):
        return nan or not math.isnan(value)
    return isinstance(value, int) and -MAX_FIELDS[0] <= value <= MAX_FIELDS[0]


def is_event(row: Any) -> bool:
    """Return whether a JSON value is a valid event: the update of a server, or a recorded answer."""
    if not isinstance(row, dict) or not all(is_number(row[name]) for name in ANSWERS if name in row):
        return False
    if "update" not in row:
        return "any" not in row or "source" in row
    if not (is_number(row["update"]) and is_number(row.get("seconds")) and is_number(row.get("bucket"))):
        return False
    return isinstance(row.get("staleness"), list) and all(map(is_number, row["staleness"]))


def is_trace_row(row: Any) -> bool:
    """Return whether a JSON value is a valid row of a trace."""
    return is_span(row) or is_note(row)


def is_span(row: Any) -> bool:
    """Return whether a JSON value is a span: a known kind, and numbers that a span table can hold."""
    if not (
        isinstance(row, list)
        and len(row) == 8
        and isinstance(row[0], str)
        and row[0] in CODES
        and isinstance(row[1], str)
    ):
        return False
    return all(
        isinstance(value, int | float) and -most <= value <= most
        for value, most in zip(row[2:], MAX_FIELDS, strict=True)
    )


def is_note(row: Any) -> bool:
    """Return whether a JSON value is a trace's header, or a clock measurement."""
    if isinstance(row, dict) and isinstance(clock := row.get("clock"), dict):
        return all(
            isinstance(clock.get(name), int | float) and abs(clock[name]) <= MAX_FIELDS[0]
            for name in ("at_s", "offset_s")
        )
    return isinstance(row, dict) and "rank" in row and "clock" not in row
