"""`wb.study`: its times against closed forms, its trainings against other trainings, its answer, its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from workbench import costs, theory
from workbench.calibration.effective import make_setting
from workbench.calibration.model import Calibration
from workbench.calibration.parts import Estimate, Line, Origin, Pace, Shapes
from workbench.calibration.predict import predict_at
from workbench.codecs import Linear8
from workbench.collectives import Ring
from workbench.errors import ConfigError
from workbench.what_if.candidates import default_candidates, name_of
from workbench.what_if.conduct import by_workers
from workbench.what_if.here import measure_here
from workbench.what_if.recipe import recipe_of
from workbench.what_if.results import Study
from workbench.what_if.step_time import saved_seconds, step_time

MB_16 = (("weight", (4_000_000,)),)


def calibration(
    compute_s: float = 0.1, *, shapes: Any = (("weight", (2000, 2000)), ("bias", (2000,))), codecs: Any = ()
) -> Calibration:
    """Costs without noise: a gradient of 16 MB, a third of the compute is forward, no latency, no sums."""
    zero = Estimate(0.0)
    return Calibration(
        origin=Origin(source="made up", algorithm="none", runtime="torch", num_workers=1, num_steps=1),
        shapes=Shapes(parameters=shapes, batch_size=8),
        pace=Pace(
            forward_s=Estimate(compute_s / 3), backward_s=Estimate(compute_s * 2 / 3), update_s=zero, other_s=zero
        ),
        line=Line(
            latency_s=zero,
            message_latency_s=zero,
            s_per_byte=Estimate(8e-9),
            sum_s_per_byte=zero,
            codecs=codecs,
            line_bytes_per_s=125e6,
        ),
    )


def of(problem: wb.Problem, compute_s: float = 0.01) -> Calibration:
    found = measure_here(problem, problem.batch_size, threads=1, messages=False)
    third = Estimate(compute_s / 3)
    pace = replace(
        found.pace,
        forward_s=third,
        backward_s=Estimate(compute_s * 2 / 3),
        update_s=Estimate(0.0),
        other_s=Estimate(0.0),
    )
    return replace(found, pace=pace, draws=(), notes=())


def ask(**options: Any) -> Study:
    problem = options.pop("problem", None) or wb.problems.digits_softmax()
    given: dict[str, Any] = {
        "calibrated": of(problem),
        "networks": "1mbit",
        "workers": 4,
        "target": ("accuracy", 0.85),
        "seeds": 2,
        "minutes": 1.0,
        "quiet": True,
        "algorithms": [wb.SynchronousSGD(), wb.PipeSGD(width=2)],
    }
    return wb.study(problem, **{**given, **options})


# -- the time of a step


@pytest.mark.parametrize("workers", [4, 64])
def test_steps_are_the_papers_sums_and_maxima(workers: int) -> None:
    costs_ = calibration()
    setting = make_setting(costs_, workers, None, 125e6, None, "own")
    wire_s = 2 * (workers - 1) / workers * costs_.shapes.num_bytes / 125e6
    found = {
        width: step_time(costs_, algorithm, setting).step_s
        for width, algorithm in ((1, wb.SynchronousSGD()), (2, wb.PipeSGD(width=2)))
    }
    assert found[1] == pytest.approx(theory.synchronous_s(0.1, wire_s), rel=1e-3)
    assert found[2] == pytest.approx(theory.pipe_s(0.1, wire_s), rel=0.02)


@pytest.mark.parametrize("codec_s", [1e-10, 2e-8])
def test_a_closed_form_with_a_codec_is_near_the_simulation_of_all_messages(codec_s: float) -> None:
    shapes = (("weight", (300, 1000)),)
    costs_ = calibration(0.005, shapes=shapes, codecs=(("linear8", codec_s, codec_s),))
    algorithm = wb.SynchronousSGD(collective=Ring(codec=Linear8(), chunks=4))
    setting = make_setting(costs_, 12, None, 125e6, None, "own")
    found = step_time(costs_, algorithm, setting)
    assert found.how == "closed form"
    assert found.step_s == pytest.approx(predict_at(costs_, algorithm, setting, draws=0).step_s, rel=0.1)


def test_what_binds_a_step() -> None:
    slow, fast = (make_setting(calibration(), 4, None, rate, None, "own") for rate in (12.5e6, 12.5e9))
    for algorithm in (wb.SynchronousSGD(), wb.PipeSGD(width=2)):
        saved = saved_seconds(calibration(), algorithm, slow)
        assert max(saved, key=lambda cost: saved[cost]) == "wire"
        saved = saved_seconds(calibration(), algorithm, fast)
        assert max(saved, key=lambda cost: saved[cost]) == "compute"
        assert saved["compute"] == pytest.approx(0.1, rel=0.05)


def test_a_period_without_communication_counts_whole() -> None:
    costs_ = calibration()
    setting = make_setting(costs_, 4, None, 125e6, None, "own")
    wire_s = 1.5 * costs_.shapes.num_bytes / 125e6
    assert step_time(costs_, wb.LocalSGD(every=8), setting).step_s == pytest.approx(0.1 + wire_s / 8, rel=0.01)


# -- trainings


@pytest.mark.parametrize(
    "algorithm", [wb.SynchronousSGD(), wb.LayerwiseSGD(), wb.PipeSGD(width=2), wb.PipeSGD(width=3)], ids=str
)
def test_one_worker_stands_for_all(algorithm: wb.Algorithm) -> None:
    problem, common = wb.problems.digits_softmax(), {"steps": 12, "seed": 3, "network": "free", "evaluate_every": 3}
    compute = costs.Compute(forward_s=1e-3, backward_s=2e-3)
    recipe = recipe_of(algorithm, 4, 16)
    assert (recipe.workers, recipe.batch_size) == (1, 64)
    alone = wb.simulate(recipe.algorithm, problem, workers=1, batch_size=64, compute=compute, **common)
    together = wb.simulate(algorithm, problem, workers=4, batch_size=16, compute=compute, **common)
    losses = [[row["test_loss"] for row in run.evaluations()] for run in (alone, together)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


def test_a_model_with_batch_normalisation_is_trained_with_all_workers() -> None:
    assert recipe_of(wb.SynchronousSGD(), 4, 16, one_worker=False).workers == 4


def test_late_gradients_have_the_better_of_two_rates() -> None:
    own = wb.problems.digits_softmax().optimizer([torch.zeros(1, requires_grad=True)]).param_groups[0]["lr"]
    kept = ask()
    assert {trained.recipe.name: trained.lr for trained in kept.trainings}["exact"] is None
    assert {trained.recipe.name: trained.lr for trained in kept.trainings}["late by 1"] in (own, own / 2)
    unstable = ask(lr=4.0, target=("loss", 0.3), algorithms=[wb.SynchronousSGD(), wb.PipeSGD(width=3)])
    rates = {trained.recipe.name: trained.lr for trained in unstable.trainings}
    assert rates["late by 2"] == pytest.approx(4.0 / 3)


def test_a_search_of_rates() -> None:
    pytest.importorskip("optuna")
    found = ask(lr=2e-3, search=4, target=("loss", 1.5), algorithms=[wb.SynchronousSGD()])
    (trained,) = found.trainings
    assert trained.lr is not None and 5e-4 <= trained.lr <= 8e-3
    assert trained.lr > 2e-3  # the given rate is too small, and a larger one is sooner


def test_the_time_to_the_target_is_steps_times_seconds_of_a_step() -> None:
    found = ask()
    assert {cell.name for cell in found.cells} == {"SynchronousSGD", "PipeSGD(width=2)"}
    for cell in found.cells:
        assert cell.trained is not None and cell.trained.reached, cell
        assert cell.target_s == pytest.approx(np.mean(cell.trained.steps) * cell.time.step_s)
        low_s, high_s = cell.interval_s or (0, 0)
        assert low_s < cell.target_s < high_s
        for run, steps in zip(cell.trained.runs, cell.trained.steps, strict=True):
            first = next(row for row in run.evaluations() if row["accuracy"] >= 0.85)
            assert first["step"] + 1 == steps


def test_a_slow_network_and_a_fast_one_have_different_answers() -> None:
    algorithms = [wb.SynchronousSGD(), wb.LocalSGD(every=8)]
    slow = ask(networks=["100kbit"], algorithms=algorithms)
    assert slow.best().name == "LocalSGD(every=8)", slow
    assert slow.speedup() > 1.5
    words = " ".join(slow.reasons())
    assert "LocalSGD(every=8)" in words and "bound by wire" in words
    fast = ask(networks=["100gbit"], algorithms=algorithms)
    assert fast.best().name == "SynchronousSGD", fast


def test_the_bandwidth_at_which_the_answer_changes_is_where_the_two_are_equal() -> None:
    found = ask(networks=["1mbit"])
    cells = found.at()
    regions = found._regions(cells)
    for (rate, after), (_, before) in zip(regions[1:], regions, strict=False):
        times = [
            (cell.steps or 0)
            * step_time(found.calibration, cell.algorithm, replace(cell.setting, line_bytes_per_s=rate)).step_s
            for cell in (before, after)
        ]
        assert times[0] == pytest.approx(times[1], rel=0.15)


def test_diverged_trainings_are_said() -> None:
    found = ask(lr=1e38, algorithms=[wb.SynchronousSGD()])
    assert "diverged" in found.answer
    assert found.cells[0].target_s is None


def test_without_minutes_for_trainings_steps_are_compared_and_the_limit_is_said() -> None:
    found = ask(minutes=0.02, algorithms=None)
    assert not found.trainings
    assert "not trained, because the minutes were used up" in found.answer
    assert "times as many steps as exact ones, which is not known" in found.answer
    assert found.best().recipe.name == "exact"
    with pytest.raises(ConfigError, match="nothing was trained"):
        found.front()


def test_every_default_candidate_runs() -> None:
    for workers in (1, 2, 4, 16):
        for algorithm in default_candidates(workers, 10**6):
            algorithm.check(workers)
    names = [name_of(one) for one in default_candidates(16, 10**6)]
    assert len(names) == len(set(names)) == 13


def test_names_with_their_numbers_of_workers() -> None:
    assert by_workers({"exact": {4}}) == "exact (4 workers)"


# -- kept and continued


def test_a_named_study_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path))
    first = ask(name="mine", seeds=1)
    monkeypatch.setattr("workbench.what_if.trainings.simulate", None)  # nothing is trained again
    again = ask(name="mine", seeds=1)
    assert [cell.target_s for cell in again.cells] == [cell.target_s for cell in first.cells]
    folder = tmp_path / "study-mine"
    kept = json.loads((folder / "study.json").read_text())["trainings"]
    assert len(kept) >= 2
    assert all(wb.Run.load(folder / entry["folder"]).evaluations() for entry in kept.values())
    with pytest.raises(ConfigError, match="another target"):
        ask(name="mine", target=("accuracy", 0.5))


# -- shown


def test_figures_and_tables() -> None:
    found = ask()
    front = found.front()
    assert {trace.name for trace in front.data if trace.name} >= {"SynchronousSGD", "PipeSGD(width=2)"}
    assert found.sensitivity().layout.xaxis.title.text == "bandwidth (Gbit/s)"
    assert len(found.timelines().data) > 0
    assert len(found.table().rows) == 2
    assert "<table" in found._repr_html_() and "<b>" in found._repr_html_()
    assert all(cell.name in str(found) for cell in found.cells)


# -- where costs come from


def test_costs_measured_here() -> None:
    problem = wb.problems.digits_mlp()
    found = measure_here(problem, 32, threads=1)
    assert found.shapes.batch_size == 32
    assert found.pace.forward_s.value > 0 and found.pace.backward_s.value > 0
    assert found.line.message_latency_s.value > 0
    assert {name for name, *_ in found.line.codecs} == {"truncate16", "linear8"}
    assert found.line.efficiency == pytest.approx(0.956)
    assert any("1 thread" in note for note in found.notes)


def test_costs_of_a_run_a_file_and_profiles(tmp_path: Path) -> None:
    problem = wb.problems.digits_softmax()
    compute = costs.Compute(forward_s=2e-3, backward_s=4e-3)
    run = wb.simulate(wb.SynchronousSGD(), problem, workers=2, steps=12, network="wan-100m", compute=compute)
    path = of(problem).save(tmp_path / "costs.json")
    for calibrated in (run, str(path), path):
        assert ask(calibrated=calibrated, seeds=1).cells[0].time.step_s > 6e-3 * 0.9
    with pytest.raises(ConfigError, match="parameters"):
        ask(calibrated=run, problem=wb.problems.digits_mlp())
    with pytest.raises(ConfigError, match="batch_size=32"):
        ask(calibrated=run, batch_size=16)


# -- errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": ("f2", 1.0)}, "loss"),
        ({"target": ("accuracy", 85)}, "0 to 1"),
        ({"target": 0.5}, "loss"),
        ({"minutes": 0}, "minutes=0"),
        ({"workers": 0}, "workers=0"),
        ({"networks": "no-such"}, "no-such"),
        ({"networks": "1parsec"}, "rate"),
        ({"seeds": []}, "at least one"),
        ({"momentum": 0.9}, "momentum"),
        ({"algorithms": []}, "at least one"),
        ({"algorithms": ["pipe"]}, "not an algorithm"),
        ({"calibrated": "no-such-run"}, "no-such-run"),
        ({"name": "a/b"}, "slashes"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises(wb.errors.WorkbenchError, match=words):
        ask(**options)


def test_a_target_needs_test_data() -> None:
    data = (torch.randn(32, 3), torch.randint(2, (32,)))
    problem = wb.Problem(model=lambda: nn.Linear(3, 2), loss=nn.functional.cross_entropy, train=data)
    with pytest.raises(ConfigError, match="test="):
        ask(problem=problem)
    found = ask(problem=problem, target=None)
    assert "without test data" in found.answer


def test_command_line(tmp_path: Path) -> None:
    path = of(wb.problems.digits_softmax()).save(tmp_path / "costs.json")
    words = ["study", "--problem", "digits-softmax", "--calibrated", str(path), "--network", "1mbit", "--workers", "2"]
    words += ["--algorithm", "synchronous-sgd", "--algorithm", "pipe-sgd width=2", "--target", "accuracy=0.8"]
    done = subprocess.run(
        [sys.executable, "-m", "workbench", *words, "--seeds", "1", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["algorithm"] for row in rows] == ["SynchronousSGD", "PipeSGD(width=2)"]
    assert all(row["target_s"] > 0 for row in rows)
    assert "min left" in done.stderr
