"""`workbench reproduce`: executes notebooks one after the other, and writes a record of each."""

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
from workbench.papers.rank_pool import RankPool
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

Status = Literal["finished", "failed", "recorded"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one notebook.

    Attributes:
        name: name of the notebook.
        papers: keys of the papers whose claims it tests.
        status: "finished", "failed", or "recorded" if a record exists.
        seconds: duration of this execution, or of the recorded one.
        executed: the executed notebook.
        error: why it failed.
        notes: verdicts, and claims without a finding.
        parameters: parameters of the notebook.
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
    """How notebooks are executed, and where their results are written.

    Attributes:
        size, site: of the records.
        output: folder of the executed notebooks and their pages.
        records: folder of the records, with the layout of `papers/`.
        options: options of the command that makes the same record again.
        again: whether to execute also notebooks with a record.
        timeout_s: limit for each notebook, in seconds.
        say: called with each line of progress.
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
        """Execute the notebooks. A failed one does not stop the others. No rank and no kernel is left.

        Raises:
            ConfigError: another process writes into these folders, or records would go to `papers/` before the
                claims are committed.
        """
        papers = resources.shared("papers")
        if self.records.resolve() == papers.resolve():
            refuse_uncommitted(jobs, papers)
        commit, code = history.commit_of(papers), history.code_digest()
        identities = [self.identify(job, code) for job in jobs]
        before = [None if self.again else self._recorded_s(*each) for each in zip(jobs, identities, strict=True)]
        outcomes: list[Outcome] = []
        pool = RankPool(lambda message: self.say(f"  {message}"))
        apart = self.records.resolve() != self.output.resolve()
        with only_writer(self.output), only_writer(self.records) if apart else nullcontext():
            try:
                for place, (job, identity) in enumerate(zip(jobs, identities, strict=True)):
                    todo = [
                        other for other, seconds in zip(jobs[place:], before[place:], strict=True) if seconds is None
                    ]
                    self.say(f"[{place + 1} of {len(jobs)}] {job.name} ({self.size}){_left(todo, outcomes, self)}")
                    outcomes.append(self.one(job, {**identity, "commit": commit}, pool, before[place]))
            finally:
                pool.close()
        return outcomes

    def one(self, job: Job, identity: dict[str, Any], pool: RankPool, recorded_s: float | None = None) -> Outcome:
        """Execute one notebook with ranks of the pool, and write its records.

        Args:
            job: the notebook.
            identity: the result of `identify`, and the commit; its records contain them.
            pool: the pool of ranks.
            recorded_s: duration of a recorded execution, in seconds; then nothing is executed.
        """
        executed = self.output / job.notebook.name
        about: dict[str, Any] = {
            "name": job.name,
            "papers": job.papers,
            "executed": executed,
            "parameters": job.parameters,
        }
        if recorded_s is not None:
            self.say(f"  already recorded ({recorded_s:.0f} s); --again executes it again")
            return Outcome(status="recorded", seconds=recorded_s, **about)
        for path in (executed, executed.with_suffix(".html")):
            path.unlink(missing_ok=True)  # files of an earlier execution
        began = time.monotonic()
        try:
            claims = {key: {claim.id: claim for claim in read_claims(key).claims} for key in job.papers}
            with pool.lend(job.ranks):
                run_notebook(job.notebook, executed, dict(job.parameters), timeout_s=self.timeout_s)
            seconds = round(time.monotonic() - began, 1)
            export_html(executed, executed.with_suffix(".html"))
            facts = {
                **identity,
                "seconds": seconds,
                "command": f"workbench reproduce {job.name} {self.options}".strip(),
            }
            notes = self._record(job, facts, claims, executed)
        except Exception as error:  # noqa: BLE001 - any error of one notebook must not stop the others
            seconds = round(time.monotonic() - began, 1)
            if executed.exists():
                export_html(executed, executed.with_suffix(".html"))
            self.say(f"  failed after {seconds:.0f} s: {error or type(error).__name__}")
            message = "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
            return Outcome(status="failed", seconds=seconds, error=message, **about)
        self.say(f"  finished in {seconds:.0f} s")
        for note in notes:
            self.say(f"  {note}")
        return Outcome(status="finished", seconds=seconds, notes=tuple(notes), **about)

    def identify(self, job: Job, code: str) -> dict[str, Any]:
        """Return what identifies an execution: code, notebook, parameters, size and site."""
        own = {"notebook_sha256": notebook_digest(job.notebook), "parameters": without_paths(job.parameters)}
        return {**own, "code_sha256": code, "size": self.size, "site": self.site}

    def _recorded_s(self, job: Job, identity: Mapping[str, Any]) -> float | None:
        """Seconds of a recorded execution with the same identity and expectations; None if there is none."""
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

    def _record(
        self, job: Job, facts: dict[str, Any], claims: Mapping[str, Mapping[str, Claim]], executed: Path
    ) -> list[str]:
        """Write the records of a notebook's findings. Return notes: verdicts, and claims without a finding."""
        findings = harvest(executed)
        notes = []
        more: dict[str, Any] = {
            "notebook": job.name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
        }
        more["versions"] = {"python": platform.python_version(), **versions()}
        for key in job.papers:
            own = {name: claim for name, claim in claims[key].items() if claim.notebook == job.name}
            kept = findings_of(key, findings, claims[key])
            stray = sorted(set(kept) - set(own))
            if stray:
                raise ConfigError(
                    f"{job.name} has findings of {', '.join(stray)}, which {key}/claims/{job.name}.yaml lacks"
                )
            for name, claim in own.items():
                if name in kept:
                    notes.append(f"{claim.name}: {kept[name]['verdict']}")
                elif claim.expectation_at(self.size) is not None:
                    notes.append(f"{claim.name}: the notebook has no finding of it")
            path = record_file(self.records, key, job.name, self.size, self.site)
            write_record(path, {**facts, **more, "paper": key, "findings": kept})
        others = {found.claim.partition("/")[0] for found in findings} - set(job.papers)
        if others:
            raise ConfigError(
                f"{job.name} has findings of {', '.join(sorted(others))}, which have no file claims/{job.name}.yaml"
            )
        return notes


def refuse_uncommitted(jobs: Sequence[Job], papers: Path) -> None:
    """Check that expectations are committed before their records are written.

    Raises:
        ConfigError: there is no repository, or a file of claims differs from its committed version.
    """
    if not history.has_history(papers):
        raise ConfigError(
            f"{papers} is in no git repository, which must show that claims are older than records: leave --update out"
        )
    for job in jobs:
        for key in job.papers:
            path = papers / key / "claims" / f"{job.name}.yaml"
            if history.uncommitted(path):
                raise ConfigError(f"{path} differs from its committed version: commit expectations before you measure")


def _left(jobs: Sequence[Job], outcomes: Sequence[Outcome], how: Reproduction) -> str:
    """An estimate of the rest: each notebook's recorded time, else the mean of this session."""
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
