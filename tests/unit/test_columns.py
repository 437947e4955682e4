"""Columns of a trace read at once equal those read by JSON line by line; walks over arrays equal walks over lists."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.bench.spans import LATE_RANK, LATE_STEP, write_trace
from workbench.trace import KINDS, FileRecorder, Run, Spans
from workbench.trace.columns import read_columns
from workbench.trace.read import read_trace

Row = tuple[Any, ...]

times_s = st.one_of(
    st.floats(-2e7, 9e7), st.integers(-5, 5).map(float), st.sampled_from((0.0, -0.0, 1e-7, 99_899_999.9999999))
)
drawn_rows = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.sampled_from(("compute", "comm", "a lane of a longer name, with a comma", 'quoted "<0>"', "ü", "")),
        times_s,
        st.floats(0, 1e5),
        st.integers(-1, 99_999_999),
        st.integers(-1, 12),
        st.one_of(st.integers(0, 10), st.integers(0, 10**16 - 1)),
        st.integers(-1, 4096),
    ),
    max_size=12,
)


def one_by_one(rank: int, text: str) -> Spans:
    """The slow readable twin."""
    return Spans.from_rows(rank, [json.loads(line) for line in text.splitlines()])


def same(one: Spans, other: Spans) -> bool:
    return one.lanes == other.lanes and one.table.tobytes() == other.table.tobytes()


@settings(max_examples=300, deadline=None)
@given(drawn=drawn_rows, rank=st.integers(0, 5000))
def test_what_a_recorder_wrote_is_read_to_the_last_bit(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[Row], rank: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    recorder = FileRecorder(folder, rank, {})
    for kind, lane, start_s, length_s, *more in drawn:
        recorder.span(kind, lane, start_s, start_s + length_s, *more)
    recorder.close()
    text = (folder / f"trace-{rank:05d}.jsonl").read_text().partition("\n")[2]
    found = read_columns(rank, text.encode())
    if "comma" in text:
        assert found is None, "a comma inside a name: left to the slow twin"
    else:
        assert found is not None and same(found, one_by_one(rank, text))
    trace = read_trace(folder / f"trace-{rank:05d}.jsonl", rank)
    spans = trace.spans if isinstance(trace.spans, Spans) else Spans.from_rows(rank, trace.spans)
    assert same(spans, one_by_one(rank, text)) and trace.damaged == ()


LINES = (
    '["send","comm",0.1250000,13.5000000,3,-1,800,1]',
    '["forward","compute",-2.0000001,0.0000000,0,-1,0,-1]',
    '{"clock": {"at_s": 1.0, "offset_s": -1.5}}',
    '["all_reduce","comm",1234567.1234567,1234568.0000000,12,3,123456789012,-1]',
    '["send","comm",7.0000000,8.0000000,100,2,64,0]',
)


@settings(max_examples=1000, deadline=None)
@given(
    order=st.permutations(LINES),
    changes=st.lists(
        st.tuples(
            st.integers(0, 400), st.sampled_from([b"", *(bytes([code]) for code in b'0159.,-+[]"{}\n e\\x\xff\t')])
        ),
        max_size=3,
    ),
    cut=st.integers(0, 12),
)
def test_whatever_a_file_holds_both_ways_to_read_it_agree(
    order: list[str], changes: list[tuple[int, bytes]], cut: int
) -> None:
    """Letters put in, taken out or changed, and an end that is cut off."""
    text = "\n".join(['{"rank": 3, "host": "here"}', *order, ""]).encode()
    for place, letter in changes:
        text = text[:place] + letter + text[place + 1 :]
    assert_read_alike(text[: len(text) - cut])


@pytest.mark.parametrize(
    "line",
    [
        '["send","comm",00.1250000,13.5000000,3,-1,800,1]',
        '["send","comm",0.1250000,13.5000000,03,-1,800,1]',
        '["send","comm",0.1250000,13.5000000,3,-1,0000000800,1]',
        '["send","comm",0.1250000,13.5000000,--3,-1,800,1]',
        '["send","comm",0.1250000,13.5000000,,-1,800,1]',
        '["send","comm",.1250000,13.5000000,3,-1,800,1]',
        '["send","comm",0.125000,13.5000000,3,-1,800,1]',
        '["send","comm",0.1250000,1.35000000,3,-1,800,1]',
        '["send","comm",1123456789.1250000,1123456790.1250000,3,-1,800,1]',
        '["send","comm",0.1250000,13.5000000,3,-1,80000000000000000,1]',
        '["send","comm",0.1250000,13.5000000,3,-1,8:0,1]',
        '["dance","comm",0.1250000,13.5000000,3,-1,800,1]',
        '["send",7,0.1250000,13.5000000,3,-1,800,1]',
        '["send","' + "comm" * 60 + '",0.1250000,13.5000000,3,-1,800,1]',
        '["send","comm",0.1250000,13.5000000,3,-1,800,1] ',
        '["send","comm",0.1250000,13.5000000,3,-1,800]\n["send","comm",0.1250000,13.5000000,3,-1,800,1,1]',
    ],
)
def test_a_line_of_another_form_is_left_to_json(line: str) -> None:
    assert read_columns(3, f"{line}\n".encode()) is None
    assert_read_alike("\n".join(['{"rank": 3}', LINES[0], line, LINES[1], ""]).encode())


def assert_read_alike(text: bytes) -> None:
    path = Path("trace-00003.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        for module in ("read", "files.text"):
            patch.setattr(f"workbench.trace.{module}.open_file", lambda _path: io.BytesIO(text))
        fast = read_trace(path, 3)
        patch.setattr("workbench.trace.read.read_columns", lambda _rank, _text: None)
        slow = read_trace(path, 3)
    assert (fast.header, fast.clocks, fast.damaged) == (slow.header, slow.clocks, slow.damaged)
    assert not isinstance(slow.spans, Spans)
    spans = fast.spans if isinstance(fast.spans, Spans) else Spans.from_rows(3, fast.spans)
    assert same(spans, Spans.from_rows(3, slow.spans))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run.load(write_trace(tmp_path_factory.mktemp("runs"), num_ranks=4, num_steps=30))


def test_a_made_trace_is_of_sixteen_spans_a_step_on_one_clock(made: Run) -> None:
    """The benchmark's trace: read as columns, its messages all paired, no collective ended before its last rank came."""
    assert all(isinstance(trace.spans, Spans) for trace in made._traces.values()) and made.damaged == ()
    assert len(made.spans) == 4 * 30 * 16 and made.spans.ranks == [0, 1, 2, 3] and LATE_RANK > 3 and LATE_STEP > 30
    table, (sent, received) = made.spans.table, made.messages
    assert len(sent) == 4 * 30 * 2 and np.array_equal(table["peer"][sent], table["rank"][received])
    assert np.array_equal(table["step"][sent], table["step"][received]) and np.array_equal(
        table["bucket"][sent], table["bucket"][received]
    )
    np.testing.assert_allclose(table["end_s"][sent], table["end_s"][received], atol=2e-7)
    calls = made.spans.select(kinds=["all_reduce"]).table
    assert np.ptp(calls["end_s"].reshape(4, 30), axis=0).max() < 2e-7, "clocks are one"
