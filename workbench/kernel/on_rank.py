"""A rank's end of the link to its notebook: cells as typed, `input()`, widgets, and the debugger. Runs on the rank.

The notebook's end is `link`. Both use ipyparallel's connections: requests arrive on the control channel, which the rank
reads while a cell runs; what the rank says without being asked is published as a child of the notebook's last
`listen_request`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, final

from workbench.kernel.cells import hide_commands
from workbench.kernel.magics import register_commands

POLL_S = 0.1  # how often a rank that waits for an answer looks for an interrupt
CONNECT_S = 10.0


def prepare(rank: int) -> None:
    """Prepare this rank for cells of a notebook. Further calls do nothing."""
    from IPython import get_ipython

    shell = get_ipython()
    if not hasattr(shell, "workbench_link"):
        shell.workbench_link = RankLink(shell, rank)
        register_commands(shell)


@final
class RankLink:
    """What a notebook's cells need on one rank.

    Args:
        shell: the IPython shell of the rank's ipyparallel engine.
        rank: the rank's number.
    """

    def __init__(self, shell: Any, rank: int) -> None:
        self.rank, self._shell, self._kernel = rank, shell, shell.kernel
        self._listener: dict[str, Any] = {}  # the notebook's request, whose children it hears
        self._numbers = count()  # of questions
        self._answers: dict[int, SimpleQueue[dict[str, Any]]] = {}
        self._traced = False  # whether the debugger traces cells
        self._show_traceback, shell.showtraceback = shell.showtraceback, self._show_traceback_untraced
        kernel = self._kernel
        shell.input_transformers_cleanup.append(hide_commands)
        kernel.raw_input = self._ask
        kernel.getpass = self._ask_secret
        kernel.control_handlers |= {"listen_request": self._listen, "answer_request": self._answer}
        for name in ("comm_msg", "comm_close"):
            kernel.shell_handlers[name] = self._heard(kernel.shell_handlers[name])

    # -- the notebook's requests, on the control thread --------------------------------------------------------------

    def _listen(self, _stream: Any, _idents: Any, request: dict[str, Any]) -> None:
        """Remember the request. It has no answer, so the notebook hears its children until the connection ends."""
        self._listener = request

    def _answer(self, stream: Any, idents: Any, request: dict[str, Any]) -> None:
        waiting = self._answers.get(request["content"]["number"])
        if waiting is not None:
            waiting.put(request["content"])
        self._kernel.session.send(stream, "answer_reply", {"status": "ok"}, parent=request, ident=idents)

    # -- input() -----------------------------------------------------------------------------------------------------

    def _ask(self, prompt: object = "", *, secret: bool = False) -> str:
        """Ask the notebook, and wait for its answer. An interrupt ends the wait.

        Raises:
            EOFError: the user ended the input.
            StdinNotImplementedError: the notebook cannot ask.
        """
        from IPython.core.error import StdinNotImplementedError

        sys.stdout.flush()
        sys.stderr.flush()
        number = next(self._numbers)
        answers = self._answers[number] = SimpleQueue()
        question = {"number": number, "prompt": str(prompt), "secret": secret}
        self._publish("question", question, self._kernel.get_parent("shell"))
        try:
            while True:
                try:
                    answer = answers.get(timeout=POLL_S)
                except Empty:
                    continue
                break
        finally:
            del self._answers[number]
        if answer["status"] == "ok":
            return str(answer["value"])
        raise EOFError if answer["status"] == "end" else StdinNotImplementedError(answer["message"])

    def _ask_secret(self, prompt: str = "Password: ", stream: Any = None, *, echo_char: str | None = None) -> str:
        return self._ask(prompt, secret=True)

    def _publish(self, kind: str, content: dict[str, Any], parent: dict[str, Any]) -> None:
        self._kernel.session.send(
            self._kernel.iopub_socket, kind, content, parent=parent, ident=self._kernel._topic(kind)
        )

    # -- widgets -----------------------------------------------------------------------------------------------------

    def _heard(self, handler: Any) -> Any:
        """Return a handler of a widget's message whose output the notebook hears."""

        def handle(stream: Any, idents: Any, message: dict[str, Any]) -> Any:
            if self._listener:
                self._kernel.set_parent(idents, {**message, "header": self._listener["header"]}, channel="shell")
            return handler(stream, idents, message)

        return handle

    # -- the debugger ------------------------------------------------------------------------------------------------

    def start_debugger(self) -> str:
        """Let debugpy listen on this host's loopback. Return the prefix of the names of this rank's cells.

        Raises:
            ImportError: debugpy is not installed.
        """
        import debugpy
        import zmq
        from ipykernel.compiler import get_tmp_directory
        from zmq.eventloop.zmqstream import ZMQStream

        kernel = self._kernel
        debugger, loop = kernel.debugger, kernel.control_thread.io_loop
        folder: str = get_tmp_directory()  # type: ignore[no-untyped-call]
        if debugger.debugpy_client.debugpy_stream is None:
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)

            async def open_stream() -> None:
                socket: Any = zmq.Context.instance().socket(zmq.STREAM)
                socket.linger = 0
                stream = ZMQStream(socket, loop)
                kernel.debugpy_stream = debugger.debugpy_client.debugpy_stream = stream
                stream.on_recv(kernel.dispatch_debugpy, copy=False)

            debugger.event_callback = self._debug_event
            asyncio.run_coroutine_threadsafe(open_stream(), loop.asyncio_loop).result(CONNECT_S)
            asyncio.run_coroutine_threadsafe(kernel.poll_stopped_queue(), loop.asyncio_loop)
            host, port = debugger.debugpy_client.get_host_port()
            debugpy.listen((host, int(port)))
            debugger.debugpy_initialized = True
        debugpy.trace_this_thread(True)
        self._traced = True
        return folder + os.sep

    def stop_debugger(self) -> None:
        """End the debugger's trace of cells: Python takes three times as long with it, also without a breakpoint."""
        import debugpy

        if self._traced:
            debugpy.trace_this_thread(False)
            self._traced = False

    def _show_traceback_untraced(self, *args: Any, **options: Any) -> None:
        """As IPython's; with the debugger's trace of IPython's own code it took seconds on a busy machine."""
        if not self._traced:
            self._show_traceback(*args, **options)
            return
        import debugpy

        debugpy.trace_this_thread(False)
        try:
            self._show_traceback(*args, **options)
        finally:
            debugpy.trace_this_thread(True)

    def _debug_event(self, event: dict[str, Any]) -> None:
        self._publish("debug_event", event, self._listener)


def start_debugger() -> str:
    """Call `RankLink.start_debugger` on this rank."""
    from IPython import get_ipython

    return str(get_ipython().workbench_link.start_debugger())


def stop_debugger() -> None:
    """Call `RankLink.stop_debugger` on this rank."""
    from IPython import get_ipython

    get_ipython().workbench_link.stop_debugger()
