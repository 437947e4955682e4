"""Measure a real model's compute: its time, each parameter's share, and the share that does not depend on the batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from workbench.costs.compute import Compute
from workbench.costs.stragglers import Array
from workbench.errors import ConfigError
from workbench.problems.base import Problem
from workbench.problems.loading import Batch, to_device
from workbench.replica.backward import Hooks, MicroBatch
from workbench.replica.optimizer_step import build_optimizer
from workbench.replica.replica import Replica, compute_threads
from workbench.settings import OptimizerFactory

WARM_UP_STEPS = 2


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """The result of `measure_steps`.

    Attributes:
        compute: the medians.
        forward_s, backward_s, update_s: (steps,) seconds of each measured step.
    """

    compute: Compute
    forward_s: Array
    backward_s: Array
    update_s: Array

    @property
    def spread(self) -> float:
        """Interquartile range of forward and backward seconds over steps, divided by the median."""
        low, middle, high = np.quantile(self.forward_s + self.backward_s, [0.25, 0.5, 0.75])
        return float((high - low) / middle)


def measure_compute(
    problem: Problem,
    batch_size: int | None = None,
    *,
    optimizer: OptimizerFactory | None = None,
    steps: int = 10,
    threads: int = 1,
    device: torch.device | str | None = None,
) -> Compute:
    """Time forward, backward and update of one minibatch in this process, and each parameter's share of them.

    `threads` are those of the modelled worker: on a busy machine, more threads than idle cores are slower.

    Returns:
        Medians of `steps` steps, after two warm-up steps. `fixed_share` comes from a second batch, a quarter as large.
        It is 0 for a batch of fewer than 3 samples. Shares are measured in separate steps, because their hooks take
        time.
    """
    return measure_steps(problem, batch_size, optimizer=optimizer, steps=steps, threads=threads, device=device).compute


def measure_steps(
    problem: Problem,
    batch_size: int | None = None,
    *,
    optimizer: OptimizerFactory | None = None,
    steps: int = 10,
    threads: int = 1,
    device: torch.device | str | None = None,
) -> Measured:
    """Do the same as `measure_compute`, and also return the seconds of every step.

    Args:
        problem: the problem with model and data.
        batch_size: samples of a full minibatch; None: the problem's.
        optimizer: function from parameters to optimizer; None: the problem's.
        steps: number of measured steps.
        threads: compute threads.
        device: the model's device; None: where the problem creates it.

    Raises:
        ConfigError: there is nothing to measure.
    """
    if steps < 1:
        raise ConfigError(f"steps={steps}: at least one step must be measured")
    size = batch_size or problem.batch_size
    if size < 1:
        raise ConfigError(f"batch_size={size}: a minibatch has at least one sample")
    few = max(2, size // 4)  # batch norm needs two samples
    with torch.random.fork_rng(devices=[]), compute_threads(threads), ExitStack() as stack:
        bench = _Bench(problem, optimizer, device)
        stack.callback(bench.replica.close)
        full, part = bench.batch(size), bench.batch(few)
        rows, few_rows = [], []
        for _ in range(steps + WARM_UP_STEPS):  # in turn, so that a slower machine slows both
            rows.append(bench.step(full, size))
            if few < size:
                few_rows.append(bench.step(part, few))
        looked = [bench.look(full, size) for _ in range(steps + 1)][1:]
    measured = np.array(rows[WARM_UP_STEPS:])
    forward_s, backward_s, update_s = np.median(measured, axis=0).tolist()
    compute = Compute(
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=update_s,
        forward_shares=_middle([forward for forward, _ in looked if forward is not None]),
        backward_shares=_middle([backward for _, backward in looked]),
        fixed_share=_fixed_share(size, measured, few, np.array(few_rows[WARM_UP_STEPS:])) if few < size else 0.0,
    )
    return Measured(compute=compute, forward_s=measured[:, 0], backward_s=measured[:, 1], update_s=measured[:, 2])


@final
class _Bench:
    """A replica on which steps are timed."""

    def __init__(self, problem: Problem, optimizer: OptimizerFactory | None, device: torch.device | str | None) -> None:
        self.problem = problem
        self.model = problem.model()
        if not self.model.training:  # frozen parts (BatchNorm) stay frozen
            self.model.train()
        if device is not None:
            self.model = self.model.to(device)
        parameters = [param for param in self.model.parameters() if param.requires_grad]
        self.replica = Replica(self.model, build_optimizer(optimizer or problem.optimizer, parameters))
        self.device = self.replica.layout.device
        self._source = problem.train_source()
        self._num_steps = 0

    def batch(self, size: int) -> Batch:
        """Return samples of the training set on the model's device; a short set is repeated."""
        return to_device(self._source.some(size), self.device)

    def step(self, batch: Batch, size: int) -> tuple[float, float, float]:
        """Return (forward, backward, update) seconds of one step."""
        marks: list[Any] = []
        self._run(batch, size, lambda: marks.append(_mark(self.device)))
        at = _seconds(marks, self.device)
        return at[1] - at[0], at[2] - at[1], at[3] - at[2]

    def _run(self, batch: Batch, size: int, mark: Callable[[], None]) -> None:
        """Run one step; `mark` is called when forward, backward and update begin, and at the end."""
        loss_of = self.problem.batch_loss if self._num_steps else self.problem.first_loss
        micro = MicroBatch(lambda: loss_of(self.model, batch), 1.0, size)
        gradient, _ = self.replica.backward(self._num_steps, [micro], Hooks(lambda name: mark()))
        self.replica.apply(gradient)
        mark()
        self._num_steps += 1

    def look(self, batch: Batch, size: int) -> tuple[Array | None, Array]:
        """Return the shares of forward (None: no module was called) and of backward, by parameter as registered."""
        marks: list[tuple[int, Any]] = []  # first entry: below 0 a phase begins, otherwise a module or a parameter

        def note(event: int, *_: object) -> None:
            marks.append((event, _mark(self.device)))

        parameters = self.replica.parameters
        place = {id(param): index for index, param in enumerate(parameters)}
        holders = [
            [place[id(param)] for param in module.parameters(recurse=False) if id(param) in place]
            for module in self.model.modules()
        ]
        with ExitStack() as stack:
            for number, module in enumerate(self.model.modules()):
                if holders[number]:
                    stack.callback(module.register_forward_pre_hook(partial(note, number)).remove)
            for index, param in enumerate(parameters):
                stack.callback(param.register_post_accumulate_grad_hook(partial(note, index)).remove)
            self._run(batch, size, partial(note, -1))
        at = _seconds([mark for _, mark in marks], self.device)
        begin, backward, end, _ = (position for position, (event, _) in enumerate(marks) if event < 0)
        forward_shares = _of_forward(
            [event for event, _ in marks[begin + 1 : backward]], at[begin : backward + 1], holders, parameters
        )
        arrived = np.zeros(len(parameters))
        for position in range(backward + 1, end):
            arrived[marks[position][0]] = at[position] - at[backward]
        return forward_shares, _of_backward(arrived)


def _of_forward(
    called: list[int], at: Sequence[float], holders: list[list[int]], parameters: Sequence[Tensor]
) -> Array | None:
    """Attribute the time from a module's call to the next call to that module's parameters, in proportion to elements.

    The time before the first call belongs to the first module. If another module has used the same parameters earlier
    (a head that is tied to the embedding), the time belongs to the module that was called before this one. That module
    runs at nearly the same time, in forward and in backward.

    `at`: the begin of the pass, the time of each call, the end of the pass.
    """
    if not called:
        return None
    shares = np.zeros(len(parameters))
    edges = [at[0], *at[2:]]
    used: dict[int, int] = {}  # parameter -> the first module that used it
    place = called[0]
    for number, (begin, end) in zip(called, pairwise(edges), strict=True):
        first = {used.setdefault(index, number) for index in holders[number]}
        place = number if number in first else place
        numel = np.array([parameters[index].numel() for index in holders[place]], dtype=np.float64)
        shares[holders[place]] += (end - begin) * numel / max(numel.sum(), 1.0)
    total = shares.sum()
    return shares / total if total > 0 else None


def _of_backward(arrived: Array) -> Array:
    """Return each parameter's share of backward.

    A bucket is sent when its last gradient is ready, in order from the last parameter on.

    `arrived`: seconds from the begin of backward until each gradient was ready, shape (parameters,); 0 without one.
    """
    ready = np.maximum.accumulate(arrived[::-1])[::-1]
    if ready[0] <= 0:  # below the clock's resolution: all are ready at the end
        ready[0] = 1.0
    shares: Array = (ready - np.append(ready[1:], 0.0)) / ready[0]
    return shares


def _middle(shares: list[Array]) -> tuple[float, ...]:
    """Return shares that sum to 1: differences of the median cumulative shares, from the last parameter on."""
    if not shares:
        return ()
    up_to = np.median([np.cumsum(row[::-1])[::-1] for row in shares], axis=0)
    return tuple(((up_to - np.append(up_to[1:], 0.0)) / up_to[0]).tolist())


def _fixed_share(size: int, rows: Array, few: int, few_rows: Array) -> float:
    """Return the share of the full batch's forward and backward seconds that remains at 0 samples, by extrapolation.

    It uses the fastest step of each batch. Other load on the machine only adds time, which would look like a fixed
    share.
    """
    full_s, few_s = (float(np.min(times[:, 0] + times[:, 1])) for times in (rows, few_rows))
    fixed_s = (few_s * size - full_s * few) / (size - few)
    return min(1.0, max(0.0, fixed_s / full_s)) if full_s > 0 else 0.0


def _mark(device: torch.device) -> Any:
    """Return the present time; on a GPU, an event after the work enqueued so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(marks: Sequence[Any], device: torch.device) -> list[float]:
    """Return the seconds of each mark since the first."""
    if device.type != "cuda":
        return [mark - marks[0] for mark in marks]
    torch.cuda.synchronize(device)
    return [marks[0].elapsed_time(mark) / 1e3 for mark in marks]
