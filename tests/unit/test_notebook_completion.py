"""What the Tab key offers in a notebook, by the completer of its kernel."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.completer import IPCompleter, provisionalcompleter

import workbench as wb

pytestmark = pytest.mark.notebooks


def offered(code: str, **names: Any) -> set[str]:
    with provisionalcompleter():
        return {one.text for one in IPCompleter(namespace=names).completions(code, len(code))}


def test_names_of_a_cluster_a_run_and_the_package_are_offered() -> None:
    cluster = object.__new__(wb.Cluster)  # not started: completion must not call its properties
    assert {"train", "state", "ranks", "stop"} <= offered("cluster.", cluster=cluster)
    assert {"timeline", "summary", "model"} <= offered("run.", run=wb.Run({}, {}))
    assert {"timelines", "convergence"} <= offered("wb.plots.", wb=wb)


def test_settings_of_a_training_are_offered() -> None:
    cluster = object.__new__(wb.Cluster)
    assert "evaluate_every=" in offered("cluster.train(algorithm, problem, ev", cluster=cluster)
    assert "resume=" in offered("cluster.train(algorithm, problem, resu", cluster=cluster)
