"""Shows a cell's output in the notebook: in few messages, with a limit, and with lines that still change."""

from __future__ import annotations

import html
import os
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, final

from IPython.display import HTML, clear_output, display

from workbench.kernel.cells import format_ranks
from workbench.kernel.outputs import label

SHOWN_CHARS = 200_000  # text that a notebook shows of one cell; a browser that shows some MB of it freezes
SHOWN_LINES = 2_000
LAST_LINES = 20  # shown after the cell, if there were more
LINE_CHARS = 500  # of each of them
CHANGES_S = 0.2  # time between two updates of the lines that still change
CHANGING_RANKS = 8


@final
class LimitedText:
    """Lines of text of which the first are shown. If there are too many, a file holds all of them.

    Args:
        log: the file; None: lines that are not shown are lost.
    """

    def __init__(self, log: Path | None) -> None:
        self._log = log
        self._shown: list[str] = []
        self._num_chars = 0  # of what is shown
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._chars_left_out = 0
        self._file: IO[str] | None = None
        self.num_left_out = 0  # lines

    def add(self, line: str) -> bool:
        """Add a line. Return True if it is shown."""
        if not self.num_left_out and len(self._shown) < SHOWN_LINES and self._num_chars + len(line) <= SHOWN_CHARS:
            self._shown.append(line)
            self._num_chars += len(line) + 1
            return True
        if self._file is None and self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._log.open("w")
            self._file.writelines(f"{shown}\n" for shown in self._shown)
        if self._file is not None:
            self._file.write(f"{line}\n")
        self.num_left_out += 1
        self._chars_left_out += len(line) + 1
        self._last.append(line if len(line) <= LINE_CHARS else f"{line[:LINE_CHARS]} ...")
        return False

    def clear(self) -> None:
        """Forget all lines, because what was shown of them was cleared. The file begins again, too."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._shown.clear()
        self._last.clear()
        self._num_chars = self._chars_left_out = self.num_left_out = 0

    @property
    def last(self) -> str:
        """The last line that is not shown."""
        return self._last[-1] if self._last else ""

    def close(self) -> tuple[str, str]:
        """Return what to show at the end: text, and HTML with a link to the file; empty if all lines are shown."""
        if not self.num_left_out:
            return "", ""
        where, link = "", ""
        if self._file is not None:
            self._file.close()
            address = html.escape(os.path.relpath(self._file.name))
            where, link = f"; all of it is in {self._log}", f'<a href="{address}" target="_blank">{address}</a>'
        lines = f"{self.num_left_out:,} more line{'s' if self.num_left_out > 1 else ''}"
        size = f"({self._chars_left_out / 1e6:.1f} MB)"
        return "\n".join([f"... {lines} {size}{where}. The last lines:", *self._last]), link


class Screen(ABC):
    """Where a cell's output is shown."""

    @abstractmethod
    def show(self, group: list[int], kind: str, content: Any) -> None:
        """Show an item of some ranks: see `outputs.Item`. It may wait for `flush`."""

    @abstractmethod
    def flush(self) -> None:
        """Show what waits."""

    @abstractmethod
    def change(self, lines: Mapping[int, str]) -> None:
        """Show the line that each of these ranks still writes, such as a progress bar.

        Args:
            lines: rank -> its line.
        """

    @abstractmethod
    def close(self) -> None:
        """Show the rest, and where the text is that was left out."""


@final
class MergedScreen(Screen):
    """The output of all ranks below the cell, after the ranks' numbers.

    Args:
        num_ranks: number of all ranks; with one rank, lines have no prefix.
        log: file for the whole text, if there is more than the notebook shows.
    """

    def __init__(self, num_ranks: int, log: Path | None = None) -> None:
        self._num_ranks = num_ranks
        self._text = LimitedText(log)
        self._batch: list[tuple[str, str]] = []  # (stream, line) that are not printed yet
        self._changing: Any = None  # handle of the display of lines that still change
        self._changing_text = ""
        self._changed_s = 0.0

    def show(self, group: list[int], kind: str, content: Any) -> None:
        """See `Screen`."""
        before = label(group, self._num_ranks)
        if kind in ("stdout", "stderr"):
            self._print(kind, before + content)
            return
        if kind == "clear":
            self._batch.clear()
            self._text.clear()
            self._changing, self._changing_text = None, ""  # its display is cleared, too
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
        if self._text.add(line):
            self._batch.append((stream, line))

    def flush(self) -> None:
        """Print the lines that wait, with one message for consecutive lines of a stream."""
        while self._batch:
            stream = self._batch[0][0]
            end = next((at for at, (other, _) in enumerate(self._batch) if other != stream), len(self._batch))
            text = "\n".join(line for _, line in self._batch[:end])
            del self._batch[:end]
            print(text, file=sys.stderr if stream == "stderr" else sys.stdout, flush=True)

    def change(self, lines: Mapping[int, str]) -> None:
        """See `Screen`. The lines have one place, which is empty at the end."""
        now = time.monotonic()
        if now - self._changed_s < CHANGES_S:
            return
        shown = [label([rank], self._num_ranks) + lines[rank] for rank in sorted(lines)[:CHANGING_RANKS]]
        if len(lines) > CHANGING_RANKS:
            shown.append(f"... and {len(lines) - CHANGING_RANKS} more ranks")
        if self._text.num_left_out:
            shown.append(f"... {self._text.num_left_out:,} more lines, the last one: {self._text.last}")
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

    def close(self) -> None:
        """See `Screen`."""
        self.flush()
        self._draw("")
        text, link = self._text.close()
        if text:
            print(text, flush=True)
        if link:
            display(HTML(link))  # type: ignore[no-untyped-call]


@final
class TabbedScreen(Screen):
    """A tab for each rank, with its output in its own order.

    Args:
        ranks: the ranks that run the cell.
        log: its name gives the names of the files for a rank's whole text.

    Raises:
        ImportError: ipywidgets is not installed.
    """

    def __init__(self, ranks: Sequence[int], log: Path | None = None) -> None:
        import ipywidgets

        self._texts = {
            rank: LimitedText(log.with_name(f"{log.stem}-rank-{rank}{log.suffix}") if log else None) for rank in ranks
        }
        self._outputs: dict[int, list[dict[str, Any]]] = {rank: [] for rank in ranks}
        self._changing: dict[int, str] = {}
        self._stale: set[int] = set()  # ranks whose tab does not show all
        self._changed_s = 0.0
        self._areas = {rank: ipywidgets.Output() for rank in ranks}
        titles = [f"rank {format_ranks([rank])}" for rank in ranks]
        display(ipywidgets.Tab(children=list(self._areas.values()), titles=titles))  # type: ignore[no-untyped-call]

    def show(self, group: list[int], kind: str, content: Any) -> None:
        """See `Screen`."""
        self._stale.update(group)
        for rank in group:
            outputs = self._outputs[rank]
            if kind in ("stdout", "stderr"):
                self._print(rank, kind, content)
            elif kind == "clear":
                outputs.clear()
                self._texts[rank].clear()
            elif kind == "update":
                identity = content["transient"]["display_id"]
                for output in outputs:
                    if output.get("display_id") == identity:
                        output |= {"data": content["data"], "metadata": content["metadata"]}
            else:
                known = {"output_type": "display_data", "data": content["data"], "metadata": content["metadata"]}
                outputs.append({**known, "display_id": content.get("transient", {}).get("display_id")})

    def _print(self, rank: int, stream: str, line: str) -> None:
        if not self._texts[rank].add(line):
            return
        outputs = self._outputs[rank]
        if outputs and outputs[-1].get("name") == stream:
            outputs[-1]["text"] += f"{line}\n"
        else:
            outputs.append({"output_type": "stream", "name": stream, "text": f"{line}\n"})

    def flush(self) -> None:
        """See `Screen`. A tab is redrawn at most each `CHANGES_S` seconds."""
        if time.monotonic() - self._changed_s >= CHANGES_S:
            self._redraw()

    def change(self, lines: Mapping[int, str]) -> None:
        """See `Screen`. A rank's line is the last one in its tab."""
        self._stale.update(rank for rank in self._texts if lines.get(rank) != self._changing.get(rank))
        self._changing = dict(lines)

    def _redraw(self) -> None:
        self._changed_s = time.monotonic()
        for rank in self._stale:
            shown = [
                {name: each for name, each in output.items() if name != "display_id"} for output in self._outputs[rank]
            ]
            if rank in self._changing:
                shown.append({"output_type": "stream", "name": "stdout", "text": self._changing[rank]})
            self._areas[rank].outputs = tuple(shown)
        self._stale.clear()

    def close(self) -> None:
        """See `Screen`."""
        self._changing = {}
        for rank, text in self._texts.items():
            last, link = text.close()
            self._stale.add(rank)
            if last:
                self._outputs[rank].append({"output_type": "stream", "name": "stdout", "text": f"{last}\n"})
            if link:
                data = {"text/html": link}
                self._outputs[rank].append({"output_type": "display_data", "data": data, "metadata": {}})
        self._redraw()
