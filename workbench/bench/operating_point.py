"""The batch size with which the wire takes a given multiple of compute, found on the machine that is measured."""

from __future__ import annotations

import time

from workbench.bench.ranks import Ranks, bind, world
from workbench.bench.wire_cases import MEGABYTES, RATE
from workbench.clusters.emulated.check import PAYLOAD
from workbench.clusters.emulated.rates import parse_rate
from workbench.collectives import native_bytes
from workbench.runtimes.rank.main import RuntimeName

FEW, MANY = 32, 256  # samples of the two batches that are timed
STEPS, WARM = 5, 2


def batch_of(there: Ranks, ratio: float) -> int:
    """Return the samples of a rank in a step, so that one sum takes about `ratio` times the compute of a step."""
    return int(there.call(fitting_batch, ratio)[0])


def fitting_batch(runtime: RuntimeName, folder: str, ratio: float) -> int:
    """On each rank: time steps with two batch sizes on all ranks at once, and draw a line through them."""
    import torch

    from workbench import problems
    from workbench.bench import peers
    from workbench.problems.loading import fetch

    transport = world(runtime, folder)
    torch.set_num_threads(bind(transport.rank, transport.num_workers))
    problem = problems.get("wide-mlp", megabytes=MEGABYTES)
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=peers.LR)
    meet, slowest = peers.slowest_here(runtime)

    def step_s(num_samples: int) -> float:
        batch = fetch(problem.train_data(), list(range(num_samples)))
        taken = []
        for _ in range(WARM + STEPS):
            meet()
            begin = time.perf_counter()
            optimizer.zero_grad()
            problem.batch_loss(model, batch).backward()
            optimizer.step()
            taken.append(slowest(time.perf_counter() - begin))
        return sorted(taken[WARM:])[STEPS // 2]

    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    wire_s = native_bytes(transport.num_workers, gradient_bytes) / (parse_rate(RATE) / 8 * PAYLOAD)
    found = batch_on_line({FEW: step_s(FEW), MANY: step_s(MANY)}, wire_s / ratio)
    transport.close()
    return found


def batch_on_line(step_s: dict[int, float], seconds: float) -> int:
    """Return the number of samples whose step takes `seconds`, by a line through two points.

    >>> batch_on_line({32: 0.010, 256: 0.038}, 0.067)
    488
    """
    (few, few_s), (many, many_s) = step_s.items()
    sample_s = max(many_s - few_s, 1e-9) / (many - few)
    return max(1, round(few + (seconds - few_s) / sample_s))
