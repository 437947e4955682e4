"""Grids: a file becomes cells with keys, and an impossible cell is refused before any cell runs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.cli.sweep import _Line
from workbench.errors import ConfigError
from workbench.experiments import sweep, sweeper
from workbench.experiments.cell_states import claim, conclude, is_alive, read_attempts
from workbench.experiments.fork_cells import COMMAND, start_fork_server
from workbench.experiments.grid import Cell, read_grid
from workbench.experiments.sweep_result import CellState, SweepResult, state_of
from workbench.experiments.sweeper import Progress
from workbench.experiments.yaml_file import read_yaml
from workbench.run_spec import parse_train, resolve

BASE: dict[str, Any] = {"problem": "digits-mlp", "runtime": "simulated", "steps": 3}


def grid_of(text: str, folder: Path) -> Any:
    path = folder / "my-grid.yaml"
    path.write_text(text)
    return read_grid(path)


def values(source: dict[str, Any]) -> list[dict[str, Any]]:
    grid = read_grid({"name": "test", "base": BASE, **source})
    return [{name: value for name, value in cell.values.items() if name not in BASE} for cell in grid.cells]


def test_axes_multiply_and_the_last_varies_fastest() -> None:
    found = values({"axes": {"algorithm": ["synchronous-sgd", "pipe-sgd"], "seed": [0, 1]}})
    assert found == [
        {"algorithm": algorithm, "seed": seed} for algorithm in ("synchronous-sgd", "pipe-sgd") for seed in (0, 1)
    ]


def test_an_algorithm_brings_its_settings_and_an_axis_that_is_no_option_sets_several() -> None:
    found = values(
        {
            "axes": {
                "algorithm": ["dear", {"pipe-sgd": {"width": 3}}],
                "size": [{"workers": 2, "lr": 0.1}, {"workers": 4, "lr": "2e-1"}],
            }
        }
    )
    assert found == [
        {**algorithm, **size}
        for algorithm in ({"algorithm": "dear"}, {"algorithm": "pipe-sgd", "set.width": 3})
        for size in ({"workers": 2, "lr": 0.1}, {"workers": 4, "lr": 0.2})
    ]


def test_exclude_takes_away_and_include_adds_on_top_of_base() -> None:
    axes = {"algorithm": ["synchronous-sgd", {"pipe-sgd": {"width": 2}}], "workers": [2, 4], "seed": [0, 1, 2]}
    rules = [{"algorithm": "pipe-sgd", "seed": [1, 2]}, {"set.width": 2, "workers": 4}]
    found = values(
        {
            "axes": axes,
            "exclude": rules,
            "include": [{"algorithm": "dear"}, {"algorithm": "pipe-sgd", "set": {"width": 2}, "workers": 2, "seed": 0}],
        }
    )
    assert len(found) == 6 + 1 + 1
    assert [cell for cell in found if cell["algorithm"] == "pipe-sgd"] == [
        {"algorithm": "pipe-sgd", "set.width": 2, "workers": 2, "seed": 0}
    ]
    assert found[-1] == {"algorithm": "dear"}, "what is there already is not there twice"


def test_settings_in_the_base_are_those_of_the_name_that_they_are_written_with() -> None:
    base = {**BASE, "algorithm": {"local-sgd": {"every": 2}}, "optimizer": {"SGD": {"momentum": 0.9}}, "lr": 0.1}
    algorithms, others = ["local-sgd", "diloco"], {"optimizer": "RMSprop", "set.every": 3}
    grid = read_grid({"name": "test", "base": base, "axes": {"algorithm": algorithms}, "include": [others]})
    found = [{name: value for name, value in cell.values.items() if name not in BASE} for cell in grid.cells]
    sgd = {"optimizer": "SGD", "optimizer_set.momentum": 0.9, "lr": 0.1}
    assert found == [
        {"algorithm": "local-sgd", "set.every": 2, **sgd},
        {"algorithm": "diloco", **sgd},
        {"algorithm": "local-sgd", "optimizer": "RMSprop", "set.every": 3, "lr": 0.1},
    ]


def test_include_alone_is_a_list_of_cells() -> None:
    assert values({"include": [{"algorithm": "dear"}]}) == [{"algorithm": "dear"}]


def test_a_file_is_read_as_its_writer_means_it(tmp_path: Path) -> None:
    text = "base: {algorithm: pipe-sgd, lr: 1e-3, set: {collective: ring:truncate16}, option: {hidden: [64, 32]}}\naxes: {seed: [0, 1]}\n"
    grid = grid_of(text, tmp_path)
    assert grid.name == "my-grid"
    words = grid.cells[0].train_arguments()
    assert words == [
        "train",
        "pipe-sgd",
        "--lr=0.001",
        "--set=collective=ring:truncate16",
        "--option=hidden=[64, 32]",
        "--seed=0",
    ]


@given(st.permutations(["algorithm", "workers", "seed", "set.width"]), st.integers(0, 5))
def test_the_key_is_of_what_is_asked_for_and_not_of_how_it_is_written(order: list[str], seed: int) -> None:
    asked = {"algorithm": "pipe-sgd", "workers": 2, "seed": seed, "set.width": 2}
    cell = Cell(values={name: asked[name] for name in order}, axes={"seed": seed})
    assert cell.key == Cell(values=asked).key
    assert cell.key != Cell(values={**asked, "seed": seed + 1}).key
    assert cell.key != Cell(values=asked, notebook="00-tour").key


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"axis": {}}, "did you mean axes"),
        ({"name": "a/b", "include": [{"algorithm": "dear"}]}, "letters, digits"),
        ({"base": {"algoritm": "dear"}}, "did you mean algorithm"),
        ({"base": {"method": "dear"}}, "'method': did you mean algorithm"),
        ({"axes": {"method": [{"pipe-sgd": {"width": 2}}]}}, "'method': did you mean algorithm"),
        ({"axes": {"algorithm": ["dear"]}, "exclude": [{"method": "dear"}]}, "'method': did you mean algorithm"),
        ({"base": {"algorithm": "pipe-sdg"}}, "did you mean pipe-sgd"),
        ({"base": {"algorithm": "pipe-sgd", "set": {"widht": 2}}}, "did you mean width"),
        ({"base": {"algorithm": "pipe-sgd", "set": 2}}, "name: value"),
        ({"base": {"algorithm": "pipe-sgd", "workers.x": 2}}, "has no settings"),
        ({"base": {"algorithm": {"pipe-sgd": 2}}}, "one name and its settings"),
        ({"base": {"algorithm": "pipe-sgd", "resume": "last"}}, "resume"),
        ({"base": {"algorithm": "pipe-sgd", "workers": "two"}}, "invalid int value"),
        ({"base": {"algorithm": "pipe-sgd", "workers": 0}}, "give 1 or more"),
        (
            {"base": {"algorithm": "pipe-sgd", "workers": [2, 4]}},
            r"workers: \[2, 4\]: give one value; several.* under axes",
        ),
        ({"axes": {"algorithm": ["dear"], "lr": [[0.1, 0.2]]}}, "under axes"),
        ({"base": {"algorithm": "pipe-sgd", "runtime": "torch", "network": "ethernet-10g"}}, "--runtime simulated"),
        ({"base": {"algorithm": "pipe-sgd", "network": "ethernet-11g", "runtime": "simulated"}}, "ethernet-10g"),
        ({"axes": {"seed": [0]}}, "it has no algorithm"),
        ({"axes": {"seed": 0}}, "list of values"),
        ({"axes": {"algorithm": ["dear"]}, "exclude": [{"algorithm": "pipe-sgd"}]}, "matches no cell"),
        ({"axes": {"algorithm": ["dear"]}, "exclude": [{"algorithm": "dear"}]}, "no cell is left"),
        ({"base": {"algorithm": "dear"}, "jobs": 0}, "1 or more"),
        ({"base": {"algorithm": "dear"}, "timeout_s": -1}, "above 0"),
        ({"notebook": "10-scalling"}, "did you mean 10-scaling"),
        ({"notebook": "10-scaling", "axes": {"seedz": [1]}}, "did you mean seeds"),
    ],
)
def test_what_cannot_run_is_refused_with_the_fix(source: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_grid({"name": "test", **source})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base: {algorithm: dear}\nbase: {algorithm: pipe-sgd}\n", "line 2, column 1: 'base' is given twice"),
        ("base: [", "line 1"),
        ("- 1\n", "name: value"),
    ],
)
def test_a_damaged_file_is_told_with_its_place(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        grid_of(text, tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_grid(tmp_path / "none.yaml")


def test_anchors_and_merges_work(tmp_path: Path) -> None:
    grid = grid_of("base: &b {algorithm: dear, seed: 1}\ninclude:\n- {<<: *b, seed: 2}\n", tmp_path)
    assert grid.cells[0].values == {"algorithm": "dear", "seed": 2}


def test_a_cell_is_claimed_once_and_taken_over_only_from_who_is_gone(tmp_path: Path) -> None:
    (cell,) = read_grid({"name": "test", "base": {"algorithm": "dear"}}).cells
    mine = claim(tmp_path, "test", cell, 0)
    assert mine is not None
    assert claim(tmp_path, "test", cell, 0) is None, "somebody else had it"
    assert is_alive(mine)
    # Its number is another's now
    dead = {
        **mine.record,
        "process_started": 1.0,
        "process_begun": ["an earlier start of the machine", 1.0],
    }
    for record, seconds_ago, alive in (
        (dead, 0, False),
        ({**mine.record, "host": "elsewhere"}, 0, True),
        ({**mine.record, "host": "elsewhere"}, 1000, False),
        (None, 0, True),  # half written
        (None, 1000, False),
    ):
        mine.path.write_text("{" if record is None else json.dumps(record))
        os.utime(mine.path, (time.time() - seconds_ago,) * 2)
        (found,) = read_attempts(tmp_path).values()
        assert found.state == "running"
        assert is_alive(found) == alive
        assert state_of(cell, found, tmp_path).state == ("running" if alive else "open")
    assert conclude(mine, "failed", error="why").path == mine.path
    assert read_attempts(tmp_path, cell.key)[cell.key].record["error"] == "why"
    later = claim(tmp_path, "test", cell, 1)
    assert later is not None and read_attempts(tmp_path)[cell.key].number == 1, "the newest counts"


def test_a_date_is_refused_as_no_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in quotes"):
        grid_of("base: {algorithm: dear, option: {day: 2026-11-21}}\n", tmp_path)


def test_numbers_of_every_form_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "numbers.yaml"
    path.write_text("a: 1.25e9\nb: .5e3\nc: 1.e-2\nd: 1e3\ne: -2.5E+1\nf: e5\ng: 1.5\n")
    assert read_yaml(path) == {"a": 1.25e9, "b": 500.0, "c": 0.01, "d": 1000.0, "e": -25.0, "f": "e5", "g": 1.5}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"num_micro": 4}, {"num_micro": 4}),
        ({"micro-batches": 4}, {"num_micro": 4}),
        ({"trace_steps": None}, {"trace_steps": None}),
        ({"trace_steps": 7, "lr": None, "compile": False}, {"trace_steps": 7, "lr": None, "compile": False}),
        ({"clip_norm": "1e-2", "evaluate_every": 0}, {"clip_norm": 0.01, "evaluate_every": 0}),
    ],
    ids=str,
)
def test_a_cell_trains_with_the_settings_of_the_grid(asked: dict[str, Any], expected: dict[str, Any]) -> None:
    (cell,) = read_grid({"name": "test", "base": {**BASE, "algorithm": "dear", **asked}}).cells
    *_, settings = resolve(parse_train(cell.train_arguments()[1:]))
    assert {name: getattr(settings, name) for name in expected} == expected


def test_a_server_that_died_is_replaced_and_its_cell_told(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first server ends before it writes anything, the next works."""
    commands = iter([("sh", "-c", "exit 3"), COMMAND])
    monkeypatch.setattr(sweeper, "start_fork_server", lambda env: start_fork_server(env, next(commands)))
    found = sweep(
        {"name": "grid", "base": {**BASE, "algorithm": "dear", "timing_only": True}, "axes": {"seed": [0, 1]}}
    )
    assert [item.state for item in found.cells] == ["failed", "finished"]
    assert "exit status 3" in found.failed[0].error


def test_a_long_cell_is_heard_of(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody on another machine would take over a cell whose file is not touched."""
    monkeypatch.setattr(sweeper, "HEARTBEAT_S", 0.0)
    ages = []

    def watch(progress: sweeper.Progress) -> None:
        for path in (runs / "sweeps" / "grid").glob("*-000.json") if progress.running else ():
            ages.append(path.stat().st_mtime)
            os.utime(path, (0, 0))  # as if it had not changed for long

    sweep({"name": "grid", "base": {**BASE, "algorithm": "dear", "timing_only": True}}, watch=watch)
    assert len(ages) >= 2 and min(ages) > 0, "each look found it touched since the last"


def test_a_grid_of_a_notebook_has_its_parameters_as_axes() -> None:
    grid = read_grid({"name": "test", "notebook": "10-scaling", "base": {"steps": 5}, "axes": {"seeds": [1, 2]}})
    assert [cell.values for cell in grid.cells] == [{"steps": 5, "seeds": 1}, {"steps": 5, "seeds": 2}]
    assert [cell.label for cell in grid.cells] == ["seeds=1", "seeds=2"]


def test_exit_status_is_zero_only_when_every_cell_is_finished(tmp_path: Path) -> None:
    cells = read_grid({"name": "test", "axes": {"algorithm": ["dear", "pipe-sgd"]}}).cells
    for state, status in (("finished", 0), ("failed", 1), ("open", 1), ("running", 1)):
        found = SweepResult("test", (CellState(cells[0], "finished"), CellState(cells[1], state)), tmp_path)  # type: ignore[arg-type]
        assert found.exit_status == status
        assert "pipe-sgd" in str(found.table())


def test_a_log_says_how_long_a_sweep_still_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell = CellState(Cell(values={}, axes={"seed": 0}), "finished")
    _Line().show(Progress(1, 0, 4, ("seed=1",), 75.0, cell))
    assert capsys.readouterr().err == "1/4  seed=0: finished in 0.0 s, 1:15 left\n"
