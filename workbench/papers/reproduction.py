"""Notebooks executed one after the other, and a record of each: what `workbench reproduce` does."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, final

from workbench import resources
from workbench.errors import ConfigError
from workbench.experiments.notebooks import run_notebook
from workbench.experiments.record import versions
from workbench.papers import history
from workbench.papers.claims import Claim, Size, read_claims
from workbench.papers.plan import Job
from workbench.papers.rank_pool import Lender
from workbench.papers.records import (
    IDENTITY,
    findings_of,
    harvest,
    notebook_digest,
    only_writer,
    read_record,
    record_file,
    write_record,
)
from workbench.papers.site import machine, without_paths
from workbench.plots.html import export_html

Status = Literal["finished", "failed", "there already"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one notebook.

    Attributes:
        seconds: of this execution, or of that which the record is of.
        error: why it failed.
        notes: what it did not tell.
    """

    name: str
    papers: tuple[str, ...]
    status: Status
    seconds: float
    executed: Path
    error: str = ""
    notes: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """How notebooks are executed, and where what they leave goes.

    Attributes:
        size, site: of the records.
        output: folder of the executed notebooks and their pages.
        records: folder of the records, laid out as `papers/`.
        options: of the command that makes such a record again.
        again: execute also what has a record already.
        timeout_s: of each notebook.
        say: is told how it goes, a line at a time.
    """

    size: Size
    site: str
    output: Path
    records: Path
    options: str = ""
    again: bool = False
    timeout_s: float | None = None
    say: Callable[[str], None] = print

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Execute them; goes on after one that fails. Whatever ends it, no rank and no kernel is left behind.

        Raises:
            ConfigError: somebody else writes there, or claims are to be recorded in their own folder before they are committed.
        """
        papers = resources.shared("papers")
        if self.records.resolve() == papers.resolve():
            refuse_uncommitted(jobs, papers)
        commit, code = history.commit_of(papers), history.code_digest()
        identities = [self.identify(job, code) for job in jobs]
        before = [None if self.again else self._recorded_s(*each) for each in zip(jobs, identities, strict=True)]
        outcomes: list[Outcome] = []
        lender = Lender(lambda words: self.say(f"  {words}"))
        apart = self.records.resolve() != self.output.resolve()
        with only_writer(self.output), only_writer(self.records) if apart else nullcontext():
            try:
                for place, (job, identity) in enumerate(zip(jobs, identities, strict=True)):
                    todo = [other for other, seconds in zip(jobs[place:], before[place:], strict=True) if seconds is None]
                    self.say(f"[{place + 1} of {len(jobs)}] {job.name} ({self.size}){_left(todo, outcomes, self)}")
                    outcomes.append(self.one(job, {**identity, "commit": commit}, lender, before[place]))
            finally:
                lender.close()
        return outcomes

    def one(self, job: Job, identity: dict[str, Any], lender: Lender, recorded_s: float | None = None) -> Outcome:
        """Execute one, with ranks lent to it, and write its records.

        Args:
            identity: what its records say of what was executed: see `identify`, and the commit.
            recorded_s: seconds of an execution that it has a record of; then nothing is done.
        """
        executed = self.output / job.notebook.name
        about: dict[str, Any] = {"name": job.name, "papers": job.papers, "executed": executed, "parameters": job.parameters}
        if recorded_s is not None:
            self.say(f"  there already, of {recorded_s:.0f} s (--again executes it again)")
            return Outcome(status="there already", seconds=recorded_s, **about)
        for path in (executed, executed.with_suffix(".html")):
            path.unlink(missing_ok=True)  # of an earlier execution
        began = time.monotonic()
        try:
            claims = {key: {claim.id: claim for claim in read_claims(key).claims} for key in job.papers}
            with lender.lend(job.ranks):
                run_notebook(job.notebook, executed, dict(job.parameters), timeout_s=self.timeout_s)
            seconds = round(time.monotonic() - began, 1)
            export_html(executed, executed.with_suffix(".html"))
            facts = {**identity, "seconds": seconds, "command": f"workbench reproduce {job.name} {self.options}".strip()}
            notes = self._record(job, facts, claims, executed)
        except Exception as error:  # noqa: BLE001 - whatever became of one notebook, the others are executed
            seconds = round(time.monotonic() - began, 1)
            if executed.exists():
                export_html(executed, executed.with_suffix(".html"))
            self.say(f"  failed after {seconds:.0f} s: {error or type(error).__name__}")
            told = "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
            return Outcome(status="failed", seconds=seconds, error=told, **about)
        self.say(f"  finished in {seconds:.0f} s")
        for note in notes:
            self.say(f"  {note}")
        return Outcome(status="finished", seconds=seconds, notes=tuple(notes), **about)

    def identify(self, job: Job, code: str) -> dict[str, Any]:
        """What tells an execution from another: code, notebook, parameters, size and site."""
        own = {"notebook_sha256": notebook_digest(job.notebook), "parameters": without_paths(job.parameters)}
        return {**own, "code_sha256": code, "size": self.size, "site": self.site}

    def _recorded_s(self, job: Job, identity: Mapping[str, Any]) -> float | None:
        """Seconds of an earlier execution of just this, of the same code; None if it is to be done."""
        seconds = None
        for key in job.papers or ("",):
            try:
                facts = read_record(record_file(self.records, key, job.name, self.size, self.site)).facts
                claims = {claim.id: claim.digest for claim in read_claims(key).claims}
            except ConfigError:
                return None
            if any(facts[name] != identity[name] for name in IDENTITY):
                return None
            if any(claims.get(name) != found["digest"] for name, found in facts["findings"].items()):
                return None
            seconds = float(facts["seconds"])
        return seconds

    def _record(self, job: Job, facts: dict[str, Any], claims: Mapping[str, Mapping[str, Claim]], executed: Path) -> list[str]:
        """Write the records of what a notebook told; returns what there is to say of it: verdicts, and claims it told nothing of."""
        findings = harvest(executed)
        words = []
        more: dict[str, Any] = {"notebook": job.name, "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
        more["versions"] = {"python": platform.python_version(), **versions()}
        for key in job.papers:
            own = {name: claim for name, claim in claims[key].items() if claim.notebook == job.name}
            kept = findings_of(key, findings, claims[key])
            stray = sorted(set(kept) - set(own))
            if stray:
                raise ConfigError(f"{job.name} tells of {', '.join(stray)}, which {key}/claims/{job.name}.yaml does not claim")
            for name, claim in own.items():
                if name in kept:
                    words.append(f"{claim.name}: {kept[name]['verdict']}")
                elif claim.expectation_at(self.size) is not None:
                    words.append(f"{claim.name}: the notebook tells nothing of it here")
            write_record(record_file(self.records, key, job.name, self.size, self.site), {**facts, **more, "paper": key, "findings": kept})
        others = {found.claim.partition("/")[0] for found in findings} - set(job.papers)
        if others:
            raise ConfigError(f"{job.name} tells of claims of {', '.join(sorted(others))}, which have no file of it")
        return words


def refuse_uncommitted(jobs: Sequence[Job], papers: Path) -> None:
    """Expectations are committed before anything is recorded of them.

    Raises:
        ConfigError: there is no repository, or a claims file differs from what is committed.
    """
    if not history.has_history(papers):
        raise ConfigError(f"{papers} is in no git repository, which would show that claims were there before records: leave --update out")
    for job in jobs:
        for key in job.papers:
            path = papers / key / "claims" / f"{job.name}.yaml"
            if history.uncommitted(path):
                raise ConfigError(f"{path} is not committed as it is: commit what is expected before it is measured")


def _left(jobs: Sequence[Job], outcomes: Sequence[Outcome], how: Reproduction) -> str:
    """About how long the rest takes: what each took before, else the mean of those that ran."""
    ran = [outcome.seconds for outcome in outcomes if outcome.status == "finished"]
    usual = sum(ran) / len(ran) if ran else None
    total = 0.0
    for job in jobs:
        before = [_seconds(record_file(how.records, key, job.name, how.size, how.site)) for key in job.papers]
        known = next((seconds for seconds in before if seconds is not None), usual)
        if known is None:
            return ""
        total += known
    return f", about {total:.0f} s left" if total < 120 else f", about {total / 60:.0f} min left"


def _seconds(path: Path) -> float | None:
    try:
        return float(read_record(path).facts["seconds"])
    except ConfigError:
        return None
