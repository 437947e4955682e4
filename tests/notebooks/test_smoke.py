"""Every notebook that tests a paper's claims, at its smoke size, on ranks that they share: `make papers`, or `pytest -m papers`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.notebooks.recomputed import NOTEBOOKS
from tests.notebooks.shown import check_shown, with_check, wrong_verdicts
from workbench.papers.claims import find_claim, read_claims
from workbench.papers.plan import claimed_notebooks
from workbench.papers.rank_pool import RankPool
from workbench.papers.records import read_findings
from workbench.papers.reproduction import Reproduction
from workbench.papers.site import site_name

pytestmark = [pytest.mark.papers, pytest.mark.notebooks, pytest.mark.timeout(600)]

NUM_BYTES = 500_000


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    made = RankPool(print)
    yield made
    made.close()


@pytest.mark.parametrize("name", claimed_notebooks())
def test_a_notebook_runs_at_its_smoke_size_and_tells_of_its_claims(
    name: str, pool: RankPool, tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For notebooks with a function in `NOTEBOOKS`, every shown number equals the one computed again."""
    from workbench.papers.plan import plan

    (job,) = plan(name, "smoke")
    again = name in NOTEBOOKS
    if again:
        monkeypatch.setenv(
            "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        )
        job = replace(job, notebook=with_check(job.notebook, tmp_path / "in"))
    how = Reproduction(size="smoke", site=site_name(), output=tmp_path, records=tmp_path / "papers", timeout_s=500.0)
    outcome = how.one(job, None, pool)
    assert outcome.status == "finished", outcome.error
    assert outcome.executed.stat().st_size < NUM_BYTES
    if again:
        check_shown(outcome.executed)
    else:
        assert [*wrong_verdicts(outcome.executed)] == []
    found, answer = read_findings(outcome.executed)
    claims = [claim for key in claimed_notebooks()[name] for claim in read_claims(key).claims if claim.notebook == name]
    tested = any(claim.expectation_at("smoke") for claim in claims)
    assert found if tested else answer, "it tells of each claim that its size can test, or at least answers"
    assert all(find_claim(finding.claim).notebook == name for finding in found)
