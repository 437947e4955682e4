"""The three studies, and one of the papers', at a tiny size: they run, and every number that they show equals one computed again."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.notebooks.shown import check_shown, with_check
from workbench import plots, problems, resources
from workbench.errors import ConfigError
from workbench.experiments.notebooks import run_notebook
from workbench.gradients import build_layout

SCALING: dict[str, Any] = {
    "workers": (1, 2, 8),  # as `-p workers=1,2,8` is read
    "networks": ["ethernet-10g", "2x nvlink-3 + infiniband-hdr"],
    "problem": "digits-mlp",
    "global_batch": 64,
    "server_workers": 2,
    "steps": 4,
    "seeds": 2,
}
INTERCONNECT: dict[str, Any] = {
    "workers": 4,
    "networks": ["ethernet-1g", "wan-1g"],
    "two_level": ["2x nvlink-3 + ethernet-10g"],
    "problem": "digits-mlp",
    "codec_gb_per_s": 1.0,
    "every": 2,
    "steps": 6,
}
STRAGGLERS: dict[str, Any] = {
    "total": 12,
    "spreads": [0.02, 0.3],
    "checked": [0, 2],
    "slow_share": 0.1,
    "steps": 40,
    "drawn": 200,
}
CODECS: dict[str, Any] = {
    "megabytes": 0.1,
    "repeats": 1,
    "workers": [2, 4],
    "message_workers": [2],
    "error_workers": [2, 4, 8],
    "block": 64,
}

pytestmark = [
    pytest.mark.notebooks,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("forked_kernels", "no_process_left"),
]


@pytest.fixture(autouse=True)
def cells_import_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    )


def execute(name: str, parameters: dict[str, Any], folder: Path) -> Path:
    """Execute it, and hold every number that it shows to the one computed again."""
    executed = run_notebook(
        with_check(resources.notebook(name), folder / "in"), folder / f"{name}.ipynb", parameters, timeout_s=240
    )
    check_shown(executed)
    return executed


def figures(notebook: Path) -> list[dict[str, Any]]:
    found = [
        output.data["application/vnd.plotly.v1+json"]
        for cell in nbformat.read(notebook, as_version=4).cells
        for output in cell.get("outputs", [])
        if "application/vnd.plotly.v1+json" in output.get("data", {})
    ]
    assert all(figure["data"] and figure["layout"]["title"]["text"] for figure in found)
    return found


def test_scaling(tmp_path: Path) -> None:
    executed = execute("10-scaling", SCALING, tmp_path)
    assert len(figures(executed)) == 2 * len(SCALING["networks"]) + 2, (
        "weak and strong on each network, what a step is made of, gains"
    )


def test_interconnect(tmp_path: Path) -> None:
    assert len(figures(execute("11-interconnect", INTERCONNECT, tmp_path))) == 4


def test_stragglers(tmp_path: Path) -> None:
    assert len(figures(execute("12-stragglers", STRAGGLERS, tmp_path))) == 6


def test_codecs(tmp_path: Path) -> None:
    """It makes rings of codecs that later versions may refuse."""
    assert len(figures(execute("64-codec-cost", CODECS, tmp_path))) == 2


@pytest.mark.parametrize(
    ("name", "parameters", "fix"),
    [
        ("10-scaling", {"workers": [8, 2]}, "each value larger than the one before"),
        ("10-scaling", {"steps": 1}, "steps=1: give 2 or more"),
        ("10-scaling", {"networks": ["ethernet-11g"]}, "did you mean"),
        (
            "11-interconnect",
            {"two_level": ["8x nvlink-3 + ethernet-100g"], "workers": 12},
            "makes full hosts of 12 workers",
        ),
        ("11-interconnect", {"networks": ["2x nvlink-3 + ethernet-1g"]}, "put hosts of several ranks into two_level"),
        ("11-interconnect", {"every": 20}, "more than twice"),
        ("12-stragglers", {"spreads": [0.3, 1.5]}, "less than 1"),
        ("12-stragglers", {"checked": [100]}, "less than 100"),
        ("12-stragglers", {"often": 0.6}, "less than 0.5"),
        ("20-agd-against-sgd", {"computed_on": ["gloo:4"]}, "give one or more of gloo:2"),
        ("20-agd-against-sgd", {"loss_rates": [0.1]}, "equally many values of each"),
        ("20-agd-against-sgd", {"problems": ["digits-mlp"]}, "digits-mlp too"),
        ("40-backups-against-asynchronous", {"compared": ["synchronous"]}, "backups, asynchronous too"),
        ("40-backups-against-asynchronous", {"backups": [1]}, "equally many values of each"),
        ("40-backups-against-asynchronous", {"spreads": [0.3]}, "0.1 too"),
        ("60-pipe-against-server", {"judged": "gloo:4"}, "give one or more of gloo:3"),
        ("60-pipe-against-server", {"steps": 4}, "give 6 or more"),
    ],
)
def test_a_wrong_parameter_is_refused_with_the_fix(
    name: str, parameters: dict[str, Any], fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the cell after the parameters, before anything is simulated."""
    monkeypatch.setattr(plots, "use_notebook_renderer", lambda: None)
    defaults, checks = (
        "".join(cell["source"]) for cell in json.loads(resources.notebook(name).read_text())["cells"][1:3]
    )
    space: dict[str, Any] = {}
    exec(defaults, space)
    with pytest.raises(ConfigError, match=re.escape(fix)):
        exec(checks, space | parameters)


def test_each_layer_of_the_table_of_staleness_has_weights() -> None:
    """And not the biases alone of the layer above or below."""
    defaults = "".join(json.loads(resources.notebook("41-staleness-by-layer").read_text())["cells"][1]["source"])
    space: dict[str, Any] = {}
    exec(defaults, space)
    task = problems.get(space["problem"], **space["options"])
    layout = build_layout(task.model().named_parameters(), num_buckets=space["layers"])
    assert len(layout.buckets) == space["layers"] == space["options"]["layers"]
    assert all(any(len(slot.shape) == 2 for slot in bucket.slots) for bucket in layout.buckets)


def test_a_parameter_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean workers"):
        execute("10-scaling", {"worker": 3}, tmp_path)


@pytest.mark.parametrize("name", ["10-scaling", "11-interconnect", "12-stragglers"])
def test_nothing_over_ten_lines_is_defined(name: str) -> None:
    cells = json.loads(resources.notebook(name).read_text())["cells"]
    for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        for block in re.findall(r"^(?:def|class) .*(?:\n(?:[ \t]+.*|(?=\n)))*", source, re.MULTILINE):
            assert len(block.strip().splitlines()) <= 10, block
