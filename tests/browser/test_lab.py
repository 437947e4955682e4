"""What a user sees in JupyterLab: tiles, live curves, buttons, timelines and the dashboard, on real ranks in a real browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("playwright", reason="needs Playwright: pip install 'sgd-workbench[dev]'")
pytest.importorskip("jupyterlab", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from tests.browser.lab import Lab, browsing

pytestmark = [pytest.mark.browser, pytest.mark.notebooks, pytest.mark.mpi, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One JupyterLab for all tests here."""
    with browsing(tmp_path_factory.mktemp("lab")) as shown:
        yield shown


def test_the_launcher_shows_the_tile(lab: Lab) -> None:
    lab.open()
    tiles = lab.page.locator(".jp-LauncherCard-label").all_inner_texts()
    lab.picture("launcher")
    assert tiles.count("Workbench") == 2, f"a notebook and a console: {tiles}"


TRAIN = """
import workbench as wb
cluster = wb.Cluster(2)
"""


def test_the_stop_button_works_while_a_cell_waits(lab: Lab) -> None:
    lab.server.write("stop.ipynb", TRAIN, "run = cluster.train(wb.PipeSGD(), wb.problems.digits_mlp(), epochs=2000)\nrun", "run.wait()")
    lab.open("stop.ipynb")
    lab.run_all()
    first = lab.until(lambda: lab.reach(1), "a curve")
    lab.until(lambda: lab.reach(1) > first, "a curve that grows")
    lab.until(lambda: lab.num_bars(1), "a timeline")
    lab.picture("live")
    assert not lab.has_run(2)
    lab.cell(1).get_by_role("button", name="Stop").click()
    lab.until(lambda: lab.has_run(2), "the waiting cell ends", 30)
    lab.picture("stopped")
