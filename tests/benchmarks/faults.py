"""Real faults of trainings, and their outcome: fault x algorithm x outcome, with the seconds to detect and to recover.

    python -m tests.benchmarks.faults                          # every row, on gloo and on MPI
    python -m tests.benchmarks.faults --only SynchronousSGD --runtime torch --json faults.json     # leaves a record as well

A row is a `Case`; add one to `CASES`. A notebook's `Cluster.train` observes. Detection is from the fault to the error
that `wait` raises, or to the state that `status` shows. Recovery is from there to the first new step, after `heal` and
a resume where they are needed. "same weights" means bit-identical to an unbroken run.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

import psutil
import torch
from safetensors.torch import load_file

from tests.distributed.killing import Dies, DyingCodec, Place, Slow
from tests.distributed.pool import ROOT
from tests.laws import tiny
from workbench.algorithms import (
    AsyncSGD,
    BackupSGD,
    DiLoCo,
    LayerwiseSGD,
    LocalSGD,
    NoCommunication,
    ParameterServerSGD,
    PartialAllReduce,
    PipeSGD,
    SoftsyncSGD,
    StaleSynchronousSGD,
    SynchronousSGD,
)
from workbench.analysis.table import Column, Table, seconds
from workbench.bench.records import facts_of, write_record
from workbench.clusters import Cluster
from workbench.clusters.run_handle import RunHandle
from workbench.collectives import Ring
from workbench.errors import WorkbenchError
from workbench.program import Algorithm

NUM_RANKS, VICTIM, STEPS, LIMIT_S = 3, 1, 200, 120.0
RUNTIMES = ("torch", "mpi")
Fault = Literal["killed", "stopped"]

COLUMNS = (
    Column("runtime", "runtime"),
    Column("fault", "fault"),
    Column("place", "where"),
    Column("algorithm", "algorithm"),
    Column("outcome", "outcome"),
    Column("detect_s", "detected in", seconds),
    Column("recover_s", "recovered in", seconds),
    Column("same", "same weights"),
)


@final
@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table.

    Attributes:
        algorithm: the algorithm.
        fault: what happens to rank 1.
        place: where it happens to it: one of `killing.Place`, or "from outside", at any moment.
        expect: how the row is made: `ends`, for a run that ends and is resumed; `waits`, for one that waits and
            continues; `goes_on`, for one that continues without the rank.
        how: settings of the run.
        runtimes: those on which it is possible.
    """

    algorithm: Algorithm
    fault: Fault
    place: Place | Literal["from outside"]
    expect: Callable[[Cluster, Case], dict[str, Any]]
    how: Mapping[str, Any] = field(default_factory=dict)
    runtimes: Sequence[str] = RUNTIMES

    def __str__(self) -> str:
        return ", ".join([str(self.algorithm), *(f"{name}={value}" for name, value in self.how.items())])


def run_case(cluster: Cluster, case: Case) -> dict[str, Any]:
    """One row; an error becomes its outcome."""
    row = {"runtime": cluster.runtime, "fault": case.fault, "place": case.place, "algorithm": str(case)}
    try:
        return row | case.expect(cluster, case)
    except (WorkbenchError, AssertionError, TimeoutError) as error:
        return row | {"outcome": f"FAILED: {type(error).__name__}: {str(error)[:200]}"}
    finally:
        if cluster.run is not None and not cluster.run.done:
            cluster.run.stop()
        cluster.heal()


def ends(cluster: Cluster, case: Case) -> dict[str, Any]:
    """The run ends on all ranks with one error. After `heal`, it continues from the checkpoint."""
    whole, begun = _whole(cluster, case), _begun(cluster, case)
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder, "died")
        inside = case.place != "from outside"
        problem = tiny.problem(Dies(case.place, VICTIM, 5, once=str(mark)) if inside else Slow)  # type: ignore[arg-type]
        run = _train(cluster, case, problem, resume=begun)
        if inside:
            _until(lambda: mark.exists() or run.done)
        else:
            _until(lambda: len(run.run.curve()[0]) > 2)
            os.kill(cluster.ranks[VICTIM]["pid"], signal.SIGKILL)
            mark.touch()
        fault_s = mark.stat().st_mtime
        words = _error(run)
        detect_s = time.time() - fault_s
    assert f"rank {VICTIM}'s process is gone: killed by signal 9" in words, words
    begin = time.monotonic()
    again = _train(cluster.heal(), case, tiny.problem(Slow), resume=begun)
    _until(lambda: bool(len(again.run.curve()[0])))
    recover_s = time.monotonic() - begin
    again.wait(LIMIT_S)
    return {"outcome": words.split(".")[0], "detect_s": detect_s, "recover_s": recover_s, "same": _same(again, whole)}


def waits(cluster: Cluster, case: Case) -> dict[str, Any]:
    """The others wait for the rank, which is reported as stopped. After SIGCONT, the run has the same result."""
    whole = _whole(cluster, case)
    run = _train(cluster, case, tiny.problem(Slow))
    _until(lambda: len(run.run.curve()[0]) > 2)
    pid = cluster.ranks[VICTIM]["pid"]
    begin = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        _until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        _until(lambda: cluster.status()[VICTIM]["state"] == "stopped")
        detect_s = time.monotonic() - begin
        outcome = ", ".join(f"rank {row['rank']} {row['state']}" for row in cluster.status())
    finally:
        before, begin = len(run.run.curve()[0]), time.monotonic()
        os.kill(pid, signal.SIGCONT)
    _until(lambda: len(run.run.curve()[0]) > before or run.done)
    recover_s = time.monotonic() - begin
    run.wait(LIMIT_S)
    return {"outcome": outcome, "detect_s": detect_s, "recover_s": recover_s, "same": _same(run, whole)}


def goes_on(cluster: Cluster, case: Case) -> dict[str, Any]:
    """The others continue without the rank, to the run's end.

    Detection is until all know; recovery, from there to the next step.
    """
    run = _train(cluster, case, tiny.problem(Slow))
    _until(lambda: len(run.run.curve()[0]) > 2)
    begin = time.monotonic()
    os.kill(cluster.ranks[VICTIM]["pid"], signal.SIGKILL)
    _until(lambda: list(run.folder.glob("members/left-*.json")) or run.done)
    before, detect_s = len(run.run.curve()[0]), time.monotonic() - begin
    _until(lambda: len(run.run.curve()[0]) > before or run.done)
    recover_s = time.monotonic() - begin - detect_s
    info = run.wait(LIMIT_S).run.info
    assert (info["status"], [row["rank"] for row in info["departures"]]) == ("finished", [VICTIM]), info
    return {
        "outcome": f"rank {VICTIM} left, the others went on",
        "detect_s": detect_s,
        "recover_s": recover_s,
        "same": "-",
    }


def _train(cluster: Cluster, case: Case, problem: Any, **more: Any) -> RunHandle:
    return cluster.train(case.algorithm, problem, steps=STEPS, batch_size=2, evaluate_every=0, **case.how, **more)


def _whole(cluster: Cluster, case: Case) -> RunHandle:
    return _train(cluster, case, tiny.problem(partial(tiny.FailsAt, None, 0))).wait(LIMIT_S)


def _begun(cluster: Cluster, case: Case) -> RunHandle:
    """A run that was stopped after some steps, with a checkpoint."""
    run = _train(cluster, case, tiny.problem(Slow))
    _until(lambda: len(run.run.curve()[0]) > 2)
    run.stop().wait(LIMIT_S)
    assert run.status == "stopped", run.status
    return run


def _error(run: RunHandle) -> str:
    try:
        run.wait(LIMIT_S)
    except TimeoutError:
        raise
    except WorkbenchError as error:
        return str(error)
    raise AssertionError("the run went on as if nothing had happened")


def _same(run: RunHandle, other: RunHandle) -> str:
    ours, theirs = (load_file(one.folder / "model.safetensors") for one in (run, other))
    return "yes" if all(torch.equal(ours[name], value) for name, value in theirs.items()) else "NO"


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not happen")
        time.sleep(0.01)


CODED = SynchronousSGD(collective=Ring(codec=DyingCodec()))
SYNCHRONOUS: tuple[Algorithm, ...] = (SynchronousSGD(), CODED, LayerwiseSGD(bucket_bytes=200.0), PipeSGD(width=2))
SERVED: tuple[Algorithm, ...] = (
    ParameterServerSGD(),
    BackupSGD(backups=1),
    AsyncSGD(),
    StaleSynchronousSGD(),
    SoftsyncSGD(),
)
ALONE: tuple[Algorithm, ...] = (PartialAllReduce(), PartialAllReduce(quorum="solo"), NoCommunication())

CASES: list[Case] = [
    *(
        Case(algorithm=algorithm, fault="killed", place=place, expect=ends)
        for algorithm in SYNCHRONOUS
        for place in ("forward", "collective")
    ),
    Case(algorithm=CODED, fault="killed", place="codec", expect=ends),
    Case(algorithm=SynchronousSGD(), fault="killed", place="record", expect=ends),
    *(Case(algorithm=algorithm, fault="killed", place="from outside", expect=ends) for algorithm in SYNCHRONOUS),
    *(Case(algorithm=algorithm, fault="stopped", place="from outside", expect=waits) for algorithm in SYNCHRONOUS),
    *(
        Case(algorithm=algorithm, fault="killed", place="from outside", expect=goes_on, runtimes=("torch",))
        for algorithm in (*SERVED, *ALONE)
    ),
    *(
        Case(
            algorithm=algorithm,
            fault="killed",
            place="from outside",
            expect=goes_on,
            how={"on_failure": "shrink"},
            runtimes=("torch",),
        )
        for algorithm in (SynchronousSGD(), LayerwiseSGD(), PipeSGD(width=2), LocalSGD(every=4), DiLoCo(every=8))
    ),
]


def measure(cases: Sequence[Case], runtimes: Sequence[str]) -> Table:
    """The table's rows, printed one by one."""
    rows = []
    for runtime in runtimes:
        with Cluster(NUM_RANKS, launcher="torch" if runtime == "torch" else "local", quiet=True) as cluster:
            for case in [case for case in cases if runtime in case.runtimes]:
                rows.append(run_case(cluster, case))
                print(Table(rows[-1:], COLUMNS).cells()[0], flush=True)
    return Table(rows, COLUMNS, f"what becomes of {NUM_RANKS} ranks when something happens to rank {VICTIM}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runtime", choices=RUNTIMES, action="append", help="default: both")
    parser.add_argument(
        "--only",
        default="",
        help="rows of the algorithms, faults and places that hold these words, such as 'PipeSGD killed'",
    )
    parser.add_argument("--json", type=Path, help="write the rows there too")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    cases = [
        case for case in CASES if all(word in f"{case} {case.fault} {case.place}" for word in options.only.split())
    ]
    with tempfile.TemporaryDirectory() as store:
        os.environ.setdefault("WORKBENCH_RUNS", store)
        table = measure(cases, options.runtime or RUNTIMES)
    print(table)
    if options.json is not None:
        about = {name: value for name, value in facts_of("faults", []).items() if name != "rows"}
        write_record(options.json, {**about, "caption": table.caption, "rows": list(table)})


if __name__ == "__main__":
    main()
