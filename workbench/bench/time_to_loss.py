"""Seconds to a loss if the wire is the limit, and steps of parameter servers compared with their interface's limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.bench import BenchOptions
from workbench.bench.operating_point import batch_of
from workbench.bench.paired import Step
from workbench.bench.ranks import CALL_S, Ranks, bind, ranks, world
from workbench.bench.rows import Row, compare
from workbench.bench.wire_cases import (
    BITS,
    BUCKETS_MIB,
    CONCURRENT,
    HOSTS,
    MEGABYTES,
    NETWORK,
    PIPE,
    POWER_RANK,
    RATE,
    encoded,
    title,
)
from workbench.clusters.emulated.check import PAYLOAD
from workbench.clusters.emulated.rates import parse_rate
from workbench.runtimes.rank.main import RuntimeName
from workbench.trace.run import Run
from workbench.units import MIB

if TYPE_CHECKING:
    from workbench.problems.base import Problem

RATIOS = (1, 4)
HIDDEN = (1400, 1400)  # an MLP on the handwritten digits: 2.07 million parameters, 8.3 MB
TARGET = 0.15  # mean training loss over WINDOW steps; the initial loss is ln 10 = 2.3
WINDOW = 5
LR = 0.1  # to the target: 15 to 20 steps without delay, 20 to 30 with delay 1 (chosen on one process before any timing)
MAX_STEPS = 50
REPEATS = 3
LAYER_MIB, DDP_MIB = 1, 1
SERVER_HOSTS, SERVER_RATIOS, SERVER_STEPS, SKIPPED = 4, (1, 2, 4), 12, 4
SERVER_OF_LIMIT = 1.10


def run(how: BenchOptions) -> Iterator[Row]:
    """Measure on gloo, which torch DDP uses too."""
    for number in how.ranks or HOSTS:
        cases = {ratio: f"to a loss of {TARGET:g}, {title(number, 'torch', ratio)}" for ratio in RATIOS}
        cases = {ratio: name for ratio, name in cases.items() if how.wanted(name)}
        if cases:
            with ranks(number, "torch", NETWORK) as there:
                for ratio, name in cases.items():
                    how.report(f"{name} ...")
                    batch_size = batch_of(there, ratio)
                    found = [there.call(to_a_loss, batch_size, turn) for turn in range(min(how.rounds, REPEATS))]
                    yield from target_rows(name, found, ratio)
    if SERVER_HOSTS in (how.ranks or HOSTS):
        yield from _servers(how)


# -- time to a loss -------------------------------------------------------------------------------------------


def to_a_loss(runtime: RuntimeName, folder: str, batch_size: int, turn: int) -> dict[str, list[tuple[float, float]]]:
    """Return way -> (seconds at the end, loss of this rank's samples) of each step.

    All ways start with the same weights and take the same samples.
    """
    import torch

    from workbench import problems
    from workbench.algorithms import LayerwiseSGD, PipeSGD, SynchronousSGD
    from workbench.bench import peers
    from workbench.runtimes.user_loop.trainer import Trainer

    transport = world(runtime, folder)
    number, rank = transport.num_workers, transport.rank
    torch.set_num_threads(bind(rank, number))
    problem = problems.get("digits-mlp", hidden=HIDDEN)
    shards = _minibatches(problem, number, rank, batch_size)
    meet, _ = peers.slowest_here(runtime)

    def one(make: Callable[..., tuple[Step, Callable[[], object]]]) -> list[tuple[float, float]]:
        torch.manual_seed(0)
        model = problem.model()
        seen: list[float] = []

        def loss(of: Any) -> torch.Tensor:
            value = problem.batch_loss(of, shards[len(seen)])
            seen.append(float(value.detach()))
            return value

        step, finish = make(model, loss)
        meet()
        begin, ends = time.perf_counter(), []
        for _ in range(MAX_STEPS):
            step()
            ends.append(time.perf_counter() - begin)
        finish()
        return list(zip(ends, seen, strict=True))

    def ours(algorithm: Any) -> Callable[..., tuple[Step, Callable[[], object]]]:
        def make(model: Any, loss: Callable[[Any], torch.Tensor]) -> tuple[Step, Callable[[], object]]:
            trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=LR), algorithm)
            return partial(trainer.step, partial(loss, model)), trainer.finish

        return make

    def ddp(hook: Any = None, mib: int = DDP_MIB) -> Callable[..., tuple[Step, Callable[[], object]]]:
        return lambda model, loss: (peers.ddp_step(model, loss, mib, hook, lr=LR), lambda: None)

    ways = {
        "synchronous": ours(SynchronousSGD()),
        "layer-wise": ours(LayerwiseSGD(bucket_bytes=LAYER_MIB * MIB, **CONCURRENT)),
        PIPE: ours(PipeSGD()),
    }
    ways |= {f"{PIPE}, {bits}": ours(PipeSGD(collective=encoded(name))) for bits, name in BITS.items()}
    ways |= {
        "torch DDP": ddp(),
        "torch DDP, fp16 hook": ddp(peers.fp16_hook()),
        "torch DDP, PowerSGD hook": ddp(peers.power_sgd_hook(POWER_RANK), BUCKETS_MIB[-1]),
    }
    names = list(ways)
    found = {name: one(ways[name]) for name in names[turn % len(names) :] + names[: turn % len(names)]}
    transport.close()
    return found


def _minibatches(problem: Problem, number: int, rank: int, batch_size: int) -> list[Any]:
    """Return a rank's samples of each step, from consecutive global batches."""
    from workbench.problems.loading import fetch

    data, samples = problem.train_data(), problem.num_samples()
    firsts = [(step * number + rank) * batch_size for step in range(MAX_STEPS)]
    return [fetch(data, [(first + place) % samples for place in range(batch_size)]) for first in firsts]


def seconds_to(curves: list[list[tuple[float, float]]], target: float = TARGET, window: int = WINDOW) -> float:
    """Return when the mean loss of all ranks' samples over the last `window` steps first reached the target.

    It is infinite if the target was not reached.

    >>> seconds_to([[(1.0, 3.0), (2.0, 1.0), (3.0, 0.0)], [(1.1, 3.0), (2.1, 1.0), (3.1, 0.0)]], target=1.0, window=2)
    3.1
    """
    losses = np.array([[loss for _, loss in curve] for curve in curves]).mean(0)
    ends = np.array([[end for end, _ in curve] for curve in curves]).max(0)
    means = np.convolve(losses, np.ones(window) / window, mode="valid")
    there = np.flatnonzero(means <= target)
    return float(ends[there[0] + window - 1]) if len(there) else float("inf")


def target_rows(case: str, found: list[list[dict[str, list[tuple[float, float]]]]], ratio: float) -> Iterator[Row]:
    """Yield the ratio of each of our ways to each of DDP's, in seconds to the loss.

    A way that did not reach the loss in each turn has no row, but where the row has a target: there its ratio is
    infinite, so the target is missed.

    Args:
        found: turn -> rank -> way -> curve.
    """
    times = {name: [seconds_to([rank[name] for rank in turn]) for turn in found] for name in found[0][0]}
    reached = {name: taken for name, taken in times.items() if np.isfinite(taken).all()}
    theirs = [name for name in reached if name.startswith("torch DDP")]
    for name in times:
        for other in ("synchronous", *theirs):
            if name.startswith("torch DDP") or name == other or other not in reached:
                continue
            hard = ratio == max(RATIOS) and name == f"{PIPE}, 8 bit" and "hook" in other
            if name in reached or hard:
                ours, below = reached.get(name, reached[other]), 1.0 if hard else None
                row = compare(ours, reached[other], case=case, what=name, over=other, below=below)
                yield row if name in reached else replace(row, ours=inf, ratio=inf, low=inf, high=inf)


# -- parameter servers ----------------------------------------------------------------------------------------


def _servers(how: BenchOptions) -> Iterator[Row]:
    """Measure Pipe-SGD, and synchronous SGD with a parameter server on one of the hosts, in alternating trainings."""
    cases = {ratio: f"one server, {title(SERVER_HOSTS, 'torch', ratio)}" for ratio in SERVER_RATIOS}
    cases = {ratio: name for ratio, name in cases.items() if how.wanted(name)}
    if not cases:
        return
    with ranks(SERVER_HOSTS, "torch", NETWORK) as there:
        for ratio, name in cases.items():
            how.report(f"{name} ...")
            yield from _with_a_server(there, name, batch_of(there, ratio), min(how.rounds, REPEATS))


def _with_a_server(there: Ranks, case: str, batch_size: int, repeats: int) -> Iterator[Row]:
    from workbench.algorithms import NoCommunication, ParameterServerSGD, PipeSGD

    algorithms: dict[str, Any] = {"compute": NoCommunication(), "PS-Sync": ParameterServerSGD(), PIPE: PipeSGD()}
    algorithms |= {f"{PIPE}, {bits}": PipeSGD(collective=encoded(name)) for bits, name in BITS.items()}
    times: dict[str, list[float]] = {name: [] for name in algorithms}
    for _ in range(repeats):
        for name, algorithm in algorithms.items():
            times[name].append(_step_s(there, algorithm, batch_size))
    server_s = 2 * (SERVER_HOSTS - 1) * MEGABYTES * 1e6 / (parse_rate(RATE) / 8 * PAYLOAD)
    limit = [compute + server_s for compute in times["compute"]]
    over = "compute, and the server's interface in and out"
    yield compare(times["PS-Sync"], limit, case=case, what="PS-Sync", over=over, kind="limit", below=SERVER_OF_LIMIT)
    for name in list(algorithms)[2:]:
        yield compare(times[name], times["PS-Sync"], case=case, what=name, over="PS-Sync")


def _step_s(there: Ranks, algorithm: Any, batch_size: int) -> float:
    """Return rank 0's median seconds of a step in a training."""
    from workbench import problems

    problem = problems.get("wide-mlp", megabytes=MEGABYTES)
    run = there.cluster.train(
        algorithm, problem, steps=SERVER_STEPS, batch_size=batch_size, evaluate_every=0, lr=LR
    ).wait(CALL_S)
    ends = [row["seconds"] for row in Run.load(run.folder).metrics[0]]
    return float(median(np.diff(ends)[SKIPPED:]))
