"""Panels next to each other show the given numbers, with a name at the end of each line."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from workbench import plots
from workbench.errors import ConfigError
from workbench.plots.fronts import fronts
from workbench.plots.panels import names_apart

CURVES = {
    "near": {"ring": {16: [0.01, 0.03], 64: [0.02, 0.02]}, "torus": {16: 0.02, 64: 0.02}},
    "far": {"ring": {16: 0.1, 64: 1.0}, "torus": {}},
}
TIMES = {
    "near": {"all-reduce": [2.0, 4.0], "ring": [1.0, 1.0], "star": [math.inf, 5.0]},
    "far": {"all-reduce": [9.0, 9.0], "ring": [20.0, 20.0], "star": [10.0, 10.0]},
}


def named(figure) -> list[str]:
    return [one.text for one in figure.layout.annotations]


def test_each_line_is_in_its_panel_with_its_name_in_its_colour() -> None:
    figure = plots.curves_in_panels(CURVES, title="steps", x="workers", y="step (s)", log_x=True, log_y=True)
    lines = [trace for trace in figure.data if not trace.fill]
    assert [(trace.name, trace.xaxis, list(trace.y)) for trace in lines] == [
        ("ring", "x", [0.02, 0.02]),
        ("torus", "x", [0.02, 0.02]),
        ("ring", "x2", [0.1, 1.0]),
    ]
    assert named(figure) == ["<b>near</b>", "<b>far</b>", "ring", "torus", "ring"]
    ring, torus, far = figure.layout.annotations[2:]
    assert ring.font.color == lines[0].line.color == far.font.color != torus.font.color
    assert ring.x == pytest.approx(math.log10(64)) and far.y == pytest.approx(0.0)
    assert abs(ring.y - torus.y) > 0.05, "the names of two lines that end together do not cover each other"
    assert figure.layout.xaxis.range == figure.layout.xaxis2.range


def test_points_that_an_axis_does_not_have_are_left_out() -> None:
    """Training begins at step 0, and a loss that diverged is NaN."""
    losses = {"ring": {0: 3.0, 10: 2.0, 100: 1.0}, "torus": {0: 3.0, 10: 4.0, 100: math.nan}}
    figure = plots.curves_in_panels({"near": losses}, title="loss", x="step", y="loss", log_x=True)
    assert [list(trace.x) for trace in figure.data] == [[10, 100], [10]]
    assert all(map(math.isfinite, [*figure.layout.xaxis.range, *figure.layout.yaxis.range]))
    assert [one.y for one in figure.layout.annotations[1:]] == [1.0, 4.0]


def test_names_at_the_ends_of_lines_move_as_little_as_possible() -> None:
    assert names_apart([1.0, 3.0, 2.0], [0.0, 10.0]) == pytest.approx([1.0, 3.0, 2.0])
    places = names_apart([5.0, 5.0, 5.0, 9.0], [0.0, 10.0])
    assert sum(places[:3]) / 3 == pytest.approx(5.0) and places[3] == 9.0
    gaps = [later - earlier for earlier, later in pairwise(places[:3])]
    assert gaps == pytest.approx([10 * 14 / 300] * 2)


def test_times_to_a_target_have_their_numbers_and_the_first_row_as_reference() -> None:
    figure = plots.time_to_target(TIMES, title="target")
    assert [(trace.xaxis, trace.x[0], trace.y[0]) for trace in figure.data] == [
        ("x", 3.0, 0),
        ("x", 1.0, 1),
        ("x2", 9.0, 0),
        ("x2", 20.0, 1),
        ("x2", 10.0, 2),
    ]
    assert named(figure)[2:] == ["3.00 s", "1.00 s", "not reached", "9.00 s", "20.0 s", "10.0 s"]
    assert [line.x0 for line in figure.layout.shapes] == [3.0, 9.0]
    colors = [trace.marker.color for trace in figure.data]
    assert named(plots.time_to_target({"near": {"star": [math.inf]}}, title="none"))[1:] == ["not reached"]
    assert colors[1] == colors[2] != colors[0] == colors[3], "the fastest of each panel"


def test_fronts_have_one_legend_and_the_names_of_each_front() -> None:
    points = {"quick": [(1.0, 2.0), (3.0, 2.0)], "good": [(9.0, 1.0)], "poor": [(9.5, 3.0)]}
    other = {"quick": [(5.0, 2.0)], "good": [(4.0, 1.0)], "poor": [(2.0, 3.0)]}
    figure = fronts({"near": points, "far": other}, title="front", x="s", y="loss", losses=True)
    assert named(figure) == ["<b>near</b>", "<b>far</b>", "quick", "good", "poor", "good"]
    assert [trace.name for trace in figure.data if trace.showlegend] == ["front", "quick", "good", "poor"]
    assert figure.layout.annotations[2].x == pytest.approx(math.log10(2.0))


def test_nothing_to_draw_is_named() -> None:
    for call in (
        lambda: plots.curves_in_panels({"near": {"ring": {}}}, title="", x="", y=""),
        lambda: plots.curves_in_panels({str(at): {"ring": {1: 1.0}} for at in range(4)}, title="", x="", y=""),
        lambda: plots.time_to_target({}, title=""),
        lambda: fronts({}, title="", x="", y=""),
    ):
        with pytest.raises(ConfigError):
            call()


def test_names_are_escaped() -> None:
    for figure in (
        plots.curves_in_panels({"<b>": {"<i>": {1: 1.0, 2: 2.0}}}, title="<i>", x="<i>", y="<i>"),
        plots.time_to_target({"<i>": {"<i>": [1.0]}}, title="<i>", x="<i>"),
        fronts({"<i>": {"<i>": [(1.0, 1.0)]}}, title="<i>", x="<i>", y="<i>"),
    ):
        for trace in figure.data:
            trace.legendgroup = None
        assert "<i>" not in figure.to_json().replace("\\u003c", "<")
