"""Finalizers, which Python's collector may run at any time on any thread, block no thread."""

from __future__ import annotations

from pathlib import Path

from workbench.runtimes.liveness.failure_detector import FailureDetector, heartbeat_name


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
