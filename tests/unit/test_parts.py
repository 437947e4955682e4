"""The parts of a collective's time, on spans that can be computed by hand."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.made_runs import Row, joined
from workbench.analysis import parts, run_parts
from workbench.trace import MemoryRecorder, Run, Spans


def span(kind: str, start_s: float, end_s: float, peer: int = -1, step: int = 0, num_bytes: int = 8) -> Row:
    return (kind, "comm", start_s, end_s, step, -1, num_bytes, peer)


def test_a_receive_waits_until_its_sender_begins() -> None:
    found = parts(joined([span("send", 3, 5, 1)], [span("recv", 1, 5, 0)]))
    assert found.of_rank(1) == {"wait_s": 2, "wire_s": 2, "decode_s": 0, "sum_s": 0, "encode_s": 0}
    assert found.of_rank(0) == dict.fromkeys(found.of_rank(0), 0), "a send's time is its receiver's"
    assert found.total() == found.of_rank(1)


@pytest.mark.parametrize(
    ("sent", "received", "wait_s", "wire_s"),
    [
        ((0, 5), (1, 5), 0, 4),  # the sender was first
        ((1, 5), (1, 5), 0, 4),
        ((4, 5), (1, 5), 3, 1),
        ((9, 9), (1, 5), 4, 0),  # clocks that disagree: never more than the receive itself
    ],
)
def test_waiting_is_a_part_of_the_receive(
    sent: tuple[float, float], received: tuple[float, float], wait_s: float, wire_s: float
) -> None:
    found = parts(joined([span("send", *sent, 1)], [span("recv", *received, 0)])).of_rank(1)
    assert (found["wait_s"], found["wire_s"]) == (wait_s, wire_s)


def test_messages_between_two_ranks_are_paired_in_order_and_by_direction() -> None:
    """The first message from 0 to 1 is late, the second is not; those from 1 to 0 and from 2 are none of theirs."""
    found = parts(
        joined(
            [span("send", 6, 8, 1), span("send", 10, 14, 1), span("recv", 1, 4, 1)],
            [span("recv", 0, 8, 0), span("recv", 11, 14, 0), span("recv", 20, 24, 2), span("send", 2, 4, 0)],
            [span("send", 21, 24, 1)],
        )
    )
    assert found.rank.tolist() == [0, 1, 2]
    assert found.wait_s.tolist() == [1, 6 + 0 + 1, 0] and found.wire_s.tolist() == [2, 2 + 3 + 3, 0]


def test_a_receive_without_a_send_is_wire() -> None:
    found = parts(joined([span("send", 2, 3, 1)], [span("recv", 1, 3, 0), span("recv", 5, 8, 0)])).of_rank(1)
    assert (found["wait_s"], found["wire_s"]) == (1, 1 + 3)


def test_work_is_counted_by_name_and_what_runs_at_once_counts_in_each_part() -> None:
    rows = [
        span("recv", 0, 4, 0),
        span("recv", 2, 6, 0),  # posted ahead: 0 to 6 together
        span("decode", 4, 5),
        span("sum", 5, 5.5),
        span("sum", 5.25, 6),  # on another lane: 5 to 6 together
        span("encode", 6, 9),
        span("all_reduce", 0, 9),
        span("backward", 0, 9),
    ]
    found = parts(joined([span("send", 0, 4, 1), span("send", 1, 6, 1)], rows))
    assert found.of_rank(1) == {"wait_s": 0, "wire_s": 6, "decode_s": 1, "sum_s": 1, "encode_s": 3}


def test_steps_and_ranks() -> None:
    """A message is paired before the steps are chosen, or the second receive would be given the first send."""
    spans = joined(
        [span("send", 2, 3, 1, step=0), span("send", 10, 14, 1, step=1)],
        [
            span("recv", 1, 3, 0, step=0),
            span("recv", 9, 14, 0, step=1),
            span("sum", 14, 16, step=1),
            span("sum", 3, 4, step=0),
        ],
    )
    assert parts(spans, steps=slice(1, 2)).of_rank(1) == {
        "wait_s": 1,
        "wire_s": 4,
        "decode_s": 0,
        "sum_s": 2,
        "encode_s": 0,
    }
    assert parts(spans, ranks=[1]).rank.tolist() == [1]
    assert parts(spans, ranks=[1], steps=slice(0, 1)).total()["sum_s"] == 1


def test_table_and_nothing() -> None:
    found = parts(joined([span("send", 0, 1, 1)], [span("recv", 0, 1, 0)]))
    assert [row["rank"] for row in found.table()] == [0, 1, "mean"]
    assert [row["wire_s"] for row in found.table()] == [0, 1, 0.5]
    assert "wait" in str(found) and ">mean</td>" in found._repr_html_()
    nothing = parts(Spans.concatenate([]))
    assert not len(nothing.table()) and nothing.total()["wait_s"] == 0


def test_of_a_run() -> None:
    recorders = [MemoryRecorder(0), MemoryRecorder(1)]
    recorders[0].span("send", "comm", 3.0, 5.0, 0, -1, 8, 1)
    recorders[1].span("recv", "comm", 1.0, 5.0, 0, -1, 8, 0)
    run = Run.from_memory({}, recorders)
    assert run_parts(run).of_rank(1)["wait_s"] == 2 and run_parts(run, slice(1, None)).of_rank(1)["wait_s"] == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9), st.integers(0, 9)), max_size=8))
def test_one_after_another_waiting_and_wire_are_the_receives(messages: list[tuple[int, int, int]]) -> None:
    at, sends, receives = 0, [], []
    expected: dict[str, Any] = {"wait_s": 0, "wire_s": 0}
    for pause, wait, wire in messages:
        at += pause
        receives.append(span("recv", at, at + wait + wire, 0))
        sends.append(span("send", at + wait, at + wait + wire, 1))
        at += wait + wire
        expected["wait_s"] += wait
        expected["wire_s"] += wire
    found = parts(joined(sends, receives)).of_rank(1)
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_many_spans_take_a_second_or_two() -> None:
    num = 100_000
    times = [float(number) for number in range(num)]
    ahead = [span("send", at, at + 1, 1) for at in times], [span("recv", at - 0.5, at + 1, 0) for at in times]
    back = [span("recv", at, at + 1, 1) for at in times], [span("send", at + 0.25, at + 1, 0) for at in times]
    spans = joined(ahead[0] + back[0], ahead[1] + back[1])
    begin = time.process_time()
    found = parts(spans)
    assert time.process_time() - begin < 5
    assert found.of_rank(0)["wait_s"] == num * 0.25 and found.of_rank(1)["wait_s"] == num * 0.5
