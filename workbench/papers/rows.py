"""The rows of every table of verdicts: a claim and its measurement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from workbench import resources
from workbench.papers.claims import Claim, Claims, read_claims
from workbench.papers.plan import keys_with_claims
from workbench.papers.records import Record, read_records
from workbench.papers.verdicts import Verdict, judge

# Verdicts that need a record.
MEASURED = ("reproduced", "same direction at reduced scale", "not reproduced", "underpowered")


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
        return number(self.verdict.mean) if self.record else ""

    @property
    def expectation(self) -> str:
        """The expectation at the record's size, and the paper's number, as text."""
        expected = self.claim.expectation_at(self.record.size) if self.record else self.claim.expected
        theirs = f"; paper: {self.claim.theirs}" if self.claim.theirs else ""
        return f"expected {expected}{theirs}"

    @property
    def interval(self) -> str:
        """The interval that decides, as text; empty for a single deterministic value."""
        if self.record is None or (self.claim.deterministic and self.verdict.num_values == 1):
            return ""
        return f"[{number(self.verdict.low)}, {number(self.verdict.high)}]"

    @property
    def spread(self) -> str:
        """The interval that decides, and the number of values, as text."""
        if self.record is None:
            return ""
        kind = "values" if self.claim.deterministic else "seeds"
        return f"{self.interval}, {self.verdict.num_values} {kind}" if self.interval else "deterministic"

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
    def date(self) -> str:
        """Day of the record."""
        return self.record.date[:10] if self.record else ""


def number(value: float) -> str:
    """Return a number with three digits, as text.

    >>> number(1234.5), number(0.04567), number(1.0)
    ('1234', '0.0457', '1')
    """
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


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
