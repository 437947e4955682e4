"""Runs a cell on ranks: shows their output, raises the first failure, and interrupts ranks that would wait forever."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, final

from workbench.clusters.engines.execute import execute_with_output
from workbench.clusters.waiting import Waiting, interrupt_ranks
from workbench.errors import LaunchError, WorkbenchError
from workbench.kernel.cells import format_ranks
from workbench.kernel.debugger import NotebookDebugger
from workbench.kernel.outputs import Merger
from workbench.kernel.questions import Questions
from workbench.kernel.screen import MergedScreen, Screen

POLL_S = 0.02
CHECK_S = 0.5  # between two looks at the cluster
GRACE_S = 1.0  # how long the other ranks may take to end by themselves after one has failed
INTERRUPT_S = 3.0  # how long an interrupt may take
KINDS = {
    "display_data": "display",
    "execute_result": "result",
    "update_display_data": "update",
    "clear_output": "clear",
}
LAST_OUTPUT_S = 2.0  # how much later than the result the last output may arrive


class RanksFailed(WorkbenchError):
    """A cell failed on some ranks. The notebook shows the ranks' own traceback."""

    def __init__(self, message: str, lines: Sequence[str]) -> None:
        super().__init__(message)
        self.lines = list(lines)

    def _render_traceback_(self) -> list[str]:
        return self.lines


@final
class Execution:
    """One cell on some ranks.

    Args:
        client: the cluster's ipyparallel client; engine numbers are ranks.
        ranks: the ranks that run the cell.
        num_ranks: number of all ranks.
        screen: shows the output; None: below the cell, without a log.
        questions: asks what ranks ask; None: their questions have no answer.
        debugger: the debugger of the ranks, if there is one.
        is_stopped: whether the cluster was stopped, by any process: then no rank returns.
    """

    def __init__(
        self,
        client: Any,
        ranks: Sequence[int],
        num_ranks: int,
        *,
        screen: Screen | None = None,
        questions: Questions | None = None,
        debugger: NotebookDebugger | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_stopped, self._next_check_s = is_stopped, 0.0
        self._client, self._ranks, self._num_ranks = client, list(ranks), num_ranks
        self._screen = screen or MergedScreen(num_ranks)
        self._questions, self._debugger = questions, debugger
        self._messages: SimpleQueue[tuple[int, dict[str, Any]]] = SimpleQueue()  # filled by the client's own thread
        self._merger = Merger(self._ranks, self._screen.show)
        self._results: dict[int, Any] = {}
        self._released = False  # whether the other ranks were interrupted after a failure

    @property
    def busy(self) -> list[int]:
        """Ranks that still run the cell."""
        return [rank for rank, result in self._results.items() if not result.done()]

    def run(self, code: str) -> None:
        """Run the code and show the ranks' output, until all have returned.

        Raises:
            RanksFailed: a rank failed; raised after all have returned, for the first failure.
            LaunchError: another process stopped the cluster.
            KeyboardInterrupt: the user interrupted; the ranks were interrupted too.
        """
        for rank in self._ranks:
            self._results[rank] = execute_with_output(self._client, rank, code, partial(self._on_message, rank))
        try:
            with Waiting(self._describe_busy) as waiting:
                self._follow(waiting)
        except KeyboardInterrupt:
            self._interrupted()
            raise
        finally:
            self._drain(final=True)
            self._screen.close()
        self._raise_failure()

    @property
    def payload(self) -> list[dict[str, Any]]:
        """What the cell asks of the front end on the first of its ranks: a page of help, text for the next cell."""
        return list(self._results[self._ranks[0]].result(0)._content["payload"])  # no public name has it

    def _on_message(self, rank: int, message: dict[str, Any]) -> None:
        self._messages.put((rank, message))

    def _describe_busy(self) -> str:
        busy = self.busy
        done = format_ranks([rank for rank in self._ranks if rank not in busy])
        stopped = self._debugger.session.stopped if self._debugger is not None else []
        return (
            f"ranks {format_ranks(busy)} to return from this cell"
            + (f"; returned: {done}" if done else "")
            + (f"; stopped by the debugger: {format_ranks(stopped)}" if stopped else "")
        )

    def _follow(self, waiting: Waiting) -> None:
        failed_s: float | None = None
        ended: dict[int, float] = {}
        while len(ended) < len(self._ranks) or not all(
            self._output_complete(rank, since) for rank, since in ended.items()
        ):
            for rank in self._newly_returned(ended):
                ended[rank] = time.monotonic()
                if self._debugger is not None:
                    self._debugger.returned(rank)
            self._drain()
            for rank, since in ended.items():
                if self._output_complete(rank, since):
                    self._merger.ended(rank)
            if self._debugger is not None and self._debugger.is_paused():
                failed_s = None  # no rank waits in vain for one that the user looks at
            elif failed_s is None and self._failures():
                failed_s = time.monotonic()
            if failed_s is not None and self.busy and time.monotonic() - failed_s > GRACE_S:
                self._release()
                return
            self._refresh()
            self._check_cluster()
            if self._questions is not None:
                self._questions.settle(set(self._ranks) - set(ended))
            waiting.update()
            time.sleep(POLL_S)

    def _check_cluster(self) -> None:
        if time.monotonic() < self._next_check_s:
            return
        self._next_check_s = time.monotonic() + CHECK_S
        if self._is_stopped():
            raise LaunchError(
                "the cluster was stopped by another process while its ranks ran the cell: %restart_ranks starts new "
                "ranks; their variables are lost"
            )

    def _newly_returned(self, ended: Collection[int]) -> list[int]:
        return [rank for rank in self._ranks if rank not in ended and self._results[rank].done()]

    def _refresh(self) -> None:
        self._merger.flush()
        self._screen.flush()
        self._screen.change(self._merger.incomplete())

    def _output_complete(self, rank: int, ended_s: float) -> bool:
        result = self._results[rank]
        return bool(result.wait_for_output(0)) or time.monotonic() - ended_s > LAST_OUTPUT_S

    def _drain(self, final: bool = False) -> None:
        while True:
            try:
                rank, message = self._messages.get_nowait()
            except Empty:
                break
            kind, content = message["header"]["msg_type"], message["content"]
            if kind == "stream":
                self._merger.text(rank, content["name"], content["text"])
            elif kind in KINDS:
                self._merger.display(rank, KINDS[kind], content)
            elif kind == "question" and self._questions is not None:
                self._questions.add(rank, content)
        if final:
            for rank in self._ranks:
                self._merger.ended(rank)
            self._merger.flush(final=True)

    # -- failures --------------------------------------------------------------------------------------------------

    def _failures(self) -> dict[int, Any]:
        done = {rank: result for rank, result in self._results.items() if result.done()}
        errors = {rank: result.exception() for rank, result in done.items()}
        return {rank: error for rank, error in errors.items() if error is not None}

    def _signal(self, ranks: list[int]) -> None:
        if self._debugger is not None:
            self._debugger.release()
        with suppress(LaunchError):  # a nanny does not answer: its rank is named as busy later
            interrupt_ranks(self._client, ranks)

    def _release(self) -> None:
        """Interrupt the ranks that may wait for the failed one."""
        self._released = True
        self._interrupt(self.busy)

    def _interrupt(self, ranks: list[int]) -> None:
        self._signal(ranks)
        deadline = time.monotonic() + INTERRUPT_S
        while self.busy and time.monotonic() < deadline:
            self._drain()
            self._refresh()
            time.sleep(POLL_S)

    def _interrupted(self) -> None:
        ranks = self.busy
        if ranks:
            self._interrupt(ranks)
        if self.busy:
            print(stuck_message(self.busy), file=sys.stderr, flush=True)

    def _raise_failure(self) -> None:
        failures = self._failures()
        if not failures:
            return
        interrupted = {
            rank for rank, error in failures.items() if self._released and _name(error) == "KeyboardInterrupt"
        }
        causes = {rank: error for rank, error in failures.items() if rank not in interrupted} or failures
        first = min(causes)
        name, value = _name(causes[first]), _value(causes[first])
        same = [rank for rank, error in causes.items() if (_name(error), str(_value(error))) == (name, str(value))]
        lines = []
        if self._num_ranks > 1:
            lines.append(f"On rank{'s' if len(same) > 1 else ''} {format_ranks(same)}:")
        lines += _traceback(causes[first])
        for rank, error in causes.items():
            if rank not in same:
                lines.append(f"Also, on rank {rank}: {_name(error)}: {_value(error)}")
        if interrupted:
            lines.append(
                f"Interrupted, because they might have waited forever: rank {format_ranks(sorted(interrupted))}"
            )
        if self.busy:
            lines.append(stuck_message(self.busy))
        raise RanksFailed(f"rank {format_ranks(same)}: {name}: {value}", lines)


def stuck_message(ranks: list[int]) -> str:
    """Return the message for ranks that do not react to an interrupt."""
    return (
        f"rank {format_ranks(ranks)} does not react to an interrupt: it is inside a call that cannot be interrupted, "
        "such as "
        "a blocking MPI receive or sum without its partner. If this continues, %restart_ranks starts new ranks; "
        "their variables are lost then"
    )


def _name(error: Any) -> str:
    return str(getattr(error, "ename", None) or type(error).__name__)


def _value(error: Any) -> Any:
    return getattr(error, "evalue", None) or error


def _traceback(error: Any) -> list[str]:
    text = getattr(error, "traceback", None)
    return text.splitlines() if isinstance(text, str) and text else [f"{_name(error)}: {_value(error)}"]
