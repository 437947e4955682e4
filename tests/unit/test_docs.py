"""README and the pages in `docs/`: their links, commands and code."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench.cli.main import _parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [path for path in PAGES if "_build" not in path.parts]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
NO_COMMAND = ("--engine", "--kernel", "-k", "activate")  # options after which `workbench` is a name
GENERATED = {"docs/reference.md", "docs/notebooks.md", "docs/papers/cards.md"}  # by docs/build.py


def blocks(path: Path, language: str) -> list[str]:
    """The code blocks of a page."""
    return [text for name, text in BLOCK.findall(path.read_text(encoding="utf-8")) if name == language]


def commands(path: Path) -> Iterator[str]:
    """The lines of a page's shell blocks, without comments; continued lines are joined."""
    for block in blocks(path, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield line.strip()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    text = BLOCK.sub("", path.read_text(encoding="utf-8"))
    for target in LINK.findall(text):
        file, _, anchor = target.partition("#")
        if "://" in target or not file:
            continue
        found = (path.parent / file).resolve()
        assert found.exists() or str(found.relative_to(ROOT)) in GENERATED, f"{target}: no such file"
        if anchor and found.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{target}: no such heading"


def slug(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_understood(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for line in commands(path):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quotation over several lines
            continue
        if words[:1] == ["make"]:
            assert words[1] in targets, line
        before = ["", *words]
        for start in (n for n, word in enumerate(words) if word == "workbench" and before[n] not in NO_COMMAND):
            ends = [place for place, word in enumerate(words) if word in ("|", "&&", ";", ">", "&") and place > start]
            given = words[start + 1 : min(ends, default=len(words))]
            status: object = 0
            try:
                _parser().parse_args(given)
            except SystemExit as end:  # --help and --version end it, too
                status = end.code
            assert status == 0, f"{line}\n{capsys.readouterr().err}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_is_python(path: Path) -> None:
    for text in blocks(path, "python"):
        plain = "\n".join("pass" if line.lstrip().startswith(("%", "!")) else line for line in text.splitlines())
        compile(plain, str(path), "exec")


MEASURED = re.compile(r"([-+]?\d+(?:\.\d+)?) \[([-+]?\d+(?:\.\d+)?), ([-+]?\d+(?:\.\d+)?)\]")
Triple = tuple[float, float, float]


def known_values() -> Iterator[Triple]:
    """Means with their intervals: of claims, of notebooks' answers, of decisions and of the benchmarks' records."""
    sources = [ROOT / "papers" / "README.md", ROOT / "records" / "README.md", *(ROOT / "decisions").glob("*.md")]
    texts = [path.read_text(encoding="utf-8") for path in sources]
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    for text in texts:
        for mean, low, high in MEASURED.findall(" ".join(text.split())):
            yield float(mean), float(low), float(high)
    for path in (ROOT / "records").glob("bench-*.json"):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if {"ratio", "low", "high"} <= row.keys():
                yield row["ratio"], row["low"], row["high"]


def test_measured_numbers_are_those_of_the_records() -> None:
    """Rounded, or with the other sign ("loses 7.7 points")."""
    known = list(known_values())
    known += [(-mean, -high, -low) for mean, low, high in known]
    for path in PAGES:
        text = re.sub(r"`[^`\n]*`", "", BLOCK.sub("", path.read_text(encoding="utf-8")))
        for words in MEASURED.findall(" ".join(text.split())):
            places = max(len(word.partition(".")[2]) for word in words)
            shown = tuple(map(float, words))
            assert any(tuple(round(value, places) for value in one) == shown for one in known), (
                f"{path.relative_to(ROOT)}: {words[0]} [{words[1]}, {words[2]}] is in no record"
            )
