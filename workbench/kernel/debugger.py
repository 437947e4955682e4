"""The debugger of cells on ranks: one session of the front end, answered by one or more ranks."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, final

from ipykernel.compiler import get_file_name, get_tmp_directory, get_tmp_hash_seed

from workbench.errors import LaunchError
from workbench.kernel.link import Link
from workbench.kernel.on_rank import start_debugger, stop_debugger

REQUEST_S = 15.0  # limit for an answer of a rank's debugger
RELEASE_S = 5.0  # limit for leaving a rank before an interrupt; a rank of a busy machine took more than 0.5
START_S = 60.0  # limit for the start of a rank's debugger
MAIN_THREAD = 1  # debugpy's number for it
STEPS = frozenset({"next", "stepIn", "stepOut"})
REMEMBERED = ("setBreakpoints", "setExceptionBreakpoints", "setFunctionBreakpoints")
FILTERS = [
    {"filter": "raised", "label": "Raised Exceptions", "default": False},
    {"filter": "uncaught", "label": "Uncaught Exceptions", "default": False},
    {"filter": "userUnhandled", "label": "User Uncaught Exceptions", "default": False},
]


class DebuggedRanks(Protocol):
    """The connection to the ranks' debuggers."""

    async def start(self, rank: int, timeout_s: float) -> str:
        """Start debugpy on a rank that runs no cell. Return the prefix of the names of its cells."""

    def stop(self, rank: int) -> None:
        """Let the rank's cells run without debugpy's trace as soon as it runs no cell."""

    async def request(self, rank: int, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the rank's answer to a request."""


@final
class RanksDebugger:
    """A debugger session whose breakpoints stop ranks.

    The front end knows one process. It sees the rank that stopped first; when that rank continues, the next one that
    has stopped is shown. Breakpoints and cells are remembered, and are given to ranks that start later.

    All methods run on the event loop of the kernel's control thread.

    Args:
        publish: sends an event to the front end.
    """

    def __init__(self, publish: Callable[[dict[str, Any]], None]) -> None:
        self._publish = publish
        self._ranks: DebuggedRanks | None = None
        self._num_ranks = 0
        self._prefixes: dict[int, str] = {}  # rank that is debugged -> prefix of the names of its cells
        self._prefix: str = get_tmp_directory() + os.sep  # type: ignore[no-untyped-call]  # in the front end's names of cells
        self._stopped: dict[int, dict[str, Any]] = {}  # rank -> event, in order of arrival
        self._not_left: set[int] = set()  # ranks that could not be left in time: their old session is ended first
        self._steps: int | None = None  # the rank that carries out a step
        self._remembered: dict[tuple[str, str], dict[str, Any]] = {}  # (command, source) -> request
        self._seq = 1_000_000  # of requests that the front end did not make
        self._updating = asyncio.Lock()
        self._handlers: dict[str, Callable[[dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]]] = {
            "debugInfo": self._debug_info,
            "initialize": self._initialize,
            "attach": self._done,  # `update` attaches, when the ranks are free
            "configurationDone": self._done,
            "disconnect": self._disconnect,
            "terminate": self._disconnect,
            "dumpCell": self._dump_cell,
            **dict.fromkeys(REMEMBERED, self._set_breakpoints),
            "continue": self._continue,
            "stackTrace": self._stack_trace,
        }
        self.started = False
        self.chosen: tuple[int, ...] = (0,)  # the ranks that `update` attaches to

    @property
    def shown(self) -> int:
        """The rank that the front end sees."""
        if self._steps is not None:
            return self._steps
        return next(iter(self._stopped), min(self._prefixes, default=min(self.chosen)))

    @property
    def stopped(self) -> list[int]:
        """Ranks that have stopped, in order."""
        return list(self._stopped)

    # -- the ranks ---------------------------------------------------------------------------------------------------

    async def use(self, ranks: DebuggedRanks | None, num_ranks: int) -> None:
        """Debug the ranks of another cluster, which run no cell; None if there are none any more."""
        for rank in list(self._stopped):
            self._continued(rank)
        self._prefixes.clear()
        self._not_left.clear()
        self._ranks, self._num_ranks = ranks, num_ranks
        await self.update()

    async def update(self) -> None:
        """Attach to the chosen ranks, and leave others. The ranks run no cell.

        Raises:
            TimeoutError: a rank does not answer.
        """
        wanted = [rank for rank in self.chosen if rank < self._num_ranks] if self.started and self._ranks else []
        async with self._updating:
            for rank in [rank for rank in self._prefixes if rank not in wanted]:
                await self._leave(rank)
                del self._prefixes[rank]
            for rank in [rank for rank in wanted if rank not in self._prefixes]:
                await self._attach(rank)

    async def _attach(self, rank: int) -> None:
        assert self._ranks is not None
        self._prefixes[rank] = await self._ranks.start(rank, START_S)
        try:
            if rank in self._not_left:
                await self._end_session(rank)
                self._not_left.discard(rank)
            await self._ask(rank, self._request("initialize", {"clientID": "workbench", "adapterID": ""}))
            await self._ask(rank, self._request("attach", {}))
            for request in list(self._remembered.values()):
                await self._ask(rank, request)
        except BaseException:
            del self._prefixes[rank]
            raise

    async def release(self) -> None:
        """Leave the ranks before they are interrupted; `update` attaches again. Those that have stopped continue.

        A rank that has stopped is inside the debugger's own code, where an interrupt waits for its end.
        """
        self._steps = None
        ranks = list(self._prefixes)
        left = (asyncio.wait_for(self._release(rank), RELEASE_S) for rank in ranks)
        for rank, failure in zip(ranks, await asyncio.gather(*left, return_exceptions=True), strict=True):
            if failure is not None:
                self._not_left.add(rank)
        for rank in self.stopped:
            self._continued(rank)
        self._prefixes.clear()

    async def _release(self, rank: int) -> None:
        for (command, _), request in self._remembered.items():
            if command == "setBreakpoints":
                arguments = {**request["arguments"], "breakpoints": [], "lines": []}
                await self._ask(rank, self._request(command, arguments))
        if rank in self._stopped:
            await self._ask(rank, self._request("continue", {"threadId": MAIN_THREAD}))
        await self._leave(rank)

    def returned(self, rank: int) -> None:
        """Note that a rank has returned from its cell: a step has ended there."""
        if self._steps == rank:
            self._steps = None
            self._show_next()

    async def _leave(self, rank: int) -> None:
        assert self._ranks is not None
        self._ranks.stop(rank)
        await self._end_session(rank)

    async def _end_session(self, rank: int) -> None:
        await self._ask(rank, self._request("disconnect", {"restart": False, "terminateDebuggee": False}))

    async def _ask(self, rank: int, request: dict[str, Any]) -> dict[str, Any]:
        assert self._ranks is not None
        prefix = self._prefixes[rank]
        answer = await self._ranks.request(rank, _renamed(request, self._prefix, prefix), REQUEST_S)
        return dict(_renamed(answer, prefix, self._prefix))

    def _request(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self._seq += 1
        return {"type": "request", "seq": self._seq, "command": command, "arguments": arguments}

    # -- requests of the front end -----------------------------------------------------------------------------------

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request of the front end. A failure is an answer without success."""
        try:
            return await self._handlers.get(request["command"], self._forward)(request)
        except Exception as error:  # noqa: BLE001 - the front end waits for an answer
            return _reply(request, message=f"{type(error).__name__}: {error}")

    async def _debug_info(self, request: dict[str, Any]) -> dict[str, Any]:
        breakpoints = [
            {"source": source, "breakpoints": known["arguments"]["breakpoints"]}
            for (command, source), known in self._remembered.items()
            if command == "setBreakpoints"
        ]
        body = {
            "isStarted": self.started,
            "hashMethod": "Murmur2",
            "hashSeed": get_tmp_hash_seed(),  # type: ignore[no-untyped-call]
            "tmpFilePrefix": self._prefix,
            "tmpFileSuffix": ".py",
            "breakpoints": breakpoints,
            "stoppedThreads": [MAIN_THREAD] if self._stopped else [],
            "richRendering": True,
            "exceptionPaths": ["Python Exceptions"],
            "copyToGlobals": True,
        }
        return _reply(request, body)

    async def _initialize(self, request: dict[str, Any]) -> dict[str, Any]:
        self.started = True
        capabilities = {
            "supportsConfigurationDoneRequest": True,
            "supportsConditionalBreakpoints": True,
            "supportsHitConditionalBreakpoints": True,
            "supportsEvaluateForHovers": True,
            "supportsSetVariable": True,
            "supportsSetExpression": True,
            "supportsLogPoints": True,
            "exceptionBreakpointFilters": FILTERS,
        }
        return _reply(request, capabilities)

    async def _done(self, request: dict[str, Any]) -> dict[str, Any]:
        return _reply(request)

    async def _disconnect(self, request: dict[str, Any]) -> dict[str, Any]:
        for rank in list(self._prefixes):
            try:
                await self._leave(rank)
            except TimeoutError:
                self._not_left.add(rank)
        self._prefixes.clear()
        self._stopped.clear()
        self._remembered.clear()
        self._steps, self.started = None, False
        return _reply(request)

    async def _dump_cell(self, request: dict[str, Any]) -> dict[str, Any]:
        path: str = get_file_name(request["arguments"]["code"])  # type: ignore[no-untyped-call]
        self._remembered["dumpCell", path] = request
        for rank in self._prefixes:
            await self._ask(rank, request)
        return _reply(request, {"sourcePath": path})

    async def _set_breakpoints(self, request: dict[str, Any]) -> dict[str, Any]:
        arguments = request["arguments"]
        source = arguments.get("source", {}).get("path", "")
        self._remembered[request["command"], source] = request
        answers = [await self._ask(rank, request) for rank in self._prefixes]
        if answers:
            return answers[0]
        lines = [{"verified": True, "line": each.get("line")} for each in arguments.get("breakpoints", ())]
        return _reply(request, {"breakpoints": lines})

    async def _continue(self, request: dict[str, Any]) -> dict[str, Any]:
        self._steps = None
        return await self._forward(request)

    async def _stack_trace(self, request: dict[str, Any]) -> dict[str, Any]:
        rank, answer = self.shown, await self._forward(request)
        if self._num_ranks > 1:
            for frame in answer.get("body", {}).get("stackFrames", ()):
                frame["name"] = f"rank {rank}: {frame['name']}"
        return answer

    async def _forward(self, request: dict[str, Any]) -> dict[str, Any]:
        rank = self.shown
        if rank not in self._prefixes:
            empty: dict[str, dict[str, Any]] = {
                "inspectVariables": {"variables": []},
                "modules": {"modules": [], "totalModules": 0},
            }
            body = empty.get(request["command"])
            return _reply(request, body, "" if body else f"rank {rank} is not debugged: it has not started")
        if request["command"] in STEPS:
            self._steps = rank
        return await self._ask(rank, request)

    # -- events of the ranks -----------------------------------------------------------------------------------------

    def heard(self, rank: int, event: dict[str, Any]) -> None:
        """Take an event of a rank's debugger."""
        if rank not in self._prefixes:
            return
        event = _renamed(event, self._prefixes[rank], self._prefix)
        if event["event"] == "stopped":
            shown = self.shown if self._stopped or self._steps is not None else rank
            if self._steps == rank:
                self._steps = None
                self._stopped = {rank: event, **self._stopped}
            else:
                self._stopped[rank] = event
            if rank == shown:
                self._publish(event)
        elif event["event"] == "continued":
            self._continued(rank, event)
        elif rank == self.shown:
            self._publish(event)

    def _continued(self, rank: int, event: dict[str, Any] | None = None) -> None:
        was_shown = rank == self.shown
        if self._stopped.pop(rank, None) is None or not was_shown:
            return
        body = {"threadId": MAIN_THREAD, "allThreadsContinued": True}
        self._seq += 1
        self._publish(event or {"type": "event", "seq": self._seq, "event": "continued", "body": body})
        if self._steps is None:
            self._show_next()

    def _show_next(self) -> None:
        if self._stopped:
            self._publish(next(iter(self._stopped.values())))


@final
class NotebookDebugger:
    """The debugger session of a kernel, as its other threads use it.

    Args:
        kernel: the kernel, whose front end sees the session.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.session = RanksDebugger(kernel._publish_debug_event)
        self._link: Link | None = None

    def attach(self, link: Link, num_ranks: int) -> None:
        """Debug the ranks that the session has chosen. They are free.

        Raises:
            LaunchError: a rank's debugger does not answer.
        """
        if link is not self._link:
            self._link = link
            self._run(self.session.use(LinkedRanks(link), num_ranks))
        else:
            self._run(self.session.update())

    def choose(self, ranks: Sequence[int], *, at_once: bool) -> None:
        """Let breakpoints stop these ranks.

        Args:
            ranks: which.
            at_once: the ranks are free; else they are attached before the next cell.
        """
        self.session.chosen = tuple(ranks)
        if at_once:
            self._run(self.session.update())

    def release(self) -> None:
        """Leave the ranks before they are interrupted."""
        if self.session.started:
            self._run(self.session.release())

    def detach(self) -> None:
        """The ranks end, or continue without this notebook: no breakpoint may stop them then."""
        self._link = None
        if threading.current_thread() is not self._kernel.control_thread:  # which would wait for itself
            self.release()
        asyncio.run_coroutine_threadsafe(self.session.use(None, 0), self._loop)

    def is_paused(self) -> bool:
        """Whether a rank has stopped."""
        return bool(self.session.stopped)

    def returned(self, rank: int) -> None:
        """Note that a rank has returned from its cell."""
        self._loop.call_soon_threadsafe(self.session.returned, rank)

    def heard(self, rank: int, event: dict[str, Any]) -> None:
        """Take an event of a rank's debugger."""
        with suppress(RuntimeError):  # the kernel is ending, and its loop is closed
            self._loop.call_soon_threadsafe(self.session.heard, rank, event)

    @property
    def _loop(self) -> Any:
        return self._kernel.control_thread.io_loop.asyncio_loop

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S + REQUEST_S)
        except Exception as error:  # noqa: BLE001 - of the rank, or of the wait
            raise LaunchError(
                f"the debugger of a rank does not work ({type(error).__name__}: {error}): switch it off in the "
                "toolbar, or start new ranks with %restart_ranks"
            ) from None


@final
@dataclass(frozen=True, slots=True)
class LinkedRanks:
    """The debuggers of the ranks of a cluster."""

    link: Link

    async def start(self, rank: int, timeout_s: float) -> str:
        """See `DebuggedRanks`."""
        return str(await self.link.call(rank, start_debugger, timeout_s))

    def stop(self, rank: int) -> None:
        """See `DebuggedRanks`."""
        self.link.send_call(rank, stop_debugger)

    async def request(self, rank: int, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """See `DebuggedRanks`."""
        return await self.link.debug(rank, request, timeout_s)


def _reply(request: dict[str, Any], body: dict[str, Any] | None = None, message: str = "") -> dict[str, Any]:
    known = {"type": "response", "request_seq": request["seq"], "seq": request["seq"], "command": request["command"]}
    failed = {"message": message} if message else {}
    return {**known, "success": not message, "body": body or {}, **failed}


def _renamed(value: Any, old: str, new: str) -> Any:
    """Return a message with each text that begins with `old` beginning with `new`."""
    if isinstance(value, dict):
        return {name: _renamed(each, old, new) for name, each in value.items()}
    if isinstance(value, list):
        return [_renamed(each, old, new) for each in value]
    if isinstance(value, str) and value.startswith(old):
        return new + value[len(old) :]
    return value
