"""Starts: of the package, of the command, of ranks, and of a step that a notebook drives."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from workbench.bench import How
from workbench.bench.rows import Row, beside

RANKS = (4,)
IMPORT_S, HELP_S = 0.3, 0.5
SLOW_ROUNDS = 3  # of the rounds asked for, one in so many starts ranks, which takes seconds
READY = "import workbench.runtimes.launch; from mpi4py import MPI; MPI.COMM_WORLD.Barrier()"
DRIVEN = 1.01  # what a notebook may cost a step


def run(how: How) -> Iterator[Row]:
    """Seconds of each, in fresh processes."""
    words = {
        "import workbench": (["-c", "import workbench, sys; assert 'torch' not in sys.modules"], IMPORT_S),
        "workbench --help": (["-m", "workbench", "--help"], HELP_S),
    }
    for what, (arguments, allowed_s) in words.items():
        if how.wanted(what):
            taken = [_seconds([sys.executable, *arguments]) for _ in range(how.rounds + 1)][1:]  # the first reads from the disk
            yield beside(taken, allowed_s, case="fresh process", what=what, over=f"{allowed_s:g} s allowed", kind="limit", below=1.0)
            empty = [_seconds([sys.executable, "-c", ""]) for _ in range(how.rounds)]
            yield beside(taken, empty, case="fresh process", what=what, over="python alone")
    for number in how.ranks or RANKS:
        case = f"{number} MPI ranks"
        if how.wanted(case):
            yield from _ranks(number, case, max(3, how.rounds // SLOW_ROUNDS), how.say)


def _seconds(command: list[str], env: dict[str, str] | None = None) -> float:
    begin = time.perf_counter()
    subprocess.run(command, env=env, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def _ranks(number: int, case: str, rounds: int, say: Callable[[str], None]) -> Iterator[Row]:
    """Ranks that have imported torch and met, by `Cluster` and by bare mpiexec in turn; and a step of each."""
    from workbench.algorithms import SynchronousSGD
    from workbench.analysis import summary
    from workbench.clusters import Cluster
    from workbench.clusters.mpi_install import find_mpi, mpiexec_command
    from workbench.problems import digits_mlp
    from workbench.trace.run import Run

    command, env = mpiexec_command(find_mpi(), number, [sys.executable, "-c", READY])
    ready: dict[str, list[float]] = {"ours": [], "bare": []}
    steps: dict[str, list[float]] = {"ours": [], "bare": []}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, _runs_in(folder):
        for round_ in range(rounds + 1):
            bare_s = _seconds(command, env)
            begin = time.perf_counter()
            with Cluster(number, quiet=True) as cluster:
                cluster.client[:].apply_sync(_imported)
                ours_s = time.perf_counter() - begin
                run_ = cluster.train(SynchronousSGD(), digits_mlp(), steps=300, evaluate_every=0).wait().run
            step_s = summary(run_)["step_seconds_median"]
            words = f"train synchronous-sgd --problem digits-mlp --workers {number} --runtime mpi --steps 300 --evaluate-every 0".split()
            subprocess.run([sys.executable, "-m", "workbench", *words], check=True, capture_output=True)
            newest = max(Path(folder).glob("2*"), key=lambda path: path.name)
            if round_:  # the first reads from the disk
                ready["ours"].append(ours_s)
                ready["bare"].append(bare_s)
                steps["ours"].append(step_s)
                steps["bare"].append(summary(Run.load(newest))["step_seconds_median"])
                say(f"{case}: ready after {ours_s:.2f} s, bare mpiexec {bare_s:.2f} s")
    yield beside(ready["ours"], ready["bare"], case=case, what="Cluster ready, torch imported", over="bare mpiexec, the same imports")
    yield beside(steps["ours"], steps["bare"], case=case, what="step driven from a notebook", over="step under mpiexec", below=DRIVEN)


def _imported() -> bool:
    return "workbench.runtimes.launch" in sys.modules


@contextmanager
def _runs_in(folder: str) -> Iterator[None]:
    """Runs go to a folder within the block."""
    before = os.environ.get("WORKBENCH_RUNS")
    os.environ["WORKBENCH_RUNS"] = folder
    try:
        yield
    finally:
        os.environ.pop("WORKBENCH_RUNS")
        if before is not None:
            os.environ["WORKBENCH_RUNS"] = before
