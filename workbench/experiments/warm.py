"""Simulated cells without the five seconds that every fresh interpreter takes to import torch.

A server process imports once and forks for each cell; it does nothing else, so that its children begin with one thread and clean
libraries. It ends, and ends its children, when its input does: with the sweep, however that ended.

`main` is the server. It reads one JSON object a line (`number`, `arguments`, `env`, `log`) and writes one for
each child that ended (`number`, `status`).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, final

FIRST = ("torch", "workbench.train_command", "workbench.runtimes.simulate", "workbench.costs", "workbench.analysis")
POLL_S = 0.02
COMMAND = (sys.executable, "-c", "from workbench.experiments.warm import main; main()")


@final
class WarmServer:
    """The sweep's end of the server, which is started at once; `env` is the whole environment of it."""

    def __init__(self, env: dict[str, str], command: Sequence[str] = COMMAND) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True)
        self._ended: dict[int, int] = {}
        self._rest = b""
        self._count = 0

    def start(self, arguments: list[str], env: dict[str, str], log: str) -> WarmProcess:
        """Run `workbench train ARGUMENTS` in a child; what it says goes to `log`."""
        self._count += 1
        self._send({"number": self._count, "arguments": arguments, "env": env, "log": log})
        return WarmProcess(self, self._count)

    def _send(self, words: dict[str, Any]) -> None:
        assert self._process.stdin
        rest = (json.dumps(words) + "\n").encode()
        with contextlib.suppress(BrokenPipeError):  # a server that is gone is told by `status`
            while rest:
                rest = rest[self._process.stdin.write(rest) :]

    def status(self, number: int) -> int | None:
        """A child's exit status; None while it runs; that of the server if it is gone."""
        assert self._process.stdout
        while select.select([self._process.stdout], [], [], 0)[0]:
            read = os.read(self._process.stdout.fileno(), 1 << 16)  # unbuffered: what a buffer holds, `select` does not see
            if not read:
                break
            *lines, self._rest = (self._rest + read).split(b"\n")
            for line in lines:
                told = json.loads(line)
                self._ended[told["number"]] = told["status"]
        return self._ended.get(number, self._process.poll())

    def kill(self, number: int) -> None:
        """End a child."""
        self._send({"number": number, "kill": True})

    def close(self) -> None:
        """End the server and its children."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # one that still imports does not see that its input has ended
            self._process.communicate(timeout=10)
        self._process.kill()
        self._process.communicate()

    @property
    def has_ended(self) -> bool:
        """Whether it is gone, and can start no more."""
        return self._process.poll() is not None


@final
class WarmProcess:
    """A child of the server, as `subprocess.Popen` shows its own."""

    def __init__(self, server: WarmServer, number: int) -> None:
        self._server, self._number = server, number

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._server.status(self._number)

    def kill(self) -> None:
        """End it."""
        self._server.kill(self._number)


def main() -> None:
    """The server: until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in FIRST:
        import_module(name)
    gc.freeze()
    children: dict[int, int] = {}
    try:
        _serve(children)
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _serve(children: dict[int, int]) -> None:
    """Fork what is asked for, report what has ended; `children` is pid -> number."""
    rest = b""
    while True:
        if select.select([0], [], [], POLL_S)[0]:
            read = os.read(0, 1 << 16)
            if not read:
                return
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                _obey(json.loads(line), children)
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                told = {"number": children.pop(pid), "status": os.waitstatus_to_exitcode(status)}
                os.write(1, (json.dumps(told) + "\n").encode())


def _obey(asked: dict[str, Any], children: dict[int, int]) -> None:
    if asked.get("kill"):
        for pid, number in children.items():
            if number == asked["number"]:
                os.killpg(pid, signal.SIGKILL)
        return
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # the child does so too: whoever is first
            os.setpgid(pid, pid)
        children[pid] = asked["number"]
        return
    status = 1
    try:
        os.setpgid(0, 0)
        status = _child(asked)
    except BaseException:  # noqa: BLE001 - a child must never go on as a second server
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _child(asked: dict[str, Any]) -> int:
    from workbench.errors import WorkbenchError
    from workbench.train_command import run_train

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(asked["env"])
    log = os.open(asked["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    try:
        return run_train(asked["arguments"])
    except WorkbenchError as error:
        print(f"workbench: {error}", file=sys.stderr)
        return error.exit_code
