"""The engine server: a process of a cluster that imports what engines need, once, and forks each engine.

    python -m workbench.clusters.engines.engine_server    # its standard input is the socket on which it listens

An engine's imports take two seconds of a core, and there may be more engines than cores. The server does them while the
controller starts. Engines are asked for by `forked_engine`, which the launcher starts in their place. The server ends
when the last engine has ended; it has the cluster's mark, so what ends the cluster ends the server.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, final

from workbench.clusters.engines import engine_process, forked_engine
from workbench.clusters.engines.forked_engine import DIFFERENT, FORKED
from workbench.clusters.launchers.base import LIBRARIES
from workbench.clusters.local.fork_server import die_with_parent

SOCKET = "engines.socket"  # in the cluster's folder
MOST_ENGINES = 1024  # that may ask at once
UNUSED_S = 300.0  # without an engine; a cluster's start has a shorter limit
START_S = REQUEST_S = 10.0
# Variables that libraries read when they are loaded.
THREADS = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "NUMEXPR_")
BINDS_THREADS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")  # to cores known at load
AT_LOAD = ("LD_PRELOAD", "MALLOC_", "PYTHON", "TORCH", "PYTORCH_", *THREADS)


def can_fork_engines() -> bool:
    """Return whether this system has what the server needs (Linux)."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def forked_command(path: Path) -> list[str]:
    """Return the command of an engine that the server at `path` forks, without its options."""
    return [sys.executable, "-I", "-S", forked_engine.__file__, str(path)]


def start_engine_server(path: Path, environment: Mapping[str, str]) -> None:
    """Start a server that listens at `path`. A connection is accepted at once, and served after the imports.

    The server is no child of this process, which need not wait for its end.

    Args:
        path: of the socket, which must not exist yet. The server's output goes to a file of this name that ends in .log.
        environment: added to this process's variables.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be started.
    """
    command = [sys.executable, "-m", "workbench.clusters.engines.engine_server"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, path.with_suffix(".log").open("wb") as log:
        listener.bind(str(path))
        listener.listen(MOST_ENGINES)
        variables = {**os.environ, **environment}
        subprocess.run(
            command, env=variables, stdin=listener.fileno(), stdout=log, stderr=log, check=True, timeout=START_S
        )


class Request(NamedTuple):
    """What an engine is started with."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    umask: int
    cores: list[int]
    files: list[int]  # its standard streams


@final
class EngineServer:
    """Forks an engine for each connection, and reports its end there."""

    def __init__(self, listener: socket.socket) -> None:
        self._waits = selectors.DefaultSelector()
        self._listener = listener
        self._waits.register(listener, selectors.EVENT_READ)
        self._engines: dict[int, int] = {}  # pidfd -> process id

    def run(self) -> Request:
        """Serve until the last engine has ended. Returns only in each engine."""
        begun = False
        while not begun or self._engines:
            ready = self._waits.select(None if begun else UNUSED_S)
            if not ready:
                break
            for key, _ in ready:
                if key.fileobj is self._listener:
                    request = self._accept()
                    if request is not None:
                        return request
                    begun = begun or bool(self._engines)
                elif isinstance(key.fileobj, socket.socket):
                    self._kill(key.fileobj, key.data)
                else:
                    self._report(key.fd, key.data)
        os._exit(0)

    def _accept(self) -> Request | None:
        """Fork an engine for a new connection. Return the request in the engine; None in the server."""
        connection = None
        try:
            connection, _ = self._listener.accept()
            connection.settimeout(REQUEST_S)
            request = _read(connection)
        except (OSError, ValueError):  # its process has ended
            if connection is not None:
                connection.close()
            return None
        pid = None
        try:
            if _same_at_load(request):
                pid = os.fork()
                if pid == 0:
                    connection.close()
                    return request
                self._watch(pid, connection)
        except OSError:  # no process or descriptor is left
            self._give_up(pid, connection)
        else:
            if pid is None:
                self._give_up(None, connection)
        for file in request.files:
            os.close(file)
        return None

    def _watch(self, pid: int, connection: socket.socket) -> None:
        end = os.pidfd_open(pid)
        self._engines[end] = pid
        self._waits.register(end, selectors.EVENT_READ, connection)
        self._waits.register(connection, selectors.EVENT_READ, pid)
        _tell(connection, b"%s %d" % (FORKED, pid))

    def _give_up(self, pid: int | None, connection: socket.socket) -> None:
        """Let the process that asked become the engine itself."""
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        _tell(connection, DIFFERENT)
        connection.close()

    def _kill(self, connection: socket.socket, pid: int) -> None:
        """The process that stands for an engine has ended before the engine."""
        if connection.fileno() < 0:  # the engine has ended too, and was reported a moment ago
            return
        self._waits.unregister(connection)
        for kill in (os.killpg, os.kill):  # a new engine is not yet a group
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)

    def _report(self, end: int, connection: socket.socket) -> None:
        """An engine has ended."""
        self._waits.unregister(end)
        os.close(end)
        _, status = os.waitpid(self._engines.pop(end), 0)
        _tell(connection, b"%d" % os.waitstatus_to_exitcode(status))
        with contextlib.suppress(KeyError):
            self._waits.unregister(connection)
        connection.close()

    def close(self) -> None:
        """In an engine: close what is the server's."""
        for key in list(self._waits.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._waits.close()


def _read(connection: socket.socket) -> Request:
    head, files, _, _ = socket.recv_fds(connection, 8, 3)
    try:
        with connection.makefile("rb") as stream:
            values = json.loads(stream.read(int.from_bytes(head, "big")))
        return Request(**values, files=files)
    except (OSError, ValueError):
        for file in files:
            os.close(file)
        raise


def _tell(connection: socket.socket, words: bytes) -> None:
    with contextlib.suppress(OSError):  # the process that stands for the engine has ended
        connection.sendall(words + b"\n")


def _same_at_load(request: Request) -> bool:
    """Return whether an engine would load the libraries that this process has loaded, in the same way."""
    binds = any(name in request.environment for name in BINDS_THREADS)
    if binds and set(request.cores) != os.sched_getaffinity(0):
        return False
    return _read_at_load(request.environment) == _read_at_load(os.environ)


def _read_at_load(environment: Mapping[str, str]) -> dict[str, object]:
    folders = environment.get(LIBRARIES, "").split(os.pathsep)  # mpiexec repeats its own
    chosen = {name: value for name, value in environment.items() if name.startswith(AT_LOAD)}
    return {**chosen, LIBRARIES: list(dict.fromkeys(filter(None, folders)))}


def _take_place(request: Request, server: int) -> None:
    """Make this new process the one that was asked for."""
    os.setsid()
    die_with_parent()
    if os.getppid() != server:  # it ended before the line above
        os._exit(1)
    for file, stream in zip(request.files, (0, 1, 2), strict=True):
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(request.environment)
    os.umask(request.umask)
    os.sched_setaffinity(0, request.cores)
    os.chdir(request.folder)
    _draw_again()


def _draw_again() -> None:
    """Give this process random numbers of its own; Python's own generator does so itself."""
    import numpy

    numpy.random.seed()  # noqa: NPY002 - the generator that users' code may draw from


def main() -> None:
    """Serve; continue here in each engine."""
    if os.fork():
        os._exit(0)
    os.setsid()
    listener = socket.socket(fileno=os.dup(0))
    engine_process.load()
    gc.collect()
    gc.freeze()  # imported objects stay in memory pages that all engines share
    server_pid = os.getpid()
    server = EngineServer(listener)
    request = server.run()
    server.close()
    _take_place(request, server_pid)
    sys.argv = [engine_process.__file__, *request.arguments]
    engine_process.main()


if __name__ == "__main__":
    main()
