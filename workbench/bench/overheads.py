"""Overheads of many small parameters, requests, traces, memory and notebooks."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.bench import BenchOptions, notebook_cost
from workbench.bench.paired import Step, alternate
from workbench.bench.ranks import ranks, world
from workbench.bench.rows import Row, compare
from workbench.clusters.launchers.choose import RuntimeName
from workbench.machine import environment, num_cores
from workbench.units import MB

if TYPE_CHECKING:
    import torch
    from torch import nn

    from workbench.program import Algorithm

RANKS = (2,)
MANY, EACH = 1000, 64  # parameters, numbers in each
MANY_ASKED = 1.10  # required ratio to DDP's step
REQUEST_S = 5e-6
REQUESTS = 2000  # requests that are timed together
TRACED, TRACED_STEP_S = 1.01, 10e-3  # required ratio, for a step of this length
TRACED_BLOCKS, RECORDED_STEPS = 10, 50  # blocks of such steps in a round; short steps timed together
PLAIN_STEP_S = 20e-3  # a step of a plain DDP loop
PLAIN_BLOCKS, PLAIN_STEPS = 2, 20  # blocks of it in a round, steps in a block
MEMORY_MB = 64  # size of a gradient
MEMORY_STEPS = 6
MEMORY_ROUNDS = 5  # at most; the allocators of new processes differ by half a gradient
SLACK = 0.1  # error of a memory measurement, as a share of a gradient


def run(how: BenchOptions) -> Iterator[Row]:
    """Measure small parameters, traces and memory on gloo ranks, notebooks on MPI ranks, and requests in this process."""
    if how.wanted("a request"):
        yield _request_row(how)
    if how.wanted("a record"):
        yield _record_row(how)
    for number in how.ranks or RANKS:
        yield from _step_rows(how, number)
        if how.wanted(memory := f"memory, {number} ranks, gloo"):
            yield from _memory(memory, number, min(how.rounds, MEMORY_ROUNDS))
        yield from notebook_cost.run(number, how)


def _request_row(how: BenchOptions) -> Row:
    taken = alternate({"request": _requests()}, how.rounds)["request"]
    return compare(
        [seconds / REQUESTS for seconds in taken],
        REQUEST_S,
        case="a request",
        what="foreground all-reduce of one process",
        over=f"{1e6 * REQUEST_S:g} µs allowed",
        kind="limit",
        below=1.0,
    )


def _record_row(how: BenchOptions) -> Row:
    times, allowed_s = recorded(how.rounds), (TRACED - 1) * TRACED_STEP_S
    return compare(
        [recorded_s - not_s for recorded_s, not_s in zip(times["recorded"], times["not"], strict=True)],
        allowed_s,
        case="a record",
        what="of a step of one process, metrics and trace",
        over=f"{1e6 * allowed_s:g} µs allowed, 1 % of {1e3 * TRACED_STEP_S:g} ms",
        kind="limit",
        below=1.0,
    )


def _step_rows(how: BenchOptions, number: int) -> Iterator[Row]:
    """Yield the cost of small parameters, of a trace and of a record, in steps of the same ranks."""
    small, traced, plain = (
        f"{words}, {number} ranks, gloo"
        for words in (f"{MANY} parameters", "a traced step", "a plain loop in record()")
    )
    if not any(map(how.wanted, (small, traced, plain))):
        return
    with ranks(number, "torch") as there:
        if how.wanted(small):
            times = there.call(many_on_rank, how.rounds)[0]
            theirs = times["torch DDP"]
            for what in ("synchronous", "layer-wise"):
                yield compare(times[what], theirs, case=small, what=what, over="torch DDP", below=MANY_ASKED)
        if how.wanted(traced):
            times = there.call(traced_on_rank, TRACED_BLOCKS * how.rounds)[0]
            what = "synchronous, recorded"
            yield compare(times["traced"], times["not"], case=traced, what=what, over="not recorded", below=TRACED)
        if how.wanted(plain):
            times = there.call(plain_on_rank, PLAIN_BLOCKS * how.rounds)[0]
            what = "torch DDP, recorded"
            yield compare(times["recorded"], times["not"], case=plain, what=what, over="not recorded", below=TRACED)


def _requests() -> Step:
    """Return a step of many requests, answered by an interpreter whose communication library does nothing."""
    import torch

    from workbench.bench.collective_runner import Sums
    from workbench.collectives import Native
    from workbench.runtimes.transport.base import SoloTransport

    return partial(Sums(SoloTransport()).repeat, Native(), torch.zeros(2), REQUESTS)


def recorded(rounds: int) -> dict[str, list[float]]:
    """Time steps of one process with almost no compute, with and without a record."""
    import torch

    from workbench.algorithms import SynchronousSGD
    from workbench.runtimes.user_loop.trainer import Trainer

    inputs = torch.ones(1, 2)
    steps: dict[str, Step] = {}
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        environment({"WORKBENCH_RUNS": folder}),
        ExitStack() as stack,
    ):
        for name in ("recorded", "not"):
            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
            trainer = stack.enter_context(Trainer(model, optimizer, SynchronousSGD(), record=name == "recorded"))
            steps[name] = partial(trainer.step, partial(_mean, model, inputs))
        return alternate(steps, rounds, block=RECORDED_STEPS)


def _mean(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    mean: torch.Tensor = model(inputs).mean()
    return mean


def _on_gloo(folder: str, runtime: RuntimeName) -> tuple[Any, Callable[[], object], Callable[[float], float]]:
    import torch

    from workbench.bench import peers

    transport = world(runtime, folder)
    torch.set_num_threads(max(1, num_cores() // transport.num_workers))
    return transport, *peers.slowest_here(runtime)


def many_on_rank(runtime: RuntimeName, folder: str, rounds: int) -> dict[str, list[float]]:
    """Time steps of a model with many small parameters: mainly the cost of hooks, buckets and views."""
    import torch

    from workbench.algorithms import LayerwiseSGD, SynchronousSGD
    from workbench.bench import peers
    from workbench.runtimes.user_loop.trainer import Trainer

    transport, meet, slowest = _on_gloo(folder, runtime)
    inputs = torch.ones(EACH)
    models = [_many() for _ in range(3)]
    steps: dict[str, Step] = {"torch DDP": peers.ddp_step(models[0], lambda model: model(inputs), 25)}
    trainers = []
    for model, (name, algorithm) in zip(
        models[1:], {"synchronous": SynchronousSGD(), "layer-wise": LayerwiseSGD()}.items(), strict=True
    ):
        trainers.append(Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-6), algorithm))
        steps[name] = partial(trainers[-1].step, partial(model, inputs))
    times = alternate(steps, rounds, meet=meet, slowest=slowest)
    for trainer in trainers:
        trainer.finish()
    transport.close()
    return times


def _many() -> nn.Module:
    import torch
    from torch import nn

    class ManyParameters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList([nn.Parameter(torch.zeros(EACH)) for _ in range(MANY)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = x + part
            return x.sum()

    return ManyParameters()


def traced_on_rank(runtime: RuntimeName, folder: str, rounds: int) -> dict[str, list[float]]:
    """Time steps of about 10 ms, with and without a record."""
    import torch
    from torch.nn.functional import cross_entropy

    from workbench import problems
    from workbench.algorithms import SynchronousSGD
    from workbench.problems.loading import fetch
    from workbench.runtimes.user_loop.trainer import Trainer

    transport, meet, slowest = _on_gloo(folder, runtime)
    os.environ["WORKBENCH_RUNS"] = str(Path(folder) / "runs")
    problem = problems.get("wide-mlp", megabytes=2)

    def step_of(batch_size: int, *, record: bool) -> tuple[Trainer, Step]:
        x, y = fetch(problem.train_data(), list(range(batch_size)))
        model = problem.model()
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-4), SynchronousSGD(), record=record)
        return trainer, partial(trainer.step, lambda: cross_entropy(model(x), y))

    probe, step = step_of(64, record=False)
    once_s = min(alternate({"one": step}, 5, meet=meet, slowest=slowest)["one"])
    probe.finish()
    batch_size = max(8, round(64 * TRACED_STEP_S / once_s))
    made = {name: step_of(batch_size, record=name == "traced") for name in ("traced", "not")}
    times = alternate({name: step for name, (_, step) in made.items()}, rounds, block=5, meet=meet, slowest=slowest)
    for trainer, _ in made.values():
        trainer.finish()
    transport.close()
    return times


def plain_on_rank(runtime: RuntimeName, folder: str, rounds: int) -> dict[str, list[float]]:
    """Time steps of torch's DDP of about 20 ms, within a block of `record` and outside of it."""
    from torch.nn.functional import cross_entropy

    from workbench import problems
    from workbench.bench import peers
    from workbench.problems.loading import fetch
    from workbench.runtimes.user_loop.record import Recording, record

    transport, meet, slowest = _on_gloo(folder, runtime)
    os.environ["WORKBENCH_RUNS"] = str(Path(folder) / "runs")
    problem = problems.get("wide-mlp", megabytes=2)
    active = list[Recording]()

    def plain_step(batch_size: int) -> Step:
        x, y = fetch(problem.train_data(), list(range(batch_size)))
        return peers.ddp_step(problem.model(), lambda net: cross_entropy(net(x), y), 25)

    once_s = min(alternate({"one": plain_step(64)}, 5, meet=meet, slowest=slowest)["one"])
    step = plain_step(max(8, round(64 * PLAIN_STEP_S / once_s)))

    def recorded_step() -> None:
        if not active:  # in a step that leads a block, and is not timed
            active.append(record().__enter__())
        step()

    def unrecorded_step() -> None:
        if active:
            active.pop().__exit__(None, None, None)
        step()

    ways: dict[str, Step] = {"recorded": recorded_step, "not": unrecorded_step}
    times = alternate(ways, rounds, block=PLAIN_STEPS, lead=2, meet=meet, slowest=slowest)
    unrecorded_step()
    transport.close()
    return times


def _memory(case: str, number: int, rounds: int) -> Iterator[Row]:
    """Measure a rank's memory with each algorithm, in new processes: the excess over DDP's memory, in gradients."""
    found: dict[str, list[float]] = {"torch DDP": [], "synchronous": [], "PipeSGD, K = 2": []}
    for _ in range(rounds):
        for what, grown in found.items():
            with ranks(number, "torch") as there:
                grown.append(there.call(memory_on_rank, what)[0])
    for what, gradients in (("synchronous", 0.0), ("PipeSGD, K = 2", 1.0)):
        pairs = zip(found[what], found["torch DDP"], strict=True)
        beyond = [(ours - theirs) / (MEMORY_MB * MB) for ours, theirs in pairs]
        allowed = gradients + SLACK
        over = f"{allowed:g} gradients beyond torch DDP's allowed"
        yield compare(beyond, allowed, case=case, what=what, over=over, kind="limit", unit="1", below=1.0)


def memory_on_rank(runtime: RuntimeName, folder: str, what: str) -> float:
    """Return the bytes by which this process's own memory grew in the training."""
    import psutil
    import torch
    from torch.nn.functional import cross_entropy

    from workbench import problems
    from workbench.algorithms import PipeSGD, SynchronousSGD
    from workbench.bench import peers
    from workbench.problems.loading import fetch
    from workbench.runtimes.user_loop.trainer import Trainer

    transport, _meet, _slowest = _on_gloo(folder, runtime)
    problem = problems.get("wide-mlp", megabytes=MEMORY_MB, samples=64)
    x, y = fetch(problem.train_data(), list(range(8)))
    gc.collect()
    before = psutil.Process().memory_full_info().uss
    model = problem.model()
    if what == "torch DDP":
        step: Step = peers.ddp_step(model, lambda net: cross_entropy(net(x), y), 25)
    else:
        algorithm: Algorithm = SynchronousSGD() if what == "synchronous" else PipeSGD(width=2)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-6), algorithm)
        step = partial(trainer.step, lambda: cross_entropy(model(x), y))
    for _ in range(MEMORY_STEPS):
        step()
    gc.collect()
    after = psutil.Process().memory_full_info().uss
    transport.close()
    return float(after - before)
