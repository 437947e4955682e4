"""An engine's process: ipyparallel's own, but quicker to be of use.

    python -m workbench.clusters.engines.engine_process [OPTIONS OF ipyparallel.engine]

What a start costs is mostly imports, and ranks outnumber cores. So the nanny, a process beside each engine, is a fork of it
instead of an interpreter that imports the same again; and torch is imported before the controller is waited for, which
starts at the same time.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

CONTROLLER_S = 300.0  # the cluster's own limit comes first, and ends us
LOOK_S = 0.02


def fork_nanny() -> Callable[..., tuple[str, IO[str]]]:
    """Fork a process that waits to be told whose nanny it is; returns what takes the place of ipyparallel's `start_nanny`.

    To be called before there are threads, sockets or MPI in this process.
    """
    told, tell = os.pipe()
    heard, say = os.pipe()
    if os.fork() == 0:
        os.close(tell)
        os.close(heard)
        try:
            os.setsid()  # signals are not for it
            _be_nanny(told, say)
        finally:
            os._exit(0)
    os.close(told)
    os.close(say)

    def start_nanny(**words: Any) -> tuple[str, IO[str]]:
        with os.fdopen(tell, "wb") as file:
            file.write(pickle.dumps({**words, "pid": os.getpid()}))
        pipe = os.fdopen(heard)
        url = pipe.readline().strip()
        if not url:
            raise RuntimeError("nanny failed")
        return url, pipe  # the nanny ends when this is closed

    return start_nanny


def _be_nanny(told: int, say: int) -> None:
    from ipyparallel.engine.nanny import KernelNanny

    with os.fdopen(told, "rb") as file:
        words = file.read()
    if words:  # else the engine ended before it had a number
        KernelNanny.main(**pickle.loads(words), pipe=os.fdopen(say, "w", buffering=1))


def wait_for_controller() -> None:
    """Until the file that says where it listens is there and whole, where the launcher did not say so itself."""
    if os.environ.get("IPP_CONNECTION_INFO") or "IPP_PROFILE_DIR" not in os.environ:
        return
    path = Path(os.environ["IPP_PROFILE_DIR"], "security", f"ipcontroller-{os.environ.get('IPP_CLUSTER_ID', '')}-engine.json")
    deadline = time.monotonic() + CONTROLLER_S
    while time.monotonic() < deadline:
        try:
            os.environ["IPP_CONNECTION_INFO"] = json.dumps(json.loads(path.read_text()))
        except (OSError, ValueError):  # not there, or not yet whole
            time.sleep(LOOK_S)
        else:
            return


def main() -> None:
    """Become an engine."""
    from ipyparallel.engine import app

    if sys.platform == "linux":
        app.start_nanny = fork_nanny()
    faulthandler.enable()
    import workbench.runtimes.rank.main  # noqa: F401 - for its effect: torch takes seconds to import

    wait_for_controller()
    engine = app.IPEngine.instance()
    engine.initialize()
    os.environ.pop("IPP_CONNECTION_INFO", None)  # it holds the cluster's key, and all that a rank starts would inherit it
    engine.start()


if __name__ == "__main__":
    main()
