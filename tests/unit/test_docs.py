"""README and the pages in `docs/`: their links, commands and code."""

from __future__ import annotations

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
