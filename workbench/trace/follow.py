"""Follow a run while it is written."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Lock
from typing import Any, final

from workbench.errors import RunNotFound
from workbench.trace.processes import ENDED, with_true_status
from workbench.trace.read import metrics_paths, next_metrics_rows
from workbench.trace.run import Run
from workbench.trace.store import read_info

POLL_S = 5.0  # seconds between checks that the run's processes are alive


@final
class Follower:
    """Reads the metrics of a running training. Each `poll` reads only new lines. Any thread may call it.

    A row takes about 450 bytes of memory: 0.45 GB for each rank of a run of a million steps, as with `Run.load`.

    Args:
        folder: the run's folder.
        most_rows: keep only this number of each rank's newest rows; None: all rows.
    """

    def __init__(self, folder: Path | str, *, most_rows: int | None = None) -> None:
        self.folder, self._most_rows = Path(folder), most_rows
        self._offsets: dict[int, int] = {}
        self._rows: dict[int, list[dict[str, Any]]] = {}
        self._lock = Lock()
        self._looked_s = float("-inf")

    def poll(self) -> Run:
        """Return the run so far. An incomplete last line is left for the next poll.

        Raises:
            RunNotFound: the folder no longer exists, or it holds no readable run.
        """
        with self._lock:
            return self._poll()

    def _poll(self) -> Run:
        if not self.folder.is_dir():
            raise RunNotFound(f"the run's folder {self.folder} no longer exists")
        info = read_info(self.folder)  # read before the rows: if the status is finished, all rows are written
        if time.monotonic() - self._looked_s > POLL_S:
            recorded, info = info, with_true_status(self.folder, info)
            # `run.json` of a killed run still says "running", so check it at every poll
            self._looked_s = time.monotonic() if info is recorded else float("-inf")
        for rank, path in metrics_paths(self.folder).items():
            while self._read_block(rank, path) and info.get("status") in ENDED:
                pass  # there may be no poll after that of the end
        return Run(
            info=info, metrics={rank: list(rows) for rank, rows in sorted(self._rows.items())}, folder=self.folder
        )

    def _read_block(self, rank: int, path: Path) -> bool:
        """Add the next rows of a rank. Return whether there was a complete line."""
        before = self._offsets.get(rank, 0)
        rows, self._offsets[rank] = next_metrics_rows(path, before)
        kept = self._rows.setdefault(rank, [])
        kept.extend(rows)
        if self._most_rows is not None:
            del kept[: -self._most_rows]
        return self._offsets[rank] > before
