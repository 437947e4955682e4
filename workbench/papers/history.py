"""What git knows of the claims: whether they are committed, and what they were at a record's commit."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from workbench import resources
from workbench.errors import WorkbenchError
from workbench.papers.claims import Claim, read_claims

GIT_S = 20.0
PACKAGE = Path(resources.__file__).parent
GENERATED = tuple(f":(exclude){path}" for path in ("*/records/*", "*/figures/*", "README.md", "*/card.md"))  # of the folder of papers


def git(folder: Path, *words: str) -> str | None:
    """What git prints of a folder; None where it is not there, knows nothing of it, or refuses."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def has_history(papers: Path) -> bool:
    """Whether the folder of papers is in a repository that keeps it."""
    return bool((git(papers, "ls-files", "README.md") or "").strip())


def uncommitted(path: Path) -> bool:
    """Whether a file differs from what is committed; one that git does not keep does."""
    said = git(path.parent, "status", "--porcelain", "--ignored", "--", path.name)
    return said is None or bool(said.strip())


def commit_of(papers: Path) -> dict[str, Any] | None:
    """The commit that a record is made at, and whether code, notebooks or claims differ from it; None without a repository.

    It is that of the papers' repository, or of the package's where the papers are in none.
    """
    if not has_history(papers):
        papers = PACKAGE.parent / "papers"
        if not has_history(papers):
            return None
    sha = (git(papers, "rev-parse", "HEAD") or "").strip()
    said = git(papers, "status", "--porcelain", "--untracked-files=all", "--", ":/", *GENERATED)
    return {"sha": sha, "dirty": bool((said or "").strip())}


def code_digest() -> str:
    """A hash of the package's own source: two records of the same are of the same code, whatever else was committed between."""
    root = PACKAGE
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        total.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def claims_at(papers: Path, key: str, notebook: str, sha: str) -> dict[str, Claim] | None:
    """id -> claim of a notebook as it was committed; None where that commit, or its file, is not to be had."""
    text = git(papers, "show", f"{sha}:./{key}/claims/{notebook}.yaml")
    if text is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, key, "claims", f"{notebook}.yaml")
        path.parent.mkdir(parents=True)
        path.write_text(text)
        try:
            return {claim.id: claim for claim in read_claims(key, Path(folder)).claims}
        except WorkbenchError:
            return None


def knows_commit(papers: Path, sha: str) -> bool:
    """Whether that commit is in the history that is here."""
    return git(papers, "cat-file", "-e", f"{sha}^{{commit}}") is not None
