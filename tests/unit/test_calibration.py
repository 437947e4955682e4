"""Cost models fitted to traces with known parameters, their predictions and recommendations."""

from __future__ import annotations

import json
import re
from dataclasses import astuple, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from workbench import progress
from workbench.analysis.summary import step_seconds
from workbench.calibration import (
    Calibration,
    Convergence,
    Estimate,
    Probe,
    calibrate,
    candidates,
    predict,
    probe,
    recommend,
    with_probe,
)
from workbench.calibration.convergence import recipe
from workbench.calibration.cores import Slowness, slowness_in
from workbench.calibration.effective import core_s, core_s_per_byte, effective_costs, make_setting
from workbench.calibration.fit import fit, ready_to_shares, robust_line
from workbench.calibration.fixed_point import Scenario, midmean, simulated
from workbench.calibration.model_error import band
from workbench.calibration.observed import _merged, observe
from workbench.calibration.predict import step_s
from workbench.calibration.predict import table as prediction_table
from workbench.calibration.probe import without_hold_up
from workbench.calibration.straggler_fit import fit_distribution, slow_ranks
from workbench.cli.main import main
from workbench.cli.predict import parse_rates
from workbench.codecs import Linear8, TopK, Truncate16
from workbench.collectives import Native, PowerSGD, Ring
from workbench.costs import Bimodal, Compute, Empirical, Lognormal, Network, Pareto, ShiftedExponential, SlowMachines
from workbench.errors import ConfigError
from workbench.gradients import build_layout, trainable
from workbench.runtimes.transport.base import Deadline, SoloTransport
from workbench.trace.run import Run

ALPHA, RATE, SIGMA, STEPS = 2e-4, 5e7, 0.08, 60
NETWORK = Network(latency_s=ALPHA, bandwidth_bytes_per_s=RATE)
COMPUTE = Compute(forward_s=0.01, backward_s=0.02, update_s=0.003, stragglers=(Lognormal(sigma=SIGMA),))


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 400),
        nn.ReLU(),
        nn.Linear(400, 400),
        nn.ReLU(),
        nn.Linear(400, 400),
        nn.ReLU(),
        nn.Linear(400, 10),
    )


def problem(samples: int = 1 << 12) -> wb.Problem:
    data = (torch.zeros(samples, 64), torch.zeros(samples, dtype=torch.int64))
    return wb.Problem(model=model, loss=nn.functional.cross_entropy, train=data, name="shapes", batch_size=8)


def trained(algorithm: Any, workers: int = 4, **changes: Any) -> Run:
    given: dict[str, Any] = {"network": NETWORK, "compute": COMPUTE, "steps": STEPS, **changes}
    return wb.simulate(algorithm, problem(), workers=workers, timing_only=True, **given)


@cache
def fitted() -> Calibration:
    """From one message a parameter: sizes that differ."""
    return calibrate(trained(wb.LayerwiseSGD(bucket_bytes=0)))


# -- what is fitted --------------------------------------------------------------------------------------------------


def near(estimate: Estimate, value: float, relative: float = 1e-6) -> bool:
    return abs(estimate.value - value) <= 3 * estimate.error + relative * value


def test_known_parameters_are_recovered_within_their_errors() -> None:
    found = fitted()
    assert near(found.pace.forward_s, 0.01) and near(found.pace.backward_s, 0.02)
    assert found.pace.forward_s.error < 0.02 * 0.01
    assert found.pace.update_s.value == pytest.approx(0.003, rel=1e-6)
    assert found.pace.other_s.value == pytest.approx(0.0, abs=1e-9)
    assert found.line.latency_s.value == pytest.approx(ALPHA, rel=1e-3)
    assert 1 / found.line.s_per_byte.value == pytest.approx(RATE, rel=1e-3)
    (law,) = found.pace.stragglers
    assert isinstance(law, Lognormal)
    assert law.sigma == pytest.approx(SIGMA, rel=3.5 / np.sqrt(2 * 4 * STEPS))


def test_one_size_of_messages_tells_bandwidth_given_latency_and_says_so() -> None:
    run = trained(wb.SynchronousSGD())
    blind = calibrate(run)
    assert any("latency_s cannot be separated from bandwidth" in note for note in blind.notes)
    assert blind.line.latency_s.value == 0 and np.isnan(blind.line.latency_s.error)
    assert 1 / blind.line.s_per_byte.value < 0.99 * RATE  # latency is in it
    told = calibrate(run, latency_s=ALPHA)
    assert 1 / told.line.s_per_byte.value == pytest.approx(RATE, rel=1e-6)


def test_waiting_for_a_straggler_is_no_time_on_the_wire() -> None:
    late = Compute(forward_s=0.01, backward_s=0.02, stragglers=(Bimodal(probability=0.3, factor=4.0),))
    found = calibrate(trained(wb.SynchronousSGD(), compute=late), latency_s=ALPHA)
    assert 1 / found.line.s_per_byte.value == pytest.approx(RATE, rel=1e-6)


def test_messages_of_an_own_ring_are_a_line_too() -> None:
    given = replace(NETWORK, sum_s_per_byte=2e-10)
    found = calibrate(trained(wb.SynchronousSGD(collective=Ring()), network=given), latency_s=ALPHA)
    assert 1 / found.line.s_per_byte.value == pytest.approx(RATE, rel=1e-3)
    assert found.line.sum_s_per_byte.value == pytest.approx(2e-10, rel=1e-6)


STEADY = replace(COMPUTE, stragglers=())


@pytest.mark.parametrize(
    "algorithm",
    [
        wb.DPSGD(),  # two messages leave each interface at once
        wb.SynchronousSGD(collective=Ring(chunks=4)),  # chunks wait for each other
        wb.SynchronousSGD(collective=PowerSGD()),  # two sums a step
        wb.ChocoSGD(),
    ],
    ids=str,
)
def test_messages_that_share_an_interface_give_its_rate(algorithm: Any) -> None:
    found = calibrate(trained(algorithm, compute=STEADY, steps=8), latency_s=ALPHA)
    assert 1 / found.line.s_per_byte.value == pytest.approx(RATE, rel=1e-3)


@pytest.mark.parametrize(
    ("algorithm", "latency_s", "rate"),
    list(
        product(
            (
                wb.DPSGD(),
                wb.DeMo(),
                *(wb.SynchronousSGD(collective=Ring(codec=one)) for one in (Truncate16(), Linear8())),
            ),
            (0.0, 2e-3),
            (2e7, 1e9),
        )
    ),
    ids=str,
)
def test_bands_contain_all_latencies_that_messages_of_one_size_allow(
    algorithm: Any, latency_s: float, rate: float
) -> None:
    given = {"network": Network(latency_s=latency_s, bandwidth_bytes_per_s=rate), "compute": STEADY, "steps": 8}
    found = predict(calibrate(trained(algorithm, **given)), wb.SynchronousSGD(), workers=4, draws=0)
    assert found.low_s <= step_seconds(trained(wb.SynchronousSGD(), **given)).mean() <= found.high_s


@pytest.mark.parametrize("algorithm", [wb.SignSGD(), wb.ChocoSGD(codec=TopK(fraction=0.01)), wb.SPARTA()], ids=str)
def test_small_messages_of_one_size_need_a_latency(algorithm: Any) -> None:
    run = trained(algorithm, compute=STEADY, steps=8)
    with pytest.raises(ConfigError, match=r"latency_s= .*--probe.*synchronous-sgd"):
        calibrate(run)
    real_s = step_seconds(trained(wb.SynchronousSGD(), compute=STEADY, steps=8)).mean()
    sums = tuple((size, 6 * (ALPHA + size / 4 / RATE)) for size in (1 << 10, 1 << 22))
    measured = Probe(
        num_workers=4, sums=sums, messages=((1, ALPHA),), sum_s_per_byte=0.0, codecs=(), cpu_s_per_byte=0.0
    )
    probed = with_probe(calibrate(run, before_probe=True), measured)
    for found in (calibrate(run, latency_s=ALPHA), probed):
        assert predict(found, wb.SynchronousSGD(), workers=4, draws=0).step_s == pytest.approx(real_s, rel=0.02)
    with pytest.raises(ConfigError, match="of one hop"):
        calibrate(run, latency_s=1.0)


@pytest.mark.parametrize("algorithm", [wb.LocalSGD(every=7), wb.DiLoCo(every=64), wb.FedAvg(every=40)], ids=str)
def test_a_step_has_its_share_of_a_sum_that_comes_every_few_steps(algorithm: Any) -> None:
    steady = replace(fitted(), pace=replace(fitted().pace, stragglers=()))
    sum_s = NETWORK.all_reduce_s(fitted().shapes.num_bytes, 4)
    pace = steady.pace
    own_s = pace.forward_s.value + pace.backward_s.value + pace.update_s.value
    found = predict(steady, algorithm, workers=4, draws=0)
    assert found.step_s == pytest.approx(own_s + sum_s / algorithm.every, rel=1e-3)


def test_a_codecs_work_is_fitted_by_its_name() -> None:
    given = replace(NETWORK, encode_s_per_byte=3e-10, decode_s_per_byte=5e-10)
    found = calibrate(trained(wb.SynchronousSGD(collective=Ring(codec=Truncate16())), network=given, steps=12))
    ((name, encode_s, decode_s),) = found.line.codecs
    assert (
        name == "truncate16"
        and encode_s == pytest.approx(3e-10, rel=1e-3)
        and decode_s == pytest.approx(5e-10, rel=1e-3)
    )


def test_shares_of_backward_come_from_when_buckets_are_ready() -> None:
    shares = (0.4, 0.0, 0.3, 0.0, 0.2, 0.0, 0.1, 0.0)
    given = replace(COMPUTE, backward_shares=shares, stragglers=())
    found = calibrate(trained(wb.LayerwiseSGD(bucket_bytes=0), compute=given)).pace.backward_shares
    assert found == pytest.approx(shares, abs=1e-6)
    assert ready_to_shares([(0, 0.25), (1, 1.0)], [1, 0], [30, 10]) == pytest.approx((0.75, 0.25))


def test_cores_that_are_shared_are_taken_out_of_compute_and_put_back() -> None:
    alone = fitted()
    crowded = calibrate(trained(wb.LayerwiseSGD(bucket_bytes=0)), cores=2)
    assert crowded.pace.forward_s.value == pytest.approx(alone.pace.forward_s.value / 2)
    again = predict(crowded, wb.SynchronousSGD(), workers=4, draws=0)
    assert again.step_s == pytest.approx(predict(alone, wb.SynchronousSGD(), workers=4, draws=0).step_s, rel=1e-9)
    fewer = predict(crowded, wb.SynchronousSGD(), workers=2, draws=0)
    assert fewer.step_s < again.step_s - 0.5 * 0.03


def test_slow_ranks_are_told_from_bad_luck() -> None:
    random = np.random.default_rng(0)
    seconds = np.exp(0.05 * random.standard_normal((4, 80)))
    assert slow_ranks(seconds)[1] is None
    seconds[2] *= 1.5
    factors, machines = slow_ranks(seconds)
    assert machines is not None and [rank for rank, _ in machines.factor_of] == [2]
    assert factors[2] == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize(
    "law",
    [
        Lognormal(sigma=0.2),
        ShiftedExponential(shift=0.8, scale=0.3),
        Pareto(shape=4.0),
        Bimodal(probability=0.2, factor=5.0),
    ],
    ids=str,
)
def test_the_law_is_found_that_the_samples_are_of(law: Any) -> None:
    seconds = np.concatenate([law.factors(1, step, 8) for step in range(60)])
    laws, scale, words = fit_distribution(seconds / np.median(seconds))
    (found,) = laws
    assert type(found) is (Empirical if isinstance(law, Bimodal) else type(law)), words
    levels = np.array([0.1, 0.5, 0.9])
    expected = law.quantile(levels) / np.median(seconds)
    assert np.allclose(scale * found.quantile(levels), expected, rtol=0.08)


def test_few_samples_and_no_spread() -> None:
    assert fit_distribution(np.ones(50))[0] == ()
    assert "cannot distinguish distributions" in fit_distribution(np.array([1.0, 1.1, 0.9, 1.2]))[2]


def test_sums_that_queue_are_taken_one_after_the_other_and_those_that_overtake_together() -> None:
    common = {
        "step": np.zeros(3, np.int64),
        "num_messages": np.ones(3),
        "wire_bytes": np.array([1.0, 2.0, 4.0]),
        "waiting_s": np.zeros(3),
    }
    queued = _merged(begin_s=np.array([0.0, 0.5, 9.0]), end_s=np.array([1.0, 3.0, 10.0]), **common)
    assert queued.seconds.tolist() == [1.0, 2.0, 1.0]
    crossed = _merged(begin_s=np.array([0.0, 0.5, 9.0]), end_s=np.array([3.0, 1.0, 10.0]), **common)
    assert crossed.seconds.tolist() == [3.0, 1.0] and crossed.wire_bytes.tolist() == [3.0, 4.0]


def test_the_line_does_not_follow_outliers() -> None:
    random = np.random.default_rng(1)
    size = random.uniform(1e4, 1e6, 200)
    seconds = (1e-3 + size * 1e-8) * np.exp(0.02 * random.standard_normal(200))
    seconds[::10] *= 4
    alpha, beta = robust_line(seconds, np.ones(200), size, None)
    assert alpha == pytest.approx(1e-3, rel=0.03) and beta == pytest.approx(1e-8, rel=0.03)


# -- what is refused -------------------------------------------------------------------------------------------------


def test_what_cannot_be_calibrated_says_why() -> None:
    with pytest.raises(ConfigError, match="parameter servers"):
        calibrate(trained(wb.ParameterServerSGD(), workers=2, steps=6))
    with pytest.raises(ConfigError, match="steps in its trace"):
        calibrate(trained(wb.SynchronousSGD(), steps=3))
    with pytest.raises(ConfigError, match="no trace"):
        calibrate(trained(wb.SynchronousSGD(), steps=6, trace_steps=0))
    with pytest.raises(ConfigError, match="cores=0"):
        calibrate(trained(wb.SynchronousSGD(), steps=6), cores=0)
    with pytest.raises(ConfigError, match="names or shapes differ"):
        calibrate(trained(wb.SynchronousSGD(), steps=6), problem=wb.problems.digits_softmax())
    old = trained(wb.SynchronousSGD(), steps=6)
    del old.info["model"]["shapes"]
    with pytest.raises(ConfigError, match="problem="):
        calibrate(old)
    assert calibrate(old, problem=problem()).shapes.parameters == fitted().shapes.parameters


def test_one_rank_has_no_network() -> None:
    alone = calibrate(trained(wb.SynchronousSGD(), workers=1))
    assert any("no communication" in note for note in alone.notes)
    with pytest.raises(ConfigError, match="has no network"):
        predict(alone, wb.SynchronousSGD(), workers=2)
    assert predict(alone, wb.SynchronousSGD(), workers=2, network="ethernet-1g", draws=0).step_s > 0.033


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    for laws in ((Lognormal(sigma=0.1),), (Empirical(values=(0.9, 1.0, 1.3)), SlowMachines(factor_of=((1, 1.5),)))):
        written = replace(fitted(), pace=replace(fitted().pace, stragglers=laws))
        read = Calibration.load(written.save(tmp_path / "c.json"))
        assert json.dumps(read.as_record()) == json.dumps(written.as_record())
        assert read.compute() == written.compute() and read.network() == written.network()
        assert str(read) == str(written)


def test_an_older_file_that_calls_a_distribution_a_law_is_read(tmp_path: Path) -> None:
    written = replace(fitted(), pace=replace(fitted().pace, stragglers=(Lognormal(sigma=0.1),)))
    path = written.save(tmp_path / "c.json")
    text = path.read_text()
    assert text.count('"distribution": "Lognormal"') == 1
    path.write_text(text.replace('"distribution": "Lognormal"', '"law": "Lognormal"'))
    assert Calibration.load(path).pace.stragglers == (Lognormal(sigma=0.1),)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = fitted().save(tmp_path / "c.json")
    record = json.loads(path.read_text())
    for text, words in (
        ("{", "not JSON"),
        ("[]", "version 2"),
        (json.dumps({**record, "version": 99}), "99"),
        (json.dumps({**record, "version": 1}), "has 1.: repeat `workbench calibrate`"),
        (json.dumps({**record, "line": {}}), "damaged"),
        (json.dumps({**record, "pace": {**record["pace"], "stragglers": [{"distribution": "Nobody"}]}}), "Nobody"),
        (json.dumps({**record, "pace": {**record["pace"], "stragglers": [{"sigma": 0.1}]}}), "damaged"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            Calibration.load(path)
    with pytest.raises(ConfigError, match="workbench calibrate"):
        Calibration.load(tmp_path / "missing.json")


# -- what is predicted -----------------------------------------------------------------------------------------------

ALGORITHMS = [
    wb.SynchronousSGD(),
    wb.LayerwiseSGD(bucket_bytes=400_000),
    wb.DeAR(bucket_bytes=400_000, collective=Native()),
    wb.PipeSGD(width=2),
    wb.PipeSGD(width=2, collective=Ring()),
    wb.ParameterServerSGD(shards=2),
]


@pytest.mark.parametrize(
    "algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__ + str(getattr(algorithm, "collective", ""))
)
def test_other_workers_and_algorithms_are_predicted_as_they_are(algorithm: Any) -> None:
    for workers in (2, 6):
        real = wb.summary(trained(algorithm, workers=workers, seed=5))["step_seconds_median"]
        found = predict(fitted(), algorithm, workers=workers)
        assert found.usual_s == pytest.approx(real, rel=0.03)
        assert found.low_s <= found.step_s * 1.001 and found.high_s >= found.step_s * 0.999


def test_other_workers_or_networks_are_on_hosts_with_cores_of_their_own() -> None:
    """Two ranks of 30 ms on one machine of one core; sixteen hosts do not share it."""
    crowded = calibrate(trained(wb.LayerwiseSGD(bucket_bytes=0), workers=2), cores=1)
    same = predict(crowded, wb.SynchronousSGD(), workers=2, draws=0)
    assert same.setting.cores == 1.0 and "predicted: 2 ranks on 1 shared cores (assumed" in same.cores
    for changed in (
        {"workers": 16},
        {"workers": 2, "bandwidth_bytes_per_s": RATE},
        {"workers": 2, "network": "ethernet-1g"},
    ):
        found = predict(crowded, wb.SynchronousSGD(), draws=0, **changed)  # type: ignore[arg-type]
        assert (
            found.setting.cores is None
            and "own cores" in found.cores
            and "2 ranks on 1 cores of one machine" in found.cores
        )
    many = predict(crowded, wb.SynchronousSGD(), workers=16, draws=0)
    kept = predict(crowded, wb.SynchronousSGD(), workers=16, cores="measured", draws=0)
    assert many.step_s < kept.step_s / 3 and "assumed" not in kept.cores and kept.other_cores is None
    assert many.other_step_s == pytest.approx(kept.step_s, rel=0.1)
    assert "--cores measured" in str(prediction_table([many])) and "own cores" in str(prediction_table([many]))
    assert predict(crowded, wb.SynchronousSGD(), workers=2, cores="own", draws=0).setting.cores is None
    with pytest.raises(ConfigError, match='"own"'):
        predict(crowded, wb.SynchronousSGD(), workers=2, cores="mine")  # type: ignore[arg-type]


def test_what_binds_is_named() -> None:
    slow = predict(fitted(), wb.SynchronousSGD(), workers=4, bandwidth_bytes_per_s=RATE / 20, draws=0)
    assert slow.bound == "wire"
    assert (
        predict(fitted(), wb.SynchronousSGD(), workers=4, bandwidth_bytes_per_s=RATE * 50, draws=0).bound == "compute"
    )
    assert (
        predict(fitted(), wb.SynchronousSGD(), workers=4, network="ethernet-100g", latency_s=0.05, draws=0).bound
        == "latency"
    )
    law = replace(fitted().pace, stragglers=(ShiftedExponential(shift=0.1, scale=5.0),))
    assert (
        predict(replace(fitted(), pace=law), wb.SynchronousSGD(), workers=32, network="ethernet-100g", draws=0).bound
        == "stragglers"
    )


def test_a_prediction_with_many_messages_simulates_a_bounded_number_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeAR with 76 parameters on 16 workers: 13 buckets, 6,240 messages a step.

    A closed form takes the place of each simulation.
    """
    workers, num_messages = 16, 0

    def by_formula(algorithm: wb.DeAR, problem: wb.Problem, *, steps: int, **given: Any) -> Run:
        nonlocal num_messages
        num_buckets = len(build_layout(trainable(problem.model()), algorithm.bucket_bytes).buckets)
        num_messages += steps * num_buckets * workers * 2 * (workers - 1)
        return wb.simulate(algorithm, problem, steps=steps, **{**given, "detail": "formula"})

    monkeypatch.setattr("workbench.calibration.fixed_point.simulate", by_formula)
    shapes = tuple((f"{number}", (256, 256) if number % 2 else (256,)) for number in range(76))
    measured = calibrate(trained(wb.LayerwiseSGD(bucket_bytes=0), workers=2), cores=1)
    pace = replace(measured.pace, forward_shares=(), backward_shares=())
    predict(
        replace(measured, shapes=replace(measured.shapes, parameters=shapes), pace=pace), wb.DeAR(), workers=workers
    )
    assert 0 < num_messages < 200_000, "a message takes about 12 microseconds"


def test_a_rate_is_scaled_by_the_part_of_it_that_carries_gradients() -> None:
    named = calibrate(trained(wb.LayerwiseSGD(bucket_bytes=0)), line_bytes_per_s=RATE / 0.95)
    assert named.line.efficiency == pytest.approx(0.95, rel=1e-3)
    assert named.network(2 * RATE).bandwidth_bytes_per_s == pytest.approx(2 * RATE * 0.95, rel=1e-3)
    assert fitted().network(2 * RATE).bandwidth_bytes_per_s == 2 * RATE


def test_communication_takes_cores_from_the_compute_it_hides_behind() -> None:
    """Pipe-SGD bound by compute, with a core for each rank: a step takes compute and the core's seconds of its bytes."""
    plain = replace(fitted(), host=replace(fitted().host, cores=2.0), pace=replace(fitted().pace, stragglers=()))
    # Where it was measured, at a hundredth of the rate
    costly = replace(plain, host=replace(plain.host, cpu_s_per_byte=4e-7))
    quick = {"workers": 2, "bandwidth_bytes_per_s": 100 * RATE, "cores": "measured", "draws": 0}
    without, beside = (predict(one, wb.PipeSGD(), **quick) for one in (plain, costly))  # type: ignore[arg-type]
    sent = fitted().shapes.num_bytes
    assert beside.step_s - without.step_s == pytest.approx(4e-9 * sent, rel=0.1)
    alone = replace(costly, host=replace(costly.host, cores=64.0))
    assert predict(alone, wb.PipeSGD(), **quick).step_s == pytest.approx(without.step_s, rel=0.01)  # type: ignore[arg-type]


def test_the_wire_is_no_quicker_than_the_cores_that_feed_it() -> None:
    """Communication takes 0.8 of a core while it lasts, at any rate: four ranks on two cores cannot all be served."""
    costly = replace(
        fitted(), host=replace(fitted().host, cores=2.0, cpu_s_per_byte=0.8 * fitted().line.s_per_byte.value)
    )
    for workers, slower in ((2, 1.0), (4, 4 * 0.8 / 2)):
        for rate in (RATE, 1e12):
            setting = make_setting(costly, workers, bandwidth_bytes_per_s=rate, cores="measured")
            _, network = effective_costs(costly, wb.SynchronousSGD(), setting)
            assert network.bandwidth_bytes_per_s == pytest.approx(rate / slower, rel=1e-6)


def test_a_usual_step_takes_at_least_what_its_work_takes_of_the_cores() -> None:
    """Four ranks on two cores, Pipe-SGD: simulated by slowed links and compute alone, a step is 1.2 % too short."""
    pace, host = replace(fitted().pace, stragglers=()), replace(fitted().host, cores=2.0, cpu_s_per_byte=1e-7)
    costly, algorithm = replace(fitted(), pace=pace, host=host), wb.PipeSGD()
    setting = make_setting(costly, 4, bandwidth_bytes_per_s=RATE, cores="measured")
    found = simulated(Scenario(calibration=costly, algorithm=algorithm, setting=setting, steps=12))
    assert found.slow is not None
    least_s = 4 * core_s(costly, algorithm, setting, found.run, found.slow) / 2.0
    assert midmean(step_seconds(found.run)) < 0.99 * least_s
    assert midmean(found.times) == pytest.approx(least_s, rel=1e-6)


def test_a_byte_costs_no_more_of_a_core_on_a_slower_link_and_less_on_a_quicker_one() -> None:
    costly = replace(fitted(), host=replace(fitted().host, cores=2.0, cpu_s_per_byte=1e-8))
    found = [core_s_per_byte(costly, costly.network(factor * RATE)) for factor in (0.5, 1.0, 4.0)]
    assert found == pytest.approx([1e-8, 1e-8, 2.5e-9], rel=1e-3)


SLOW_WIRE = Network(latency_s=1e-9, bandwidth_bytes_per_s=1e6)  # a sum takes longer than compute


@pytest.mark.parametrize(
    ("algorithm", "workers", "cores", "part", "expected"),
    [
        # Of two cores 1.2 are taken: 0.8 for a hop's end
        (
            wb.SynchronousSGD(),
            4,
            2.0,
            0.4,
            Slowness(compute=2.0, wire=1.0, hop=1.25),
        ),
        (wb.SynchronousSGD(), 4, 2.0, 0.8, Slowness(compute=2.0, wire=1.6, hop=2.0)),
        (wb.SynchronousSGD(), 2, 8.0, 0.8, Slowness()),
    ],
)
def test_threads_that_want_more_than_the_cores_are_slowed_alike(
    algorithm: Any, workers: int, cores: float, part: float, expected: Slowness
) -> None:
    """Where all compute, then all sum: p / c, and p times the wire's part over c."""
    run = trained(algorithm, workers, network=SLOW_WIRE, compute=replace(COMPUTE, stragglers=()), steps=8)
    found = slowness_in(run, cores=cores, threads=1, wire_part=part, s_per_byte=1e-6)
    assert astuple(found) == pytest.approx(astuple(expected), rel=1e-3)


def test_what_is_hidden_is_slowed_by_what_hides_it() -> None:
    """Pipe-SGD, two ranks on one core, the wire always busy: 0.25 of a core for each one's bytes leave 0.25 for compute."""
    run = trained(wb.PipeSGD(), 2, network=SLOW_WIRE, compute=replace(COMPUTE, stragglers=()), steps=12)
    found = slowness_in(run, cores=1.0, threads=1, wire_part=0.25, s_per_byte=1e-6)
    assert found.compute == pytest.approx(4.0, rel=0.01) and found.wire == pytest.approx(1.0, rel=0.01)


def test_a_sum_that_was_held_up_is_no_latency() -> None:
    """The whole gradient's sum takes what it took where it was measured, and a hop no longer than a message."""
    line = replace(fitted().line, latency_s=Estimate(5e-3), message_latency_s=Estimate(1e-3))
    held = replace(fitted(), line=line)
    found = without_hold_up(held)
    size = held.shapes.num_bytes
    assert found.line.latency_s.value == 1e-3 and all(draw["latency_s"] == 1e-3 for draw in found.draws)
    assert found.network().all_reduce_s(size, 4) == pytest.approx(held.network().all_reduce_s(size, 4), rel=1e-9)
    wire = found.line.s_per_byte.value - held.line.s_per_byte.value
    assert [
        new["s_per_byte"] - old.get("s_per_byte", held.line.s_per_byte.value)
        for old, new in zip(held.draws, found.draws, strict=True)
    ] == (pytest.approx([wire] * len(held.draws))), "also what other samples could have said"
    assert without_hold_up(fitted()) == fitted()


def test_servers_replies_that_meet_are_between_fair_shares_and_turns() -> None:
    """Four replies at once: the band holds both, and of a simulated network, which has turns, only these are said."""
    real = replace(
        fitted(),
        origin=replace(fitted().origin, runtime="torch"),
        pace=replace(fitted().pace, stragglers=()),
        line=replace(fitted().line, message_latency_s=Estimate(0.0)),  # so handling takes no time
    )
    simulated = replace(real, origin=replace(real.origin, runtime="simulated"))
    algorithm = wb.BackupSGD(backups=0)
    between, turns = (predict(one, algorithm, workers=4, draws=0) for one in (real, simulated))
    fair = real.shapes.num_bytes / RATE * 2  # by which the first of three equal replies is later
    assert between.step_s - turns.step_s == pytest.approx(fair / 2, rel=0.05)
    low, high = band(1.0)
    assert between.low_s / low == pytest.approx(turns.step_s, rel=2e-3)  # a quantile of both together
    assert between.high_s / high - turns.step_s == pytest.approx(fair, rel=0.05)
    pairs = (predict(one, algorithm, workers=2, draws=0).step_s for one in (real, simulated))
    assert len({f"{seconds:.9f}" for seconds in pairs}) == 1


def test_where_and_what_is_predicted_must_make_sense() -> None:
    for given, words in (
        ({"workers": 0}, "workers=0"),
        ({"workers": 2, "network": "ethernet-10g", "bandwidth_bytes_per_s": 1e9}, "not both"),
        ({"workers": 2, "network": "ethernet-11g"}, "ethernet-10g"),
        ({"workers": 2, "bandwidth_bytes_per_s": -1.0}, "above 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            predict(fitted(), wb.SynchronousSGD(), **given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="an algorithm"):
        predict(fitted(), "pipe-sgd", workers=2)  # type: ignore[arg-type]


# -- the probe -------------------------------------------------------------------------------------------------------


def test_a_probe_tells_latency_from_bandwidth() -> None:
    run = trained(wb.SynchronousSGD(), workers=2)
    blind = calibrate(run)
    sizes = (1024, 1 << 20)
    sums = tuple((size, 2 * ALPHA + size / RATE) for size in sizes)
    told = Probe(
        num_workers=2,
        sums=sums,
        messages=((1024, 3e-4),),
        sum_s_per_byte=1e-10,
        codecs=(("truncate16", 1e-10, 2e-10),),
        cpu_s_per_byte=1e-9,
    )
    found = with_probe(blind, told)
    assert found.line.latency_s.value == pytest.approx(ALPHA, rel=0.06)  # of a message of 1 kB
    assert 1 / found.line.s_per_byte.value == pytest.approx(RATE, rel=2e-3)
    assert found.line.message_latency_s.value == 3e-4 and found.host.cpu_s_per_byte == 1e-9
    assert not any("--probe" in note for note in found.notes)


def test_one_process_probes_its_own_work() -> None:
    found = probe(SoloTransport(), lambda what: Deadline(what, lambda: None, 10.0), ["truncate16", "linear8"])
    assert found.sums == found.messages == () and 0 < found.sum_s_per_byte < 1e-7
    assert [name for name, *_ in found.codecs] == ["truncate16", "linear8"] and all(
        min(rest) > 0 for _, *rest in found.codecs
    )
    assert Probe.from_record(json.loads(json.dumps(found.as_record()))) == found


# -- what is recommended ---------------------------------------------------------------------------------------------


def known_codecs() -> Calibration:
    return replace(
        fitted(), line=replace(fitted().line, codecs=(("truncate16", 1e-10, 2e-10), ("linear8", 8e-10, 8e-10)))
    )


def grid(workers: int) -> list[Any]:
    return [
        one for one in candidates(workers, num_bytes=known_codecs().shapes.num_bytes) if getattr(one, "shards", 1) <= 2
    ]


def test_the_recommended_algorithm_is_hardly_slower_than_the_best_of_the_whole_grid() -> None:
    pruned = whole = 0
    for workers, network in product((2, 3, 4), ("ethernet-1g", "ethernet-10g", "ethernet-100g")):
        known = known_codecs()
        among = grid(workers)
        found = recommend(known, workers=workers, network=network, among=among, runners_up=0, draws=0)
        setting = make_setting(known, workers, network)
        times = {
            number: step_s(known, one, setting, 16, 7) * workers / (workers - (getattr(one, "backups", 0) or 0))
            for number, one in enumerate(among)
        }
        mine = times[among.index(found.best.algorithm)]
        assert mine <= 1.05 * min(times.values()), (workers, network, found.reason)
        pruned, whole = pruned + found.num_simulated, whole + len(among)
    assert pruned < 0.7 * whole


def test_exact_algorithms_only() -> None:
    found = recommend(known_codecs(), workers=2, network="ethernet-1g", exact=True)
    assert all(recipe(choice.algorithm) == "exact" for choice in found.choices)
    assert "by the time of a step alone" in found.reason


def test_steps_to_a_loss_are_measured_or_unknown() -> None:
    runs = [
        wb.simulate(algorithm, wb.problems.digits_softmax(), workers=2, epochs=2, seed=0, compute=COMPUTE)
        for algorithm in (wb.SynchronousSGD(), wb.PipeSGD())
    ]
    target = max(run.evaluations()[-1]["test_loss"] for run in runs)
    told = Convergence.from_runs(runs, target)
    assert set(told.steps) == {"exact", "late by 1"} and told.of(wb.LayerwiseSGD()) == told.steps["exact"]
    assert told.of(wb.PipeSGD(width=3)) is None
    never = Convergence.from_runs(runs, 1e-9)
    assert set(never.steps.values()) == {None}
    with pytest.raises(ConfigError, match=r"none of .* known for no recipe .* give runs"):
        recommend(known_codecs(), workers=2, network="ethernet-1g", convergence=never)
    slow = replace(told, steps={"exact": 100.0, "late by 1": 1000.0})
    found = recommend(known_codecs(), workers=2, network="ethernet-1g", convergence=slow)
    assert recipe(found.best.algorithm) == "exact" and found.best.loss_s == pytest.approx(
        100 * found.best.prediction.step_s
    )
    with pytest.raises(ConfigError, match="different problems"):
        Convergence.from_runs([*runs, trained(wb.SynchronousSGD(), steps=6)], target)
    given: dict[str, Any] = {"workers": 2, "epochs": 2, "seed": 0, "compute": COMPUTE}
    usual, large = (
        wb.simulate(wb.SynchronousSGD(), wb.problems.digits_softmax(), batch_size=size, **given) for size in (32, 64)
    )
    assert Convergence.from_runs([*runs, usual], target).steps == told.steps  # 32 is the problem's own
    with pytest.raises(ConfigError, match=r"batch sizes .*with 32 samples each.*with 64 samples each"):
        Convergence.from_runs([*runs, large], target)


def test_the_recommendation_is_bounded_tells_its_progress_and_says_what_it_left_out() -> None:
    told = list[tuple[int, int, float]]()
    found = recommend(
        known_codecs(),
        workers=4,
        network="ethernet-1g",
        budget_s=0.0,
        runners_up=0,
        draws=0,
        progress=lambda *said: told.append(said),
    )
    assert found.num_simulated == 1 and found.num_left_out > 0 and "(raise --budget)" in str(found)
    assert [done for done, _, _ in told] == [1] and told[0][1] > 1 and told[0][2] == 0.0


def test_rows_tell_codecs_apart_and_say_what_did_not_reach_the_loss() -> None:
    known = known_codecs()
    among = [wb.PipeSGD(width=2, collective=way) for way in (Native(), Ring(codec=Truncate16()), Ring(codec=Linear8()))]
    found = recommend(known, workers=2, network="ethernet-100g", among=among, draws=0)
    rows = [choice.as_record()["label"] for choice in found.choices]
    assert len(set(rows)) == len(rows) and "truncate16" in str(found)
    steps = Convergence(steps={"exact": 100.0, "late by 1": None}, target_loss=0.5, source="2 runs")
    chosen = recommend(known, workers=2, network="ethernet-1g", convergence=steps, draws=0)
    assert "not reached: late by 1" in str(chosen) and chosen.as_record()["not_reached"] == ["late by 1"]


# -- from a shell ----------------------------------------------------------------------------------------------------


def test_from_a_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained(wb.LayerwiseSGD(bucket_bytes=0)).save(tmp_path / "run")
    file = tmp_path / "c.json"
    assert main(["calibrate", str(folder), "-o", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["origin"]["num_workers"] == 4
    assert (
        main(
            [
                "predict",
                str(file),
                "--algorithm",
                "pipe-sgd",
                "--set",
                "width=3",
                "--workers",
                "2,4",
                "--rate",
                "100mbit,1gbit",
                "--json",
            ]
        )
        == 0
    )
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["workers"], row["line_bytes_per_s"]) for row in rows] == [
        (2, 1.25e7),
        (2, 1.25e8),
        (4, 1.25e7),
        (4, 1.25e8),
    ]
    assert main(["predict", str(file), "--codec", "truncate16", "--network", "ethernet-1g"]) == 0
    assert "1 Gbit/s Ethernet" in capsys.readouterr().out
    assert main(["recommend", str(file), "--workers", "2", "--network", "ethernet-1g", "--exact", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["choices"][0]["recipe"] == "exact"


@pytest.mark.parametrize("quiet", ["", "--quiet", "--json"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["predict", "--workers", "2,4"], r"1 of 2 predictions after [\d:]+, [\d:]+ left"),
        (
            ["recommend", "--workers", "2", "--exact"],
            r"1 of \d+ candidates for 2 workers after .* left, at most \d:\d\d",
        ),
    ],
    ids=["predict", "recommend"],
)
def test_progress_has_a_total_and_the_time_left_and_may_be_turned_off(
    words: list[str],
    said: str,
    quiet: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)  # as after 30 seconds
    file = calibrate(trained(wb.LayerwiseSGD(bucket_bytes=0))).save(tmp_path / "c.json")
    capsys.readouterr()
    assert main([words[0], str(file), *words[1:], *filter(None, [quiet])]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert lines == [] if quiet else any(re.fullmatch(said, line) for line in lines), lines


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["calibrate", "no-such-run"], "no run"),
        (["calibrate", "no-such.json"], "cannot be read"),
        (["predict", "c.json", "--workers", "two"], "cannot be read"),
        (["recommend", "c.json", "--target-loss", "0.1"], "cannot be read"),
    ],
)
def test_mistakes_from_a_shell(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], runs: Path
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_rates() -> None:
    assert parse_rates("1gbit") == [1.25e8] and parse_rates("") == []
    with pytest.raises(ConfigError, match=r"--rate: .*100mbit"):
        parse_rates("1 furlong")


@pytest.mark.parametrize(
    ("sigma", "runtime", "says"),
    [
        (0.05, "torch", None),  # 10 to 90 %: 13 % of the median
        (0.2, "torch", "`workbench train`.*`workbench calibrate last`"),  # 52 %
        (0.2, "torch.profiler", "`workbench calibrate TRACE...`"),
        (0.2, "simulated", None),  # nothing else ran in virtual time
    ],
)
def test_compute_that_varies_as_on_a_busy_machine_is_noted_with_the_command_that_repeats_it(
    sigma: float, runtime: str, says: str | None
) -> None:
    run = trained(wb.LayerwiseSGD(bucket_bytes=0), compute=replace(COMPUTE, stragglers=(Lognormal(sigma=sigma),)))
    observed, source = observe(run), fitted()
    origin = replace(source.origin, runtime=runtime)
    notes = [note for note in fit(observed, origin, source.shapes).notes if "10 to 90 %" in note]
    assert len(notes) == (says is not None)
    if says:
        assert re.search(says, notes[0]) and "idle machine" in notes[0]
        low, high = map(float, re.findall(r"0\.\d+|1\.\d+", notes[0])[:2])
        assert (low, high) == pytest.approx((np.exp(-1.2816 * sigma), np.exp(1.2816 * sigma)), abs=0.06), (
            "quantiles of the lognormal"
        )
