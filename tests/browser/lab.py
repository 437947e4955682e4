"""A real JupyterLab on loopback, with separate folders, and a headless Chromium that shows it."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final
from urllib.parse import urlsplit

import nbformat
import psutil
from playwright.sync_api import Locator, Page, sync_playwright

from tests.browser.chromium import BROWSER
from tests.forked import fork_kernels

ROOT = Path(__file__).parents[2]
START_S = 120.0
PATIENCE_S = 120.0  # a crowded machine takes its time; nothing waits that long where the thing works
SLOW = (  # errors of other extensions in a browser that was slow
    "[anywidget] Failed to initialize model",  # live figures do not mind
    "Cannot read properties of undefined (reading 'schema')",  # Notebook: shortcuts whose settings are not loaded yet
)
SHOWN = ("--allow-root", "--LabApp.expose_app_in_browser=True", "--LabApp.extension_manager=readonly")
QUIET = {  # Lab asks its users, over the network, whether they want news
    "@jupyterlab/apputils-extension/notification.jupyterlab-settings": {"fetchNews": "false", "checkForUpdates": False},
    # Cells out of sight are there, too
    "@jupyterlab/notebook-extension/tracker.jupyterlab-settings": {"windowingMode": "none"},
    "@jupyterlab/docmanager-extension/plugin.jupyterlab-settings": {"autosave": False},
}


def eventually(judge: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S, page: Page | None = None) -> Any:
    """Call `judge` until it returns a true value, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (found := judge()):
        assert time.monotonic() < deadline, f"still not, after {timeout_s:g} s: {what}"
        if page is not None:
            page.wait_for_timeout(100)  # and not time.sleep: the browser's own events are handled meanwhile
        else:
            time.sleep(0.1)
    return found


def artefacts() -> Path:
    """Where pictures are kept: $WORKBENCH_ARTEFACTS, else runs/artefacts, which git ignores."""
    folder = Path(os.environ.get("WORKBENCH_ARTEFACTS") or ROOT / "runs" / "artefacts")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Server(ABC):
    """A server on loopback that shows JupyterLab: started here, ended by `stop`, and with it all that its kernels started.

    Args:
        folder: of its own; its notebooks are in `folder / "notebooks"`, its run store in `folder / "runs"`.
        command: starts it.
        forked: its kernels and their engines are forked from a process that has imported torch.
    """

    url: str

    def __init__(self, folder: Path, command: Sequence[str], *, forked: bool = False) -> None:
        self.notebooks, self.runs = folder / "notebooks", folder / "runs"
        self.notebooks.mkdir(parents=True)
        self.token = secrets.token_hex(16)
        self._mark = secrets.token_hex(16)
        self._log = (folder / "server.log").open("w")
        self.runtime = folder / "runtime"
        settings = folder / "settings"
        for name, content in QUIET.items():
            path = settings / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content))
        for spec in ROOT.glob("kernels/*/kernel.json"):
            shutil.copytree(spec.parent, folder / "data" / "kernels" / spec.parent.name)
        if forked:
            fork_kernels(folder / "data")
        # As the wheel installs them, but those of this checkout
        extensions = folder / "data" / "labextensions"
        shutil.copytree(ROOT / "workbench" / "lab" / "static", extensions / "sgd-workbench")
        shutil.copytree(ROOT / "workbench" / "plots" / "labextension", extensions / "sgd-workbench-figures")
        enabled = folder / "config" / "jupyter_server_config.d" / "workbench.json"
        enabled.parent.mkdir(parents=True)
        shutil.copy(ROOT / "workbench" / "lab" / "jupyter_server_config.json", enabled)
        own = {
            "JUPYTER_CONFIG_DIR": folder / "config",
            "JUPYTER_DATA_DIR": folder / "data",
            "JUPYTER_PATH": folder / "data",  # before the kernels that are installed in this environment
            "JUPYTER_RUNTIME_DIR": self.runtime,
            "JUPYTERLAB_SETTINGS_DIR": settings,
            "JUPYTERLAB_WORKSPACES_DIR": folder / "workspaces",
            "IPYTHONDIR": folder / "ipython",
            "WORKBENCH_RUNS": self.runs,
            "XDG_CACHE_HOME": folder / "cache",  # other clusters of this user are not listed
            "JUPYTER_PREFER_ENV_PATH": 0,  # else the front end that is installed, which may be another checkout's
        }
        environment = {**os.environ, **{name: str(path) for name, path in own.items()}}
        environment |= {"JUPYTER_TOKEN": self.token, "WORKBENCH_TEST_MARK": self._mark, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._command = command
        self._environment = environment

    def start(self, *options: str) -> None:
        """Start it, with more options of its command, and wait for its address."""
        self._process = subprocess.Popen(
            [*self._command, *options],
            cwd=self.notebooks,
            env=self._environment,
            stdout=self._log,
            stderr=self._log,
        )
        try:
            self.url = eventually(self._its_address, "the server's address", START_S)
        except BaseException:
            self.stop()
            raise

    def _its_address(self) -> str | None:
        assert self._process.poll() is None, f"the server ended: see {self._log.name}"
        return self.address()

    @abstractmethod
    def address(self) -> str | None:
        """Where it answers; None before it does."""

    def kill(self) -> None:
        """End it as a crash does."""
        self._process.kill()
        self._process.wait()

    def ask(self, path: str, method: str = "GET") -> bytes:
        """The server's answer to a request of its own interface."""
        request = urllib.request.Request(
            f"{self.url}{path}", headers={"Authorization": f"token {self.token}"}, method=method
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            content: bytes = answer.read()
        return content

    def write(self, name: str, *cells: str, kernel_name: str = "workbench") -> Path:
        """A notebook of the Workbench kernel, or of another one."""
        kernel = {"name": kernel_name, "display_name": kernel_name, "language": "python"}
        content = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(text) for text in cells], metadata={"kernelspec": kernel}
        )
        nbformat.write(content, self.notebooks / name)
        return self.notebooks / name

    def stop(self) -> list[str]:
        """End the server. Kill the processes that it left, and return their command lines."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        deadline = time.monotonic() + 15
        while (left := list(self._left())) and time.monotonic() < deadline:
            time.sleep(0.1)
        told = []
        for process in left:
            try:
                told.append(" ".join(process.cmdline())[:150])
                process.kill()
            except psutil.Error:  # gone meanwhile
                continue
        return told

    def _left(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get("WORKBENCH_TEST_MARK") == self._mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    yield process
            except psutil.Error:  # gone meanwhile, or another user's
                continue


@final
class JupyterServer(Server):
    """A Jupyter server.

    Args:
        folder: of its own.
        base_url: the path below which it answers, as behind a proxy.
        app: the module of the page: jupyterlab or notebook.
        forked: as for `Server`.
    """

    def __init__(self, folder: Path, base_url: str = "/", app: str = "jupyterlab", *, forked: bool = False) -> None:
        options = [
            "--no-browser",
            "--ip=127.0.0.1",
            f"--ServerApp.base_url={base_url}",
            "--expose-app-in-browser",
            *SHOWN,
        ]
        super().__init__(folder, [sys.executable, "-m", app, *options], forked=forked)
        self.start("--port=0")

    def address(self) -> str | None:
        for path in self.runtime.glob("jpserver-*.json"):
            with suppress(ValueError, ConnectionRefusedError):  # the file is half written, or nobody listens yet
                url: str = json.loads(path.read_text())["url"]
                address = urlsplit(url)
                socket.create_connection((address.hostname, address.port), timeout=START_S).close()
                return url
        return None

    def restart(self, pause_s: float) -> None:
        """Kill the server, and start it again at the same address."""
        port = urlsplit(self.url).port
        self.kill()
        for path in self.runtime.glob("jpserver-*"):
            path.unlink()
        time.sleep(pause_s)
        self.start(f"--port={port}")


@final
class Lab:
    """A page of the browser that shows a server's JupyterLab.

    Args:
        server: whose.
        page: the browser's.
    """

    def __init__(self, server: Server, page: Page) -> None:
        self.server, self.page = server, page
        self.errors: list[str] = []
        page.set_default_timeout(1000 * PATIENCE_S)
        page.on("pageerror", self._note)

    def _note(self, error: Any) -> None:
        if not any(known in str(error) for known in SLOW):
            self.errors.append(str(error))

    def open(self, name: str = "") -> None:
        """Show the launcher, or a notebook whose kernel is ready."""
        path = f"/tree/{name}" if name else ""
        self.page.goto(f"{self.server.url}lab{path}?token={self.server.token}&reset")
        self.page.wait_for_selector(".jp-NotebookPanel:visible" if name else ".jp-Launcher:visible")
        if name:
            self.idle()

    def idle(self) -> None:
        """Wait until the kernel is idle, and Lab shows it."""
        self.page.wait_for_function(
            """() => {
                const session = window.jupyterapp.shell.currentWidget?.sessionContext;
                return session && session.isReady && session.session?.kernel?.status === 'idle';
            }"""
        )

    def theme(self, name: str) -> None:
        """Change the theme of JupyterLab, and wait for its end: Lab fails if it is asked again meanwhile."""
        self.page.evaluate(
            "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })",
            name,
        )
        self.page.wait_for_function("theme => document.body.dataset.jpThemeName === theme", arg=name)
        self.page.wait_for_timeout(1000)  # its style sheets are loaded

    def run_cell(self, number: int) -> None:
        """Run one; returns before it has run."""
        self.page.evaluate(
            """number => {
                const panels = Array.from(window.jupyterapp.shell.widgets('main'));
                const panel = panels.find(one => one.content?.deselectAll);  // another tab may have come to the front
                window.jupyterapp.shell.activateById(panel.id);
                const notebook = panel.content;
                notebook.activeCellIndex = number; notebook.deselectAll();
                window.jupyterapp.commands.execute('notebook:run-cell');
            }""",
            number,
        )

    def cell(self, number: int) -> Locator:
        """A code cell with its outputs."""
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(number)

    def has_run(self, number: int) -> bool:
        """Whether a cell has ended: its prompt shows a number, and no star."""
        prompt = self.cell(number).locator(".jp-InputPrompt").first.inner_text()
        return bool(re.search(r"\[\d+\]", prompt))

    def until(self, judge: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
        """Wait until `judge` returns a true value, and return it. At the time-out, save a picture of the page."""
        try:
            return eventually(judge, what, timeout_s, self.page)
        except AssertionError:
            self.picture("failed")
            raise

    def reach(self, number: int) -> float:
        """How far to the right the curves drawn in a cell's output go; 0 without one."""
        ends = (
            self.cell(number)
            .locator(".js-plotly-plot")
            .evaluate_all(
                """plots => plots.flatMap(plot => (plot._fullData || []).map(
                trace => trace.type === 'scatter' && trace.x?.length > 1 ? Number(trace.x[trace.x.length - 1]) : 0))"""
            )
        )
        return max(ends, default=0.0)

    def num_lines(self, number: int) -> int:
        """How many curves are drawn in a cell's output."""
        return self.cell(number).locator(".js-plotly-plot .scatterlayer .js-line").count()

    def num_bars(self, number: int) -> int:
        """How many bars of timelines are drawn in a cell's output."""
        return self.cell(number).locator(".js-plotly-plot .barlayer .point").count()

    def scroll(self, number: int) -> None:
        """Bring the end of a cell into view."""
        self.cell(number).locator(".jp-OutputArea-child").last.evaluate(
            "output => output.scrollIntoView({block: 'end'})"
        )

    def save(self) -> list[list[dict[str, Any]]]:
        """Write the notebook that is shown; each cell's outputs as its file holds them: mimetype -> content."""
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
        name = self.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.path")
        cells = nbformat.read(self.server.notebooks / name, as_version=4).cells
        return [[dict(output["data"]) for output in cell.outputs if "data" in output] for cell in cells]

    def picture(self, name: str) -> Path:
        """Keep what the page shows now."""
        path = artefacts() / f"{name}.png"
        self.page.screenshot(path=path)
        return path


@contextmanager
def browsing(folder: Path, kind: Callable[..., Server] = JupyterServer, **how: Any) -> Iterator[Lab]:
    """A server and a page of a browser that shows it; both end with the block, and nothing may be left of the server.

    Args:
        folder: the server's.
        kind: makes the server.
        how: more arguments of `kind`.
    """
    server = kind(folder, **how)
    left: list[str] = []
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_context(viewport={"width": 1400, "height": 1300}).new_page()
            yield Lab(server, page)
            browser.close()
    finally:
        left = server.stop()
    assert not left, "processes left behind:\n" + "\n".join(left)
