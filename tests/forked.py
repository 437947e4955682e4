"""Processes that are forked from one that has imported torch: a new interpreter takes two seconds of a core for that.

    command = forked("-m", "workbench", "show", "last")  # in place of [sys.executable, "-m", ...]

A small interpreter without imports stands in for the forked process. It has the process's place in the tree, its group
and its session, passes signals on, and ends as the process does. When it is killed, the process ends, and its session
with it.

Not for tests of how a process begins, or of what is inherited besides streams, folder and environment. On an emulated
network, for processes of all hosts, a fork server must run on one of them.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import json
import marshal
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn

KERNELS = ("ipykernel_launcher", "workbench.kernel")
FIRST_FREE = 200  # a file's number that no stream has
# Of modules that are there at once: with json, signal and socket its start takes twice as long.
STAND_IN = """\
#!{python} -IS
import _signal, _socket, marshal, os, sys
caller = _socket.socket(_socket.AF_UNIX)
caller.connect({address!r})
streams = [0, 1, 2, *(int(os.environ[name]) for name in ("PMI_FD",) if name in os.environ)]  # MPICH's
told = {{"command": sys.argv, "streams": streams, "folder": os.getcwd(), "environment": dict(os.environ)}}
numbers = b"".join(number.to_bytes(4, sys.byteorder) for number in streams)
caller.sendmsg([b"!"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)])
caller.sendall(marshal.dumps(told))
heard = b""
def line():
    global heard
    while b"\\n" not in heard and (more := caller.recv(64)):
        heard += more
    first, _, heard = heard.partition(b"\\n")
    return first
pid = int(line())
for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGUSR2):
    _signal.signal(number, lambda number, _: os.kill(pid, number))
status = int(line() or -_signal.SIGKILL)
if status < 0:
    if "OMPI_COMM_WORLD_RANK" in os.environ:  # as the package's own stand-in
        rank, node = os.environ["OMPI_COMM_WORLD_RANK"], os.uname().nodename
        os.write(2, f"process rank {{rank}} with PID {{pid}} on node {{node}} exited on signal {{-status}}\\n".encode())
    if status != -_signal.SIGKILL:
        _signal.signal(-status, _signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def forked(*arguments: str) -> list[str]:
    """A command that does what this interpreter does with these arguments: `-m MODULE ...` or `-c CODE ...`."""
    from tests.distributed.pool import fork_server

    return [fork_server().python, *arguments]


def write_stand_in(path: Path, address: str) -> None:
    """Write the program of stand-ins.

    Args:
        address: socket of the process that forks.
    """
    path.write_text(STAND_IN.format(python=sys.executable, address=address))
    path.chmod(0o700)


def fork_kernels(folder: Path) -> None:
    """Let the kernels whose specifications are in this folder be forked.

    Returns when a fork takes no time: a kernel's ports are picked before it starts, and another process may take them.
    """
    from tests.distributed.pool import fork_server

    subprocess.run(forked("-c", ""), check=True, timeout=100)
    for path in folder.rglob("kernel.json"):
        spec = json.loads(path.read_text())
        spec["argv"][0] = fork_server().python
        path.write_text(json.dumps(spec))


def fork_starts(
    change: Callable[[Any, str, Any], None], python: str, *kinds: Literal["ranks", "engines", "cells"]
) -> None:
    """Let what this process starts be forked: ranks of its commands, engines of its clusters, cells of its sweeps.

    Args:
        change: sets an attribute: `setattr`, or a test's own.
        python: the program of stand-ins.
    """
    for kind in kinds:
        {"ranks": _fork_ranks, "engines": _fork_engines, "cells": _fork_cells}[kind](change, python)


def _fork_ranks(change: Callable[[Any, str, Any], None], python: str) -> None:
    from workbench.clusters.local import spawn

    change(spawn, "_command", lambda arguments: [python, "-m", "workbench", *arguments])


def _fork_engines(change: Callable[[Any, str, Any], None], python: str) -> None:
    from workbench.clusters.engines import engines, options

    usual = options.engine_command

    def command(launcher: Any, folder: Path) -> list[str]:
        if getattr(launcher, "emulated", False):
            return usual(launcher, folder)
        return [python, "-m", "workbench.clusters.engines.engine_process"]

    change(options, "engine_command", command)
    change(engines, "forks_engines", lambda launcher: False)


def _fork_cells(change: Callable[[Any, str, Any], None], python: str) -> None:
    from workbench.experiments import fork_cells, sweeper

    command = sweeper._Sweeper._command
    server = [python, *fork_cells.COMMAND[1:]]
    change(sweeper._Sweeper, "_command", lambda self, *of: [python, *command(self, *of)[1:]])
    change(sweeper, "start_fork_server", lambda env: fork_cells.start_fork_server(env, server))


def become_forked(caller: socket.socket) -> NoReturn:
    """In the forked process: do what the stand-in was started for."""
    # Out of the way of streams
    caller = socket.socket(fileno=fcntl.fcntl(caller.detach(), fcntl.F_DUPFD_CLOEXEC, FIRST_FREE))
    try:
        _, numbers, _, _ = socket.recv_fds(caller, 1, 4)
        with caller.makefile("rb") as file:
            told = marshal.load(file)
    except (OSError, EOFError):  # the stand-in was killed before it had asked
        os._exit(1)
    received, numbers = numbers, [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE) for number in numbers]
    for number in received:
        os.close(number)
    os.setsid()
    _leave_with(caller)
    _enter_host_of(caller)
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environment"])
    tempfile.tempdir = None  # it is looked up again: TMPDIR may be another
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = paths
    for stream, number in zip(told["streams"], numbers, strict=True):
        os.dup2(number, stream)
        os.close(number)
    sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or os.cpu_count())
    _end(_status(*told["command"]))


def _enter_host_of(caller: socket.socket) -> None:
    """Join the network and the host name of the stand-in, which may be on another host of an emulated network."""
    if not hasattr(socket, "SO_PEERCRED"):
        return  # not on Linux
    pid = int.from_bytes(caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)
    for kind in ("net", "uts"):
        theirs, ours = f"/proc/{pid}/ns/{kind}", f"/proc/self/ns/{kind}"
        if os.readlink(theirs) != os.readlink(ours):
            fd = os.open(theirs, os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(fd, 0) != 0:
                raise OSError(ctypes.get_errno(), f"{theirs} cannot be entered")
            os.close(fd)


def _leave_with(caller: socket.socket) -> None:
    """End this process and its session when its stand-in is gone."""

    def watch() -> None:
        with suppress(OSError):  # it was killed before it read all
            caller.recv(1)  # it says nothing more
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _status(*command: str) -> int:
    try:
        _run(*command)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - printed as the interpreter would
        traceback.print_exc()
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run(python: str, kind: str, what: str, *more: str) -> None:
    kinds = {"engines": "Cluster" in what or what in KERNELS or "reproduce" in more, "cells": "sweep" in more}
    fork_starts(setattr, python, "ranks", *(name for name, needed in kinds.items() if needed))  # type: ignore[arg-type]
    if kind == "-m":
        sys.argv = [what, *more]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    assert kind == "-c", kind
    sys.argv = ["-c", *more]
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(what, "<string>", "exec"), main.__dict__)


def _end(status: int) -> NoReturn:
    """As an interpreter ends."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()  # an mpiexec would take any other end for a failure
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # no process reads it, or it is closed
            continue
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    if "PMI_FD" in os.environ:
        ctypes.CDLL(None).exit(status)  # MPICH tells its mpiexec at the end of a process that it ends in order
    os._exit(status)
