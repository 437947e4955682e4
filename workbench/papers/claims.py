"""Claims of papers, from `papers/KEY/claims/NOTEBOOK.yaml`: expectations that are written before any measurement."""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, final, get_args

from workbench import resources
from workbench.errors import ConfigError
from workbench.experiments.yaml_file import read_yaml
from workbench.naming import listed, shorten, unknown

Size = Literal["smoke", "ci", "full"]
Kind = Literal["exact", "numeric", "ordering", "scaling", "qualitative"]
Provenance = Literal["verified", "recalled", "derived"]
Scale = Literal["any", "paper"]
Clock = Literal["real", "none"]
Origin = Literal["statement of the paper", "reviewer's question", "own check"]

SIZES: tuple[Size, ...] = get_args(Size)
CLAIM_KEYS = ("id", "source", "statement", "kind", "metric", "expected", "provenance")
TEXTS = ("source", "statement", "metric", "needs", "explanation", "theirs", "figure", "unit", "formerly")
FLAGS = ("deterministic", "headline", "check")
NUMBERS = ("no_effect", "effect", "cap")
CLAIM_MORE = (
    "reduced",
    "scale",
    "theirs",
    "unit",
    "sizes",
    "needs",
    "explanation",
    "figure",
    "formerly",
    "clock",
    *FLAGS,
    *NUMBERS,
)
ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
REVIEW_SOURCE = re.compile("review|comment", re.IGNORECASE)


@final
@dataclass(frozen=True, slots=True)
class Expectation:
    """The values that a claim allows: from `low` to `high`, without the ends if `strict`.

    >>> str(Expectation.of({"above": 1})), str(Expectation.of({"value": 2.0, "rel": 0.1}))
    ('> 1', '1.8 to 2.2')
    """

    low: float
    high: float
    strict: bool = False

    @classmethod
    def of(cls, content: Any) -> Expectation:
        """Make one from `{above: x}`, `{below: x}`, `{between: [x, y]}`, `{value: x, abs: t}` or `{value: x, rel: t}`.

        Raises:
            ConfigError: the content has none of these forms.
        """
        match _finite(content):
            case {"above": float() | int() as low, **rest} if not rest:
                return cls(low, math.inf, True)
            case {"below": float() | int() as high, **rest} if not rest:
                return cls(-math.inf, high, True)
            case {"between": [float() | int() as low, float() | int() as high], **rest} if not rest and low < high:
                return cls(low, high)
            case {"value": float() | int() as value, "abs": float() | int() as off, **rest} if not rest and off >= 0:
                return cls(value - off, value + off)
            case {"value": float() | int() as value, "rel": float() | int() as share, **rest} if (
                not rest and share >= 0
            ):
                off = abs(value) * share
                return cls(value - off, value + off)
        forms = "{above: x}, {below: x}, {between: [x, y]}, {value: x, abs: t} or {value: x, rel: t}"
        raise ConfigError(f"{shorten(content)} is no expectation: write {forms}")

    def holds(self, value: float) -> bool:
        """Return True if a value is allowed."""
        return self.low < value < self.high if self.strict else self.low <= value <= self.high

    def nearer_end(self, outside: float) -> float | None:
        """Return the end nearer to a value outside; None if an end is infinite, or if the value is inside."""
        if math.isinf(self.low) or math.isinf(self.high) or self.low < outside < self.high:
            return None
        return self.low if outside <= self.low else self.high

    def farther_end(self, outside: float) -> float | None:
        """Return the end farther from a value outside; None if an end is infinite, or if the value is inside."""
        nearer = self.nearer_end(outside)
        if nearer is None:
            return None
        return self.high if nearer == self.low else self.low

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"> {self.low:g}"
        if self.low == -math.inf:
            return f"< {self.high:g}"
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One testable statement.

    Attributes:
        paper, id: key of the paper; name of the claim within it.
        notebook: name of the notebook that tests it.
        source: its place in the paper, or the review that asked for it ("Fig. 6", "P1 review 2").
        statement: the claim as a sentence.
        kind: "exact", "numeric", "ordering", "scaling" or "qualitative".
        metric: the computed quantity, defined so that two people compute the same.
        expected: expectation at the paper's own scale, or at any size, depending on `scale`.
        reduced: for a claim about the paper's own scale: expectation at sizes below "full"; None if these cannot
            test it.
        scale: "any" if size does not matter (equalities, formulas), "paper" if the claim is about the paper's
            hardware or data.
        provenance: "verified" in the paper's text, "recalled" (then no number of the paper is quoted), or
            "derived" here.
        theirs: the number that the paper prints.
        unit: words after the measured value of a headline, such as "times as fast".
        sizes: the notebook's sizes at which it is tested.
        needs: what is missing here to test it at the paper's scale.
        deterministic: whether one value is enough; otherwise five or more paired seeds are needed. What is measured on
            a real clock is never deterministic.
        explanation: our explanation if it is not reproduced; pages mark it as untested.
        headline: whether it is among the first results on `papers/README.md`.
        check: whether it counts as our own check, because it cannot fail, although a paper or a reviewer is its source.
        formerly: its id when its records were measured, if it was renamed since.
        figure: its figure, a cell of the notebook with the tag `figure-NAME`.
        clock: "real" if its metric is a time, a rate or a ratio of these on a real clock, "none" if not; None: real if
            it is measured on ranks.
        no_effect: the value of no effect; by default the end of a one-sided expectation, if it is 0 or 1.
        effect: the smallest effect that the paper claims; by default the end of a two-sided `expected` that is nearer
            to `no_effect`.
        cap: a value that reaches it is censored: the run ended before the measured event.
    """

    paper: str
    id: str
    notebook: str
    source: str
    statement: str
    kind: Kind
    metric: str
    expected: Expectation
    provenance: Provenance
    reduced: Expectation | None = None
    scale: Scale = "any"
    theirs: str = ""
    unit: str = ""
    sizes: tuple[Size, ...] = SIZES
    needs: str = ""
    deterministic: bool = False
    explanation: str = ""
    headline: bool = False
    check: bool = False
    formerly: str = ""
    figure: str = ""
    clock: Clock | None = None
    no_effect: float | None = None
    effect: float | None = None
    cap: float = math.inf

    def __post_init__(self) -> None:
        if self.no_effect is None:
            object.__setattr__(self, "no_effect", _no_effect_of(self.reduced or self.expected))
        if self.effect is None and self.no_effect is not None:
            object.__setattr__(self, "effect", self.expected.nearer_end(self.no_effect))

    @property
    def name(self) -> str:
        """`KEY/ID`."""
        return f"{self.paper}/{self.id}"

    @property
    def cited(self) -> str:
        """The source, and whether it was read: "Fig. 1, read in the paper"."""
        read = {"verified": ", read in the paper", "recalled": ", recalled and not read", "derived": ", derived here"}
        return self.source + ("" if "derived" in self.source else read[self.provenance])

    def expectation_at(self, size: Size) -> Expectation | None:
        """Return the expectation for a run of this size; None if such a run cannot test the claim."""
        if size not in self.sizes:
            return None
        return self.expected if self.scale == "any" or size == "full" else self.reduced

    def upper_limit_at(self, size: Size) -> float | None:
        """Return the end beyond which a value overshoots, if the expectation at this size is one-sided.

        It is the end of `expected` that is farther from `no_effect`. None if there is no such end, or if the
        expectation at this size has two ends.
        """
        expected = self.expectation_at(size)
        if expected is None or self.no_effect is None or (math.isfinite(expected.low) and math.isfinite(expected.high)):
            return None
        return self.expected.farther_end(self.no_effect)

    @property
    def origin(self) -> Origin:
        """Whether the paper states it, a reviewer asks for it, or it is our own check."""
        if self.check:
            return "own check"
        if self.provenance != "derived":
            return "statement of the paper"
        return "reviewer's question" if REVIEW_SOURCE.search(self.source) else "own check"

    @property
    def digest(self) -> str:
        """A hash of the expectation. A record keeps it, so that a later edit of the expectation is detected."""
        what = [
            f"{self.paper}/{self.formerly or self.id}",
            self.kind,
            self.metric,
            self.scale,
            self.deterministic,
            list(self.sizes),
            _ends(self.expected),
            _ends(self.reduced),
        ]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An experiment of a paper: a figure or table, and the notebook that runs it here."""

    paper: str
    notebook: str
    id: str
    artefact: str
    about: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A reviewer's question, and the tag of the notebook's cell that answers it."""

    paper: str
    notebook: str
    id: str
    asked: str
    question: str
    cell: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of a notebook, from the cell with the tag `figure-ID`: its caption, and its alternative text."""

    paper: str
    notebook: str
    id: str
    caption: str
    alt: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """The content of `papers/KEY/claims/`."""

    claims: tuple[Claim, ...]
    experiments: tuple[Experiment, ...]
    questions: tuple[Question, ...]
    figures: tuple[Figure, ...] = ()


def read_claims(key: str, papers: Path | None = None) -> Claims:
    """Read the claims, experiments and questions of a paper, in the order of notebooks.

    Args:
        key: key of the paper.
        papers: folder of papers; that of the package by default.

    Raises:
        ConfigError: a file does not follow the schema; the message says where, and what to write.
    """
    folder = (papers or resources.shared("papers")) / key
    if not folder.is_dir():
        raise unknown("paper", key, sorted(path.name for path in folder.parent.iterdir() if path.is_dir()))
    claims: list[Claim] = []
    experiments: list[Experiment] = []
    questions: list[Question] = []
    figures: list[Figure] = []
    for path in sorted((folder / "claims").glob("*.yaml")):
        content = read_yaml(path)
        _check_keys(path, content, (), ("experiments", "claims", "questions", "figures"))
        about = {"paper": key, "notebook": path.stem}
        for item in _items(path, content, "experiments"):
            experiments.append(Experiment(**about, **_texts(path, item, ("id", "artefact", "about"))))
        for item in _items(path, content, "questions"):
            questions.append(Question(**about, **_texts(path, item, ("id", "asked", "question", "cell"))))
        for item in _items(path, content, "figures"):
            figures.append(Figure(**about, **_texts(path, item, ("id", "caption", "alt"))))
        claims += [_claim(path, item, about) for item in _items(path, content, "claims")]
    for what, names in (("claim", [item.id for item in claims]), ("question", [item.id for item in questions])):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"{folder / 'claims'}: {what} {', '.join(twice)} exists twice: give each its own id")
    return Claims(
        claims=tuple(claims), experiments=tuple(experiments), questions=tuple(questions), figures=tuple(figures)
    )


def find_claim(name: str, papers: Path | None = None) -> Claim:
    """Return the claim with the name `KEY/ID`.

    Raises:
        ConfigError: there is no such claim; the message names the nearest one.
    """
    key, slash, identity = name.partition("/")
    if not slash:
        raise ConfigError(
            f"{name!r} is no claim: write PAPER/CLAIM, such as daily2016leveraging/delay-hides-communication"
        )
    claims = {claim.id: claim for claim in read_claims(key, papers).claims}
    if identity not in claims:
        raise unknown(f"claim of {key}", identity, claims)
    return claims[identity]


def _claim(path: Path, item: Mapping[str, Any], about: Mapping[str, Any]) -> Claim:
    _check_keys(path, item, CLAIM_KEYS, CLAIM_MORE)
    where = f"{path}: claim {item['id']!r}"
    texts: dict[str, Any] = {name: str(item[name]).strip() for name in TEXTS if name in item}
    kind = _word(where, "kind", item["kind"], get_args(Kind))
    provenance = _word(where, "provenance", item["provenance"], get_args(Provenance))
    scale = _word(where, "scale", item.get("scale", "any"), get_args(Scale))
    sizes = tuple(_word(where, "sizes", size, SIZES) for size in listed(item.get("sizes", SIZES)))
    if not isinstance(item["id"], str) or not ID.fullmatch(item["id"]):
        raise ConfigError(f"{where}: an id must consist of a-z, 0-9 and hyphens")
    for name in FLAGS:
        if not isinstance(item.get(name, False), bool):
            raise ConfigError(f"{where}: {name} must be true or false")
    numbers: dict[str, Any] = {}
    for name in NUMBERS:
        if name in item:
            if _finite({name: item[name]}) is None:
                raise ConfigError(f"{where}: {name}={shorten(item[name])}: write a number")
            numbers[name] = float(item[name])
    clock = _word(where, "clock", item["clock"], get_args(Clock)) if "clock" in item else None
    if clock == "real" and item.get("deterministic", False):
        raise ConfigError(f"{where}: what is measured on a real clock is not deterministic: leave one of them out")
    if provenance == "recalled" and "theirs" in item:
        raise ConfigError(
            f"{where}: a recalled number must not be quoted as the paper's: leave out `theirs`, or verify it"
        )
    if scale == "any" and "reduced" in item:
        raise ConfigError(
            f"{where}: `reduced` is for claims with `scale: paper`; this one is expected at any size: leave it out"
        )
    try:
        expected = Expectation.of(item["expected"])
        reduced = Expectation.of(item["reduced"]) if "reduced" in item else None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if scale == "paper" and reduced is None and not texts.get("needs"):
        raise ConfigError(
            f"{where}: it is about the paper's scale: write in `reduced` what smaller sizes can show, or in `needs` "
            "what is missing"
        )
    return Claim(
        **about,
        **texts,
        id=item["id"],
        kind=cast(Kind, kind),
        provenance=cast(Provenance, provenance),
        scale=cast(Scale, scale),
        sizes=cast("tuple[Size, ...]", sizes),
        expected=expected,
        reduced=reduced,
        clock=cast("Clock | None", clock),
        deterministic=item.get("deterministic", False),
        headline=item.get("headline", False),
        check=item.get("check", False),
        **numbers,
    )


def _no_effect_of(expectation: Expectation) -> float | None:
    """The end of an expectation with one end, if it is 0 or 1: the value of no difference, or of the ratio of equals."""
    ends = [end for end in (expectation.low, expectation.high) if math.isfinite(end)]
    return ends[0] if len(ends) == 1 and ends[0] in (0, 1) else None


def _finite(content: Any) -> Any:
    """The argument; None if one of its numbers is not finite or not a number."""
    values = content.values() if isinstance(content, dict) else ()
    numbers = [one for value in values for one in listed(value)]
    return content if all(type(one) in (int, float) and abs(one) <= sys.float_info.max for one in numbers) else None


def _items(path: Path, content: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = content.get(name) or []
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise ConfigError(f"{path}: {name} is a list of mappings: begin each with `- id: NAME`")
    return found


def _texts(path: Path, item: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, str]:
    _check_keys(path, item, names, ())
    return {name: str(item[name]).strip() for name in names}


def _check_keys(path: Path, item: Mapping[str, Any], needed: tuple[str, ...], more: tuple[str, ...]) -> None:
    about = f"{path}: {item.get('id', 'the file')!r}" if "id" in item else str(path)
    for name in needed:
        if name not in item:
            raise ConfigError(f"{about} has no `{name}`")
    for name in item:
        if name not in (*needed, *more):
            raise ConfigError(f"{about}: {unknown('entry', str(name), (*needed, *more))}")


def _word(where: str, name: str, value: Any, known: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{where}: {name}={shorten(value)}: write {', '.join(known)}")
    return str(value)


def _ends(expectation: Expectation | None) -> list[Any] | None:
    return None if expectation is None else [str(expectation.low), str(expectation.high), expectation.strict]
