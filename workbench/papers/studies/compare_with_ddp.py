"""Compare algorithms with torch's DistributedDataParallel: step times and parameters, same model and batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.problems.base import Problem
from workbench.problems.loading import fetch, to_device
from workbench.program import Algorithm
from workbench.replica.replica import compute_threads
from workbench.rng import derive_seed
from workbench.runtimes.user_loop.ddp_loop import barrier, ddp_step, device_here, process_group, together
from workbench.runtimes.user_loop.trainer import Trainer

DDP, HOOKED = "torch DDP", "torch DDP, our hook"
WARM_UP_ROUNDS = 1


def compare_with_ddp(
    problem: Problem,
    ours: Mapping[str, Algorithm],
    *,
    store: str,
    bucket_bytes: float,
    rounds: int,
    block: int,
    batch_size: int | None = None,
    seed: int = 0,
    threads: int = 1,
) -> dict[str, Any]:
    """Train by torch DDP, by DDP with this package's all-reduce as its hook, and by algorithms.

    Call this on every rank.

    All start from the same parameters. Blocks of steps alternate, and their order rotates from round to round.
    Each rank uses the same minibatch in all steps.

    Args:
        problem: what to train.
        ours: name -> algorithm.
        store: a path that all ranks share and that was not used before.
        bucket_bytes: size of DDP's buckets.
        rounds: number of blocks of each.
        block: number of steps per block.
        batch_size: samples per worker and step; None: that of the problem.
        seed: seed of weights and batches.
        threads: compute threads per rank.

    Returns:
        seconds: name -> seconds per step of the slowest rank, for each round.
        off: name -> largest difference of a parameter from DDP's, relative to the largest parameter.
        moved: the same difference between DDP's end and its start.
        ranks: number of ranks.
    """
    with process_group(store) as (rank, num_ranks), compute_threads(threads), ExitStack() as stack:
        torch.manual_seed(seed)
        start, device = problem.model().state_dict(), device_here(rank)
        num = problem.num_samples()
        chosen = torch.randperm(num, generator=torch.Generator().manual_seed(derive_seed(seed, "beside-ddp", rank)))
        batch = to_device(fetch(problem.train_data(), chosen[: batch_size or problem.batch_size].tolist()), device)
        models: dict[str, nn.Module] = {}
        steps: dict[str, Callable[[], Any]] = {}
        for name in (DDP, HOOKED, *ours):
            models[name] = problem.model()
            models[name].load_state_dict(start)
            models[name].to(device)
            optimizer = problem.optimizer(models[name].parameters())
            loss = partial(problem.batch_loss, batch=batch)
            if name in ours:
                trainer = stack.enter_context(Trainer(models[name], optimizer, ours[name]))
                steps[name] = partial(trainer.step, partial(loss, models[name]))
            else:
                steps[name], close = ddp_step(
                    models[name], optimizer, loss, bucket_bytes=bucket_bytes, hooked=name == HOOKED
                )
                stack.callback(close)
        begin = _flat(models[DDP])
        seconds = _in_turn(steps, rounds, block)
        flat = {name: _flat(model) for name, model in models.items()}
        off = {name: together(_largest_difference(flat[name], flat[DDP])) for name in flat}
    return {"seconds": seconds, "off": off, "moved": _largest_difference(flat[DDP], begin), "ranks": num_ranks}


def _in_turn(steps: Mapping[str, Callable[[], Any]], rounds: int, block: int) -> dict[str, list[float]]:
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-WARM_UP_ROUNDS, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            barrier()
            begin = time.perf_counter()
            for _ in range(block):
                steps[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            took = together((time.perf_counter() - begin) / block)
            if number >= 0:
                times[name].append(took)
    return times


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().cpu().reshape(-1).double() for param in model.parameters()])


def _largest_difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())
