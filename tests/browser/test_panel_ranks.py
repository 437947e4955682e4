"""The ranks of a training and of a cluster in the panel; clusters that it scales and heals; runs that it branches."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="needs Playwright: pip install 'sgd-workbench[dev]'")
pytest.importorskip("jupyterlab", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from playwright.sync_api import Locator

from tests.browser.chromium import needs_browser
from tests.browser.lab import Lab, browsing
from tests.browser.panel import begin_training, execute, in_both_themes, runs, status
from tests.unit.lab_server import write_run

pytestmark = [pytest.mark.browser, pytest.mark.notebooks, pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(900)]

TRAIN, DETACH = 1, 2  # places of cells
BEGIN = """
import workbench as wb
slow = wb.costs.stragglers.SlowMachines(factor_of={1: 2.0})
compute = wb.costs.Compute(forward_s=0.02, backward_s=0.02, stragglers=(slow,))
cluster = wb.Cluster(2, launcher="torch")
"""
TRAINS = """
settings = dict(checkpoint_every=20, keep_checkpoints=3, evaluate_every=0, compute=compute)
run = cluster.train(wb.SynchronousSGD(), wb.problems.digits_mlp(), steps=1_000_000, **settings);
"""
CELLS = (BEGIN.strip(), TRAINS.strip(), "name = cluster.detach()")


def test_ranks_branches_and_clusters_that_change(tmp_path: Path) -> None:
    needs_browser()
    with browsing(tmp_path / "lab") as lab:
        begin_training(lab, "ranks.ipynb", CELLS)
        a_slow_rank_is_a_straggler(lab)
        a_stopped_rank_is_seen(lab)
        a_run_is_branched_from_a_checkpoint(lab)
        the_notebook_that_owns_a_cluster_gets_the_code(lab)
        a_detached_cluster_is_scaled_healed_and_dragged(lab)
        ranks_with_gpus_on_other_hosts_are_read_from_their_files(lab)
        assert lab.errors == []


def menu(lab: Lab, row: Locator, item: str) -> None:
    """Choose an item of a row's menu."""
    row.get_by_role("button", name="More for").click()
    lab.page.locator(".lm-Menu").get_by_text(item).click()


def ranks(lab: Lab) -> Locator:
    return lab.page.locator(".wb-Ranks:visible tr[data-rank]")


def cluster(lab: Lab) -> Locator:
    return lab.page.locator("[data-cluster]")


def a_slow_rank_is_a_straggler(lab: Lab) -> None:
    menu(lab, runs(lab).first, "Ranks")
    ranks(lab).nth(1).get_by_text("straggler").wait_for()
    lab.page.get_by_text("Rank 1 is a straggler: its computation takes").wait_for()
    assert ranks(lab).nth(0).get_by_text("straggler").count() == 0
    heads = lab.page.locator(".wb-Ranks:visible th").all_inner_texts()
    assert heads[:7] == ["rank", "state", "step", "heartbeat", "CPU", "memory", "sends"] and "GPU" not in heads
    first: list[str] = ranks(lab).nth(0).locator("td").all_inner_texts()
    assert first[3].endswith("ago") and first[4].endswith("%") and first[5].endswith("MB") and first[6].endswith("B/s")
    step = first[2]
    lab.until(lambda: ranks(lab).nth(0).locator("td").nth(2).inner_text() != step, "a step that changes")
    in_both_themes(lab, "panel-ranks")


def a_stopped_rank_is_seen(lab: Lab) -> None:
    pid = int(ranks(lab).nth(0).locator("td").last.inner_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        ranks(lab).nth(0).get_by_text("stopped").wait_for()
        lab.picture("panel-ranks-stopped")
    finally:
        os.kill(pid, signal.SIGCONT)
    ranks(lab).nth(0).get_by_text("training").wait_for()


def a_run_is_branched_from_a_checkpoint(lab: Lab) -> None:
    lab.until(
        lambda: int(ranks(lab).nth(0).locator("td").nth(2).inner_text().replace(",", "")) > 65,
        "three checkpoints, of 20 steps each",
    )
    runs(lab).first.get_by_role("button", name="Stop, with a checkpoint").click()
    lab.until(lambda: status(lab) == "stopped", "the end")
    menu(lab, runs(lab).first, "Branch from a Checkpoint")
    dialog = lab.page.locator(".jp-Dialog")
    choices = dialog.locator("select option")
    choices.first.wait_for(state="attached")
    texts = choices.all_inner_texts()
    assert len(texts) == 4, "that of the stop, and three of checkpoint_every"
    lab.picture("panel-branch")
    dialog.locator("select").select_option(texts[2])
    dialog.get_by_role("button", name="Insert code", exact=True).click()
    num_steps = texts[2].split()[1].replace(",", "")
    assert int(num_steps) % 20 == 0
    folder = next(path for path in lab.server.runs.iterdir() if not path.name.startswith("."))
    code = lab.until(lambda: inserted(lab, "resume="), "the code")
    assert f"resume='{folder}@{num_steps}'" in code
    delete(lab)
    menu(lab, runs(lab).first, "Restart")
    assert "resume=" not in lab.until(lambda: inserted(lab, "leave this out"), "the code")
    delete(lab)


def inserted(lab: Lab, text: str) -> str | None:
    """The text of the active cell, if it contains that."""
    source: str = lab.page.evaluate(
        """() => Array.from(window.jupyterapp.shell.widgets('main')).find(one => one.content?.deselectAll)
            .content.activeCell.model.sharedModel.getSource()"""
    )
    return source if text in source else None


def delete(lab: Lab) -> None:
    """Delete the active cell of the notebook."""
    lab.page.evaluate(
        """() => {
            const panel = Array.from(window.jupyterapp.shell.widgets('main')).find(one => one.content?.deselectAll);
            window.jupyterapp.shell.activateById(panel.id);
            window.jupyterapp.commands.execute('notebook:delete-cell');
        }"""
    )
    lab.until(lambda: lab.page.locator(".jp-Notebook .jp-CodeCell").count() == len(CELLS), "the cell is gone")


def the_notebook_that_owns_a_cluster_gets_the_code(lab: Lab) -> None:
    menu(lab, cluster(lab), "Scale")
    dialog = lab.page.locator(".jp-Dialog")
    dialog.get_by_text("ranks.ipynb owns it").wait_for()
    dialog.locator("input").fill("3")
    dialog.get_by_role("button", name="Insert code", exact=True).click()
    name = cluster(lab).get_attribute("data-cluster")
    assert lab.until(lambda: inserted(lab, "cluster.scale"), "the code") == f"cluster.scale(3)  # {name}"
    delete(lab)
    menu(lab, cluster(lab), "Heal")
    assert lab.until(lambda: inserted(lab, "cluster.heal"), "the code") == f"cluster.heal()  # {name}"
    delete(lab)


def drop_on_the_notebook(lab: Lab) -> None:
    """Drag the cluster into the notebook. A page that is still being laid out may lose the drop."""
    for last in (False, False, True):
        drag(lab, cluster(lab), lab.cell(TRAIN))
        try:
            lab.until(
                lambda: lab.page.locator(".jp-Notebook .jp-CodeCell").count() == len(CELLS) + 1,
                "a cell more",
                timeout_s=30,
            )
        except AssertionError:
            if last:
                raise
        else:
            return


def a_detached_cluster_is_scaled_healed_and_dragged(lab: Lab) -> None:
    lab.run_cell(DETACH)
    cluster(lab).get_by_role("button", name="Attach").wait_for()
    menu(lab, cluster(lab), "Scale")
    dialog = lab.page.locator(".jp-Dialog")
    dialog.get_by_text("It is detached").wait_for()
    dialog.locator("input").fill("3")
    dialog.get_by_role("button", name="Restart with these ranks").click()
    cluster(lab).get_by_text("3 ranks").wait_for()
    menu(lab, cluster(lab), "Ranks")
    lab.until(lambda: ranks(lab).count() == 3, "three rows")
    assert ranks(lab).get_by_text("idle").count() == 3
    os.kill(int(ranks(lab).nth(2).locator("td").last.inner_text()), signal.SIGKILL)
    ranks(lab).nth(2).get_by_text("gone").wait_for()
    cluster(lab).get_by_text("1 rank ended").wait_for()
    lab.picture("panel-ranks-gone")
    menu(lab, cluster(lab), "Heal")
    cluster(lab).get_by_text("1 rank ended").wait_for(state="detached")
    lab.until(lambda: ranks(lab).get_by_text("idle").count() == 3, "three ranks again")
    drop_on_the_notebook(lab)
    name = cluster(lab).get_attribute("data-cluster")
    code = f'cluster = wb.Cluster.attach("{name}")'
    assert any(code in lab.cell(number).inner_text() for number in range(len(CELLS) + 1)), "the import is there"
    lab.picture("panel-dropped")
    cluster(lab).get_by_role("button", name="Stop cluster-").click()
    dialog.get_by_role("button", name="Stop cluster").click()
    lab.page.locator("#workbench-panel").get_by_text("No cluster is alive.").wait_for()


def ranks_with_gpus_on_other_hosts_are_read_from_their_files(lab: Lab) -> None:
    about = {"status": "running", "runtime": "torch", "num_workers": 2, "settings": {"steps": 1000, "lr": 0.1}}
    folder = write_run(lab.server.runs, "far-away", created="2026-11-01T00:00:00+00:00", **about)
    for rank, share in enumerate((0.97, 0.31)):
        gpu = {"name": "NVIDIA H100 80GB HBM3", "share": share, "used_bytes": 61 * 10**9, "total_bytes": 85 * 10**9}
        beat = {"host": f"node-{rank}", "place": f"boot-{rank}", "pid": 4000 + rank, "started_s": 1.0, "step": 2}
        beat |= {"does": "in backward", "memory_bytes": 3 * 10**9, "cpu_cores": 1.04, "gpu": gpu}
        (folder / f"present-{rank:05d}.json").write_text(json.dumps(beat))
    os.utime(folder / "present-00001.json", (time.time() - 20,) * 2)
    execute(lab, "workbench:ranks", kind="runs", name="far-away")
    ranks(lab).nth(1).get_by_text("silent").wait_for()
    first = ranks(lab).nth(0).inner_text()
    for text in ("training", "104 %", "97.0 %", "61.0 GB of 85.0 GB", "NVIDIA H100", "node-0", "in backward of step 2"):
        assert text in first, f"{text} in {first}"
    heads = lab.page.locator(".wb-Ranks:visible th").all_inner_texts()
    assert heads[:5] == ["rank", "state", "step", "GPU", "GPU memory"], "in view also in a narrow pane"
    in_both_themes(lab, "panel-ranks-gpu")


def drag(lab: Lab, row: Locator, cell: Locator) -> None:
    """Press the mouse on a row's facts, and release it above a cell."""
    begin: Any = row.locator(".wb-Row-facts").first.bounding_box()
    end: Any = cell.bounding_box()
    mouse = lab.page.mouse
    mouse.move(begin["x"] + 20, begin["y"] + 5)
    mouse.down()
    mouse.move(begin["x"] + 60, begin["y"] + 15, steps=4)
    mouse.move(end["x"] + 150, end["y"] + 10, steps=10)
    lab.picture("panel-drag")
    mouse.up()
