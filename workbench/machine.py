"""Where this process runs."""

from __future__ import annotations

import os
import sys


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_notebook() -> bool:
    """Return True if this process is a notebook's kernel. Other processes may have imported what a kernel needs."""
    kernel = sys.modules.get("ipykernel.zmqshell")
    return kernel is not None and kernel.ZMQInteractiveShell.initialized()
