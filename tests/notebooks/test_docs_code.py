"""The code of README and of the pages in `docs/` runs, page by page; and the site is built."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.chromium import BROWSER, needs_browser
from tests.forked import forked

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"^print\(.*\)\n(?:\w+\.close\(\)\n)?```\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_HERE = ("# needs ", "# in JupyterLab", "# on ")  # first words of blocks that need what a test lacks
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = """
import torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader, loss_fn = [(torch.ones(4, 3), torch.ones(4, 1))] * 3, torch.nn.functional.mse_loss
"""


def code_of(path: Path) -> str:
    """The blocks of a page that can run here, as one script."""
    blocks = [block for block in BLOCK.findall(path.read_text(encoding="utf-8")) if not block.startswith(NOT_HERE)]
    return "\n".join([README if path.name == "README.md" else "", *blocks])


RUNNABLE = [path for path in PAGES if "_build" not in path.parts and code_of(path).strip()]


@pytest.mark.notebooks
@pytest.mark.mpi
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("no_process_left")
@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_runs(path: Path, tmp_path: Path) -> None:
    code = f"import warnings\nwarnings.simplefilter('ignore')\n{code_of(path)}"
    environment = {**os.environ, "WORKBENCH_RUNS": str(tmp_path / "runs")}
    done = subprocess.run(
        forked("-c", code), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=220, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for shown in OUTPUT.findall(path.read_text(encoding="utf-8")):
        for line in shown.splitlines():  # "..." at its end: it was longer
            assert line.removesuffix("...").rstrip() in done.stdout, f"{line!r} is not what the page prints"


@pytest.mark.notebooks
@pytest.mark.timeout(400)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="needs Sphinx: pip install 'sgd-workbench[docs]'")
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "build.py"), "html", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {path.relative_to(tmp_path / "html").as_posix() for path in (tmp_path / "html").rglob("*.html")}
    assert {"index.html", "reference.html", "notebooks/00-tour.html", "papers/li2018pipesgd/card.html"} <= pages
    assert "<math" in (tmp_path / "html" / "algorithms" / "delayed.html").read_text(encoding="utf-8")
    remote = re.compile(r"""(?:src|href)="https?://[^"]*\.(?:js|css)""")
    assert not remote.search((tmp_path / "html" / "index.html").read_text(encoding="utf-8")), "it is read offline"
    pictures = [
        (path, text)
        for path in (tmp_path / "html").rglob("*.html")
        for text in re.findall(r'<img[^>]* alt="([^"]*)"', path.read_text(encoding="utf-8"))
    ]
    stems = {path.stem for path in (tmp_path / "html" / "_images").iterdir()}
    assert len(pictures) > 100 and [one for one in pictures if len(one[1].split()) < 3 or one[1] in stems] == []
    search_finds(tmp_path / "html", "PipeSGD", "synchronous-sgd")


def search_finds(site: Path, *words: str) -> None:
    """The site's search works without a server."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install 'sgd-workbench[dev]'")
    needs_browser()
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        for word in words:
            page.goto(f"{(site / 'search.html').as_uri()}?q={word}")
            page.locator("#search-results li a").first.wait_for(timeout=60_000)
        browser.close()
