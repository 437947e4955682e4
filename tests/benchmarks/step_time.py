"""Step time of SynchronousSGD and LayerwiseSGD over torch DDP's, on gloo: same model, same processes, one run.

Blocks of steps of each method alternate, in an order that rotates from round to round; a round's ratio is the time of our block
over DDP's in the same round, and the table shows the median ratio with its 95 % bootstrap interval.

    python tests/benchmarks/step_time.py --ranks 2 --rounds 30            (starts its ranks itself; --json for one object a row)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from workbench import problems
from workbench.algorithms import LayerwiseSGD, SynchronousSGD
from workbench.problems.base import fetch
from workbench.program import Algorithm
from workbench.trainer import Trainer
from workbench.units import MIB

CASES = {  # name -> problem, samples a rank and step, steps a block
    "50 MB MLP": (lambda: problems.get("wide-mlp", megabytes=50), 64, 2),
    "ResNet-18": (lambda: problems.get("resnet18-synthetic", image=(3, 32, 32), classes=10), 8, 1),
}
OURS: dict[str, Algorithm] = {
    "synchronous": SynchronousSGD(),
    "layer-wise, 1 MiB": LayerwiseSGD(bucket_bytes=1 * MIB),
    "layer-wise, 25 MiB": LayerwiseSGD(bucket_bytes=25 * MIB),
}
Step = Callable[[], None]


def ddp_step(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor], bucket_mb: float) -> Step:
    """One step of torch DDP."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(wrapped(batch[0]), batch[1]).backward()
        optimizer.step()

    return step


def our_step(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor], method: Algorithm) -> Step:
    """One step of a method of ours, in the same kind of loop."""
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), method)

    def step() -> None:
        trainer.step(lambda: cross_entropy(model(batch[0]), batch[1]))

    return step


def measure(steps: dict[str, Step], rounds: int, block: int) -> dict[str, list[float]]:
    """Seconds a step of each method in each round: the slowest rank's."""
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-2, rounds):  # two rounds to warm up
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(block):
                steps[name]()
            took = torch.tensor([(time.perf_counter() - begin) / block], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if number >= 0:
                times[name].append(float(took))
    return times


def bootstrap(ratios: np.ndarray, repeats: int = 2000) -> tuple[float, float]:
    """95 % interval of the median."""
    draws = np.random.default_rng(0).choice(ratios, (repeats, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return float(low), float(high)


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(os.environ["STORE"], options.ranks), rank=rank, world_size=options.ranks)
    for case, (make, batch_size, block) in CASES.items():
        problem = make()
        batch = fetch(problem.train_data(), list(range(batch_size)))
        steps = {f"DDP, {size} MiB": ddp_step(problem.model(), batch, size) for size in (1, 25)}
        steps |= {name: our_step(problem.model(), batch, method) for name, method in OURS.items()}
        times = measure(steps, options.rounds, block)
        if rank == 0:
            report(case, options, times)
    dist.destroy_process_group()


def report(case: str, options: argparse.Namespace, times: dict[str, list[float]]) -> None:
    best = min((name for name in times if name.startswith("DDP")), key=lambda name: float(np.median(times[name])))
    for name, values in times.items():
        ratios = np.array(values) / np.array(times[best])
        low, high = bootstrap(ratios)
        row = {"case": case, "ranks": options.ranks, "method": name, "step_s": float(np.median(values)), "peer": best}
        row |= {"ratio": float(np.median(ratios)), "low": low, "high": high, "rounds": options.rounds}
        line = f"{case:10}  {name:19}  {row['step_s'] * 1e3:8.2f} ms  {row['ratio']:.3f} of {best} [{low:.3f}, {high:.3f}]"
        print(json.dumps(row) if options.json else line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "STORE": str(Path(folder) / "store"), "WORLD_SIZE": str(options.ranks)}
        ranks = [subprocess.Popen([sys.executable, *sys.argv], env={**env, "RANK": str(rank)}) for rank in range(options.ranks)]
        return max(process.wait() for process in ranks)


if __name__ == "__main__":
    raise SystemExit(main())
