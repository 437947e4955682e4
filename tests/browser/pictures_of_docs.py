"""Takes the pictures of JupyterLab in docs/pictures: `python -m tests.browser.pictures_of_docs FOLDER` (root; two minutes).

FOLDER is new. The pictures show its name, so it is short and names no machine.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.sync_api import Locator, Page

from tests.browser.lab import ROOT, Lab, browsing
from tests.browser.panel import execute, runs
from tests.browser.test_run_table import write_seeds

PICTURES = ROOT / "docs" / "pictures"
MODEL = """
from torch import nn

import workbench as wb

digits = wb.problems.digits_mlp()


def model() -> nn.Module:
    layers = [nn.Linear(64, 640), nn.ReLU(), nn.Linear(640, 640), nn.ReLU(), nn.Linear(640, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


problem = wb.Problem(model=model, loss=nn.functional.cross_entropy, train=digits.train, test=digits.test, name="my-net")
"""
TRAINING = (  # short lines: the panel leaves half of the page
    """import workbench as wb

from my_model import problem  # a wb.Problem

cluster = wb.Cluster(4, launcher="emulated:1gbit")""",
    """compute = wb.costs.Compute(
    forward_s=0.017, backward_s=0.033
)
run = cluster.train(
    wb.PipeSGD(width=2), problem, steps=2000,
    batch_size=16, lr=0.1, evaluate_every=20,
    compute=compute,
)
run""",
    "cluster.stop()",
)
SUMS = (
    """import numpy as np

gradient = np.random.default_rng(rank).standard_normal(200_000)
total = np.empty_like(gradient)
MPI.COMM_WORLD.Allreduce(gradient, total)
print(f"sum of the gradients: {total.sum():.3f}")
print(f"rank {rank} of {world_size}: own gradient {gradient.sum():.3f}")""",
    """%%rank 0,2
print(f"only on rank {rank}")""",
    "%variables",
)


def take(shown: Page | Locator, name: str) -> None:
    """Keep what is shown, in 256 colours: a third of the bytes."""
    path = PICTURES / f"{name}.png"
    shown.screenshot(path=path)
    assert black(path) < 0.02, f"{path} has a black part, as of a canvas that is not drawn"
    with Image.open(path) as picture:
        small = in_its_commonest_colours(picture.convert("RGB"))
    small.save(path, optimize=True)


def in_its_commonest_colours(picture: Image.Image) -> Image.Image:
    """The picture in 256 of its own colours. Means of similar colours would change those of small things: a legend's."""
    colours, place, counts = np.unique(
        np.asarray(picture).reshape(-1, 3).astype(int), axis=0, return_inverse=True, return_counts=True
    )
    chosen = colours[np.argsort(-counts)[:256]]
    nearest = ((colours[:, None] - chosen) ** 2).sum(axis=2).argmin(axis=1).astype(np.uint8)
    small = Image.frombytes("P", picture.size, nearest[place].tobytes())
    small.putpalette(chosen.astype(np.uint8).tobytes())
    return small


def black(path: Path) -> float:
    """The share of a picture that is black."""
    with Image.open(path) as picture:
        grey = picture.convert("L")
    return grey.histogram()[0] / (grey.width * grey.height)


def training(lab: Lab) -> None:
    """Two pictures of one training: its live view, and the panel."""
    (lab.server.notebooks / "my_model.py").write_text(MODEL)
    lab.server.write("train.ipynb", *TRAINING)
    lab.page.set_viewport_size({"width": 1280, "height": 1480})
    lab.open("train.ipynb")
    lab.run_cell(0)
    lab.until(lambda: lab.has_run(0), "four ranks")
    lab.run_cell(1)
    lab.until(lambda: lab.reach(1), "a curve")
    lab.page.wait_for_timeout(30_000)
    take(lab.page, "live")
    lab.page.set_viewport_size({"width": 1400, "height": 760})
    execute(lab, "workbench:show-runs")
    runs(lab).get_by_role("button", name=re.compile("^PipeSGD")).click()
    lab.page.locator(".wb-Run path.wb-Chart-line").first.wait_for()
    lab.page.wait_for_timeout(3_000)
    take(lab.page, "panel")
    runs(lab).get_by_role("button", name=re.compile("^Stop")).first.click()
    lab.run_cell(2)
    lab.until(lambda: lab.has_run(2), "the end of the ranks")


def comparison(lab: Lab) -> None:
    """Two learning rates with several seeds each, compared."""
    write_seeds(lab)
    lab.page.set_viewport_size({"width": 1180, "height": 900})
    lab.open()
    execute(lab, "application:toggle-left-area")
    execute(lab, "workbench:run-table")
    lab.page.get_by_role("searchbox", name="Filter the runs").fill("gossip")
    lab.page.get_by_label("groups").select_option("seeds")
    groups = lab.page.locator(".wb-Table tr[data-group]")
    lab.until(lambda: groups.count() == 2, "two groups")
    for row in range(2):
        groups.nth(row).get_by_role("checkbox").check()
    lab.page.get_by_role("button", name="Compare 9").click()
    pane = lab.page.locator(".wb-Run:visible")
    pane.locator("path.wb-Chart-band").first.wait_for()
    take(pane, "panel-compare")


def mpi_kernel(lab: Lab) -> None:
    """Cells that run on all ranks."""
    lab.server.write("ranks.ipynb", *SUMS, kernel_name="workbench-mpi")
    lab.page.set_viewport_size({"width": 1000, "height": 620})
    lab.open("ranks.ipynb")
    execute(lab, "application:toggle-left-area")
    for number in range(len(SUMS)):
        lab.run_cell(number)
        lab.until(lambda number=number: lab.has_run(number), "the cell's end")
    take(lab.page, "mpi-kernel")


def main(folder: str) -> None:
    """Take all pictures."""
    with browsing(Path(folder)) as lab:
        training(lab)
        comparison(lab)
        mpi_kernel(lab)


if __name__ == "__main__":
    main(*sys.argv[1:])
