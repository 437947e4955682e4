"""Runs as frames of pandas and polars."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

import pytest

import workbench as wb
from tests.laws import tiny
from workbench.analysis.frames import What, frame
from workbench.collectives import Ring
from workbench.errors import ConfigError
from workbench.trace.run import Run

for name in ("pandas", "polars"):  # polars sets a variable of the environment when it is imported
    with suppress(ModuleNotFoundError):
        import_module(name)


@pytest.fixture(scope="module")
def run() -> Run:
    return wb.simulate(
        wb.SynchronousSGD(collective=Ring()), tiny.problem(), workers=3, steps=4, batch_size=3, network="ethernet-1g"
    )


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_frames_hold_what_the_run_does(run: Run, package: str) -> None:
    pytest.importorskip(package)
    take = run.to_pandas if package == "pandas" else run.to_polars
    steps, evaluations, metrics, spans, messages = (
        take(what) for what in ("steps", "evaluations", "metrics", "spans", "messages")
    )
    assert list(steps["loss"]) == [row["loss"] for row in run.steps()]
    assert list(evaluations["test_loss"]) == [row["test_loss"] for row in run.evaluations()]
    assert len(metrics) == sum(map(len, run.metrics.values())) and set(metrics["kind"]) == {"step", "evaluation"}
    assert len(spans) == len(run.spans.table) and list(spans["kind"]) == run.spans.kind_names.tolist()
    assert len(messages) == len(run.messages[0]) == 4 * 3 * 2 * 2
    assert all(came >= began for came, began in zip(messages["receive_end_s"], messages["send_start_s"], strict=True))


def test_a_frame_that_there_is_not_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: Any = "losses"
    with pytest.raises(ConfigError, match="choose one of steps, evaluations, metrics, spans, messages"):
        frame(run, wrong)
    what: What = "steps"
    with pytest.raises(ConfigError, match=r"pip install 'sgd-workbench\[no_such_package\]'"):
        frame(run, what, "no_such_package")
