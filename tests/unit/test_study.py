"""`wb.study`: its times against closed forms, its trainings against other trainings, its answer, its errors."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

import workbench as wb
from tests.forked import forked
from workbench import costs, theory
from workbench.calibration.effective import make_setting
from workbench.calibration.fixed_point import Scenario, simulated
from workbench.calibration.handling import handling_seconds
from workbench.calibration.model import Calibration
from workbench.calibration.parts import Estimate, Host, Line, Origin, Pace, Shapes
from workbench.calibration.predict import predict_at, step_s
from workbench.calibration.recommend import recommend
from workbench.calibration.steady import steady_steps
from workbench.cli.main import main
from workbench.codecs import ErrorFeedback, Linear8, Sign, TopK
from workbench.collectives import Native, Once, PowerSGD, Ring
from workbench.errors import ConfigError
from workbench.trace.store import list_runs, remove_run
from workbench.what_if.candidates import default_candidates, name_of
from workbench.what_if.measure import measure_here
from workbench.what_if.question import line_rate
from workbench.what_if.recipe import one_worker_stands_for_all, recipe_of
from workbench.what_if.results import Cell, Study, ratio_of
from workbench.what_if.run_study import by_workers
from workbench.what_if.saved import Saved
from workbench.what_if.step_time import StepTime, saved_seconds, step_time
from workbench.what_if.trainings import Trained, Trainings


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


def test_the_interval_contains_every_latency_that_messages_of_one_size_allow() -> None:
    """Of messages of one size only their time is known: all of it may be latency, or none."""
    plain = calibration()
    vague = replace(plain, line=replace(plain.line, message_bytes=1e6, latency_limit_s=3e-2))
    setting = make_setting(vague, 4, None, 125e6, None, "own")
    known, found = (step_time(each, wb.SynchronousSGD(), setting) for each in (plain, vague))
    truth = step_time(replace(vague, line=vague.line.with_largest_latency()), wb.SynchronousSGD(), setting)
    assert found.step_s == pytest.approx(known.step_s)
    assert found.low_s <= min(truth.step_s, known.step_s) <= max(truth.step_s, known.step_s) <= found.high_s
    assert not known.low_s <= truth.step_s <= known.high_s


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


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("codec_s", [1e-10, 2e-8])
def test_a_closed_form_with_a_codec_is_near_the_simulation_of_all_messages(codec_s: float, chunks: int) -> None:
    shapes = (("weight", (300, 1000)),)
    costs_ = calibration(0.005, shapes=shapes, codecs=(("linear8", codec_s, codec_s),))
    algorithm = wb.SynchronousSGD(collective=Ring(codec=Linear8(), chunks=chunks))
    setting = make_setting(costs_, 16, None, 125e6, None, "own")
    found = step_time(costs_, algorithm, setting)
    assert found.how == "closed form"
    assert found.step_s == pytest.approx(predict_at(costs_, algorithm, setting, draws=0).step_s, rel=0.1)


@pytest.mark.parametrize(
    ("algorithm", "messages"),
    [
        (wb.SynchronousSGD(), 0),
        (wb.SynchronousSGD(collective=Ring()), 6),
        (wb.SynchronousSGD(collective=Ring(codec=Linear8(), chunks=4)), 24),
        (wb.LocalSGD(every=8, collective=Ring()), 0.75),
    ],
    ids=str,
)
def test_a_rank_handles_its_messages_one_after_another(algorithm: wb.Algorithm, messages: float) -> None:
    """Each takes the measured time of a message, or a millisecond if that is shorter: a longer latency is of the wire."""
    for cores in ("own", 4.0):
        for latency_s in (0.0, 4e-4, 5e-2):
            costs_ = calibration()
            costs_ = replace(costs_, line=replace(costs_.line, message_latency_s=Estimate(latency_s)))
            setting = make_setting(costs_, 4, None, 125e6, None, cores)
            handled_s = messages * min(latency_s, 1e-3)
            assert handling_seconds(costs_, algorithm, setting) == pytest.approx(handled_s)
            steps = steady_steps(algorithm, 8)
            scenario = Scenario(calibration=costs_, algorithm=algorithm, setting=setting, steps=steps, seed=0)
            expected = pytest.approx(simulated(scenario).step_s + handled_s, rel=0.03)
            predicted = predict_at(costs_, algorithm, setting, draws=0)
            assert predicted.step_s == expected
            assert step_s(costs_, algorithm, setting, steps, seed=0) == expected
            assert step_time(costs_, algorithm, setting).step_s == expected
            assert predicted.saved_s["latency"] >= handled_s
            assert saved_seconds(costs_, algorithm, setting)["latency"] >= handled_s
            of_simulated = replace(costs_, origin=replace(costs_.origin, runtime="simulated"))
            assert handling_seconds(of_simulated, algorithm, setting) == 0


def test_what_binds_a_step() -> None:
    slow, fast = (make_setting(calibration(), 4, None, rate, None, "own") for rate in (12.5e6, 12.5e9))
    for algorithm in (wb.SynchronousSGD(), wb.PipeSGD(width=2)):
        saved = saved_seconds(calibration(), algorithm, slow)
        assert max(saved, key=lambda cost: saved[cost]) == "wire"
        saved = saved_seconds(calibration(), algorithm, fast)
        assert max(saved, key=lambda cost: saved[cost]) == "compute"
        assert saved["compute"] == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize(
    ("algorithm", "every"),
    [
        (wb.LocalSGD(every=8), 8),
        (wb.LocalSGD(every=60), 60),
        (wb.LocalSGD(every=250), 250),
        (wb.DiLoCo(every=500), 500),
        (wb.DiLoCo(every=30), 30),
        (wb.DiLoCo(every=100, collective=Ring(codec=Linear8(), chunks=4)), 100),
        (wb.NoCommunication(), None),
    ],
    ids=str,
)
def test_a_period_without_communication_counts_whole(algorithm: wb.Algorithm, every: int | None) -> None:
    costs_ = calibration()
    setting = make_setting(costs_, 4, None, 12.5e6, None, "own")
    share = 0.25 if "Linear8" in str(algorithm) else 1.0
    wire_s = 0.0 if every is None else share * 1.5 * costs_.shapes.num_bytes / 12.5e6 / every
    assert step_time(costs_, algorithm, setting).step_s - 0.1 == pytest.approx(wire_s, rel=0.02, abs=1e-6)


@pytest.mark.parametrize("algorithm", [wb.DiLoCo(every=1001), wb.EagerDiLoCo(every=1001)], ids=str)
def test_a_long_period_has_a_sum_in_predict_too(algorithm: Any) -> None:
    """A sum takes 192 s on 1 Mbit/s: DiLoCo waits for all of it, Eager DiLoCo for what 1,001 local steps do not hide."""
    costs_ = calibration()
    setting = make_setting(costs_, 4, None, 125e3, None, "own")
    wire_s = 1.5 * costs_.shapes.num_bytes / 125e3
    waited_s = wire_s if isinstance(algorithm, wb.DiLoCo) else max(0.0, wire_s - 0.1 * algorithm.every)
    found, predicted = step_time(costs_, algorithm, setting), predict_at(costs_, algorithm, setting, draws=0)
    assert predicted.step_s == pytest.approx(found.step_s)
    assert predicted.step_s == pytest.approx(0.1 + waited_s / algorithm.every, rel=0.01)


@pytest.mark.parametrize(
    ("width", "rate", "workers"), [(3, 125e6, 2), (8, 125e6, 2), (8, 60e6, 2), (8, 1e9, 2), (8, 155e6, 8)]
)
@pytest.mark.parametrize("collective", [Native(), Ring()], ids=str)
def test_a_wide_pipeline_is_timed_when_it_is_full(width: int, rate: float, workers: int, collective: Any) -> None:
    """Its first steps do not wait: with 0.128 s a sum and 0.1 s of compute, a width of 8 waits after 25 steps."""
    costs_ = calibration()
    setting = make_setting(costs_, workers, None, rate, None, "own")
    algorithm = wb.PipeSGD(width=width, collective=collective)
    expected = pytest.approx(max(0.1, 2 * (workers - 1) / workers * costs_.shapes.num_bytes / rate), rel=0.005)
    assert step_time(costs_, algorithm, setting).step_s == expected
    predicted = predict_at(costs_, algorithm, setting, draws=0)
    assert predicted.step_s == expected
    assert predicted.bound == ("compute" if rate == 1e9 else "wire")


def test_a_rank_that_sends_when_it_is_asked_has_no_period() -> None:
    """Rank 0 of AD-PSGD answers others: in some steps it sends nothing, and a step is a step all the same."""
    setting = make_setting(calibration(), 4, None, 125e6, None, "own")
    found = step_time(calibration(), wb.ADPSGD(), setting)
    assert found.step_s == pytest.approx(predict_at(calibration(), wb.ADPSGD(), setting, draws=0).step_s, rel=0.05)


def test_a_wider_pipeline_without_a_shorter_step_is_not_recommended() -> None:
    among = [wb.PipeSGD(width=width) for width in (2, 3, 8)]
    given: dict[str, Any] = {"workers": 2, "bandwidth_bytes_per_s": 125e6, "cores": "own", "draws": 0}
    assert recommend(calibration(), among=among, **given).best.algorithm == wb.PipeSGD(width=2)


@pytest.mark.parametrize("algorithm", [wb.SynchronousSGD(), wb.PipeSGD(width=2), wb.AsyncSGD(shards=4)], ids=str)
def test_workers_that_share_cores_take_the_time_of_predict(algorithm: wb.Algorithm) -> None:
    """A rank works 0.1 s in a step, and 4 ns for each byte: two cores need at least this work of four ranks."""
    costs_ = replace(calibration(), host=Host(cpu_s_per_byte=4e-9))
    setting = make_setting(costs_, 4, None, 125e6, None, 2.0)
    found, predicted = step_time(costs_, algorithm, setting), predict_at(costs_, algorithm, setting, draws=0)
    assert found.step_s == pytest.approx(predicted.step_s)
    assert saved_seconds(costs_, algorithm, setting) == pytest.approx(predicted.saved_s)
    if not isinstance(algorithm, wb.AsyncSGD):
        assert found.step_s >= 0.999 * 4 * (0.1 + 4e-9 * 1.5 * costs_.shapes.num_bytes) / 2


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


def test_backups_are_gradients_that_are_left_out() -> None:
    recipe = recipe_of(wb.BackupSGD(backups=1), 4, 16)
    assert (recipe.workers, recipe.batch_size, recipe.name) == (1, 48, "exact, 3 of 4 gradients")


def test_with_a_time_out_the_time_decides_which_gradients_are_left_out() -> None:
    hasty = wb.BackupSGD(backups=0, timeout_s=0.01)
    recipe = recipe_of(hasty, 4, 16)
    assert (recipe.algorithm, recipe.workers, recipe.batch_size) == (hasty, 4, 16)
    assert recipe.name == "BackupSGD(timeout_s=0.01, backups=0)"


def made(model: Any, loss: Any = nn.functional.cross_entropy) -> wb.Problem:
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(64, 6, generator=generator), torch.randint(3, (64,), generator=generator))
    return wb.Problem(model=model, loss=loss, train=data, test=data, name="made", batch_size=8)


def test_where_one_worker_does_not_stand_for_all() -> None:
    assert one_worker_stands_for_all(made(lambda: nn.Linear(6, 3)), 8)
    normal = lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))  # noqa: E731
    assert not one_worker_stands_for_all(made(normal), 8)
    summed = nn.CrossEntropyLoss(reduction="sum")
    assert not one_worker_stands_for_all(made(lambda: nn.Linear(6, 3), summed), 8)
    found = ask(problem=made(lambda: nn.Linear(6, 3), summed), target=("loss", 1e-9), seeds=1, minutes=0.1)
    assert {trained.recipe.workers for trained in found.trainings} == {4}
    assert recipe_of(wb.SynchronousSGD(), 4, 16, one_worker=False).workers == 4


def test_one_worker_stands_for_all_who_read_a_loader_or_a_stream() -> None:
    plain = made(lambda: nn.Linear(6, 3))
    pairs = TensorDataset(*plain.train)

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from pairs

    def batches(rank: int, num_ranks: int) -> Any:
        return DataLoader(pairs, batch_size=8)

    twice = lambda items: tuple(2 * part for part in default_collate(items))  # noqa: E731
    loader = DataLoader(pairs, batch_size=8, collate_fn=twice)
    squares = replace(plain, loss=lambda output, y: (output - y[:, None]).square().mean(), correct=None)
    expected = [(loader, True), (Stream(), True), (DataLoader(Stream(), num_workers=1), False), (batches, False)]
    for train, alone in expected:
        assert one_worker_stands_for_all(replace(squares, train=train), 8) == alone
    summed = replace(squares, loss=lambda output, y: (output - y[:, None]).square().sum())
    assert not one_worker_stands_for_all(replace(summed, train=loader), 8)
    data = {"train": Stream(), "test": Stream()}
    common: dict[str, Any] = {
        "target": ("loss", 1e-9),
        "seeds": 1,
        "algorithms": [wb.SynchronousSGD()],
        "minutes": 0.1,
    }
    one, other = (ask(problem=replace(plain, **given), **common) for given in ({}, data))
    (whole,), (streamed,) = one.trainings, other.trainings
    assert (streamed.recipe.workers, streamed.recipe.batch_size) == (1, 32)
    assert streamed.runs[0] is not None and whole.runs[0] is not None
    assert len(streamed.runs[0].evaluations()) == len(whole.runs[0].evaluations())


def test_a_target_on_a_metric_of_the_users_own() -> None:
    def error(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (output.argmax(1) != y).float().mean()

    mine = replace(
        wb.problems.digits_softmax(), metrics={"mistakes": wb.problems.Metric(function=error, better="lower")}
    )
    found, known = ask(problem=mine, target=("mistakes", 54.5 / 360)), ask(target=("accuracy", 305.5 / 360))
    assert [cell.steps for cell in found.cells] == pytest.approx([cell.steps for cell in known.cells])
    assert "reaches mistakes of 0.151389 in" in found.answer
    assert found.front().layout.yaxis.title.text == "mistakes"
    with pytest.raises(ConfigError, match=r'give \("loss", 3.2\) or \("accuracy", 0.9\), \("mistakes", ...\)'):
        ask(problem=mine, target=("f1", 0.8))


def test_settings_that_differ_are_trained_apart() -> None:
    algorithms = [wb.SynchronousSGD(), wb.DiLoCo(every=4, outer_lr=0.7), wb.DiLoCo(every=4, outer_lr=0.01)]
    found = ask(algorithms=algorithms, target=("accuracy", 0.7), seeds=1)
    first, second = (cell for cell in found.cells if cell.name.startswith("DiLoCo"))
    assert first.name != second.name
    assert first.trained is not second.trained
    assert first.steps is not None and second.steps is not None
    assert first.steps < second.steps
    assert any("trained with one seed, so the interval lacks" in words for words in found.unknown)


def test_seeds_are_those_that_were_given() -> None:
    found = ask(seeds=[3, 7], algorithms=[wb.SynchronousSGD()])
    (trained,) = found.trainings
    assert [run.info["settings"]["seed"] for run in trained.runs if run] == [3, 7]
    first, second = ([row["test_loss"] for row in run.evaluations()] for run in trained.runs if run)
    assert first != second


def test_without_an_exact_algorithm_all_are_trained() -> None:
    found = ask(algorithms=[wb.LocalSGD(every=4), wb.PipeSGD(width=2)])
    assert {trained.recipe.name for trained in found.trainings} == {"LocalSGD(every=4)", "late by 1"}
    assert "exact" not in found.answer


def test_an_algorithm_with_more_updates_a_step_is_trained_though_its_step_is_longer() -> None:
    found = ask(algorithms=[wb.SynchronousSGD(), wb.AsyncSGD(), wb.BackupSGD(backups=0)], networks="100kbit", seeds=1)
    cells = {cell.name.partition("(")[0]: cell for cell in found.cells}
    assert cells["AsyncSGD"].time.step_s > cells["SynchronousSGD"].time.step_s
    assert cells["AsyncSGD"].trained is not None


def cell_of(step_s: float, low_s: float, high_s: float, steps: tuple[float, ...]) -> Cell:
    setting = make_setting(calibration(), 4, None, 125e6, None, "own")
    recipe = recipe_of(wb.SynchronousSGD(), 4, 8)
    trained = Trained(recipe=recipe, lr=None, runs=(None,) * len(steps), steps=steps, num_steps=99)
    time = StepTime(step_s=step_s, low_s=low_s, high_s=high_s, overlap=None, how="messages")
    return Cell(
        algorithm=wb.SynchronousSGD(),
        workers=4,
        network="n",
        setting=setting,
        time=time,
        recipe=recipe,
        trained=trained,
    )


def test_intervals_combine_seeds_and_predictions() -> None:
    """The 95 % quantile of t with 2 degrees of freedom is 2.920."""
    exact = cell_of(1.0, 0.8, 1.5, (100.0, 100.0, 100.0))
    assert exact.interval_s == pytest.approx((80.0, 150.0))
    noisy = cell_of(1.0, 1.0, 1.0, (90.0, 100.0, 110.0))
    half = 2.920 * 10 / math.sqrt(3) / 100
    assert noisy.interval_s == pytest.approx((100 * math.exp(-half), 100 * math.exp(half)), rel=1e-3)
    ratio, low, high = ratio_of(
        cell_of(2.0, 2.0, 2.0, (90.0, 100.0, 110.0)), cell_of(1.0, 0.8, 1.5, (90.0, 100.0, 110.0))
    )
    assert (ratio, low, high) == pytest.approx((2.0, 2 / 1.5, 2 / 0.8))


def test_late_gradients_have_the_better_of_two_rates() -> None:
    own = wb.problems.digits_softmax().optimizer([torch.zeros(1, requires_grad=True)]).param_groups[0]["lr"]
    assert {trained.recipe.name: trained.lr for trained in ask().trainings}["exact"] is None

    def late(width: int, **options: Any) -> float | None:
        found = ask(algorithms=[wb.SynchronousSGD(), wb.PipeSGD(width=width)], **options)
        return {trained.recipe.name: trained.lr for trained in found.trainings}[f"late by {width - 1}"]

    assert late(2, lr=own / 50, target=("loss", 1.5)) == pytest.approx(own / 50)  # a lower one only costs steps
    assert late(3, lr=4.0, target=("loss", 0.3)) == pytest.approx(4.0 / 3)  # the given one is unstable


def test_a_search_of_rates() -> None:
    pytest.importorskip("optuna")
    found = ask(lr=2e-3, search=4, target=("loss", 1.5), algorithms=[wb.SynchronousSGD()])
    (trained,) = found.trainings
    assert trained.lr is not None and 5e-4 <= trained.lr <= 8e-3
    assert trained.lr > 2e-3  # the given rate is too small, and a larger one is sooner


def test_a_search_without_minutes_or_with_divergence_keeps_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    found = ask(lr=1e38, search=2, algorithms=[wb.SynchronousSGD()], seeds=1)
    assert "diverged" in found.answer
    afford = Trainings._affords
    monkeypatch.setattr(
        Trainings, "_affords", lambda self, recipe, length, trainings=0: trainings > 0 and afford(self, recipe, length)
    )
    (trained,) = ask(search=2, algorithms=[wb.SynchronousSGD()], seeds=1).trainings
    assert trained.lr is None


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


def test_codecs_with_other_settings_have_other_names_and_recipes() -> None:
    sums = [
        Ring(codec=Linear8()),
        *(Once(codec=ErrorFeedback(codec=codec)) for codec in (TopK(fraction=0.01), TopK(fraction=0.1), Sign())),
        PowerSGD(rank=2),
        PowerSGD(rank=4),
    ]
    algorithms = [wb.SynchronousSGD(collective=sum_) for sum_ in sums]
    names = [name_of(one) for one in algorithms]
    assert names[0] == "SynchronousSGD with linear8"
    assert names[1] == "SynchronousSGD with error-feedback of top-k(fraction=0.01)"
    assert len(set(names)) == len({recipe_of(one, 4, 8).name for one in algorithms}) == len(sums)
    found = ask(algorithms=algorithms[1:3], seeds=1)
    assert {cell.name for cell in found.cells} == set(names[1:3])


def test_a_rate_need_not_be_one_that_can_be_emulated() -> None:
    found = ask(networks=["200gbit", "ethernet-400g"], algorithms=[wb.SynchronousSGD()], seeds=1)
    assert [cell.network for cell in found.cells] == ["200 Gbit/s", "400 Gbit/s Ethernet"]
    assert found.cells[0].setting.line_bytes_per_s == 25e9
    for wrong in ("0gbit", "1gbyte", "gbit"):
        with pytest.raises(ConfigError, match="rate"):
            line_rate(wrong)


def test_names_with_their_numbers_of_workers() -> None:
    assert by_workers({"exact": {4}}) == "exact (4 workers)"


def test_the_answer_says_what_a_step_computes_and_which_late_gradients_were_not_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def said() -> list[str]:
        found = ask(lr=0.25, seeds=1).unknown
        assert any(words.startswith("a step computes 10.0 ms (forward 3.33 ms, backward 6.67 ms") for words in found)
        return [words for words in found if "may diverge" in words]

    assert said() == []
    monkeypatch.setattr(Trainings, "train", lambda self, recipes: [self._leave_out(one) for one in recipes])
    (words,) = said()
    assert "a learning rate of 0.25, " in words
    assert ": late by 1 (4 workers);" in words


# -- kept and continued


def test_a_named_study_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path))
    same = of(wb.problems.digits_softmax())
    first = ask(name="mine", seeds=1, calibrated=same)
    monkeypatch.setattr("workbench.what_if.trainings.simulate", None)  # nothing is trained again
    again = ask(name="mine", seeds=1, calibrated=same)
    assert [cell.target_s for cell in again.cells] == [cell.target_s for cell in first.cells]
    folder = tmp_path / "study-mine"
    kept = json.loads((folder / "study.json").read_text())["trainings"]
    assert len(kept) >= 2
    assert {(folder / entry["folder"]).resolve() for entry in kept.values()} == {
        run.folder.resolve() for run in list_runs()
    }
    assert all(wb.Run.load(run.folder).evaluations() for run in list_runs())
    with pytest.raises(ConfigError, match="other values of target"):
        ask(name="mine", target=("accuracy", 0.5), calibrated=same)
    with pytest.raises(ConfigError, match="other values of calibrated"):
        ask(name="mine", calibrated=of(wb.problems.digits_softmax(), 0.5))
    other = replace(wb.problems.digits_softmax(), test=wb.problems.digits_softmax().train)
    with pytest.raises(ConfigError, match=r"other values of problem\.test"):
        ask(name="mine", problem=other, calibrated=same)


def test_what_a_killed_process_left_of_a_training_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was killed after it saved the run and before it noted it; or another process saves the same training."""
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path))
    run = wb.simulate(
        wb.SynchronousSGD(),
        wb.problems.digits_softmax(),
        workers=1,
        steps=2,
        compute=costs.Compute(forward_s=1e-3, backward_s=1e-3),
    )
    known = {"recipe": "exact", "seed": 0}
    first, other = Saved.open("mine", {}), Saved.open("mine", {})
    first.add_run(known, run)
    other.add_run(known, run)
    kept = json.loads((tmp_path / "study-mine" / "study.json").read_text())
    (tmp_path / "study-mine" / "study.json").write_text(json.dumps({**kept, "trainings": {}}))
    again = Saved.open("mine", {})
    assert not again.has(known)
    again.add_run(known, run)
    assert Saved.open("mine", {}).run(known).steps() == run.steps()  # type: ignore[union-attr]
    for saved in list_runs():
        remove_run(saved.folder)
    assert not Saved.open("mine", {}).has(known)


def test_a_continued_study_with_fewer_minutes_keeps_its_trainings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path))
    same: dict[str, Any] = {"name": "mine", "calibrated": of(wb.problems.digits_softmax())}
    for algorithm in (wb.SynchronousSGD(), wb.PipeSGD(width=2)):  # one rate; the better of two
        (first,) = ask(**same, algorithms=[algorithm]).trainings
        (again,) = ask(**same, algorithms=[algorithm], minutes=1e-6).trainings
        assert (again.lr, again.steps, again.num_steps) == (first.lr, first.steps, first.num_steps)


def test_a_training_of_your_own_algorithm_is_known_by_its_code() -> None:
    def key(algorithm: wb.Algorithm) -> str:
        return recipe_of(algorithm, 4, 8).key

    def own(every: int) -> wb.Algorithm:
        @dataclass(frozen=True, kw_only=True)
        class Mine(wb.Algorithm):
            def worker(self, ctx: Any) -> Any:
                return every if every == 1 else None

        return Mine()

    assert repr(own(1)) == repr(own(2))
    assert key(own(1)) == key(own(1)) != key(own(2))


def test_a_rate_that_misses_the_target_is_worse_than_one_that_meets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the loss is negative, as of a density, or NaN."""
    monkeypatch.setattr(Trainings, "_met", lambda self, run: None if run.met is None else (run.met,) * 3)

    def badness(loss: float, met: float | None = None) -> float:
        run = SimpleNamespace(met=met, evaluations=lambda: [{"test_loss": loss}])
        return Trainings._badness(object.__new__(Trainings), run, 48)  # type: ignore[arg-type]

    assert badness(-1000.0, met=48.0) < badness(-1000.0) < badness(-3.0) < badness(2.0) < badness(math.nan)


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


@pytest.mark.usefixtures("forked_starts")
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
        ({"algorithms": wb.PipeSGD()}, "give a list"),
        ({"algorithms": [wb.PipeSGD(), wb.PipeSGD()]}, "two have the name"),
        ({"workers": []}, "workers"),
        ({"workers": 2.0}, "workers"),
        ({"networks": []}, "networks"),
        ({"networks": [1e9]}, "equal links"),
        ({"networks": [costs.Network(latency_s=0, bandwidth_bytes_per_s=1e5)] * 2}, "different names"),
        ({"networks": [costs.get("8x nvlink-3 + ethernet-10g / 16 hosts 4:1")]}, "equal links"),
        ({"minutes": math.inf}, "minutes"),
        ({"seeds": [3, 3]}, "each once"),
        ({"seeds": 2.5}, "seeds"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"threads": 2}, "measured here"),
        ({"calibrated": 123}, "give a run"),
        ({"target": ("loss", math.nan)}, "finite"),
        ({"stragglers": costs.Lognormal(sigma=0.1), "calibrated": None}, "list"),
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


def test_stragglers_on_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("workbench.what_if.study", lambda _problem, **words: given.update(words) or "the answer")
    words = ["study", "--problem", "digits-softmax", "--workers", "4,16"]
    assert main([*words, "--stragglers", "lognormal:0.3", "--stragglers", "slow-machines:9=4"]) == 0
    assert given["stragglers"] == [costs.Lognormal(sigma=0.3), costs.SlowMachines(factor_of=((9, 4),))]
    assert main(words) == 0 and given["stragglers"] == []
    for name, said in (("slow-machines:16=4", "there is no rank 16"), ("lognormla", "did you mean lognormal")):
        assert main([*words, "--stragglers", name]) == 2
        assert said in capsys.readouterr().err


def test_command_line(tmp_path: Path) -> None:
    path = of(wb.problems.digits_softmax()).save(tmp_path / "costs.json")
    words = ["study", "--problem", "digits-softmax", "--calibrated", str(path), "--network", "1mbit", "--workers", "2"]
    words += ["--algorithm", "synchronous-sgd", "--algorithm", "pipe-sgd width=2", "--target", "accuracy=0.8"]
    done = subprocess.run(
        forked("-m", "workbench", *words, "--seeds", "1", "--json"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["algorithm"] for row in rows] == ["SynchronousSGD", "PipeSGD(width=2)"]
    assert all(row["target_s"] > 0 for row in rows)
    assert "min left" in done.stderr
