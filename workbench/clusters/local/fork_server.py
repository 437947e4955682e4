"""A fork server: a process that has done slow imports, and forks itself for each process that needs them.

It computes nothing, so its children begin with one thread and clean libraries: a thread pool does not survive a fork.
When the parent ends, for any reason, the server ends its children and itself. When the server ends, its children
get SIGTERM (Linux).

`RankForkServer` is forked off a command, for the ranks of `workbench train`. `experiments.fork_cells` starts one as a
new interpreter, for the cells of a sweep.

Parent and server exchange JSON. The parent sends `[number, arguments, environment, output]` to start a child and
`[number]` to kill one. `[]` ends all children and the server. The server sends `[number, pid, status]` when a child has
begun (status null) and when it has ended.
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
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn, final

import psutil

from workbench.errors import LaunchError
from workbench.machine import is_running

POLL_S = 0.05  # time between two checks whether a child has ended
BEGIN_S = 30.0  # limit for a fork
END_S = 10.0  # limit to end all children
Begin = Callable[[list[str]], NoReturn]  # what a forked rank does with its arguments, until its end


@final
class ForkServer:
    """The parent's end of a fork server.

    Args:
        channel: connection to the server, which runs `serve` at the other end.
        process: the server, a child of this process.
    """

    def __init__(self, channel: Connection, process: psutil.Process) -> None:
        self._channel, self._process = channel, process
        self._children: list[Forked] = []
        self._is_closed = False  # whether no further message can arrive

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> Forked:
        """Start a child in its own session. Does not wait until it has begun.

        Args:
            arguments: given to the child.
            environment: the child's whole environment.
            output: file to which the child's output is appended.
        """
        child = Forked(self, number=len(self._children))
        self._children.append(child)
        self.send(child.number, list(arguments), dict(environment), str(output))
        return child

    def send(self, *message: Any) -> None:
        """Send a message to the server, if it is alive."""
        with contextlib.suppress(OSError):  # `receive` notices that the server has ended
            _send(self._channel, *message)

    def receive(self, wait_s: float = 0.0) -> bool:
        """Read one message about a child.

        Args:
            wait_s: how long to wait for it, in seconds.

        Returns:
            Whether there was a message.
        """
        try:
            if self._is_closed or not self._channel.poll(wait_s):
                return False
            number, pid, status = _receive(self._channel)
        except (EOFError, OSError):
            self._is_closed = True
            return False
        child = self._children[number]
        child.pid, child.returncode = pid, status
        return True

    @property
    def has_ended(self) -> bool:
        """Return True if the server has ended, so it can start no more children."""
        while self.receive():
            pass
        return self._is_closed

    @property
    def returncode(self) -> int | None:
        """The server's own exit status; None while it runs."""
        try:
            return int(self._process.wait(0))
        except psutil.TimeoutExpired:
            return None

    def close(self) -> None:
        """End the server and its children."""
        self.send()
        while self.receive(END_S):
            pass
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.kill()  # a server that still imports does not read messages
        self._process.wait()
        self._channel.close()
        self._is_closed = True


@final
class Forked:
    """A child of a fork server, with the interface of `subprocess.Popen`. Its `pid` is 0 until it has begun."""

    def __init__(self, server: ForkServer, number: int) -> None:
        self._server, self.number = server, number
        self.pid = 0
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs.

        If the server ended before the child began, it is the server's exit status.
        """
        if self._server.has_ended and self.returncode is None:
            if not self.pid:
                self.returncode = self._server.returncode
            elif not is_running(self.pid):
                self.returncode = -signal.SIGTERM
        return self.returncode

    def kill(self) -> None:
        """Kill the child and the processes of its session."""
        self._server.send(self.number)


@final
class RankForkServer:
    """A fork server for ranks, forked off this process. Importing torch takes two seconds of a core per process.

    Make it before this process computes anything or has threads.

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
            os.setsid()  # a terminal's Ctrl-C does not reach it
            null = os.open(os.devnull, os.O_RDWR)
            # A reader that waits for the end of the parent's output must not wait for the server.
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            begin(serve(there))
        there.close()
        self._server = ForkServer(here, psutil.Process(pid))

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> Forked:
        """Start a rank in its own session, and wait until it has begun.

        Args:
            arguments: given to the rank.
            environment: the rank's whole environment.
            output: file to which the rank's output is appended.

        Raises:
            LaunchError: the server has ended, or it does not answer.
        """
        rank = self._server.start(arguments, environment, output)
        while not rank.pid and rank.returncode is None:
            if not self._server.receive(BEGIN_S):
                if self._server.has_ended:
                    reason = "is gone, and the ranks with it (out of memory?)"
                else:
                    reason = f"did not answer in {BEGIN_S:.0f} s"
                raise LaunchError(f"the process that ranks are forked from {reason}: start the command again")
        return rank


def serve(channel: Connection) -> list[str]:
    """Run the server until the parent ends. Returns only in each child, with the arguments of that child."""
    gc.collect()
    gc.freeze()  # imported objects stay in memory pages that all children share
    try:
        return _Server(channel).run()
    except BaseException:  # noqa: BLE001 - server and child must never continue the caller's program
        traceback.print_exc()
        os._exit(1)


@final
class _Server:
    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._children: dict[int, int] = {}  # number -> process id
        self._on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def run(self) -> list[str]:
        with contextlib.suppress(EOFError, ConnectionError):  # the parent has ended
            while True:
                if self._channel.poll(POLL_S if self._children else None):
                    arguments = self._handle_message()
                    if arguments is not None:
                        return arguments
                self._reap()
        for number in self._children:
            self._kill(number)
        os._exit(0)

    def _handle_message(self) -> list[str] | None:
        """Fork or kill a child, as the parent asks. Return the arguments in a new child, None in the server.

        Raises:
            EOFError: the message is none of these, so the server ends.
        """
        match _receive(self._channel):
            case [number, arguments, environment, output]:
                if not self._fork(number, output):
                    return None
                os.environ.clear()
                os.environ.update(environment)
                return list(arguments)
            case [number]:
                self._kill(number)
                return None
            case _:
                raise EOFError

    def _fork(self, number: int, output: str) -> bool:
        """Return True in the child, False in the server."""
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            with Path(output).open("a") as log:
                log.write(f"workbench: the fork of a process failed: {error}\n")
            _send(self._channel, number, 0, 1)
            return False
        if pid:
            self._children[number] = pid
            _send(self._channel, number, pid, None)
            return False
        self._channel.close()
        os.setsid()
        die_with_parent()
        if os.getppid() != server:  # the server ended before the line above
            os._exit(0)
        signal.signal(signal.SIGINT, self._on_interrupt)
        null = os.open(os.devnull, os.O_RDONLY)
        log_file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for source, stream in ((null, 0), (log_file, 1), (log_file, 2)):
            os.dup2(source, stream)
        return True

    def _reap(self) -> None:
        for number, pid in list(self._children.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._children[number]
                _send(self._channel, number, pid, os.waitstatus_to_exitcode(status))

    def _kill(self, number: int) -> None:
        """Kill a child that has not ended, and the processes of its group."""
        for kill in (os.killpg, os.kill) if number in self._children else ():  # a new child is not yet a group
            with contextlib.suppress(OSError):
                kill(self._children[number], signal.SIGKILL)


def _send(channel: Connection, *message: Any) -> None:
    channel.send_bytes(json.dumps(message).encode())


def _receive(channel: Connection) -> Any:
    return json.loads(channel.recv_bytes())


def die_with_parent() -> None:
    """Called in a new process: let the kernel send SIGTERM when the parent ends, for any reason (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
