"""What a notebook reports: `finding`, the values that it measured for a claim, and `answer`, its text with its numbers.

A cell shows them and stores them in the notebook. `workbench reproduce` writes them into the record.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from string import Formatter
from typing import Any, Literal, final, get_args

from workbench.errors import ConfigError
from workbench.papers.claims import SIZES, Claim, Size, find_claim
from workbench.papers.verdicts import Estimate, Verdict, estimate, judge

MIME = "application/vnd.workbench.finding+json"
ANSWER_MIME = "application/vnd.workbench.answer+json"
Where = Literal[
    "local ranks",
    "local ranks, slept compute",
    "emulated network",
    "emulated network, slept compute",
    "cluster",
    "cluster, slept compute",
    "simulated cluster",
    "one process",
    "formula",
]
SLEPT = ", slept compute"
RANKS = ("local ranks", "emulated network", "cluster")


def on_real_clock(claim: Claim, where: str) -> bool:
    """Return True if a finding of the claim is a time, a rate or a ratio of these on a real clock."""
    return where.removesuffix(SLEPT) in RANKS if claim.clock is None else claim.clock == "real"


# -- findings ----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Values of a claim's metric, one per seed, and how they were measured.

    Attributes:
        claim, size: the claim, and the size of the notebook.
        values, seeds: one value per seed.
        where, how: what it was measured on.
        censored: for each value, whether it is a cap; empty if no value is known to be one.
    """

    claim: str
    size: Size
    values: tuple[float, ...]
    seeds: tuple[int, ...]
    where: Where
    how: str
    censored: tuple[bool, ...] = ()


@final
class FindingOutput:
    """The output of a finding in a cell: text, HTML, and the finding as JSON for the notebook's file."""

    def __init__(self, claim: Claim, finding: Finding) -> None:
        self.claim, self.finding = claim, finding
        real_clock = on_real_clock(claim, finding.where)
        self.verdict: Verdict = judge(
            claim, finding.values, finding.size, real_clock=real_clock, censored=finding.censored
        )

    def __repr__(self) -> str:
        claim, verdict = self.claim, self.verdict
        expected = claim.expectation_at(self.finding.size)
        exact = claim.deterministic and not verdict.num_sessions
        seeds = "" if exact else f", {verdict.num_values} seeds"
        ours = f"{verdict}{seeds}"
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
    censored: Sequence[bool] = (),
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
        censored: for each value, whether it is a cap, such as a limit of steps that ended the run. By default, whether
            it reaches the claim's cap.

    Returns:
        The verdict, for the notebook's answer.

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
    caps = tuple(bool(cap) for cap in censored)
    if caps and len(caps) != len(numbers):
        raise ConfigError(f"{claim}: {len(numbers)} values, {len(caps)} of `censored`: give one for each value")
    chosen = tuple(seeds) or tuple(range(len(numbers)))
    found = Finding(claim=claim, size=size, values=numbers, seeds=chosen, where=where, how=how, censored=caps)
    shown = FindingOutput(known, found)
    _display(shown)
    return shown.verdict


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reporter:
    """Reports findings of one paper. A claim that is not tested at this size is named and left out.

    Attributes:
        paper: its key.
        size, where, seeds: as in `finding`.
    """

    paper: str
    size: Size
    where: Where
    seeds: Sequence[int]

    def __call__(
        self, claim: str, values: Sequence[float] | float, how: str, *, censored: Sequence[bool] = ()
    ) -> Verdict | None:
        """Report the values, as `finding` does; one number for a deterministic claim. None if not tested at this size."""
        name = f"{self.paper}/{claim}"
        if find_claim(name).expectation_at(self.size) is None:
            print(f"{name} is not tested at size {self.size}")
            return None
        seeds = () if isinstance(values, int | float) else self.seeds
        return finding(name, values, size=self.size, where=self.where, how=how, seeds=seeds, censored=censored)


# -- answers -----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a notebook: a text with fields, as of `str.format`, and their numbers.

    Attributes:
        text: the text; the field `{gain:.2f}` stands for the number `gain`.
        numbers: name -> values, one per seed, or the claim whose verdict is meant.
    """

    text: str
    numbers: Mapping[str, tuple[float, ...] | str]

    def filled(self, verdicts: Mapping[str, Verdict]) -> str:
        """Return the text with its numbers. Several values are shown as their mean and its 95 % interval.

        Args:
            verdicts: claim -> verdict.

        >>> Answer(text="{gain:.1f} times as fast", numbers={"gain": (1.5, 1.7, 1.6)}).filled({})
        '1.6 [1.4, 1.8] times as fast'
        """
        filled: dict[str, Estimate | Verdict] = {
            name: verdicts[given] if isinstance(given, str) else estimate(given) for name, given in self.numbers.items()
        }
        return self.text.format(**filled)

    def unknown_claims(self, verdicts: Mapping[str, Verdict]) -> list[str]:
        """Return the claims of the answer that have no verdict, because they were deleted or renamed after the record."""
        return sorted({given for given in self.numbers.values() if isinstance(given, str) and given not in verdicts})

    def with_session(self, earlier: Answer) -> Answer:
        """Return this answer, of a session with other seeds, with the values of earlier sessions before its own.

        A number that is no list of one value per seed is this session's.
        """
        numbers = dict(self.numbers)
        for name, before in earlier.numbers.items():
            own = numbers.get(name, "")
            if not isinstance(before, str) and not isinstance(own, str) and len(own) > 1:
                numbers[name] = (*before, *own)
        return Answer(text=self.text, numbers=numbers)


@final
class ShownAnswer:
    """The output of an answer in a cell: text, and the answer as JSON for the notebook's file."""

    def __init__(self, answer: Answer, verdicts: Mapping[str, Verdict]) -> None:
        self.answer, self.text = answer, answer.filled(verdicts)

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {"text/plain": self.text, "text/markdown": self.text, ANSWER_MIME: asdict(self.answer)}


def answer(text: str, **numbers: float | Sequence[float] | Iterable[float] | Verdict) -> None:
    """Report the answer of a notebook, once, in its cell with the tag `answer`.

    The record stores the text and its numbers, and the paper's page prints them with the figure and the verdicts. A
    verdict is printed as the record's verdict on its claim, so it includes the sessions that are added later.

    Args:
        text: the answer in a few sentences, with a field for each number, such as `{gain:.2f}` or `{gain.word}`.
        numbers: a number for each field: a value, values of several seeds, or the verdict that `finding` returned.

    Raises:
        ConfigError: a field has no number, a number has no field, or the text has an empty line.
    """
    if "\n\n" in text.strip():
        raise ConfigError("answer: the text has an empty line: write one paragraph, or lines that begin with '- '")
    fields = {name.partition(".")[0].partition("[")[0] for _, name, _, _ in Formatter().parse(text) if name is not None}
    if fields != set(numbers):
        lone = sorted(fields ^ set(numbers))
        raise ConfigError(f"answer: {', '.join(map(repr, lone))}: give one number for each field of the text")
    verdicts = {given.claim: given for given in numbers.values() if isinstance(given, Verdict)}
    stored: dict[str, tuple[float, ...] | str] = {}
    for name, given in numbers.items():
        if isinstance(given, Verdict):
            stored[name] = given.claim
        else:
            stored[name] = tuple(float(value) for value in (given if isinstance(given, Iterable) else [given]))
    _display(ShownAnswer(Answer(text=text, numbers=stored), verdicts))


def _display(shown: FindingOutput | ShownAnswer) -> None:
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
