"""This machine: its cores, its processes, the environment of this one, and whether it is a notebook's kernel."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_cores_of_job() -> int:
    """Return the number of cores on all nodes of the Slurm job that this process runs in; else those of this machine."""
    return max(num_cores(), sum(parse_counts(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))))


def parse_counts(text: str) -> list[int]:
    """Parse Slurm's list of a number for each node.

    >>> parse_counts("4(x2),1")
    [4, 4, 1]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(number) for number, times in found for _ in range(int(times or 1))]


def is_running(process: psutil.Process | int) -> bool:
    """Return True if a process, or one with this number, exists and has not ended.

    A zombie counts as ended. It can stay in the process table if its parent does not wait for it.
    """
    try:
        if isinstance(process, int):
            process = psutil.Process(process)
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process within the block. A process that is started in it inherits them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def in_notebook() -> bool:
    """Return True if this process is a notebook's kernel. An import of ipykernel alone does not make it one."""
    kernel = sys.modules.get("ipykernel.zmqshell")
    return kernel is not None and kernel.ZMQInteractiveShell.initialized()
