"""A training that runs on a cluster, as the notebook holds it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from workbench.clusters.commands import say, say_set
from workbench.clusters.engines.engines import Engines
from workbench.clusters.failures import consequence, ends_behind, failed_ranks, first_cause, local_error
from workbench.clusters.supervision.heartbeat import standing_words
from workbench.clusters.waiting import Waiting, interrupt_ranks, silent_ranks
from workbench.errors import ConfigError, WorkbenchError
from workbench.runtimes.control.commands import PAUSE, RESUME, STOP, write_command
from workbench.trace import Run, update_run
from workbench.trace.follow import Follower
from workbench.trace.store import OVER, read_info
from workbench.trace.views import Views

POLL_S = 0.05
CAUSE_S = 2.0  # how long the cause of a failure may come after the ranks that left because of it


@final
class RunHandle(Views):
    """Returned at once by `Cluster.train`; the last expression of a cell shows it live.

    Args:
        folder: the run's folder.
        results: each rank's pending answer, in order of rank.
        engines: where they train; forgotten when all ranks have come back.
    """

    def __init__(self, folder: Path, results: Sequence[Any], engines: Engines) -> None:
        self.folder = folder
        self._results = list(results)
        self._engines: Engines | None = engines
        self._lost: str | None = None  # why nobody will answer any more
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._follower = Follower(folder)
        self._views: list[Any] = []
        self._last_words = ""  # of the engines, if a rank failed
        self._ends: dict[int, str] = {}  # rank -> how its process ended, if one did
        self.echo: Any = None  # shows what the ranks print
        self.quiet = False  # a long wait for it says nothing
        for result in self._results:
            result.add_done_callback(self._one_came_back)

    @property
    def id(self) -> str:
        """The run's name in the run store."""
        return self.folder.name

    @property
    def done(self) -> bool:
        """Whether every rank has come back."""
        return self._over.is_set()

    def overdue(self, within_s: float) -> bool:
        """Whether the run is over by its record, and ranks have not come back all the same, nor do so within that time."""
        return not self.done and self.status in OVER and not self._over.wait(within_s)

    @property
    def status(self) -> str:
        """starting, running, paused, finished, stopped or failed."""
        return "failed" if self._failed() else str(read_info(self.folder)["status"])

    @property
    def run(self) -> Run:
        """The run's record as far as it is written: metrics and trace."""
        return Run.load(self.folder)

    def wait(self, timeout_s: float | None = None) -> RunHandle:
        """Until training has ended. An interrupt ends the waiting, not the training.

        Raises:
            WorkbenchError: a rank failed; at once, whatever the others do. The rank's traceback is a note on the error.
            TimeoutError: still training after `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            with Waiting(lambda: f"{self}{silent_ranks(self.folder, len(self._results))}", silent=self.quiet) as waiting:
                while True:
                    if self.echo is not None:
                        self.echo.poll(to_the_end=self.done)
                    if self._failed():
                        raise self._error()
                    if self.done:
                        return self
                    if deadline is not None and time.monotonic() > deadline:
                        where = ". ".join(filter(None, (str(self), standing_words(self.folder, len(self._results)))))
                        raise TimeoutError(f"still training after {timeout_s:g} s: {where}. Wait again, or end it with .stop()")
                    self._over.wait(POLL_S)
                    waiting.look()
        except KeyboardInterrupt:
            raise KeyboardInterrupt("only the waiting was interrupted; training goes on: .wait() again, or end it with .stop()") from None
        finally:
            if self.done:
                self._finish_views()

    def stop(self) -> RunHandle:
        """Ask all ranks to stop at the end of the same step, with a checkpoint; returns at once, `.wait()` for it."""
        if not self.done:
            write_command(self.folder, STOP)
        return self

    def set(self, **changes: Any) -> RunHandle:
        """Go on with other settings; returns at once. Ranks take them at the end of a step, all at the same one where they go

        in step; methods with servers at one version, others at each rank's own step. `run.info["steering"]` says where.

        Args:
            changes: lr (of the first parameter group; others, and a schedule, keep their proportion to it), and the method's
                own settings, such as width, backups or collective; codec is put into the collective, delay is K - 1.

        Raises:
            ConfigError: what cannot be set, with what can; nothing is written then. Or the run is over.
        """
        say_set(self.folder, changes)
        return self

    def pause(self) -> RunHandle:
        """Hold all ranks at the end of a step until `resume()` or `stop()`; returns at once, `status` says "paused" when they do.

        What can be `set` can be set meanwhile. The time does not count, neither as training nor towards timeout_s.

        Raises:
            ConfigError: the run is over.
        """
        say(self.folder, PAUSE)
        return self

    def resume(self) -> RunHandle:
        """Go on after `pause()`; returns at once, and raises as that does."""
        say(self.folder, RESUME)
        return self

    def interrupt(self, rank: int | None = None) -> RunHandle:
        """End the run now, in the midst of a step and without a checkpoint: one rank is interrupted, or all.

        The others leave because of it, the run is "failed", and the ranks can train again. `stop()` loses nothing.

        Raises:
            ConfigError: there is no such rank, or this handle does not reach the ranks (their cluster was detached).
            LaunchError: the interrupt did not reach them.
        """
        ranks = [number for number, result in enumerate(self._results) if not result.done()]
        if rank is not None and not 0 <= rank < len(self._results):
            raise ConfigError(f"rank {rank} of {len(self._results)}: 0 to {len(self._results) - 1}, or None for all")
        targets = [number for number in ranks if rank in (None, number)]
        if targets and not self.done:
            if self._engines is None:
                raise ConfigError("this handle does not reach the ranks any more: attach to their cluster, or stop() the run")
            interrupt_ranks(self._engines.client, targets)
        return self

    def _recorded(self) -> Run:
        return self.run

    def abandon(self, reason: str) -> None:
        """Book that nobody will answer any more: the cluster was ended while it trained."""
        with self._lock:
            if not self._over.is_set():
                self._lost = reason
                self._settle()

    def readdress(self, results: Sequence[Any]) -> None:
        """Wait for these answers in place of those asked for: the cluster was detached, and only the run's folder tells any more."""
        self._results, self._engines = list(results), None
        for result in self._results:
            result.add_done_callback(self._one_came_back)

    def _one_came_back(self, _: Any) -> None:
        """Called in the client's own thread."""
        with self._lock:
            if not self._over.is_set() and all(result.done() for result in self._results):
                self._settle()

    def _settle(self) -> None:
        """No rank writes any more: a record that says otherwise is put right, and the engines are let go."""
        try:
            cause = self._cause("") if self._failed() else None
            if self._ends or read_info(self.folder)["status"] not in OVER:
                update_run(self.folder, status="failed", error=str(cause or self._lost or "the ranks ended without a word"))
        except WorkbenchError:
            pass  # the folder was removed under us: nothing to put right
        finally:
            if self._engines is not None and self._failed():
                self._last_words = self._engines.last_words()
            self._engines = None
            self._over.set()

    def _ipython_display_(self) -> None:
        """Curves that move while training runs, and are a plain figure once it has ended."""
        if "ipykernel.zmqshell" not in sys.modules:  # a terminal draws nothing
            print(repr(self))
            return
        from workbench.plots import LiveCurves, LiveTimeline

        follower = Follower(self.folder)

        def look() -> list[Run]:
            return [follower.poll()]

        view = LiveCurves(on_stop=self.stop, on_pause=getattr(self, "pause", None), on_resume=getattr(self, "resume", None))
        timeline = LiveTimeline(self.folder)
        view.update(look())
        if self.done:
            view.finish()
        view._ipython_display_()
        if not self.done:
            timeline._ipython_display_()
            self._views += [view, timeline]
            view.follow(look)
            timeline.follow()

    def shown_by(self, view: Any) -> None:
        """Let `view.settle()` be called when the run has ended and somebody waited for it."""
        self._views.append(view)

    def _finish_views(self) -> None:
        """Now, and not when their threads next look: a notebook that ends here must keep the whole curve."""
        while self._views:
            with suppress(WorkbenchError):  # the folder was removed under us: they say so themselves
                self._views.pop().settle()

    def _failed(self) -> dict[int, BaseException]:
        """rank -> its error, of the ranks that have come back with one."""
        return failed_ranks(self._results, self.folder)

    def _error(self) -> WorkbenchError:
        """The cause, among the failures known; waits a little for it if only its victims have come back."""
        engines = self._engines
        deadline = time.monotonic() + CAUSE_S
        while consequence(first_cause(self._failed())[1]) and not self.done and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return self._cause(engines.last_words() if engines else self._last_words)

    def _cause(self, last_words: str) -> WorkbenchError:
        failed = self._failed()
        if self._engines is not None and not self._ends:
            self._ends = ends_behind(failed, self._engines, self.folder, CAUSE_S)
        gone = [rank for rank, error in failed.items() if consequence(error) == 1]
        return local_error(*first_cause(failed, self._ends), last_words, self._ends, gone)

    def __str__(self) -> str:
        run = self._follower.poll()
        rows = run.steps()
        progress = f", step {rows[-1]['step']}" if rows else ""
        loss = f", loss {rows[-1]['loss']:.4g}" if rows and rows[-1]["loss"] is not None else ""
        problem = (run.info.get("problem") or {}).get("name", "?")
        state = f"{self.status}{progress}{loss}" if not self._trouble(run) else self._trouble(run)
        return f"{run.label} on {problem}, {run.info.get('num_workers')} ranks: {state} ({self.folder})"

    def _trouble(self, run: Run) -> str:
        """What failed, also where the record does not say so yet."""
        if run.trouble or not self._failed():
            return run.trouble
        rank, error = first_cause(self._failed(), self._ends)[:2]
        info = {
            **run.info,
            "status": "failed",
            "error": f"rank {rank}: {str(error).strip().splitlines()[0] if str(error).strip() else error}",
        }
        return replace(run, info=info).trouble

    def __repr__(self) -> str:
        return f"<{self}>"
