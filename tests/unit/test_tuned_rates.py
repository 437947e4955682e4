"""Tuned learning rates: the law over the record, what finds a row, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.benchmarks.tune_rates import PLANS, SEEDS, WIDTH, describe_problem, is_near, mean_loss, train
from workbench import algorithms, problems
from workbench.cli.main import main
from workbench.codecs import Truncate16
from workbench.collectives import Ring
from workbench.errors import ConfigError
from workbench.problems.tuned_rates import TunedRate, rates_of, read_record
from workbench.run_spec import check_train, parse_train, resolve

ROWS: list[TunedRate] = [row for name in read_record()["problems"] for row in rates_of(name)]


def named(row: TunedRate) -> str:
    return f"{row.problem}: {row}"


def algorithm_of(row: TunedRate) -> Any:
    return algorithms.recorded({"name": row.algorithm, "settings": row.settings})


def test_problems_and_rows_of_the_record_agree() -> None:
    assert list(read_record()["problems"]) == [name for name in PLANS if rates_of(name)]
    assert {row["problem"] for row in read_record()["rows"]} == set(read_record()["problems"])
    assert len({named(row) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_the_best_rate_is_inside_a_grid_of_factors_of_2(row: TunedRate) -> None:
    rates = [tried["lr"] for tried in row.grid]
    assert len(rates) >= WIDTH and all(after == 2 * before for before, after in pairwise(rates))
    best = min(row.grid, key=mean_loss)
    place = row.grid.index(best)
    assert best["lr"] == row.lr and 0 < place < len(rates) - 1
    near = [tried for tried in row.grid if is_near(tried, best)]
    assert all(len(tried["losses"]) == SEEDS for tried in [*row.grid[place - 1 : place + 2], *near])
    assert mean_loss(best) == pytest.approx(row.loss, abs=1e-5)


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_every_row_is_found_by_its_algorithm(row: TunedRate) -> None:
    problem = problems.get(row.problem)
    assert problem.tuned_lr(algorithm_of(row), workers=row.workers) == row.lr


@pytest.mark.parametrize("name", read_record()["problems"])
def test_the_record_is_of_the_problem_as_it_is(name: str) -> None:
    """Optimizer, sizes, digest of the data. The text of the library differs between versions of Python: its note says so."""
    recorded = read_record()["problems"][name]
    found = describe_problem(problems.get(name))
    if found.get("note") != recorded.get("note"):
        found = {**found, "note": recorded["note"], "data": recorded["data"]}
    assert found == recorded


def test_a_row_is_found_again() -> None:
    row = next(row for row in rates_of("mnist1d-mlp") if row.settings == {"width": 3})
    tried = next(tried for tried in row.grid if tried["lr"] == row.lr)
    found = train(problems.get(row.problem), algorithm_of(row), row.workers, row.lr, seed=0)
    assert found is not None
    assert found["loss"] == pytest.approx(tried["losses"][0], rel=1e-3)


def test_a_collective_without_loss_has_the_same_rate_and_a_lossy_one_has_none() -> None:
    problem = problems.mnist1d_cnn()
    plain = problem.tuned_lr(wb.PipeSGD(width=2), workers=4)
    assert problem.tuned_lr(wb.PipeSGD(width=2, collective=Ring()), workers=4) == plain
    with pytest.raises(ConfigError, match="Truncate16"):
        problem.tuned_lr(wb.PipeSGD(width=2, collective=Ring(codec=Truncate16())), workers=4)


def test_a_delay_without_a_row_is_refused_and_the_rows_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"PipeSGD\(width=4\) on 4 workers.*give a number.*PipeSGD\(width=3\) on 4 workers"
    ):
        problems.mnist1d_mlp().tuned_lr(wb.PipeSGD(width=4), workers=4)
    with pytest.raises(ConfigError, match="on 3 workers"):
        problems.mnist1d_mlp().tuned_lr(wb.SynchronousSGD(), workers=3)


def test_a_problem_without_rows_names_those_with_rows() -> None:
    with pytest.raises(ConfigError, match=r"digits-mlp has no tuned learning rates.*mnist1d-cnn"):
        problems.digits_mlp().tuned_lr(wb.SynchronousSGD(), workers=4)


SGD = torch.optim.SGD


@pytest.mark.parametrize(
    ("problem", "changes", "said"),
    [
        (problems.mnist1d_cnn(), {"batch_size": 16}, "with 16 samples each"),
        (
            problems.mnist1d_cnn(),
            {"optimizer": partial(SGD, lr=0.1)},
            r"optimizer SGD\(momentum=0.9\), not SGD\(\)",
        ),
        (problems.mnist1d_cnn(samples=5000), {}, "samples 4000, not 5000"),
        (problems.mnist1d_cnn(channels=[8]), {}, "parameters 5210, not"),
        (replace(problems.mnist1d_cnn(), batch_size=64), {}, "with 64 samples each"),
    ],
)
def test_another_problem_or_training_is_refused(problem: wb.Problem, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        problem.tuned_lr(wb.SynchronousSGD(), workers=4, **changes)


def test_the_optimizer_s_own_rate_does_not_matter() -> None:
    other = partial(SGD, lr=7.0, momentum=0.9)
    assert (
        problems.mnist1d_cnn().tuned_lr(wb.SynchronousSGD(), workers=4, optimizer=other)
        == rates_of("mnist1d-cnn")[0].lr
    )


def test_counting_parameters_draws_no_global_random_numbers() -> None:
    before = torch.random.get_rng_state()
    assert problems.mnist1d_cnn().num_parameters() == 5210
    assert torch.equal(torch.random.get_rng_state(), before)


COMMAND = [
    "train",
    "pipe-sgd",
    "--set",
    "width=3",
    "--runtime",
    "simulated",
    "--problem",
    "mnist1d-mlp",
    "--steps",
    "2",
]


def test_the_command_trains_with_the_tuned_rate_and_the_record_says_so(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, "--workers", "4", "--lr", "tuned", "--json"]) == 0
    capsys.readouterr()
    (folder,) = [path for path in runs.iterdir() if path.is_dir()]
    info = json.loads((folder / "run.json").read_text())
    lr = problems.mnist1d_mlp().tuned_lr(wb.PipeSGD(width=3), workers=4)
    assert info["settings"]["lr"] == lr
    assert f"learning rate {lr:g} is tuned for trainings of 10 epochs" in info["problem"]["note"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workers", "3"], "on 3 workers"),
        (["--workers", "4", "--batch-size", "16"], "16 samples"),
        (["--workers", "4", "--optimizer", "AdamW"], "AdamW"),
    ],
)
def test_the_command_refuses_what_was_not_tuned(
    words: list[str], said: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, *words, "--lr", "tuned"]) == 2
    assert said in capsys.readouterr().err
    assert not list(runs.glob("*"))


def test_a_rate_is_a_number_or_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*COMMAND, "--lr", "tunde"])
    assert "--lr" in capsys.readouterr().err


def test_a_sweep_s_cell_may_have_the_tuned_rate() -> None:
    check_train([*COMMAND[1:], "--workers", "4", "--lr", "tuned"])
    with pytest.raises(ConfigError, match="on 3 workers"):
        check_train([*COMMAND[1:], "--workers", "3", "--lr", "tuned"])


def test_under_torchrun_the_rate_is_for_the_launcher_s_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    options = parse_train(["synchronous-sgd", "--problem", "mnist1d-mlp", "--lr", "tuned"])  # without --workers
    _, _, problem, settings = resolve(options)
    assert settings.lr == problem.tuned_lr(wb.SynchronousSGD(), workers=4)


def test_a_problem_s_description_has_its_rates() -> None:
    assert re.search(r"--lr tuned.*\n  0\.\d+ +SynchronousSGD\(\) on 4 workers", problems.describe("mnist1d-mlp"))
    assert "tuned" not in problems.describe("digits-mlp")
