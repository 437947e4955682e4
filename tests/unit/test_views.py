"""Numbers and figures of a run are the same from a record in memory, from the store, from a profile and from a handle."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench.analysis as analysis
import workbench.plots as plots
from tests.laws import tiny
from workbench.algorithms import SynchronousSGD
from workbench.clusters.run_handle import RunHandle
from workbench.collectives import Ring
from workbench.replica.trained import trained_model
from workbench.runtimes.simulator.simulate import simulate
from workbench.trace import from_profiler
from workbench.trace.run import Run
from workbench.trace.views import Views

LATER = slice(1, 3)
ASKED: dict[str, tuple[Callable[[Any], Any], Callable[[Run], Any]]] = {
    "summary": (lambda one: one.summary(), analysis.summary),
    "overlap": (lambda one: str(one.overlap(LATER)), lambda run: str(analysis.run_overlap(run, LATER))),
    "critical_path": (
        lambda one: str(one.critical_path(LATER)),
        lambda run: str(analysis.run_critical_path(run, LATER)),
    ),
    "parts": (lambda one: str(one.parts(LATER)), lambda run: str(analysis.run_parts(run, LATER))),
    "timeline": (lambda one: one.timeline(LATER).to_json(), lambda run: plots.timeline(run, LATER).to_json()),
    "trace_viewer": (
        lambda one: one.trace_viewer(LATER, names=["run"]).content["runs"][0]["columns"],
        lambda run: plots.TraceViewer(run, LATER).content["runs"][0]["columns"],
    ),
    "per_step": (lambda one: one.per_step(LATER).to_json(), lambda run: plots.per_step(run, LATER).to_json()),
    "to_pandas": (lambda one: one.to_pandas().to_csv(), lambda run: analysis.frame(run).to_csv()),
    "to_polars": (
        lambda one: one.to_polars("evaluations").write_csv(),
        lambda run: analysis.frame(run, "evaluations", "polars").write_csv(),
    ),
    "model": (
        lambda one: str(one.model(tiny.problem()).state_dict()),
        lambda run: str(trained_model(run, tiny.problem()).state_dict()),
    ),
    "curves": (lambda one: one.curves("steps").to_json(), lambda run: plots.curves([run], "steps").to_json()),
}


@pytest.fixture(scope="module")
def run() -> Run:
    return simulate(SynchronousSGD(collective=Ring()), tiny.problem(), workers=2, steps=3)


@pytest.mark.parametrize("name", ASKED)
def test_a_run_answers_as_the_function_does_in_memory_and_from_a_folder(run: Run, name: str, tmp_path: Path) -> None:
    ask, function = ASKED[name]
    assert ask(run) == function(run)
    stored = Run.load(run.save(tmp_path / "kept"))
    assert ask(stored) == function(stored)


def test_a_run_and_a_handle_offer_the_same() -> None:
    offered = {name for name, value in vars(Views).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert offered == set(ASKED)
    for kind in (Run, RunHandle):
        assert issubclass(kind, Views)
        assert not offered & vars(kind).keys(), f"{kind.__name__} has one of its own"


def test_a_notebook_shows_a_runs_summary(run: Run) -> None:
    shown = run._repr_html_()
    assert "SynchronousSGD" in shown and "2 ranks" in shown and "<table>" in shown
    assert "&lt;Run memory" in shown


def test_a_run_is_read_without_what_draws_and_analyses() -> None:
    code = "import sys, workbench.trace; sys.exit(any(name in sys.modules for name in ('plotly', 'workbench.analysis', 'workbench.plots')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_profile_says_its_ranks_and_that_it_has_no_parts(tmp_path: Path) -> None:
    model = tiny.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 6, dtype=torch.float64)).sum().backward()
            optimizer.step()
    profile.export_chrome_trace(str(tmp_path / "profile.json"))
    found = from_profiler(tmp_path / "profile.json")
    assert "1 rank," in repr(found)
    assert found.summary()["workers"] == 1
    assert str(found.parts()).startswith("This trace has no messages"), str(found.parts())
    assert found.overlap().num_steps == 3


def test_a_run_with_messages_has_no_note(run: Run) -> None:
    assert run.parts().note == ""
    assert run.parts().total()["wire_s"] > 0
