"""The curves of a run in a bounded number of points, read while the run is written."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from workbench.trace.read import metrics_paths, next_metrics_rows
from workbench.trace.run import Run

MAX_BINS = 800


@final
class Bin:
    """Sums over the rows of all ranks in an interval of steps."""

    __slots__ = ("loss", "samples", "seconds", "step", "weight")

    def __init__(self) -> None:
        self.step, self.seconds, self.samples = -1, 0.0, 0.0  # of the last step
        self.loss, self.weight = 0.0, 0.0

    def add(self, step: int, seconds: float, samples: float, loss: float, weight: float) -> None:
        """Add a row, or another bin."""
        self.step, self.seconds = max(self.step, step), max(self.seconds, seconds)
        self.samples = max(self.samples, samples)
        self.loss += loss
        self.weight += weight


@final
class LiveCurve:
    """Mean loss of all ranks over intervals of steps, and the evaluations. Each poll reads only new lines.

    When there are more than `MAX_BINS` intervals, each two neighbours become one. So memory does not grow with the run.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._begin()

    def _begin(self) -> None:
        self._offsets: dict[int, int] = {}
        self._width = 1  # steps in a bin
        self._bins: dict[int, Bin] = {}
        self._evaluations: dict[int, list[dict[str, Any]]] = {}
        self._last: dict[int, dict[str, Any]] = {}  # rank -> its newest row

    def poll(self) -> None:
        """Read what was written since the last poll. Files that cannot be read, or that were removed, add nothing."""
        with suppress(OSError):
            paths = metrics_paths(self.folder)
            if any(path.stat().st_size < self._offsets.get(rank, 0) for rank, path in paths.items()):
                self._begin()  # the files were written again
            for rank, path in paths.items():
                with suppress(OSError):  # the other ranks' files may be readable
                    self._read(rank, path)

    def _read(self, rank: int, path: Path) -> None:
        """Add the new rows of a rank."""
        before = -1
        while (offset := self._offsets.get(rank, 0)) > before:
            rows, self._offsets[rank] = next_metrics_rows(path, offset)
            for row in rows:
                self._add(rank, row)
            before = offset

    def _add(self, rank: int, row: dict[str, Any]) -> None:
        if "evaluation" in row:
            self._evaluations.setdefault(rank, []).append(row)
            return
        self._last[rank] = row
        weight = row["num_samples"] or 0 if row["loss"] is not None else 0
        found = self._bins.setdefault(row["step"] // self._width, Bin())
        found.add(row["step"], row["seconds"], row["samples"], (row["loss"] or 0.0) * weight if weight else 0.0, weight)
        if len(self._bins) > MAX_BINS:
            self._width *= 2
            merged: dict[int, Bin] = {}
            for number, one in sorted(self._bins.items()):
                merged.setdefault(number // 2, Bin()).add(one.step, one.seconds, one.samples, one.loss, one.weight)
            self._bins = merged

    @property
    def num_steps(self) -> int:
        """Number of steps so far, with those before the checkpoint of a resumed run."""
        return max((one.step for one in self._bins.values()), default=-1) + 1

    @property
    def seconds(self) -> float | None:
        """Seconds of training so far."""
        return max((one.seconds for one in self._bins.values()), default=None)

    @property
    def bytes_sent(self) -> float:
        """Bytes that all ranks have sent."""
        return float(sum(row["bytes_sent"] for row in self._last.values()))

    def loss(self, max_points: int = MAX_BINS) -> dict[str, list[Any]]:
        """Return the training loss: equally long lists of steps, seconds and values. A value is NaN if a loss was."""
        bins = [one for _, one in sorted(self._bins.items()) if one.weight]
        size = -(-len(bins) // max_points) if bins else 1
        found: dict[str, list[Any]] = {"steps": [], "seconds": [], "values": []}
        for start in range(0, len(bins), size):
            group = bins[start : start + size]
            found["steps"].append(group[-1].step + 1)
            found["seconds"].append(group[-1].seconds)
            found["values"].append(sum(one.loss for one in group) / sum(one.weight for one in group))
        return found

    def evaluations(self, info: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the complete evaluations of all ranks, as `Run.evaluations` does.

        Args:
            info: the run's `run.json`.
        """
        ranks = {*self._last, *self._evaluations}
        newest = {rank: [self._last[rank]] if rank in self._last else [] for rank in ranks}
        rows = {rank: [*self._evaluations.get(rank, ()), *newest[rank]] for rank in ranks}
        return Run(info=info, metrics=rows).evaluations()

    def left_s(self, num_steps: int | None) -> float | None:
        """Return the seconds of training until `num_steps`, at the speed of the newer half of the steps."""
        bins = [one for _, one in sorted(self._bins.items())]
        if num_steps is None or len(bins) < 2:
            return None
        middle, last = bins[(len(bins) - 1) // 2], bins[-1]
        if last.step <= middle.step:
            return None
        left_s = (num_steps - self.num_steps) * (last.seconds - middle.seconds) / (last.step - middle.step)
        return left_s if math.isfinite(left_s) and left_s >= 0 else None
