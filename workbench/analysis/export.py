"""Export runs to formats of other tools: CSV, Parquet, TensorBoard event files."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from workbench.callbacks.scalars import began_s, scalars
from workbench.errors import ConfigError
from workbench.trace.run import Run
from workbench.trace.store import read_info

METRICS: dict[str, type] = {  # columns of the metrics; one row for each step or evaluation of each rank
    "run": str,
    "rank": int,
    "kind": str,  # "step" or "evaluation"
    "step": int,
    "seconds": float,
    "samples": int,
    "bytes_sent": int,
    "loss": float,  # of the rank's minibatch, or of its share of the test data
    "num_samples": int,
    "staleness": float,
    "lr": float,  # of the last update before the step's end, first parameter group
    "correct": int,
    "judged": int,
}


def export_runs(
    rows: Sequence[dict[str, Any]], folder: Path, format: Literal["csv", "parquet", "tensorboard"]
) -> list[Path]:
    """Write runs and their metrics; return the written paths.

    Args:
        rows: rows of `runs_table`.
        folder: created if missing. "csv" and "parquet" write two files, runs and metrics; "tensorboard" writes a folder
            for each run.
        format: "csv", "parquet" (needs pyarrow), or "tensorboard" (needs tensorboard).

    Raises:
        ConfigError: a package is missing, or the folder cannot be written; the message says what to do.
    """
    writers = {"csv": _csv, "parquet": _parquet, "tensorboard": _tensorboard}
    if format not in writers:
        raise ConfigError(f"format={format!r}: choose one of {', '.join(writers)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return writers[format](rows, folder)
    except ModuleNotFoundError as error:
        package = {"parquet": "pyarrow", "tensorboard": "tensorboard"}.get(format, "")
        raise ConfigError(f"{format} needs {package} ({error}): pip install 'sgd-workbench[export]'") from error
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror or error}): name another folder with --output"
        ) from error


def metrics_rows(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the metrics of all ranks, flat: the columns of `METRICS`, then the problem's own metrics of a rank's share.

    Values that a row lacks are None.
    """
    for rank, rows in sorted(run.metrics.items()):
        for row in rows:
            shares = row.get("evaluation")
            values = dict(row)
            if shares is not None:
                weight = shares.get("loss_weight", shares["count"])  # older runs have no weight
                values |= {"loss": shares["loss_sum"] / weight if weight else None, "num_samples": shares["count"]}
                values |= {name: shares[name] for name in ("correct", "judged")}
            kind = "step" if shares is None else "evaluation"
            own = {name: total / count for name, (total, count) in (shares or {}).get("metrics", {}).items() if count}
            yield (
                {name: values.get(name) for name in METRICS}
                | {"run": run.id, "rank": rank, "kind": kind}
                | {name: own.get(name) for name in run.metric_names}
            )


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, type]:
    """Return the columns of the metrics of these runs, which may have different metrics."""
    runs = [Run(info=read_info(Path(row["folder"])), metrics={}) for row in rows]
    return {**METRICS, **{name: float for run in runs for name in run.metric_names}}


def _names(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _csv(rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    runs, metrics = folder / "runs.csv", folder / "metrics.csv"
    with runs.open("w", newline="") as file:
        table = csv.DictWriter(file, _names(rows))
        table.writeheader()
        table.writerows({name: _plain(value) for name, value in row.items()} for row in rows)
    with metrics.open("w", newline="") as file:
        table = csv.DictWriter(file, list(_columns(rows)))
        table.writeheader()
        for row in rows:
            table.writerows(metrics_rows(Run.load(row["folder"])))
    return [runs, metrics]


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def _parquet(rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    import pyarrow
    from pyarrow import parquet

    runs, metrics = folder / "runs.parquet", folder / "metrics.parquet"
    columns = {name: [_plain(row.get(name)) for row in rows] for name in _names(rows)}
    parquet.write_table(pyarrow.table({name: _uniform(values) for name, values in columns.items()}), runs)
    kinds = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
    names = _columns(rows)
    schema = pyarrow.schema([(name, kinds[kind]) for name, kind in names.items()])
    with parquet.ParquetWriter(metrics, schema) as file:
        for row in rows:
            found = list(metrics_rows(Run.load(row["folder"])))
            columns = {
                name: [kind(item[name]) if item.get(name) is not None else None for item in found]
                for name, kind in names.items()
            }
            file.write_table(pyarrow.table(columns, schema=schema))
    return [runs, metrics]


def _uniform(values: list[Any]) -> list[Any]:
    """Give a column one type: numbers stay, a mixture becomes text, and so do integers that int64 cannot hold."""
    kinds = {type(value) for value in values if value is not None}
    long = any(type(value) is int and not -(2**63) <= value < 2**63 for value in values)
    if len(kinds) <= 1 and not long:
        return values
    if kinds <= {int, float} and not long:
        return [None if value is None else float(value) for value in values]
    return [None if value is None else str(value) for value in values]


def _tensorboard(rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    written = []
    for row in rows:
        run = Run.load(row["folder"])
        place = folder / run.id
        for path in place.glob("events.out.tfevents.*"):  # from an earlier export: TensorBoard would show both as one
            path.unlink()
        writer = EventFileWriter(str(place))
        try:
            for tag, step, value, at_s in _scalars(run):
                summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
                writer.add_event(Event(wall_time=at_s, step=step, summary=summary))
        finally:
            writer.close()
        written.append(place)
    return written


def _scalars(run: Run) -> Iterator[tuple[str, int, float, float]]:
    """Yield (tag, step, value, time) of the run's curves, over all ranks."""
    for row in [*run.steps(), *run.evaluations()]:
        for tag, value in scalars(row).items():
            yield tag, row["step"], value, began_s(run.info) + row["seconds"]
