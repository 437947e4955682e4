"""A claim beside what was measured of it: the rows of every table of verdicts."""

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

MEASURED = ("reproduced", "same direction at reduced scale", "not reproduced", "underpowered")  # words that need a record


@final
@dataclass(frozen=True, slots=True)
class Row:
    """One claim, the record that decides on it, and its verdict now; without a record "not run" or "needs hardware".

    Attributes:
        all: every record that holds values of it, the deciding one last.
    """

    claim: Claim
    record: Record | None
    verdict: Verdict
    all: tuple[Record, ...]

    @property
    def ours(self) -> str:
        """The mean."""
        return number(self.verdict.mean) if self.record else ""

    @property
    def beside(self) -> str:
        """What is expected of it there, and what the paper prints."""
        expected = self.claim.expectation_at(self.record.size) if self.record else self.claim.expected
        theirs = f"; theirs {self.claim.theirs}" if self.claim.theirs else ""
        return f"expected {expected}{theirs}"

    @property
    def spread(self) -> str:
        """The interval that the verdict rests on."""
        if self.record is None:
            return ""
        ends = f"[{number(self.verdict.low)}, {number(self.verdict.high)}]"
        if self.claim.deterministic and self.verdict.num_values == 1:
            return "deterministic"
        kind = "values" if self.claim.deterministic else "seeds"
        return f"{ends}, {self.verdict.num_values} {kind}"

    @property
    def where(self) -> str:
        """What kind of workers, on which site, at which size."""
        if self.record is None:
            return self.claim.needs and f"needs {self.claim.needs}"
        return f"{self.record.facts['findings'][self.claim.id]['where']}, {self.record.site}, {self.record.size}"

    @property
    def date(self) -> str:
        """The day of the record."""
        return self.record.date[:10] if self.record else ""


def number(value: float) -> str:
    """Three digits.

    >>> number(1234.5), number(0.04567), number(1.0)
    ('1234', '0.0457', '1')
    """
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def row_of(claim: Claim, records: Iterable[Record]) -> Row:
    """A claim's row; the record of the largest size, then the newest, decides."""
    having = sorted((record for record in records if claim.id in record.facts["findings"]), key=lambda record: record.rank)
    if not having:
        return Row(claim, None, judge(claim, (), "ci"), ())
    verdict = having[-1].verdict(claim)
    assert verdict is not None
    return Row(claim, having[-1], verdict, tuple(having))


@final
@dataclass(frozen=True, slots=True)
class Paper:
    """All that is claimed and measured of one paper."""

    key: str
    claims: Claims
    rows: tuple[Row, ...]
    records: tuple[Record, ...]


def read_paper(key: str, records_root: Path | None = None) -> Paper:
    """A paper's claims beside its records.

    Args:
        records_root: a folder laid out as `papers/`; that of the papers by default.
    """
    claims = read_claims(key)
    records = read_records(records_root or resources.shared("papers"), key)
    return Paper(key, claims, tuple(row_of(claim, records) for claim in claims.claims), records)


def read_papers(records_root: Path | None = None, keys: Sequence[str] = ()) -> tuple[Paper, ...]:
    """Those papers, or all that have claims."""
    return tuple(read_paper(key, records_root) for key in (keys or keys_with_claims()))
