"""Seconds that a worker's compute costs."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

import numpy as np
import torch

from workbench.backward import Hooks, Micro
from workbench.costs.stragglers import Array, Stragglers
from workbench.errors import ConfigError
from workbench.gradients import Layout
from workbench.problems.base import Problem, fetch
from workbench.replica import Replica, compute_threads
from workbench.settings import OptimizerFactory


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Forward, backward and update of one full minibatch; fewer samples take proportionally less.

    Attributes:
        forward_s, backward_s, update_s: seconds where nothing is in the way.
        stragglers: what is in the way of forward and backward; several multiply.
        forward_shares, backward_shares: of each parameter in order of registration, what part of the pass is spent where it is
            used; empty: in proportion to its elements.
    """

    forward_s: float
    backward_s: float
    update_s: float = 0.0
    stragglers: tuple[Stragglers, ...] = ()
    forward_shares: tuple[float, ...] = ()
    backward_shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stragglers, Stragglers):
            object.__setattr__(self, "stragglers", (self.stragglers,))
        if min(self.forward_s, self.backward_s, self.update_s) < 0:
            raise ConfigError(f"{self}: seconds must be 0 or more")

    def __str__(self) -> str:
        parts = f"forward {self.forward_s * 1e3:.3g} ms, backward {self.backward_s * 1e3:.3g} ms, update {self.update_s * 1e3:.3g} ms"
        return parts + "".join(f", {law}" for law in self.stragglers)

    @property
    def timed(self) -> bool:
        """Whether how long work takes depends on when it begins."""
        return any(law.timed for law in self.stragglers)

    def factors(self, seed: int, step: int, num_workers: int) -> Array:
        """(num_workers,) by what each worker's forward and backward are slower in this step."""
        found = np.ones(num_workers)
        for law in self.stragglers:
            found *= law.factors(seed, step, num_workers)
        return found

    def finish_s(self, seed: int, rank: int, begin_s: float, seconds: float) -> float:
        """When this worker ends work of so many seconds that it begins at `begin_s`."""
        for law in self.stragglers:
            seconds = law.finish_s(seed, rank, begin_s, seconds) - begin_s
        return begin_s + seconds

    def ready_shares(self, layout: Layout) -> tuple[float, ...]:
        """Of each bucket in order, after what part of backward its gradients are final; ascending to 1."""
        return _cumulative(layout, self.backward_shares)

    def forward_parts(self, layout: Layout) -> tuple[float, ...]:
        """Of each bucket in order of index, what part of forward is spent where its parameters are used."""
        ends = (0.0, *_cumulative(layout, self.forward_shares))
        return tuple(after - before for before, after in pairwise(ends))


def _cumulative(layout: Layout, shares: tuple[float, ...]) -> tuple[float, ...]:
    if shares and len(shares) != len(layout.slots):
        raise ConfigError(f"Compute has shares of {len(shares)} parameters and the model has {len(layout.slots)}: measure this model")
    weights = shares or tuple(slot.numel for slot in layout.slots)
    total = sum(weights) or 1.0
    sums = accumulate(sum(weights[slot.index] for slot in piece.slots) / total for piece in layout.buckets)
    return tuple(min(1.0, value) for value in sums)


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
