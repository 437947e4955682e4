"""Records of the values measured for a paper's claims: `papers/KEY/records/NOTEBOOK.SIZE.SITE.json`."""

from __future__ import annotations

import fcntl
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
from workbench.papers.findings import ANSWER_MIME, MIME, Answer, Finding, Where, on_real_clock
from workbench.papers.verdicts import Verdict, judge
from workbench.trace.files.atomic import write_atomic

IDENTITY = ("parameters", "size", "site")
LIST = re.compile(r"\[[^\[\]{}\"]*\]")  # a list of numbers, which is written on one line
FACTS = ("notebook", "paper", *IDENTITY, "date", "seconds", "command", "commit", "versions", "machine", "findings")


@final
@dataclass(frozen=True, slots=True)
class Record:
    """The content of a record's file.

    Attributes:
        path: the file.
        facts: a value for each name of FACTS. "findings": id of a claim -> values, seeds, where, how, digest,
            verdict; also the session of each value if there are several, and which values are caps if some are.
            More facts: "experiment_sha256", see `experiment_digest`; "answer", the answer of the notebook;
            "sessions", when each session was measured.
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

    @property
    def where(self) -> frozenset[str]:
        """What its findings were measured on."""
        return frozenset(str(found["where"]) for found in self.facts["findings"].values())

    @property
    def answer(self) -> Answer | None:
        """The answer of the notebook; None if it has none."""
        given = self.facts.get("answer")
        if given is None:
            return None
        numbers = {name: value if isinstance(value, str) else tuple(value) for name, value in given["numbers"].items()}
        return Answer(text=given["text"], numbers=numbers)

    def verdict(self, claim: Claim) -> Verdict | None:
        """Judge the record's values for a claim by the present rule. None if it has no values for the claim."""
        found = self.facts["findings"].get(claim.id)
        return judge_finding(claim, found, self.size) if found else None


def judge_finding(claim: Claim, found: Mapping[str, Any], size: Size) -> Verdict:
    """Judge a record's finding by the present rule."""
    return judge(
        claim,
        found["values"],
        size,
        real_clock=on_real_clock(claim, found["where"]),
        sessions=found.get("sessions", ()),
        seeds=found.get("seeds", ()),
        censored=found.get("censored", ()),
    )


def record_file(root: Path, key: str, notebook: str, size: str, site: str) -> Path:
    """Return the path of a record under a folder with the layout of `papers/`."""
    return root / key / "records" / f"{notebook}.{size}.{site}.json"


def read_findings(executed: Path) -> tuple[tuple[Finding, ...], Answer | None]:
    """Return the findings in an executed notebook, and its answer.

    Raises:
        ConfigError: there are two findings of one claim, or two answers.
    """
    import nbformat

    cells = nbformat.read(executed, as_version=4).cells  # type: ignore[no-untyped-call]
    shown = [output.get("data", {}) for cell in cells if cell.cell_type == "code" for output in cell.get("outputs", [])]
    found = [data[MIME] for data in shown if MIME in data]
    answers = [data[ANSWER_MIME] for data in shown if ANSWER_MIME in data]
    names = [item["claim"] for item in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{executed.stem} has two findings of {', '.join(twice)}: call finding() once for each claim")
    if len(answers) > 1:
        raise ConfigError(f"{executed.stem} has {len(answers)} answers: call answer() once")
    findings = []
    for item in found:
        about: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in item.items()
        }
        findings.append(Finding(**about))
    return tuple(findings), Answer(**answers[0]) if answers else None


def findings_of(
    key: str, findings: Sequence[Finding], claims: Mapping[str, Claim], before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return id of a claim -> the content of a record, for each finding of a paper.

    Args:
        key: key of the paper.
        findings: the findings of a session.
        claims: id -> claim of the paper.
        before: the findings of earlier sessions, as a record has them; the new values follow theirs.

    Raises:
        ConfigError: an earlier session was measured on something else, or lacks a finding.
    """
    kept: dict[str, Any] = {}
    for found in findings:
        paper, _slash, identity = found.claim.partition("/")
        if paper == key:
            one: dict[str, Any] = {"values": list(found.values), "seeds": list(found.seeds)}
            if found.censored:
                one["censored"] = list(found.censored)
            one |= {"where": found.where, "how": found.how, "digest": claims[identity].digest}
            kept[identity] = one
    if before is not None:
        if {name: one["where"] for name, one in before.items()} != {name: one["where"] for name, one in kept.items()}:
            raise ConfigError(f"the findings of {key} are not those of the sessions before: measure all again")
        kept = {name: _with_session(before[name], one) for name, one in kept.items()}
    for name, one in kept.items():
        one["verdict"] = judge_finding(claims[name], one, next(found.size for found in findings)).word
    return kept


def _with_session(before: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """A record's finding with the values of one more session."""
    earlier = before.get("sessions") or [0] * len(before["values"])
    joined = {name: [*before[name], *new[name]] for name in ("values", "seeds")}
    if "censored" in before or "censored" in new:
        joined["censored"] = [
            cap for one in (before, new) for cap in one.get("censored") or [False] * len(one["values"])
        ]
    return {**new, **joined, "sessions": [*earlier, *[max(earlier) + 1] * len(new["values"])]}


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
