"""What a notebook measured of a claim: shown with its verdict, and kept in the notebook for whoever executes it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, final, get_args

from workbench.errors import ConfigError
from workbench.papers.claims import SIZES, Claim, Size, find_claim
from workbench.papers.verdicts import Verdict, judge

MIME = "application/vnd.workbench.finding+json"
Where = Literal["local ranks", "emulated network", "simulated cluster", "cluster", "one process", "formula"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Values of a claim's metric, one a seed, and how they came about."""

    claim: str
    size: Size
    values: tuple[float, ...]
    seeds: tuple[int, ...]
    where: Where
    how: str


@final
class Shown:
    """A finding as a cell shows it: text, HTML, and the finding itself as JSON in the notebook's file."""

    def __init__(self, claim: Claim, finding: Finding) -> None:
        self.claim, self.finding = claim, finding
        self.verdict: Verdict = judge(claim, finding.values, finding.size)

    def __repr__(self) -> str:
        claim, verdict = self.claim, self.verdict
        expected = claim.expectation_at(self.finding.size)
        seeds = "" if claim.deterministic else f", {verdict.num_values} seeds"
        ours = f"{verdict.mean:.4g} [{verdict.low:.4g}, {verdict.high:.4g}]{seeds}"
        measured = f"{claim.metric}: {ours}; expected {expected} ({self.finding.where}; {self.finding.how})"
        return f"{claim.name}: {verdict.word}\n  {claim.statement}\n  {measured}"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        text = repr(self)
        first, _newline, rest = text.partition("\n")
        page = f"<div><b>{html.escape(first)}</b><br>{html.escape(rest).replace(chr(10), '<br>')}</div>"
        return {"text/plain": text, "text/html": page, MIME: asdict(self.finding)}


def finding(
    claim: str, values: float | Sequence[float] | Iterable[float], *, size: Size, where: Where, how: str, seeds: Sequence[int] = ()
) -> Verdict:
    """Tell what was measured of a claim: shows it with its verdict in the cell, where `workbench reproduce` takes it from.

    Args:
        claim: `PAPER/CLAIM`, as in `papers/PAPER/claims/`.
        values: the claim's metric, one value a seed (paired where two methods are compared); one for a deterministic claim.
        size: of the notebook: "smoke", "ci" or "full".
        where: what it was measured on.
        how: in words: how many ranks of what, which network, with what calibration.
        seeds: of the values; 0, 1, ... where it is left out.

    Returns:
        The verdict, for the notebook's own words.

    Raises:
        ConfigError: no such claim, or it is not tested at that size.
    """
    known = find_claim(claim)
    numbers = tuple(float(value) for value in ([values] if isinstance(values, int | float) else values))
    if size not in SIZES:
        raise ConfigError(f"size={size!r}: give {', '.join(SIZES)}")
    if where not in get_args(Where):
        raise ConfigError(f"where={where!r}: give {', '.join(get_args(Where))}")
    if known.expectation_at(size) is None:
        raise ConfigError(f"{claim} is not tested at size {size} (sizes: {', '.join(known.sizes)}): leave its finding out there")
    if not numbers or (seeds and len(seeds) != len(numbers)):
        raise ConfigError(f"{claim}: {len(numbers)} values of {len(seeds)} seeds: give one value a seed")
    shown = Shown(
        known,
        Finding(claim=claim, size=size, values=numbers, seeds=tuple(seeds) or tuple(range(len(numbers))), where=where, how=how),
    )
    _display(shown)
    return shown.verdict


def _display(shown: Shown) -> None:
    """In a notebook beneath the cell; elsewhere printed."""
    try:
        from IPython.core.getipython import get_ipython
        from IPython.display import display
    except ModuleNotFoundError:
        print(shown)
        return
    if get_ipython() is None:
        print(shown)
    else:
        display(shown)  # type: ignore[no-untyped-call]
