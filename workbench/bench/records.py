"""Write the results of a benchmark to `records/bench-NAME.json`, and find changes since such a record."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, final

from workbench.bench.rows import Row
from workbench.errors import ConfigError
from workbench.experiments.execution_record import versions
from workbench.papers.site import machine
from workbench.trace.files.atomic import write_atomic

Change = Literal["slower", "faster"]
FACTS = ("bench", "date", "machine", "versions", "rows")


def facts_of(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the content of a record."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    about = {
        "bench": name,
        "date": date,
        "machine": machine(),
        "versions": {"python": platform.python_version(), **versions()},
    }
    return {**about, "rows": [row.as_record() for row in rows]}


def write_record(path: Path, facts: Mapping[str, Any]) -> None:
    """Write one row a line, so that a diff shows single rows."""
    head = json.dumps({name: value for name, value in facts.items() if name != "rows"}, indent=1)
    lines = ",\n  ".join(json.dumps(row) for row in facts["rows"])
    write_atomic(path, f'{head[:-2]},\n "rows": [\n  {lines}\n ]\n}}\n')


def read_record(path: Path) -> dict[str, Any]:
    """Read a file that `write_record` wrote.

    Raises:
        ConfigError: the file is not a record; the message says what is wrong.
    """
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if missing := [name for name in FACTS if name not in facts]:
            raise ConfigError(f"{path} is not a record of a benchmark: it lacks {', '.join(missing)}")
        [Row.from_record(row) for row in facts["rows"]]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read as a record of a benchmark ({error}): make one with `workbench bench NAME -o FILE`"
        ) from None
    return dict(facts)


@final
@dataclass(frozen=True, slots=True)
class RatioChange:
    """A ratio whose interval does not overlap the interval in the record.

    Attributes:
        word: "slower" or "faster". More bytes per second are faster.
    """

    now: Row
    before: Row
    word: Change


def changes(rows: Sequence[Row], facts: Mapping[str, Any]) -> list[RatioChange]:
    """Return the ratios whose interval does not overlap the one in a record.

    The record may be from another machine, because ratios depend less on the machine than times.
    """
    before = {row.key: row for row in map(Row.from_record, facts["rows"])}
    found = []
    for row in rows:
        then = before.get(row.key)
        if then is not None and (row.low > then.high or row.high < then.low):
            more_is_slower = row.unit != "B/s"
            found.append(RatioChange(row, then, "slower" if (row.low > then.high) == more_is_slower else "faster"))
    return found


def unchanged(rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
    """Return the message that `changes` found nothing, with the number of rows that were compared.

    A record may be of other cases.
    """
    known = {Row.from_record(row).key for row in facts["rows"]}
    both = sum(row.key in known for row in rows)
    if not both:
        return f"nothing was compared: the record of {facts['date']} has none of these cases"
    return f"nothing changed beyond its spread since {facts['date']}, in {both} of {len(rows)} rows that both have"
