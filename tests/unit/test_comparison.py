"""A comparison of runs in a notebook: what differs is in columns, names are whole, and a mean is over seeds alone."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest

pytest.importorskip("plotly", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from workbench import plots
from workbench.analysis import compare
from workbench.plots.comparison import comparison_html, comparison_table, use_comparison_html
from workbench.plots.differences import differences, settings_of
from workbench.trace.run import Run

pytestmark = pytest.mark.notebooks
LONG = "Ring(codec=TopK(k=5, feedback=True), " + "x" * 120 + ")"


def a_run(name: str = "one", loss: float = 1.0, *, collective: str = "Native()", **settings: Any) -> Run:
    rows = [
        {
            "step": step,
            "seconds": 1.0 * step,
            "samples": 8,
            "bytes_sent": 8,
            "staleness": 0,
            "loss": loss,
            "num_samples": 8,
        }
        for step in range(5)
    ]
    info = {
        "id": name,
        "algorithm": {
            "name": "PipeSGD",
            "defaults": ["collective"],
            "settings": {"width": 2, "collective": collective},
        },
        "problem": {"name": "digits", "optimizer": "SGD(lr=0.1)"},
        "num_workers": 1,
        "settings": {"seed": 0, "lr": None, "clip_norm": None, **settings},
        "status": "finished",
    }
    return Run(info, {0: rows})


def titles(runs: list[Run]) -> list[str]:
    return [column.title for column in comparison_table(runs).columns]


def test_what_differs_is_a_column_and_what_is_the_same_is_none() -> None:
    runs = [a_run("one", lr=0.1), a_run("two", lr=0.2, seed=1, collective=LONG)]
    assert titles(runs)[:4] == ["algorithm", "collective", "seed", "lr"]
    assert {"clip_norm", "width", "problem", "run"}.isdisjoint(titles(runs))
    assert [row["setting lr"] for row in comparison_table(runs)] == [0.1, 0.2]
    assert comparison_table(runs).cells()[1][:4] == ["PipeSGD", LONG, "1", "0.2"]


def test_settings_of_one_algorithm_are_columns_if_they_are_not_at_their_defaults() -> None:
    other = a_run("two")
    other.info["algorithm"] = {"name": "LocalSGD", "defaults": ["average"], "settings": {"every": 8, "average": "all"}}
    assert titles([a_run("one"), other])[:3] == ["algorithm", "width", "every"]
    assert comparison_table([a_run("one"), other]).cells()[1][:3] == ["LocalSGD", "\N{EN DASH}", "8"]


def test_runs_that_differ_in_nothing_have_their_names() -> None:
    assert "run" in titles([a_run("one"), a_run("two")])
    assert "run" in titles([a_run("one"), a_run("two"), a_run("three", seed=1)])
    assert titles([])[0] == "algorithm"


def test_no_name_is_cut_and_none_is_markup() -> None:
    evil = "<script>alert(1)</script>" + "y" * 200
    shown = comparison_html(compare([a_run("one"), a_run("two", collective=evil), a_run("three", collective=LONG)]))
    assert html.escape(evil) in shown and html.escape(LONG) in shown
    assert "alert(1)</script>" not in shown
    assert "ellipsis" not in shown and "overflow-wrap: anywhere" in shown
    assert 'data-value="1.0"' in shown, "rows are sorted by exact values"


def test_wb_compare_is_shown_so_in_a_notebook() -> None:
    from IPython.core.formatters import HTMLFormatter

    formatter = HTMLFormatter()
    use_comparison_html(formatter)
    shown = formatter(compare([a_run("one", lr=0.1), a_run("two", lr=0.2)]))
    assert 'class="workbench-comparison"' in shown and re.search(r"<button[^>]*>lr</button>", shown)


@pytest.mark.parametrize("changed", [{"clip_norm": 1.0}, {"lr": 0.2}, {"collective": "Ring()"}])
def test_a_mean_is_over_runs_that_differ_in_their_seed_alone(changed: dict[str, Any]) -> None:
    """Also where the label has no word of what differs."""
    seeds = [a_run("one", seed=0), a_run("two", 3.0, seed=1)]
    names = [trace.name for trace in plots.curves(seeds, "steps").data if trace.showlegend is not False]
    assert names == ["PipeSGD(width=2) (mean of 2)"]
    other = a_run("three", 9.0, seed=2, **changed)
    found = {
        trace.name: max(trace.y)
        for trace in plots.curves([*seeds, other], "steps").data
        if trace.showlegend is not False
    }
    (mean,) = [name for name in found if name.endswith("(mean of 2)")]
    assert len(found) == 2 and found[mean] == 2.0
    assert max(found.values()) == 9.0
    assert any(str(value) in name for name in found for value in changed.values()), list(found)


def test_simulations_on_different_networks_are_no_repetitions() -> None:
    runs = [a_run("one"), a_run("two")]
    for run, network in zip(runs, ("1 Gbit/s Ethernet", "InfiniBand"), strict=True):
        run.info["notes"] = ["5 steps", f"simulated: {network}", f"simulated: forward {network[0]} ms"]
    assert differences(runs) == [{"network": "1 Gbit/s Ethernet"}, {"network": "InfiniBand"}]
    assert len([trace for trace in plots.curves(runs, "steps").data if trace.showlegend is not False]) == 2


def test_a_setting_of_the_algorithm_does_not_hide_one_of_the_run() -> None:
    run = a_run(lr=0.3)
    run.info["algorithm"]["settings"]["lr"] = 0.7
    assert (settings_of(run)["lr"], settings_of(run)["set.lr"]) == (0.3, 0.7)
