"""The batch size with which the wire takes a given multiple of compute, found on the machine that is measured."""

from __future__ import annotations

import time
from collections.abc import Callable

from workbench.bench.ranks import Ranks, bind, world
from workbench.bench.wire_cases import MEGABYTES, RATE
from workbench.clusters.emulated.check import PAYLOAD
from workbench.clusters.emulated.rates import parse_rate
from workbench.collectives import native_bytes
from workbench.runtimes.rank.main import RuntimeName

FEW, MANY = 32, 256  # samples of the first two batches that are timed
MOST = 4096  # samples that the problem has
STEPS, WARM = 9, 2
NEAR, MOST_CORRECTIONS = 0.05, 4  # the line bends where batches are small: time the batch that it gives, and correct it


def batch_of(there: Ranks, ratio: float) -> int:
    """Return the samples of a rank in a step, so that one sum takes about `ratio` times the compute of a step."""
    return int(there.call(fitting_batch, ratio)[0])


def fitting_batch(runtime: RuntimeName, folder: str, ratio: float) -> int:
    """On each rank: time steps with two batch sizes on all ranks at once, draw a line through them, and correct it."""
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
    found = fitted(step_s, wire_s / ratio)
    transport.close()
    return found


def fitted(step_s: Callable[[int], float], seconds: float) -> int:
    """Return the number of samples whose step takes `seconds`, or nearly; 1 if every step takes longer.

    >>> fitted(lambda samples: 0.004 + 0.001 * samples**0.5, 0.010)
    39
    """
    times = {FEW: step_s(FEW), MANY: step_s(MANY)}
    for _ in range(MOST_CORRECTIONS):
        ordered = sorted(times, key=lambda samples: times[samples])
        place = sum(times[samples] < seconds for samples in ordered)  # the two around it, or the two next to it
        place = min(max(place, 1), len(ordered) - 1)
        few, many = sorted(ordered[place - 1 : place + 1])
        found = min(batch_on_line({few: times[few], many: times[many]}, seconds), MOST)
        if found in times:
            break
        times[found] = step_s(found)
        if abs(times[found] / seconds - 1) < NEAR:
            break
    return min(times, key=lambda samples: abs(times[samples] - seconds))


def batch_on_line(step_s: dict[int, float], seconds: float) -> int:
    """Return the number of samples whose step takes `seconds`, by a line through two points.

    >>> batch_on_line({32: 0.010, 256: 0.038}, 0.067)
    488
    """
    (few, few_s), (many, many_s) = step_s.items()
    sample_s = max(many_s - few_s, 1e-9) / (many - few)
    return max(1, round(few + (seconds - few_s) / sample_s))
