"""CONTRIBUTING.md: its layer table and its walk through one step agree with the code. The five steps: test_five_steps.py."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import FrameType

import pytest

from tests.unit.test_style import ROOT
from workbench import problems
from workbench.algorithms import SynchronousSGD
from workbench.costs import Compute, ethernet_10g
from workbench.runtimes.simulator.simulate import simulate

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
WALK = PAGE.partition("## Follow one SynchronousSGD step")[2].partition("\n## ")[0]
GLOO, SIMULATED = (re.findall(r"^\d\. `([\w/]+\.py)`", part, re.MULTILINE) for part in WALK.split("In the simulator"))


def test_layer_table_is_that_of_pyproject() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    expected = {contract["containers"][0]: contract["layers"] for contract in contracts if contract["type"] == "layers"}
    table = PAGE.partition("| layer | holds |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [re.split(r" (?<!\\)\| ", row.removeprefix("| "))[0] for row in table.splitlines()]
    assert [row.replace("`", "").replace("\\", "") for row in rows] == expected["workbench"]
    inside = re.search(r"Inside `runtimes`, from top to bottom: (.*?)\. ", PAGE, re.DOTALL)
    assert inside
    assert [name.strip(" `\n") for name in inside[1].split(",")] == expected["workbench.runtimes"]


@pytest.mark.parametrize("files", [GLOO, SIMULATED], ids=["gloo", "simulator"])
def test_a_step_is_told_in_at_most_nine_files(files: list[str]) -> None:
    assert 6 <= len(files) <= 9
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_functions_that_the_walk_names_are_in_their_files() -> None:
    for file, sentence in re.findall(r"^\d\. `([\w/]+\.py)`: (.*?)$", WALK, re.MULTILINE):
        for name in re.findall(r"`(?:\w+\.)?([a-z_]+)`", sentence):
            assert f"def {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"


def test_simulator_executes_every_file_of_the_walk() -> None:
    order: list[str] = []

    def on_call(frame: FrameType, event: str, arg: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOT / "workbench"):
            name = str(file.relative_to(ROOT))
            if name not in order:
                order.append(name)

    compute = Compute(forward_s=0.001, backward_s=0.002)
    sys.setprofile(on_call)
    try:
        simulate(
            SynchronousSGD(),
            problems.get("digits-softmax"),
            workers=2,
            steps=2,
            network=ethernet_10g,
            compute=compute,
            detail="messages",
        )
    finally:
        sys.setprofile(None)
    assert [file for file in SIMULATED if file not in order] == []
