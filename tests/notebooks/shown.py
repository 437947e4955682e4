"""Compares every number that an executed notebook shows with the same number computed again from raw records and formulas.

`with_check(notebook, folder)` is a copy of a notebook with a cell in front, which keeps every simulated run. A cell at
the end computes again what the notebook shows (`recomputed`), and writes that into its file. `check_shown(executed)`
compares both, number by number. A number that is not computed again fails like a wrong one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import nbformat

MIME = "application/vnd.workbench.recomputed+json"
FINDING = "application/vnd.workbench.finding+json"
RANKS = ("local ranks", "emulated network", "cluster")  # whose times are of a real clock
PLOTLY = "application/vnd.plotly.v1+json"
NUMBER = re.compile(
    r"(?<![\w.^])(?<!\d-)([-+]?)(\d[\d,]*)(\.\d+)?(e[-+]?\d+)?(?:\s?(%|(?:ms|µs|s|kB|MB|GB|B)(?![\w/])))?"
)
UNITS = {"%": 0.01, "ms": 1e-3, "µs": 1e-6, "s": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "B": 1.0}
# Modules that hold the function
SIMULATORS = (
    "runtimes.simulator.simulate",
    "papers.studies.training",
    "papers.studies.sums",
    "papers.studies.simulated_steps",
    "papers.studies.quadratic",
    "papers.studies.regret",
    "papers.studies.shapes",
)


class Kept(NamedTuple):
    """A simulated run, with what it was asked for; None where it diverged."""

    algorithm: Any
    problem: Any
    how: dict[str, Any]
    run: Any


@dataclass
class Again:
    """What a notebook must show, computed again.

    Attributes:
        texts: of each printed text, table and figure that has a number: texts that it contains, and its numbers in
            order. Shares for per cent, SI units for seconds and bytes.
        claims: claim -> the values of its finding.
        labels: names with numbers in them, which are no results.
        whole: whether these are all texts that have numbers; if not, others are not checked.
    """

    texts: list[tuple[str, list[float]]] = field(default_factory=list)
    claims: dict[str, list[float]] = field(default_factory=dict)
    labels: list[str] = field(default_factory=list)
    whole: bool = True

    def text(self, words: str, *numbers: Any) -> None:
        """Numbers may be nested lists."""
        self.texts.append((words, [float(number) for number in _flat(numbers)]))

    def claim(self, name: str, *values: Any) -> None:
        self.claims[name] = [float(value) for value in _flat(values)]


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if hasattr(value, "__iter__"):
            yield from _flat(value)
        else:
            yield value


def with_check(notebook: Path, folder: Path) -> Path:
    """A copy of the notebook, of the same name, that computes again what it shows."""
    found = nbformat.read(notebook, as_version=4)
    first = nbformat.v4.new_code_cell(
        "from tests.notebooks.shown import keep_runs, tell\n\n_tell, _kept_runs = tell, keep_runs()"
    )
    last = nbformat.v4.new_code_cell(f"_tell({notebook.stem!r}, globals(), _kept_runs)")
    found.cells = [first, *found.cells, last]
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(found, folder / notebook.name)
    return folder / notebook.name


def keep_runs() -> list[Kept]:
    """From now on every simulated run of this process, in order."""
    import workbench
    from workbench.runtimes.simulator.simulate import simulate  # which is `workbench.simulate`

    kept: list[Kept] = []

    def keeping(algorithm: Any, problem: Any, **how: Any) -> Any:
        kept.append(Kept(algorithm, problem, how, None))
        kept[-1] = Kept(algorithm, problem, how, simulate(algorithm, problem, **how))
        return kept[-1].run

    for name in SIMULATORS:
        import_module(f"workbench.{name}").simulate = keeping  # type: ignore[attr-defined]
    workbench.simulate = keeping
    return kept


def tell(notebook: str, names: dict[str, Any], kept: list[Kept]) -> None:
    """Leave in the notebook's file what it must show."""
    from IPython.display import display

    from tests.notebooks.recomputed import NOTEBOOKS

    again = NOTEBOOKS[notebook](names, kept)
    facts = {"texts": again.texts, "claims": again.claims, "labels": again.labels, "whole": again.whole}
    # Text: what a page of the notebook shows of it
    display({MIME: facts, "text/plain": "(numbers computed again)"}, raw=True)


# -- what is shown -----------------------------------------------------------------------------------------------


def numbers(text: str, labels: list[str]) -> list[tuple[float, float, str]]:
    """(value, half a unit of its last digit, as written) of each number of a text.

    >>> [(round(value, 9), round(half, 9)) for value, half, _ in numbers("a step of 12.3 ms, 8 bits: 1,024 of AGD 1, -4.0 %", ["AGD 1"])]
    [(0.0123, 5e-05), (8.0, 0.5), (1024.0, 0.5), (-0.04, 0.0005)]
    """
    for label in sorted(labels, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.]){re.escape(label)}(?!\w)", " ", text)
    found = []
    for match in NUMBER.finditer(text):
        sign, whole, part, power, unit = match.groups()
        whole = whole.rstrip(",")
        factor = UNITS.get(unit, 1.0)
        digit = 10.0 ** (int((power or "e0")[1:]) - len(part or ".") + 1)
        value = float(f"{sign}{whole.replace(',', '')}{part or ''}{power or ''}")
        found.append((value * factor, digit * factor / 2, match[0].strip()))
    return found


def texts_of(executed: Path) -> Iterator[str]:
    """Each printed text, table and figure of an executed notebook, in order; what a finding shows is not among them."""
    for cell in nbformat.read(executed, as_version=4).cells:
        printed = ""
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if output.output_type == "stream" and output.name == "stdout":
                printed += output.text
            elif PLOTLY in data:
                yield from filter(None, [printed, _figure_text(data[PLOTLY])])
                printed = ""
            elif (
                data
                and FINDING not in data
                and MIME not in data
                and not data.get("text/plain", "").startswith("Verdict(")
            ):
                yield from filter(None, [printed, _without_header(data.get("text/plain", ""))])
                printed = ""
        if printed:
            yield printed


def _figure_text(figure: dict[str, Any]) -> str:
    """A figure's title, and the numbers that a heat map writes."""
    written = [" ".join(row) for trace in figure["data"] if trace["type"] == "heatmap" for row in trace["text"]]
    return "\n".join([figure["layout"]["title"]["text"], *written]).replace("<br>", " ")


def _without_header(table: str) -> str:
    """A table without the titles of its columns."""
    return re.sub(r"^.*\n-[- ]+$", "", table, flags=re.MULTILINE)


# -- whether it is right ---------------------------------------------------------------------------------------------


def check_shown(executed: Path) -> None:
    """Raise AssertionError with every number that is not as it was computed again, or was not."""
    again = next(
        output.data[MIME]
        for cell in nbformat.read(executed, as_version=4).cells
        for output in cell.get("outputs", [])
        if MIME in output.get("data", {})
    )
    wrong = [f"{claim}: {problem}" for claim, problem in _wrong_findings(executed, again["claims"])]
    read = [(text, numbers(text, again["labels"])) for text in texts_of(executed)]
    there = [(text, found) for text, found in read if found]
    if not again["whole"]:
        there = [
            next((shown for shown in there if words in shown[0]), ("(nothing)", [])) for words, _ in again["texts"]
        ]
    for (text, found), (words, expected) in zip_longest(there, again["texts"], fillvalue=("(nothing)", [])):
        if words not in text:
            wrong.append(f"{text[:70]!r} is shown where {words!r} is computed again")
            continue
        for (value, half, written), number in (
            zip_longest(found, expected, fillvalue=None) if len(found) == len(expected) else ()
        ):
            if not math.isclose(value, number, rel_tol=1e-9, abs_tol=1.02 * half):
                wrong.append(f"{words!r}: {written} is shown, {number:.6g} computed again")
        if len(found) != len(expected):
            wrong.append(
                f"{words!r}: {len(found)} numbers are shown, {[row[2] for row in found]}; computed again: {expected}"
            )
    assert not wrong, "\n".join([f"{executed.stem} shows other numbers than its records and formulas:", *wrong])


def _wrong_findings(executed: Path, claims: dict[str, list[float]]) -> Iterator[tuple[str, str]]:
    """Findings whose values differ from those computed again, or whose verdict does not follow (Student's interval)."""
    shown = findings(executed)
    for name in sorted(set(claims) - set(shown)):
        yield name, "is not shown"
    for name, (values, _text) in shown.items():
        if name not in claims:
            yield name, "is not computed again"
        elif len(values) != len(claims[name]) or not all(
            math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
            for one, other in zip(values, claims[name], strict=True)
        ):
            yield name, f"values {values}; computed again {claims[name]}"
    yield from wrong_verdicts(executed)


def findings(executed: Path) -> dict[str, tuple[list[float], str]]:
    """claim -> the values that the notebook's file holds, and the text that is shown."""
    return {
        output.data[FINDING]["claim"]: (output.data[FINDING]["values"], output.data["text/plain"])
        for cell in nbformat.read(executed, as_version=4).cells
        for output in cell.get("outputs", [])
        if FINDING in output.get("data", {})
    }


def wrong_verdicts(executed: Path) -> Iterator[tuple[str, str]]:
    """Findings whose shown mean, interval and verdict do not follow from their values and the claim in its file."""
    from scipy import stats

    for cell in nbformat.read(executed, as_version=4).cells:
        for output in cell.get("outputs", []):
            if FINDING not in output.get("data", {}):
                continue
            finding, text = output.data[FINDING], output.data["text/plain"]
            claim = _claim(finding["claim"])
            clock = claim.get("clock", "real" if finding["where"].partition(",")[0] in RANKS else "none")
            values, exact = finding["values"], claim.get("deterministic", False) and clock == "none"
            mean, ends = sum(values) / len(values), (min(values), max(values))
            if not exact and len(values) > 1:
                ends = (
                    stats.t.interval(0.95, len(values) - 1, loc=mean, scale=stats.sem(values))
                    if min(values) < max(values)
                    else ends
                )
            told = re.search(r": (\S+)(?: \[(\S+), (\S+)\])?(?:, (\d+) seeds)?; expected", text)
            if told is None or told[4] != (None if exact else str(len(values))):
                yield finding["claim"], f"is shown as {text!r}"
                continue
            shown = (mean,) if told[2] is None and ends[0] == ends[1] else (mean, *ends)
            for written, number in zip(filter(None, told.groups()[:3]), shown, strict=True):
                if not _rounds_to(number, written):
                    yield finding["claim"], f"{written} is shown, {number:.6g} follows from its values"
            word = text.partition("\n")[0].partition(": ")[2]
            caps = sum(finding["censored"]) or sum(value >= claim.get("cap", math.inf) for value in values)
            words = {"censored"} if caps else _words(claim, finding["size"], (mean, *ends), len(values), exact)
            if word not in words:
                yield finding["claim"], f"{word!r} is shown, its interval is {ends}"


def _rounds_to(number: float, written: str) -> bool:
    """Whether a number is the written one, as far as its digits say."""
    digits, _, power = written.partition("e")
    unit = 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))
    return abs(float(written) - number) <= 0.5 * unit * (1 + 1e-9)


def _claim(name: str) -> dict[str, Any]:
    import yaml

    from workbench.resources import shared

    key, _, identity = name.partition("/")
    files = (shared("papers") / key / "claims").glob("*.yaml")
    found: dict[str, Any] = next(
        one for file in files for one in (yaml.safe_load(file.read_text()).get("claims") or ()) if one["id"] == identity
    )
    return found


def _words(claim: dict[str, Any], size: str, found: tuple[float, float, float], count: int, exact: bool) -> set[str]:
    """The verdicts that are possible for a mean with its interval and the expected values."""
    if count < 5 and not exact:
        return {"underpowered"}
    paper = claim.get("scale", "any") == "paper" and size != "full"
    low, high, strict = _ends(claim["reduced" if paper else "expected"])
    full_low, full_high, _ = _ends(claim["expected"])
    mean, least, most = found
    inside = low < least and most < high if strict else low <= least and most <= high
    outside = (most <= low or least >= high) if strict else (most < low or least > high)
    # The value of no effect, and the ends of the paper's own values, nearer and farther.
    one_end = _ends(claim.get("reduced", claim["expected"]))
    zero = claim.get("no_effect", next((end for end in one_end[:2] if one_end[2] and end in (0, 1)), None))
    two_ends = math.isfinite(full_low) and math.isfinite(full_high)
    if zero is not None and zero <= low:
        effect = claim.get("effect", full_low if two_ends and zero <= full_low else -math.inf)
        if least > (high if math.isfinite(high) or not two_ends else full_high):
            return {"overshoots"}
        if not inside and (most < zero or (mean < zero and most < effect)):
            return {"points the other way"}
    if zero is not None and zero >= high:
        effect = claim.get("effect", full_high if two_ends and zero >= full_high else math.inf)
        if most < (low if math.isfinite(low) or not two_ends else full_low):
            return {"overshoots"}
        if not inside and (least > zero or (mean > zero and least > effect)):
            return {"points the other way"}
    if inside:
        return {"same direction at reduced scale" if paper else "reproduced"}
    return {"not reproduced" if outside or exact else "underpowered"}


def _ends(expected: dict[str, Any]) -> tuple[float, float, bool]:
    """The ends of an expectation, and whether they are excluded."""
    match expected:
        case {"above": low}:
            return low, math.inf, True
        case {"below": high}:
            return -math.inf, high, True
        case {"between": [low, high]}:
            return low, high, False
        case {"value": value, **off}:
            far = off["abs"] if "abs" in off else abs(value) * off["rel"]
            return value - far, value + far, False
    raise AssertionError(f"{expected} is no expectation")
