"""A debugger session that several ranks answer, with fake ranks; with real ones: tests/notebooks/test_kernel_cells.py."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

pytest.importorskip("ipykernel", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from workbench.kernel import debugger
from workbench.kernel.debugger import RanksDebugger

CELL = "x = 1\ny = 2"


class FakeRanks:
    """Ranks whose debuggers answer at once, each with its own names of cells."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []
        self.requests: list[dict[str, Any]] = []
        self.failing: set[int] = set()
        self.slow: set[int] = set()
        self.traced: set[int] = set()

    async def start(self, rank: int, timeout_s: float) -> str:
        self.traced.add(rank)
        return f"/rank-{rank}/"

    def stop(self, rank: int) -> None:
        self.traced.discard(rank)

    async def request(self, rank: int, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if rank in self.failing:
            raise TimeoutError
        if rank in self.slow:
            await asyncio.Event().wait()
        self.asked.append((rank, request["command"]))
        self.requests.append(request)
        frames = [{"name": "<module>", "source": {"path": f"/rank-{rank}/1.py"}}]
        body = {"stackFrames": frames} if request["command"] == "stackTrace" else {}
        return {"success": True, "request_seq": request["seq"], "body": body}

    def take(self) -> list[tuple[int, str]]:
        asked, self.asked = self.asked, []
        return asked


class Session:
    """A front end's session, and the events that it has received."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.debugger = RanksDebugger(self.events.append)
        self.ranks = FakeRanks()
        self.seq = 0

    async def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.seq += 1
        request = {"type": "request", "seq": self.seq, "command": command, "arguments": arguments}
        answer = await self.debugger.answer(request)
        assert answer["request_seq"] == self.seq
        return answer

    async def start(self, *ranks: int, num_ranks: int = 3) -> str:
        """Debug these ranks, with a breakpoint in a cell. Return the front end's name of the cell."""
        await self.ask("initialize")
        await self.ask("attach")
        self.debugger.chosen = ranks
        path: str = (await self.ask("dumpCell", code=CELL))["body"]["sourcePath"]
        await self.ask("setBreakpoints", source={"path": path}, breakpoints=[{"line": 2}])
        await self.debugger.use(self.ranks, num_ranks)
        return path

    def stop(self, rank: int) -> None:
        self.debugger.heard(rank, {"event": "stopped", "body": {"threadId": 1, "of": rank}})

    def go(self, rank: int) -> None:
        self.debugger.heard(rank, {"event": "continued", "body": {"threadId": 1, "of": rank}})

    def told(self) -> list[tuple[str, int]]:
        events, self.events[:] = [(event["event"], event["body"].get("of", -1)) for event in self.events], []
        return events


def in_session(work: Any) -> None:
    """Run a test's coroutine with a session."""

    async def run() -> None:
        await work(Session())

    coroutine: Coroutine[Any, Any, None] = run()
    asyncio.run(coroutine)


def test_ranks_that_start_later_are_given_the_breakpoints() -> None:
    async def work(session: Session) -> None:
        path = await session.start(1)
        assert session.ranks.take() == [
            (1, command) for command in ("initialize", "attach", "dumpCell", "setBreakpoints")
        ]
        name = path.rsplit("/", 1)[1]
        assert session.ranks.requests[-1]["arguments"]["source"]["path"] == f"/rank-1/{name}", "as the rank names it"
        restarted = FakeRanks()
        await session.debugger.use(restarted, 3)
        assert restarted.take()[-1] == (1, "setBreakpoints")
        info = (await session.ask("debugInfo"))["body"]
        assert info["isStarted"] and info["breakpoints"] == [{"source": path, "breakpoints": [{"line": 2}]}]
        assert path.startswith(info["tmpFilePrefix"])

    in_session(work)


def test_ranks_that_stop_together_are_shown_one_after_another() -> None:
    async def work(session: Session) -> None:
        await session.start(0, 1, 2)
        session.stop(2)
        session.stop(0)
        assert session.told() == [("stopped", 2)]
        (frame,) = (await session.ask("stackTrace", threadId=1))["body"]["stackFrames"]
        assert frame["name"] == "rank 2: <module>"
        prefix = (await session.ask("debugInfo"))["body"]["tmpFilePrefix"]
        assert frame["source"]["path"] == f"{prefix}1.py", "as the front end names it"
        session.ranks.take()
        await session.ask("continue", threadId=1)
        session.go(2)
        assert session.ranks.take() == [(2, "continue")]
        assert session.told() == [("continued", 2), ("stopped", 0)]
        await session.ask("continue", threadId=1)
        session.go(0)
        assert session.told() == [("continued", 0)] and not session.debugger.stopped

    in_session(work)


def test_a_step_stays_on_its_rank_until_it_stops_or_its_cell_ends() -> None:
    async def work(session: Session) -> None:
        await session.start(0, 1)
        session.stop(1)
        session.stop(0)
        await session.ask("next", threadId=1)
        session.go(1)
        session.stop(1)
        assert session.told() == [("stopped", 1), ("continued", 1), ("stopped", 1)]
        await session.ask("next", threadId=1)
        session.go(1)
        assert session.told() == [("continued", 1)]
        session.debugger.returned(1)
        assert session.told() == [("stopped", 0)]

    in_session(work)


def test_before_an_interrupt_ranks_are_left_and_continue_and_are_debugged_again_later() -> None:
    async def work(session: Session) -> None:
        await session.start(0, 1)
        session.stop(1)
        session.ranks.take()
        continuing = asyncio.create_task(session.debugger.release())
        while (1, "continue") not in session.ranks.asked:
            await asyncio.sleep(0)
        session.go(1)
        await continuing
        of_rank_1 = [command for rank, command in session.ranks.take() if rank == 1]
        assert of_rank_1 == ["setBreakpoints", "continue", "disconnect"], "no breakpoint stops it again"
        assert session.ranks.requests[-1]["command"] == "disconnect" and not session.debugger.stopped
        assert session.told() == [("stopped", 1), ("continued", 1)]
        await session.debugger.update()
        assert session.ranks.take()[-1] == (1, "setBreakpoints")
        assert session.ranks.requests[-1]["arguments"]["breakpoints"] == [{"line": 2}]

    in_session(work)


def test_a_rank_that_could_not_be_left_in_time_is_left_before_it_is_debugged_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """debugpy refuses a second session on top of an old one, and no breakpoint stopped the rank then."""
    monkeypatch.setattr(debugger, "RELEASE_S", 0.01)

    async def work(session: Session) -> None:
        await session.start(0, 1)
        session.ranks.slow = {1}
        await session.debugger.release()
        session.ranks.slow = set()
        session.ranks.take()
        await session.debugger.update()
        asked = session.ranks.take()
        assert session.ranks.traced == {0, 1}
        assert [command for rank, command in asked if rank == 1][:3] == ["disconnect", "initialize", "attach"]
        assert [command for rank, command in asked if rank == 0][:2] == ["initialize", "attach"]
        await session.debugger.release()
        session.ranks.take()
        await session.debugger.update()
        assert (1, "disconnect") not in session.ranks.take(), "this time it was left"

    in_session(work)


def test_without_ranks_the_front_end_gets_answers_all_the_same() -> None:
    async def work(session: Session) -> None:
        await session.ask("initialize")
        assert (await session.ask("inspectVariables"))["body"] == {"variables": []}
        answer = await session.ask("setBreakpoints", source={"path": "a"}, breakpoints=[{"line": 7}])
        assert answer["body"]["breakpoints"] == [{"verified": True, "line": 7}]
        assert not (await session.ask("scopes", frameId=1))["success"]

    in_session(work)


def test_a_rank_that_does_not_answer_is_an_answer_and_no_hang() -> None:
    async def work(session: Session) -> None:
        await session.start(1)
        session.ranks.failing = {1}
        answer = await session.ask("stackTrace", threadId=1)
        assert not answer["success"] and "TimeoutError" in answer["message"]
        assert (await session.ask("disconnect"))["success"] and not session.debugger.started
        assert not session.ranks.traced
        session.stop(1)
        assert session.told() == [], "of a rank that is left"

    in_session(work)


def test_ranks_that_end_are_no_longer_stopped() -> None:
    async def work(session: Session) -> None:
        await session.start(0)
        session.stop(0)
        await session.debugger.use(None, 0)
        assert session.told() == [("stopped", 0), ("continued", -1)]

    in_session(work)
