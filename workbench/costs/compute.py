"""Seconds that a worker's compute costs."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import final

import torch

from workbench.backward import Hooks, Micro
from workbench.errors import ConfigError
from workbench.problems.base import Problem, fetch
from workbench.replica import Replica, compute_threads
from workbench.rng import generator
from workbench.settings import OptimizerFactory


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Forward, backward and update of one full minibatch; fewer samples take proportionally less.

    Attributes:
        forward_s, backward_s, update_s: mean seconds.
        jitter: standard deviation of the logarithm of a step's slowness (lognormal with mean 1); 0 for none.
        slow: rank -> factor for machines that are slower for good.
    """

    forward_s: float
    backward_s: float
    update_s: float = 0.0
    jitter: float = 0.0
    slow: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if min(self.forward_s, self.backward_s, self.update_s, self.jitter) < 0:
            raise ConfigError(f"{self}: seconds and jitter must be 0 or more")

    def __str__(self) -> str:
        parts = f"forward {self.forward_s * 1e3:.3g} ms, backward {self.backward_s * 1e3:.3g} ms, update {self.update_s * 1e3:.3g} ms"
        return f"{parts}, jitter {self.jitter:g}" + (f", slow ranks {dict(self.slow)}" if self.slow else "")

    def slowness(self, seed: int, rank: int, step: int) -> float:
        """By what factor this rank is slower than the mean in this step."""
        factor = dict(self.slow).get(rank, 1.0)
        if self.jitter:
            factor *= generator(seed, "jitter", rank, step).lognormal(-(self.jitter**2) / 2, self.jitter)
        return factor


def measure_compute(
    problem: Problem,
    batch_size: int | None = None,
    *,
    optimizer: OptimizerFactory | None = None,
    steps: int = 10,
    threads: int = 1,
) -> Compute:
    """Time forward, backward and update of one minibatch in this process: the median of `steps`, after two to warm up.

    `threads` are those of the worker that is modelled: on a busy machine more of them than idle cores are slower, not faster.
    """
    with torch.random.fork_rng(devices=[]), compute_threads(threads):
        model = problem.model()
        replica = Replica(model, (optimizer or problem.optimizer)([param for param in model.parameters() if param.requires_grad]))
        data = problem.train_data()
        size = batch_size or problem.batch_size
        batch = fetch(data, [index % len(data) for index in range(size)])  # type: ignore[arg-type]
        times: dict[str, list[float]] = {"forward": [], "backward": [], "update": []}
        marks: list[float] = []
        hooks = Hooks(lambda name: marks.append(time.perf_counter()))
        for step in range(steps + 2):
            marks.clear()
            gradient, _ = replica.backward(step, [Micro(lambda: problem.batch_loss(model, batch), 1.0, size)], hooks)
            replica.apply(gradient)
            marks.append(time.perf_counter())
            for name, begin, end in zip(times, marks, marks[1:], strict=False):
                times[name].append(end - begin)
        replica.close()
    medians = {name: statistics.median(values[2:]) for name, values in times.items()}
    return Compute(forward_s=medians["forward"], backward_s=medians["backward"], update_s=medians["update"])
