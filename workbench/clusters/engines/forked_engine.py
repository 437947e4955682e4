"""An engine's place under its launcher: a small process that has the engine forked from the cluster's engine server.

    python -I -S forked_engine.py SOCKET [OPTIONS OF ipyparallel.engine]

mpiexec can only start programs. This one starts in hundredths of a second, because it imports no package. It gives its
environment, working directory, cores and open files to the server (`engine_server`), which forks the engine. Then it
stands for the engine: it passes signals on, and it ends as the engine ends. If it is killed, the server kills the engine.

If there is no server, or the server's libraries were loaded under other variables, it becomes the engine itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from typing import NoReturn

FORKED, DIFFERENT = b"forked", b"different"  # the server's answers
PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")


def become_engine(arguments: list[str]) -> NoReturn:
    """Replace this process by an engine that imports everything itself."""
    os.execv(sys.executable, [sys.executable, "-m", "workbench.clusters.engines.engine_process", *arguments])


def connect(path: str) -> socket.socket | None:
    """Return a connection to the server, which may still be importing; None if it has ended."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.connect(path)
    except OSError:
        server.close()
        return None
    return server


def ask(server: socket.socket, arguments: list[str]) -> int | None:
    """Have an engine forked. Return its process id; None if this process must become the engine."""
    request = json.dumps(
        {
            "arguments": arguments,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "umask": _umask(),
            "cores": sorted(os.sched_getaffinity(0)),
        }
    ).encode()
    try:
        socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(request)
    except OSError:  # it has ended
        return None
    answer = receive(server)
    return int(answer.split()[1]) if answer.startswith(FORKED) else None


def receive(server: socket.socket) -> bytes:
    """Return one line of the server, without its end; empty if the server has ended."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while not found.endswith(b"\n") and (part := server.recv(1)):
            found += part
    return found.removesuffix(b"\n")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def stand_for(engine: int, server: socket.socket) -> NoReturn:
    """Wait for the engine's end, and end in the same way."""

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, number)

    def stop(*_: object) -> None:
        os.kill(engine, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)

    signal.signal(signal.SIGTSTP, stop)
    for name in PASSED_ON:
        signal.signal(getattr(signal, name), pass_on)
    answer = receive(server)
    status = int(answer) if answer else -signal.SIGKILL  # a server that was killed has ended its engines
    if status >= 0:
        os._exit(status)
    if (rank := os.environ.get("OMPI_COMM_WORLD_RANK")) is not None:
        # In the words of Open MPI's mpiexec, which reports no death that the other ranks survive.
        end = f"process rank {rank} with PID {engine} on node {socket.gethostname()} exited on signal {-status}\n"
        with contextlib.suppress(OSError):
            os.write(2, end.encode())
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no other handler
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
    os._exit(1)


def main(path: str, arguments: list[str]) -> NoReturn:
    """Have an engine forked and stand for it, or become one."""
    server = connect(path)
    engine = ask(server, arguments) if server is not None else None
    if server is None or engine is None:
        become_engine(arguments)
    stand_for(engine, server)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
