"""`LoopPhases`: events of a loop's thread and the spans they make, as tables."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from workbench.runtimes.user_loop.loop_phases import LoopPhases, Step

Event = tuple[Any, ...]  # a method's name and its arguments
Row = tuple[str, float, float, int]  # kind, start_s, end_s, step


def spans_of(*events: Event) -> tuple[list[Row], list[Step]]:
    rows, steps = list[Row](), list[Step]()
    phases = LoopPhases(lambda *row: rows.append(row), steps.append, 0.0)
    for name, *args in events:
        getattr(phases, name)(*args)
    phases.close(100.0)
    assert all(before[2] <= after[1] for before, after in pairwise(rows)), "they overlap"
    return rows, steps


STEP: list[Event] = [
    ("load", 1.0, 2.0),
    ("begin_forward", 3.0),
    ("end_forward", 4.0),
    ("begin_backward", 5.0),
    ("end_backward", 8.0, None, None),
    ("begin_update", 9.0),
    ("end_update", 10.0, 0.1),
]


def later(events: list[Event], by_s: float) -> list[Event]:
    return [
        (
            name,
            *(
                arg + by_s if isinstance(arg, float) and not (name == "end_update" and arg == 0.1) else arg
                for arg in args
            ),
        )
        for name, *args in events
    ]


def test_a_step_is_load_forward_backward_and_apply() -> None:
    rows, steps = spans_of(*STEP, *later(STEP, 10.0))
    one = [("load", 1.0, 2.0), ("forward", 3.0, 5.0), ("backward", 5.0, 8.0), ("apply", 9.0, 10.0)]
    assert rows == [(*row, 0) for row in one] + [(kind, start + 10, end + 10, 1) for kind, start, end in one]
    assert [(step.number, step.end_s, step.lr) for step in steps] == [(0, 10.0, 0.1), (1, 20.0, 0.1)]


def test_gradients_are_accumulated_within_one_step() -> None:
    rows, steps = spans_of(*STEP[:5], *later(STEP[:5], 20.0), *later(STEP[5:], 20.0))
    assert [kind for kind, *_ in rows] == ["load", "forward", "backward"] * 2 + ["apply"]
    assert {row[3] for row in rows} == {0}
    assert len(steps) == 1


def test_optimizers_without_a_forward_between_end_one_step_together() -> None:
    rows, steps = spans_of(*STEP, ("begin_update", 11.0), ("end_update", 12.0, 0.2), *later(STEP, 20.0))
    assert [(row[0], row[3]) for row in rows[3:5]] == [("apply", 0), ("apply", 0)]
    assert [(step.number, step.end_s, step.lr) for step in steps] == [(0, 12.0, 0.2), (1, 30.0, 0.1)]


def test_optimizers_with_a_forward_between_end_a_step_each() -> None:
    """As the two of a GAN."""
    _, steps = spans_of(*STEP, *later(STEP[1:], 20.0), *later(STEP, 40.0), *later(STEP[1:], 60.0))
    assert [step.number for step in steps] == [0, 1, 2, 3]


def test_a_wait_divides_its_phase() -> None:
    waiting = ("wait", 3.5, 3.9)
    rows, _ = spans_of(STEP[1], waiting, *STEP[3:])
    assert rows[:3] == [("forward", 3.0, 3.5, 0), ("wait", 3.5, 3.9, 0), ("forward", 3.9, 5.0, 0)]


def test_a_wait_after_backward_is_in_no_phase() -> None:
    rows, _ = spans_of(*STEP[1:5], ("wait", 8.1, 8.6), *STEP[5:])
    assert rows[1:] == [("backward", 5.0, 8.0, 0), ("wait", 8.1, 8.6, 0), ("apply", 9.0, 10.0, 0)]


def test_a_wait_of_microseconds_stays_in_its_phase() -> None:
    rows, _ = spans_of(STEP[1], ("wait", 3.5, 3.500001), *STEP[3:])
    assert rows[0] == ("forward", 3.0, 5.0, 0)


@pytest.mark.parametrize(
    ("computed_s", "communicated_s", "expected"),
    [
        (6.0, 7.0, [("backward", 5.0, 6.0, 0), ("wait", 6.0, 7.0, 0), ("backward", 7.0, 8.0, 0)]),
        (6.0, 5.5, [("backward", 5.0, 8.0, 0)]),  # all communication was hidden
        (6.0, 9.0, [("backward", 5.0, 6.0, 0), ("wait", 6.0, 8.0, 0)]),
        (None, 7.0, [("backward", 5.0, 8.0, 0)]),
    ],
)
def test_backward_waits_for_what_it_did_not_hide(
    computed_s: float | None, communicated_s: float, expected: list[Row]
) -> None:
    rows, _ = spans_of(STEP[1], STEP[3], ("end_backward", 8.0, computed_s, communicated_s))
    assert rows[1:] == expected


def test_an_evaluation_is_one_span_with_its_data() -> None:
    evaluation = [
        ("load", 11.0, 12.0),
        ("begin_evaluation", 12.5),
        ("end_evaluation", 13.0),
        ("load", 13.0, 14.0),
        ("begin_evaluation", 14.5),
        ("end_evaluation", 15.0),
    ]
    rows, steps = spans_of(*STEP, *evaluation, *later(STEP, 20.0))
    assert rows[4:6] == [("evaluate", 11.0, 15.0, 0), ("load", 21.0, 22.0, 1)]
    assert len(steps) == 2


def test_a_teacher_inside_a_forward_is_no_evaluation() -> None:
    rows, _ = spans_of(STEP[1], ("begin_evaluation", 3.2), ("end_evaluation", 3.4), *STEP[3:])
    assert rows[0] == ("forward", 3.0, 5.0, 0)


def test_without_a_model_forward_begins_where_the_phase_before_ends() -> None:
    rows, _ = spans_of(STEP[0], *STEP[3:])
    assert rows[:2] == [("load", 1.0, 2.0, 0), ("forward", 2.0, 5.0, 0)]


def test_a_forward_without_backward_ends_when_the_model_returns() -> None:
    rows, _ = spans_of(*STEP[:3], *later(STEP, 20.0))
    assert rows[1] == ("forward", 3.0, 4.0, 0)


def test_an_optimizer_that_calls_the_loop_itself_has_the_rest_of_the_time() -> None:
    """As L-BFGS: its step contains forward and backward."""
    inside = later(STEP[1:5], 10.0)
    rows, _ = spans_of(("begin_update", 11.0), *inside, ("end_update", 20.0, 1.0))
    assert rows == [
        ("apply", 11.0, 13.0, 0),
        ("forward", 13.0, 15.0, 0),
        ("backward", 15.0, 18.0, 0),
        ("apply", 18.0, 20.0, 0),
    ]


def test_losses_of_a_step_are_added() -> None:
    _, steps = spans_of(
        ("add_loss", 1.5), ("add_loss", 2.0), *STEP, ("begin_forward", 12.0), ("add_loss", 4.0), *later(STEP, 20.0)
    )
    assert [step.loss for step in steps] == [3.5, 4.0]
