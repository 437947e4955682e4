"""An algorithm in the user's own file, named as `file.py:Class` in each command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.own_algorithm import write_own_algorithm
from workbench import algorithms
from workbench.cli.main import main
from workbench.errors import ConfigError
from workbench.trace.run import Run
from workbench.user_file import load

SIMULATED = ["--runtime", "simulated", "--workers", "2", "--steps", "2"]


@pytest.fixture
def own(tmp_path: Path) -> str:
    return write_own_algorithm(tmp_path)


def test_it_is_made_with_its_fields_and_a_file_is_executed_once(own: str) -> None:
    made = algorithms.get(f"{own}:WarmStart", warm_steps=4)
    assert str(made) == "WarmStart(warm_steps=4)"
    assert made == algorithms.find(f"{own}:WarmStart")(warm_steps=4)
    assert str(algorithms.get(f"{own}:Warmer")) == "Warmer(warm_steps=10)"


def test_files_whose_paths_differ_only_in_signs_are_two(tmp_path: Path) -> None:
    for name, number in (("v-1", 1), ("v_1", 2)):
        (tmp_path / f"{name}.py").write_text(f"number = {number}\n")
    assert [load(f"{tmp_path}/{name}.py:number", "number", bool) for name in ("v-1", "v_1")] == [1, 2]


def test_a_file_that_imports_a_torchvision_of_another_build_names_the_fix(tmp_path: Path) -> None:
    """A file with another error is not told so."""
    for message, fix in (("operator torchvision::nms does not exist", "of the same build"), ("oh", "shows where")):
        (tmp_path / "mine.py").write_text(f"raise RuntimeError({message!r})\n")
        with pytest.raises(ConfigError, match=rf"{message}\): .*{fix}"):
            load(f"{tmp_path}/mine.py:problem", "problem", bool)


def test_a_simulated_run_has_its_settings_and_can_be_evaluated(
    own: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", f"{own}:WarmStart", "--warm-steps", "4", *SIMULATED]) == 0
    (folder,) = runs.glob("*warmstart*")
    assert Run.load(folder).info["algorithm"]["settings"] == {"warm_steps": 4}
    assert main(["evaluate", folder.name]) == 2
    assert "--algorithm file.py:Class" in capsys.readouterr().err
    assert main(["evaluate", folder.name, "--algorithm", f"{own}:WarmStart"]) == 0


def test_each_command_takes_it(own: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = tmp_path / "grid.yaml"
    base = {"runtime": "simulated", "workers": 2, "steps": 20, "timing_only": True}
    grid.write_text(json.dumps({"base": base, "axes": {"algorithm": [{f"{own}:WarmStart": {"warm_steps": 4}}]}}))
    assert main(["sweep", str(grid)]) == 0
    (folder,) = runs.glob("*warmstart*")
    calibration = str(tmp_path / "calibration.json")
    assert main(["calibrate", folder.name, "-o", calibration]) == 0
    assert main(["predict", calibration, "--algorithm", f"{own}:WarmStart", "--set", "warm_steps=4"]) == 0
    for command in (
        ["train", f"{own}:WarmSart", *SIMULATED],
        ["submit", "--dry-run", "--", "train", f"{own}:WarmSart"],
        ["predict", calibration, "--algorithm", f"{own}:WarmSart"],
        ["study", "--algorithm", f"{own}:WarmSart warm_steps=4"],
        ["algorithms", f"{own}:WarmSart"],
        ["evaluate", folder.name, "--algorithm", f"{own}:WarmSart"],
    ):
        assert main(command) == 2
        assert "did you mean WarmStart" in capsys.readouterr().err, command[0]


@pytest.mark.parametrize("command", [["algorithms"], ["train", "--problem", "other.py:problem", "--help"]])
def test_its_settings_are_listed_though_it_has_no_card(
    command: list[str], own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, f"{own}:WarmStart"]) == 0
    said = capsys.readouterr().out
    assert "Raises the learning rate" in said and "warm_steps  a whole number  10" in said


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("warmstart", {}, "did you mean WarmStart.* There are Undecorated, WarmStart, Warmer$"),
        ("made", {}, "is a WarmStart: name the class, and give its fields by --set"),
        ("number", {}, "is a int: name a class that derives from workbench.Algorithm"),
        ("Undecorated", {}, "cannot take cool_steps: write @dataclass"),
        ("WarmStart", {"warm_step": 2}, "did you mean warm_steps"),
        ("WarmStart", {"warm_steps": "x"}, "give a whole number"),
    ],
)
def test_what_is_wrong_is_one_error_with_the_fix(name: str, settings: dict[str, object], words: str, own: str) -> None:
    with pytest.raises(ConfigError, match=words):
        algorithms.get(f"{own}:{name}", **settings)


def test_a_missing_file_and_one_that_fails_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    for file, words in (("none.py", "there is no file"), ("broken.py", "ZeroDivisionError")):
        with pytest.raises(ConfigError, match=words):
            algorithms.get(f"{tmp_path / file}:Mine")
    with pytest.raises(ConfigError, match=r"for your own algorithm, give file\.py:Class"):
        algorithms.get("mine")
