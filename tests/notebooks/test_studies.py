"""The three studies at a tiny size: they run, and their numbers are those of the closed forms."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from workbench import costs, plots, problems, resources, theory
from workbench.analysis.table import seconds, three_digits
from workbench.errors import ConfigError
from workbench.experiments.notebooks import run_notebook, tagged_text

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
STRAGGLERS: dict[str, Any] = {"total": 12, "spreads": [0.02, 0.3], "checked": [0, 2], "slow_share": 0.1, "steps": 40, "drawn": 200}

pytestmark = [pytest.mark.notebooks, pytest.mark.timeout(300), pytest.mark.usefixtures("no_process_left")]


def execute(name: str, parameters: dict[str, Any], folder: Path) -> Path:
    return run_notebook(resources.notebook(name), folder / f"{name}.ipynb", parameters, timeout_s=240)


def figures(notebook: Path) -> list[dict[str, Any]]:
    found = [
        output.data["application/vnd.plotly.v1+json"]
        for cell in nbformat.read(notebook, as_version=4).cells
        for output in cell.get("outputs", [])
        if "application/vnd.plotly.v1+json" in output.get("data", {})
    ]
    assert all(figure["data"] and figure["layout"]["title"]["text"] for figure in found)
    return found


def number(pattern: str, text: str) -> float:
    match = re.search(pattern, text)
    assert match, f"{pattern!r} is not in {text!r}"
    return float(match[1])


def num_bytes(problem: str) -> int:
    return sum(weight.numel() * weight.element_size() for weight in problems.get(problem).model().parameters())


def test_scaling(tmp_path: Path) -> None:
    executed = execute("10-scaling", SCALING, tmp_path)
    assert len(figures(executed)) == 2 * len(SCALING["networks"]) + 2, "weak and strong on each network, what a step is made of, gains"
    why = tagged_text(executed, "why")
    for name in SCALING["networks"]:
        network = costs.get(name)
        row = next(line for line in why.splitlines() if line.startswith(f"{network.name}  ") and re.search(r"\s8\s", line))
        assert seconds(network.all_reduce_s(num_bytes("digits-mlp"), 8)) in row
    compared = tagged_text(executed, "theory")
    assert number(r"^(\d+) steps", compared) == 8, "two methods, two networks, 2 and 8 workers"
    assert number(r"largest difference ([\d.]+) %", compared) < 0.1
    answer = tagged_text(executed, "answer")
    kept = {name: float(share) for name, share in re.findall(r"(Pipe-SGD, ring|synchronous, ring) (\d+)%", answer.splitlines()[0])}
    assert 0 < kept["synchronous, ring"] < kept["Pipe-SGD, ring"] <= 100


def test_interconnect(tmp_path: Path) -> None:
    executed = execute("11-interconnect", INTERCONNECT, tmp_path)
    assert len(figures(executed)) == 4
    even = theory.ring_break_even_bandwidth(4, 2.0, 1e-9, 1e-9) / 125e6
    compared = tagged_text(executed, "theory")
    assert number(r"4 workers: ([\d.]+) Gbit/s", compared) == pytest.approx(even, abs=1e-4)
    assert number(r"^(\d+) steps", compared) == 16, "four methods at four bandwidths"
    assert number(r"largest difference ([\d.]+) %", compared) < 1.0, "blocks of a ring are whole values"
    steps = tagged_text(executed, "table")
    assert all(name in steps for name in ("1 Gbit/s Ethernet", "1 Gbit/s WAN", "2x NVLink 3 + 10 Gbit/s Ethernet", "local SGD, every 2"))


def test_stragglers(tmp_path: Path) -> None:
    executed = execute("12-stragglers", STRAGGLERS, tmp_path)
    assert len(figures(executed)) == 6
    law = theory.LognormalTime.of_mean(1.0, math.sqrt(math.log1p(0.3**2)))
    updates = theory.fit_iterations([(50, 137500.0), (100, 76200.0)])
    choice = theory.best_backups(12, updates, law)
    row = next(line for line in tagged_text(executed, "best").splitlines() if line.startswith("lognormal")).split()
    assert row[1:3] == [str(choice.backups), three_digits(choice.gain)]
    for line in tagged_text(executed, "steps").splitlines()[3:]:
        backups, simulated, carried, error, fresh = map(float, line.split())
        assert abs(simulated - carried) < 5 * error
        assert fresh == pytest.approx(law.expected_order_statistic(12 - int(backups), 12), abs=0.006), "as written, in three digits"
    rates = tagged_text(executed, "theory")
    assert number(r"time between updates: simulated ([\d.]+)", rates) == pytest.approx(1 / 12, rel=0.05)
    assert number(r"mean staleness: simulated ([\d.]+)", rates) == pytest.approx(11, rel=0.1)


@pytest.mark.parametrize(
    ("name", "parameters", "fix"),
    [
        ("10-scaling", {"workers": [8, 2]}, "each larger than the one before"),
        ("10-scaling", {"steps": 1}, "two steps"),
        ("10-scaling", {"networks": ["ethernet-11g"]}, "did you mean"),
        ("11-interconnect", {"two_level": ["8x nvlink-3 + ethernet-100g"], "workers": 12}, "makes no full hosts of 12 workers"),
        ("11-interconnect", {"networks": ["2x nvlink-3 + ethernet-1g"]}, "put it into two_level"),
        ("11-interconnect", {"every": 20}, "more than twice"),
        ("12-stragglers", {"spreads": [0.3, 1.5]}, "below 1"),
        ("12-stragglers", {"checked": [100]}, "backups of fewer than total"),
        ("12-stragglers", {"often": 0.6}, "often < 0.5"),
    ],
)
def test_a_wrong_parameter_is_refused_with_the_fix(
    name: str, parameters: dict[str, Any], fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the cell behind the parameters, before anything is simulated."""
    monkeypatch.setattr(plots, "use_notebook_renderer", lambda: None)
    defaults, checks = ("".join(cell["source"]) for cell in json.loads(resources.notebook(name).read_text())["cells"][1:3])
    space: dict[str, Any] = {}
    exec(defaults, space)
    with pytest.raises(ConfigError, match=re.escape(fix)):
        exec(checks, space | parameters)


def test_a_parameter_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean workers"):
        execute("10-scaling", {"worker": 3}, tmp_path)


@pytest.mark.parametrize("name", ["10-scaling", "11-interconnect", "12-stragglers"])
def test_nothing_over_ten_lines_is_defined(name: str) -> None:
    cells = json.loads(resources.notebook(name).read_text())["cells"]
    for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        for block in re.findall(r"^(?:def|class) .*(?:\n(?:[ \t]+.*|(?=\n)))*", source, re.MULTILINE):
            assert len(block.strip().splitlines()) <= 10, block
