"""Shows a cell's merged output in the notebook: in few messages, with a limit, and with lines that still change."""

from __future__ import annotations

import html
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, final

from IPython.display import HTML, clear_output, display

from workbench.kernel.outputs import label

SHOWN_CHARS = 200_000  # text that a notebook shows of one cell; a browser that shows some MB of it freezes
SHOWN_LINES = 2_000
LAST_LINES = 20  # shown after the cell, if there were more
LINE_CHARS = 500  # of each of them
CHANGES_S = 0.2  # time between two updates of the lines that still change
CHANGING_RANKS = 8


@final
class Screen:
    """The output of one cell.

    Args:
        num_ranks: number of all ranks; with one rank, lines have no prefix.
        log: file for the whole text, if there is more than the notebook shows.
    """

    def __init__(self, num_ranks: int, log: Path | None = None) -> None:
        self._num_ranks, self._log = num_ranks, log
        self._batch: list[tuple[str, str]] = []  # (stream, line) that are not printed yet
        self._shown: list[str] = []  # for the log
        self._num_shown = self._num_lines = 0  # characters and lines
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._num_left_out = self._chars_left_out = 0
        self._file: IO[str] | None = None
        self._changing: Any = None  # handle of the display of lines that still change
        self._changing_text = ""
        self._changed_s = 0.0

    # -- what is complete ------------------------------------------------------------------------------------------

    def show(self, group: list[int], kind: str, content: Any) -> None:
        """Show an item of some ranks: see `outputs.Item`. Text waits for `flush`."""
        before = label(group, self._num_ranks)
        if kind in ("stdout", "stderr"):
            self._print(kind, before + content)
            return
        if kind == "clear":
            self._batch.clear()
            clear_output(**content)  # type: ignore[no-untyped-call]
            return
        if kind == "update":
            self._display(content, update=True)
            return
        is_text = list(content["data"]) == ["text/plain"] and not content.get("transient", {}).get("display_id")
        plain = content["data"]["text/plain"] if is_text else None
        if plain is not None and (group != list(range(self._num_ranks)) or len(plain) > SHOWN_CHARS):
            for line in (before + plain).split("\n"):
                self._print("stdout", line)
            return
        if group != list(range(self._num_ranks)):
            self._print("stdout", before.rstrip())
        self.flush()
        self._display(content)

    def _display(self, content: Any, update: bool = False) -> None:
        identity = content.get("transient", {}).get("display_id")
        options = {"display_id": identity, "update": update} if identity else {}
        display(content["data"], metadata=content["metadata"], raw=True, **options)  # type: ignore[no-untyped-call]

    def _print(self, stream: str, line: str) -> None:
        if self._num_lines < SHOWN_LINES and self._num_shown + len(line) <= SHOWN_CHARS and self._file is None:
            self._batch.append((stream, line))
            self._shown.append(line)
            self._num_shown += len(line) + 1
            self._num_lines += 1
            return
        if self._file is None and self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._log.open("w")
            self._file.writelines(f"{shown}\n" for shown in self._shown)
        if self._file is not None:
            self._file.write(f"{line}\n")
        self._num_left_out += 1
        self._chars_left_out += len(line) + 1
        self._last.append(line if len(line) <= LINE_CHARS else f"{line[:LINE_CHARS]} ...")

    def flush(self) -> None:
        """Print the text that was shown since the last call, with one message for consecutive lines of a stream."""
        while self._batch:
            stream = self._batch[0][0]
            end = next((at for at, (other, _) in enumerate(self._batch) if other != stream), len(self._batch))
            text = "\n".join(line for _, line in self._batch[:end])
            del self._batch[:end]
            print(text, file=sys.stderr if stream == "stderr" else sys.stdout, flush=True)

    # -- what still changes ----------------------------------------------------------------------------------------

    def change(self, lines: Mapping[int, str]) -> None:
        """Show the line that each of these ranks still writes, such as a progress bar, in one place.

        Args:
            lines: rank -> its line.
        """
        now = time.monotonic()
        if now - self._changed_s < CHANGES_S:
            return
        shown = [label([rank], self._num_ranks) + lines[rank] for rank in sorted(lines)[:CHANGING_RANKS]]
        if len(lines) > CHANGING_RANKS:
            shown.append(f"... and {len(lines) - CHANGING_RANKS} more ranks")
        if self._num_left_out:
            shown.append(f"... {self._num_left_out:,} more lines, the last one: {self._last[-1][:200]}")
        self._changed_s = now
        self._draw("\n".join(shown))

    def _draw(self, text: str) -> None:
        if text == self._changing_text:
            return
        self._changing_text = text
        data = {"text/plain": text}
        if self._changing is None:
            self._changing = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._changing.update(data, raw=True)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Show the rest, and where the text is that was left out."""
        self.flush()
        self._draw("")
        if not self._num_left_out:
            return
        where = ""
        if self._file is not None and self._log is not None:
            self._file.close()
            where = f"; all of it is in {self._log}"
        size = f"{self._num_left_out:,} more line{'s' if self._num_left_out > 1 else ''} ({self._chars_left_out / 1e6:.1f} MB)"
        print("\n".join([f"... {size}{where}. The last lines:", *self._last]), flush=True)
        if where:
            address = html.escape(os.path.relpath(str(self._log)))
            display(HTML(f'<a href="{address}" target="_blank">{address}</a>'))  # type: ignore[no-untyped-call]
