"""Shows what ranks print while they train, as their files in the run's folder grow."""

from __future__ import annotations

import html
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast, final

from workbench.clusters.supervision.heartbeat import output_name
from workbench.clusters.supervision.start_progress import in_notebook

POLL_S = 0.2
MOST_LINES_RANKS = 8  # of more ranks the lines are folded away
KEPT_LINES = 500  # in what is folded away; the files hold all


@final
class Echo:
    """Lines of all ranks, each with its rank before it, in the order in which they were found.

    Args:
        folder: the run's.
        num_ranks: how many.
        from_now: leave out what is there already.
        print_line: where a line goes; for tests.
    """

    def __init__(self, folder: Path, num_ranks: int, *, from_now: bool = False, print_line: Callable[[str], None] | None = None) -> None:
        self._paths = [folder / output_name(rank) for rank in range(num_ranks)]
        self._read = [path.stat().st_size if from_now and path.exists() else 0 for path in self._paths]
        self._width = len(str(num_ranks - 1))
        self._lock = threading.Lock()
        self._folded: deque[str] = deque(maxlen=KEPT_LINES)
        self._num_lines = 0
        self._display: Any = None
        self._print = print_line or self._show

    def follow(self, over: Callable[[], bool]) -> None:
        """Look five times a second, in a thread, until it is over."""

        def look() -> None:
            while not over():
                self.poll()
                pause.wait(POLL_S)
            self.poll(to_the_end=True)

        pause = threading.Event()
        threading.Thread(target=look, name="workbench-echo", daemon=True).start()

    def poll(self, *, to_the_end: bool = False) -> None:
        """Show what is new. The beginning of a line waits for its rest, or the end."""
        with self._lock:
            for rank, path in enumerate(self._paths):
                try:
                    with path.open("rb") as file:
                        file.seek(self._read[rank])
                        new = file.read()
                except OSError:
                    continue
                whole = new if to_the_end else new[: new.rfind(b"\n") + 1]
                self._read[rank] += len(whole)
                for line in whole.decode(errors="replace").splitlines():
                    self._print(f"[{rank:>{self._width}}] {line}")
            self._draw()

    def _show(self, line: str) -> None:
        if len(self._paths) <= MOST_LINES_RANKS or not in_notebook():
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
        note = f"<i>the last {len(self._folded)}; all are in {html.escape(str(self._paths[0].parent))}</i>\n" if dropped else ""
        text = html.escape("\n".join(self._folded))
        page = make(f"<details><summary>{self._num_lines} lines of {len(self._paths)} ranks</summary><pre>{note}{text}</pre></details>")
        if self._display is None:
            self._display = show(page, display_id=True)
        else:
            self._display.update(page)
        self._display.num_lines = self._num_lines


def echo_wanted(quiet: bool) -> bool:
    """Whether somebody looks: a notebook, or a terminal."""
    return not quiet and (in_notebook() or sys.stdout.isatty())
