"""`finding`: reports the values that a notebook measured for a claim.

It shows the verdict and stores the values in the notebook.
"""

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
    """Values of a claim's metric, one per seed, and how they were measured."""

    claim: str
    size: Size
    values: tuple[float, ...]
    seeds: tuple[int, ...]
    where: Where
    how: str


@final
class Shown:
    """The output of a finding in a cell: text, HTML, and the finding as JSON for the notebook's file."""

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
    claim: str,
    values: float | Sequence[float] | Iterable[float],
    *,
    size: Size,
    where: Where,
    how: str,
    seeds: Sequence[int] = (),
) -> Verdict:
    """Report the values measured for a claim.

    The cell shows them with the verdict, and `workbench reproduce` reads them there.

    Args:
        claim: `PAPER/CLAIM`, as in `papers/PAPER/claims/`.
        values: the claim's metric, one value per seed (paired if two algorithms are compared); one for a
            deterministic claim.
        size: size of the notebook: "smoke", "ci" or "full".
        where: what it was measured on.
        how: a text: number and kind of ranks, network, calibration.
        seeds: seeds of the values; 0, 1, ... by default.

    Returns:
        The verdict, for the notebook's text.

    Raises:
        ConfigError: there is no such claim, or it is not tested at this size.
    """
    known = find_claim(claim)
    numbers = tuple(float(value) for value in ([values] if isinstance(values, int | float) else values))
    if size not in SIZES:
        raise ConfigError(f"size={size!r}: give {', '.join(SIZES)}")
    if where not in get_args(Where):
        raise ConfigError(f"where={where!r}: give {', '.join(get_args(Where))}")
    if known.expectation_at(size) is None:
        raise ConfigError(
            f"{claim} is not tested at size {size} (sizes: {', '.join(known.sizes)}): leave its finding out there"
        )
    if not numbers or (seeds and len(seeds) != len(numbers)):
        raise ConfigError(f"{claim}: {len(numbers)} values of {len(seeds)} seeds: give one value per seed")
    chosen = tuple(seeds) or tuple(range(len(numbers)))
    shown = Shown(known, Finding(claim=claim, size=size, values=numbers, seeds=chosen, where=where, how=how))
    _display(shown)
    return shown.verdict


def _display(shown: Shown) -> None:
    """Display it in a notebook; print it elsewhere."""
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
