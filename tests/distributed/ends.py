"""Ranks that end as processes do: each is forked from one process that has imported torch, runs a case and leaves its interpreter.

    python -m tests.distributed.ends FOLDER 2 CASE/ALGORITHM ...

writes a line of JSON for each case and rank: the exit status, the seconds, and what it printed.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import nn

import workbench.runtimes.transport.torch_distributed  # noqa: F401 - before the fork
from workbench.algorithms import DeAR, LocalSGD, PipeSGD, SynchronousSGD
from workbench.collectives import Ring
from workbench.runtimes.user_loop.trainer import Trainer

FIRST_PORT, LAST_PORT = 20_000, 32_000
LIMIT_S = 150.0
AT_ONCE = 4  # cases; much of one is waiting
ALGORITHMS = {
    "synchronous": SynchronousSGD(),
    "ring": SynchronousSGD(collective=Ring()),
    "pipe": PipeSGD(),
    "pipe-ring": PipeSGD(width=3, collective=Ring()),
    "dear": DeAR(),
    "local": LocalSGD(every=2),
}
NUM_STEPS = 5


def run(case: str, name: str, folder: Path) -> None:
    """One rank's script."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), ALGORITHMS[name], timeout_s=120)
    for step in range(NUM_STEPS + (case == "one more" and rank == 1)):
        if rank == 0 and step == 3:
            if case == "save alone":
                trainer.save(folder / "kept")
            elif case == "finish alone":
                trainer.finish()
                return
        if rank == 1 and step == 3:
            if case == "exit":
                sys.exit(7)
            elif case == "interrupt":
                raise KeyboardInterrupt
            elif case == "closure":
                trainer.step(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
            elif case == "outside":
                _ = 1 / 0
        if step == 3 and case == "destroyed":
            dist.destroy_process_group()
        trainer.step(lambda: model(torch.ones(2, 3)).square().mean())
    if case == "made too late":
        with trainer:
            dist.init_process_group("gloo")
    elif case != "no finish":
        trainer.finish()
        print("finished")


def main() -> None:
    torch.set_num_threads(1)
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)  # the first optimizer imports for seconds
    folder, num_ranks, specs = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    ports = _free_ports()
    gc.freeze()  # else each rank that ends looks for garbage in all of torch, which takes a second of a core
    running: list[Case] = []
    for number, spec in enumerate(specs):
        here = folder / str(number)
        here.mkdir()
        case = Case(spec, here, time.monotonic())
        world = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(next(ports))}
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                os.environ.update(world, RANK=str(rank), LOCAL_RANK=str(rank))
                output = os.open(here / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
                os.dup2(output, 1)
                os.dup2(output, 2)
                run(*spec.split("/"), here)
                return
            case.pids.append(pid)
        running.append(case)
        _wait(running, AT_ONCE - 1)
    _wait(running, 0)


@final
@dataclass
class Case:
    """A case whose ranks run."""

    spec: str
    folder: Path
    begin: float
    pids: list[int] = field(default_factory=list)  # in order of rank
    # Rank -> exit status (minus a signal's number) and seconds
    ends: dict[int, tuple[int, float]] = field(default_factory=dict)

    def look(self) -> bool:
        """Whether all ranks have ended; those that last too long are killed."""
        for rank, pid in enumerate(self.pids):
            if rank in self.ends:
                continue
            ended, status = os.waitpid(pid, os.WNOHANG)
            seconds = time.monotonic() - self.begin
            if ended:
                self.ends[rank] = (os.waitstatus_to_exitcode(status), seconds)
            elif seconds > LIMIT_S:
                os.kill(pid, signal.SIGKILL)
        return len(self.ends) == len(self.pids)

    def tell(self) -> None:
        """Print a line for each rank."""
        for rank, (status, seconds) in sorted(self.ends.items()):
            text = (self.folder / f"{rank}.txt").read_text(errors="replace")
            print(
                json.dumps({"case": self.spec, "rank": rank, "status": status, "seconds": seconds, "text": text}),
                flush=True,
            )


def _wait(running: list[Case], most: int) -> None:
    """Wait until at most that many cases run; report those that have ended."""
    while len(running) > most:
        for case in [case for case in running if case.look()]:
            case.tell()
            running.remove(case)
        time.sleep(0.01)


def _free_ports() -> Iterator[int]:
    """Ports below those that the system gives to connections: none of a case that runs takes the port of the next one."""
    for port in range(FIRST_PORT + os.getpid() % 5_000, LAST_PORT):
        try:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        yield port


if __name__ == "__main__":
    main()
