"""Figures of studies show the given numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import workbench as wb
from workbench import plots
from workbench.costs import Compute
from workbench.errors import ConfigError

RATES = {"quick": {1: [10.0, 12.0], 4: [40.0, 44.0]}, "slow": {1: [10.0], 4: [20.0]}, "none": {}}


def lines(figure, axis: str) -> dict[str, list[float]]:
    return {trace.name: list(trace.y) for trace in figure.data if trace.name and (trace.xaxis or "x") == axis}


def test_bars_of_parts_are_stacked_in_seconds() -> None:
    figure = plots.stacked_bars(
        {"4 MB": {"ring": {"wait": 0.001, "wire": 0.01}}, "8 MB": {"ring": {"wait": 0.0, "wire": 0.02}}}, title="sums"
    )
    assert [trace.name for trace in figure.data] == ["wait", "wire", "wait", "wire"]
    assert [trace.x[0] for trace in figure.data] == pytest.approx([1.0, 10.0, 0.0, 20.0])
    with pytest.raises(ConfigError):
        plots.stacked_bars({}, title="none")


def test_groups_of_bars_have_their_own_axes_or_one_scale() -> None:
    groups = {"short": {"ring": {"wire": 0.001}}, "long": {"ring": {"wire": 0.1}}}
    own, one = (plots.stacked_bars(groups, title="sums", one_scale=same) for same in (False, True))
    assert own.data[0].x[0] == pytest.approx(1000) and own.layout.xaxis.range != own.layout.xaxis2.range
    assert [trace.x[0] for trace in one.data] == pytest.approx([1.0, 100.0])
    assert one.layout.xaxis.range == one.layout.xaxis2.range


def test_four_groups_of_bars_are_two_by_two() -> None:
    figure = plots.stacked_bars({str(number): {"ring": {"wire": 1.0}} for number in range(4)}, title="sums")
    assert [title.text for title in figure.layout.annotations] == [f"<b>{number}</b>" for number in range(4)]
    assert figure.layout.xaxis.domain == figure.layout.xaxis3.domain != figure.layout.xaxis2.domain


def test_speed_ups_are_over_one_worker_s_share_of_the_best_mean_rate() -> None:
    figure = plots.scaling(RATES)
    assert lines(figure, "x") == {
        "ideal": [1, 4],
        "quick": [1.0, pytest.approx(42 / 11)],
        "slow": [pytest.approx(10 / 11), pytest.approx(20 / 11)],
    }
    assert lines(figure, "x2") == {
        "quick": [1.0, pytest.approx(42 / 44)],
        "slow": [pytest.approx(10 / 11), pytest.approx(20 / 44)],
    }


def test_repetitions_are_a_band_and_a_name_without_rates_keeps_its_colour() -> None:
    figure = plots.scaling(RATES)
    bands = [trace for trace in figure.data if trace.fill]
    assert [list(band.y) for band in bands] == [
        pytest.approx([12 / 11, 4, 40 / 11, 10 / 11]),
        pytest.approx([12 / 11, 1, 10 / 11, 10 / 11]),
    ], "the highest from left to right, then the lowest back; of speed-up, and of efficiency"
    colors = {trace.name: trace.line.color for trace in plots.scaling({"none": {}, **RATES}).data if trace.name}
    assert colors["quick"] != next(trace.line.color for trace in figure.data if trace.name == "quick"), (
        "its place in the names decides"
    )


def test_speed_ups_of_more_than_one_worker_at_the_least() -> None:
    assert lines(plots.scaling({"only": {2: 20.0, 8: 60.0}}), "x")["only"] == [2.0, 6.0]


def test_an_efficiency_above_one_is_within_the_axis() -> None:
    """All are compared with the best rate at the fewest workers, which may wait for a slow network."""
    figure = plots.scaling({"waits": {2: 10.0}, "waits less": {4: 40.0}})
    assert figure.layout.yaxis2.range[1] > 2.0


@pytest.mark.parametrize("nothing", [{}, {"none": {}}])
def test_no_rates_and_no_runs_are_refused(nothing: dict[str, dict[int, float]]) -> None:
    with pytest.raises(ConfigError, match="workers: samples per second"):
        plots.scaling(nothing)
    with pytest.raises(ConfigError, match=r"group: \{entry: run\}"):
        plots.step_bars(nothing)


def test_what_was_simulated_has_the_colour_of_its_line_and_the_best_a_star() -> None:
    curves = {"a": {1: 3.0, 2: 1.0}, "b": {1: 4.0, 2: 2.0}}
    figure = plots.curves_of(
        curves, {"b": {2: 2.5}}, title="t", x="x", y="y", log_y=True, marks={"a": 2}, reference=1.0
    )
    found = {(trace.mode, trace.name): trace for trace in figure.data}
    line = found["lines+markers", "b"]
    circles = [
        trace
        for trace in figure.data
        if trace.mode == "markers" and trace.marker.symbol == "circle-open" and trace.x[0] is not None
    ]
    assert [(list(trace.x), list(trace.y), trace.marker.color) for trace in circles] == [([2], [2.5], line.line.color)]
    (star,) = (trace for trace in figure.data if trace.mode == "markers" and trace.marker.symbol == "star")
    assert (list(star.x), list(star.y), star.marker.color) == ([2], [1.0], found["lines+markers", "a"].line.color)


@pytest.mark.parametrize("log_x", [False, True])
def test_up_to_six_lines_have_their_names_at_their_ends(log_x: bool) -> None:
    """In their colours, within the x axis, and apart where lines end at one height."""
    curves = {f"line {at}": {1.0: 1.0, 10.0: 2.0, 10.0 + at: [2.0, 4.0]} for at in range(1, 7)}
    figure = plots.curves_of(curves, title="t", x="x", y="y", log_x=log_x)
    lines = {trace.name: trace for trace in figure.data if trace.mode == "lines+markers"}
    named = {note.text: note for note in figure.layout.annotations}
    assert list(named) == list(curves) and not figure.layout.showlegend
    for at, (name, note) in enumerate(named.items(), 1):
        assert (note.x, note.y) == (pytest.approx(math.log10(10 + at) if log_x else 10 + at), 3.0)
        assert note.font.color == lines[name].line.color
    low, high = figure.layout.xaxis.range
    assert low < min(note.x for note in named.values()) < max(note.x for note in named.values()) < high
    shifts = sorted(note.yshift for note in named.values())
    assert all(two - one == pytest.approx(14) for one, two in itertools.pairwise(shifts))


def test_more_lines_and_lines_with_circles_have_a_legend() -> None:
    seven = {f"line {at}": {1: float(at), 2: 3.0} for at in range(7)}
    assert plots.curves_of(seven, title="t", x="x", y="y").layout.showlegend
    assert plots.curves_of({"a": {1: 1.0}}, {"a": {1: 1.1}}, title="t", x="x", y="y").layout.showlegend


def test_names_in_figures_are_harmless() -> None:
    figure = plots.curves_of({"<b>": {1: 1.0}}, {"<b>": {1: 1.0}}, title="<i>", x="<i>", y="<i>")
    assert "<b>" not in {trace.name for trace in figure.data}
    assert "<i>" not in figure.layout.title.text


def test_a_heat_map_writes_its_numbers_and_is_white_where_nothing_is_gained() -> None:
    figure = plots.heat_map(
        [[1.0, 4.0], [None, 0.25]],
        ["first", "a long name of a network"],
        ["y", "z"],
        title="t",
        x="x",
        y="y",
        around=1.0,
    )
    (heat,) = figure.data
    assert [list(row) for row in heat.text] == [["1.00", "4.00"], ["", "0.250"]]
    assert (heat.z[0][0], heat.zmin) == (0.0, -heat.zmax)
    assert heat.z[0][1] == -heat.z[1][1] == heat.zmax, "four times as much is as blue as a quarter is red"
    assert np.isnan(heat.z[1][0])
    assert list(heat.x) == ["first", "a long name<br>of a network"]


def test_labels_of_a_heat_map_with_many_columns_do_not_touch() -> None:
    names = [f"8x NVLink {number} + Ethernet" for number in range(8)]
    figure = plots.heat_map([[1.0] * 8], names, ["y"], title="t", x="x", y="y")
    assert figure.data[0].x[3] == "8x NVLink<br>3 +<br>Ethernet", "at most 84 letters in a line of labels"


def test_bars_of_steps_are_as_long_as_the_steps() -> None:
    how = {
        "network": "ethernet-1g",
        "compute": Compute(forward_s=1e-3, backward_s=2e-3),
        "timing_only": True,
        "steps": 6,
    }
    problem = wb.problems.digits_mlp()
    group = {str(p): wb.simulate(wb.SynchronousSGD(), problem, workers=p, **how) for p in (2, 4)}
    figure = plots.step_bars({"first": group, "second": {"4": group["4"]}})
    for axis, entries in (("x", {"2 ": 0, "4 ": 1}), ("x2", {"4 ": 1})):
        bars = [bar for bar in figure.data if (bar.xaxis or "x") == axis]
        assert [bar.name for bar in bars] == [
            "computation alone",
            "hidden communication",
            "exposed communication",
            "idle",
        ]
        for entry, position in entries.items():
            assert bars[0].y[position] == entry
            run = group[entry.strip()]
            step_ms = 1e3 * wb.summary(run)["step_seconds_median"]
            assert sum(bar.x[position] for bar in bars) == pytest.approx(step_ms, rel=1e-3)
            assert bars[0].x[position] == pytest.approx(3.0, rel=1e-6)
    assert [bar.x[0] for bar in figure.data if bar.xaxis == "x2"] == [0.0] * 4, "who is not in a group has no bar there"


def test_a_dot_plot_has_a_row_an_entry_with_its_repetitions_and_interval() -> None:
    figure = plots.dot_plot({"a": [1.0, 3.0], "b": [5.0]}, intervals={"a": (0.5, 3.5)}, title="t", x="s", reference=1.0)
    first, mean, second, lone = figure.data
    assert list(first.x) == [1.0, 3.0] and list(first.y) == pytest.approx([-0.16, 0.16])
    assert list(mean.x) == [2.0] and mean.error_x.array[0] == mean.error_x.arrayminus[0] == 1.5
    assert list(second.x) == list(lone.x) == [5.0] and lone.error_x.array[0] == 0, "no interval"
    assert list(figure.layout.yaxis.ticktext) == ["a ", "b "] and figure.layout.shapes[0].x0 == 1.0


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.5, 1.0, 2.0], [0.5, 1.0, 2.0]),
        (np.geomspace(0.5, 2.0, 25), [0.5, 1.0, 2.0]),
        (np.geomspace(0.03, 2.9, 25), [0.05, 0.1, 0.2, 0.5, 1.0, 2.0]),
        (np.geomspace(20, 300, 25), [20.0, 50.0, 100.0, 200.0]),
    ],
    ids=repr,
)
def test_a_logarithmic_axis_of_less_than_two_powers_of_ten_has_ticks_between_them(values, ticks) -> None:
    figure = plots.curves_of({"line": {float(x): 1.0 for x in values}}, title="ticks", x="x", y="y", log_x=True)
    assert list(figure.layout.xaxis.tickvals) == pytest.approx(ticks)
    figure = plots.curves_of({"line": dict(enumerate(values))}, title="ticks", x="x", y="y", log_y=True)
    assert list(figure.layout.yaxis.tickvals) == pytest.approx(ticks)


def test_a_longer_logarithmic_axis_has_ticks_at_powers_of_ten() -> None:
    values = range(1, 500, 20)
    wide = plots.curves_of({"line": dict(zip(values, values, strict=True))}, title="ticks", x="x", y="y", log_x=True)
    assert wide.layout.xaxis.tickvals is None and wide.layout.xaxis.dtick == 1
    narrow = plots.curves_of({"line": {0: 2.3, 1: 4.1}}, title="ticks", x="x", y="y", log_y=True)
    assert narrow.layout.yaxis.type == "log" and narrow.layout.yaxis.tickvals is None
