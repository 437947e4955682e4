"""A Jupyter server with the package's extension, on loopback, below a base URL as behind JupyterHub; and made-up runs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
BASE, TOKEN = "/user/ada/", "t" * 32
START_S = 60.0


@final
class Served:
    """A server that runs.

    Args:
        folder: of its own, with its stores, notebooks and state.
        url: its address with the base URL.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.runs, self.clusters = folder / "runs", folder / "cache" / "workbench" / "clusters"

    def ask(
        self, path: str, method: str = "GET", token: str | None = TOKEN, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Return the status and the JSON of an answer."""
        given = {**(headers or {}), **({"Authorization": f"token {token}"} if token else {})}
        request = urllib.request.Request(f"{self.url}workbench/api/{path}", headers=given, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"{}")


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """A server that the configuration of the wheel alone has given the extension; it ends with the block."""
    enabled = folder / "config" / "jupyter_server_config.d" / "workbench.json"
    enabled.parent.mkdir(parents=True)
    shutil.copy(ROOT / "workbench" / "lab" / "jupyter_server_config.json", enabled)
    for name in ("notebooks", "runs", "runtime"):
        (folder / name).mkdir()
    own = {
        "JUPYTER_CONFIG_DIR": folder / "config",
        "JUPYTER_DATA_DIR": folder / "data",
        "JUPYTER_RUNTIME_DIR": folder / "runtime",
        "WORKBENCH_RUNS": folder / "runs",
        "XDG_CACHE_HOME": folder / "cache",
        "PYTHONPATH": ROOT,
    }
    options = ["--no-browser", "--ip=127.0.0.1", "--port=0", "--allow-root", f"--ServerApp.base_url={BASE}"]
    log = (folder / "server.log").open("w")
    process = subprocess.Popen(
        [sys.executable, "-m", "jupyter_server", *options],
        cwd=folder / "notebooks",
        env={**os.environ, **{name: str(path) for name, path in own.items()}, "JUPYTER_TOKEN": TOKEN},
        stdout=log,
        stderr=log,
    )
    try:
        deadline = time.monotonic() + START_S
        while not (found := list((folder / "runtime").glob("jpserver-*.json"))):
            assert process.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.05)
        url = json.loads(found[0].read_text())["url"]
        while not _listens(url):  # it writes its file before it listens
            assert process.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.05)
        yield Served(folder, url)
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def _listens(url: str) -> bool:
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname, address.port), timeout=START_S).close()
    except ConnectionRefusedError:
        return False
    return True


def write_run(root: Path, name: str, *, created: str, losses: Sequence[float] = (2.0, 1.0, 0.5), **info: Any) -> Path:
    """Write a run of two ranks with one evaluation after its last step, and return its folder."""
    folder = root / name
    folder.mkdir(parents=True)
    about = {
        "format": 2,
        "id": name,
        "created": created,
        "status": "finished",
        "clock": "wall",
        "runtime": "mpi",
        "num_workers": 2,
        "algorithm": {"name": "PipeSGD", "settings": {"width": 2}, "defaults": []},
        "problem": {"name": "digits-mlp", "note": ""},
        "settings": {"steps": len(losses), "lr": 0.1, "seed": 0},
        "result": {"steps": len(losses), "seconds": 0.1 * len(losses), "last_step": len(losses) - 1},
    }
    (folder / "run.json").write_text(json.dumps({**about, **info}))
    for rank in range(2):
        rows = [
            {
                "step": step,
                "seconds": 0.1 * (step + 1),
                "samples": 64 * (step + 1),
                "bytes_sent": 100 * (step + 1),
                "loss": loss,
                "num_samples": 32,
            }
            for step, loss in enumerate(losses)
        ]
        if losses:
            own = {name: rows[-1][name] for name in ("step", "seconds", "samples", "bytes_sent")}
            share = {"loss_sum": 20.0, "count": 50, "correct": 45, "judged": 50}
            rows.append({**own, "evaluation": share})
        (folder / f"metrics-{rank:05d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
