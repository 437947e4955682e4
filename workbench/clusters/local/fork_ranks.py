"""Ranks that begin where everything is imported: forked off a fork server, which is forked off this process before it computes anything.

torch's import takes two seconds of a core, for each rank that is started on its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import NoReturn, final

import psutil

from workbench.clusters.local.fork_server import Forked, ForkServer, serve
from workbench.errors import LaunchError

BEGIN_S = 30.0  # to fork
Begin = Callable[[list[str]], NoReturn]  # what a rank does with its arguments, to its end


@final
class Nursery:
    """A fork server of ranks. Make it before this process computes anything, or has threads of its own.

    Args:
        begin: what a forked rank does.
        load: imports what ranks need.
    """

    def __init__(self, begin: Begin, load: Callable[[], object]) -> None:
        load()
        sys.stdout.flush()
        sys.stderr.flush()
        here, there = Pipe()
        pid = os.fork()
        if pid == 0:
            here.close()
            os.setsid()  # no Ctrl-C of a terminal comes here
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):  # whoever waits for the parent's output to end does not wait for ours
                os.dup2(nothing, stream)
            begin(serve(there))
        there.close()
        self._server = ForkServer(here, psutil.Process(pid))

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> Forked:
        """A rank of its own session, whose output is appended to a file.

        Raises:
            LaunchError: the server is gone, or does not answer.
        """
        rank = self._server.start(arguments, environment, output)
        while not rank.pid and rank.returncode is None:
            if not self._server.hear(BEGIN_S):
                gone = "is gone, and they with it: was it killed, for memory perhaps?"
                raise LaunchError(f"the process that ranks are forked from {gone if self._server.has_ended else 'does not answer'}")
        return rank
