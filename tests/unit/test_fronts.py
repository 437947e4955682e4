"""The Pareto front, against its definition and drawn."""

from hypothesis import given
from hypothesis import strategies as st

from workbench.analysis.fronts import pareto_front
from workbench.plots.fronts import front

PAIRS = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3), st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8
)


@given(points=PAIRS)
def test_all_others_are_beaten_by_one_of_the_front(points: dict[str, tuple[int, int]]) -> None:
    found = pareto_front({name: (float(cost), float(gain)) for name, (cost, gain) in points.items()})
    assert found
    for name, (cost, gain) in points.items():
        as_good = [other for other in found if points[other][0] <= cost and points[other][1] >= gain]
        assert as_good
        better = any(points[other] != (cost, gain) for other in as_good)
        assert (name in found) != better
    assert [points[name][0] for name in found] == sorted(points[name][0] for name in found)


def test_the_figure_has_a_point_an_algorithm_and_a_line_through_the_best() -> None:
    figure = front({"a": [(1.0, 0.5), (3.0, 0.7)], "b": [(5.0, 0.5), (5.0, 0.5)]}, title="t", x="s", y="accuracy")
    line, first, second = figure.data
    assert list(line.x) == [2.0]
    assert list(first.y) == [0.6]
    assert abs(first.error_x.array[0] - 1.0) < 1e-12
    assert second.name == "b"


def test_of_losses_the_lower_are_better() -> None:
    points = {"quick": [(1.0, 0.5)], "good": [(2.0, 0.1)], "beaten": [(3.0, 0.2)]}
    figure = front(points, title="t", x="s", y="error", losses=True)
    assert list(figure.data[0].x) == [1.0, 2.0] and figure.layout.yaxis.type == "log"
