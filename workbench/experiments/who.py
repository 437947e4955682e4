"""Which process of which machine wrote a record, and whether it is still there."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import psutil


def this_process() -> dict[str, Any]:
    """Entries of a record that tell this process from any other, also from a later one with its number."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "process_started": psutil.Process().create_time()}


def is_there(record: Mapping[str, Any]) -> bool:
    """Whether the process of a record lives, on this machine; False if the record does not tell."""
    try:
        return bool(abs(psutil.Process(record["pid"]).create_time() - record["process_started"]) < 1.0)
    except (psutil.Error, KeyError, TypeError):
        return False
