"""How communication makes progress: step times of Pipe-SGD on a 50 MB MLP, all ways in the same processes, gloo and MPI.

The ways alternate in an order that rotates from round to round. A ratio is to "blocking" in the same round, which hides
nothing. The table shows the median ratio with its 95 % bootstrap interval.

    python -m tests.benchmarks.progress --ranks 2 --rounds 8
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from tests.distributed.pool import close_all, shared_pool
from workbench import problems
from workbench.algorithms import PipeSGD
from workbench.bench.rows import interval as bootstrap
from workbench.collectives import Collective, Native, Ring
from workbench.problems.loading import fetch
from workbench.runtimes.user_loop.trainer import Trainer

WAYS: list[tuple[str, Collective]] = [
    *((progress, Native()) for progress in ("blocking", "auto", "tests", "thread", "library")),
    *((progress, Ring()) for progress in ("blocking", "tests", "thread")),
]


def on_rank(rounds: int, block: int) -> dict[str, list[float]]:
    """Seconds a step of each way in each round, on this rank."""
    torch.set_num_threads(1)
    problem = problems.get("wide-mlp", megabytes=50)
    x, y = fetch(problem.train_data(), list(range(64)))
    times: dict[str, list[float]] = {f"{progress}, {type(how).__name__}": [] for progress, how in WAYS}
    names = list(times)
    for number in range(rounds):
        turn = number % len(WAYS)
        for name, (progress, how) in (
            list(zip(names, WAYS, strict=True))[turn:] + list(zip(names, WAYS, strict=True))[:turn]
        ):
            model = problem.model()
            with Trainer(
                model, torch.optim.SGD(model.parameters(), lr=1e-4), PipeSGD(collective=how), progress=progress
            ) as trainer:
                for step in range(block + 2):
                    if step == 2:
                        begin = time.perf_counter()
                    trainer.step(lambda model=model: cross_entropy(model(x), y))
                times[name].append((time.perf_counter() - begin) / block)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--block", type=int, default=4)
    options = parser.parse_args()
    for runtime in ("torch", "mpi"):
        ranks = shared_pool(runtime, options.ranks).run(on_rank, options.rounds, options.block, timeout_s=1200)
        slowest = {name: np.max([times[name] for times in ranks], axis=0) for name in ranks[0]}
        for name, values in slowest.items():
            ratios = values / slowest["blocking, Native"]
            low, high = bootstrap(ratios)
            print(
                f"{runtime:6} {name:18} {np.median(values) * 1e3:8.1f} ms  {np.median(ratios):.3f} of blocking [{low:.3f}, {high:.3f}]"
            )
    close_all()


if __name__ == "__main__":
    main()
