"""Nothing is lost: the panel after a closed tab, in a second browser, after sleep, after a crash of JupyterLab or a kernel.

The server answers below a base URL, as behind the proxy of JupyterHub.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("playwright", reason="needs Playwright: pip install 'sgd-workbench[dev]'")
pytest.importorskip("jupyterlab", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from tests.browser.chromium import needs_browser
from tests.browser.lab import JupyterServer, Lab, browsing
from tests.browser.panel import begin_training, execute, runs, status, steps
from tests.browser.test_lab import BEGIN

pytestmark = [pytest.mark.browser, pytest.mark.notebooks, pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(900)]

DETACH = 2  # a cell's place
CELLS = (
    BEGIN.strip(),
    "run = cluster.train(wb.PipeSGD(), problem, steps=1_000_000, evaluate_every=0);",
    "name = cluster.detach()",
)
SLEEP_S = 4.0
NO_CONNECTION = "No connection to the Jupyter server."


def test_a_training_is_shown_again_after_all_that_can_happen_to_the_page(tmp_path: Path) -> None:
    needs_browser()
    with browsing(tmp_path / "lab", base_url="/user/ada/") as lab:
        assert "/user/ada/" in lab.server.url
        begin_training(lab, "lost.ipynb", CELLS)
        a_sleeping_laptop_wakes_up(lab)
        the_connection_is_cut(lab)
        a_proxy_asks_to_log_in_again(lab)
        lab = a_closed_tab_is_opened_again(lab)
        a_second_browser_steers_the_same_run(lab)
        lab.run_cell(DETACH)
        lab.until(lambda: lab.has_run(DETACH), "a cluster without an owner")
        jupyterlab_crashes(lab)
        a_killed_kernel_leaves_its_detached_cluster_to_attach_or_stop(lab)


def moves(lab: Lab, what: str) -> None:
    """Wait until the page shows a later step than now."""
    before = steps(lab)
    lab.until(lambda: steps(lab) > before, what)


def a_sleeping_laptop_wakes_up(lab: Lab) -> None:
    """All processes that show the page are stopped, as in a machine that is suspended; the server trains on."""
    shown = steps(lab)
    children = psutil.Process().children(recursive=True)
    asleep = [process for process in children if "--type=" in " ".join(process.cmdline())]
    assert asleep, "the browser's processes"
    for process in asleep:
        process.suspend()
    try:
        time.sleep(SLEEP_S)
    finally:
        for process in asleep:
            process.resume()
    lab.until(lambda: steps(lab) > shown + 10, "the steps taken meanwhile")
    moves(lab, "steps after the sleep")


def the_connection_is_cut(lab: Lab) -> None:
    lab.page.context.set_offline(True)
    panel = lab.page.locator("#workbench-panel")
    panel.get_by_text(NO_CONNECTION).first.wait_for()
    assert runs(lab).count() == 1, "what was read stays"
    lab.picture("panel-offline")
    lab.page.context.set_offline(False)
    panel.get_by_text(NO_CONNECTION).first.wait_for(state="detached")
    moves(lab, "steps after the cut")


def a_proxy_asks_to_log_in_again(lab: Lab) -> None:
    """It answers each request with its own page, as if all were well."""
    ours = "**/workbench/api/**"
    lab.page.route(ours, lambda route: route.fulfill(body="<html>Log in</html>", content_type="text/html"))
    notice = lab.page.locator("#workbench-panel").get_by_text("You are logged out of the Jupyter server").first
    notice.wait_for()
    assert runs(lab).count() == 1, "what was read stays"
    lab.page.unroute(ours)
    notice.wait_for(state="detached")


def a_closed_tab_is_opened_again(lab: Lab) -> Lab:
    context, before = lab.page.context, steps(lab)
    lab.page.wait_for_timeout(1500)  # Lab saves its layout a second after a change
    lab.page.close()
    again = Lab(lab.server, context.new_page())
    again.page.goto(f"{lab.server.url}lab/tree/lost.ipynb?token={lab.server.token}")
    again.page.locator(".jp-NotebookPanel:visible").wait_for()
    execute(again, "workbench:show-runs")
    again.until(lambda: status(again) == "running" and steps(again) > before, "the training, which went on")
    again.page.locator("[data-cluster]").get_by_text("owned by lost.ipynb").wait_for()
    again.idle()
    return again


def a_second_browser_steers_the_same_run(lab: Lab) -> None:
    browser = lab.page.context.browser
    assert browser is not None
    other = Lab(lab.server, browser.new_context().new_page())  # without the cookies of the first
    other.page.goto(f"{lab.server.url}lab?token={lab.server.token}")
    other.page.locator("#workbench-panel").wait_for(state="attached")
    execute(other, "workbench:show-runs")
    other.until(lambda: status(other) == "running", "the training in the other browser")
    runs(other).get_by_role("button", name="Pause").click()
    lab.until(lambda: status(lab) == "paused", "the pause in the first browser")
    runs(lab).get_by_role("button", name="Resume").click()
    other.until(lambda: status(other) == "running", "the resumed training in the other browser")
    assert other.errors == []
    other.page.context.close()


def jupyterlab_crashes(lab: Lab) -> None:
    """The page stays open; the server is killed and starts again at the same address."""
    before = steps(lab)
    assert isinstance(lab.server, JupyterServer)
    lab.server.restart(pause_s=SLEEP_S)
    panel = lab.page.locator("#workbench-panel")
    panel.get_by_text(NO_CONNECTION).first.wait_for(state="detached")
    lab.until(lambda: steps(lab) > before, "steps that the new server reads")
    assert status(lab) == "running", "the detached cluster trains on"
    lab.picture("panel-crashed")


def a_killed_kernel_leaves_its_detached_cluster_to_attach_or_stop(lab: Lab) -> None:
    lab.page.goto(f"{lab.server.url}lab/tree/lost.ipynb?token={lab.server.token}&reset")
    lab.page.locator(".jp-NotebookPanel:visible").wait_for()
    lab.idle()
    execute(lab, "workbench:show-clusters")
    cluster = lab.page.locator("[data-cluster]")
    cluster.get_by_role("button", name="Attach").click()
    code = lab.page.locator(".jp-Notebook .cm-content", has_text="wb.Cluster.attach")
    code.wait_for()
    place = lab.until(
        lambda: next((n for n in range(5) if "Cluster.attach" in lab.cell(n).inner_text()), None), "the code"
    )
    lab.page.evaluate(
        """() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel
                .requestExecute({code: 'import workbench as wb'}).done"""
    )
    lab.run_cell(place)
    lab.until(lambda: lab.has_run(place), "the cluster is attached")
    cluster.get_by_text("owned by lost.ipynb").wait_for()
    assert status(lab) == "running"
    kill_the_kernel(lab, "cluster.detach()")
    cluster.get_by_role("button", name="Attach").wait_for()
    assert status(lab) == "running", "it trains on without a kernel"
    lab.picture("panel-killed-kernel")
    notice = lab.page.locator(".jp-Dialog", has_text="appears to have died")  # JupyterLab's own; it may come late
    lab.page.add_locator_handler(notice, lambda: notice.get_by_role("button", name="Ok").click())
    cluster.get_by_role("button", name="Stop cluster-").click()
    lab.page.locator(".jp-Dialog").get_by_role("button", name="Stop cluster").click()
    lab.page.locator("#workbench-panel").get_by_text("No cluster is alive.").wait_for()
    lab.until(lambda: status(lab) in ("failed", "killed"), "the end of its training")


def kill_the_kernel(lab: Lab, code: str) -> None:
    """Run code in the kernel of the notebook in front, then kill the kernel."""
    pid = lab.page.evaluate(
        """async code => {
            const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
            const future = kernel.requestExecute({ code: `${code}; import os; print("pid", os.getpid())` });
            let text = '';
            future.onIOPub = message => { text += message.content.text ?? ''; };
            await future.done;
            return text;
        }""",
        code,
    )
    os.kill(int(re.search(r"pid (\d+)", pid)[1]), signal.SIGKILL)  # type: ignore[index]


def test_a_killed_kernel_takes_the_cluster_that_it_owns(tmp_path: Path) -> None:
    """Without `detach`: the panel says that no cluster is alive, and that the training was killed."""
    needs_browser()
    with browsing(tmp_path / "lab") as lab:
        begin_training(lab, "lost.ipynb", CELLS)
        kill_the_kernel(lab, "pass")
        lab.page.locator("#workbench-panel").get_by_text("No cluster is alive.").wait_for()
        runs(lab).first.get_by_text("its processes have ended without a report").wait_for()
        assert status(lab) == "killed"
        lab.picture("panel-killed-owner")
