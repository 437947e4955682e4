"""`RankOutput`: shows what ranks print during a training. It reads the ranks' output files in the run's folder."""

from __future__ import annotations

import html
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast, final

from workbench.clusters.supervision.rank_output import output_name
from workbench.machine import in_notebook

POLL_S = 0.2
MAX_LINES_RANKS = 8  # with more ranks, a notebook shows the lines in a fold
KEPT_LINES = 500  # lines in the fold; the files hold all of them


@final
class RankOutput:
    """Lines of all ranks, each after its rank's number, in the order of arrival.

    Args:
        folder: the run's folder.
        num_ranks: number of ranks.
        from_now: skip the lines that the files hold already.
        print_line: called with each line; tests set it.
    """

    def __init__(
        self, folder: Path, num_ranks: int, *, from_now: bool = False, print_line: Callable[[str], None] | None = None
    ) -> None:
        self._paths = [folder / output_name(rank) for rank in range(num_ranks)]
        self._offsets = [path.stat().st_size if from_now and path.exists() else 0 for path in self._paths]
        self._width = len(str(num_ranks - 1))
        self._lock = threading.Lock()
        self._folded: deque[str] = deque(maxlen=KEPT_LINES)
        self._num_lines = 0
        self._display: Any = None
        self._print = print_line or self._show

    def follow(self, over: Callable[[], bool]) -> None:
        """Poll in a thread until `over()` is true."""

        def poll_until_over() -> None:
            while not over():
                self.poll()
                time.sleep(POLL_S)
            self.poll(to_the_end=True)

        threading.Thread(target=poll_until_over, name="workbench-output", daemon=True).start()

    def poll(self, *, to_the_end: bool = False) -> None:
        """Show new lines.

        Args:
            to_the_end: also show an incomplete last line; otherwise it is shown when it is complete.
        """
        with self._lock:
            for rank in range(len(self._paths)):
                new = self._read_on(rank)
                whole = new if to_the_end else new[: new.rfind(b"\n") + 1]
                self._offsets[rank] += len(whole)
                for line in whole.decode(errors="replace").splitlines():
                    self._print(f"[{rank:>{self._width}}] {line}")
            self._draw()

    def _read_on(self, rank: int) -> bytes:
        """Return what a rank has written since the last call; nothing if its file cannot be read."""
        try:
            with self._paths[rank].open("rb") as file:
                file.seek(self._offsets[rank])
                return file.read()
        except OSError:
            return b""

    def _show(self, line: str) -> None:
        if len(self._paths) <= MAX_LINES_RANKS or not in_notebook():
            print(line, flush=True)
        else:
            self._folded.append(line)
            self._num_lines += 1

    def _draw(self) -> None:
        if not self._folded or self._num_lines == getattr(self._display, "num_lines", 0):
            return
        from IPython import display

        make, show = cast(Any, display.HTML), cast(Any, display.display)
        dropped = self._num_lines - len(self._folded)
        folder = html.escape(str(self._paths[0].parent))
        note = f"<i>the last {len(self._folded)}; all are in {folder}</i>\n" if dropped else ""
        text = html.escape("\n".join(self._folded))
        summary = f"{self._num_lines} lines of {len(self._paths)} ranks"
        page = make(f"<details><summary>{summary}</summary><pre>{note}{text}</pre></details>")
        if self._display is None:
            self._display = show(page, display_id=True)
        else:
            self._display.update(page)
        self._display.num_lines = self._num_lines


def shows_rank_output(quiet: bool) -> bool:
    """Return True in a notebook and on a terminal, unless `quiet`."""
    return not quiet and (in_notebook() or sys.stdout.isatty())
