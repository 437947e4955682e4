"""`workbench emulate`: runs a command on hosts of an emulated network."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

from workbench.errors import ConfigError

if TYPE_CHECKING:
    from workbench.clusters.emulated import EmulatedNetwork

PORT = 29500  # the default of torch's launchers; nothing else uses the hosts' ports
GRACE_S = 5.0  # time for the other ranks to report their errors after one has failed
EXAMPLES = """
COMMAND runs on the first host, host0. Ranks that it starts by `workbench train`, mpiexec or Cluster run on all hosts:

  workbench emulate --hosts 4 --rate 1gbit -- workbench train pipe-sgd --runtime mpi --workers 4 --steps 20
  workbench emulate --hosts 2 --ranks-per-host 4 -- workbench train synchronous-sgd --workers 8 --set collective=hierarchical
  workbench emulate --hosts 2 --rate 1gbit --each -- python my_ddp_script.py
  workbench emulate --hosts 3 --rate 1gbit --slow 2=100mbit --latency 5ms --check
"""


def add_emulate_options(emulate: argparse.ArgumentParser) -> None:
    """Add the options of `workbench emulate`, and set its function."""
    emulate.epilog = EXAMPLES
    add = emulate.add_argument
    add("--hosts", type=int, default=2, help="number of hosts; 2 by default")
    add("--rate", default="1gbit", help="rate of every host's interface, in both directions; 1gbit by default")
    add("--up", metavar="RATE", help="rate from each host; --rate by default")
    add("--down", metavar="RATE", help="rate to each host; --rate by default")
    add("--slow", action="append", default=[], metavar="HOST=RATE", help="rate of one host, such as 2=100mbit")
    add("--latency", default="0", metavar="TIME", help="latency from host to host, such as 5ms")
    add("--ranks-per-host", type=int, default=1, help="number of ranks on each host; 1 by default")
    add(
        "--each",
        action="store_true",
        help="run COMMAND as every rank, with the variables of torchrun (RANK, WORLD_SIZE, ...)",
    )
    add(
        "--check",
        action="store_true",
        help="first measure rates and round-trip times, and print them next to the requested ones",
    )
    add("argv", nargs="*", metavar="COMMAND", help="command to run, after --")
    emulate.set_defaults(command=_emulate)


def _emulate(options: argparse.Namespace) -> int:
    from workbench.clusters.emulated import EmulatedNetwork

    if not options.argv and not options.check:
        raise ConfigError(
            "give a command after --: workbench emulate --hosts 2 -- COMMAND; or --check to measure the network"
        )
    if options.each and not options.argv:
        raise ConfigError("--each needs a COMMAND: give one after --")
    if options.check and options.hosts < 2:
        raise ConfigError(f"--check measures between hosts: --hosts {options.hosts} is too few, use 2 or more")
    with EmulatedNetwork(
        options.hosts,
        rate=options.rate,
        up=options.up,
        down=options.down,
        slow=_slow(options.slow),
        latency_s=options.latency,
        ranks_per_host=options.ranks_per_host,
    ) as network:
        if options.check:
            print(_check(network), flush=True)
        if not options.argv:
            return 0
        return _wait(_start(network, options.argv, each=options.each))


def _slow(given: list[str]) -> dict[int, str]:
    slow = {}
    for pair in given:
        host, equals, rate = pair.partition("=")
        if not equals or not host.strip().isdigit():
            raise ConfigError(f"--slow {pair!r}: write HOST=RATE, such as --slow 2=100mbit")
        if int(host) in slow:
            raise ConfigError(f"--slow {pair!r}: host {int(host)} has a rate already")
        slow[int(host)] = rate
    return slow


def _check(network: EmulatedNetwork) -> str:
    """Return a table of requested and measured rates and round trips."""
    from workbench.clusters.emulated import rate_text
    from workbench.clusters.emulated.check import measure_all

    lines = [f"{'from':8}{'to':8}{'requested':>14}{'measured':>14}{'share':>8}{'2 x latency':>16}{'round trip':>14}"]
    for found in measure_all(network):
        share, least, trip = found.found / found.asked, found.least_round_trip_s * 1e3, found.round_trip_s * 1e3
        rates = f"{rate_text(found.asked):>14}{rate_text(found.found):>14}{share:>8.1%}"
        lines.append(f"{found.source:8}{found.destination:8}{rates}{least:>13.3f} ms{trip:>11.3f} ms")
    return "\n".join(lines)


def _start(network: EmulatedNetwork, argv: list[str], *, each: bool) -> list[subprocess.Popen[Any]]:
    """Start the command on the first host, or once per rank."""
    if not each:
        return [network.run(0, argv)]
    per_host = network.ranks_per_host
    world = len(network.hosts) * per_host
    common = {
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": per_host,
        "MASTER_ADDR": network.hosts[0].address,
        "MASTER_PORT": PORT,
    }
    return [
        network.run(
            rank // per_host,
            argv,
            env={name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank % per_host}.items()},
            stdin=None if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(world)
    ]


def _wait(processes: list[subprocess.Popen[Any]]) -> int:
    """Wait until all processes have ended. Return the first exit status that is not 0.

    If one process fails, the others are ended.
    """
    stop_at = None
    while any(process.poll() is None for process in processes):
        try:
            if stop_at is None and any(process.poll() for process in processes):
                stop_at = time.monotonic() + GRACE_S
            if stop_at is not None and time.monotonic() > stop_at:
                break  # the end of the network ends them
            running = [
                process for process in processes if process.returncode is None
            ]  # none if the last has just ended
            if running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running[0].wait(0.1)
        except KeyboardInterrupt:
            _interrupt(processes)
    failed = [process.returncode for process in processes if process.returncode]
    if not failed:
        return 0
    return failed[0] if failed[0] > 0 else 128 - failed[0]


def _interrupt(processes: list[subprocess.Popen[Any]]) -> None:
    """Interrupt the processes that run, unless the terminal does."""
    if _terminal_signals_all():
        return
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)


def _terminal_signals_all() -> bool:
    """Return True if Ctrl-C reaches the command too: a terminal sends it to the whole foreground process group."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
