"""`RunHandle`: the notebook's handle of a training that runs on a cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from workbench.clusters.commands import send_command, send_settings
from workbench.clusters.engines.engines import Engines
from workbench.clusters.failures import consequence, describe_exits, failed_ranks, first_cause, local_error
from workbench.clusters.local.spawn import RankFailed
from workbench.clusters.supervision.rank_output import describe_ranks
from workbench.clusters.waiting import Waiting, interrupt_ranks, silent_ranks
from workbench.errors import ConfigError, WorkbenchError
from workbench.machine import in_notebook
from workbench.problems.base import Problem
from workbench.runtimes.control.commands import PAUSE, RESUME, STOP, write_command
from workbench.runtimes.liveness.membership import tolerates_loss
from workbench.trace import Run, update_run
from workbench.trace.follow import Follower
from workbench.trace.progress import progress_of
from workbench.trace.store import ENDED, read_info
from workbench.trace.views import Views

POLL_S = 0.05
CHECK_S = 0.5  # between two looks at the cluster
CAUSE_S = 2.0  # how much later the cause of a failure may arrive than its consequences


@final
class RunHandle(Views):
    """Handle of a training; `Cluster.train` returns it at once.

    As the last expression of a cell it shows live curves.

    Args:
        folder: the run's folder.
        results: each rank's pending result, in order of rank.
        engines: the engines that train. The handle drops them when all ranks have returned.
        problem: what is trained; None if it is not known here.
    """

    def __init__(self, folder: Path, results: Sequence[Any], engines: Engines, problem: Problem | None = None) -> None:
        self.folder = folder
        self._problem = problem
        self._results = list(results)
        self._engines: Engines | None = engines
        self._lost: str | None = None  # why no further rank will return
        self._next_check_s = 0.0  # when the cluster is looked at again
        self._silent_s: float | None = None  # since when no rank can answer
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._follower = Follower(folder)
        self._views: list[Any] = []
        self._last_output = ""  # last lines of the engines' output, if a rank failed
        self._exits: dict[int, str] = {}  # rank -> how its process ended, if it ended
        self.output: Any = None  # a RankOutput, which shows what the ranks print
        self.quiet = False  # whether a long wait prints nothing
        for result in self._results:
            result.add_done_callback(self._on_result)

    @property
    def id(self) -> str:
        """The run's name in the run store."""
        return self.folder.name

    @property
    def done(self) -> bool:
        """Return True if every rank has returned, or none can any more."""
        self._check_cluster()
        return self._over.is_set()

    def _check_cluster(self) -> None:
        """Abandon the run if another process has ended the cluster: then no result arrives, and no error either."""
        engines, now = self._engines, time.monotonic()
        if engines is None or self._over.is_set() or now < self._next_check_s:
            return
        self._next_check_s = now + CHECK_S
        reason = engines.why_silent()
        if reason is not None and self._silent_s is not None and now - self._silent_s > CAUSE_S:
            self.abandon(reason)
        self._silent_s = None if reason is None else self._silent_s or now

    def overdue(self, within_s: float) -> bool:
        """Return True if the record says that the run has ended, but not all ranks return within `within_s` seconds."""
        return not self.done and self.status in ENDED and not self._over.wait(within_s)

    @property
    def status(self) -> str:
        """Status of the run: starting, running, paused, finished, stopped or failed."""
        return "failed" if self._failed() else str(read_info(self.folder)["status"])

    @property
    def tolerates_loss(self) -> bool:
        """Return True if the training continues when a rank is lost that no other rank needs."""
        return not self._failed() and tolerates_loss(self.folder, over=self.done)

    @property
    def run(self) -> Run:
        """The run's record as it is on disk at this moment: metrics and trace."""
        return Run.load(self.folder)

    def wait(self, timeout_s: float | None = None) -> RunHandle:
        """Wait until the training has ended. An interrupt ends the wait, not the training.

        Args:
            timeout_s: limit in seconds; None for no limit.

        Raises:
            WorkbenchError: a rank failed, or the cluster was stopped. It is raised at once; a rank's traceback is a note
                on the error.
            TimeoutError: the ranks still train after `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            with Waiting(
                lambda: f"{self}{silent_ranks(self.folder, len(self._results))}", silent=self.quiet
            ) as waiting:
                while not self._has_returned():
                    if deadline is not None and time.monotonic() > deadline:
                        states = describe_ranks(self.folder, len(self._results))
                        where = ". ".join(filter(None, (str(self), states)))
                        raise TimeoutError(
                            f"still training after {timeout_s:g} s: {where}. Wait again, or end it with .stop()"
                        )
                    self._over.wait(POLL_S)
                    waiting.update()
                return self
        except KeyboardInterrupt:
            engines = self._engines
            reason = self._lost or (engines.why_silent() if engines is not None else None)
            raise KeyboardInterrupt(
                "only the wait was interrupted; the training continues: .wait() again, or end it with .stop()"
                if reason is None
                else f"the training has ended: {reason}"
            ) from None
        finally:
            if self.done:
                self._finish_views()

    def _has_returned(self) -> bool:
        """Show new output. Return True if all ranks have returned; raise the run's error if one has failed."""
        done = self.done
        if self.output is not None:
            self.output.poll(to_the_end=done)
        if self._lost is not None:
            raise self._cause("")
        if self._failed():
            raise self._error()
        return done

    def stop(self) -> RunHandle:
        """Ask all ranks to write a checkpoint and stop at the end of the same step.

        Returns at once; then `.wait()`.
        """
        if not self.done:
            write_command(self.folder, STOP)
        return self

    def set(self, **changes: Any) -> RunHandle:
        """Change settings of the running training. Returns at once; the ranks apply the change at the end of a step.

        Synchronous algorithms apply it on all ranks at the same step. Algorithms with servers apply it at one
        version. Others apply it at each rank's own step. `run.info["steering"]` records the steps.

        Args:
            changes: lr, and settings of the algorithm, such as width, backups or collective.
                lr is that of the first parameter group; other groups and a schedule keep their proportion to it.
                codec sets the codec of the collective. delay is K - 1.

        Raises:
            ConfigError: a setting cannot be changed, and nothing is written; the message names the settings that
                can be. Or the run has ended.
        """
        send_settings(self.folder, changes)
        return self

    def pause(self) -> RunHandle:
        """Pause all ranks at the end of a step until `resume()` or `stop()`. Returns at once.

        `status` is "paused" when the ranks have paused. `set` works during a pause. The pause counts neither as
        training time nor towards timeout_s.

        Raises:
            ConfigError: the run has ended.
        """
        send_command(self.folder, PAUSE)
        return self

    def resume(self) -> RunHandle:
        """Continue after `pause()`. Returns at once.

        Raises:
            ConfigError: the run has ended.
        """
        send_command(self.folder, RESUME)
        return self

    def interrupt(self, rank: int | None = None) -> RunHandle:
        """Interrupt the run at once, inside a step and without a checkpoint. `stop()` loses nothing.

        The other ranks fail because of it, and the run's status is "failed". The ranks can train again.

        Args:
            rank: the rank to interrupt; None for all.

        Raises:
            ConfigError: there is no such rank, or this handle cannot reach the ranks because their cluster was
                detached.
            LaunchError: the interrupt did not reach the ranks.
        """
        ranks = [number for number, result in enumerate(self._results) if not result.done()]
        if rank is not None and not 0 <= rank < len(self._results):
            raise ConfigError(f"rank {rank} of {len(self._results)}: 0 to {len(self._results) - 1}, or None for all")
        targets = [number for number in ranks if rank in (None, number)]
        if targets and not self.done:
            if self._engines is None:
                raise ConfigError("this handle cannot reach the ranks: attach to their cluster, or stop() the run")
            interrupt_ranks(self._engines.client, targets)
        return self

    def _recorded(self) -> Run:
        return self.run

    def abandon(self, reason: str) -> None:
        """Record that no rank will return: the cluster was ended during the training."""
        with self._lock:
            if not self._over.is_set():
                self._lost = reason
                self._settle()

    def readdress(self, results: Sequence[Any]) -> None:
        """Wait for these results instead: the cluster was detached, and the ranks report only in the run's folder."""
        self._results, self._engines = list(results), None
        for result in self._results:
            result.add_done_callback(self._on_result)

    def _on_result(self, _: Any) -> None:
        """Settle the record if this is the last result. Called on the client's own thread."""
        with self._lock:
            if not self._over.is_set() and all(result.done() for result in self._results):
                self._settle()

    def _settle(self) -> None:
        """Correct the record if it says that the run continues, and drop the engines. No rank may still write."""
        try:
            cause = self._lost or (self._cause("") if self._failed() else None)
            if self._exits or read_info(self.folder)["status"] not in ENDED:
                reason = cause or "the ranks ended without an error message"
                update_run(self.folder, status="failed", error=str(reason))
        except WorkbenchError:
            pass  # the folder was removed meanwhile: there is nothing to correct
        finally:
            if self._engines is not None and self._failed():
                self._last_output = self._engines.last_output()
            self._engines = None
            self._over.set()

    def _ipython_display_(self) -> None:
        """Show live curves and the newest steps during the training, and static figures of them after it."""
        if not in_notebook():  # a terminal draws no figures
            print(repr(self))
            return
        from workbench.plots import LiveCurves, LiveTimeline

        follower = Follower(self.folder)

        def runs() -> list[Run]:
            return [follower.poll()]

        view = LiveCurves(on_stop=self.stop, on_pause=self.pause, on_resume=self.resume)
        timeline = LiveTimeline(self.folder)
        view.update(runs())
        if self.done:
            view.finish()
            timeline.finish()
            view._ipython_display_()
            if timeline.static() is not None:
                timeline._ipython_display_()
            return
        view._ipython_display_()
        timeline._ipython_display_()
        self._views += [view, timeline]
        view.follow(runs)
        timeline.follow()

    def shown_by(self, view: Any) -> None:
        """Call `view.settle()` when the run has ended and a `wait` for it returns."""
        self._views.append(view)

    def _finish_views(self) -> None:
        """Draw the final state at once, not at the next refresh: a notebook that ends here keeps the whole curve."""
        while self._views:
            with suppress(WorkbenchError):  # the folder was removed meanwhile: the views show that themselves
                self._views.pop().settle()

    def _failed(self) -> dict[int, BaseException]:
        """Return rank -> its error, for the ranks that returned one."""
        return failed_ranks(self._results, self.folder)

    def _error(self) -> WorkbenchError:
        """Return the error to raise. Wait up to CAUSE_S for the cause if only its consequences have arrived."""
        engines = self._engines
        deadline = time.monotonic() + CAUSE_S
        while consequence(first_cause(self._failed())[1]) and not self.done and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return self._cause(engines.last_output() if engines else self._last_output)

    def _cause(self, last_output: str) -> WorkbenchError:
        engines = self._engines
        if (reason := self._lost or (engines.why_silent() if engines is not None else None)) is not None:
            return RankFailed(f"{reason}. Train on a new Cluster; resume= continues from a checkpoint, if there is one")
        failed = self._failed()
        if self._engines is not None and not self._exits:
            self._exits = describe_exits(failed, self._engines, self.folder, CAUSE_S)
        gone = [rank for rank, error in failed.items() if consequence(error) == 1]
        rank, error = first_cause(failed, self._exits)
        return local_error(rank, error, last_output, self._exits, gone)

    def __str__(self) -> str:
        run = self._follower.poll()
        rows = run.steps()
        progress = f", {_progress(run)}" if rows else ""
        loss = f", loss {rows[-1]['loss']:.4g}" if rows and rows[-1]["loss"] is not None else ""
        problem = (run.info.get("problem") or {}).get("name", "?")
        state = self._failure_summary(run) or f"{self.status}{progress}{loss}"
        ranks = run.departures_summary or f"{run.info.get('num_workers')} ranks"
        return f"{run.label} on {problem}, {ranks}: {state} ({self.folder})"

    def _failure_summary(self, run: Run) -> str:
        """Return what failed, even if the record does not contain it yet; "" if nothing failed."""
        if run.failure_summary or not self._failed():
            return run.failure_summary
        rank, error = first_cause(self._failed(), self._exits)
        lines = str(error).strip().splitlines()
        message = f"rank {rank}: {lines[0] if lines else error}"
        return replace(run, info={**run.info, "status": "failed", "error": message}).failure_summary

    def __repr__(self) -> str:
        return f"<{self}>"


def _progress(run: Run) -> str:
    """Return the last step, of how many, and the time left; as far as they are known."""
    from tqdm import tqdm

    done = progress_of(run)
    of, left = "" if done.total is None else f" of {done.total}", ""
    if done.left_s is not None:
        left = f", {tqdm.format_interval(done.left_s)} left"
    return f"step {done.taken}{of}{left}"
