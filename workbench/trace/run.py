"""A run as its readers see it: its description, each rank's metrics, and all ranks' spans on one clock."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ConfigError
from workbench.naming import kebab
from workbench.trace.chakra import export_chakra
from workbench.trace.chrome import export_chrome
from workbench.trace.info import format_departures
from workbench.trace.kinds import SLEPT_LANE
from workbench.trace.processes import OVER, with_true_status
from workbench.trace.read import Trace, align, read_events, read_failures, read_metrics, read_trace, trace_paths
from workbench.trace.recorder import FileRecorder, MemoryRecorder
from workbench.trace.spans import Spans
from workbench.trace.store import FORMAT, new_run, read_info, write_info
from workbench.trace.views import Views, XAxis, YAxis
from workbench.trace.weights import copy_weights, write_weights

PENDING_FOLDER = "evaluations"  # in a run's folder: parameters that wait for their evaluation
PROFILED = "torch.profiler"  # the runtime of a run that was made from profiles
MAX_VALUE = 200  # characters of a setting in a label
DISTANCE = "consensus_distance"  # of an evaluation of replicas that differ between steps
X_FIELDS: dict[XAxis, str] = {
    "steps": "step",
    "epochs": "step",
    "seconds": "seconds",
    "samples": "samples",
    "bytes": "bytes_sent",
}


def as_runs(items: Iterable[Any]) -> tuple[Run, ...]:
    """Return runs from runs, or from objects that have one (a handle of `Cluster.train`).

    Raises:
        ConfigError: an item is neither.
    """
    found = tuple(item if isinstance(item, Run) else getattr(item, "run", item) for item in items)
    for item in found:
        if not isinstance(item, Run):
            raise ConfigError(
                f"{item!r} is not a run: give runs, such as [run_a, run_b]. With Trainer(record=True), finish() "
                "returns one"
            )
    return found


def evaluations_left(number: int, name: str) -> str:
    """Return the note that a run ended before its due evaluations were made, with the command that makes them."""
    return (
        f"{number} evaluation{'s' * (number > 1)} wait{'s' * (number == 1)} in {PENDING_FOLDER}/: `workbench "
        f"evaluate {name}` makes them"
    )


@final
@dataclass(frozen=True, eq=False, repr=False)
class Run(Views):
    """One training run.

    Attributes:
        info: the `run.json` object.
        metrics: rank -> its rows, in the order of writing.
        folder: the run's folder; None for a run that was never stored.
        traces: rank -> its trace, for a run that was never stored. Traces of a stored run are read at first use.
        damaged_metrics: lines that could not be read, as "file, line n".
        recorded_events: rank -> its events, for a run that was never stored.
        weights: file -> the trained weights, for a run that was never stored; see `trace.weights`.
    """

    info: dict[str, Any]
    metrics: Mapping[int, Sequence[dict[str, Any]]]
    folder: Path | None = None
    traces: dict[int, Trace] | None = None
    damaged_metrics: tuple[str, ...] = ()
    recorded_events: Mapping[int, Sequence[dict[str, Any]]] | None = None
    weights: dict[str, dict[str, Any]] | None = None

    @classmethod
    def load(cls, folder: Path | str) -> Run:
        """Read a run's folder, finished or not.

        An incomplete last line is skipped. `info` says if the run was killed.

        Raises:
            RunNotFound: the folder holds no readable run.
        """
        folder = Path(folder)
        info = with_true_status(folder, read_info(folder))
        left = sum(1 for _ in (folder / PENDING_FOLDER).glob("step-*.pt"))
        if left and info.get("status") in OVER:
            info = {**info, "notes": [*(info.get("notes") or ()), evaluations_left(left, folder.name)]}
        metrics, damaged = read_metrics(folder)
        return cls(info=info, metrics=metrics, folder=folder, damaged_metrics=damaged)

    @classmethod
    def from_memory(
        cls,
        info: dict[str, Any],
        recorders: Sequence[MemoryRecorder],
        weights: dict[str, dict[str, Any]] | None = None,
    ) -> Run:
        """Make a run from its ranks' recorders, and its trained weights."""
        traces = {item.rank: Trace({"rank": item.rank}, tuple(item.spans), tuple(item.clocks)) for item in recorders}
        metrics = {item.rank: item.rows.copy() for item in recorders}
        events = {item.rank: item.events.copy() for item in recorders if item.events}
        return cls(
            info={"format": FORMAT, **info}, metrics=metrics, traces=traces, recorded_events=events, weights=weights
        )

    def __repr__(self) -> str:
        rows = sum(map(len, self.metrics.values()))
        ranks = self.departures_summary or f"{self.num_ranks} rank{'s' * (self.num_ranks != 1)}"
        state = self.failure_summary or str(self.info.get("status", "unknown"))
        stored = "" if self.folder else ", in memory: save() stores it"
        return f"<Run {self.id}: {self.label}, {state}, {ranks}, {rows} rows of metrics{stored}>"

    def _repr_html_(self) -> str:
        """Show the run's row in the table of runs, with its error if it failed."""
        return f"{escape(repr(self))}{self._row_html()}"

    def _recorded(self) -> Run:
        return self

    @property
    def num_ranks(self) -> int:
        """Number of ranks that recorded metrics, or a trace alone (a profile)."""
        return len(set(self.metrics) | set(self.traces or ()))

    @property
    def departures_summary(self) -> str:
        """How many ranks remain, and why the others have left; "" if all ranks remain: see `trace.info`."""
        return format_departures(self.info)

    @property
    def failure_summary(self) -> str:
        """For a failed or killed run: its state, its last step, and its error in one line with the rank; otherwise "".

        >>> Run(info={"status": "failed", "error": "rank 1: the loss is nan"}, metrics={}).failure_summary
        'failed before the end of its first step: rank 1: the loss is nan'
        """
        status = self.info.get("status")
        if status not in ("failed", "killed", "lost"):
            return ""
        steps = self.rows()
        if self.traces and not self.metrics:  # read back from spans alone
            return f"{status}: {self._cause()}"
        where = f"after step {max(steps)}" if steps else "before the end of its first step"
        return f"{status} {where}: {self._cause()}"

    def _cause(self) -> str:
        """Return the first line of the error, with its rank."""
        error = str(self.info.get("error") or "").strip()
        failure = next((item for item in self.failures.items() if item[1].get("error")), None)
        if not error and failure is not None:
            error = str(failure[1]["error"]).strip()
        line = error.splitlines()[0] if error else "no reason was recorded"
        return line if failure is None or "rank" in line else f"rank {failure[0]}: {line}"

    @property
    def waiting(self) -> str:
        """A note on the evaluations that a run did not make before it ended: how many, and the command that makes them.

        "" if there are none, or if the record is damaged.

        >>> Run(info={"notes": [None]}, metrics={}).waiting
        ''
        """
        return next(
            (
                note
                for note in self.info.get("notes") or ()
                if isinstance(note, str) and f" in {PENDING_FOLDER}/: " in note
            ),
            "",
        )

    @property
    def evaluated(self) -> str:
        """Which parameters the evaluations use, if replicas differ; "" if all ranks have equal parameters."""
        algorithm = str((self.info.get("algorithm") or {}).get("name") or "")
        words = str(self.info.get("evaluated") or "")
        return f"accuracy is of {words}" if algorithm and words else ""

    @property
    def id(self) -> str:
        """The run's name, unique in its store; "memory" for a run that was never stored."""
        return str(self.info.get("id") or (self.folder.name if self.folder else "memory"))

    @property
    def label(self) -> str:
        """The algorithm and its settings that are not the defaults, for legends and tables.

        >>> Run(info={"algorithm": {"name": "PipeSGD", "settings": {"width": 2, "collective": "Native()"}}}, metrics={}).label
        'PipeSGD(width=2)'
        >>> Run(info={"algorithm": {"name": "LayerwiseSGD", "settings": {"bucket_bytes": 1048576}}}, metrics={}).label
        'LayerwiseSGD(bucket_bytes=1048576)'

        A collective and its codec are written as on the command line:

        >>> collective = {"collective": "Ring(codec=Linear8(rounding='nearest'), chunks=1)"}
        >>> Run(info={"algorithm": {"name": "LocalSGD", "settings": collective, "defaults": []}}, metrics={}).label
        'LocalSGD(collective=ring:linear8)'

        It says whether ranks slept for their compute:

        >>> Run(info={"algorithm": {"name": "PipeSGD"}, "clock": "wall", "settings": {"compute": "Compute(...)"}}, metrics={}).label
        'PipeSGD, compute (slept)'
        """
        algorithm = self.info.get("algorithm") or {}
        quiet = algorithm.get("defaults")
        settings = []
        for key, value in (algorithm.get("settings") or {}).items():
            if key in (quiet or ()) or value is False or value is None:
                continue
            if isinstance(value, int | float):
                settings.append(key if value is True else f"{key}={value if isinstance(value, int) else f'{value:g}'}")
            elif quiet is not None and (text := _written(key, str(value))):
                settings.append(f"{key}={text}")
        name = str(algorithm.get("name") or "run")
        label = f"{name}({', '.join(settings)})" if settings else name
        return f"{label}, {SLEPT_LANE}" if self.slept else label

    @property
    def slept(self) -> bool:
        """Whether ranks slept for the seconds of a cost model, instead of doing the whole compute."""
        return self.info.get("clock") == "wall" and (self.info.get("settings") or {}).get("compute") is not None

    @cached_property
    def _traces(self) -> dict[int, Trace]:
        if self.traces is not None or self.folder is None:
            return self.traces or {}
        return {rank: read_trace(path, rank) for rank, path in trace_paths(self.folder).items()}

    @cached_property
    def spans(self) -> Spans:
        """All ranks' spans on rank 0's clock."""
        return Spans.concatenate(align(rank, trace) for rank, trace in self._traces.items())

    @property
    def messages(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Places in `spans` of sends and of their receives, two arrays of shape (M,)."""
        return self.spans.messages

    @cached_property
    def events(self) -> dict[int, list[dict[str, Any]]]:
        """rank -> its events: server updates, and answers that depend on timing (see `runtimes.simulator.replay`)."""
        if self.folder is None:
            return {rank: list(rows) for rank, rows in (self.recorded_events or {}).items()}
        return read_events(self.folder)

    def updates(self) -> list[dict[str, Any]]:
        """Each server update: rank, bucket, update (number), seconds, staleness (by gradient), sources, dropped."""
        found = [{"rank": rank, **row} for rank, rows in self.events.items() for row in rows if "update" in row]
        return sorted(found, key=lambda row: (row["seconds"], row["rank"]))

    @property
    def headers(self) -> dict[int, dict[str, Any]]:
        """rank -> host, pid, device and clock origins, from its trace."""
        return {rank: trace.header for rank, trace in self._traces.items()}

    @property
    def steps_per_epoch(self) -> float | None:
        """Steps of a pass over the training data; None if the record does not have it.

        >>> Run(info={"num_steps": 40, "settings": {"epochs": 4}}, metrics={}).steps_per_epoch
        10.0
        """
        if known := self.info.get("steps_per_epoch"):
            return float(known)
        epochs, length = (self.info.get("settings") or {}).get("epochs"), self.info.get("num_steps")
        if length is None and self.info.get("status") == "finished":  # simulated
            length = 1 + max((row["step"] for rows in self.metrics.values() for row in rows), default=-1)
        return length / epochs if length and isinstance(epochs, int) and epochs > 0 else None

    @property
    def failures(self) -> dict[int, dict[str, Any]]:
        """rank -> error and traceback, for ranks that failed."""
        return read_failures(self.folder) if self.folder is not None else {}

    @property
    def damaged(self) -> tuple[str, ...]:
        """Lines of the record that could not be read, as "file, line n"; empty for an undamaged record."""
        return self.damaged_metrics + tuple(line for trace in self._traces.values() for line in trace.damaged)

    def save(self, folder: Path | str | None = None) -> Path:
        """Write the run into a folder without a record (a new one, or one of `new_run`), and return the folder.

        Without a folder, the run is added to the store, where `list_runs` and `workbench runs` find it. Use it to
        keep a simulated run. Spans are written on rank 0's clock.
        """
        if folder is None:
            entries = {
                name: value for name, value in self.info.items() if name not in ("id", "created", "status", "process")
            }
            folder = new_run(entries)
        folder = Path(folder)
        opened = read_info(folder) if (folder / "run.json").exists() else {}
        if any(folder.glob("metrics-*")) or opened.get("status", "starting") != "starting":
            raise ConfigError(f"{folder} already holds a run: choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        table, kinds, lanes = self.spans.table, self.spans.kind_names.tolist(), self.spans.lane_names.tolist()
        columns = [table[name].tolist() for name in ("start_s", "end_s", "step", "bucket", "bytes", "peer")]
        rows = list(zip(kinds, lanes, *columns, strict=True))
        for rank in sorted({*self.metrics, *self.headers}):
            recorder = FileRecorder(folder, rank, self.headers.get(rank, {}))
            for position in np.flatnonzero(table["rank"] == rank):
                recorder.span(*rows[position])
            for row in self.metrics.get(rank, ()):
                recorder.metrics(row)
            for row in self.events.get(rank, ()):
                recorder.event(row)
            recorder.close()
        kept: dict[str, Any] = {name: opened[name] for name in ("id", "created", "sweep") if name in opened}
        if self.weights:
            write_weights(folder, self.weights)
        elif self.folder is not None:
            copy_weights(self.folder, folder)
        write_info(folder, {"format": FORMAT, **self.info, "id": folder.name, **kept})
        return folder

    def export_chrome(self, path: Path | str) -> Path:
        """Write the spans as Chrome trace JSON for Perfetto (ui.perfetto.dev). Returns the path.

        `from_profiler` reads the file back: a run with the same description and spans, without metrics.
        """
        return export_chrome(Path(path), self.spans, self.headers, {**self.info, "id": self.id})

    def export_chakra(self, prefix: Path | str) -> list[Path]:
        """Write PREFIX.RANK.et for each rank: Chakra execution traces, for ASTRA-sim and others. Returns the paths.

        A graph has the order that the trace shows, as `trace.chakra` says. Needs protobuf.

        Raises:
            ConfigError: the run has no trace, or protobuf is not installed.
        """
        about = {"run": self.id, "algorithm": self.label}
        return export_chakra(Path(prefix), self.spans, about, bytes_are_buffers=self.info.get("runtime") == PROFILED)

    def rows(self, evaluations: bool = False) -> dict[int, dict[int, dict[str, Any]]]:
        """Return step -> rank -> row, of the steps or of the evaluations, steps ascending."""
        table: dict[int, dict[int, dict[str, Any]]] = {}
        for rank, rows in sorted(self.metrics.items()):
            for row in rows:
                if ("evaluation" in row) == evaluations:
                    table.setdefault(row["step"], {})[rank] = row
        return dict(sorted(table.items()))

    def evaluations(self) -> list[dict[str, Any]]:
        """Return each evaluation over all ranks: step, seconds, samples, bytes_sent, test_loss, accuracy (or None).

        The problem's own metrics follow, by name. Where replicas differ between steps, "consensus_distance" follows:
        the root of the mean square of the replicas' distances from their mean.

        An evaluation by one rank for all ranks is complete when that rank has reported. Otherwise an evaluation is
        complete when every rank has reported its share. If a run continued with fewer ranks, only the shares of the
        remaining ranks are needed, and the bytes of the other ranks are included. In a finished run, ranks that never
        evaluate are not needed. If one rank evaluated for all, the other ranks' bytes are those that they had sent by
        the time of the evaluation.
        """
        table = self.rows(evaluations=True)
        everyone = expected = {rank for rank, rows in self.metrics.items() if rows}
        if self.info.get("status") == "finished":
            expected = {rank for shares in table.values() for rank in shares}
        found, steps = [], self.rows()
        sent: dict[int, tuple[list[float], list[int]]] = {}
        for step, shares in table.items():
            there = self.ranks_at(step, everyone)
            whole = any(row["evaluation"].get("shares") == 1 for row in shares.values())  # one rank evaluated for all
            if not whole and not expected & there <= set(shares):
                continue
            bytes_sent = sum(row["bytes_sent"] for row in shares.values())
            if not whole:
                gone = _latest(steps, step, everyone - there - set(shares))
                bytes_sent += sum(row["bytes_sent"] for row in gone.values())
            elif self.info.get("clock") != "virtual":  # a simulated evaluation has the bytes of all workers
                sent = sent or {rank: _bytes_by_time(rows) for rank, rows in self.metrics.items()}
                at_s = max(row["seconds"] for row in shares.values())
                bytes_sent += sum(_bytes_at(sent[rank], at_s) for rank in everyone - set(shares))
            parts = [row["evaluation"] for row in shares.values()]
            weight = sum(part.get("loss_weight", part["count"]) for part in parts)  # older runs have no weight
            judged = sum(part["judged"] or 0 for part in parts)
            found.append(
                {
                    "step": step,
                    "seconds": max(row["seconds"] for row in shares.values()),
                    "samples": max(row["samples"] for row in shares.values()),
                    "bytes_sent": bytes_sent,
                    "test_loss": sum(part["loss_sum"] for part in parts) / weight if weight else None,
                    "accuracy": sum(part["correct"] or 0 for part in parts) / judged if judged else None,
                    **dict.fromkeys(self.metric_names),
                    **_merged([part.get("metrics") or {} for part in parts]),
                    **_consensus([part["distance_squared"] for part in parts if "distance_squared" in part]),
                }
            )
        return found

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the problem's own metrics."""
        return tuple((self.info.get("problem") or {}).get("metrics") or ())

    def is_better_higher(self, y: str) -> bool:
        """Return whether higher values of an evaluation's column are better: of accuracy, and of a metric that says so."""
        directions = (self.info.get("problem") or {}).get("metrics") or {}
        return y == "accuracy" or directions.get(y) == "higher"

    def ranks_at(self, step: int, ranks: set[int]) -> set[int]:
        """Return the ranks that took a step, for a run that continued with fewer ranks, or with more again."""
        more = [(int(row["step"]), 0, {row["rank"]}) for row in self.info.get("joined") or ()]
        # at equal steps, the joins come first
        fewer = [(int(row["step"]), 1, set(row["ranks"])) for row in self.info.get("shrunk") or ()]
        for first, left, changed in sorted(fewer + more, key=lambda row: row[:2]):
            if first <= step:
                ranks = changed if left else ranks | changed
        return ranks

    def steps(self) -> list[dict[str, Any]]:
        """Return each step over all ranks: step, seconds (of the last), samples, bytes_sent (sum), loss (mean).

        If a rank has no row of the step, the bytes that it had sent before are counted.
        """
        latest: dict[int, int] = {}
        found = []
        for step, shares in self.rows().items():
            latest.update({rank: row["bytes_sent"] for rank, row in shares.items()})
            weights = [
                (row["loss"], row["num_samples"])
                for row in shares.values()
                if row["loss"] is not None and row["num_samples"]
            ]
            total = sum(number for _, number in weights)
            found.append(
                {
                    "step": step,
                    "seconds": max(row["seconds"] for row in shares.values()),
                    "samples": max(row["samples"] for row in shares.values()),
                    "bytes_sent": sum(latest.values()),
                    "loss": sum(loss * number for loss, number in weights) / total if total else None,
                }
            )
        return found

    def curve(self, x: XAxis = "seconds", y: YAxis = "loss") -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return a curve to plot: two arrays of equal length.

        Args:
            x: "steps", "epochs", "seconds" (of training, without evaluation), "samples" or "bytes" (sent by all ranks).
            y: "loss" (of the minibatches, sample mean), "test_loss" or "accuracy" (of the evaluations), the name of one
                of the problem's metrics, or "consensus_distance" (of replicas from their mean, at the evaluations).

        Raises:
            ConfigError: unknown axis, or epochs of a run that does not record their length.
        """
        rows = self.curve_rows(y)
        return self.abscissa(rows, x), np.array([row[y] for row in rows], float)

    def curve_rows(self, y: YAxis = "loss") -> list[dict[str, Any]]:
        """Return the rows of a curve, of `steps` for the loss and of `evaluations` otherwise, that have its value.

        Raises:
            ConfigError: unknown axis.
        """
        known = ("loss", "test_loss", "accuracy", *self.metric_names, DISTANCE)
        if y not in known:
            raise ConfigError(f"y={y!r}: choose one of {', '.join(known)}")
        return [row for row in (self.steps() if y == "loss" else self.evaluations()) if row.get(y) is not None]

    def abscissa(self, rows: Sequence[dict[str, Any]], x: XAxis) -> NDArray[np.float64]:
        """Return the values of an x axis of rows of `steps` or `evaluations`.

        Raises:
            ConfigError: unknown axis, or epochs of a run that does not record their length.
        """
        if x not in X_FIELDS:
            raise ConfigError(f"x={x!r}: choose one of {', '.join(X_FIELDS)}")
        values = np.array([row[X_FIELDS[x]] for row in rows], float)
        if x != "epochs":
            return values
        if self.steps_per_epoch is None:
            raise ConfigError(f"run {self.id} does not record the length of an epoch: choose x='steps' or 'samples'")
        return (values + 1) / self.steps_per_epoch


def _written(setting: str, value: str) -> str:
    """Return a recorded setting for a label; empty if it says nothing, or is an object with settings of its own.

    >>> [_written("collective", text) for text in ("Native()", "Once(codec=ErrorFeedback(codec=TopK(k=5)), inner=Native())")]
    ['', 'once:top-k+feedback']
    >>> [_written("topology", text) for text in ("Ring()", "RandomRegular(degree=4, seed=0)")]
    ['ring', 'RandomRegular(degree=4, seed=0)']
    >>> [_written("mine", text) for text in ("twice", "Rule(power=1)")]
    ['twice', '']
    >>> _written("inner", "DPSGD(topology=Ring(), overlap=True)")
    'DPSGD'
    """
    if setting == "inner":
        return value[:MAX_VALUE].partition("(")[0]
    if setting not in ("collective", "codec"):
        if re.fullmatch(r"\w+\(\)", value):
            return kebab(value[:-2])
        return value[:MAX_VALUE] if setting == "topology" or "(" not in value else ""
    if value == "Native()":  # the default of an algorithm whose first setting it is, and which a record does not mark
        return ""
    names = re.findall(r"(?:^|\bcodec=)(\w+)\(", value[:MAX_VALUE])
    feedback = "+feedback" if "ErrorFeedback" in names else ""
    return ":".join(kebab(name) for name in names if name != "ErrorFeedback") + feedback or value[:MAX_VALUE]


def _merged(parts: list[dict[str, list[float]]]) -> dict[str, float]:
    """Return name -> mean, of sums and numbers of samples of each rank's share."""
    totals: dict[str, list[float]] = {}
    for part in parts:
        for name, (value, number) in part.items():
            total = totals.setdefault(name, [0.0, 0.0])
            total[0] += value
            total[1] += number
    return {name: value / number for name, (value, number) in totals.items() if number}


def _consensus(parts: list[list[float]]) -> dict[str, float]:
    """Return the root mean square distance of replicas, of sums and numbers of replicas; empty if none was recorded.

    >>> _consensus([[5.0, 1], [3.0, 1]]), _consensus([])
    ({'consensus_distance': 2.0}, {})
    """
    squared, number = (sum(column) for column in zip(*parts, strict=True)) if parts else (0.0, 0)
    return {DISTANCE: math.sqrt(squared / number)} if number else {}


def _bytes_by_time(rows: Sequence[dict[str, Any]]) -> tuple[list[float], list[int]]:
    """Return the times of a rank's steps, and the bytes that it had sent by then."""
    steps = sorted((row["seconds"], row["bytes_sent"]) for row in rows if "evaluation" not in row)
    return [seconds for seconds, _ in steps], [num_bytes for _, num_bytes in steps]


def _bytes_at(sent: tuple[list[float], list[int]], seconds: float) -> int:
    place = bisect_right(sent[0], seconds)
    return sent[1][place - 1] if place else 0


def _latest(steps: dict[int, dict[int, dict[str, Any]]], last: int, ranks: set[int]) -> dict[int, dict[str, Any]]:
    """Return the newest row of each rank up to a step."""
    found: dict[int, dict[str, Any]] = {}
    for step, shares in steps.items() if ranks else ():
        if step <= last:
            found.update({rank: row for rank, row in shares.items() if rank in ranks})
    return found
