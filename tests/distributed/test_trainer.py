"""`Trainer` in a user's loop, on real ranks, compared with torch DDP and with one process with all samples."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
import warnings
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from tests.distributed.killing import die
from tests.distributed.pool import RankPool, shared_pool
from tests.distributed.test_served_loops import train_own_loop
from tests.laws import poison, tiny
from tests.laws.train import by_turns, train
from tests.laws.variants import name_of, representatives
from workbench.algorithms import (
    BMUF,
    DPSGD,
    AdaptiveDelaySGD,
    DeAR,
    DiLoCo,
    EagerDiLoCo,
    FedProx,
    GradientTracking,
    LayerwiseSGD,
    LocalSGD,
    PartialAllReduce,
    PipeSGD,
    SlowMo,
    StochasticGradientPush,
    StreamingDiLoCo,
    SynchronousSGD,
)
from workbench.codecs import ErrorFeedback, TopK
from workbench.collectives import Once
from workbench.errors import ConfigError, Diverged, PeerFailed, RankMismatch
from workbench.program import Algorithm
from workbench.runtimes.checkpoint.files import complete_checkpoints, rank_file_path
from workbench.runtimes.user_loop.trainer import Trainer
from workbench.settings import Settings

RUNTIMES = [pytest.param("torch", id="gloo"), pytest.param("mpi", id="mpi", marks=pytest.mark.mpi)]
ALGORITHMS = [
    SynchronousSGD(),
    LayerwiseSGD(bucket_bytes=0),
    LayerwiseSGD(bucket_bytes=64, apply="any"),
    PipeSGD(width=1),
    PartialAllReduce(quorum="all"),
]
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
    return parameters_to_vector(model.parameters()).detach()


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = tiny.mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_with_trainer(algorithm: Algorithm, sizes: tuple[int, ...] | None, count: bool) -> torch.Tensor:
    from workbench.runtimes.rank.main import world_here

    rank, num_ranks = world_here()
    model, optimizer = make(seed=rank)  # every rank begins elsewhere: rank 0's weights must reach all
    x, y = tiny.data(200)
    with Trainer(model, optimizer, algorithm) as trainer:
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
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_equal_batches_train_as_one_process_with_all_samples(runtime: str, algorithm: Algorithm) -> None:
    results = shared_pool(runtime, 2, compiler=True).run(train_with_trainer, algorithm, None, False)
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0], train_alone(2, None), rtol=1e-12, atol=1e-14)


def test_trains_as_ddp_does() -> None:
    pool = shared_pool("torch", 2, compiler=True)
    torch.testing.assert_close(
        pool.run(train_with_trainer, SynchronousSGD(), None, False)[0],
        pool.run(train_with_ddp)[0],
        rtol=1e-12,
        atol=1e-14,
    )


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_counted_unequal_batches_are_weighted_by_their_samples(runtime: str) -> None:
    results = shared_pool(runtime, 3, compiler=True).run(train_with_trainer, SynchronousSGD(), (5, 1, 0), True)
    torch.testing.assert_close(results[0], train_alone(3, (5, 1, 0)), rtol=1e-12, atol=1e-14)
    assert torch.equal(results[0], results[2])


def test_uncounted_unequal_batches_count_the_same_per_rank() -> None:
    counted, uncounted = (
        shared_pool("torch", 2, compiler=True).run(train_with_trainer, SynchronousSGD(), (5, 1), count)[0]
        for count in (True, False)
    )
    assert not torch.allclose(counted, uncounted)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("width", [2, 3])
def test_gradients_in_flight_are_applied_at_the_end(runtime: str, width: int) -> None:
    results = shared_pool(runtime, 2, compiler=True).run(train_with_trainer, PipeSGD(width=width), None, False)
    torch.testing.assert_close(results[0], train_alone(2, None, delay=width - 1), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "algorithm",
    [*representatives(2), SlowMo(every=2), SlowMo(every=2, inner=PipeSGD(width=2)), BMUF(every=2), FedProx(every=2)],
    ids=name_of,
)
def test_every_algorithm_takes_the_steps_of_its_run(algorithm: Algorithm) -> None:
    """Up to rounding it is the simulated run. One that looks at the time learns, with equal replicas if it keeps them so."""
    how = Settings(steps=3, batch_size=3, optimizer=tiny.momentum)
    run = train("simulated", 2, algorithm, tiny.problem(), how)
    found = shared_pool("torch", 2, compiler=True).run(train_own_loop, algorithm, how)
    for rank, ours in enumerate(found):
        if not algorithm.depends_on_timing:
            torch.testing.assert_close(ours, run.parameters[rank][-1], rtol=1e-12, atol=1e-14)
            continue
        assert ours.isfinite().all() and not torch.equal(ours, run.parameters[rank][0])
        assert not algorithm.replicas.equal_parameters or torch.equal(ours, found[0])


def train_and_settle(sign: Path) -> tuple[list[bool], torch.Tensor]:
    """Rank 1 is late for each step, and writes a file before it. Return whether rank 0 settled only after that."""
    from workbench.runtimes.rank.main import world_here

    rank, num_ranks = world_here()
    model, optimizer = make(seed=rank)
    x, y = tiny.data(200)
    waited = []
    with Trainer(model, optimizer, PipeSGD(width=2)) as trainer:
        for number, step in enumerate(shares(num_ranks)):
            mine = step[rank]
            if rank == 1:
                time.sleep(0.2)
                (sign / str(number)).touch()
            trainer.step(partial(lambda part: nn.functional.cross_entropy(model(x[part]), y[part]), mine))
            before = parameters(model).clone()
            trainer.settle()
            waited.append((sign / str(number)).exists() and torch.equal(before, parameters(model)))
    return waited, parameters(model)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_settled_is_when_all_that_was_in_flight_has_come_and_none_of_it_is_applied(
    runtime: str, tmp_path: Path
) -> None:
    (waited, trained), _ = shared_pool(runtime, 2, compiler=True).run(train_and_settle, tmp_path)
    assert waited == [True] * NUM_STEPS
    torch.testing.assert_close(trained, train_alone(2, None, delay=1), rtol=1e-12, atol=1e-14)


def step_with_long_and_short_sums(lanes: int) -> torch.Tensor:
    """Parameters after three steps. A long sum and then a short one are on lane 1; rank 0's lanes begin late."""
    from workbench.runtimes.execution.tasks import Task
    from workbench.runtimes.rank.main import world_here

    rank, _ = world_here()
    block = Task.block

    def late(self: Task, deadline: Any) -> None:
        time.sleep(0.05 * (rank == 0))
        block(self, deadline)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 1100), nn.Linear(1100, 1100))  # 4.8 MB of the second layer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.full((2, 4), float(rank + 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Task, "block", late)
        with Trainer(model, optimizer, LayerwiseSGD(bucket_bytes=0, lanes=lanes), timeout_s=30) as trainer:
            for _ in range(3):
                trainer.step(lambda: model(x).square().mean())
    return parameters(model)


def test_long_and_short_sums_of_one_lane_have_one_order_on_all_ranks() -> None:
    """Begun by a thread and by the foreground, gloo would get them in another order on rank 0, and end the process."""
    several, one = (
        shared_pool("torch", 2, compiler=True).run(step_with_long_and_short_sums, lanes) for lanes in (2, 1)
    )
    torch.testing.assert_close(several[0], several[1], rtol=0, atol=0)
    torch.testing.assert_close(several[0], one[0], rtol=1e-5, atol=1e-7)


def step_until_one_fails() -> tuple[str, str, float]:
    from workbench.runtimes.rank.main import world_here

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
    outcomes = shared_pool(runtime, 2, compiler=True).run(step_until_one_fails)
    assert [name for name, _, _ in outcomes] == ["PeerFailed", "ZeroDivisionError"]
    assert "rank 1" in outcomes[0][1]
    assert "ZeroDivisionError" in outcomes[0][1]
    assert max(seconds for _, _, seconds in outcomes) < 30  # far below the 120 s of the time-out


def step_until_one_is_killed() -> tuple[str, str, float]:
    from workbench.runtimes.rank.main import world_here

    rank, _ = world_here()
    model, optimizer = make()
    begin = time.monotonic()
    trainer, words = Trainer(model, optimizer, SynchronousSGD(), timeout_s=30), ""
    assert trainer._detector is not None
    try:
        for step in range(4):
            if rank == 1 and step == 2:
                die()
            trainer.step(lambda: model(torch.ones(2, 6, dtype=torch.float64)).square().mean())
    except PeerFailed as error:
        words = str(error)
    return words, str(trainer._detector.folder), time.monotonic() - begin


def test_a_rank_that_is_killed_is_named() -> None:
    """In a loop that keeps no record, too."""
    with contextlib.closing(RankPool("torch", 3, compiler=True)) as pool:
        found = pool.outcomes([(step_until_one_is_killed, ())] * 3, may_die=True)
    assert isinstance(found[1].error, EOFError | OSError), "it was to be killed"
    for rank in (0, 2):
        assert found[rank].error is None, found[rank].trace
        words, folder, seconds = found[rank].value
        assert "rank 1's process is gone at step " in words
        assert seconds < 30
    assert not Path(folder).exists(), "the last to leave takes their folder away"


def make_unequal_models() -> None:
    from workbench.runtimes.rank.main import world_here

    rank, _ = world_here()
    model = nn.Linear(3, 2 + rank)
    Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), SynchronousSGD())


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_unequal_models_are_refused_by_name(runtime: str) -> None:
    with pytest.raises(RankMismatch, match=r"weight: \(2, 3\).*weight: \(3, 3\)"):
        shared_pool(runtime, 2, compiler=True).run(make_unequal_models)


def fail_at_construction() -> tuple[str, str, float]:
    from workbench.runtimes.rank.main import world_here

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
    outcomes = shared_pool(runtime, 2, compiler=True).run(fail_at_construction)
    assert [name for name, _, _ in outcomes] == ["PeerFailed", "ConfigError"]
    assert "no trainable parameter" in outcomes[0][1]
    assert max(seconds for _, _, seconds in outcomes) < 30  # far below the 120 s of the time-out


def running_means() -> torch.Tensor:
    from workbench.runtimes.rank.main import world_here

    rank, _ = world_here()
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    with Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), SynchronousSGD()) as trainer:
        trainer.step(lambda: model(torch.arange(12.0).view(4, 3) + 100 * rank).square().mean())
    return model[0].running_mean


def test_buffers_are_rank_0s_at_the_end() -> None:
    first, second = shared_pool("torch", 2, compiler=True).run(running_means)
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
    assert all("lower the learning rate" in words for words in shared_pool("torch", 2, compiler=True).run(diverge))


def record_a_run() -> dict[str, Any]:
    model, optimizer = make()
    with Trainer(model, optimizer, PipeSGD(), record=True) as trainer:
        for _ in range(5):
            trainer.step(lambda: model(torch.ones(2, 6, dtype=torch.float64)).square().mean(), num_samples=2)
        run = trainer.finish()
    assert run is not None
    return {
        "folder": str(run.folder),
        "staleness": max(row["staleness"] or 0 for row in run.metrics[0]),
        "ranks": sorted(run.metrics),
    }


def test_a_recorded_loop_leaves_a_run(runs: Any) -> None:
    from workbench.trace.run import Run

    shared_pool("torch", 2, compiler=True).close()  # its ranks must learn of this test's run store
    first, second = shared_pool("torch", 2, compiler=True).run(record_a_run)
    shared_pool("torch", 2, compiler=True).close()
    assert first["folder"] == second["folder"]
    run = Run.load(first["folder"])
    assert sorted(run.metrics) == [0, 1]
    # The first two gradients are taken at the same weights
    assert [row["staleness"] for row in run.metrics[1]] == [
        None,
        0,
        1,
        1,
        1,
    ]
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
    with pytest.raises(ConfigError, match="finished"):
        trainer.settle()
    model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_a_loss_per_sample_is_refused() -> None:
    model, optimizer = make()
    with pytest.raises(ConfigError, match="one number"), Trainer(model, optimizer, SynchronousSGD()) as trainer:
        trainer.step(lambda: model(torch.ones(2, 6, dtype=torch.float64)).sum(1))


# ---------------------------------------------------------------- gradients that cannot be used

BAD_STEP, BAD_RANK = 2, 1


def train_with_a_bad_gradient(value: float, record: bool, how: dict[str, Any]) -> dict[str, Any]:
    """All ranks train, and one rank's gradient of one step holds that value."""
    from workbench.runtimes.rank.main import world_here

    rank, num_ranks = world_here()
    torch.manual_seed(0)
    model = poison.Spoilt(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = tiny.data(200)
    x[shares(num_ranks)[BAD_STEP][BAD_RANK].start, 0] = poison.MARKED
    run, said = None, ""
    trainer = Trainer(model, optimizer, SynchronousSGD(), record=record, **how)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            for step in shares(num_ranks):
                trainer.step(lambda mine=step[rank]: nn.functional.cross_entropy(model(x[mine]), y[mine]))
            run = trainer.finish()
        except (Diverged, PeerFailed) as error:
            said = f"{type(error).__name__}: {error}"
    rows = run.metrics[rank] if run is not None else []
    words = [str(one.message) for one in told if one.category is RuntimeWarning]
    return {"parameters": parameters(model), "said": said, "skipped": trainer.num_skipped, "rows": rows, "words": words}


def train_alone_around_it(max_grad_norm: float | None) -> torch.Tensor:
    """What remains by hand: of the bad step the mean of the others' gradients, or each rank's own clipped by torch."""
    torch.manual_seed(0)
    model = poison.Spoilt(1.0 if max_grad_norm is None else BIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = tiny.data(200)
    x[shares(2)[BAD_STEP][BAD_RANK].start, 0] = poison.MARKED
    for number, step in enumerate(shares(2)):
        found = []
        for rank, mine in enumerate(step):
            if max_grad_norm is None and (number, rank) == (BAD_STEP, BAD_RANK):
                continue
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            found.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
        for param, *grads in zip(model.parameters(), *found, strict=True):
            param.grad = torch.stack(grads).mean(0)
        optimizer.step()
    return parameters(model)


BIG = 1e3


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_bad_gradient_ends_the_run_where_it_is_to(runtime: str) -> None:
    good, bad = shared_pool(runtime, 2, compiler=True).run(
        train_with_a_bad_gradient, math.nan, False, {"on_bad_gradient": "stop"}
    )
    where = f"rank 1 is not finite at step {BAD_STEP}: nan in 1 of .* values of {poison.TENSOR}"
    assert re.search(f"^Diverged: the gradient of {where}", bad["said"]), bad["said"]
    assert re.search(f"^PeerFailed: .*{where}", good["said"]), good["said"]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("record", [False, True], ids=["alone", "recorded"])
def test_a_bad_gradient_is_left_out_of_the_mean(runtime: str, record: bool) -> None:
    good, bad = shared_pool(runtime, 2, compiler=True).run(
        train_with_a_bad_gradient, math.inf, record, {"on_bad_gradient": "skip"}
    )
    assert (good["said"], bad["said"], good["skipped"], bad["skipped"], good["words"]) == ("", "", 0, 1, [])
    assert len(bad["words"]) == 1
    assert bad["words"][0].startswith(f"step {BAD_STEP}: a gradient of rank 1 was left out: inf in 1 of ")
    assert torch.equal(good["parameters"], bad["parameters"])
    torch.testing.assert_close(good["parameters"], train_alone_around_it(None), rtol=1e-12, atol=1e-14)
    if record:
        assert [row["step"] for row in bad["rows"] if "skipped" in row] == [BAD_STEP]
        assert not any("skipped" in row for row in good["rows"])


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_each_ranks_own_gradient_is_clipped(runtime: str) -> None:
    norm = 0.3
    good, bad = shared_pool(runtime, 2, compiler=True).run(
        train_with_a_bad_gradient, BIG, True, {"on_bad_gradient": "clip", "max_grad_norm": norm}
    )
    assert (good["said"], bad["said"], bad["skipped"]) == ("", "", 0)
    torch.testing.assert_close(good["parameters"], train_alone_around_it(norm), rtol=1e-9, atol=1e-11)
    assert max(row.get("clipped", 0.0) for row in bad["rows"]) > 100


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"on_bad_gradient": "drop"}, "choose one of stop, skip, clip, ignore"),
        ({"on_bad_gradient": "clip"}, "set it, such as 1.0"),
        ({"max_grad_norm": 1.0}, "does not check them"),
        ({"on_bad_gradient": "skip", "max_grad_norm": -1.0}, "max_grad_norm=-1.0: give a finite number above 0"),
    ],
)
def test_what_says_nothing_of_gradients_is_refused(how: dict[str, Any], words: str) -> None:
    model, optimizer = make()
    with pytest.raises(ConfigError, match=words):
        Trainer(model, optimizer, SynchronousSGD(), **how)


# ---------------------------------------------------------------- checkpoints of a loop of one's own

KEPT = [
    SynchronousSGD(),
    LayerwiseSGD(bucket_bytes=64, apply="any"),
    PipeSGD(width=3),
    PipeSGD(width=2, collective=Once(codec=ErrorFeedback(codec=TopK(fraction=0.5)))),
    LocalSGD(every=3),
    DiLoCo(every=2, outer_lr=0.5),
    DeAR(),
    DPSGD(),
    GradientTracking(),
    StochasticGradientPush(),
]


class Wavering(nn.Module):
    """An MLP with what a checkpoint is of: statistics of its own, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def train_in_parts(algorithm: Algorithm, folder: str, part: str) -> dict[str, Any]:
    """All ranks train six steps, or the first three and keep a checkpoint, or those that follow from one."""
    from workbench.runtimes.rank.main import world_here

    rank, num_ranks = world_here()
    torch.manual_seed(0 if part != "rest" else 99)
    model = Wavering().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    torch.manual_seed(1000 + rank if part != "rest" else 7)
    x, y = tiny.data(200)
    begin, said, own = 0, "", None
    with contextlib.ExitStack() as stack:
        try:
            trainer = stack.enter_context(Trainer(model, optimizer, algorithm))
            if part == "rest":
                begin, own = trainer.load(folder)
                if own is not None:
                    scheduler.load_state_dict(own["scheduler"])
            for number, step in enumerate(shares(num_ranks)):
                if number < begin:
                    continue
                if part == "first" and number == NUM_STEPS // 2:
                    trainer.save(folder, {"scheduler": scheduler.state_dict(), "rank": rank})
                    break
                if part == "kept on the way" and number in (2, 4):
                    trainer.save(folder)
                trainer.step(lambda mine=step[rank]: nn.functional.cross_entropy(model(x[mine]), y[mine]))
                scheduler.step()
        except (ConfigError, PeerFailed) as error:
            said = f"{type(error).__name__}: {error}"
            stack.pop_all()
    return {"begin": begin, "own": own, "said": said, "parameters": parameters(model), "state": model.state_dict()}


@by_turns(KEPT, turn=0)
def test_a_loop_goes_on_from_its_checkpoint_to_the_last_bit(runtime: str, algorithm: Algorithm, tmp_path: Path) -> None:
    pool, folder = shared_pool(runtime, 2, compiler=True), str(tmp_path / "kept")
    whole = pool.run(train_in_parts, algorithm, "", "whole")
    on_the_way = pool.run(train_in_parts, algorithm, str(tmp_path / "two"), "kept on the way")
    pool.run(train_in_parts, algorithm, folder, "first")
    rest = pool.run(train_in_parts, algorithm, folder, "rest")
    assert [(row["begin"], row["own"]["rank"], row["said"]) for row in rest] == [(3, 0, ""), (3, 1, "")]
    for one in (on_the_way, rest):
        for rank in range(2):
            assert all(torch.equal(one[rank]["state"][name], value) for name, value in whole[rank]["state"].items())
    steps = {checkpoint.step for checkpoint in complete_checkpoints(tmp_path / "two")}
    assert steps == {1, 3}


def test_a_loop_goes_on_from_the_newest_checkpoint_that_is_whole(tmp_path: Path) -> None:
    pool, algorithm = shared_pool("torch", 2, compiler=True), PipeSGD(width=2)
    pool.run(train_in_parts, algorithm, str(tmp_path), "kept on the way")
    newest = rank_file_path(tmp_path, 3, 1)
    newest.write_bytes(newest.read_bytes()[:-100])
    for row in pool.run(train_in_parts, algorithm, str(tmp_path), "rest"):
        assert (row["begin"], row["said"]) == (2, "")
    newest = rank_file_path(tmp_path, 1, 0)
    newest.write_bytes(b"nothing")
    for row in pool.run(train_in_parts, algorithm, str(tmp_path), "rest"):
        assert re.search(
            "has no undamaged checkpoint. .*step 3, is damaged .*step-00000003-rank-00001.pt has .*step 1, is damaged",
            row["said"],
        ), row["said"]


def test_a_loop_goes_on_with_other_ranks_where_the_algorithm_allows_it(tmp_path: Path) -> None:
    two, three = shared_pool("torch", 2, compiler=True), shared_pool("torch", 3, compiler=True)
    for name, algorithm in (("synchronous", SynchronousSGD()), ("pipe", PipeSGD(width=2))):
        two.run(train_in_parts, algorithm, str(tmp_path / name), "first")
    for row in three.run(train_in_parts, SynchronousSGD(), str(tmp_path / "synchronous"), "rest"):
        assert (row["begin"], row["own"], row["said"]) == (3, None, "")
    for row in three.run(train_in_parts, PipeSGD(width=2), str(tmp_path / "pipe"), "rest"):
        assert (
            "PipeSGD keeps gradients, sums or parameters of each rank between steps. Resume it on 2 ranks"
            in row["said"]
        )
    for row in two.run(train_in_parts, SynchronousSGD(), str(tmp_path / "pipe"), "rest"):
        assert "cannot be resumed with another algorithm: 'PipeSGD', and not 'SynchronousSGD'" in row["said"]
    for row in two.run(train_in_parts, SynchronousSGD(), str(tmp_path / "none"), "rest"):
        assert "a folder of Trainer.save can be resumed" in row["said"]


def train_and_save_where_one_cannot(folder: str) -> tuple[list[str], int, int]:
    """Rank 1's folder is a file for a while; training continues, and a later checkpoint is kept."""
    from workbench.runtimes.rank.main import world_here

    rank, _ = world_here()
    model, optimizer = make()
    x, y = tiny.data(200)
    said = []
    with Trainer(model, optimizer, SynchronousSGD()) as trainer:
        for place in (f"{folder}/file" if rank else folder, folder):
            trainer.step(lambda: nn.functional.cross_entropy(model(x[:3]), y[:3]))
            try:
                trainer.save(place)
                said.append("")
            except OSError as error:
                said.append(str(error))
        updates = trainer.num_updates
    fresh, optimizer = make(seed=5)
    with Trainer(fresh, optimizer, SynchronousSGD()) as trainer:
        num_steps, _ = trainer.load(folder)
    return said, updates, num_steps


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_rank_that_cannot_write_is_named_on_all_and_training_goes_on(runtime: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for said, updates, num_steps in shared_pool(runtime, 2, compiler=True).run(
        train_and_save_where_one_cannot, str(tmp_path)
    ):
        assert re.search("^rank 1 could not write its checkpoint of step 0 .*: earlier ones are valid$", said[0])
        assert (said[1], updates, num_steps) == ("", 2, 2)


def test_what_cannot_be_kept_or_comes_too_late_is_refused(tmp_path: Path) -> None:
    def trainer() -> tuple[Trainer, nn.Module]:
        model, optimizer = make()
        return Trainer(model, optimizer, SynchronousSGD()), model

    x, y = tiny.data(20)
    for use, words in (
        (
            lambda one: one.save(tmp_path, own=threading.Lock()),
            "give tensors and plain values, such as a scheduler's state_dict",
        ),
        (lambda one: one.save(tmp_path, keep=0), "keep=0: give the number of checkpoints to keep"),
        (lambda one: one.load(tmp_path), "load\\(\\) comes before the first step"),
    ):
        one, model = trainer()
        one.step(lambda model=model: nn.functional.cross_entropy(model(x[:3]), y[:3]))
        with pytest.raises(ConfigError, match=words):
            use(one)
        with pytest.raises(ConfigError, match="this Trainer is finished"):
            one.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- the weights in mid-run, micro-batches, the gradient's norm

IN_FLIGHT = [
    *KEPT,
    PartialAllReduce(quorum="all"),
    AdaptiveDelaySGD(max_delay=1, adapt_every=100),
    StreamingDiLoCo(every=2, fragments=1, delay=1),
    EagerDiLoCo(every=2, fragments=2),
]


def train_and_look(algorithm: Algorithm, num_steps: int, looks: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Steps of a model with statistics and random numbers; with looks, what each step's end would leave."""
    from workbench.runtimes.rank.main import world_here

    rank, num_ranks = world_here()
    torch.manual_seed(0)
    model = Wavering().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1000 + rank)
    x, y = tiny.data(200)
    seen = []

    def everything() -> torch.Tensor:
        return torch.cat([value.detach().reshape(-1).double() for value in model.state_dict().values()])

    with Trainer(model, optimizer, algorithm) as trainer:
        for step in shares(num_ranks)[:num_steps]:
            trainer.step(lambda mine=step[rank]: nn.functional.cross_entropy(model(x[mine]), y[mine]))
            if looks:
                with trainer.evaluating():
                    seen.append(everything())
    return everything(), seen


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_evaluating_shows_what_finish_leaves_and_training_continues_bit_identically(runtime: str) -> None:
    def run() -> list[tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]]:
        found = []
        for algorithm in IN_FLIGHT:
            ends = [train_and_look(algorithm, num_steps, looks=False)[0] for num_steps in (1, 3, 4, NUM_STEPS)]
            found.append((ends, *train_and_look(algorithm, NUM_STEPS, looks=True)))
        return found

    for rank_found in shared_pool(runtime, 2, compiler=True).run(run):
        for algorithm, (ends, end, seen) in zip(IN_FLIGHT, rank_found, strict=True):
            assert torch.equal(end, ends[-1]), f"{algorithm}: looking changed the run"
            for num_steps, expected in zip((1, 3, 4, NUM_STEPS), ends, strict=True):
                assert torch.equal(seen[num_steps - 1], expected), f"{algorithm}: after {num_steps} steps"


def accumulate_with_ddp() -> tuple[torch.Tensor, list[float]]:
    """DDP's own pattern: `no_sync` for all micro-batches but the last."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model, optimizer = make()
    x, y = tiny.data(200)
    wrapped, norms = DistributedDataParallel(model), []
    for step in shares(dist.get_world_size(), (6, 6)):
        mine = step[dist.get_rank()]
        optimizer.zero_grad()
        for micro in range(3):
            part = slice(mine.start + 2 * micro, mine.start + 2 * micro + 2)
            with wrapped.no_sync() if micro < 2 else contextlib.nullcontext():
                (nn.functional.cross_entropy(wrapped(x[part]), y[part]) / 3).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2)))
        optimizer.step()
    return parameters(model), norms


def accumulate_with_trainer(algorithm: Algorithm, whole: bool) -> tuple[torch.Tensor, list[float]]:
    from workbench.runtimes.rank.main import world_here

    rank, num_ranks = world_here()
    model, optimizer = make(seed=rank)
    x, y = tiny.data(200)
    norms, size = [], 6 if whole else 2
    with Trainer(model, optimizer, algorithm, clip_norm=0.2) as trainer:
        for step in shares(num_ranks, (6, 6)):
            mine = step[rank]
            starts = range(mine.start, mine.stop, size)
            trainer.step(
                [
                    lambda at=at: nn.functional.cross_entropy(model(x[at : at + size]), y[at : at + size])
                    for at in starts
                ]
            )
            norms.append(trainer.grad_norm)
    return parameters(model), norms  # type: ignore[return-value]


@pytest.mark.parametrize("algorithm", [SynchronousSGD(), LayerwiseSGD(bucket_bytes=64)], ids=str)
def test_micro_batches_are_ddps_accumulation_and_one_big_batch_and_so_is_the_norm(algorithm: Algorithm) -> None:
    pool = shared_pool("torch", 2, compiler=True)
    expected, norms = pool.run(accumulate_with_ddp)[0]
    assert max(norms) > 0.2, "nothing was clipped"
    for whole in (False, True):
        for found, measured in pool.run(accumulate_with_trainer, algorithm, whole):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
            assert measured == pytest.approx(norms, rel=1e-12)


def train_scheduled(algorithm: Algorithm) -> torch.Tensor:
    from workbench.runtimes.rank.main import world_here

    rank, num_ranks = world_here()
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=NUM_STEPS)
    x, y = tiny.data(200)
    with Trainer(model, optimizer, algorithm) as trainer:
        for step in shares(num_ranks):
            trainer.step(lambda mine=step[rank]: nn.functional.cross_entropy(model(x[mine]), y[mine]))
            if scheduler.last_epoch < NUM_STEPS - 1:
                scheduler.step()
    return parameters(model)


def test_dear_is_synchronous_under_a_scheduler_of_the_loops_own() -> None:
    """One cycle changes the learning rate and the momentum at every step."""
    pool = shared_pool("torch", 2, compiler=True)
    torch.testing.assert_close(
        pool.run(train_scheduled, DeAR(bucket_bytes=64))[0],
        pool.run(train_scheduled, SynchronousSGD())[0],
        rtol=1e-12,
        atol=1e-14,
    )


# ---------------------------------------------------------------- rounds without the late ranks

ROUNDS, LR, NUM_FEATURES = 12, 0.05, 5


def line_gradient(rank: int, step: int, w: np.ndarray) -> np.ndarray:
    """The gradient of a least-squares fit to three samples of that rank and step."""
    random = np.random.default_rng((rank, step))
    x, y = random.standard_normal((3, NUM_FEATURES)), random.standard_normal(3)
    return x.T @ (x @ w - y) / len(y)


def train_in_rounds(quorum: str, kept: str) -> tuple[list[np.ndarray], list[int], list[bool]]:
    """Parameters before each step and at the end, the steps whose closure was called, and those that returned a loss.

    Rank 2 is late now and then. With `kept`, a second Trainer continues from the checkpoint of the half.
    """
    from workbench.runtimes.rank.main import world_here

    rank = world_here()[0]
    read: list[np.ndarray] = []
    called, losses = [], []
    for first, last in ((0, ROUNDS // 2), (ROUNDS // 2, ROUNDS)) if kept else ((0, ROUNDS),):
        model = nn.Linear(NUM_FEATURES, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)

        def loss(step: int, model: nn.Module = model) -> torch.Tensor:
            called.append(step)
            random = np.random.default_rng((rank, step))
            x, y = (torch.from_numpy(random.standard_normal(shape)) for shape in ((3, NUM_FEATURES), (3,)))
            # The first delay is long enough for two rounds of the other ranks on a busy machine.
            time.sleep((1.0 if step == 1 else 0.15) if rank == 2 and step % 4 == 1 else 0.01)
            return (model(x).squeeze(1) - y).square().mean() / 2

        with Trainer(model, optimizer, PartialAllReduce(quorum=quorum), timeout_s=30) as trainer:
            if first:
                assert trainer.load(kept)[0] == first
            for step in range(first, last):
                read.append(model.weight.detach().numpy().reshape(-1).copy())
                losses.append(trainer.step(partial(loss, step)) is not None)
                if step == ROUNDS // 2:
                    here = model.weight.detach().clone()
                    with trainer.evaluating():
                        assert torch.equal(model.weight, here), "no update is in flight"
            if kept and not first:
                trainer.save(kept)
        end = model.weight.detach().numpy().reshape(-1).copy()
    return [*read, end], called, losses


@pytest.mark.parametrize(
    ("runtime", "quorum", "resumed"),  # every two meet
    [
        pytest.param("torch", "solo", False, id="whole-solo-gloo"),
        pytest.param("torch", "majority", True, id="resumed-majority-gloo"),
        pytest.param("mpi", "solo", True, id="resumed-solo-mpi", marks=pytest.mark.mpi),
        pytest.param("mpi", "majority", False, id="whole-majority-mpi", marks=pytest.mark.mpi),
    ],
)
def test_a_late_rank_misses_rounds_and_each_gradient_is_used_once(
    runtime: str, quorum: str, resumed: bool, tmp_path: Path
) -> None:
    """Each update is the mean of gradients of this or earlier rounds, each used once: NumPy finds out which."""
    kept = str(tmp_path / "kept") if resumed else ""
    found = shared_pool(runtime, 3, compiler=True).run(train_in_rounds, quorum, kept)
    w = found[0][0]
    for rank, (read, called, losses) in enumerate(found):
        np.testing.assert_array_equal(read, w, err_msg="ranks apply the same rounds")
        assert [step for step in range(ROUNDS) if losses[step]] == called
        assert rank == 2 or quorum == "majority" or len(called) >= ROUNDS - 2, "a fast rank is late by chance alone"
    assert len(found[2][1]) < ROUNDS, "the slow rank is late, and does not compute what it missed"
    unused = {}
    for step in range(ROUNDS):
        if resumed and step == ROUNDS // 2:
            unused.clear()  # a checkpoint does not hold gradients that wait for a round
        unused |= {(rank, step): line_gradient(rank, step, w[step]) for rank in range(3) if step in found[rank][1]}
        mean = (w[step] - w[step + 1]) / LR
        chosen = [
            names
            for size in range(1, len(unused) + 1)
            for names in combinations(unused, size)
            if np.allclose(np.mean([unused[name] for name in names], axis=0), mean, rtol=0, atol=1e-12)
        ]
        assert len(chosen) == 1, f"round {step}: one set of unused gradients has this mean"
        for name in chosen[0]:
            del unused[name]
    assert len(unused) <= 3, "a gradient is left over only if no round followed"
