"""All-reduces compared with the library's own all-reduce and with the limit of the wire.

They run in the foreground, as in synchronous algorithms, and several in one program, as in a training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, final

from workbench.bench import BenchOptions
from workbench.bench.paired import Step, alternate
from workbench.bench.ranks import ranks, world
from workbench.bench.rows import Row, compare
from workbench.clusters.emulated.check import PAYLOAD
from workbench.clusters.emulated.rates import parse_rate
from workbench.clusters.launchers.choose import RuntimeName
from workbench.clusters.local.mpi_install import MPIInstall, find_mpi
from workbench.errors import LaunchError
from workbench.machine import num_cores

if TYPE_CHECKING:
    from workbench.collectives import Collective

RANKS = (2, 3, 4, 8)
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24, 1 << 26, 1 << 28)  # bytes
RATE = "1gbit"
NETWORK = f"emulated:{RATE},burst=1ms"  # timers of a virtual machine can be late by more than the usual burst
WIRE_RANKS, WIRE_BYTES = (2, 4), (1 << 20, 1 << 24, 1 << 26)  # cases that the wire limits
WIRE_SHARE = {"torch": 0.97, "mpi": 0.95}  # required share of the rate, from SHARE_FROM on
SHARE_FROM = 1 << 24
AUTO_TARGET = 1.05  # required of Auto: time divided by that of the library's own
ROUND_S = 6.0  # seconds for one case; long sums are measured in fewer rounds
SECOND_MPI = Path(sys.prefix) / "opt" / "mpich"  # where `make test` installs a second MPI
WIRE_ROUNDS = 10  # largest number of rounds of a case on the emulated network


def run(how: BenchOptions) -> Iterator[Row]:
    """Measure on this machine, then on an emulated network if there is one."""
    there = libraries()
    for library in there:
        for number in how.ranks or RANKS:
            yield from _cases(how, library, number, "local", SIZES)
    for library in there:
        for number in how.ranks or WIRE_RANKS:
            try:
                yield from _cases(how, library, number, NETWORK, WIRE_BYTES)
            except LaunchError as error:
                how.report(f"not on an emulated network: {str(error).splitlines()[0]}")
                return


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The library that sends the bytes. `mpi` is the MPI installation."""

    name: str
    runtime: RuntimeName
    mpi: MPIInstall | None = None


def libraries() -> list[Library]:
    """Return gloo, the default MPI, and a second one if there is one."""
    found = [Library(name="gloo", runtime="torch")]
    for prefix in (None, SECOND_MPI):
        with suppress(LaunchError):
            install = find_mpi(prefix)
            if install.name not in {library.name for library in found}:
                found.append(Library(name=install.name, runtime="mpi", mpi=install))
    return found


def _cases(how: BenchOptions, library: Library, number: int, launcher: str, sizes: tuple[int, ...]) -> Iterator[Row]:
    titles = {size: f"{_size_text(size)}, {number} ranks, {library.name}, {launcher}" for size in sizes}
    wanted = {size: title for size, title in titles.items() if how.wanted(title)}
    if not wanted:
        return
    rounds = how.rounds if launcher == "local" else min(how.rounds, WIRE_ROUNDS)
    with ranks(number, library.runtime, launcher, library.mpi) as there:
        for size, title in wanted.items():
            how.report(f"{title} ...")
            times = there.call(on_rank, size, rounds)[0]
            yield from rows_of(title, times, library, number, size, launcher)


def on_rank(runtime: RuntimeName, folder: str, size: int, rounds: int) -> dict[str, list[float]]:
    """Return seconds of a sum of each kind in each round, of the slowest rank."""
    import torch

    from workbench import collectives
    from workbench.bench import peers
    from workbench.bench.collective_runner import Sums

    transport = world(runtime, folder)
    torch.set_num_threads(max(1, num_cores() // transport.num_workers))
    meet, slowest = peers.slowest_here(runtime)
    kinds: dict[str, Collective] = {
        "native": collectives.Native(),
        "auto": collectives.Auto(),
        "ring": collectives.Ring(),
        "direct": collectives.Direct(),
    }
    if transport.num_workers & (transport.num_workers - 1) == 0:
        kinds["halving-doubling"] = collectives.HalvingDoubling()
    value = torch.zeros(max(1, size // 4))
    with Sums(transport, size) as sums:
        steps: dict[str, Step] = {"library": partial(_library(runtime), value)}
        steps |= {name: partial(sums.all_reduce, kind, value) for name, kind in kinds.items()}
        once = alternate(steps, 1, meet=meet, slowest=slowest)
        rounds = max(5, min(rounds, int(ROUND_S / sum(each[0] for each in once.values()))))
        block = max(1, min(200, int(2e-3 / median(each[0] for each in once.values()))))
        in_a_row: dict[str, Step] = {"library": partial(_repeat, steps["library"], block)}
        in_a_row |= {name: partial(sums.repeat, kind, value, block) for name, kind in kinds.items()}
        times = alternate(in_a_row, rounds, warm=1, meet=meet, slowest=lambda seconds: slowest(seconds / block))
    transport.close()
    return times


def _repeat(step: Step, times: int) -> None:
    for _ in range(times):
        step()


def _library(runtime: RuntimeName) -> Callable[..., object]:
    from workbench.bench import peers

    return peers.mpi_sum() if runtime == "mpi" else peers.gloo_sum


def rows_of(
    title: str, times: dict[str, list[float]], library: Library, number: int, size: int, launcher: str
) -> Iterator[Row]:
    """Yield times over the library's; and, with a wire, bytes a second over its rate, counted as nccl-tests does."""
    own = f"{library.name}'s own all-reduce, called directly"
    for name, taken in times.items():
        if name != "library":
            yield compare(
                taken, times["library"], case=title, what=name, over=own, below=AUTO_TARGET if name == "auto" else None
            )
    if launcher == "local":
        return
    carried = parse_rate(RATE) / 8 * PAYLOAD
    sent = 2 * (number - 1) / number * size
    for name, taken in times.items():
        asked = WIRE_SHARE[library.runtime] if name == "auto" and size >= SHARE_FROM else None
        rates = [sent / seconds for seconds in taken]
        over = f"{RATE} less headers"
        what = own if name == "library" else name
        yield compare(rates, carried, case=title, what=what, over=over, kind="limit", unit="B/s", above=asked)


def _size_text(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
