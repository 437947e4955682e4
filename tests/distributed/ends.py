"""Ranks that end as processes do: each is forked from one process that has imported torch, runs a case and leaves its interpreter.

    python -m tests.distributed.ends FOLDER 2 CASE/METHOD ...

writes a line of JSON for each case and rank: the exit status, the seconds, and what it printed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import workbench.runtimes.transport.torch_distributed  # noqa: F401 - before the fork
from workbench.algorithms import DeAR, LocalSGD, PipeSGD, SynchronousSGD
from workbench.collectives import Ring
from workbench.runtimes.user_loop.trainer import Trainer

LIMIT_S = 150.0
METHODS = {
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
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), METHODS[name], timeout_s=120)
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
    folder, num_ranks = Path(sys.argv[1]), int(sys.argv[2])
    for number, spec in enumerate(sys.argv[3:]):
        case, _, name = spec.partition("/")
        here = folder / str(number)
        here.mkdir()
        world = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        begin, pids = time.monotonic(), []
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                os.environ.update(world, RANK=str(rank), LOCAL_RANK=str(rank))
                output = os.open(here / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
                os.dup2(output, 1)
                os.dup2(output, 2)
                run(case, name, here)
                return
            pids.append(pid)
        for rank, (status, seconds) in enumerate(_ends(pids, begin)):
            text = (here / f"{rank}.txt").read_text(errors="replace")
            print(json.dumps({"case": spec, "rank": rank, "status": status, "seconds": seconds, "text": text}), flush=True)


def _ends(pids: list[int], begin: float) -> list[tuple[int, float]]:
    """Exit status (minus a signal's number) and seconds of each."""
    found: dict[int, tuple[int, float]] = {}
    while len(found) < len(pids):
        for pid in pids:
            if pid in found:
                continue
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                found[pid] = (os.waitstatus_to_exitcode(status), time.monotonic() - begin)
            elif time.monotonic() - begin > LIMIT_S:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [found[pid] for pid in pids]


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


if __name__ == "__main__":
    main()
