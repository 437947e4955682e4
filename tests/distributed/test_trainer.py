"""`Trainer` in a user's own loop, on real ranks, beside torch DDP and one process with all samples."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.pool import shared_pool
from tests.laws import tiny
from workbench.algorithms import LayerwiseSGD, PipeSGD, SynchronousSGD
from workbench.errors import ConfigError, Diverged, PeerFailed, RankMismatch
from workbench.program import Algorithm
from workbench.trainer import Trainer

RUNTIMES = [pytest.param("torch", id="gloo"), pytest.param("mpi", id="mpi", marks=pytest.mark.mpi)]
METHODS = [SynchronousSGD(), LayerwiseSGD(bucket_bytes=0), LayerwiseSGD(bucket_bytes=64, apply="any"), PipeSGD(width=1)]
NUM_STEPS = 6


def shares(num_ranks: int, sizes: tuple[int, ...] | None = None) -> list[list[slice]]:
    """For each step, each rank's samples."""
    found, start = [], 0
    for _ in range(NUM_STEPS):
        step = []
        for rank in range(num_ranks):
            size = sizes[rank] if sizes else 3
            step.append(slice(start, start + size))
            start += size
        found.append(step)
    return found


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = tiny.mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_with_trainer(method: Algorithm, sizes: tuple[int, ...] | None, count: bool) -> torch.Tensor:
    from workbench.runtimes.launch import world_here

    rank, num_ranks = world_here()
    model, optimizer = make(seed=rank)  # every rank begins elsewhere: rank 0's weights must reach all
    x, y = tiny.data(200)
    with Trainer(model, optimizer, method) as trainer:
        for step in shares(num_ranks, sizes):
            mine = step[rank]
            closure = partial(lambda part: nn.functional.cross_entropy(model(x[part]), y[part]), mine)
            size = mine.stop - mine.start
            trainer.step(closure if size else None, size if count and size else None)
    return parameters(model)


def train_alone(num_ranks: int, sizes: tuple[int, ...] | None, delay: int = 0) -> torch.Tensor:
    """One process with all ranks' samples; gradients are applied `delay` steps late, the last ones at the end."""
    model, optimizer = make()
    x, y = tiny.data(200)
    waiting: list[list[torch.Tensor]] = []

    def update() -> None:
        for param, grad in zip(model.parameters(), waiting.pop(0), strict=True):
            param.grad = grad
        optimizer.step()

    for step in shares(num_ranks, sizes):
        part = slice(step[0].start, step[-1].stop)
        loss = nn.functional.cross_entropy(model(x[part]), y[part])
        waiting.append(list(torch.autograd.grad(loss, list(model.parameters()))))
        if len(waiting) > delay:
            update()
    while waiting:
        update()
    return parameters(model)


def train_with_ddp() -> torch.Tensor:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model, optimizer = make()
    x, y = tiny.data(200)
    wrapped = DistributedDataParallel(model)
    for step in shares(dist.get_world_size()):
        mine = step[dist.get_rank()]
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x[mine]), y[mine]).backward()
        optimizer.step()
    return parameters(model)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_equal_batches_train_as_one_process_with_all_samples(runtime: str, method: Algorithm) -> None:
    results = shared_pool(runtime, 2).run(train_with_trainer, method, None, False)
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0], train_alone(2, None), rtol=1e-12, atol=1e-14)


def test_trains_as_ddp_does() -> None:
    pool = shared_pool("torch", 2)
    torch.testing.assert_close(
        pool.run(train_with_trainer, SynchronousSGD(), None, False)[0], pool.run(train_with_ddp)[0], rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_counted_unequal_batches_are_weighted_by_their_samples(runtime: str) -> None:
    results = shared_pool(runtime, 3).run(train_with_trainer, SynchronousSGD(), (5, 1, 0), True)
    torch.testing.assert_close(results[0], train_alone(3, (5, 1, 0)), rtol=1e-12, atol=1e-14)
    assert torch.equal(results[0], results[2])


def test_uncounted_unequal_batches_count_the_same_per_rank() -> None:
    counted, uncounted = (shared_pool("torch", 2).run(train_with_trainer, SynchronousSGD(), (5, 1), count)[0] for count in (True, False))
    assert not torch.allclose(counted, uncounted)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("width", [2, 3])
def test_gradients_in_flight_are_applied_at_the_end(runtime: str, width: int) -> None:
    results = shared_pool(runtime, 2).run(train_with_trainer, PipeSGD(width=width), None, False)
    torch.testing.assert_close(results[0], train_alone(2, None, delay=width - 1), rtol=1e-12, atol=1e-14)


def step_until_one_fails() -> tuple[str, str, float]:
    from workbench.runtimes.launch import world_here

    rank, _ = world_here()
    model, optimizer = make()
    begin = time.monotonic()
    try:
        with Trainer(model, optimizer, SynchronousSGD(), timeout_s=30) as trainer:
            for step in range(4):
                if rank == 1 and step == 2:
                    trainer.step(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
                trainer.step(lambda: model(torch.ones(2, 6, dtype=torch.float64)).square().mean())
    except (PeerFailed, ZeroDivisionError) as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", 0.0


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_one_ranks_exception_ends_the_step_on_all(runtime: str) -> None:
    outcomes = shared_pool(runtime, 2).run(step_until_one_fails)
    assert [name for name, _, _ in outcomes] == ["PeerFailed", "ZeroDivisionError"]
    assert "rank 1" in outcomes[0][1]
    assert "ZeroDivisionError" in outcomes[0][1]
    assert max(seconds for _, _, seconds in outcomes) < 5


def make_unequal_models() -> None:
    from workbench.runtimes.launch import world_here

    rank, _ = world_here()
    model = nn.Linear(3, 2 + rank)
    Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), SynchronousSGD())


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_unequal_models_are_refused_by_name(runtime: str) -> None:
    with pytest.raises(RankMismatch, match=r"weight: \(2, 3\).*weight: \(3, 3\)"):
        shared_pool(runtime, 2).run(make_unequal_models)


def fail_at_construction() -> tuple[str, str, float]:
    from workbench.runtimes.launch import world_here

    rank, _ = world_here()
    model = nn.Linear(3, 2).requires_grad_(rank != 1)
    begin = time.monotonic()
    try:
        Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), SynchronousSGD(), timeout_s=30)
    except (ConfigError, PeerFailed) as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", 0.0


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_an_error_at_construction_releases_the_others(runtime: str) -> None:
    outcomes = shared_pool(runtime, 2).run(fail_at_construction)
    assert [name for name, _, _ in outcomes] == ["PeerFailed", "ConfigError"]
    assert "no trainable parameter" in outcomes[0][1]
    assert max(seconds for _, _, seconds in outcomes) < 5


def running_means() -> torch.Tensor:
    from workbench.runtimes.launch import world_here

    rank, _ = world_here()
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    with Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), SynchronousSGD()) as trainer:
        trainer.step(lambda: model(torch.arange(12.0).view(4, 3) + 100 * rank).square().mean())
    return model[0].running_mean


def test_buffers_are_rank_0s_at_the_end() -> None:
    first, second = shared_pool("torch", 2).run(running_means)
    assert torch.equal(first, second)
    assert first.max() < 10, "rank 1's inputs are a hundred larger"


def diverge() -> str:
    model = nn.Linear(3, 1)
    try:
        with Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), SynchronousSGD()) as trainer:
            trainer.step(lambda: model(torch.ones(2, 3)).sum() * float("nan"))
    except (Diverged, PeerFailed) as error:
        return str(error)
    return ""


def test_a_loss_that_is_no_number_ends_the_loop() -> None:
    assert all("lower the learning rate" in words for words in shared_pool("torch", 2).run(diverge))


def record_a_run() -> dict[str, Any]:
    model, optimizer = make()
    with Trainer(model, optimizer, PipeSGD(), record=True) as trainer:
        for _ in range(5):
            trainer.step(lambda: model(torch.ones(2, 6, dtype=torch.float64)).square().mean(), num_samples=2)
        run = trainer.finish()
    assert run is not None
    return {"folder": str(run.folder), "staleness": max(row["staleness"] or 0 for row in run.metrics[0]), "ranks": sorted(run.metrics)}


def test_a_recorded_loop_leaves_a_run(runs: Any) -> None:
    from workbench.trace.run import Run

    shared_pool("torch", 2).close()  # its ranks must learn of this test's run store
    first, second = shared_pool("torch", 2).run(record_a_run)
    shared_pool("torch", 2).close()
    assert first["folder"] == second["folder"]
    run = Run.load(first["folder"])
    assert sorted(run.metrics) == [0, 1]
    assert [row["staleness"] for row in run.metrics[1]] == [None, 0, 1, 1, 1]  # the first two gradients are taken at the same weights
    assert all(math.isfinite(row["loss"]) for row in run.metrics[0])
    assert (
        {"forward", "backward", "apply", "all_reduce", "wait"}
        >= set(run.spans.kind_names.tolist())
        >= {"forward", "backward", "apply", "all_reduce"}
    )
    assert run.info["status"] == "finished"


def test_a_finished_trainer_says_so_and_leaves_the_model_alone() -> None:
    model, optimizer = make()
    trainer = Trainer(model, optimizer, SynchronousSGD())
    trainer.finish()
    with pytest.raises(ConfigError, match="finished"):
        trainer.step(lambda: model(torch.ones(1, 6, dtype=torch.float64)).sum())
    model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_a_loss_per_sample_is_refused() -> None:
    model, optimizer = make()
    with pytest.raises(ConfigError, match="one number"), Trainer(model, optimizer, SynchronousSGD()) as trainer:
        trainer.step(lambda: model(torch.ones(2, 6, dtype=torch.float64)).sum(1))
