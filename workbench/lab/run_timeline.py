"""Timelines of runs for the panel: of the newest steps while a run trains, and of any steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, final

from workbench.errors import ConfigError
from workbench.trace.processes import OVER, with_true_status
from workbench.trace.run import Run
from workbench.trace.store import read_info
from workbench.trace.tail import TAIL_BYTES, read_tail

MAX_SPANS = 20_000  # in an answer: half a megabyte
MAX_KEPT = 2  # runs that have ended, whose spans stay in memory


@final
class RunTimelines:
    """What `plots.trace_viewer` shows of runs. The spans of the last two runs that have ended stay in memory."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: OrderedDict[Path, Run] = OrderedDict()

    def of(self, folders: Sequence[Path], steps: slice | None, *, critical: bool) -> dict[str, Any]:
        """Return the content for a viewer.

        Args:
            folders: of a run, or of two to compare.
            steps: which steps; None for the newest of a run that trains, or for those from the middle that fit.
            critical: include the critical path of each step. Those of the newest steps are always there.

        Raises:
            RunNotFound: a run was removed.
            ConfigError: the trace holds none of these steps; the message says which it holds.
        """
        from workbench.plots.trace_viewer.payload import payload  # plotly, which most servers never need

        with self._lock:
            if steps is None and len(folders) == 1 and not self._has_ended(folders[0]):
                return self._newest(folders[0])
            runs = [self._run(folder) for folder in folders]
            return payload(runs, steps, critical=critical, max_spans=MAX_SPANS).content

    def _has_ended(self, folder: Path) -> bool:
        return folder in self._kept or with_true_status(folder, read_info(folder)).get("status") in OVER

    def _newest(self, folder: Path) -> dict[str, Any]:
        from workbench.plots.trace_viewer.newest import MAX_TAIL_BYTES, newest_steps
        from workbench.plots.trace_viewer.payload import payload

        tail_bytes = TAIL_BYTES
        while True:
            run = read_tail(folder, tail_bytes)
            steps = newest_steps(run)
            if steps is not None:
                return payload([run], steps, newest=True).content
            if (run.info.get("settings") or {}).get("trace_steps") == 0:
                raise ConfigError(f"{folder.name} has no trace, because of trace_steps=0: train without it")
            if tail_bytes >= MAX_TAIL_BYTES or not run.spans.ranks:
                raise ConfigError(f"{folder.name} has no complete step in its trace yet")
            tail_bytes *= 4

    def _run(self, folder: Path) -> Run:
        if folder in self._kept:
            self._kept.move_to_end(folder)
            return self._kept[folder]
        ended, run = self._has_ended(folder), Run.load(folder)
        if ended:
            self._kept[folder] = run
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return run
