"""Records of the values measured for a paper's claims: `papers/KEY/records/NOTEBOOK.SIZE.SITE.json`."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final, get_args

from workbench.errors import ConfigError
from workbench.papers.claims import SIZES, Claim, Size
from workbench.papers.findings import MIME, Finding, Where
from workbench.papers.verdicts import Verdict, judge
from workbench.trace.files.atomic import write_atomic

IDENTITY = ("notebook_sha256", "code_sha256", "parameters", "size", "site")
LIST = re.compile(r"\[[^\[\]{}\"]*\]")  # a list of numbers, which is written on one line
FACTS = ("notebook", "paper", *IDENTITY, "date", "seconds", "command", "commit", "versions", "machine", "findings")


@final
@dataclass(frozen=True, slots=True)
class Record:
    """The content of a record's file.

    Attributes:
        path: the file.
        facts: a value for each name of FACTS. "findings": id of a claim -> values, seeds, where, how, digest,
            verdict.
    """

    path: Path
    facts: Mapping[str, Any]

    @property
    def size(self) -> Size:
        return cast(Size, self.facts["size"])

    @property
    def site(self) -> str:
        return str(self.facts["site"])

    @property
    def date(self) -> str:
        return str(self.facts["date"])

    @property
    def rank(self) -> tuple[int, str]:
        """Sort key: the record with the largest key decides, by size and then by date."""
        return SIZES.index(self.size), self.date

    def verdict(self, claim: Claim) -> Verdict | None:
        """Judge the record's values for a claim by the present rule. None if it has no values for the claim."""
        found = self.facts["findings"].get(claim.id)
        return judge(claim, found["values"], self.size) if found else None


def record_file(root: Path, key: str, notebook: str, size: str, site: str) -> Path:
    """Return the path of a record under a folder with the layout of `papers/`."""
    return root / key / "records" / f"{notebook}.{size}.{site}.json"


def notebook_digest(path: Path) -> str:
    """Return a hash of a notebook's cells: their kinds, sources and tags.

    Executing or saving the notebook does not change it.
    """
    import nbformat

    cells = nbformat.read(path, as_version=4).cells  # type: ignore[no-untyped-call]
    what = [(cell.cell_type, cell.source, sorted(cell.metadata.get("tags", []))) for cell in cells]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def harvest(executed: Path) -> tuple[Finding, ...]:
    """Return the findings in an executed notebook.

    Raises:
        ConfigError: there are two findings of one claim.
    """
    import nbformat

    cells = nbformat.read(executed, as_version=4).cells  # type: ignore[no-untyped-call]
    found = [
        output.data[MIME]
        for cell in cells
        if cell.cell_type == "code"
        for output in cell.get("outputs", [])
        if MIME in output.get("data", {})
    ]
    names = [item["claim"] for item in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{executed.stem} has two findings of {', '.join(twice)}: call finding() once for each claim")
    return tuple(Finding(**{**item, "values": tuple(item["values"]), "seeds": tuple(item["seeds"])}) for item in found)


def findings_of(key: str, findings: Sequence[Finding], claims: Mapping[str, Claim]) -> dict[str, Any]:
    """Return id of a claim -> the content of a record, for each finding of a paper."""
    kept = {}
    for found in findings:
        paper, _slash, identity = found.claim.partition("/")
        if paper == key:
            claim = claims[identity]
            kept[identity] = {
                "values": list(found.values),
                "seeds": list(found.seeds),
                "where": found.where,
                "how": found.how,
                "digest": claim.digest,
                "verdict": judge(claim, found.values, found.size).word,
            }
    return kept


def read_record(path: Path) -> Record:
    """Read a record.

    Raises:
        ConfigError: the file is no record; the message says what is wrong with it.
    """
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as a record ({error}): make it again with `workbench reproduce`"
        ) from None
    if not isinstance(facts, dict) or (missing := [name for name in FACTS if name not in facts]):
        raise ConfigError(
            f"{path} is no record: it lacks {', '.join(missing) if isinstance(facts, dict) else 'everything'}"
        )
    if (
        path.name != record_file(path, "", facts["notebook"], facts["size"], facts["site"]).name
        or facts["size"] not in SIZES
    ):
        raise ConfigError(
            f"the name of {path} does not agree with its content: {facts['notebook']}, {facts['size']}, {facts['site']}"
        )
    for name, found in facts["findings"].items():
        values = found.get("values") if isinstance(found, dict) else None
        if (
            not values
            or not all(isinstance(value, int | float) for value in values)
            or found.get("where") not in get_args(Where)
        ):
            raise ConfigError(f"{path}: {name} has no values, or no valid `where`")
    return Record(path, facts)


def read_records(root: Path, key: str) -> tuple[Record, ...]:
    """Return all records of a paper; the one that decides is the last."""
    found = [read_record(path) for path in sorted((root / key / "records").glob("*.json"))]
    return tuple(sorted(found, key=lambda record: record.rank))


def write_record(path: Path, facts: Mapping[str, Any]) -> Path:
    """Write a record. A reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(facts, indent=1, sort_keys=True, ensure_ascii=False)
    write_atomic(
        path, LIST.sub(lambda found: re.sub(r"\s+", " ", found[0]).replace("[ ", "[").replace(" ]", "]"), text) + "\n"
    )
    return path


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Lock a folder within the block, against other callers of this function.

    Raises:
        ConfigError: another process has locked the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another `workbench reproduce` writes into {folder}: wait for it, or name another folder"
            ) from None
        yield
    finally:
        os.close(handle)
