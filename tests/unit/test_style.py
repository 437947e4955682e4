"""What STYLE.md says and a machine can judge."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

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
