"""Running a cell on ranks: what they say while it runs, the first failure, and the release of those that would wait for ever."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, final

from IPython.display import display

from workbench.clusters.engines.execute import execute_heard
from workbench.clusters.waiting import Waiting, interrupt_ranks
from workbench.errors import LaunchError, WorkbenchError
from workbench.kernel.cells import spoken_ranks
from workbench.kernel.outputs import Merger, label

POLL_S = 0.02
GRACE_S = 1.0  # how long the others may take to fail or end by themselves after one rank failed
INTERRUPT_S = 3.0  # how long an interrupt may take to be heard
LAST_WORDS_S = 2.0  # output may come after the answer


class RanksFailed(WorkbenchError):
    """A cell failed on some ranks; shows their own traceback."""

    def __init__(self, words: str, lines: Sequence[str]) -> None:
        super().__init__(words)
        self.lines = list(lines)

    def _render_traceback_(self) -> list[str]:
        return self.lines


@final
class Execution:
    """One cell on some ranks.

    Args:
        client: the cluster's ipyparallel client; engine numbers are ranks.
        ranks: which.
        num_ranks: how many there are in all.
    """

    def __init__(self, client: Any, ranks: Sequence[int], num_ranks: int) -> None:
        self._client, self._ranks, self._num_ranks = client, list(ranks), num_ranks
        self._heard: SimpleQueue[tuple[int, dict[str, Any]]] = SimpleQueue()  # what the client's own thread hears
        self._merger = Merger(self._ranks, self._show)
        self._results: dict[int, Any] = {}
        self._released = False  # the others of a rank that failed were interrupted

    @property
    def busy(self) -> list[int]:
        """Ranks that have not come back."""
        return [rank for rank, result in self._results.items() if not result.done()]

    def run(self, code: str) -> None:
        """Run it and show what the ranks say, until all have come back.

        Raises:
            RanksFailed: at the end, the first failure among them.
            KeyboardInterrupt: the ranks were interrupted too.
        """
        for rank in self._ranks:
            self._results[rank] = execute_heard(self._client, rank, code, partial(self._hear, rank))
        try:
            with Waiting(self._who_is_busy) as waiting:
                self._follow(waiting)
        except KeyboardInterrupt:
            self._interrupted()
            raise
        finally:
            self._drain(final=True)
        self._judge()

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        self._heard.put((rank, message))

    def _who_is_busy(self) -> str:
        busy = self.busy
        done = spoken_ranks([rank for rank in self._ranks if rank not in busy])
        return f"ranks {spoken_ranks(busy)} to come back from this cell" + (f"; {done} have" if done else "")

    def _follow(self, waiting: Waiting) -> None:
        failed_s: float | None = None
        ended: dict[int, float] = {}
        while len(ended) < len(self._ranks) or not all(self._said_all(rank, since) for rank, since in ended.items()):
            for rank in self._ranks:
                if rank not in ended and self._results[rank].done():
                    ended[rank] = time.monotonic()
            self._drain()
            for rank, since in ended.items():
                if self._said_all(rank, since):
                    self._merger.ended(rank)
            if failed_s is None and self._failures():
                failed_s = time.monotonic()
            if failed_s is not None and self.busy and time.monotonic() - failed_s > GRACE_S:
                self._release()
                return
            self._merger.flush()
            waiting.look()
            time.sleep(POLL_S)

    def _said_all(self, rank: int, ended_s: float) -> bool:
        result = self._results[rank]
        return bool(result.wait_for_output(0)) or time.monotonic() - ended_s > LAST_WORDS_S

    def _drain(self, final: bool = False) -> None:
        while True:
            try:
                rank, message = self._heard.get_nowait()
            except Empty:
                break
            kind, content = message["header"]["msg_type"], message["content"]
            if kind == "stream":
                self._merger.text(rank, content["name"], content["text"])
            elif kind in ("display_data", "execute_result"):
                bundle = {"data": content["data"], "metadata": content.get("metadata", {})}
                self._merger.display(rank, "display" if kind == "display_data" else "result", bundle)
        if final:
            for rank in self._ranks:
                self._merger.ended(rank)
            self._merger.flush(final=True)

    def _show(self, group: list[int], kind: str, content: Any) -> None:
        before = label(group, self._num_ranks)
        if kind in ("stdout", "stderr"):
            print(before + content, file=sys.stderr if kind == "stderr" else sys.stdout, flush=True)
            return
        if group != list(range(self._num_ranks)):
            if list(content["data"]) == ["text/plain"]:
                print(before + content["data"]["text/plain"], flush=True)
                return
            print(before.rstrip(), flush=True)
        display(content["data"], metadata=content["metadata"], raw=True)  # type: ignore[no-untyped-call]

    # -- when it does not end well ---------------------------------------------------------------------------------

    def _failures(self) -> dict[int, Any]:
        done = {rank: result for rank, result in self._results.items() if result.done()}
        errors = {rank: result.exception() for rank, result in done.items()}
        return {rank: error for rank, error in errors.items() if error is not None}

    def _signal(self, ranks: list[int]) -> None:
        with suppress(LaunchError):  # a nanny that does not answer: whose rank is still busy then is named
            interrupt_ranks(self._client, ranks)

    def _release(self) -> None:
        """Interrupt those that may wait for the one that failed."""
        self._released = True
        self._interrupt(self.busy)

    def _interrupt(self, ranks: list[int]) -> None:
        self._signal(ranks)
        deadline = time.monotonic() + INTERRUPT_S
        while self.busy and time.monotonic() < deadline:
            self._drain()
            self._merger.flush()
            time.sleep(POLL_S)

    def _interrupted(self) -> None:
        ranks = self.busy
        if ranks:
            self._interrupt(ranks)
        if self.busy:
            print(stuck(self.busy), file=sys.stderr, flush=True)

    def _judge(self) -> None:
        failures = self._failures()
        if not failures:
            return
        victims = {rank for rank, error in failures.items() if self._released and _name(error) == "KeyboardInterrupt"}
        causes = {rank: error for rank, error in failures.items() if rank not in victims} or failures
        first = min(causes)
        alike = [
            rank
            for rank, error in causes.items()
            if (_name(error), str(_value(error))) == (_name(causes[first]), str(_value(causes[first])))
        ]
        lines = (
            [f"On rank {spoken_ranks(alike)}:" if len(alike) == 1 else f"On ranks {spoken_ranks(alike)}:"] if self._num_ranks > 1 else []
        )
        lines += _traceback(causes[first])
        for rank, error in causes.items():
            if rank not in alike:
                lines.append(f"Also, on rank {rank}: {_name(error)}: {_value(error)}")
        if victims:
            lines.append(f"Interrupted, for they might have waited for ever: rank {spoken_ranks(sorted(victims))}")
        if self.busy:
            lines.append(stuck(self.busy))
        raise RanksFailed(f"rank {spoken_ranks(alike)}: {_name(causes[first])}: {_value(causes[first])}", lines)


def stuck(ranks: list[int]) -> str:
    """What to say of ranks that do not hear an interrupt."""
    return (
        f"rank {spoken_ranks(ranks)} does not hear an interrupt: it is inside a call that cannot be left, such as a blocking MPI "
        "receive or sum whose partner does not come. If that goes on, %restart_ranks begins with new ranks; their variables are lost then"
    )


def _name(error: Any) -> str:
    return str(getattr(error, "ename", None) or type(error).__name__)


def _value(error: Any) -> Any:
    return getattr(error, "evalue", None) or error


def _traceback(error: Any) -> list[str]:
    told = getattr(error, "traceback", None)
    return told.splitlines() if isinstance(told, str) and told else [f"{_name(error)}: {_value(error)}"]
