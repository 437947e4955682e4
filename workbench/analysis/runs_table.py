"""The runs of a store as a table: one flat row for each run, selected by conditions, sorted, with chosen columns."""

from __future__ import annotations

import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from workbench.analysis.table import Column, Table, num_bytes, percent, seconds, three_digits
from workbench.errors import ConfigError, WorkbenchError
from workbench.naming import parse_value, same_name, unknown
from workbench.trace.index import Index, state_of
from workbench.trace.info import describe_changes, format_departures, num_remaining, settings_changes
from workbench.trace.read import metrics_paths
from workbench.trace.run import Run
from workbench.trace.store import ENDED, StoredRun, list_runs, runs_root

RESULTS = ("steps", "accuracy", "loss", "train_loss", "seconds", "samples", "bytes_sent")  # computed from the metrics
BASE = (
    "run",
    "status",
    "created",
    "algorithm",
    "label",
    "problem",
    "runtime",
    "workers",
    "remaining",
    "departures",
    "optimizer",
    "network",
    "sweep",
    "cell",
    "steered",
    "error",
    "folder",
)
SHOWN = ("run", "status", "label", "problem", "runtime", "workers", "seed", "steps", "accuracy", "loss", "seconds")
TEXTS: MappingProxyType[str, Callable[[Any], str]] = MappingProxyType(
    {
        "accuracy": percent,
        "loss": three_digits,
        "train_loss": three_digits,
        "seconds": seconds,
        "bytes_sent": num_bytes,
        "created": lambda value: str(value)[:19].replace("T", " "),
    }
)
TITLES = MappingProxyType({"label": "algorithm", "loss": "test loss", "seconds": "training", "bytes_sent": "sent"})
CONDITION = re.compile(r"\s*([\w.-]+?)\s*(!=|>=|<=|==|=|>|<|~)\s*(.*?)\s*")
ORDER: MappingProxyType[str, Callable[[Any, Any], bool]] = MappingProxyType(
    {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
)
AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
LAMBDA = "<lambda>"  # all have one name, so a row shows the digest of the code, too
MAX_FAILURES = 8  # failures listed below a table
RESULTS_NAME = ".results.jsonl"


def key_of(name: str) -> str:
    """Return the key of a row's value from its name on the command line.

    >>> key_of("train-loss")
    'train_loss'
    """
    return name.replace("-", "_")


@final
@dataclass(frozen=True, slots=True)
class Condition:
    """`key sign value`, with the sign =, !=, <, <=, >, >= or ~ (contains)."""

    key: str
    sign: str
    value: Any

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Parse a condition as written on the command line.

        >>> Condition.parse("workers>=4"), Condition.parse("algorithm=pipe-sgd").value
        (Condition(key='workers', sign='>=', value=4), 'pipe-sgd')

        Raises:
            ConfigError: the text has no sign.
        """
        found = CONDITION.fullmatch(text)
        if not found:
            raise ConfigError(
                f"condition {text!r}: write key=value, or with !=, <, <=, >, >=, or ~ for a part of the text, such as "
                "workers>=4"
            )
        return cls(key_of(found[1]), "=" if found[2] == "==" else found[2], parse_value(found[3]))

    def holds(self, row: dict[str, Any]) -> bool:
        """Return whether a row meets the condition; a row without the value meets only `!=` and `=none`."""
        value = row.get(self.key)
        if self.sign in ("=", "!="):
            return self._same(value) == (self.sign == "=")
        if value is None:
            return False
        if self.sign == "~":
            return str(self.value).lower() in str(value).lower()
        numbers = all(isinstance(item, int | float) for item in (value, self.value))
        left, right = (value, self.value) if numbers else (str(value), str(self.value))
        return ORDER[self.sign](left, right)

    def _same(self, value: Any) -> bool:
        if isinstance(value, float) and isinstance(self.value, int | float):
            return math.isclose(value, self.value, rel_tol=1e-12)
        if isinstance(value, str) and isinstance(self.value, str):
            return same_name(value, self.value)
        return bool(value == self.value) or (value is not None and str(self.value) == str(value))


def runs_table(
    *,
    where: Iterable[str] = (),
    since: str | None = None,
    sweep: str | None = None,
    sort: str = "created",
    columns: Sequence[str] = (),
    limit: int | None = None,
    root: Path | None = None,
) -> Table:
    """Return the runs of a store as a table, one row for each run; `rows` hold all known values.

    Args:
        where: conditions that must all hold, such as "algorithm=pipe-sgd", "workers>=4", "set.width=2", "accuracy>0.9".
        since: only runs since an age, "2d", "3h", or since a date, "2026-11-21".
        sweep: only runs of the sweep with this name.
        sort: a key, ascending; "-accuracy" sorts descending. Runs without the value, or with NaN, come last.
        columns: which to show; by default those of `workbench runs`, with seeds only if they differ.
        limit: largest number of runs: the last ones if ascending, the first ones if descending. Runs without the value
            of `sort` are added only if there are fewer runs with a value.
        root: the store; None for `runs_root()`.

    Raises:
        ConfigError: a condition that cannot be parsed, or a key that no run has.
    """
    root = Path(root) if root is not None else runs_root()
    listing = list_runs(root)
    rows = [row_of(run) for run in listing]
    own = {name for run in listing for name in Run(info=run.info, metrics={}).metric_names}
    results = {*RESULTS, *own}
    known = sorted({key for row in rows for key in row} | {*BASE, *results})
    conditions = [*map(Condition.parse, where), *([Condition("sweep", "=", sweep)] if sweep else [])]
    column_keys = list(map(key_of, columns))
    sort_key = key_of(sort.removeprefix("-"))
    for key in (*(item.key for item in conditions), sort_key, *(column_keys if columns else ())):
        if rows and key not in known:
            raise unknown("column of the runs", key, known)
    late = [item for item in conditions if item.key in results]
    early = [item for item in conditions if item.key not in results]
    moment = _parse_since(since)
    rows = [
        row for row in rows if all(item.holds(row) for item in early) and (not moment or _creation_time(row) >= moment)
    ]
    if late or sort_key in results or limit is None:
        rows = [row for row in add_results(rows, root) if all(item.holds(row) for item in late)]
    rows = add_results(_in_order(rows, sort_key, sort.startswith("-"), limit), root)
    if not columns:
        more = [*(["remaining"] if any(row["departures"] for row in rows) else ())]
        more += sorted(name for name in own if any(row.get(name) is not None for row in rows))
        column_keys = [*SHOWN[:-1], *more, SHOWN[-1]]
    texts = {**dict.fromkeys(own, three_digits), **TEXTS}
    shown = tuple(Column(key, TITLES.get(key, key), texts.get(key, str)) for key in column_keys)
    caption = "\n".join(f"skipped: {reason}" for reason in listing.damaged)
    left = tuple(f"{row['run']}: {row['departures']}" for row in rows if row["departures"])[-MAX_FAILURES:]
    return Table(rows, shown, caption=caption, footnotes=(*_failures(rows), *left))


def _failures(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return, for each of the last failed runs, the step that it reached, and its error with the rank."""
    failed = [row for row in rows if row["status"] in ("failed", "killed", "lost")]
    found = [f"and {len(failed) - MAX_FAILURES} more that failed"] if len(failed) > MAX_FAILURES else []
    for row in failed[-MAX_FAILURES:]:
        try:
            found.append(f"{row['run']}: {Run.load(Path(row['folder'])).failure_summary or row['status']}")
        except (OSError, WorkbenchError):  # the run was removed in the meantime
            found.append(f"{row['run']}: {row['status']}")
    return tuple(found)


def row_of(run: StoredRun) -> dict[str, Any]:
    """Return the entries of `run.json`, flat.

    Settings of the algorithm are "set.width" and so on; settings of the run have their own names. They are the present
    ones; "steered" says what changed during the run, and after which step. Of a simulated run there are also "network",
    "compute" and the other arguments of `simulate`.
    """
    info = run.info
    algorithm, problem, sweep = (info.get(name) or {} for name in ("algorithm", "problem", "sweep"))
    own = {
        "run": run.id,
        "status": run.status,
        "created": info.get("created"),
        "algorithm": algorithm.get("name"),
        "label": Run(info=info, metrics={}).label,
        "problem": problem.get("name"),
        "runtime": info.get("runtime"),
        "workers": info.get("num_workers"),
        "remaining": num_remaining(info),
        "departures": format_departures(info),
        "sweep": sweep.get("id"),
        "cell": sweep.get("cell"),
        "steered": "; ".join(describe_changes(info)) or None,
        "error": info.get("error"),
        "folder": str(run.folder),
    }
    run_settings = dict(info.get("settings") or {})
    settings = {f"set.{name}": value for name, value in (algorithm.get("settings") or {}).items()}
    for _, changes in settings_changes(info):
        settings |= {f"set.{name}": value for name, value in changes.items() if name != "lr"}
        run_settings |= {name: value for name, value in changes.items() if name == "lr"}
    factories = {"optimizer": problem.get("optimizer"), "schedule": run_settings.get("schedule")}
    for name, shown in factories.items():
        if shown == LAMBDA and (digest := (info.get("content") or {}).get(name)):
            factories[name] = f"{LAMBDA} {digest}"
    return {**run_settings, **settings, **(info.get("simulated") or {}), **own, **factories}


def add_results(rows: Iterable[dict[str, Any]], root: Path) -> list[dict[str, Any]]:
    """Add the values computed from the runs' metrics.

    They are cached, because metrics are long; the cache may be removed at any time.
    """
    rows = list(rows)
    index = Index(root / RESULTS_NAME)
    found = []
    for row in rows:
        if "train_loss" in row:
            found.append(row)  # the row already has results
            continue
        folder = Path(row["folder"])
        states = [state for path in _sources(folder) if (state := state_of(path))]
        results = index.get(folder.name, states)
        if not isinstance(results, dict):
            results = results_of(folder)
            if row["status"] in ENDED:
                index.put(folder.name, states, results)
        found.append({**row, **results})
    index.save(path.name for path in (root.iterdir() if root.is_dir() else ()))
    return found


def _sources(folder: Path) -> list[Path]:
    try:
        return [folder / "run.json", *metrics_paths(folder).values()]
    except OSError:
        return []


def results_of(folder: Path) -> dict[str, Any]:
    """Return the values of `RESULTS`, and the problem's metrics; None for values that were not recorded.

    Accuracy and loss are of the last evaluation. The training loss is the mean over the last tenth of the steps. Bytes
    are those sent by all ranks.
    """
    try:
        run = Run.load(folder)
        steps, evaluations = run.steps(), run.evaluations()
    except (OSError, KeyError, TypeError, ValueError):  # the run was removed in the meantime, or is not a run
        return dict.fromkeys(RESULTS)
    last = steps[-1] if steps else {}
    final = evaluations[-1] if evaluations else {}
    losses = [row["loss"] for row in steps[len(steps) - max(1, len(steps) // 10) :] if row["loss"] is not None]
    return {
        "steps": len(steps),
        "accuracy": final.get("accuracy"),
        "loss": final.get("test_loss"),
        **{name: final.get(name) for name in run.metric_names},
        "train_loss": sum(losses) / len(losses) if losses else None,
        "seconds": last.get("seconds"),
        "samples": last.get("samples"),
        "bytes_sent": max((row["bytes_sent"] for row in (last, final) if row), default=None),
    }


def _creation_time(row: dict[str, Any]) -> datetime:
    try:
        made = datetime.fromisoformat(str(row["created"]))
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)
    return made if made.tzinfo else made.replace(tzinfo=UTC)


def _parse_since(since: str | None) -> datetime | None:
    """Return the time that "2d" or a date means."""
    if since is None:
        return None
    age = AGE.fullmatch(since.strip())
    if age:
        return datetime.now(UTC) - timedelta(seconds=float(age[1]) * UNITS[age[2]])
    try:
        moment = datetime.fromisoformat(since)
    except ValueError:
        raise ConfigError(
            f"since {since!r}: give an age, such as 30m, 3h, 2d or 1w, or a date, such as 2026-11-21"
        ) from None
    return moment if moment.tzinfo else moment.astimezone()


def _in_order(rows: list[dict[str, Any]], key: str, greatest_first: bool, limit: int | None) -> list[dict[str, Any]]:
    """Sort and limit rows as `runs_table` describes."""
    have = [row for row in rows if not _is_missing(row.get(key))]
    have.sort(key=lambda row: _rank(row[key]), reverse=greatest_first)
    lack = [row for row in rows if _is_missing(row.get(key))]
    if limit is not None:
        have = have[:limit] if greatest_first else have[max(0, len(have) - limit) :]
        lack = lack[: limit - len(have)]
    return have + lack


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _rank(value: Any) -> tuple[int, float, str]:
    """Sort numbers before words."""
    if isinstance(value, int | float):
        # an integer may be larger than any float
        return (0, max(-sys.float_info.max, min(sys.float_info.max, value)), "")
    return (1, 0.0, str(value))
