"""`workbench artefact`: bundles the evidence for a paper's claims in one file, for an artefact evaluation."""

from __future__ import annotations

import zipfile
from importlib import metadata
from pathlib import Path

from workbench import resources
from workbench.errors import ConfigError
from workbench.experiments.notebook_catalogue import paper_keys, question_of
from workbench.naming import unknown
from workbench.papers import history
from workbench.papers.claims import SIZES
from workbench.papers.plan import claimed_notebooks
from workbench.papers.records import Record
from workbench.papers.sizes import sizes_file
from workbench.papers.table import BEGIN, END
from workbench.papers.verdict_rows import Paper, Row, read_paper
from workbench.papers.verdicts import number

DAY = (1980, 1, 1, 0, 0, 0)  # date of every file in the archive, so that equal content gives equal bytes

CONTENTS = """
- `notebooks/`, with `notebooks/sizes/`: the notebooks, and their parameters at the sizes smoke, ci and full
- `papers/{key}/card.md`: what is implemented, what deviates from the paper, what the paper does not say
- `papers/{key}/claims/`: the expectations, in files that are older than the records
- `papers/{key}/records/`, `papers/{key}/figures/`: measured values and figures, by size and site
- `environment.txt`, `constraints.txt`: the versions of all installed packages, and the tested versions
""".strip()
INSTALL = """
The package sgd-workbench {version}, with these versions, in a new environment:

    pip install --constraint constraints.txt 'sgd-workbench[mpi,notebooks]'
    workbench doctor
""".strip()
RUN = """
In this folder:

    export WORKBENCH_SHARE=$PWD
    workbench reproduce {key} --size smoke
    workbench reproduce {key} --size ci

The same command continues where it stopped. Its folder holds `index.html`: the verdicts, with links to every executed notebook.
""".strip()


def write_artefact(key: str, path: Path) -> Path:
    """Write an archive: notebooks, sizes, claims, records, figures, card, package versions, and instructions.

    Its folder has the layout of $WORKBENCH_SHARE. Equal content gives equal bytes.

    Args:
        key: key of the paper.
        path: the archive.

    Returns:
        The path.

    Raises:
        ConfigError: the paper does not exist or has no claims, or the file cannot be written.
    """
    if key not in paper_keys():
        raise unknown("paper", key, paper_keys())
    names = [name for name, keys in claimed_notebooks().items() if key in keys]
    if not names:
        raise ConfigError(f"{key} has no claims yet: there is nothing to bundle")
    content = {**_files(key, names), **_written(key, names)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in sorted(content):
                about = zipfile.ZipInfo(f"{key}/{name}", DAY)
                about.compress_type, about.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                archive.writestr(about, content[name])
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): name another file with --output") from error
    return path


def _files(key: str, names: list[str]) -> dict[str, bytes]:
    """Return name in the archive -> content, for copied files.

    They include claims of other papers that these notebooks test.
    """
    papers, found = resources.shared("papers"), {}
    for name in names:
        notebook = resources.notebook(name)
        found[f"notebooks/{notebook.name}"] = notebook.read_bytes()
        if sizes_file(notebook).is_file():
            found[f"notebooks/sizes/{name}.yaml"] = sizes_file(notebook).read_bytes()
        for other in claimed_notebooks()[name]:
            for file in ("card.md", f"claims/{name}.yaml"):
                found[f"papers/{other}/{file}"] = (papers / other / file).read_bytes()
    for folder in ("records", "figures"):
        for path in sorted((papers / key / folder).glob("[!.]*")):
            found[f"papers/{key}/{folder}/{path.name}"] = path.read_bytes()
    constraints = papers.parent / "constraints.txt"
    if constraints.is_file():
        found["constraints.txt"] = constraints.read_bytes()
    return found


def _written(key: str, names: list[str]) -> dict[str, bytes]:
    paper = read_paper(key)
    installed = sorted({f"{item.metadata['Name']}=={item.version}" for item in metadata.distributions()}, key=str.lower)
    texts = {
        "ARTEFACT.md": appendix(paper, names),
        "environment.txt": "\n".join(installed) + "\n",
        "papers/README.md": f"# Papers\n\n{BEGIN}\n{END}\n",
    }
    return {name: text.encode() for name, text in texts.items()}


def appendix(paper: Paper, names: list[str]) -> str:
    """Return the appendix for an artefact evaluation, in Markdown, from claims and records."""
    key = paper.key
    commit = history.commit_of(resources.shared("papers"))
    at = f", at commit {commit['sha'][:12]}" if commit else ""
    tested = "notebook tests" if len(names) == 1 else "notebooks test"
    abstract = (
        f"{len(names)} {tested} {len(paper.rows)} claims of {key} or of its reviewers. Each claim has expected values. "
        f"There are {len(paper.records)} records of earlier executions. One rule turns measured values into a verdict."
    )
    parts = [
        f"# Artefact: the claims of {key} and their measurements",
        "## Abstract",
        abstract,
        "## Contents",
        CONTENTS.format(key=key),
        "## Requirements",
        _requirements(paper),
        "## Install",
        INSTALL.format(version=f"{metadata.version('sgd-workbench')}{at}"),
        "## How to run",
        RUN.format(key=key),
        _notebooks(paper, names),
        "## Claims, one by one",
        *[_claim(row) for row in paper.rows],
        "## Durations",
        _times(paper.records),
    ]
    return "\n\n".join(parts) + "\n"


def _requirements(paper: Paper) -> str:
    machines = {record.site: record.facts["machine"] for record in paper.records}
    lines = [
        f"- {site}: {about.get('cores')} cores ({about.get('cpu', 'unknown')}), {about.get('memory_gib', '?')} GiB"
        + (f", {', '.join(about['gpus'])}" if about.get("gpus") else "")
        for site, about in sorted(machines.items())
    ]
    needs = [f"- for `{row.claim.id}` at the paper's scale: {row.claim.needs}" for row in paper.rows if row.claim.needs]
    sizes = (
        "The sizes smoke and ci need two cores and no GPU; size full is the paper's scale, with its data and hardware."
    )
    return "\n".join([sizes, *(["", "Records are from", ""] if lines else []), *lines, *needs])


def _notebooks(paper: Paper, names: list[str]) -> str:
    lines = ["| notebook | question | took |", "|---|---|---|"]
    for name in names:
        took = [
            f"{record.facts['seconds']:.0f} s ({record.size}, {record.site})"
            for record in paper.records
            if _is_of(record, name)
        ]
        lines.append(f"| {name} | {question_of(resources.notebook(name))} | {', '.join(took) or 'not recorded'} |")
    return "\n".join(lines)


def _is_of(record: Record, name: str) -> bool:
    return bool(record.facts["notebook"] == name)


def _claim(row: Row) -> str:
    claim = row.claim
    size = row.record.size if row.record else claim.sizes[0]
    expected = claim.expectation_at(size)
    seconds = f", about {row.record.facts['seconds']:.0f} s" if row.record else ""
    lines = [
        f"### {claim.id}",
        "",
        f"{claim.statement} ({claim.cited}).",
        "",
        f"- run: `workbench reproduce {claim.paper} --claim {claim.id} --size {size}`{seconds}",
        f"- measured: {claim.metric}",
        f"- expected: {expected if expected is not None else f'{claim.expected}, only at size full'}",
    ]
    if row.record:
        lines.append(f"- recorded: {row.ours}, {row.spread} ({row.where}): **{row.word}**")
        lines.append(f"- variation to expect: {_variation(row)}")
    else:
        lines.append(f"- recorded: nothing yet: **{row.verdict.word}**")
    if claim.explanation:
        lines.append(f"- our explanation, not tested: {' '.join(claim.explanation.split())}")
    return "\n".join(lines)


def _variation(row: Row) -> str:
    assert row.record is not None
    values = row.record.facts["findings"][row.claim.id]["values"]
    if row.exact:
        return "none on the same versions"
    return f"single seeds from {number(min(values))} to {number(max(values))}"


def _times(records: tuple[Record, ...]) -> str:
    lines = []
    for size in SIZES:
        for site in sorted({record.site for record in records if record.size == size}):
            seconds = sum(record.facts["seconds"] for record in records if (record.size, record.site) == (size, site))
            lines.append(f"- size {size} on {site}: {seconds / 60:.1f} min in all")
    return "\n".join(lines) or "Not recorded yet."
