"""Plans `workbench reproduce`: which notebooks to execute, with which parameters, in which order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from workbench import resources
from workbench.errors import ConfigError
from workbench.experiments.notebook_catalogue import find_notebook, notebooks_about, paper_keys, parameters_of
from workbench.naming import unknown
from workbench.papers.claims import Size, find_claim, read_claims
from workbench.papers.sizes import read_sizes, values_at

ALL = "all"
HEADLINES = "headlines"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One notebook to execute.

    Attributes:
        notebook: its file.
        papers: keys of the papers whose claims it tests.
        parameters: those of its size, overridden by the given ones.
        ranks: keys of ranks that a pool can lend to it, such as "local:4".
        is_virtual: whether it may run at the same time as others: see `sizes.Sizes.virtual`.
    """

    notebook: Path
    papers: tuple[str, ...]
    parameters: Mapping[str, Any]
    ranks: tuple[str, ...]
    is_virtual: bool = False

    @property
    def name(self) -> str:
        return self.notebook.stem


def keys_with_claims() -> tuple[str, ...]:
    """Return the keys of the papers with claims."""
    return tuple(key for key in paper_keys() if any((resources.shared("papers") / key / "claims").glob("*.yaml")))


def claimed_notebooks() -> dict[str, tuple[str, ...]]:
    """Return name of a notebook -> keys of its claims' papers, for each notebook with claims."""
    found: dict[str, list[str]] = {}
    for key in keys_with_claims():
        for path in sorted((resources.shared("papers") / key / "claims").glob("*.yaml")):
            found.setdefault(path.stem, []).append(key)
    return {name: tuple(found[name]) for name in sorted(found)}


def headline_notebooks() -> tuple[Path, ...]:
    """Return the notebooks that test a claim with `headline: true`.

    Raises:
        ConfigError: there is no such claim.
    """
    claims = [claim for key in keys_with_claims() for claim in read_claims(key).claims if claim.headline]
    if not claims:
        raise ConfigError("no claim is a headline: write `headline: true` in a claim, or name a notebook")
    return tuple(map(resources.notebook, sorted({claim.notebook for claim in claims})))


def plan(
    name: str, size: Size, *, claim: str | None = None, parameters: Mapping[str, Any] | None = None
) -> tuple[Job, ...]:
    """Return the notebooks to execute. Notebooks that share ranks follow each other.

    Args:
        name: key of a paper, name of a notebook, "all", or "headlines": the notebooks that test a headline.
        size: the size.
        claim: only the notebook that tests this claim: its id, or PAPER/ID.
        parameters: they override those of the size. Each notebook gets only the parameters that it has.

    Raises:
        ConfigError: there is no such paper, notebook, claim, size or parameter.
    """
    claimed = claimed_notebooks()
    paths = _paths(name, claim, claimed)
    given = dict(parameters or {})
    jobs = []
    known = {path: {parameter.name for parameter in parameters_of(path)} for path in paths}
    for word in given:
        if not any(word in names for names in known.values()):
            raise unknown("parameter", word, sorted(set().union(*known.values())))
    for path in paths:
        own = {word: value for word, value in given.items() if word in known[path]}
        sizes = read_sizes(path)
        values = {**values_at(path, size), **own}
        jobs.append(
            Job(
                notebook=path,
                papers=claimed.get(path.stem, ()),
                parameters=values,
                ranks=sizes.ranks if sizes else (),
                is_virtual=sizes is not None and size in sizes.virtual and not own.get("launcher"),
            )
        )
    return tuple(sorted(jobs, key=lambda job: (job.ranks, job.name)))


def _paths(name: str, claim: str | None, claimed: Mapping[str, tuple[str, ...]]) -> tuple[Path, ...]:
    if claim is not None:
        paper = name if name in paper_keys() else ""
        found = find_claim(claim if "/" in claim else f"{paper}/{claim}")
        if paper and found.paper != paper:
            raise ConfigError(f"--claim {claim} is a claim of {found.paper}, not of {paper}: name that paper")
        return (resources.notebook(found.notebook),)
    if name == ALL:
        if not claimed:
            raise ConfigError("no notebook has claims yet: name a notebook")
        return tuple(map(resources.notebook, claimed))
    if name == HEADLINES:
        return headline_notebooks()
    if name in paper_keys():
        own = tuple(resources.notebook(notebook) for notebook, keys in claimed.items() if name in keys)
        return own or notebooks_about(name)
    if Path(name).suffix == ".ipynb" or name in resources.notebooks():
        return (find_notebook(name),)
    raise unknown("paper or notebook", name, (ALL, HEADLINES, *paper_keys(), *resources.notebooks()))
