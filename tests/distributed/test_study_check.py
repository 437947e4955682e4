"""A study's check: the best few train on real ranks, next to predictions."""

from __future__ import annotations

from pathlib import Path

import pytest

import workbench as wb
from workbench.errors import ConfigError

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("forked_starts"),
]


@pytest.mark.usefixtures("no_process_left")
def test_predictions_stand_beside_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path))
    problem = wb.problems.digits_mlp()
    study = wb.study(
        problem,
        algorithms=[wb.SynchronousSGD(), wb.LocalSGD(every=4)],
        networks="1gbit",
        workers=2,
        target=("accuracy", 0.6),
        seeds=1,
        minutes=1.0,
        quiet=True,
    )
    with wb.Cluster(2, quiet=True) as cluster:
        found = study.check(cluster, to_target=True, rounds=1)
        slept = study.check(cluster, slept=True, network="1gbit", steps=8, rounds=1, quiet=True)
        with pytest.raises(ConfigError, match="to_target"):
            study.check(cluster, algorithms=[wb.DeAR()], to_target=True)
        with pytest.raises(ConfigError, match="leave to_target out"):
            study.check(cluster, slept=True, to_target=True)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("check: ")]
    total = 1 + len(found.rows)  # the run to which costs are fitted, and one round
    assert said[0] == f"check: {total} trainings"
    assert [line.split(":")[1] for line in said[1:]] == [f" {number} of {total}" for number in range(1, total + 1)]
    assert "LocalSGD(every=4), predicted" in "\n".join(said)
    names = {row["algorithm"] for row in found.rows}
    assert "SynchronousSGD" in names
    for row in found.rows:
        (run,) = found.runs[row["algorithm"]]
        assert run.num_ranks == 2
        assert row["predicted_s"] > 0
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
        assert row["inside"] == (row["low_s"] <= row["measured_s"] <= row["high_s"])
        assert row["target_measured_s"] is None or row["target_measured_s"] > 0
    assert f"{found.worst:.0%}" in str(found)
    predicted = {cell.name: cell.time for cell in study.cells}
    for row in slept.rows:
        said = predicted[row["algorithm"]]
        found_s, said_s = (row["low_s"], row["predicted_s"], row["high_s"]), (said.low_s, said.step_s, said.high_s)
        assert found_s == pytest.approx(said_s, rel=1e-6), "as the study says, for own cores"
        assert not row["fitted"]
        (run,) = slept.runs[row["algorithm"]]
        assert run.slept
    assert "compute (slept)" in str(slept) and "compute (slept)" not in str(found)
    assert [row["algorithm"] for row in found.rows if row["fitted"]] == ["SynchronousSGD"]
    outside = [row["algorithm"] for row in found.rows if not row["inside"] and not row["fitted"]]
    assert all(name in found.verdict for name in outside)


def test_one_rank_cannot_check() -> None:
    problem = wb.problems.digits_softmax()
    study = wb.study(problem, algorithms=[wb.SynchronousSGD()], workers=2, minutes=0.2, quiet=True)
    with wb.Cluster(1, quiet=True) as cluster, pytest.raises(ConfigError, match="at least 2"):
        study.check(cluster)
