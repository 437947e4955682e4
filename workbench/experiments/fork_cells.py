"""Simulated cells without the five seconds that every fresh interpreter takes to import torch: children of a fork server.

The server is started as an interpreter of its own: a sweep may have threads, and have computed.
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

FIRST = ("torch", "workbench.run_spec", "workbench.runtimes.simulator.simulate", "workbench.costs", "workbench.analysis")
COMMAND = (sys.executable, "-c", "from workbench.experiments.fork_cells import main; main()")


def warm_server(env: dict[str, str], command: Sequence[str] = COMMAND) -> ForkServer:
    """Started at once, with `env` as its whole environment; its children run `workbench train ARGUMENTS`."""
    here, there = Pipe()
    with there:
        process = psutil.Popen(command, env=env, stdin=there, stdout=subprocess.DEVNULL, start_new_session=True)
    return ForkServer(here, process)


def main() -> None:
    """The server, whose parent is at its standard input, and each child."""
    for name in FIRST:
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
    os._exit(status)  # an interpreter that has imported torch takes 0.2 s of a core to end, which no cell needs
