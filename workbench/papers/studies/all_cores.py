"""Independent simulations of a notebook on all cores: one process a core, with the results of a loop."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

from workbench.experiments.side_by_side import CORES_VARIABLE
from workbench.machine import num_cores

T = TypeVar("T")
R = TypeVar("R")
SET_DEATH_SIGNAL = 1  # of prctl
_work: tuple[Callable[[Any], Any], Sequence[Any]]  # of a process of the pool


def each(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return `work(item)` for each item, in order: the list that a loop returns.

    The processes are forked on Linux. They have this process's objects, and only results are copied between them.
    There is no other process on one core, or while notebooks run side by side.

    Args:
        work: a function without side effects, on one thread. Its result can be pickled.
        items: arguments. They need not be picklable.

    Raises:
        Exception: the first in the order of the items, if one of them raises.
    """
    cores = int(os.environ.get(CORES_VARIABLE) or num_cores())
    if min(cores, len(items)) < 2 or sys.platform != "linux":
        return [work(item) for item in items]
    with warnings.catch_warnings():
        # Python 3.12 warns that a lock of another thread may stay locked. Simulations take none of Jupyter's.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        with ProcessPoolExecutor(min(cores, len(items)), get_context("fork"), _begin, (work, items)) as pool:
            return list(pool.map(_result_of, range(len(items))))


def _begin(work: Callable[[Any], Any], items: Sequence[Any]) -> None:
    """Begin a process of the pool. It ends with its parent, and never closes what it has inherited."""
    global _work
    torch.set_num_threads(1)  # torch's threads exist in the parent alone: an operation would wait for them for ever
    gc.freeze()
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    _work = work, items


def _result_of(place: int) -> Any:
    work, items = _work
    return work(items[place])
