"""An engine's process: ipyparallel's own with a faster start.

    python -m workbench.clusters.engines.engine_process [OPTIONS OF ipyparallel.engine]

Imports take most of the time to start, and there may be more ranks than cores. So the nanny, a process next to each
engine, is a fork of the engine, not a new interpreter with the same imports. Torch is imported while the controller
starts.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

CONTROLLER_S = 300.0  # the cluster's own limit is shorter and ends the engine
POLL_S = 0.02


def fork_nanny() -> Callable[..., tuple[str, IO[str]]]:
    """Fork the nanny. It waits for the arguments of its engine.

    Call this before there are threads, sockets or MPI in this process.

    Returns:
        A replacement for ipyparallel's `start_nanny`.
    """
    arguments_read, arguments_write = os.pipe()
    url_read, url_write = os.pipe()
    if os.fork() == 0:
        os.close(arguments_write)
        os.close(url_read)
        try:
            os.setsid()  # signals to the engine's group do not reach it
            _be_nanny(arguments_read, url_write)
        finally:
            os._exit(0)
    os.close(arguments_read)
    os.close(url_write)

    def start_nanny(**arguments: Any) -> tuple[str, IO[str]]:
        with os.fdopen(arguments_write, "wb") as file:
            file.write(pickle.dumps({**arguments, "pid": os.getpid()}))
        pipe = os.fdopen(url_read)
        url = pipe.readline().strip()
        if not url:
            raise RuntimeError("nanny failed")
        return url, pipe  # the nanny ends when the pipe is closed

    return start_nanny


def _be_nanny(arguments_read: int, url_write: int) -> None:
    from ipyparallel.engine.nanny import KernelNanny

    with os.fdopen(arguments_read, "rb") as file:
        arguments = file.read()
    if arguments:  # empty if the engine ended before it had a number
        KernelNanny.main(**pickle.loads(arguments), pipe=os.fdopen(url_write, "w", buffering=1))


def wait_for_controller() -> None:
    """Wait for the controller's connection file, unless the launcher gave the connection in the environment."""
    if os.environ.get("IPP_CONNECTION_INFO") or "IPP_PROFILE_DIR" not in os.environ:
        return
    path = Path(
        os.environ["IPP_PROFILE_DIR"], "security", f"ipcontroller-{os.environ.get('IPP_CLUSTER_ID', '')}-engine.json"
    )
    deadline = time.monotonic() + CONTROLLER_S
    while time.monotonic() < deadline:
        try:
            os.environ["IPP_CONNECTION_INFO"] = json.dumps(json.loads(path.read_text()))
        except (OSError, ValueError):  # missing or incomplete
            time.sleep(POLL_S)
        else:
            return


def load() -> None:
    """Import what engines need. Torch takes seconds."""
    import ipyparallel.engine.app  # noqa: F401 - for its effect

    import workbench.runtimes.rank.main  # noqa: F401


def main() -> None:
    """Become an engine."""
    from ipyparallel.engine import app

    from workbench.clusters.engines.kernel import EngineKernel

    app.Kernel = EngineKernel
    if sys.platform == "linux":
        app.start_nanny = fork_nanny()
    faulthandler.enable()
    atexit.register(gc.freeze)  # the interpreter's end would search all of torch's objects for garbage: 0.7 s of a core
    load()
    wait_for_controller()
    engine = app.IPEngine.instance()
    engine.initialize()
    os.environ.pop("IPP_CONNECTION_INFO", None)  # it holds the cluster's key, and a rank's children would inherit it
    engine.start()


if __name__ == "__main__":
    main()
