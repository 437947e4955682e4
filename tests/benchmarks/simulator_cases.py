"""Cases of `simulator.py`: simulations of times alone, of real gradients, and the plain loop that they are compared with."""

from __future__ import annotations

import ctypes
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from workbench import problems
from workbench.algorithms import AsyncSGD, PipeSGD, SynchronousSGD
from workbench.collectives import Ring
from workbench.costs import Compute, Lognormal, ethernet_10g
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulate import Detail, run_simulation
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings
from workbench.trace.run import Run

COMPUTE = Compute(forward_s=1e-3, backward_s=2e-3, update_s=1e-5, stragglers=(Lognormal(sigma=0.3),))
NUMEL = 10_000  # parameters of the model of which only the size matters
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")  # of Linux
MESSAGE_BYTES = (NUMEL + 3) * 4  # of a whole gradient, its tail included


def size_only(workers: int) -> Problem:
    """A vector of `NUMEL` parameters and two full minibatches a worker."""
    x = torch.zeros(1, 1).expand(2 * workers, 1)
    return Problem(
        model=partial(nn.Linear, NUMEL, 1, bias=False), loss=cross_entropy, train=(x,), name="vector", batch_size=1
    )


def simulation(algorithm: Algorithm, workers: int, steps: int) -> Simulation:
    """A simulation for its times alone, without a trace."""
    computing = algorithm.roles(workers).num_computing
    how = Settings(steps=steps, trace_steps=0)
    return Simulation(
        algorithm, size_only(computing), how, workers, network=ethernet_10g, compute=COMPUTE, timing_only=True
    )


def seconds_of(workers: int, steps: int) -> list[list[float]]:
    """[step][rank] of forward and backward, the same numbers that ours takes."""
    return [
        ((COMPUTE.forward_s + COMPUTE.backward_s) * COMPUTE.factors(0, step, workers)).tolist() for step in range(steps)
    ]


def one_program(algorithm: Algorithm, workers: int, steps: int, detail: Detail = "auto") -> Run:
    """A simulation for its times alone, by closed forms."""
    how: dict[str, Any] = {"network": ethernet_10g, "compute": COMPUTE, "timing_only": True, "detail": detail}
    return run_simulation(algorithm, size_only(workers), Settings(steps=steps, trace_steps=0), workers, **how)


def enough_data(problem: Problem, workers: int) -> Problem:
    """The same samples over and over, so that every worker has a full minibatch; no test."""
    columns = problem.train_data().tensors  # type: ignore[attr-defined]
    times = -(-workers * problem.batch_size // len(columns[0]))
    return replace(
        problem, train=tuple(column.repeat(times, *[1] * (column.ndim - 1)) for column in columns), test=None
    )


def plain_loop(problem: Problem, workers: int, steps: int) -> float:
    """The same number of gradient evaluations, and an update a step, in plain PyTorch."""
    torch.manual_seed(0)
    model = problem.model()
    optimizer = problem.optimizer(model.parameters())
    x, y = problem.train
    total = 0.0
    for _ in range(steps):
        order = torch.randperm(len(x))
        optimizer.zero_grad()
        for index in order[: workers * problem.batch_size].split(problem.batch_size):
            loss = cross_entropy(model(x[index]), y[index]) / workers
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
    return total


def train(problem: Problem, workers: int, steps: int, detail: Detail = "auto") -> Run:
    """Synchronous SGD with real gradients."""
    how = Settings(steps=steps, trace_steps=0)
    return run_simulation(SynchronousSGD(), problem, how, workers, network=ethernet_10g, compute=COMPUTE, detail=detail)


PEAKS: dict[str, Callable[[int], Any]] = {  # of what the memory is measured, by the number of workers
    "times, messages of a ring": lambda workers: simulation(PipeSGD(width=2, collective=Ring()), workers, 2).run(),
    "times, messages of a server": lambda workers: simulation(AsyncSGD(), workers, 4).run(),
    "times, one program": lambda workers: one_program(PipeSGD(width=2), workers, 4),
    "gradients, one program": lambda workers: train(many_digits(), workers, 2),
    "gradients, a replica each": lambda workers: train(many_digits(), workers, 2, "messages"),
}


@lru_cache(maxsize=1)
def many_digits() -> Problem:
    """Enough for a thousand workers; made once."""
    return enough_data(problems.get("digits-mlp"), 1000)


def peak_of(kind: str, workers: int) -> int:
    """Peak bytes of a run, minus those of a run of one worker: of the process with tensors, of Python's objects without."""
    run = PEAKS[kind]
    run(1)
    if kind.startswith("gradients"):
        ctypes.CDLL(None).malloc_trim(0)  # memory that is free, but still the process's, would be used first
        CLEAR.write_text("5")  # forget the highest mark so far
        before = highest_resident()
        run(workers)
        return highest_resident() - before
    run(workers)
    tracemalloc.start()
    run(workers)
    return tracemalloc.get_traced_memory()[1]


def highest_resident() -> int:
    """Peak bytes of this process in memory since the last reset."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(peak_of(sys.argv[1], int(sys.argv[2])))
