"""`workbench reproduce`: executes notebooks, and writes a record of each.

Notebooks that measure on a real clock are executed alone, one after the other. The others, whose time is virtual, are
then executed several at a time, the longest first.
"""

from __future__ import annotations

import platform
import re
import time
from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, final

from workbench import resources
from workbench.errors import ConfigError
from workbench.experiments.execution_record import versions
from workbench.experiments.notebook_catalogue import parameters_of
from workbench.experiments.notebooks import run_notebook
from workbench.experiments.side_by_side import Task, run_side_by_side
from workbench.papers import history
from workbench.papers.claims import SIZES, Claim, Size, read_claims
from workbench.papers.digest import experiment_digest
from workbench.papers.plan import Job
from workbench.papers.rank_pool import RankPool
from workbench.papers.records import (
    IDENTITY,
    Record,
    findings_of,
    judge_finding,
    only_writer,
    read_findings,
    read_record,
    record_file,
    write_record,
)
from workbench.papers.site import machine, without_paths
from workbench.papers.sizes import sizes_file
from workbench.papers.table import ANSWER
from workbench.plots.html import export_html

Status = Literal["finished", "failed", "recorded"]
_Claims = Mapping[str, Mapping[str, Claim]]  # key of a paper -> id -> claim
SEED_STEP = 100  # between the seeds of two sessions
COMMITTED_ANSWER = "**Answer of the committed record; that of this execution is at the end**"


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
        again: whether to also execute notebooks that have a record.
        add_session: whether to execute notebooks with a record again and to add the values to the record, as those of
            another session.
        jobs: number of notebooks at a time, of those that measure nothing on a real clock.
        timeout_s: limit for each notebook, in seconds.
        report: called with each line of progress.
    """

    size: Size
    site: str
    output: Path
    records: Path
    options: str = ""
    again: bool = False
    add_session: bool = False
    jobs: int = 1
    timeout_s: float | None = None
    report: Callable[[str], None] = print

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Execute the notebooks. A failed one does not stop the others. At the end all ranks and kernels have ended.

        Raises:
            ConfigError: another process writes into these folders, or records would go to `papers/` before the
                claims are committed.
        """
        papers = resources.shared("papers")
        if self.records.resolve() == papers.resolve():
            refuse_uncommitted(jobs, papers)
        commit = history.commit_of(papers)
        before = [None if self.again or self.add_session else self._recorded_s(job) for job in jobs]
        if self.add_session:
            for job in jobs:
                self._refuse_other_experiment(job)
        beside = [job for job, seconds in zip(jobs, before, strict=True) if job.is_virtual and seconds is None]
        if self.jobs == 1 or len(beside) == 1:
            beside = []
        beside.sort(key=lambda job: self.earlier_s(job) or 0.0, reverse=True)  # so that no core is idle at the end
        alone = [job for job in jobs if job not in beside]
        recorded_s = {job.name: seconds for job, seconds in zip(jobs, before, strict=True)}
        outcomes: dict[str, Outcome] = {}
        pool = RankPool(lambda message: self.report(f"  {message}"))
        apart = self.records.resolve() != self.output.resolve()

        def announce(job: Job, place: int) -> None:
            todo = [
                one for one in (*alone, *beside)[place:] if one.name not in outcomes and recorded_s[one.name] is None
            ]
            self.report(f"[{place + 1} of {len(jobs)}] {job.name} ({self.size}){_left(todo, outcomes, self)}")

        with only_writer(self.output), only_writer(self.records) if apart else nullcontext():
            try:
                for place, job in enumerate(alone):
                    announce(job, place)
                    outcomes[job.name] = self.one(job, commit, pool, recorded_s[job.name])
            finally:
                pool.close()
            for outcome in self._side_by_side(beside, commit, lambda job, place: announce(job, len(alone) + place)):
                outcomes[outcome.name] = outcome
        return [outcomes[job.name] for job in jobs]

    def one(
        self, job: Job, commit: Mapping[str, Any] | None, pool: RankPool, recorded_s: float | None = None
    ) -> Outcome:
        """Execute one notebook with ranks of the pool, and write its records.

        Args:
            job: the notebook.
            commit: the commit for its records.
            pool: the pool of ranks.
            recorded_s: duration of a recorded execution, in seconds; then nothing is executed.
        """
        if recorded_s is not None:
            self.report(f"  already recorded ({recorded_s:.0f} s); --again executes it again")
            return Outcome(status="recorded", seconds=recorded_s, **self._about(job))
        began = time.monotonic()
        error: Exception | None = None
        claims: _Claims = {}
        try:
            claims = self._prepare(job)
            with pool.lend(job.ranks):
                run_notebook(job.notebook, self._executed(job), self._parameters(job), timeout_s=self.timeout_s)
        except Exception as raised:  # noqa: BLE001 - any error of one notebook must not stop the others
            error = raised
        return self._conclude(job, commit, claims, time.monotonic() - began, error)

    def _side_by_side(
        self, jobs: Sequence[Job], commit: Mapping[str, Any] | None, announce: Callable[[Job, int], None]
    ) -> Iterator[Outcome]:
        """Execute notebooks several at a time, and write the records of each when it has ended."""
        claims: dict[str, _Claims] = {}
        tasks = [
            Task(notebook=job.notebook, output=self._executed(job), parameters=self._parameters(job)) for job in jobs
        ]
        by_notebook = {job.notebook: job for job in jobs}

        def begin(task: Task) -> None:
            job = by_notebook[task.notebook]
            announce(job, len(claims))
            claims[job.name] = self._prepare(job)

        with closing(run_side_by_side(tasks, self.jobs, timeout_s=self.timeout_s, begin=begin)) as ended:
            for task, seconds, error in ended:
                job = by_notebook[task.notebook]
                yield self._conclude(job, commit, claims[job.name], seconds, error)

    def _prepare(self, job: Job) -> _Claims:
        """Remove the files of an earlier execution. Return the claims as they are before the measurement."""
        for path in (self._executed(job), self._executed(job).with_suffix(".html")):
            path.unlink(missing_ok=True)
        return {key: {claim.id: claim for claim in read_claims(key).claims} for key in job.papers}

    def _conclude(
        self, job: Job, commit: Mapping[str, Any] | None, claims: _Claims, seconds: float, error: Exception | None
    ) -> Outcome:
        """Write the page and the records of a notebook that has ended."""
        seconds, executed, notes = round(seconds, 1), self._executed(job), list[str]()
        try:
            if executed.exists():
                mark_committed_answer(executed)
                export_html(executed, executed.with_suffix(".html"))
            if error is None:
                facts = {
                    **self._identity(job),
                    "commit": commit,
                    "seconds": seconds,
                    "command": f"workbench reproduce {job.name} {self.options}".strip(),
                }
                notes = self._record(job, facts, claims, executed)
        except Exception as raised:  # noqa: BLE001 - as above
            error = raised
        if error is not None:
            self.report(f"  {job.name} failed after {seconds:.0f} s: {error or type(error).__name__}")
            message = "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
            return Outcome(status="failed", seconds=seconds, error=message, **self._about(job))
        self.report(f"  {job.name} finished in {seconds:.0f} s")
        for note in notes:
            self.report(f"  {note}")
        return Outcome(status="finished", seconds=seconds, notes=tuple(notes), **self._about(job))

    def _executed(self, job: Job) -> Path:
        return self.output / job.notebook.name

    def _about(self, job: Job) -> dict[str, Any]:
        return {
            "name": job.name,
            "papers": job.papers,
            "executed": self._executed(job),
            "parameters": job.parameters,
        }

    def _parameters(self, job: Job) -> dict[str, Any]:
        return {**job.parameters, **self._seeds_of_session(job)}

    def _identity(self, job: Job) -> dict[str, Any]:
        """Return what identifies an execution, in addition to its code: parameters, size and site."""
        return {"parameters": without_paths(job.parameters), "size": self.size, "site": self.site}

    def _recorded_s(self, job: Job) -> float | None:
        """Seconds of a recorded execution of the same experiment and expectations; None if there is none."""
        seconds = None
        for key in job.papers or ("",):
            record = self._record_of(job, key)
            if record is None or not self._is_same_experiment(job, key, record):
                return None
            seconds = float(record.facts["seconds"])
        return seconds

    def earlier_s(self, job: Job) -> float | None:
        """Seconds of an earlier execution here or of the committed one, of whatever code; None if there is none."""
        for folder in (self.records, resources.shared("papers")):
            for key in job.papers:
                seconds = _seconds(record_file(folder, key, job.name, self.size, self.site))
                if seconds is not None:
                    return seconds
        return None

    def _record_of(self, job: Job, key: str) -> Record | None:
        try:
            return read_record(record_file(self.records, key, job.name, self.size, self.site))
        except ConfigError:
            return None

    def _is_same_experiment(self, job: Job, key: str, record: Record) -> bool:
        """Return True if a record has the code, the parameters and the expectations of today."""
        identity = self._identity(job)
        if any(record.facts[name] != identity[name] for name in IDENTITY):
            return False
        if record.facts.get("experiment_sha256") != experiment_digest(
            job.notebook, identity["parameters"], record.where
        ):
            return False
        claims = {claim.id: claim.digest for claim in read_claims(key).claims}
        return all(claims.get(name) == found["digest"] for name, found in record.facts["findings"].items())

    def _refuse_other_experiment(self, job: Job) -> None:
        """Check that a session can be added to the records of a notebook.

        Raises:
            ConfigError: a record is missing, or is of other code, parameters or expectations.
        """
        for key in job.papers:
            record = self._record_of(job, key)
            if record is None or not self._is_same_experiment(job, key, record):
                what = "no record" if record is None else "a record of other code, parameters or expectations"
                raise ConfigError(
                    f"{job.name} has {what} at size {self.size} on {self.site}: measure the first session without "
                    "--add-session"
                )

    def _seeds_of_session(self, job: Job) -> dict[str, Any]:
        """The parameter `seeds` of a session that is added: those of the first session, plus 100 for each one before.

        So no session repeats seeds, and none has the seeds 10 to 99, with which the parameters of sizes are tuned.
        """
        records = [self._record_of(job, key) for key in job.papers] if self.add_session else []
        num_earlier = max((len(record.facts["sessions"]) for record in records if record), default=0)
        given = {"seeds": default_seeds(job.notebook), **job.parameters}["seeds"]
        if not num_earlier or not given:
            return {}
        return {"seeds": [seed + SEED_STEP * num_earlier for seed in given]}

    def _record(self, job: Job, facts: dict[str, Any], claims: _Claims, executed: Path) -> list[str]:
        """Write the records of a notebook's findings. Return notes: verdicts, and claims without a finding."""
        findings, answer = read_findings(executed)
        notes: list[str] = []
        date = datetime.now(UTC).isoformat(timespec="seconds")
        session = {"date": date, "seconds": facts["seconds"], "commit": (facts["commit"] or {}).get("sha", "")}
        more: dict[str, Any] = {"notebook": job.name, "date": date, "machine": machine()}
        more["versions"] = {"python": platform.python_version(), **versions()}
        for key in job.papers:
            own = {name: claim for name, claim in claims[key].items() if claim.notebook == job.name}
            earlier = self._record_of(job, key) if self.add_session else None
            kept = findings_of(key, findings, claims[key], earlier.facts["findings"] if earlier else None)
            stray = sorted(set(kept) - set(own))
            if stray:
                raise ConfigError(
                    f"{job.name} has findings of {', '.join(stray)}, which {key}/claims/{job.name}.yaml lacks"
                )
            notes += _verdicts(key, own, kept, self.size)
            where = {found["where"] for found in kept.values()}
            own_facts = {
                "paper": key,
                "experiment_sha256": experiment_digest(job.notebook, facts["parameters"], where),
                "sessions": [*(earlier.facts["sessions"] if earlier else ()), session],
                "findings": kept,
            }
            if answer is not None:
                own_facts["answer"] = asdict(
                    answer.with_session(earlier.answer) if earlier and earlier.answer else answer
                )
            path = record_file(self.records, key, job.name, self.size, self.site)
            write_record(path, {**facts, **more, **own_facts})
        others = {found.claim.partition("/")[0] for found in findings} - set(job.papers)
        if others:
            raise ConfigError(
                f"{job.name} has findings of {', '.join(sorted(others))}, which have no file claims/{job.name}.yaml"
            )
        return notes


def _verdicts(key: str, claims: Mapping[str, Claim], findings: Mapping[str, Any], size: Size) -> Iterator[str]:
    """Yield a line for each claim of a paper: its verdict, or that it has no finding; and whether `size` judges none."""
    for name, claim in claims.items():
        if name in findings:
            verdict = judge_finding(claim, findings[name], size)
            yield f"{claim.name}: {verdict.word}, {verdict} {claim.unit}".rstrip()
        elif claim.expectation_at(size) is not None:
            yield f"{claim.name}: the notebook has no finding of it"
    if claims and not any(claim.expectation_at(size) for claim in claims.values()):
        judged = [one for one in SIZES if any(claim.expectation_at(one) for claim in claims.values())]
        yield f"{key}: its claims are judged at size {' and '.join(judged) or 'none'}: use --size"


def mark_committed_answer(executed: Path) -> None:
    """Say in the first cell of an executed notebook that its answer is that of the committed record."""
    import nbformat

    content = nbformat.read(executed, as_version=4)  # type: ignore[no-untyped-call]
    source = content.cells[0].source if content.cells else ""
    marked = re.sub(rf"^{re.escape(ANSWER)} \(", f"{COMMITTED_ANSWER} (", source, count=1, flags=re.MULTILINE)
    if marked != source:
        content.cells[0].source = marked
        nbformat.write(content, executed)  # type: ignore[no-untyped-call]


def default_seeds(notebook: Path) -> list[int]:
    """Return the default of a notebook's parameter `seeds`; empty if it has none."""
    return next((literal_eval(one.default) for one in parameters_of(notebook) if one.name == "seeds"), [])


def refuse_uncommitted(jobs: Sequence[Job], papers: Path) -> None:
    """Check that expectations and parameters are committed before their records are written.

    Raises:
        ConfigError: there is no repository, or a file of claims, sizes or a notebook differs from its committed
            version.
    """
    if not history.has_history(papers):
        raise ConfigError(
            f"{papers} is not in a git repository, whose history shows that claims precede records: omit --update"
        )
    for job in jobs:
        claims = [papers / key / "claims" / f"{job.name}.yaml" for key in job.papers]
        for path in (*claims, sizes_file(job.notebook), job.notebook):
            if history.uncommitted(path):
                raise ConfigError(
                    f"{path} differs from its committed version: commit expectations and parameters before you measure"
                )


def _left(jobs: Sequence[Job], outcomes: Mapping[str, Outcome], how: Reproduction) -> str:
    """An estimate of the remaining time: each notebook's earlier time, else the mean of this session."""
    ran = [outcome.seconds for outcome in outcomes.values() if outcome.status == "finished"]
    usual = sum(ran) / len(ran) if ran else None
    total = 0.0
    for job in jobs:
        known = how.earlier_s(job) or usual
        if known is None:
            return ""
        total += known / (how.jobs if job.is_virtual else 1)
    return f", about {total:.0f} s left" if total < 120 else f", about {total / 60:.0f} min left"


def _seconds(path: Path) -> float | None:
    try:
        return float(read_record(path).facts["seconds"])
    except ConfigError:
        return None
