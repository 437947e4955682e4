"""The claims in git: whether they are committed, and their content at a record's commit."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

from workbench import resources
from workbench.errors import WorkbenchError
from workbench.papers.claims import Claim, read_claims

GIT_S = 20.0
PACKAGE = Path(resources.__file__).parent
# In papers/.
GENERATED = tuple(f":(exclude){path}" for path in ("*/records/*", "*/figures/*", "README.md", "*/card.md"))


def git(folder: Path, *arguments: str) -> str | None:
    """Run git in a folder and return its output; None if git is missing or fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def blobs(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return hash -> text, for each blob that exists."""
    asked = "".join(f"{name}\n" for name in sorted(names))
    command = ["git", "-C", str(folder), "cat-file", "--batch"]
    try:
        done = subprocess.run(command, input=asked.encode(), capture_output=True, timeout=GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found, output = {}, BytesIO(done.stdout)  # a slice of the rest for each blob would copy the rest each time
    while head := output.readline():
        name, *about = head.decode().split()
        if len(about) == 2:  # else "missing"
            found[name] = output.read(int(about[1])).decode(errors="replace")
            output.readline()
    return found


def has_history(papers: Path) -> bool:
    """Return True if the folder of papers is tracked in a git repository."""
    return bool((git(papers, "ls-files", "README.md") or "").strip())


def uncommitted(path: Path) -> bool:
    """Return True if a file differs from its committed version, or is not tracked."""
    status = git(path.parent, "status", "--porcelain", "--ignored", "--", path.name)
    return status is None or bool(status.strip())


def commit_of(papers: Path) -> dict[str, Any] | None:
    """Return the commit for a record, and whether code, notebooks or claims differ from it; None without a repository.

    The repository is that of the papers, or that of the package if the papers are in none.
    """
    if not has_history(papers):
        papers = PACKAGE.parent / "papers"
        if not has_history(papers):
            return None
    sha = (git(papers, "rev-parse", "HEAD") or "").strip()
    status = git(papers, "status", "--porcelain", "--untracked-files=all", "--", ":/", *GENERATED)
    return {"sha": sha, "dirty": bool((status or "").strip())}


def claims_at(papers: Path, key: str, notebook: str, sha: str) -> dict[str, Claim] | None:
    """Return id -> claim of a notebook at a commit; None if the commit or the file does not exist or cannot be read."""
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
    """Return True if the commit is in this repository's history."""
    return git(papers, "cat-file", "-e", f"{sha}^{{commit}}") is not None
