"""A fork server: a process that has imported what takes long, and is forked for each process that is to begin with it.

It does nothing else, so that its children begin with one thread and clean libraries (a pool of threads does not outlive a fork). With the
parent's end, however that came, the server ends its children and itself; with the server's, they are told to end (Linux).

They speak in JSON. The parent says `[number, arguments, environment, output]` for a child that is to begin, `[number]` for one that is to
be killed, and `[]` for all and itself. The server says `[number, pid, status]` when a child has begun (status null) and when it has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

import psutil

LOOK_S = 0.05  # how often a server looks whether a child has ended
END_S = 10.0  # to end all children


@final
class ForkServer:
    """A server as its parent sees it.

    Args:
        channel: whose other end the server has, in `serve`.
        process: the server, a child of this process.
    """

    def __init__(self, channel: Connection, process: psutil.Process) -> None:
        self._channel, self._process = channel, process
        self._children: list[Forked] = []
        self._is_silent = False  # it will say nothing more

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> Forked:
        """A child of its own session, whose output is appended to a file; does not wait until it has begun."""
        child = Forked(self, number=len(self._children))
        self._children.append(child)
        self.order(child.number, list(arguments), dict(environment), str(output))
        return child

    def order(self, *order: Any) -> None:
        """For `Forked`."""
        with contextlib.suppress(OSError):  # `hear` finds out that the server is gone
            _say(self._channel, *order)

    def hear(self, wait_s: float = 0.0) -> bool:
        """Take in what the server says of a child, for which it is waited so long; whether that was anything."""
        try:
            if self._is_silent or not self._channel.poll(wait_s):
                return False
            number, pid, status = _heard(self._channel)
        except (EOFError, OSError):
            self._is_silent = True
            return False
        self._children[number].pid, self._children[number].returncode = pid, status
        return True

    @property
    def has_ended(self) -> bool:
        """Whether it is gone, and can start no more."""
        while self.hear():
            pass
        return self._is_silent

    @property
    def returncode(self) -> int | None:
        """The server's own exit status; None while it runs."""
        try:
            return int(self._process.wait(0))
        except psutil.TimeoutExpired:
            return None

    def close(self) -> None:
        """End the server and its children."""
        self.order()
        while self.hear(END_S):
            pass
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.kill()  # one that still imports does not listen
        self._process.wait()
        self._channel.close()
        self._is_silent = True


@final
class Forked:
    """A child of a server, as `subprocess.Popen` shows its own; its `pid` is 0 until it has begun."""

    def __init__(self, server: ForkServer, number: int) -> None:
        self._server, self.number = server, number
        self.pid = 0
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, below 0 by a signal; None while it runs. That of the server, if it was gone before this one began."""
        if self._server.has_ended and self.returncode is None:
            if not self.pid:
                self.returncode = self._server.returncode
            elif not psutil.pid_exists(self.pid):
                self.returncode = -signal.SIGTERM
        return self.returncode

    def kill(self) -> None:
        """End it, and what it started."""
        self._server.order(self.number)


def serve(channel: Connection) -> list[str]:
    """Be the server, until the parent's end. Returns in each child, and there only: the arguments that it was started with."""
    gc.collect()
    gc.freeze()  # what is imported stays as it is, in memory that all share
    try:
        return _Server(channel).run()
    except BaseException:  # noqa: BLE001 - neither a server nor a child may go on as what it was forked off
        traceback.print_exc()
        os._exit(1)


@final
class _Server:
    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._children: dict[int, int] = {}  # number -> process
        self._on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def run(self) -> list[str]:
        with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone
            while True:
                if self._channel.poll(LOOK_S if self._children else None):
                    match _heard(self._channel):
                        case [number, arguments, environment, output]:
                            if self._fork(number, output):
                                os.environ.clear()
                                os.environ.update(environment)
                                return list(arguments)
                        case [number]:
                            self._kill(number)
                        case _:
                            break
                self._reap()
        for number in self._children:
            self._kill(number)
        os._exit(0)

    def _fork(self, number: int, output: str) -> bool:
        """True in the child."""
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            with Path(output).open("a") as log:
                log.write(f"workbench: no process can be forked: {error}\n")
            _say(self._channel, number, 0, 1)
            return False
        if pid:
            self._children[number] = pid
            _say(self._channel, number, pid, None)
            return False
        self._channel.close()
        os.setsid()
        die_with_parent()
        if os.getppid() != server:  # it went before it could be said
            os._exit(0)
        signal.signal(signal.SIGINT, self._on_interrupt)
        nothing = os.open(os.devnull, os.O_RDONLY)
        log_file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for source, stream in ((nothing, 0), (log_file, 1), (log_file, 2)):
            os.dup2(source, stream)
        return True

    def _reap(self) -> None:
        for number, pid in list(self._children.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._children[number]
                _say(self._channel, number, pid, os.waitstatus_to_exitcode(status))

    def _kill(self, number: int) -> None:
        """A child, if it has not ended, and what it started."""
        for kill in (os.killpg, os.kill) if number in self._children else ():  # one that has just been forked is no group yet
            with contextlib.suppress(OSError):
                kill(self._children[number], signal.SIGKILL)


def _say(channel: Connection, *words: Any) -> None:
    channel.send_bytes(json.dumps(words).encode())


def _heard(channel: Connection) -> Any:
    return json.loads(channel.recv_bytes())


def die_with_parent() -> None:
    """In a new process: be told when the one that started it is gone, however it ended (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
