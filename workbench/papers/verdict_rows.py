"""The rows of every table of verdicts: a claim and its measurement."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

from workbench import resources
from workbench.errors import ConfigError
from workbench.papers.claims import Claim, Claims, Size, read_claims
from workbench.papers.digest import experiment_digest
from workbench.papers.findings import SLEPT
from workbench.papers.plan import keys_with_claims
from workbench.papers.records import Record, read_records
from workbench.papers.site import without_paths
from workbench.papers.sizes import sizes_file, values_at
from workbench.papers.verdicts import Verdict, judge

# What a finding was measured on -> the clock of its times.
CLOCKS = {
    "local ranks": "real ranks",
    "emulated network": "real ranks, emulated network",
    "cluster": "real ranks, cluster",
    "simulated cluster": "virtual time",
    "one process": "one process",
    "formula": "formula",
}


@final
@dataclass(frozen=True, slots=True)
class Row:
    """One claim with its verdict.

    Attributes:
        claim: the claim.
        record: the record that decides; None if there is none.
        verdict: the verdict by the present rule; "not run" or "needs hardware" without a record.
        all: every record with values of the claim; the deciding one is the last.
    """

    claim: Claim
    record: Record | None
    verdict: Verdict
    all: tuple[Record, ...]

    @property
    def ours(self) -> str:
        """The measured mean, as text."""
        return self.verdict.estimate.texts[0] if self.record else ""

    @property
    def expectation(self) -> str:
        """The expectation at the record's size, and the paper's number, as text."""
        expected = self.claim.expectation_at(self.record.size) if self.record else self.claim.expected
        theirs = f"; paper: {self.claim.theirs}" if self.claim.theirs else ""
        return f"expected {expected}{theirs}"

    @property
    def exact(self) -> bool:
        """Whether the values have no random error."""
        return self.claim.deterministic and not self.verdict.num_sessions

    @property
    def interval(self) -> str:
        """The interval that decides, as text; empty for a single deterministic value."""
        if self.record is None or (self.exact and self.verdict.num_values == 1):
            return ""
        _mean, low, high = self.verdict.estimate.texts
        return f"[{low}, {high}]"

    @property
    def sample(self) -> str:
        """The number of values, sessions and caps, as text."""
        if self.record is None:
            return ""
        if not self.interval:
            return "deterministic"
        verdict = self.verdict
        several = self.exact or verdict.num_sessions > 1
        parts = [f"{verdict.num_values} {'values' if several else 'seeds'}"]
        if verdict.num_sessions:
            parts.append("one session" if verdict.num_sessions == 1 else f"{verdict.num_sessions} sessions")
        if verdict.num_censored:
            parts.append(f"{verdict.num_censored} of them a cap")
        return ", ".join(parts)

    @property
    def spread(self) -> str:
        """The interval that decides, and the number of values, sessions and caps, as text."""
        return f"{self.interval}, {self.sample}" if self.interval else self.sample

    @property
    def where(self) -> str:
        """Kind of workers, site and size, as text."""
        if self.record is None:
            return self.claim.needs and f"needs {self.claim.needs}"
        return f"{self.kind}, {self.record.site}, {self.record.size}"

    @property
    def kind(self) -> str:
        """Kind of workers, such as "simulated cluster"; "not run" without a record."""
        return str(self.record.facts["findings"][self.claim.id]["where"]) if self.record else "not run"

    @property
    def clock(self) -> str:
        """Whether ranks, network and compute are real, emulated or virtual; empty without a record."""
        if self.record is None:
            return ""
        slept = SLEPT if self.kind.endswith(SLEPT) else ""
        return CLOCKS[self.kind.removesuffix(SLEPT)] + slept

    @property
    def date(self) -> str:
        """Day of the record."""
        return self.record.date[:10] if self.record else ""

    @property
    def word(self) -> str:
        """The verdict, a significant difference within the tolerance, and whether the record is stale, as text."""
        if self.record is None:
            return self.verdict.word
        parts: list[str] = [self.verdict.word]
        none, expected = self.claim.no_effect, self.claim.expectation_at(self.record.size)
        if none is not None and expected is not None and expected.low < none < expected.high:
            inside = self.verdict.word in ("reproduced", "same direction at reduced scale")
            if inside and not self.verdict.low <= none <= self.verdict.high:
                parts.append(f"differs from {none:g}")
        stale = stale_reason(self.record)
        return ", ".join([*parts, f"stale ({stale})"] if stale else parts)


def stale_reason(record: Record) -> str:
    """Return in which way a record is stale: "no digest", "other parameters" or "other code"; empty if it is not."""
    given = record.facts.get("experiment_sha256")
    if given is None:
        return "no digest"
    try:
        notebook = resources.notebook(str(record.facts["notebook"]))
        edited = tuple(path.stat().st_mtime_ns for path in (notebook, sizes_file(notebook)))
    except (ConfigError, OSError):
        return "other code"
    own = json.dumps(record.facts["parameters"], sort_keys=True)
    same_parameters, today = _today(notebook, edited, record.size, own, record.where)
    if not same_parameters:
        return "other parameters"
    return "" if given == today else "other code"


@cache
def _today(notebook: Path, _edited: tuple[int, ...], size: Size, own: str, where: frozenset[str]) -> tuple[bool, str]:
    """Whether a record's parameters are those of its size today, and the digest of its experiment today.

    A page asks this for each claim of a record. The answer is kept until the notebook or its sizes are written again.
    """
    parameters = json.loads(own)
    today = without_paths(values_at(notebook, size))
    same = all(parameters.get(name) == value for name, value in today.items())
    return same, experiment_digest(notebook, parameters, where)


def row_of(claim: Claim, records: Iterable[Record]) -> Row:
    """Return a claim's row. The record of the largest size decides; among these, the newest."""
    measured = [record for record in records if claim.id in record.facts["findings"]]
    if not measured:
        return Row(claim, None, judge(claim, (), "ci"), ())
    measured.sort(key=lambda record: record.rank)
    verdict = measured[-1].verdict(claim)
    assert verdict is not None
    return Row(claim, measured[-1], verdict, tuple(measured))


@final
@dataclass(frozen=True, slots=True)
class Paper:
    """The claims and records of one paper."""

    key: str
    claims: Claims
    rows: tuple[Row, ...]
    records: tuple[Record, ...]


def read_paper(key: str, records_root: Path | None = None) -> Paper:
    """Read a paper's claims and records.

    Args:
        key: key of the paper.
        records_root: folder with the layout of `papers/`; that of the papers by default.
    """
    claims = read_claims(key)
    records = read_records(records_root or resources.shared("papers"), key)
    return Paper(key, claims, tuple(row_of(claim, records) for claim in claims.claims), records)


def read_papers(records_root: Path | None = None, keys: Sequence[str] = ()) -> tuple[Paper, ...]:
    """Read these papers; by default, all papers with claims."""
    return tuple(read_paper(key, records_root) for key in (keys or keys_with_claims()))
