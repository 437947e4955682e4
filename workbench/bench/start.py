"""Start times: of the package, of the command, and of ranks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from workbench.bench import BenchOptions
from workbench.bench.rows import Row, compare
from workbench.errors import LaunchError

RANKS = (4,)
IMPORT_S, HELP_S = 0.3, 0.5
SLOW_ROUNDS = 3  # one round in this many starts ranks, which takes seconds
READY = """
import workbench.runtimes.rank.main
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.Get_rank() == 0:
    print("ready", flush=True)
"""
READY_ASKED = 1.25  # required ratio to plain mpiexec
LIMIT_S = 900.0  # time limit of a process: hundreds of times the expected time


def run(how: BenchOptions) -> Iterator[Row]:
    """Measure each start time, in new processes."""
    words = {
        "import workbench": (["-c", "import workbench, sys; assert 'torch' not in sys.modules"], IMPORT_S),
        "workbench --help": (["-m", "workbench", "--help"], HELP_S),
    }
    for what, (arguments, allowed_s) in words.items():
        if how.wanted(what):
            # without the first process, which reads from the disk
            taken = [_seconds([sys.executable, *arguments]) for _ in range(how.rounds + 1)][1:]
            yield compare(
                taken,
                allowed_s,
                case="fresh process",
                what=what,
                over=f"{allowed_s:g} s allowed",
                kind="limit",
                below=1.0,
            )
            empty = [_seconds([sys.executable, "-c", ""]) for _ in range(how.rounds)]
            yield compare(taken, empty, case="fresh process", what=what, over="python alone")
    for number in how.ranks or RANKS:
        case = f"{number} MPI ranks"
        if how.wanted(case):
            yield from _ranks(number, case, max(3, how.rounds // SLOW_ROUNDS), how.report)


def _seconds(command: list[str], env: dict[str, str] | None = None) -> float:
    begin = time.perf_counter()
    subprocess.run(command, env=env, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    return time.perf_counter() - begin


def _ranks(number: int, case: str, rounds: int, report: Callable[[str], None]) -> Iterator[Row]:
    """Measure the time until ranks have imported torch and passed a barrier, by `Cluster` and by mpiexec alternately.

    The first round does not count.
    """
    from workbench.clusters import Cluster
    from workbench.clusters.local.mpi_install import find_mpi, mpiexec_command

    command, env = mpiexec_command(find_mpi(), number, [sys.executable, "-c", READY])

    def ours() -> float:
        begin = time.perf_counter()
        with Cluster(number, quiet=True) as cluster:
            assert all(cluster.client[:].apply_async(_imported).get(LIMIT_S))
            return time.perf_counter() - begin

    def bare() -> float:
        begin = time.perf_counter()
        with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise LaunchError(
                    f"bare mpiexec with {number} ranks ended with {process.wait(LIMIT_S)}: run `workbench doctor`"
                )
            return time.perf_counter() - begin

    times: dict[str, list[float]] = {"ours": [], "bare": []}
    for round_ in range(rounds + 1):
        ways = {"ours": ours, "bare": bare}
        for name in list(ways)[:: 1 if round_ % 2 else -1]:
            seconds = ways[name]()
            if round_:  # not the first, which reads from the disk
                times[name].append(seconds)
        if round_:
            report(f"{case}: ready after {times['ours'][-1]:.2f} s, bare mpiexec {times['bare'][-1]:.2f} s")
    what, over = "Cluster ready, torch imported", "bare mpiexec, the same imports"
    yield compare(times["ours"], times["bare"], case=case, what=what, over=over, below=READY_ASKED)


def _imported() -> bool:
    return "workbench.runtimes.rank.main" in sys.modules
