"""Ranks of a user's loop that make different calls, or end early: one clear error on all, and never an abort in the library."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import ROOT, our_environment
from tests.forked import forked

# case/algorithm -> what rank 0 says and its status, what rank 1 says and its status
MORE = (
    r"rank [01] calls finish\(\) after \d steps?, but rank [01] (has begun|calls finish\(\) after) \d steps: .*DistributedSampler",
    1,
)
SAVE = (r"rank [01] calls .* after \d steps, but rank [01] .*: call save\(\) on every rank", 1)
ALONE = (r"rank [01] calls finish\(\) after 3 steps, but rank [01]|but rank [01] calls finish\(\) after 3 steps", 1)
LEFT = r"rank 1 (has )?ended (without finish\(\) )?after 3 steps"
FORGOT = (r"RuntimeWarning: rank \d ended after 5 steps without trainer.finish\(\).*use `with Trainer", 0)
CASES = {
    **{
        f"one more/{algorithm}": (MORE, MORE)
        for algorithm in ("synchronous", "ring", "pipe", "pipe-ring", "dear", "local")
    },
    **{f"save alone/{algorithm}": (SAVE, SAVE) for algorithm in ("synchronous", "pipe-ring", "dear")},
    **{f"finish alone/{algorithm}": (ALONE, ALONE) for algorithm in ("synchronous", "pipe", "dear")},
    **{f"no finish/{algorithm}": (FORGOT, FORGOT) for algorithm in ("synchronous", "pipe", "pipe-ring", "dear")},
    "exit/pipe-ring": ((LEFT, 1), ("RuntimeWarning: rank 1 ended after 3 steps", 7)),
    "outside/dear": ((LEFT, 1), ("ZeroDivisionError: division by zero", 1)),
    "destroyed/synchronous": (("finished", 0), ("finished", 0)),
    "destroyed/pipe-ring": (("default process group was destroyed", 1),) * 2,
    "made too late/synchronous": (("Call init_process_group before the Trainer is made", 1),) * 2,
    "closure/pipe": (("PeerFailed: rank 1 failed at step 3: ZeroDivisionError", 1), ("ZeroDivisionError", 1)),
}
PROMPT_S = 90.0  # of a case, on a busy machine; the time-out of the Trainer is 120 s


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    """The results of all cases, by case and rank."""
    folder: Path = tmp_path_factory.mktemp("ends")
    command = [sys.executable, "-m", "tests.distributed.ends", str(folder), "2", *CASES]
    done = subprocess.run(
        command,
        env=our_environment({}) | {"PATH": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {(row["case"], row["rank"]): row for row in rows}


@pytest.mark.timeout(420)
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_differ_or_end_early_end_in_a_clear_error_on_all(
    case: str, ends: dict[tuple[str, int], dict[str, Any]]
) -> None:
    for rank, (words, status) in enumerate(CASES[case]):
        row = ends[case, rank]
        assert row["status"] == status, row["text"]
        assert re.search(words, row["text"]), row["text"]
        assert row["seconds"] < PROMPT_S, row["text"]


@pytest.mark.timeout(130)
@pytest.mark.parametrize("library", ["openmpi", "mpich"])
def test_rank_of_mpi_that_waits_in_finalize_for_another_ends_and_ends_the_job(
    library: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank does not come to MPI_Finalize for longer than the job may last."""
    from workbench.clusters.local.mpi_install import find_mpi, mpiexec_command

    for name, value in (request.getfixturevalue("mpich") if library == "mpich" else {}).items():
        monkeypatch.setenv(name, value)
    code = (
        "import time, workbench.runtimes.transport.mpi_finalize as end; from workbench.runtimes.rank.main import transport_here\n"
        "end.FINALIZE_S = 1; transport = transport_here(60.0)\n"
        "transport.announce_failure('it failed'); print('said', flush=True)\n"
        "time.sleep(600 * transport.rank)"
    )
    command, env = mpiexec_command(find_mpi(), 2, forked("-c", code))
    done = subprocess.run(
        command, env=our_environment(env), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert done.stdout.count("said") == 2
    assert (
        done.stderr.count(
            "rank 0 did not end in 1 s (MPI_Finalize waits for all ranks), so a signal ends it: it failed"
        )
        == 1
    )
