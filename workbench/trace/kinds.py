"""Kinds of spans, and the columns of a span table."""

from __future__ import annotations

import numpy as np

KINDS = (
    "forward",
    "backward",
    "apply",
    "evaluate",
    "wait",
    "barrier",
    "all_reduce",
    "broadcast",
    "send",
    "recv",
    "encode",
    "decode",
    "sum",
    "reduce_scatter",
    "all_gather",
    "compute",  # the phase is unknown
    "communicate",  # other communication: all-to-all, reduce, gather
    "load",  # reading a minibatch: neither computation nor communication
)
PHASES = ("forward", "backward", "apply")
COMPUTE_KINDS = (*PHASES, "compute")
COMMUNICATION_KINDS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "send",
    "recv",
    "encode",
    "decode",
    "sum",
    "communicate",
)
SLEPT_LANE = "compute (slept)"  # the lane of computation on a rank that sleeps instead: see `Settings.compute`
CODES = {name: code for code, name in enumerate(KINDS)}

SPAN = np.dtype(
    [
        ("rank", "i4"),
        ("kind", "i2"),
        ("lane", "i4"),
        ("start_s", "f8"),
        ("end_s", "f8"),
        ("step", "i4"),
        ("bucket", "i4"),
        ("bytes", "i8"),
        ("peer", "i4"),
    ]
)
