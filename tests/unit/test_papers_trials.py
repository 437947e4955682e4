"""Trainings paired by seed: wires, sizes of gradients, times of steps and to targets, ratios, rates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from workbench import problems
from workbench.algorithms import NoCommunication, SynchronousSGD
from workbench.clusters.emulated.check import PAYLOAD
from workbench.collectives import native_bytes
from workbench.errors import ConfigError
from workbench.papers.studies import trials
from workbench.papers.studies.trials import NO_COMM, SYNC, Point, Wire
from workbench.theory import fit_iterations
from workbench.trace.run import Run

pytestmark = pytest.mark.notebooks
GLOO = Wire(library="gloo", hosts=4, mbit=200)


def run_of(ends: list[float], losses: list[float] | None = None, **evaluations: float) -> Run:
    """A run of two ranks, of which the second ends no step before the other."""
    chosen = losses or [1.0] * len(ends)

    def rows(early_s: float) -> list[dict[str, Any]]:
        return [
            {
                "step": step,
                "seconds": end - early_s * (step % 2),
                "loss": loss,
                "samples": 1,
                "num_samples": 1,
                "bytes_sent": 0,
            }
            for step, (end, loss) in enumerate(zip(ends, chosen, strict=True))
        ]

    return Run(info={"num_workers": 2, "status": "finished"}, metrics={0: rows(0.5), 1: rows(0.0)})


def point(sync: list[float], late: list[float], alone: list[float], wanted: float = 1.0, wire: Wire = GLOO) -> Point:
    return Point(wire=wire, wanted=wanted, times={SYNC: sync, "AGD 1": late, NO_COMM: alone})


@pytest.mark.parametrize("text", ["gloo", "gloo:0", "nccl:2", "gloo:2:fast", "gloo:2x0:100", "gloo:2:-1"])
def test_a_text_that_is_no_wire_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write LIBRARY:HOSTS:MBIT"):
        Wire.parse(text)


def test_ranks_of_a_host_share_its_interface() -> None:
    wire = Wire.parse("MPI:2x2:1000")
    assert (wire.num_ranks, wire.hosts, wire.ranks_per_host) == (4, 2, 2)
    assert Wire.parse("gloo:3").launcher == "local"


@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_the_gradient_takes_the_wanted_time_on_the_wire(hosts: int) -> None:
    wire = Wire(library="gloo", hosts=hosts, mbit=100)
    sent = native_bytes(hosts, int(wire.megabytes(0.02) * 1e6))
    assert sent / PAYLOAD * 8 / 100e6 == pytest.approx(0.02, rel=1e-4), "frames have headers"


@pytest.mark.parametrize("megabytes", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("data", ["digits", "mnist1d"])
def test_layers_are_equally_wide_and_the_gradient_has_the_wanted_size(data: str, megabytes: float) -> None:
    model = trials.equal_layers(megabytes, data=data, layers=4).model()
    assert 4e-6 * sum(weight.numel() for weight in model.parameters()) == pytest.approx(megabytes, rel=0.03)
    widths = {weight.shape[0] for weight in model.parameters()} - {10}
    assert len(widths) == 1


def test_a_step_ends_with_its_slowest_rank_and_the_first_steps_do_not_count() -> None:
    assert trials.step_s(run_of([9.0, 10.0, 11.0, 13.0, 15.0, 17.0])) == 2.0
    with pytest.raises(ConfigError, match="4 or more"):
        trials.step_s(run_of([1.0, 2.0, 3.0]))


def test_time_to_a_loss_is_that_of_a_mean_over_steps() -> None:
    run = run_of([1.0, 2.0, 3.0, 4.0, 5.0], [3.0, 0.0, 3.0, 0.0, 0.0])
    assert trials.seconds_to_loss(run, 1.0, window=2) == 5.0
    assert trials.seconds_to_loss(run, 1.5, window=2) == 2.0
    assert trials.seconds_to_loss(run, -1.0, window=2) == math.inf


def test_a_target_that_is_not_reached_counts_as_the_longest_run_and_is_counted() -> None:
    soon = run_of([float(end) for end in range(1, 11)], [0.0] * 10)
    never = run_of([2.0 * end for end in range(1, 11)], [3.0] * 10)
    times = trials.times_to_loss({"one": [soon, soon], "other": [never, None]}, 1.0)
    assert times.cap_s == 20.0 and times.seconds["other"] == [20.0, 20.0]
    assert (times.num_reached("one"), times.num_reached("other")) == (2, 0)
    assert times.ratios("other", "one") == [4.0, 4.0]
    assert "0 of 2" in str(times.table("to a loss"))


def test_communication_is_what_a_synchronous_step_takes_longer() -> None:
    found = point(sync=[3.0, 5.0], late=[2.0, 4.0], alone=[1.0, 1.0])
    assert found.communication_s == [2.0, 4.0] and found.ratio == 3.0
    assert found.limits == [1.5, 1.25]
    assert found.speedups("AGD 1") == [1.5, 1.25]
    table = str(trials.points_table([found], ["AGD 1"]))
    assert "gloo, 4 hosts, 200 Mbit/s" in table and "1.38" in table


def test_the_point_of_each_wire_that_is_nearest_to_a_ratio_is_taken() -> None:
    other = Wire(library="MPI", hosts=2, mbit=100)
    points = [point([2.0], [1.0], [1.0], wanted) for wanted in (0.25, 0.5, 4.0)]
    points += [point([2.0], [1.0], [1.0], wanted, other) for wanted in (0.5, 2.0)]
    assert [(one.wire, one.wanted) for one in trials.nearest(points, 0.6)] == [(GLOO, 0.5), (other, 0.5)]
    assert trials.mean_over(points[:2], lambda one: one.speedups("AGD 1")) == [2.0]


def test_the_limit_of_overlap_is_two_where_both_take_equally_long() -> None:
    curve = trials.overlap_limit([point([2.0], [1.0], [1.0])])
    assert max(curve.values()) == curve[1.0] == 2.0
    assert all(value == pytest.approx((1 + ratio) / max(1.0, ratio)) for ratio, value in curve.items())


def test_the_order_rotates_with_the_seed_and_each_algorithm_has_its_rate() -> None:
    calls: list[tuple[str, int, float | None]] = []

    class Handle:
        run = run_of([1.0, 2.0])

        def wait(self) -> Handle:
            return self

    class Cluster:
        def train(
            self, algorithm: Any, _problem: Any, *, seed: int = -1, lr: float | None = None, steps: int = 0
        ) -> Handle:
            calls.append((type(algorithm).__name__, seed, lr))
            return Handle()

    algorithms = {"a": SynchronousSGD(), "b": NoCommunication()}
    found = trials.rotated(Cluster(), algorithms, None, [5, 6], rates={"b": [0.5]})  # type: ignore[arg-type]
    assert [len(found[name]) for name in algorithms] == [2, 2]
    assert calls.pop(0) == ("SynchronousSGD", -1, None), "the warm-up"
    assert [name for name, _, _ in calls] == ["SynchronousSGD", "NoCommunication", "NoCommunication", "SynchronousSGD"]
    assert {(name, lr) for name, _, lr in calls} == {("SynchronousSGD", None), ("NoCommunication", 0.5)}


def test_the_best_number_of_backups_by_the_papers_two_numbers_is_four() -> None:
    updates = fit_iterations([(50, 137.5e3), (100, 76.2e3)])
    fresh, carried = trials.best_backups_by_rule(100, updates, 0.1, 1000)
    assert (fresh.backups, carried.backups) == (5, 4)
    table = str(trials.backups_table({0.1: (fresh, carried)}, "best b"))
    assert "1.05" in table


def test_staleness_has_its_own_rate_and_an_edge_or_a_cap_is_named() -> None:
    problem = problems.get("digits-softmax")
    found = trials.updates_by_staleness(problem, [0, 4], [0, 1], lr=0.5, updates=60, target=1.0)
    assert set(found.best) == {0, 4} and len(found.best[0]) == 2
    assert found.rate[4] in [factor * 0.1 for factor in (0.5, 1.0, 2.0)]
    never = trials.updates_by_staleness(problem, [0], [0], lr=0.5, updates=10, target=-1.0)
    assert never.capped == (0,) and "not reached by all" in str(never.table("updates"))
    assert np.isfinite(found.best[4]).all()


def test_a_claim_that_is_not_tested_at_a_size_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    tell = trials.Judge(paper="daily2016leveraging", size="smoke", where="local ranks", seeds=[0])
    assert tell("agd-speed-up-on-ranks", [1.0], "how") is None
    assert "is not tested at size smoke" in capsys.readouterr().out


def test_rates_are_a_rate_or_a_rate_and_a_momentum() -> None:
    settings = trials.sgd([0.5, 0.9])
    optimizer = settings["optimizer"]([torch.nn.Parameter(torch.zeros(1))])
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.5, 0.9)
    with pytest.raises(ConfigError, match="a learning rate, or a learning rate and a momentum"):
        trials.sgd([1.0, 2.0, 3.0])


def test_the_final_accuracy_is_in_per_cent_and_that_of_guessing_after_a_divergence() -> None:
    problem = problems.get("digits-softmax")
    found = trials.final_accuracies({"one": SynchronousSGD()}, problem, [0], rates={"one": [0.1]}, workers=2, epochs=1)
    assert 50 < found["one"][0] < 100
    assert trials.final_accuracy(None) == 10.0
