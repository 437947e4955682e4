"""Claims of papers, read from `papers/KEY/claims/NOTEBOOK.yaml` and checked: what is expected, before anything is measured."""

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
from workbench.naming import brief, listed, unknown

Size = Literal["smoke", "ci", "full"]
Kind = Literal["exact", "numeric", "ordering", "scaling", "qualitative"]
Provenance = Literal["verified", "recalled", "derived"]
Scale = Literal["any", "paper"]

SIZES: tuple[Size, ...] = get_args(Size)
CLAIM_KEYS = ("id", "source", "statement", "kind", "metric", "expected", "provenance")
CLAIM_MORE = ("reduced", "scale", "theirs", "sizes", "needs", "deterministic", "explanation")
TEXTS = ("source", "statement", "metric", "needs", "explanation", "theirs")
ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@final
@dataclass(frozen=True, slots=True)
class Expectation:
    """The values that a claim allows: those between `low` and `high`, the ends too unless `strict`.

    >>> str(Expectation.of({"above": 1})), str(Expectation.of({"value": 2.0, "rel": 0.1}))
    ('> 1', '1.8 to 2.2')
    """

    low: float
    high: float
    strict: bool = False

    @classmethod
    def of(cls, words: Any) -> Expectation:
        """From `{above: x}`, `{below: x}`, `{between: [x, y]}`, `{value: x, abs: t}` or `{value: x, rel: t}`.

        Raises:
            ConfigError: it is none of these.
        """
        match _finite(words):
            case {"above": float() | int() as low, **rest} if not rest:
                return cls(low, math.inf, True)
            case {"below": float() | int() as high, **rest} if not rest:
                return cls(-math.inf, high, True)
            case {"between": [float() | int() as low, float() | int() as high], **rest} if not rest and low < high:
                return cls(low, high)
            case {"value": float() | int() as value, "abs": float() | int() as off, **rest} if not rest and off >= 0:
                return cls(value - off, value + off)
            case {"value": float() | int() as value, "rel": float() | int() as share, **rest} if not rest and share >= 0:
                off = abs(value) * share
                return cls(value - off, value + off)
        forms = "{above: x}, {below: x}, {between: [x, y]}, {value: x, abs: t} or {value: x, rel: t}"
        raise ConfigError(f"{brief(words)} is no expectation: write {forms}")

    def holds(self, value: float) -> bool:
        """Whether a value is allowed."""
        return self.low < value < self.high if self.strict else self.low <= value <= self.high

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"> {self.low:g}"
        if self.low == -math.inf:
            return f"< {self.high:g}"
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One statement that can turn out wrong.

    Attributes:
        paper, id: key of the paper; name of the claim within it.
        notebook: which one tests it.
        source: where the paper says so, or who asked ("Fig. 6", "P1 review 2").
        metric: what is computed, so that two people would compute the same.
        expected: at the paper's own scale, or at any (`scale`).
        reduced: at sizes below "full", for claims about the paper's own scale; None where these cannot test it.
        scale: "any" if size does not matter (equalities, formulas, laws), "paper" if the claim is about its hardware or data.
        provenance: "verified" in the paper's text, "recalled" (then no number of the paper's is given) or "derived" here.
        theirs: the number that the paper prints.
        sizes: at which of the notebook's sizes it is tested.
        needs: what is missing here to test it at the paper's scale.
        deterministic: one value is enough; otherwise five or more paired seeds are asked for.
        explanation: our best one, where it does not reproduce; pages call it untested.
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
    sizes: tuple[Size, ...] = SIZES
    needs: str = ""
    deterministic: bool = False
    explanation: str = ""

    @property
    def name(self) -> str:
        """`KEY/ID`."""
        return f"{self.paper}/{self.id}"

    def expectation_at(self, size: Size) -> Expectation | None:
        """What is expected of a run of that size; None where it cannot test the claim."""
        if size not in self.sizes:
            return None
        return self.expected if self.scale == "any" or size == "full" else self.reduced

    @property
    def digest(self) -> str:
        """A hash of what is expected: a record keeps it, so that an expectation edited after its record is found out."""
        what = [
            self.name,
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
    """A row of a paper's experiments: a figure or table of it, and the notebook that runs it here."""

    paper: str
    notebook: str
    id: str
    artefact: str
    about: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a reviewer asked, and the tag of the notebook's cell that answers."""

    paper: str
    notebook: str
    id: str
    asked: str
    question: str
    cell: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """All that `papers/KEY/claims/` holds."""

    claims: tuple[Claim, ...]
    experiments: tuple[Experiment, ...]
    questions: tuple[Question, ...]


def read_claims(key: str, papers: Path | None = None) -> Claims:
    """The claims, experiments and questions of a paper, notebook by notebook.

    Args:
        papers: the folder of papers; the one that comes with the package by default.

    Raises:
        ConfigError: a file that does not follow the schema; says where and what to write.
    """
    folder = (papers or resources.shared("papers")) / key
    if not folder.is_dir():
        raise unknown("paper", key, sorted(path.name for path in folder.parent.iterdir() if path.is_dir()))
    claims: list[Claim] = []
    experiments: list[Experiment] = []
    questions: list[Question] = []
    for path in sorted((folder / "claims").glob("*.yaml")):
        words = read_yaml(path)
        _only(path, words, (), ("experiments", "claims", "questions"))
        about = {"paper": key, "notebook": path.stem}
        for item in _items(path, words, "experiments"):
            experiments.append(Experiment(**about, **_texts(path, item, ("id", "artefact", "about"))))
        for item in _items(path, words, "questions"):
            questions.append(Question(**about, **_texts(path, item, ("id", "asked", "question", "cell"))))
        claims += [_claim(path, item, about) for item in _items(path, words, "claims")]
    for what, names in (("claim", [item.id for item in claims]), ("question", [item.id for item in questions])):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"{folder / 'claims'}: {what} {', '.join(twice)} is there twice: give each its own id")
    return Claims(claims=tuple(claims), experiments=tuple(experiments), questions=tuple(questions))


def find_claim(name: str, papers: Path | None = None) -> Claim:
    """The claim called `KEY/ID`.

    Raises:
        ConfigError: there is none; the nearest is named.
    """
    key, slash, identity = name.partition("/")
    if not slash:
        raise ConfigError(f"{name!r} is no claim: write PAPER/CLAIM, such as daily2016leveraging/delay-hides-communication")
    claims = {claim.id: claim for claim in read_claims(key, papers).claims}
    if identity not in claims:
        raise unknown(f"claim of {key}", identity, claims)
    return claims[identity]


def _claim(path: Path, item: Mapping[str, Any], about: Mapping[str, str]) -> Claim:
    _only(path, item, CLAIM_KEYS, CLAIM_MORE)
    where = f"{path}: claim {item['id']!r}"
    texts = {name: str(item[name]).strip() for name in TEXTS if name in item}
    kind = _word(where, "kind", item["kind"], get_args(Kind))
    provenance = _word(where, "provenance", item["provenance"], get_args(Provenance))
    scale = _word(where, "scale", item.get("scale", "any"), get_args(Scale))
    sizes = tuple(_word(where, "sizes", size, SIZES) for size in listed(item.get("sizes", SIZES)))
    if not isinstance(item["id"], str) or not ID.fullmatch(item["id"]):
        raise ConfigError(f"{where}: an id is made of a-z, 0-9 and hyphens")
    if not isinstance(item.get("deterministic", False), bool):
        raise ConfigError(f"{where}: deterministic is true or false")
    if provenance == "recalled" and "theirs" in item:
        raise ConfigError(f"{where}: a number that is only recalled is not quoted as the paper's: leave out `theirs`, or verify it")
    if scale == "any" and "reduced" in item:
        raise ConfigError(f"{where}: `reduced` is for claims with `scale: paper`; this one is expected at any size: leave it out")
    try:
        expected = Expectation.of(item["expected"])
        reduced = Expectation.of(item["reduced"]) if "reduced" in item else None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if scale == "paper" and reduced is None and not texts.get("needs"):
        raise ConfigError(
            f"{where}: it is about the paper's scale: say in `reduced` what smaller sizes can show, or in `needs` what is missing"
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
        deterministic=item.get("deterministic", False),
    )


def _finite(words: Any) -> Any:
    """The same; None where one of its numbers is none that a value could be compared with."""
    values = words.values() if isinstance(words, dict) else ()
    numbers = [one for value in values for one in listed(value)]
    return words if all(type(one) in (int, float) and abs(one) <= sys.float_info.max for one in numbers) else None


def _items(path: Path, words: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = words.get(name) or []
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise ConfigError(f"{path}: {name} is a list of mappings: begin each with `- id: NAME`")
    return found


def _texts(path: Path, item: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, str]:
    _only(path, item, names, ())
    return {name: str(item[name]).strip() for name in names}


def _only(path: Path, item: Mapping[str, Any], needed: tuple[str, ...], more: tuple[str, ...]) -> None:
    about = f"{path}: {item.get('id', 'the file')!r}" if "id" in item else str(path)
    for name in needed:
        if name not in item:
            raise ConfigError(f"{about} has no `{name}`")
    for name in item:
        if name not in (*needed, *more):
            raise ConfigError(f"{about}: {unknown('entry', str(name), (*needed, *more))}")


def _word(where: str, name: str, value: Any, known: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{where}: {name}={brief(value)}: write {', '.join(known)}")
    return str(value)


def _ends(expectation: Expectation | None) -> list[Any] | None:
    return None if expectation is None else [str(expectation.low), str(expectation.high), expectation.strict]
