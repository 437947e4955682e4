"""A kernel whose cells run on ranks, and its client, as a front end has one."""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import pytest

from tests.forked import fork_kernels
from workbench.cli.main import main

CELL_S = 120
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def install_kernels(prefix: Path) -> dict[str, str]:
    """Install the kernels into a prefix of their own, with a run store. Return the environment of a kernel."""
    assert main(["kernels", "install", "--prefix", str(prefix)]) == 0
    fork_kernels(prefix)
    here = {
        "JUPYTER_PATH": str(prefix / "share" / "jupyter"),
        "WORKBENCH_RUNS": str(prefix / "runs"),
        "WORKBENCH_RANKS": "2",
    }
    return {
        **os.environ,
        **here,
        "IPP_NONINTERACTIVE": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }


def start_notebook(environment: dict[str, str]) -> Notebook:
    """Start a kernel whose ranks are ready."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", environment["JUPYTER_PATH"])
        found = Notebook("workbench-mpi", environment)
    assert found.cell("pass")[1] == ""  # starts the ranks, and says so
    return found


@final
class Notebook:
    """A kernel with a client."""

    def __init__(self, name: str, env: dict[str, str]) -> None:
        from jupyter_client.manager import KernelManager

        self.manager = KernelManager(kernel_name=name)
        self.manager.start_kernel(env=env)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=CELL_S)

        self.messages: list[dict[str, Any]] = []  # of the last cell
        self.asked: list[str] = []  # prompts of the last cell
        self.reply: dict[str, Any] = {}  # to the last cell
        self._seq = 0

    def cell(
        self, code: str, interrupt_when: str | None = None, answers: Sequence[str] = ()
    ) -> tuple[str, str, list[str]]:
        """Run a cell; interrupt it when it has said that. Returns (text, error as shown, MIME types displayed)."""
        text, error, kinds = [], [], []
        self.messages, self.asked, left = [], [], list(answers)
        interrupted = threading.Event()

        def answer(message: dict[str, Any]) -> None:
            self.asked.append(message["content"]["prompt"])
            self.client.input(left.pop(0))

        def hear(message: dict[str, Any]) -> None:
            self.messages.append(message)
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                text.append(content["text"])
                if interrupt_when and interrupt_when in "".join(text) and not interrupted.is_set():
                    interrupted.set()
                    self.manager.interrupt_kernel()
            elif kind in ("display_data", "execute_result"):
                kinds.extend(sorted(content["data"]))
            elif kind == "error":
                error.append(COLOURS.sub("", "\n".join(content["traceback"])))

        self.reply = self.client.execute_interactive(
            code, timeout=CELL_S, output_hook=hear, stdin_hook=answer, allow_stdin=bool(answers)
        )
        return "".join(text), "".join(error), kinds

    def debug(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The answer of the debugger to a request of the front end."""
        self._seq += 1
        content = {"type": "request", "seq": self._seq, "command": command, "arguments": arguments}
        request = self.client.session.msg("debug_request", content)
        self.client.control_channel.send(request)
        number = request["header"]["msg_id"]
        while (reply := self.client.get_control_msg(timeout=CELL_S))["parent_header"].get("msg_id") != number:
            pass
        return dict(reply["content"])

    def hear_until(self, judge: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Take messages, until one satisfies `judge`; return it. The others are lost."""
        deadline = time.monotonic() + CELL_S
        while time.monotonic() < deadline:
            try:
                message = self.client.get_iopub_msg(timeout=0.2)
            except queue.Empty:
                continue
            if judge(message):
                return dict(message)
        raise AssertionError("no such message")

    def event(self, name: str) -> dict[str, Any]:
        """The next event of that name of the debugger."""
        found = self.hear_until(lambda message: message["content"].get("event") == name)
        return dict(found["content"])

    def ask(self, what: str, *arguments: Any) -> dict[str, Any]:
        """The answer to a request of the shell channel."""
        number = getattr(self.client, what)(*arguments)
        while (reply := self.client.get_shell_msg(timeout=CELL_S))["parent_header"].get("msg_id") != number:
            pass
        return dict(reply["content"])

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel()
