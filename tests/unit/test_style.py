"""The rules of STYLE.md that a test can check."""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from workbench.cli.main import _parser

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "workbench").rglob("*.py"))

PLACES_OF_A_MACHINE = re.compile(
    r"/hom[e]/\w|/roo[t]/|/User[s]/\w|/wor[k]/|/opt/whee[l]s|/opt/pyp[i]"  # a folder of whoever wrote it
    r"|pythonhoste[d]\.org|(?:--extra)?-index-ur[l]|--find-link[s]"  # where somebody's packages come from
)


def project_files() -> list[Path]:
    """What git holds or would hold; all files where the sources lie without their history."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    names = (
        listing.stdout.split("\0")
        if listing.returncode == 0
        else [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")]
    )
    skipped = (".venv", ".git/", "runs/", "build/", "dist/")
    return [
        ROOT / name
        for name in names
        if name and not name.startswith(skipped) and "__pycache__" not in name and (ROOT / name).is_file()
    ]


def test_no_file_names_a_machine() -> None:
    places = []
    for path in project_files():
        if path.suffix in {".png", ".gz", ".npz", ".pdf"}:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if found := PLACES_OF_A_MACHINE.search(line):
                places.append(f"{path.relative_to(ROOT)}:{number}: {found[0]}")
    assert places == []


def test_modules_and_public_names_of_the_package_say_what_they_are() -> None:
    silent = []
    for path in PACKAGE:
        tree = ast.parse(path.read_text())
        if tree.body and not ast.get_docstring(tree):
            silent.append(str(path.relative_to(ROOT)))
        public = [
            node
            for node in tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        ]
        silent.extend(f"{path.relative_to(ROOT)}:{node.name}" for node in public if not ast.get_docstring(node))
    assert silent == []


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_carry_no_output_and_are_light(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    assert [cell["source"] for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []
    assert path.stat().st_size < 500_000


def test_kernels_is_no_package() -> None:
    """A root-level package `kernels` would hide the one of that name on the package index."""
    assert list((ROOT / "kernels").rglob("*.py")) == []


# -- words that STYLE.md lists -----------------------------------------------------------------------------------------

NOT_PROSE = re.compile(
    r"<!-- generated.*?<!-- end of the generated part -->"
    r"|```.*?```|``.*?``|`[^`]*`"  # code
    r"|\$\$.*?\$\$|\$[^$\n]+\$"  # mathematics
    r"|\]\([^)\s]*\)|https?://\S+",  # links
    re.DOTALL,
)
TABLE = re.compile(r"^\| not \| but \|\n\|---\|---\|\n((?:\|.*\|\n)+)", re.MULTILINE)


def listed_phrases() -> list[str]:
    """The left column of the table in STYLE.md."""
    table = TABLE.search((ROOT / "STYLE.md").read_text(encoding="utf-8"))
    assert table is not None, "STYLE.md has no table of words"
    return [phrase.strip() for row in table[1].splitlines() for phrase in row.split("|")[1].split(",")]


@cache
def listed_pattern() -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, listed_phrases()))})\b", re.IGNORECASE)


def found_phrases(text: str) -> list[str]:
    """The listed phrases in a text, each with the words around it. Code, links and generated parts do not count."""
    plain = " ".join(NOT_PROSE.sub(" ", TABLE.sub(" ", text)).split())
    return [plain[max(0, found.start() - 40) : found.end() + 30] for found in listed_pattern().finditer(plain)]


def markdown_texts() -> Iterator[tuple[str, str]]:
    for path in project_files():
        if path.suffix == ".md":
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def notebook_texts() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
            if cell["cell_type"] == "markdown":
                yield f"{path.name}, cell {number}", "".join(cell["source"])


def claim_texts() -> Iterator[tuple[str, str]]:
    """What readers see of the claims, except for statements and metrics: their digests hold these."""
    for path in sorted((ROOT / "papers").glob("*/claims/*.yaml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        for claim in content.get("claims", ()):
            yield f"{path.name}, {claim['id']}", claim.get("explanation", "")
        for figure in content.get("figures", ()):
            yield f"{path.name}, figure {figure['id']}", f"{figure['caption']}\n\n{figure['alt']}"


def help_texts(parser: argparse.ArgumentParser | None = None, name: str = "workbench") -> Iterator[tuple[str, str]]:
    parser = parser or _parser()
    yield name, f"{parser.description or ''}\n\n{parser.epilog or ''}"
    for action in parser._actions:
        yield f"{name} {action.dest}", action.help or ""
        if isinstance(action, argparse._SubParsersAction):
            for helped in action._choices_actions:
                yield f"{name} {helped.dest}", helped.help or ""
            for command, sub_parser in action.choices.items():
                yield from help_texts(sub_parser, f"{name} {command}")


def source_texts() -> Iterator[tuple[str, str]]:
    """Docstrings of the package, and the messages of the errors that it raises."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for path in PACKAGE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
            if isinstance(node, documented):
                yield place, ast.get_docstring(node) or ""
            elif isinstance(node, ast.Raise):
                values = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                yield place, " ".join(value for value in values if isinstance(value, str))


@pytest.mark.parametrize("source", [markdown_texts, notebook_texts, claim_texts, help_texts, source_texts])
def test_texts_have_no_phrase_that_the_style_lists(source) -> None:  # type: ignore[no-untyped-def]
    """A source that yields nothing would pass: it has the texts that readers see."""
    texts = list(source())
    assert sum(len(text.split()) for _, text in texts) > 1_000
    found = [f"{place}: ...{phrase}..." for place, text in texts for phrase in found_phrases(text)]
    assert found == []


@pytest.mark.parametrize("phrase", listed_phrases())
def test_a_listed_phrase_is_found(phrase: str) -> None:
    assert len(found_phrases(f"The rank\n{phrase.capitalize()} works.")) == 1
    assert found_phrases(f"`{phrase}` and [a page](docs/{phrase.replace(' ', '-')}.md)") == []


WITH_PICTURES = [
    path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if "\n![" in path.read_text("utf-8")
]


@pytest.mark.parametrize("path", WITH_PICTURES, ids=str)
def test_pictures_have_an_alternative_text_and_a_caption(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if picture := re.match(r"!\[(.*)\]\(", line):
            caption = next((after for after in lines[number + 1 :] if after.strip()), "")
            assert len(picture[1].split()) >= 5, f"{line}: its alternative text says what one sees"
            assert re.match(r"\*\w", caption), f"{line}: its caption, in italics, comes next"
