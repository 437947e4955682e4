"""Run simulated cells as children of a fork server. A new interpreter for each would take five seconds to import torch.

The server is a new interpreter, because a process with threads, such as that of a sweep, cannot be forked safely.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.connection import Connection, Pipe

import psutil

from workbench.clusters.local.fork_server import ForkServer, serve
from workbench.errors import WorkbenchError

IMPORTS = (
    "torch",
    "workbench.run_spec",
    "workbench.runtimes.simulator.simulate",
    "workbench.costs",
    "workbench.analysis",
)
COMMAND = (sys.executable, "-c", "from workbench.experiments.fork_cells import main; main()")


def start_fork_server(env: dict[str, str], command: Sequence[str] = COMMAND) -> ForkServer:
    """Start a fork server. Its children run `workbench train ARGUMENTS`.

    Args:
        env: the server's whole environment.
        command: starts the server; tests set it.
    """
    here, there = Pipe()
    with there:
        process = psutil.Popen(command, env=env, stdin=there, stdout=subprocess.DEVNULL, start_new_session=True)
    return ForkServer(here, process)


def main() -> None:
    """Run the server, which is connected to its parent by its standard input. Each child also continues here."""
    for name in IMPORTS:
        import_module(name)
    arguments = serve(Connection(os.dup(0)))
    from workbench.run_spec import parse_train, report, resolve, run_simulated

    try:
        options = parse_train(arguments)
        _, *resolved = resolve(options)
        status = report(run_simulated(options, *resolved), options)
    except WorkbenchError as error:
        print(f"workbench: {error}", file=sys.stderr)
        status = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a normal end takes 0.2 s of a core after an import of torch
