"""Critical paths: on small traces, and on simulated runs whose closed form names the bottleneck."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.unit.made_runs import Row, joined
from tests.unit.slow_walk import Walk
from workbench.analysis import critical_path, overlap, run_critical_path
from workbench.analysis.critical import _last_ends
from workbench.bench.spans import write_trace
from workbench.collectives import Ring
from workbench.costs import Compute, Network, SlowMachines
from workbench.trace import Run, Spans
from workbench.trace.kinds import CODES
from workbench.trace.links import collective_numbers, messages

Piece = tuple[int, str, float, float]


def span(
    kind: str,
    start_s: float,
    end_s: float,
    *,
    step: int = 0,
    lane: str = "",
    bucket: int = -1,
    num_bytes: int = 8,
    peer: int = -1,
) -> Row:
    computes = kind in ("forward", "backward", "apply", "wait", "evaluate")
    return (kind, lane or ("compute" if computes else "comm"), start_s, end_s, step, bucket, num_bytes, peer)


def path(spans: Spans, steps: slice | None = None) -> list[Piece]:
    found = critical_path(spans, steps)
    return list(zip(found.rank.tolist(), found.kind_names, found.start_s.tolist(), found.end_s.tolist(), strict=True))


# ---------------------------------------------------------------- by hand


def test_a_collective_begins_with_the_rank_that_comes_last() -> None:
    early = [
        span("forward", 0, 1),
        span("backward", 1, 3),
        span("all_reduce", 3, 8),
        span("wait", 3, 8),
        span("apply", 8, 9),
    ]
    late = [
        span("forward", 0, 2),
        span("backward", 2, 6),
        span("all_reduce", 6, 8),
        span("wait", 6, 8),
        span("apply", 8, 8.5),
    ]
    assert path(joined(early, late)) == [
        (1, "forward", 0, 2),
        (1, "backward", 2, 6),
        (0, "all_reduce", 6, 8),
        (0, "apply", 8, 9),
    ]


def test_the_path_goes_through_messages_to_whoever_was_waited_for() -> None:
    """Rank 1 is late, rank 0 gets its sum late, and passes it to rank 2, which ends last."""
    ranks = [
        [span("forward", 0, 1), span("recv", 1, 6, peer=1), span("sum", 6, 7), span("send", 7, 9, peer=2)],
        [span("forward", 0, 4), span("send", 4, 6, peer=0)],
        [span("forward", 0, 1), span("recv", 1, 9, peer=0), span("wait", 1, 9), span("apply", 9, 11)],
    ]
    expected = [(1, "forward", 0, 4), (0, "recv", 4, 6), (0, "sum", 6, 7), (2, "recv", 7, 9), (2, "apply", 9, 11)]
    assert path(joined(*ranks)) == expected


def test_a_send_that_waits_for_its_receiver_is_the_receivers_delay() -> None:
    """Rendezvous: rank 0 offers at 1, rank 1 takes at 5."""
    ranks = [
        [span("forward", 0, 1), span("send", 1, 7, peer=1), span("wait", 1, 7), span("apply", 7, 9)],
        [span("forward", 0, 5), span("recv", 5, 7, peer=0)],
    ]
    assert path(joined(*ranks)) == [(1, "forward", 0, 5), (0, "send", 5, 7), (0, "apply", 7, 9)]


def test_hidden_communication_is_not_critical_and_exposed_is() -> None:
    def steps(sum_s: float) -> Spans:
        """A pipeline of width 2: the sum of step 0 overlaps the compute of step 1, which is 4 s."""
        step_s = max(4.0, sum_s)
        rows = [
            span("forward", 0, 1),
            span("backward", 1, 4),
            span("all_reduce", 4, 4 + sum_s),
            span("forward", 4, 5, step=1),
            span("backward", 5, 8, step=1),
            span("wait", 8, 4 + step_s, step=1),
            span("apply", 4 + step_s, 5 + step_s, step=1),
        ]
        return joined(rows)

    assert path(steps(3), slice(1, 2)) == [(0, "forward", 4, 5), (0, "backward", 5, 8), (0, "apply", 8, 9)]
    assert path(steps(7), slice(1, 2)) == [(0, "all_reduce", 4, 11), (0, "apply", 11, 12)]


def test_a_bucket_of_the_middle_of_backward_follows_from_backward() -> None:
    rows = [
        span("forward", 0, 2),
        span("backward", 2, 6),
        span("all_reduce", 3, 9, bucket=0),
        span("wait", 6, 9),
        span("apply", 9, 10),
    ]
    assert path(joined(rows)) == [
        (0, "forward", 0, 2),
        (0, "backward", 2, 3),
        (0, "all_reduce", 3, 9),
        (0, "apply", 9, 10),
    ]


def test_what_ended_by_chance_meanwhile_is_not_what_a_computation_followed() -> None:
    """A sum of another bucket ends between forward and backward, which did not wait for it."""
    rows = [span("forward", 0, 4), span("all_reduce", 1, 4.005), span("backward", 4.01, 10)]
    assert [piece[:2] for piece in path(joined(rows))] == [(0, "forward"), (0, "nothing"), (0, "backward")]


def test_spans_that_overlap_by_the_time_of_reading_a_clock_follow_each_other() -> None:
    rows = [
        span("forward", 0, 4.0001),
        span("backward", 4, 9.0002),
        span("apply", 9, 10.0001),
        span("forward", 10, 11, step=1),
    ]
    assert path(joined(rows), slice(0, 1)) == [(0, "forward", 0, 4), (0, "backward", 4, 9), (0, "apply", 9, 10)]


def test_collectives_asked_for_early_are_worked_off_one_after_the_other() -> None:
    rows = [
        span("forward", 0, 2),
        span("backward", 2, 6),
        span("all_reduce", 3, 8, bucket=0),
        span("all_reduce", 5, 12, bucket=1),
        span("wait", 6, 12),
        span("apply", 12, 13),
    ]
    expected = [
        (0, "forward", 0, 2),
        (0, "backward", 2, 3),
        (0, "all_reduce", 3, 8),
        (0, "all_reduce", 8, 12),
        (0, "apply", 12, 13),
    ]
    assert path(joined(rows)) == expected


def test_time_in_which_nothing_was_recorded_is_said_and_evaluation_left_out() -> None:
    rows = [span("forward", 0, 2), span("evaluate", 2, 5), span("apply", 7, 8), span("forward", 10, 11, step=1)]
    found = critical_path(joined(rows), slice(0, 1))
    assert found.per_step() == {0: {"forward": 2, "nothing": 2 + 2, "apply": 1}}
    assert found.compute_share == pytest.approx(3 / 7)


def test_servers_end_no_step_of_a_worker() -> None:
    """Rank 1 serves: its own step numbers count updates. The worker's step waits for it."""
    worker = [
        span("forward", 0, 1),
        span("backward", 1, 2),
        span("send", 2, 3, peer=1, num_bytes=16),
        span("recv", 2, 6, peer=1),
        span("wait", 2, 6),
        span("forward", 6, 7, step=1),
    ]
    server = [
        span("recv", 0, 3, peer=0),
        span("apply", 3, 5, step=7, lane="server"),
        span("send", 5, 6, step=7, peer=0, num_bytes=16),
    ]
    expected = [(0, "forward", 0, 1), (0, "backward", 1, 2), (1, "recv", 2, 3), (1, "apply", 3, 5), (0, "recv", 5, 6)]
    assert path(joined(worker, server), slice(0, 1)) == expected


def test_numbers_and_table() -> None:
    ranks = [[span("forward", 0, 1), span("all_reduce", 1, 5)], [span("forward", 0, 3), span("all_reduce", 3, 5)]]
    found = critical_path(joined(*ranks))
    assert found.per_rank() == {0: 0.4, 1: 0.6} and found.steps == [0] and found.compute_share == 0.6
    rows = [(row["kind"], row["step_s"], row["share"], row["rank"]) for row in found.table()]
    assert rows == [("forward", 3.0, 0.6, 1), ("all_reduce", 2.0, 0.4, 0)]
    assert (
        "all-reduce" in str(found)
        and "<td style='white-space: nowrap; padding: 2px 8px'>60.0 %</td>" in found._repr_html_()
    )
    assert critical_path(joined(*ranks), ranks=[0]).per_step() == {0: {"forward": 1, "all_reduce": 4}}
    nothing = critical_path(Spans.concatenate([]))
    assert nothing.per_step() == {} and nothing.compute_share is None and not len(nothing.table())
    with pytest.raises(ValueError, match="a range of step numbers"):
        critical_path(joined(*ranks), slice(0, 4, 2))


# ---------------------------------------------------------------- simulated, against closed forms

COMPUTE = Compute(forward_s=0.002, backward_s=0.004, update_s=0.0005)
FAST, SLOW = (Network(latency_s=1e-4, bandwidth_bytes_per_s=rate, name="link") for rate in (1e8, 1e7))
BYTES = 4 * 17_234  # of a gradient of digits-mlp and its loss and flags


def simulated(algorithm: wb.Algorithm, network: Network, compute: Compute = COMPUTE, workers: int = 4) -> Run:
    problem = wb.problems.get("digits-mlp")
    return wb.simulate(algorithm, problem, workers=workers, network=network, compute=compute, timing_only=True, steps=8)


@pytest.mark.parametrize("network", [FAST, SLOW])
@pytest.mark.parametrize("algorithm", [wb.SynchronousSGD(), wb.SynchronousSGD(collective=Ring())])
def test_a_synchronous_step_is_compute_and_then_its_sum(algorithm: wb.SynchronousSGD, network: Network) -> None:
    run = simulated(algorithm, network)
    kind = "recv" if isinstance(algorithm.collective, Ring) else "all_reduce"
    found = run_critical_path(run, slice(2, 8)).per_step()
    sum_s = algorithm.collective.seconds(BYTES, 4, network) if kind == "recv" else network.all_reduce_s(BYTES, 4)
    for parts in found.values():
        assert parts == pytest.approx({"forward": 0.002, "backward": 0.004, "apply": 0.0005, kind: sum_s}, rel=2e-3)


@pytest.mark.parametrize("collective", [None, Ring()])
def test_a_pipeline_is_bound_by_the_larger_of_compute_and_sum(collective: Ring | None) -> None:
    algorithm = wb.PipeSGD(width=2) if collective is None else wb.PipeSGD(width=2, collective=collective)
    quick = run_critical_path(simulated(algorithm, FAST), slice(3, 7)).per_step()
    assert all(
        parts == pytest.approx({"forward": 0.002, "backward": 0.004, "apply": 0.0005}) for parts in quick.values()
    )
    slow = run_critical_path(simulated(algorithm, SLOW), slice(3, 7)).per_step()
    for parts in slow.values():
        assert set(parts) == {"recv" if collective else "all_reduce", "apply"}
        assert sum(parts.values()) == pytest.approx(SLOW.all_reduce_s(BYTES, 4), rel=2e-3)


def test_a_straggler_is_on_the_path_of_every_step() -> None:
    slow = Compute(
        forward_s=0.002, backward_s=0.004, update_s=0.0005, stragglers=(SlowMachines(factor_of=((2, 3.0),)),)
    )
    found = run_critical_path(simulated(wb.SynchronousSGD(), FAST, slow), slice(1, 8))
    backward = found.kind == CODES["backward"]
    assert set(found.rank[backward].tolist()) == {2} and found.table()[0]["rank"] == 2


def test_in_a_ring_the_path_visits_every_rank() -> None:
    found = run_critical_path(simulated(wb.SynchronousSGD(collective=Ring()), SLOW), slice(4, 5))
    received = found.rank[np.array(found.kind_names) == "recv"]
    assert len(received) == 2 * (4 - 1) and len(set(received.tolist())) == 4


ALGORITHMS = [
    wb.SynchronousSGD(collective=Ring()),
    wb.PipeSGD(width=3),
    wb.LayerwiseSGD(bucket_bytes=1e4),
    wb.LayerwiseSGD(bucket_bytes=1e4, collective=Ring(), lanes=2),
    wb.BackupSGD(backups=1),
    wb.AsyncSGD(),
    wb.LocalSGD(),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)
@pytest.mark.parametrize("network", [FAST, SLOW], ids=["fast", "slow"])
def test_the_pieces_of_a_step_fill_it_and_the_simulator_leaves_no_hole(
    algorithm: wb.Algorithm, network: Network
) -> None:
    run = simulated(algorithm, network)
    found, windows = run_critical_path(run), overlap(run.spans)
    assert found.steps == list(range(8)) and "nothing" not in found.kind_names
    for step in found.steps:
        part = found.of_steps(slice(step, step + 1))
        np.testing.assert_allclose(part.start_s[1:], part.end_s[:-1], atol=1e-12)
        lengths = windows.window_s[windows.step == step]
        assert np.isclose(lengths, part.end_s[-1] - part.start_s[0]).any()


def test_every_message_of_a_simulated_run_is_found_and_ends_at_once_on_both_sides() -> None:
    for algorithm in ALGORITHMS:
        table = simulated(algorithm, FAST).spans.table
        sent, received = messages(table)
        assert len(sent) == (table["kind"] == CODES["send"]).sum() == (table["kind"] == CODES["recv"]).sum()
        assert np.array_equal(table["end_s"][sent], table["end_s"][received])
        assert len(set(sent.tolist())) == len(sent) == len(set(received.tolist()))
        assert set((table["bytes"][sent] - table["bytes"][received]).tolist()) <= {0, 8}


# ---------------------------------------------------------------- any trace

drawn_rows = st.lists(
    st.builds(
        lambda kind, start, length, step, bucket, peer: span(
            kind, start, start + length, step=step, bucket=bucket, peer=peer
        ),
        st.sampled_from(
            ("forward", "backward", "apply", "evaluate", "wait", "all_reduce", "send", "recv", "sum", "barrier")
        ),
        st.integers(0, 30),
        st.integers(0, 9),
        st.integers(-1, 3),
        st.integers(-1, 1),
        st.integers(-1, 2),
    ),
    max_size=14,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(drawn_rows, max_size=3))
def test_of_any_trace_the_pieces_fill_the_step_of_the_rank_that_ends_last(rows_of_rank: list[list[Row]]) -> None:
    spans = joined(*rows_of_rank)
    found = critical_path(spans)
    for step in found.steps:
        part = found.of_steps(slice(step, step + 1))
        assert np.all(part.end_s > part.start_s) and np.all(part.start_s[1:] >= part.end_s[:-1])
        evaluated = sum(row[3] - row[2] for rows in rows_of_rank for row in rows if row[0] == "evaluate")
        length = part.end_s[-1] - part.start_s[0]
        assert length - evaluated <= (part.end_s - part.start_s).sum() <= length


@settings(max_examples=300, deadline=None)
@given(st.lists(drawn_rows, min_size=1, max_size=3))
def test_of_any_trace_the_path_is_that_of_the_slow_twin(rows_of_rank: list[list[Row]]) -> None:
    assert_as_slow(joined(*rows_of_rank))


def test_of_a_made_trace_with_a_straggler_the_path_is_that_of_the_slow_twin(tmp_path: Path) -> None:
    spans = Run.load(write_trace(tmp_path, num_ranks=3, num_steps=6)).spans
    assert assert_as_slow(spans) > 6 * 3


def assert_as_slow(spans: Spans) -> int:
    """The path of each step, whose bounds are asked for here, is walked in plain Python, too; returns the number of pieces."""
    names = spans.table.dtype.names or ()
    rows = [dict(zip(names, row, strict=True)) for row in spans.table.tolist()]
    walk = Walk(rows, list(zip(*(places.tolist() for places in spans.messages), strict=True)))
    found = critical_path(spans)
    columns = (found.step, found.rank, found.kind, found.start_s, found.end_s, found.span)
    pieces = list(zip(*(column.tolist() for column in columns), strict=True))
    expected = [(step, *piece) for step, ends in sorted(_last_ends(spans).items()) for piece in walk.back(*ends)]
    assert pieces == expected
    return len(pieces)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from((8, 16)), st.integers(0, 5)), max_size=20)
)
def test_messages_in_one_order_are_paired_as_they_were_sent(drawn: list[tuple[int, int, int, int]]) -> None:
    """For any steps and buckets that both sides record, with and without the stamp in a receive's bytes."""
    rows: list[list[Row]] = [[], [], []]
    for number, (source, to, size, lag) in enumerate(drawn):
        rows[source].append(span("send", 10 * number, 10 * number + 9, step=number, bucket=3, num_bytes=size, peer=to))
        rows[to].append(span("recv", 10 * number - lag, 10 * number + 9, step=0, num_bytes=size, peer=source))
    table = joined(*rows).table
    sent, received = messages(table)
    assert len(sent) == len(drawn)
    assert np.array_equal(table["end_s"][sent], table["end_s"][received])
    assert np.array_equal(table["peer"][sent], table["rank"][received]) and np.array_equal(
        table["rank"][sent], table["peer"][received]
    )


def test_messages_of_two_sizes_may_overtake_each_other() -> None:
    sends = [span("send", 0, 9, num_bytes=800, peer=1), span("send", 1, 3, num_bytes=8, peer=1)]
    receives = [
        span("recv", 0, 3, num_bytes=8, peer=0),
        span("recv", 1, 9, num_bytes=800, peer=0),
        span("recv", 9, 10, num_bytes=8, peer=0),
    ]
    table = joined(sends, receives).table
    sent, received = messages(table)
    assert sorted(zip(table["end_s"][sent].tolist(), table["end_s"][received].tolist(), strict=True)) == [
        (3, 3),
        (9, 9),
    ]


def test_collectives_are_met_by_step_bucket_and_order() -> None:
    first = [
        span("all_reduce", 0, 9, bucket=0),
        span("all_reduce", 1, 9, bucket=1),
        span("barrier", 2, 9),
        span("barrier", 3, 9),
    ]
    second = [
        span("all_reduce", 4, 9, bucket=1),
        span("barrier", 5, 9),
        span("send", 5, 6, peer=0),
        span("all_reduce", 6, 9, bucket=0),
    ]
    table = joined(first, second).table
    groups = collective_numbers(table)
    pairs = {tuple(table["start_s"][groups == group].tolist()) for group in set(groups.tolist()) - {-1}}
    assert pairs == {(0, 6), (1, 4), (2, 5), (3,)} and groups[6] == -1


def test_collectives_of_one_order_are_met_by_lane_although_ranks_note_other_steps() -> None:
    """A background sum of other values than a gradient has the step of its rank at that time."""
    ranks = [
        [span("all_reduce", 0, 2, step=0), span("all_reduce", 2, 4, step=step), span("all_reduce", 4, 6, step=1)]
        for step in (0, 1)
    ]
    table = joined(*ranks).table
    groups = collective_numbers(table)
    assert [table["start_s"][groups == group].tolist() for group in groups[:3]] == [[0, 0], [2, 2], [4, 4]]


def test_a_long_run_is_followed_without_looking_at_every_span_twice() -> None:
    """200 000 spans: 20 000 steps of two ranks; the path of ten steps visits some forty of them."""
    num = 20_000
    rows = [list[Row](), list[Row]()]
    for step in range(num):
        for rank in (0, 1):
            at = 10.0 * step
            rows[rank] += [
                span("forward", at, at + 2, step=step),
                span("backward", at + 2, at + 6 + rank, step=step),
                span("all_reduce", at + 6 + rank, at + 9, step=step),
                span("wait", at + 6 + rank, at + 9, step=step),
                span("apply", at + 9, at + 10, step=step),
            ]
    found = critical_path(joined(*rows), slice(100, 110))
    assert len(found.step) == 4 * 10 and found.per_step()[105] == {
        "forward": 2,
        "backward": 5,
        "all_reduce": 2,
        "apply": 1,
    }
