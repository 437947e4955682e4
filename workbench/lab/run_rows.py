"""The runs of one or more stores as rows. A run that did not change since the last call is not read again."""

from __future__ import annotations

import math
import os
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, final

from workbench.analysis.runs_table import add_results, row_of
from workbench.errors import RunNotFound
from workbench.lab.compare_runs import differences, group_of, merged, series_of
from workbench.lab.live_curve import LiveCurve
from workbench.trace.index import state_of
from workbench.trace.info import NAME
from workbench.trace.processes import ENDED, OVER, with_true_status
from workbench.trace.read import metrics_paths, read_failures
from workbench.trace.recorder import metrics_name
from workbench.trace.run import Run
from workbench.trace.store import StoredRun, read_info
from workbench.trace.tail import last_step_row

RECHECK_S = 5.0  # a run whose processes ended without a report may still write, if they are on another machine
SHOWN_POINTS = 48  # of a row's small curve
BUDGET_S = 0.25  # per request, for curves of ended runs that were not read yet
MAX_CURVES = 300


@final
@dataclass(slots=True)
class _CachedRow:
    """A row, and what it was read from."""

    state: list[int]
    info: dict[str, Any]
    row: dict[str, Any]
    version: int
    recorded_end: bool  # the record itself says that the run has ended; that of a killed run does not
    checked_s: float = field(default_factory=time.monotonic)

    @property
    def is_fresh(self) -> bool:
        """Whether the row is right while its `state` does not change."""
        if self.row["status"] not in OVER or "train_loss" not in self.row:
            return False
        return self.recorded_end or time.monotonic() - self.checked_s < RECHECK_S


@final
class RunRows:
    """Rows of runs by folder. Any thread may call it; one reads at a time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._cached: dict[Path, _CachedRow] = {}
        self._curves: OrderedDict[Path, LiveCurve] = OrderedDict()
        self._version = time.time_ns() // 1_000  # above all versions of a server that ran before; exact in JavaScript

    def select(
        self, roots: Iterable[Path], *, limit: int | None = None, after: int = 0, curves: bool = False
    ) -> dict[str, Any]:
        """Return {"runs": rows, newest first, "num_runs", "version", "stores", "pending"}.

        Args:
            roots: the stores. Those that do not exist are empty.
            limit: only the newest runs.
            after: only rows that changed after the call which returned this version.
            curves: add "curve", the losses of a small curve. Those of ended runs are read within `BUDGET_S`; "pending"
                says that some are missing, and a further call adds them.
        """
        roots = list(roots)
        with self._lock:
            self._refresh(roots)
            found = sorted(self._cached.values(), key=lambda cached: cached.row["created"] or "", reverse=True)
            chosen = [cached for cached in found[:limit] if cached.version > after]
            rows, pending = [cached.row for cached in chosen], False
            if curves:
                deadline = time.monotonic() + BUDGET_S
                rows = [{**row, "curve": self._small_curve(Path(row["folder"]), deadline)} for row in rows]
                pending = any(row["curve"] is None for row in rows)
            return {
                "runs": rows,
                "num_runs": len(found),
                "version": self._version,
                "stores": [str(root) for root in roots],
                "pending": pending,
            }

    def find(self, roots: Iterable[Path], name: str) -> Path:
        """Return the folder of a run by its exact name: that of its folder, or of its row, if its folder was renamed.

        Raises:
            ValueError: it cannot be the name of a run, or several runs have it, such as a run and a copy of its folder.
            RunNotFound: no store has it.
        """
        if not NAME.fullmatch(name) or name.startswith("."):
            raise ValueError(f"{name!r} cannot be the name of a run")
        roots = list(roots)
        found = [root / name for root in roots]
        with self._lock:
            renamed = [folder for folder, cached in self._cached.items() if cached.row["run"] == name]
        found += [folder for folder in renamed if folder.parent in roots]
        found = list({folder.resolve(): folder for folder in found if (folder / "run.json").is_file()}.values())
        if len(found) > 1:
            raise ValueError(
                f"{len(found)} runs have the name {name}: {' and '.join(map(str, found))}. Move one of them out of the run "
                "stores that the panel shows, or open it by its folder: wb.open_run(folder)"
            )
        if not found:
            raise RunNotFound(f"there is no run {name}: it was removed, or it is in another run store")
        return found[0]

    def one(self, folder: Path, max_points: int) -> dict[str, Any]:
        """Return the row of a run with its curves, its failed ranks, its notes, and the steps of an epoch, if known.

        Raises:
            RunNotFound: the run was removed.
        """
        with self._lock:
            cached = self._read_again(folder)
            curve = self._curve(folder)
            curve.poll()
            evaluations = curve.evaluations(cached.info)
            failures = read_failures(folder)
        size = max(1, -(-len(evaluations) // max_points))
        # Decimated from the end, so that the last evaluation is always there
        shown = evaluations[::-1][::size][::-1]
        names = _evaluated(cached.info)
        columns = {name: [row.get(name) for row in shown] for name in names}
        return {
            "run": cached.row,
            "loss": curve.loss(max_points),
            "evaluations": {
                "steps": [row["step"] + 1 for row in shown],
                "seconds": [row["seconds"] for row in shown],
                **{name: values for name, values in columns.items() if any(value is not None for value in values)},
            },
            "failures": [
                {"rank": rank, "error": str(one.get("error", "")), "traceback": str(one.get("traceback", ""))}
                for rank, one in failures.items()
            ],
            "notes": [note for note in cached.info.get("notes") or () if isinstance(note, str)],
            "steps_per_epoch": _steps_per_epoch(cached.info),
        }

    def compare(self, folders: Iterable[Path], max_points: int) -> dict[str, Any]:
        """Return the curves of several runs on the same axes, and the settings in which the runs differ.

        Returns:
            "series": for each curve its label, its "runs" and "statuses", the steps of an epoch if they are known, and
            by metric the curve of `merged`.
            "differences": see `compare_runs.differences`.

        Raises:
            RunNotFound: a run was removed.
        """
        with self._lock:
            read = [self._read_again(folder) for folder in folders]
            infos, rows = [cached.info for cached in read], [cached.row for cached in read]
            curves = [self._curve_columns(cached) for cached in read]
        found = []
        series = series_of([{**info, "status": row["status"]} for info, row in zip(infos, rows, strict=True)])
        for one in series:
            metrics = dict.fromkeys(name for member in one.members for name in curves[member])
            found.append(
                {
                    "label": one.label,
                    "runs": [rows[member]["run"] for member in one.members],
                    "statuses": [rows[member]["status"] for member in one.members],
                    "steps_per_epoch": _steps_per_epoch(infos[one.members[0]]),
                    "curves": {
                        name: merged(
                            [curves[member][name] for member in one.members if name in curves[member]], name, max_points
                        )
                        for name in metrics
                    },
                }
            )
        return {"series": found, "differences": differences(rows, series)}

    def _curve_columns(self, cached: _CachedRow) -> dict[str, dict[str, list[Any]]]:
        """Return metric -> equally long lists of steps, seconds, and the metric's values."""
        curve = self._curve(Path(cached.row["folder"]))
        curve.poll()
        loss = curve.loss()
        found = {"train_loss": {"steps": loss["steps"], "seconds": loss["seconds"], "train_loss": loss["values"]}}
        rows = curve.evaluations(cached.info)
        for name in _evaluated(cached.info):
            measured = [row for row in rows if row.get(name) is not None]
            if measured:
                found[name] = {
                    "steps": [row["step"] + 1 for row in measured],
                    "seconds": [row["seconds"] for row in measured],
                    name: [row[name] for row in measured],
                }
        return found

    def info(self, folder: Path) -> dict[str, Any]:
        """Return the run's `run.json`, with its true status."""
        return with_true_status(folder, read_info(folder))

    def _refresh(self, roots: Iterable[Path]) -> None:
        present: set[Path] = set()
        for root in roots:
            read = []
            for name in _names(root):
                folder = root / name
                state = _state(folder)
                if state is None:
                    continue
                cached = self._cached.get(folder)
                if cached is None or cached.state != state or not cached.is_fresh:
                    try:
                        cached = self._read(folder, state)
                    except RunNotFound:  # damaged, or just removed
                        continue
                    read.append(cached)
                present.add(folder)
            self._add_results(read, root)
        for folder in self._cached.keys() - present:
            del self._cached[folder]
            self._version += 1

    def _add_results(self, read: Iterable[_CachedRow], root: Path) -> None:
        """Add the values computed from metrics to the rows of runs that have ended."""
        ended = [cached for cached in read if cached.row["status"] in ENDED and "train_loss" not in cached.row]
        for cached, row in zip(
            ended, add_results([cached.row for cached in ended], root) if ended else (), strict=True
        ):
            self._version += 1
            cached.version = self._version
            counted = _steps_taken(Path(row["folder"])) if cached.info.get("resumed") else row["steps"]
            cached.row = {**row, "steps": cached.row["steps"] or counted or 0}

    def _read(self, folder: Path, state: list[int]) -> _CachedRow:
        """Read a run that is new, changed or alive."""
        recorded = read_info(folder)
        info = with_true_status(folder, recorded)
        row = {**row_of(StoredRun(folder, info)), "num_steps": _planned(info), "left_s": None, "steps": 0}
        row |= {"group": group_of(info), "metrics": list(Run(info=info, metrics={}).metric_names)}
        before = self._cached.get(folder)
        if row["status"] in ENDED:
            if before is not None and before.state == state and before.row["status"] == row["status"]:
                before.checked_s = time.monotonic()
                return before
            row["steps"] = (info.get("result") or {}).get("steps") or 0
            if folder in self._curves:
                self._curves[folder].poll()  # what it wrote after the last poll
        else:
            row |= self._live(folder, info, row["num_steps"])
        if before is not None and before.row == row:
            before.state, before.info, before.checked_s = state, info, time.monotonic()
            return before
        self._version += 1
        cached = self._cached[folder] = _CachedRow(state, info, row, self._version, recorded.get("status") in ENDED)
        return cached

    def _read_again(self, folder: Path) -> _CachedRow:
        """Return the row of a run as it is now, with its results if it has ended.

        Raises:
            RunNotFound: the run was removed.
        """
        found = self._read(folder, _state(folder) or [])
        self._add_results([found], folder.parent)
        return found

    def _live(self, folder: Path, info: dict[str, Any], num_steps: int | None) -> dict[str, Any]:
        """Return the results so far of a run that is alive."""
        curve = self._curve(folder)
        curve.poll()
        evaluations = curve.evaluations(info)
        last = evaluations[-1] if evaluations else {}
        losses = curve.loss()["values"]
        own = {name: last.get(name) for name in Run(info=info, metrics={}).metric_names}
        return {
            "steps": curve.num_steps,
            "accuracy": last.get("accuracy"),
            "loss": last.get("test_loss"),
            **own,
            "train_loss": losses[-1] if losses else None,
            "seconds": curve.seconds,
            "bytes_sent": curve.bytes_sent,
            "left_s": curve.left_s(num_steps) if info.get("status") == "running" else None,
        }

    def _curve(self, folder: Path) -> LiveCurve:
        curve = self._curves.pop(folder, None) or LiveCurve(folder)
        self._curves[folder] = curve  # the newest use is last
        while len(self._curves) > MAX_CURVES:
            self._curves.popitem(last=False)
        return curve

    def _small_curve(self, folder: Path, deadline: float) -> list[float | None] | None:
        known = folder in self._curves
        if not known and time.monotonic() > deadline:
            return None
        curve = self._curve(folder)
        if not known:
            curve.poll()  # a known curve was polled by `_read`
        values: list[float | None] = [
            value if math.isfinite(value) else None for value in curve.loss(SHOWN_POINTS)["values"]
        ]
        return values


def _names(root: Path) -> list[str]:
    try:
        return [name for name in os.listdir(root) if not name.startswith(".")]
    except OSError:
        return []


def _state(folder: Path) -> list[int] | None:
    """Return the state of a run's `run.json`, and of the metrics to which `workbench evaluate` adds after its end."""
    recorded = state_of(folder / "run.json")
    return None if recorded is None else [*recorded, *(state_of(folder / metrics_name(0)) or ())]


def _evaluated(info: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of what the evaluations of a run measure."""
    return ("test_loss", "accuracy", *Run(info=info, metrics={}).metric_names)


def _steps_per_epoch(info: dict[str, Any]) -> float | None:
    return Run(info=info, metrics={}).steps_per_epoch


def _steps_taken(folder: Path) -> int:
    """Return the number of steps of a run by its metrics, with those before the checkpoint of a resumed run."""
    try:
        rows = [row for path in metrics_paths(folder).values() if (row := last_step_row(path))]
    except OSError:  # removed
        return 0
    return max((row["step"] + 1 for row in rows), default=0)


def _planned(info: dict[str, Any]) -> int | None:
    """Return the number of steps that a run will have taken at its end; None if it is not known."""
    settings, result = info.get("settings") or {}, info.get("result") or {}
    for value in (info.get("num_steps"), settings.get("steps"), result.get("steps")):
        if isinstance(value, int) and value > 0:
            return value
    return None
