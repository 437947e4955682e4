"""What Python's collector may run at any time, on any thread, stops nobody."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from pathlib import Path

from workbench.runtimes.liveness.failure_detector import FailureDetector, heartbeat_name
from workbench.runtimes.liveness.watchdog import stack_of

READS = """
    import gc, sys, threading
    from workbench.runtimes.liveness.watchdog import stack_of

    class Leaves:
        def __init__(self):
            self.me = self

        def __del__(self):  # takes the lock under which Python 3.11 makes frames, as a thread of gloo's does that calls back
            threading.Thread(target=int).start()

    for _ in range(200):
        gc.disable()
        Leaves()
        gc.set_threshold(1)
        gc.enable()
        stack_of(threading.get_ident())
    print("read")
"""


def test_reading_a_stack_collects_nothing() -> None:
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(READS)], capture_output=True, text=True, timeout=60)
    assert found.stdout == "read\n", found.stderr


def test_reading_a_stack_leaves_the_collector_as_it_was() -> None:
    assert gc.isenabled()
    stack_of(0)
    assert gc.isenabled()
    gc.disable()
    try:
        stack_of(0)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_rank_may_leave_while_it_writes_where_it_is(tmp_path: Path) -> None:
    """Its owner is collected on the thread that writes."""
    one: list[FailureDetector] = []

    def step() -> int:
        if one:
            one[0].leave()
        return 3

    detector = FailureDetector(tmp_path, 0, 2, step=step)
    with detector:
        assert (tmp_path / heartbeat_name(0)).exists()
        one.append(detector)
        detector._write()
        assert not (tmp_path / heartbeat_name(0)).exists()
