"""Benchmarks: ratios of our times to those of another program (a peer) or to a physical limit, with their spread.

Both are measured in one run.

Each benchmark is a module with `run(how)`, which yields `rows.Row`s as it measures them. `NAMES` lists the modules.

- Benchmarks of steps: `step`, `checkpoints`, `overheads` (with `notebook_cost`), `wire` (with `wire_cases`,
  `operating_point`, `time_to_loss` and `wire_chart`).
- Benchmarks of parts: `collectives` (with `collective_runner`), `codecs`, `spans`, `start`.
- Shared by the benchmarks: `paired` (alternating measurements), `ranks`, `peers` (steps of other programs), `rows`,
  `records`.

Imports `papers`, `experiments` and what lies below. Used by `cli` alone. Begin with `rows` and `paired`, then `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, final

from workbench.errors import ConfigError
from workbench.naming import unknown

if TYPE_CHECKING:
    from workbench.bench.rows import Row

# Name on the command line and in records -> what it measures. In reading order.
NAMES = {
    "step": "step times compared with torch DDP, a flat all-reduce after backward and an mpi4py loop; loopback",
    "wire": "step times on hosts whose network takes from half to four times the compute, compared with the limit, and time to a loss",
    "collectives": "all-reduces compared with the library's own, and with the wire of an emulated network",
    "overheads": "many small parameters compared with torch DDP, a request, a trace, memory, a notebook that drives a run or follows it",
    "checkpoints": "steps while checkpoints are written, compared with steps without",
    "codecs": "bytes of float32 values a second that each codec encodes, decodes and sums, compared with a copy of them",
    "start": "time to import the package, to print --help, and until four ranks are ready",
    "spans": "a trace of a million spans: read, analysed and drawn, on one core",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """How to run a benchmark.

    Attributes:
        rounds: number of pairs of measurements for a ratio.
        ranks: numbers of ranks; empty for the benchmark's own.
        only: measure cases with one of these words in the name; empty for all.
        report: called with progress messages.
    """

    rounds: int = 30
    ranks: tuple[int, ...] = ()
    only: tuple[str, ...] = ()
    report: Callable[[str], None] = print

    def __post_init__(self) -> None:
        if self.rounds < 1 or any(number < 2 for number in self.ranks):
            raise ConfigError(
                f"rounds={self.rounds}, ranks={list(self.ranks)}: give one round or more, and two ranks or more"
            )

    def wanted(self, case: str) -> bool:
        """Return whether to measure a case.

        >>> BenchOptions(only=("mlp",)).wanted("50 MB MLP, 2 ranks")
        True
        """
        return not self.only or any(word.lower() in case.lower() for word in self.only)


def run(name: str, how: BenchOptions) -> Iterator[Row]:
    """Run a benchmark. Yield each row as soon as it is measured.

    Raises:
        ConfigError: unknown benchmark.
        LaunchError: the benchmark's ranks or its emulated network cannot be started here.
    """
    if name not in NAMES:
        raise unknown("benchmark", name, NAMES)
    module: Any = import_module(f"workbench.bench.{name}")
    yield from module.run(how)
