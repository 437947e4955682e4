"""Speed-ups at ratios of communication to compute: what is slept or computed, and what follows from measured steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.made_runs import made_run
from workbench.algorithms import NoCommunication, PipeSGD, SynchronousSGD
from workbench.papers.studies.ratio_sweep import (
    NO_COMM,
    SYNC,
    Point,
    mean_over,
    nearest,
    no_communication_bound,
    overlap_limit,
    points_table,
    speedup_curves,
    sweep_ratio,
)
from workbench.papers.studies.wires import Wire

pytestmark = pytest.mark.notebooks
GLOO = Wire(library="gloo", hosts=4, mbit=200)
SUM_S, SAMPLE_S = 0.02, 0.0005


def point(sync: list[float], late: list[float], alone: list[float], wanted: float = 1.0, wire: Wire = GLOO) -> Point:
    return Point(wire=wire, wanted=wanted, times={SYNC: sync, "AGD 1": late, NO_COMM: alone})


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Ranks whose steps take the seconds of the timing model; the settings of each of their trainings."""
    told: list[dict[str, Any]] = []

    def train(algorithm: Any, _problem: Any, **settings: Any) -> Any:
        told.append(settings)
        cost = settings.get("compute")
        c = cost.forward_s + cost.backward_s if cost else SAMPLE_S * settings["batch_size"]
        took_s = {NoCommunication: c, SynchronousSGD: c + SUM_S, PipeSGD: max(c, SUM_S)}[type(algorithm)]
        run = made_run([took_s * (step + 1) for step in range(settings["steps"] // 2 * 2 + 1)])
        return SimpleNamespace(wait=lambda: SimpleNamespace(run=run))

    @contextmanager
    def started(_wire: Wire) -> Iterator[Any]:
        yield SimpleNamespace(train=train)

    monkeypatch.setattr(Wire, "cluster", started)
    return told


def algorithms(_wire: Wire) -> dict[str, Any]:
    return {SYNC: SynchronousSGD(), "AGD 1": PipeSGD(width=2), NO_COMM: NoCommunication()}


@pytest.mark.parametrize("slept", [True, False])
def test_compute_is_the_sum_over_the_ratio_whether_it_is_slept_or_computed(
    slept: bool, cluster: list[dict[str, Any]]
) -> None:
    ratios = [0.5, 2.0]
    points = sweep_ratio(GLOO, algorithms, ratios, [0, 1], sum_s=SUM_S, steps=6, slept=slept)
    assert [one.wanted for one in points] == ratios and [one.ratio for one in points] == pytest.approx(ratios)
    assert points[0].compute_s == pytest.approx([2 * SUM_S] * 2)
    assert points[1].speedups("AGD 1") == pytest.approx([1.5] * 2), "(1 + 2) / 2"
    measured = [settings for settings in cluster if "seed" in settings]
    assert [settings["seed"] for settings in measured] == [0, 0, 0, 1, 1, 1] * 2
    assert all(("compute" in settings) == slept and settings["steps"] == 6 for settings in measured)
    batches = [settings["batch_size"] for settings in measured[::6]]
    assert batches == ([1, 1] if slept else [80, 20]), "0.5 ms a sample"


def test_communication_is_what_a_synchronous_step_takes_longer() -> None:
    found = point(sync=[3.0, 5.0], late=[2.0, 4.0], alone=[1.0, 1.0])
    assert found.communication_s == [2.0, 4.0] and found.ratio == 3.0
    assert found.limits == [1.5, 1.25]
    assert found.speedups("AGD 1") == [1.5, 1.25]
    table = str(points_table([found], ["AGD 1"]))
    assert "gloo, 4 hosts, 200 Mbit/s" in table and "1.38" in table


def test_the_point_of_each_wire_that_is_nearest_to_a_ratio_is_taken() -> None:
    other = Wire(library="MPI", hosts=2, mbit=100)
    points = [point([2.0], [1.0], [1.0], wanted) for wanted in (0.25, 0.5, 4.0)]
    points += [point([2.0], [1.0], [1.0], wanted, other) for wanted in (0.5, 2.0)]
    assert [(one.wire, one.wanted) for one in nearest(points, 0.6)] == [(GLOO, 0.5), (other, 0.5)]
    assert mean_over(points[:2], lambda one: one.speedups("AGD 1")) == [2.0]


def test_the_limit_of_overlap_is_two_where_both_take_equally_long() -> None:
    curve = overlap_limit([point([2.0], [1.0], [1.0])])
    assert max(curve.values()) == curve[1.0] == 2.0
    assert all(value == pytest.approx((1 + ratio) / max(1.0, ratio)) for ratio, value in curve.items())
    bound = no_communication_bound([point([2.0], [1.0], [1.0])])
    assert bound == {ratio: pytest.approx(1 + ratio) for ratio in curve}


def test_a_curve_is_over_measured_ratios_and_leaves_out_points_without_communication() -> None:
    other = Wire(library="MPI", hosts=2)
    points = [
        point([2.0, 4.0], [1.0, 2.0], [1.0, 2.0], wanted=0.9),
        point([4.0], [2.0], [1.0]),
        point([1.0], [1.0], [1.0]),  # m = 0 has no place on a logarithmic axis
        point([3.0], [2.0], [2.0], wire=other),
    ]
    assert speedup_curves(points, "AGD 1") == {
        f"AGD 1, {GLOO}": {1.0: [2.0, 2.0], 3.0: [2.0]},
        "AGD 1, MPI, 2 ranks": {0.5: [1.5]},
    }
