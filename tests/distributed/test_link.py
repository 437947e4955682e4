"""The cost of sums is measured before a run, and all ranks have the same numbers."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, final
from unittest.mock import patch

import pytest
import torch

from tests.distributed.pool import RuntimeName, shared_pool
from workbench.runtimes.rank.main import transport_here
from workbench.runtimes.transport import base
from workbench.runtimes.transport import measure_link as link
from workbench.runtimes.transport.base import Deadline, Handle, Transport, offset_to_rank0
from workbench.runtimes.transport.measure_link import LARGE_BYTES, LONG_BYTES, LONGEST_BYTES, MeasuredLink, measure_link

RUNTIMES: list[Any] = ["torch", pytest.param("mpi", marks=pytest.mark.mpi)]


def measured(limit_s: float) -> MeasuredLink | None:
    before, link.LONG_LIMIT_S = link.LONG_LIMIT_S, limit_s
    transport = transport_here(30.0)
    try:
        return measure_link(transport, lambda what: Deadline(what, transport.peer_failure, 30.0))
    finally:
        transport.close()
        link.LONG_LIMIT_S = before


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_all_ranks_measure_alike(runtime: RuntimeName) -> None:
    one, *others = shared_pool(runtime, 3).run(measured, 60.0)
    assert all(other == one for other in others)
    assert one.slowdown > 0.0
    assert 0 < one.native_s(8) <= one.native_s(LARGE_BYTES) <= one.native_s(LONG_BYTES) < 60
    long_s = (one.native_s(LONG_BYTES) - one.native_s(LARGE_BYTES)) / (LONG_BYTES - LARGE_BYTES)
    assert long_s == pytest.approx(one.long_s_per_byte)


def offset(skewed: int) -> float:
    """The offset of this rank's clock, where the clock of rank `skewed` is another one, 50 s later."""
    transport = transport_here(30.0)
    skew_s = 50.0 if transport.rank == skewed else 0.0
    true, name = time.perf_counter, base.name_of_clock()
    try:
        with (
            patch.object(time, "perf_counter", lambda: true() + skew_s),
            patch.object(base, "name_of_clock", lambda: f"{name} {skew_s}"),
        ):
            return offset_to_rank0(transport, Deadline("the clocks", transport.peer_failure, 30.0))
    finally:
        transport.close()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_only_another_clock_is_measured(runtime: RuntimeName) -> None:
    assert shared_pool(runtime, 3).run(offset, -1) == [0.0, 0.0, 0.0], "one clock"
    same, near, far = shared_pool(runtime, 3).run(offset, 2)
    assert (same, near) == (0.0, 0.0)
    assert far == pytest.approx(-50.0, abs=1.0)


@final
class Cold(Transport):
    """One of two equal ranks, whose library is slow in its first sums; other calls take no time."""

    rank, num_workers, device, library, notes = 0, 2, torch.device("cpu"), "none", []

    def __init__(self, cold_sums: int) -> None:
        self.clock_s, self.cold, self.longest = 0.0, cold_sums, 0

    def all_reduce(self, flat: torch.Tensor, deadline: Deadline) -> None:
        if flat.nbytes < LONG_BYTES:
            self.clock_s += 1e-6 + 1e-9 * flat.nbytes
            return
        self.cold -= 1
        self.longest = max(self.longest, flat.nbytes)
        self.clock_s += 0.2 if flat.nbytes == LONGEST_BYTES else 0.03 if self.cold >= 0 else 0.01

    def start_send(self, to: int, flat: torch.Tensor, tag: int) -> Handle:
        self.clock_s += 1e-6 + 1e-9 * flat.nbytes
        return Done()

    def start_recv(self, source: int, flat: torch.Tensor, tag: int) -> Handle:
        return Done()

    def gather_texts(self, text: str, deadline: Deadline) -> list[str]:
        return [text, text]

    def _none(self, *_: Any) -> Any:
        raise AssertionError("a measurement needs no more")

    start_all_reduce = reduce_scatter = all_gather = broadcast = barrier = announce_failure = peer_failure = _none


@final
class Done(Handle):
    def poll(self) -> bool:
        return True

    def wait(self, deadline: Deadline) -> None:
        """No wait is needed."""


@pytest.mark.parametrize(("cold", "seconds"), [(0, 0.01), (2, 0.01), (7, 0.03)])
def test_a_library_s_first_long_sums_do_not_count(monkeypatch: pytest.MonkeyPatch, cold: int, seconds: float) -> None:
    """The first sums open connections through memory. Compared with them, all predictions would look fast."""
    transport = Cold(cold)
    monkeypatch.setattr(link, "time", SimpleNamespace(perf_counter=lambda: transport.clock_s))
    found = measure_link(transport, lambda what: Deadline(what, lambda: None, 1.0))
    assert found is not None
    assert found.native_s(LONG_BYTES) == pytest.approx(seconds)
    assert found.slowdown == pytest.approx(1.0, rel=0.01), "the ring's messages take what one hop's did"


@pytest.mark.parametrize(
    ("num_bytes", "measured_bytes", "line_s", "longest_s"),
    [
        (1e5, 0, 0.067, 0.134),
        (2e6, LONG_BYTES, 0.08, 0.16),
        (6e7, LONG_BYTES, 0.08, 0.16),
        (1e9, LONGEST_BYTES, 0.08, 0.4),
    ],
)
def test_sums_as_long_as_the_run_s_are_measured(
    monkeypatch: pytest.MonkeyPatch, num_bytes: float, measured_bytes: int, line_s: float, longest_s: float
) -> None:
    transport = Cold(0)
    monkeypatch.setattr(link, "time", SimpleNamespace(perf_counter=lambda: transport.clock_s))
    found = measure_link(transport, lambda what: Deadline(what, lambda: None, 1.0), num_bytes)
    assert found is not None
    assert transport.longest == measured_bytes
    assert found.native_s(LONGEST_BYTES - 1) == pytest.approx(line_s, rel=0.1)
    assert found.native_s(2 * LONGEST_BYTES) == pytest.approx(longest_s, rel=0.1)


def test_a_library_s_fastest_sum_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Auto` would choose the library by a time that a training does not get."""
    transport, took_s = Cold(0), [0.04, 0.08, 0.02, 0.08]
    monkeypatch.setattr(link, "time", SimpleNamespace(perf_counter=lambda: transport.clock_s))

    def all_reduce(flat: torch.Tensor, deadline: Deadline) -> None:
        transport.clock_s += took_s.pop(0) if flat.nbytes == LARGE_BYTES else 1e-6

    monkeypatch.setattr(transport, "all_reduce", all_reduce)
    found = measure_link(transport, lambda what: Deadline(what, lambda: None, 1.0), 1e6)
    assert found is not None
    assert found.native_s(LARGE_BYTES) == pytest.approx(0.08, rel=0.01)


def test_a_ring_is_measured_where_a_long_sum_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of a ring takes twice as long as one alone, so all formulas are doubled."""
    transport = Cold(0)
    monkeypatch.setattr(link, "time", SimpleNamespace(perf_counter=lambda: transport.clock_s))
    monkeypatch.setattr(link, "LONG_LIMIT_S", 0.0)

    def start_send(to: int, flat: torch.Tensor, tag: int) -> Handle:
        in_a_ring = flat.nbytes == LARGE_BYTES // transport.num_workers
        transport.clock_s += (1e-6 + 1e-9 * flat.nbytes) * (2 if in_a_ring else 1)
        return Done()

    monkeypatch.setattr(transport, "start_send", start_send)
    found = measure_link(transport, lambda what: Deadline(what, lambda: None, 1.0), 1e9)
    assert found is not None
    assert found.slowdown == pytest.approx(2.0, rel=0.01)


def test_each_round_has_the_time_out_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow wire all of them together take longer than a rank may be late."""
    transport, given = Cold(0), list[Deadline]()
    monkeypatch.setattr(link, "time", SimpleNamespace(perf_counter=lambda: transport.clock_s))

    def all_reduce(flat: torch.Tensor, deadline: Deadline) -> None:
        given.append(deadline)
        transport.clock_s += 1e-6

    monkeypatch.setattr(transport, "all_reduce", all_reduce)
    measure_link(transport, lambda what: Deadline(what, lambda: None, 1.0), 1e9)
    assert len({id(deadline) for deadline in given}) == len(given) > 20


def test_what_takes_long_is_not_measured() -> None:
    one, other = shared_pool("torch", 2).run(measured, 0.0)
    assert one == other
    assert one.long_s_per_byte == one.native_s_per_byte
