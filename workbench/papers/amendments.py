"""The amendment log: each edit of an expectation, a metric or a parameter, from git, in `papers/KEY/amendments.json`.

The file is committed, so that pages can be made without git's history. `workbench papers check` compares it with the
history.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, final

from workbench import resources
from workbench.errors import ConfigError, WorkbenchError
from workbench.experiments.yaml_file import parse_yaml
from workbench.papers import history
from workbench.trace.files.atomic import write_atomic

ENTRIES = ("kind", "metric", "expected", "reduced", "scale", "deterministic", "sizes")
SIZES = ("ci", "full")  # no claim is tested at the size smoke
CHANGE = re.compile(r"^:\d+ \d+ ([0-9a-f]+) ([0-9a-f]+) \w\t(.+)$")
NONE = "(none)"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Amendment:
    """One edit.

    Attributes:
        date: when it was committed.
        commit: the commit.
        of: id of the claim, or name of the notebook.
        entry: the edited entry of the claim, such as "metric", or the parameter, such as "ci: batch_size".
        before, after: its two values, as text.
        measured: whether a record of the notebook was committed before.
    """

    date: str
    commit: str
    of: str
    entry: str
    before: str
    after: str
    measured: bool


def amendments_file(papers: Path, key: str) -> Path:
    """Return the path of a paper's amendment log."""
    return papers / key / "amendments.json"


def read_amendments(papers: Path, key: str) -> tuple[Amendment, ...]:
    """Read the amendment log of a paper; empty if it has none.

    Raises:
        ConfigError: the file is no amendment log.
    """
    path = amendments_file(papers, key)
    if not path.is_file():
        return ()
    try:
        return tuple(Amendment(**item) for item in json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise ConfigError(f"{path} is no amendment log: run `workbench papers table`") from None


def write_amendments(papers: Path, key: str) -> Path | None:
    """Write the amendment log of a paper from git's history. Return its path; None if there is nothing to write."""
    found = amendments_in_git(papers, key)
    if found is None or found == read_amendments(papers, key):
        return None
    path = amendments_file(papers, key)
    lines = ",\n".join(json.dumps(asdict(item), ensure_ascii=False) for item in found)
    write_atomic(path, f"[\n{lines}\n]\n")
    return path


def is_complete(papers: Path, key: str) -> bool:
    """Return True if the log has the edits of git's history, or if there is no complete history to compare with.

    Edits that were committed after the log may be missing.
    """
    in_git = amendments_in_git(papers, key)
    if in_git is None or (history.git(papers, "rev-parse", "--is-shallow-repository") or "").strip() == "true":
        return True
    logged = read_amendments(papers, key)
    path = amendments_file(papers, key)
    written = (history.git(papers, "log", "-1", "--format=%cI", "--", str(path)) or "").strip()
    return {item for item in in_git if not written or item.date <= written} <= {*logged} <= {*in_git}


def amendments_in_git(papers: Path, key: str) -> tuple[Amendment, ...] | None:
    """Return all edits of a paper's claims, and of the parameters of their notebooks; None without a git history."""
    commits = _commits(papers, key)
    if commits is None:
        return None
    claimed = {name for commit in commits for kind, name in commit.changes if kind == "claims"}
    if not claimed:
        return ()
    texts = history.blobs(papers, {blob for commit in commits for pair in commit.changes.values() for blob in pair})
    for commit in commits:
        for (kind, _notebook), (old, new) in commit.changes.items():
            if kind in ("claims", "sizes") and new in texts and not _is_yaml(texts[new]):
                texts[new] = texts.get(old, "")  # no edit: the next version is compared with the one before
    recorded: set[str] = set()
    found = []
    for commit in commits:
        edits = [*_edits_of_claims(commit, texts), *_edits_of_parameters(commit, texts, claimed)]
        for notebook, of, entry, before, after in edits:
            about = {"of": of, "entry": entry, "before": before, "after": after}
            found.append(Amendment(date=commit.date, commit=commit.sha, **about, measured=notebook in recorded))
        recorded |= {name for kind, name in commit.changes if kind == "record"}
    return tuple(found)


@final
@dataclass(frozen=True, slots=True)
class _Commit:
    """A commit: (kind of file, notebook) -> the two blobs of the file, before and after."""

    sha: str
    date: str
    changes: dict[tuple[str, str], tuple[str, str]]


_Edit = tuple[str, str, str, str, str]  # notebook, claim or notebook, entry, before, after


def _commits(papers: Path, key: str) -> list[_Commit] | None:
    """The commits that changed claims, records, sizes or notebooks, the oldest first."""
    notebooks = resources.shared("notebooks")
    if not history.has_history(papers):
        return None
    places = {
        "claims": (papers / key / "claims", ".yaml"),
        "record": (papers / key / "records", ".json"),
        "sizes": (notebooks / "sizes", ".yaml"),
        "notebook": (notebooks, ".ipynb"),
    }
    top = Path((history.git(papers, "rev-parse", "--show-toplevel") or "").strip()).resolve()
    kinds = {}
    for kind, (folder, suffix) in places.items():
        try:
            kinds[str(folder.resolve().relative_to(top))] = (kind, suffix)
        except ValueError:
            continue  # notebooks of another repository
    text = history.git(
        papers,
        *("log", "--no-merges", "--reverse", "--raw", "--no-abbrev", "--no-renames", "--format=%H %cI"),
        *("--", *(f":/{folder}" for folder in kinds)),
    )
    if text is None:
        return None
    commits: list[_Commit] = []
    for line in text.splitlines():
        change = CHANGE.match(line)
        if change:
            place, _slash, file = change[3].rpartition("/")
            kind, suffix = kinds.get(place, ("", ""))
            if kind and file.endswith(suffix):
                # Of a record's name, NOTEBOOK.SIZE.SITE.json, the notebook is the first part.
                notebook = file.partition(".")[0] if kind == "record" else file.removesuffix(suffix)
                commits[-1].changes[kind, notebook] = (change[1], change[2])
        elif line:
            sha, date = line.split(" ", 1)
            commits.append(_Commit(sha, date, {}))
    return commits


def _edits_of_claims(commit: _Commit, texts: Mapping[str, str]) -> Iterator[_Edit]:
    old: dict[str, tuple[str, Mapping[str, Any]]] = {}
    new: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for (kind, notebook), blobs in commit.changes.items():
        if kind == "claims":
            for blob, found in zip(blobs, (old, new), strict=True):
                found.update({str(item.get("id")): (notebook, item) for item in _list_of(texts.get(blob), "claims")})
    renamed = _renamed(old, new)
    for name, (notebook, before) in old.items():
        if name in renamed:
            continue
        if name not in new:
            yield notebook, name, "claim", str(before.get("statement", "")), "deleted"
            continue
        after = new[name][1]
        for entry in ENTRIES:
            if before.get(entry) != after.get(entry):
                yield new[name][0], name, entry, _text(before.get(entry)), _text(after.get(entry))


_Claims = Mapping[str, tuple[str, Mapping[str, Any]]]  # id -> notebook, the claim's entries


def _renamed(old: _Claims, new: _Claims) -> set[str]:
    """The ids that became another id of the same notebook, with nothing else amended."""

    def content(claim: tuple[str, Mapping[str, Any]]) -> tuple[str, ...]:
        notebook, entries = claim
        return (notebook, *(_text(entries.get(entry)) for entry in ENTRIES))

    added = {content(claim) for name, claim in new.items() if name not in old}
    return {name for name, claim in old.items() if name not in new and content(claim) in added}


def _edits_of_parameters(commit: _Commit, texts: Mapping[str, str], claimed: set[str]) -> Iterator[_Edit]:
    for (kind, notebook), (old, new) in commit.changes.items():
        if notebook not in claimed or old not in texts or new not in texts:
            continue
        if kind == "sizes":
            before, after = (_sizes(texts[blob]) for blob in (old, new))
        elif kind == "notebook":
            before, after = (_defaults(texts[blob]) for blob in (old, new))
        else:
            continue
        for name in dict.fromkeys([*before, *after]):
            if before.get(name) != after.get(name):
                yield notebook, notebook, name, before.get(name, NONE), after.get(name, NONE)


def _sizes(text: str) -> dict[str, str]:
    """Return "SIZE: NAME" -> value, of the parameters in a file of sizes."""
    content = _mapping(text)
    return {
        f"{size}: {name}": _text(value)
        for size in SIZES
        for name, value in (content.get(size) or {}).items()
        if isinstance(content.get(size), dict)
    }


def _defaults(text: str) -> dict[str, str]:
    """Return "default: NAME" -> value, of the parameters of a notebook."""
    try:
        cells = json.loads(text)["cells"]
        sources = [
            "".join(cell["source"]) for cell in cells if "parameters" in cell.get("metadata", {}).get("tags", [])
        ]
        lines = [line for source in sources for line in ast.parse(source).body]
    except (ValueError, KeyError, TypeError, SyntaxError):
        return {}
    return {
        f"default: {ast.unparse(line.target)}": ast.unparse(line.value)
        for line in lines
        if isinstance(line, ast.AnnAssign) and line.value is not None
    }


def _list_of(text: str | None, name: str) -> Sequence[Mapping[str, Any]]:
    found = _mapping(text or "").get(name)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


@lru_cache(maxsize=1024)  # a version is compared with the one before and with the one after
def _mapping(text: str) -> Mapping[str, Any]:
    return parse_yaml(text, "an old version")


def _is_yaml(text: str) -> bool:
    """Return True if a version of a file can be read."""
    try:
        _mapping(text)
    except WorkbenchError:
        return False
    return True


def _text(value: Any) -> str:
    return NONE if value is None else " ".join(str(value).split())
