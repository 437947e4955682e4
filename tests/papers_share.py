"""A small folder of notebooks and papers in its own repository, in place of the package's: $WORKBENCH_SHARE."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import nbformat

from workbench.papers.table import BEGIN, END

KEY = "doe2020one"
CARD = f"# {KEY}\n\nJane Doe: *One*, 2020.\n\n{BEGIN}\n{END}\n"
CLAIMS = """claims:
  - id: {name}-near-one
    source: sec. 1
    statement: the value of {name} is near one
    kind: numeric
    metric: the value
    expected: {{between: [0.9, 1.1]}}
    provenance: derived
experiments:
  - {{id: P-{name}, artefact: Fig. 1, about: ones}}
questions:
  - {{id: {name}-why, asked: review 1, question: "Why one?", cell: answer}}
"""
PARAMETERS = """size: str = "smoke"  # smoke, ci or full
seeds: list[int] = [0, 1, 2, 3, 4]  # paired
scale: float = 1.0  # of the values"""
RANKS = """from workbench import papers
with papers.ranks(2) as cluster:
    print(*[rank["pid"] for rank in cluster.ranks], cluster.id)"""
FIGURE = 'import plotly.graph_objects as go\ngo.Figure(go.Scatter(y=[1, 3, 2]), {"title": {"text": "one"}})'
FINDING = """from workbench import papers
papers.finding("%s/%s-near-one", [scale * (1 + 0.001 * seed) for seed in seeds], size=size, where="formula", how="by hand", seeds=seeds)
print("near one")"""


def write_notebook(share: Path, name: str, *cells: tuple[str, str], ranks: str = "[]", ci: str = "{}") -> Path:
    """A notebook with sizes: (tag, code) of each cell after the parameters."""
    made = [
        nbformat.v4.new_code_cell(code, metadata={"tags": [tag] if tag else []})
        for tag, code in (("parameters", PARAMETERS), *cells)
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(f"# {name}: is it one?"), *made])
    notebook.metadata["kernelspec"] = {"name": "workbench", "display_name": "Workbench", "language": "python"}
    path = share / "notebooks" / f"{name}.ipynb"
    (path.parent / "sizes").mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)
    (path.parent / "sizes" / f"{name}.yaml").write_text(
        f"smoke: {{}}\nci: {ci}\nfull: {{scale: 2.0}}\nranks: {ranks}\n"
    )
    return path


def write_claims(share: Path, name: str, text: str = CLAIMS) -> Path:
    """The claims that a notebook tests."""
    path = share / "papers" / KEY / "claims" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.format(name=name))
    return path


def finding(name: str) -> tuple[str, str]:
    """The cell that answers."""
    return "answer", FINDING % (KEY, name)


def make_share(folder: Path, *names: str) -> Path:
    """A share with those notebooks, which need no ranks, and their claims; committed."""
    papers = folder / "papers"
    (papers / KEY).mkdir(parents=True)
    (papers / "README.md").write_text(f"# Papers\n\n{BEGIN}\n{END}\n")
    (papers / KEY / "card.md").write_text(CARD)
    for name in names:
        write_notebook(folder, name, finding(name))
        write_claims(folder, name)
    git(folder, "init", "--quiet")
    commit(folder)
    return folder


def commit(folder: Path) -> str:
    """Commit all there is."""
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "all")
    return git(folder, "rev-parse", "HEAD").strip()


def git(folder: Path, *words: str) -> str:
    """What git prints there."""
    who = ("-c", "user.name=Jane", "-c", "user.email=jane@example.org", "-c", "init.defaultBranch=main")
    return subprocess.run(
        ["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True, timeout=60
    ).stdout


def facts(
    name: str, claim: Any, sha: str, values: tuple[float, ...] = (1.0, 1.01, 0.99, 1.02, 0.98), **more: Any
) -> dict[str, Any]:
    """What a record of a notebook holds, as if it had been executed."""
    from workbench.papers.verdicts import judge

    size = more.get("size", "ci")
    found = {
        "values": list(values),
        "seeds": list(range(len(values))),
        "where": "formula",
        "how": "by hand",
        "digest": claim.digest,
    }
    return {
        "notebook": name,
        "paper": claim.paper,
        "size": size,
        "site": "2-cores",
        "date": "2026-01-02T03:04:05+00:00",
        "seconds": 3.0,
        "parameters": {"size": size},
        "command": f"workbench reproduce {name} --size {size}",
        "commit": {"sha": sha, "dirty": False},
        "versions": {},
        "machine": {"cores": 2},
        "findings": {claim.id: {**found, "verdict": judge(claim, values, size).word}},
        **more,
    }
