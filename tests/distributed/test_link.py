"""What sums cost is measured before a run, and all ranks hold the same numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.pool import RuntimeName, shared_pool
from workbench.runtimes import link
from workbench.runtimes.launch import transport_here
from workbench.runtimes.link import LARGE_BYTES, LONG_BYTES, MeasuredLink, measure_link
from workbench.runtimes.transport import Patience

RUNTIMES: list[Any] = ["torch", pytest.param("mpi", marks=pytest.mark.mpi)]


def measured(limit_s: float) -> MeasuredLink | None:
    before, link.LONG_LIMIT_S = link.LONG_LIMIT_S, limit_s
    transport = transport_here(30.0)
    try:
        return measure_link(transport, lambda what: Patience(what, transport.peer_failure, 30.0))
    finally:
        transport.close()
        link.LONG_LIMIT_S = before


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_all_ranks_measure_alike(runtime: RuntimeName) -> None:
    one, *others = shared_pool(runtime, 3).run(measured, 60.0)
    assert all(other == one for other in others)
    assert one.slowdown >= 1.0
    assert 0 < one.native_s(8) <= one.native_s(LARGE_BYTES) <= one.native_s(LONG_BYTES) < 60
    long_s = (one.native_s(LONG_BYTES) - one.native_s(LARGE_BYTES)) / (LONG_BYTES - LARGE_BYTES)
    assert long_s == pytest.approx(one.long_s_per_byte)


def test_what_takes_long_is_not_measured() -> None:
    one, other = shared_pool("torch", 2).run(measured, 0.0)
    assert one == other
    assert (one.slowdown, one.long_s_per_byte) == (1.0, one.native_s_per_byte)
