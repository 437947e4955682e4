"""What a real model's compute costs, in one call: how long, how it falls on the parameters, and what of it is there for any batch."""

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
from workbench.problems.base import Batch, Problem, fetch, to_device
from workbench.replica.backward import Hooks, Micro
from workbench.replica.optimizer_step import uncompiled
from workbench.replica.replica import Replica, compute_threads
from workbench.settings import OptimizerFactory

WARM_UP_STEPS = 2


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What `measure_steps` found.

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
        """Of forward and backward together: the middle half of the steps, from its least to its most, over the median."""
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
    """Time forward, backward and update of one minibatch in this process, and what of them falls on each parameter.

    `threads` are those of the worker that is modelled: on a busy machine more of them than idle cores are slower, not faster.

    Returns:
        Medians of `steps`, after two to warm up. `fixed_share` is from a second batch, a quarter as large, and 0 where the batch is
        too small to tell (below 3 samples). Shares are of steps of their own, since looking costs time.
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
    """`measure_compute`, with the seconds of every step beside it.

    Args:
        problem: whose model and data.
        batch_size: samples of a full minibatch; None: the problem's.
        optimizer: parameters -> optimizer; None: the problem's.
        steps: how many are measured.
        threads: compute threads.
        device: where the model is put; None: where the problem makes it.

    Raises:
        ConfigError: nothing to measure.
    """
    if steps < 1:
        raise ConfigError(f"steps={steps}: at least one step must be measured")
    size = batch_size or problem.batch_size
    if size < 1:
        raise ConfigError(f"batch_size={size}: a minibatch has at least one sample")
    few = max(2, size // 4)  # batch norm knows no single sample
    with torch.random.fork_rng(devices=[]), compute_threads(threads), ExitStack() as stack:
        bench = _Bench(problem, optimizer, device)
        stack.callback(bench.replica.close)
        full, part = bench.batch(size), bench.batch(few)
        rows, few_rows = [], []
        for _ in range(steps + WARM_UP_STEPS):  # in turn, so that a machine that slows down slows both
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
        if not self.model.training:  # parts may be frozen (BatchNorm), and stay so
            self.model.train()
        if device is not None:
            self.model = self.model.to(device)
        parameters = [param for param in self.model.parameters() if param.requires_grad]
        with uncompiled():
            made = (optimizer or problem.optimizer)(parameters)
        self.replica = Replica(self.model, made)
        self.device = self.replica.layout.device
        self._data = problem.train_data()
        self._num_steps = 0

    def batch(self, size: int) -> Batch:
        """Samples of the training set, from the first again where it is short, on the model's device."""
        num = len(self._data)  # type: ignore[arg-type]
        return to_device(fetch(self._data, [index % num for index in range(size)]), self.device)

    def step(self, batch: Batch, size: int) -> tuple[float, float, float]:
        """(forward, backward, update) seconds of one step."""
        marks: list[Any] = []
        self._run(batch, size, lambda: marks.append(_mark(self.device)))
        at = _seconds(marks, self.device)
        return at[1] - at[0], at[2] - at[1], at[3] - at[2]

    def _run(self, batch: Batch, size: int, mark: Callable[[], None]) -> None:
        """One step; `mark` is called when forward, backward and update begin, and at the end."""
        micro = Micro(lambda: self.problem.batch_loss(self.model, batch), 1.0, size)
        gradient, _ = self.replica.backward(self._num_steps, [micro], Hooks(lambda name: mark()))
        self.replica.apply(gradient)
        mark()
        self._num_steps += 1

    def look(self, batch: Batch, size: int) -> tuple[Array | None, Array]:
        """Of each parameter in order of registration, its shares of forward (None: no module was called) and of backward."""
        marks: list[tuple[int, Any]] = []  # who: below 0 a phase begins, then a module or a parameter

        def note(who: int, *_: object) -> None:
            marks.append((who, _mark(self.device)))

        parameters = self.replica.parameters
        place = {id(param): index for index, param in enumerate(parameters)}
        holders = [
            [place[id(param)] for param in module.parameters(recurse=False) if id(param) in place] for module in self.model.modules()
        ]
        with ExitStack() as stack:
            for number, module in enumerate(self.model.modules()):
                if holders[number]:
                    stack.callback(module.register_forward_pre_hook(partial(note, number)).remove)
            for index, param in enumerate(parameters):
                stack.callback(param.register_post_accumulate_grad_hook(partial(note, index)).remove)
            self._run(batch, size, partial(note, -1))
        at = _seconds([mark for _, mark in marks], self.device)
        begin, backward, end, _ = (position for position, (who, _) in enumerate(marks) if who < 0)
        forward_shares = _of_forward([who for who, _ in marks[begin + 1 : backward]], at[begin : backward + 1], holders, parameters)
        arrived = np.zeros(len(parameters))
        for position in range(backward + 1, end):
            arrived[marks[position][0]] = at[position] - at[backward]
        return forward_shares, _of_backward(arrived)


def _of_forward(called: list[int], at: Sequence[float], holders: list[list[int]], parameters: Sequence[Tensor]) -> Array | None:
    """From one module's call to the next is spent on the first one's parameters, by elements; what comes before the first is its own.

    A module whose parameters another one has used before (a head that is tied to the embedding) counts with the module called before it:
    that is when it runs, forward and backward.

    `at`: when the pass began, when each module was called, when the pass ended.
    """
    if not called:
        return None
    shares = np.zeros(len(parameters))
    edges = [at[0], *at[2:]]
    used: dict[int, int] = {}  # parameter -> the module that was the first to use it
    place = called[0]
    for number, (begin, end) in zip(called, pairwise(edges), strict=True):
        first = {used.setdefault(index, number) for index in holders[number]}
        place = number if number in first else place
        numel = np.array([parameters[index].numel() for index in holders[place]], dtype=np.float64)
        shares[holders[place]] += (end - begin) * numel / max(numel.sum(), 1.0)
    total = shares.sum()
    return shares / total if total > 0 else None


def _of_backward(arrived: Array) -> Array:
    """A bucket leaves when its last gradient is there, and buckets leave in order from the last parameter on.

    `arrived`: (parameters,) seconds from when backward began until each gradient was there, 0 where none came.
    """
    ready = np.maximum.accumulate(arrived[::-1])[::-1]
    if ready[0] <= 0:  # quicker than the clock ticks: all are there at the end
        ready[0] = 1.0
    shares: Array = (ready - np.append(ready[1:], 0.0)) / ready[0]
    return shares


def _middle(shares: list[Array]) -> tuple[float, ...]:
    """The median over steps of what has been spent up to each parameter, from the last one on, as shares that sum to 1."""
    if not shares:
        return ()
    up_to = np.median([np.cumsum(row[::-1])[::-1] for row in shares], axis=0)
    return tuple(((up_to - np.append(up_to[1:], 0.0)) / up_to[0]).tolist())


def _fixed_share(size: int, rows: Array, few: int, few_rows: Array) -> float:
    """Where the line through both batches' forward and backward seconds meets no samples, over the full batch's.

    By the quickest step of each: what else this machine does only adds, and would look like a fixed part.
    """
    full_s, few_s = (float(np.min(times[:, 0] + times[:, 1])) for times in (rows, few_rows))
    fixed_s = (few_s * size - full_s * few) / (size - few)
    return min(1.0, max(0.0, fixed_s / full_s)) if full_s > 0 else 0.0


def _mark(device: torch.device) -> Any:
    """Now; on a GPU, when it comes to what was asked of it up to here."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(marks: Sequence[Any], device: torch.device) -> list[float]:
    """Of each mark since the first."""
    if device.type != "cuda":
        return [mark - marks[0] for mark in marks]
    torch.cuda.synchronize(device)
    return [marks[0].elapsed_time(mark) / 1e3 for mark in marks]
