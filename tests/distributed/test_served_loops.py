"""`Trainer` with parameter servers, on the workers' ranks and on dedicated ranks: against DDP, NumPy and the simulator."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils import parameters_to_vector

from tests.distributed.killing import die
from tests.distributed.pool import RankPool, shared_pool
from tests.laws import tiny
from tests.laws.train import train
from workbench.algorithms import (
    AsyncSGD,
    BackupSGD,
    DelayCompensatedSGD,
    ParameterServerSGD,
    SoftsyncSGD,
    StaleSynchronousSGD,
)
from workbench.algorithms.parameter_server import ServerAlgorithm
from workbench.errors import ConfigError, Diverged, PeerFailed, RankMismatch
from workbench.program import Algorithm
from workbench.replica.local_training import sampler_of
from workbench.rng import derive_seed
from workbench.runtimes.user_loop.trainer import Trainer, serve
from workbench.settings import Settings
from workbench.trace.run import Run

RUNTIMES = [pytest.param("torch", id="gloo"), pytest.param("mpi", id="mpi", marks=pytest.mark.mpi)]
NUM_STEPS = 6
Array = NDArray[np.float64]


def parameters(model: nn.Module) -> torch.Tensor:
    return parameters_to_vector(model.parameters()).detach()


def here() -> tuple[int, int]:
    from workbench.runtimes.rank.main import world_here

    return world_here()


def closure(model: nn.Module, part: slice) -> Callable[[], torch.Tensor]:
    x, y = tiny.data(200)
    dtype = next(model.parameters()).dtype
    return lambda: nn.functional.cross_entropy(model(x[part].to(dtype)), y[part])


def batch(step: int, rank: int, num_ranks: int, size: int = 4) -> slice:
    start = (step * num_ranks + rank) * size
    return slice(start, start + size)


# ---------------------------------------------------------------- in lockstep: torch DDP


def make(kind: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model, an optimizer with two groups, and a scheduler that changes learning rate and momentum at each step."""
    torch.manual_seed(seed)
    model = tiny.mlp()
    weights = [param for param in model.parameters() if param.ndim > 1]
    biases = [param for param in model.parameters() if param.ndim == 1]
    groups = [{"params": weights, "weight_decay": 0.01}, {"params": biases, "lr": 0.03}]
    optimizer: torch.optim.Optimizer
    if kind == "sgd":
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    else:
        optimizer = torch.optim.AdamW(groups, lr=0.02)
    return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.3, 0.1], total_steps=NUM_STEPS + 1)


def train_with_servers(algorithm: ServerAlgorithm, kind: str, num_micro: int) -> torch.Tensor | None:
    rank, num_ranks = here()
    model, optimizer, scheduler = make(kind, seed=rank)
    if rank not in algorithm.roles(num_ranks).computing:
        serve(model, optimizer, algorithm, timeout_s=30)
        return None
    workers = algorithm.roles(num_ranks).num_computing
    with Trainer(model, optimizer, algorithm, timeout_s=30) as trainer:
        for step in range(NUM_STEPS):
            mine = batch(step, rank, workers)
            size = 4 // num_micro
            parts = [slice(at, at + size) for at in range(mine.start, mine.stop, size)]
            trainer.step([closure(model, part) for part in parts] if num_micro > 1 else closure(model, mine))
            scheduler.step()
        assert trainer.num_updates == NUM_STEPS
    return parameters(model)


def train_with_ddp(kind: str, num_micro: int) -> torch.Tensor:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model, optimizer, scheduler = make(kind)
    wrapped = DistributedDataParallel(model)
    for step in range(NUM_STEPS):
        mine = batch(step, dist.get_rank(), dist.get_world_size())
        size = 4 // num_micro
        optimizer.zero_grad()
        for at in range(mine.start, mine.stop, size):
            with wrapped.no_sync() if at + size < mine.stop else contextlib.nullcontext():
                (closure(wrapped, slice(at, at + size))() / num_micro).backward()
        optimizer.step()
        scheduler.step()
    return parameters(model)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    ("kind", "num_micro", "algorithm"),
    [
        ("sgd", 1, ParameterServerSGD()),
        ("sgd", 2, ParameterServerSGD(shards=2)),
        ("adamw", 1, BackupSGD(backups=0, shards=3)),
        ("sgd", 1, ParameterServerSGD(dedicated=True)),
        ("adamw", 2, ParameterServerSGD(shards=2, dedicated=True)),
    ],
    ids=str,
)
def test_servers_that_wait_for_all_train_as_ddp_does(
    runtime: str, algorithm: ServerAlgorithm, kind: str, num_micro: int
) -> None:
    num_ranks = 2 + (algorithm.shards if algorithm.dedicated else 0)
    expected = shared_pool("torch", 2, compiler=True).run(train_with_ddp, kind, num_micro)[0]
    found = shared_pool(runtime, num_ranks, compiler=True).run(train_with_servers, algorithm, kind, num_micro)
    for rank in range(2):
        torch.testing.assert_close(found[rank], expected, rtol=1e-12, atol=1e-13)


# ---------------------------------------------------------------- loss scaling

OVERFLOW = 2  # the step at which all ranks' gradients overflow in 16 bits


@final
class Steep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(tiny.NUM_FEATURES, tiny.NUM_CLASSES)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.factor


def train_in_half_precision(with_servers: bool, shards: int) -> tuple[torch.Tensor, float]:
    """PS-Sync with `precision="fp16"`, or torch's own: DDP, autocast and GradScaler. Also the final scale."""
    from torch.nn.parallel import DistributedDataParallel

    rank, num_ranks = here()
    torch.manual_seed(0)
    model = Steep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if with_servers:
        algorithm = ParameterServerSGD(shards=shards)
        with Trainer(model, optimizer, algorithm, precision="fp16", timeout_s=30) as trainer:
            for step in range(NUM_STEPS):
                model.factor = 100.0 if step == OVERFLOW else 1.0
                trainer.step(closure(model, batch(step, rank, num_ranks)))
            assert trainer.replica.loss_scale is not None
            return parameters(model), trainer.replica.loss_scale.value
    wrapped, scaler = DistributedDataParallel(model), torch.amp.GradScaler("cpu")
    for step in range(NUM_STEPS):
        model.factor = 100.0 if step == OVERFLOW else 1.0
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = closure(wrapped, batch(step, rank, num_ranks))()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return parameters(model), scaler.get_scale()


@pytest.mark.parametrize("shards", [1, 2])
def test_an_overflow_in_16_bits_is_left_out_as_a_grad_scaler_does(shards: int) -> None:
    pool = shared_pool("torch", 2, compiler=True)
    expected, scale = pool.run(train_in_half_precision, False, shards)[0]
    assert scale == 2.0**15, "no gradient overflowed"
    for found, own_scale in pool.run(train_in_half_precision, True, shards):
        assert own_scale == scale
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def overflow_on_one_rank(shards: int) -> tuple[torch.Tensor, float]:
    rank, num_ranks = here()
    torch.manual_seed(0)
    model = Steep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Trainer(model, optimizer, ParameterServerSGD(shards=shards), precision="fp16", timeout_s=30) as trainer:
        for step in range(NUM_STEPS):
            model.factor = 100.0 if (step, rank) == (OVERFLOW, 1) else 1.0
            trainer.step(closure(model, batch(step, rank, num_ranks)))
        assert trainer.replica.loss_scale is not None
        return parameters(model), trainer.replica.loss_scale.value


@pytest.mark.parametrize("shards", [1, 2])
def test_an_overflow_of_one_rank_leaves_the_mean_of_the_others(shards: int) -> None:
    torch.manual_seed(0)
    model = Steep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for rank in range(1 if step == OVERFLOW else 2):
            with torch.autocast("cpu", torch.float16):
                loss = closure(model, batch(step, rank, 2))()
            (loss * 2.0**16).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad /= 2.0**16 * (1 if step == OVERFLOW else 2)
        optimizer.step()
    found = shared_pool("torch", 2, compiler=True).run(overflow_on_one_rank, shards)
    assert [scale for _, scale in found] == [2.0**16, 2.0**15], "each rank has its own scale"
    for trained, _ in found:
        torch.testing.assert_close(trained, parameters(model), rtol=2e-5, atol=1e-6)


# ---------------------------------------------------------------- asynchronous: the recorded order of updates, in NumPy

LR, MOMENTUM, DECAY, NUM_FEATURES = 0.05, 0.9, 0.02, 4


def line_data(rank: int, step: int) -> tuple[Array, Array]:
    """A batch of three samples of that rank and step: (3, 4) and (3,)."""
    random = np.random.default_rng((rank, step))
    return random.standard_normal((3, NUM_FEATURES)), random.standard_normal(3)


def rate(rank: int, step: int) -> float:
    """The learning rate that a rank's own schedule has at its step."""
    return LR * (1 + rank) / (1 + step)


def run_line(algorithm: ServerAlgorithm, num_steps: list[int], folder: str) -> tuple[str, list[Array], Array]:
    """Each rank takes its own number of steps of a least-squares fit. Parameters at its gradients, and at the end."""
    rank, num_ranks = here()
    model = nn.Linear(NUM_FEATURES, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    before, read = os.environ.get("WORKBENCH_RUNS"), []
    os.environ["WORKBENCH_RUNS"] = folder
    try:
        if rank not in algorithm.roles(num_ranks).computing:
            run = serve(model, optimizer, algorithm, record=True, timeout_s=30)
        else:
            with Trainer(model, optimizer, algorithm, record=True, timeout_s=30) as trainer:
                for step in range(num_steps[rank]):
                    x, y = map(torch.from_numpy, line_data(rank, step))
                    optimizer.param_groups[0]["lr"] = rate(rank, step)
                    read.append(model.weight.detach().numpy().reshape(-1).copy())
                    time.sleep(0.002 * ((7 * step + 3 * rank) % 5))
                    trainer.step(lambda x=x, y=y: (model(x).squeeze(1) - y).square().mean() / 2)
                run = trainer.finish()
    finally:
        os.environ.pop("WORKBENCH_RUNS") if before is None else os.environ.update(WORKBENCH_RUNS=before)
    assert run is not None
    return str(run.folder), read, model.weight.detach().numpy().reshape(-1).copy()


@final
class LineReference:
    """The updates of a recorded run, in float64 NumPy, from their order, sources and staleness alone."""

    def __init__(self, algorithm: ServerAlgorithm) -> None:
        self.algorithm = algorithm
        self.versions: list[Array] = [np.zeros(NUM_FEATURES)]
        self.read: dict[int, list[Array]] = {}  # rank -> the parameters at each of its gradients
        self._velocity = np.zeros(NUM_FEATURES)

    def _gradient(self, rank: int, version: int) -> tuple[Array, float]:
        """The next gradient of a rank, and its learning rate."""
        read = self.read.setdefault(rank, [])
        step, w = len(read), self.versions[version]
        read.append(w)
        x, y = line_data(rank, step)
        return x.T @ (x @ w - y) / len(y), rate(rank, step)

    def update(self, update: dict[str, Any]) -> None:
        number, now = update["update"], self.versions[-1]
        assert number == len(self.versions)
        for rank, version in update["dropped"]:
            self._gradient(rank, version)
        parts, rates = [], []
        for rank, late in zip(update["sources"], update["staleness"], strict=True):
            g, lr = self._gradient(rank, number - 1 - late)
            if isinstance(self.algorithm, SoftsyncSGD):
                g = g / max(1, late)
            if isinstance(self.algorithm, DelayCompensatedSGD):
                g = g + self.algorithm.strength * g * g * (now - self.versions[number - 1 - late])
            parts.append(g)
            rates.append(lr)
        mean = np.mean(parts, axis=0) + DECAY * now
        self._velocity = mean if number == 1 else MOMENTUM * self._velocity + mean
        self.versions.append(now - np.mean(rates) * self._velocity)


REPLAYED = [
    AsyncSGD(),
    AsyncSGD(dedicated=True, cutoff=1),
    SoftsyncSGD(splits=2),
    StaleSynchronousSGD(bound=1),
    DelayCompensatedSGD(strength=0.5),
    BackupSGD(backups=1),
]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("algorithm", REPLAYED, ids=str)
def test_a_loop_is_its_recorded_order_of_updates_in_numpy(
    runtime: str, algorithm: ServerAlgorithm, tmp_path: Path
) -> None:
    """With steps, learning rates and paces of each rank's own."""
    found = shared_pool(runtime, 3, compiler=True).run(run_line, algorithm, [7, 4, 10], str(tmp_path))
    workers = algorithm.roles(3).num_computing
    reference = LineReference(algorithm)
    updates = Run.load(found[0][0]).updates()
    assert len(updates) >= 4
    for update in updates:
        reference.update(update)
    for rank in range(workers):
        np.testing.assert_allclose(found[rank][2], reference.versions[-1], rtol=1e-12, atol=1e-14)
        seen = reference.read[rank]
        np.testing.assert_allclose(found[rank][1][: len(seen)], seen, rtol=1e-12, atol=1e-14)
        assert len(seen) >= len(found[rank][1]) - 2, "only a dropped gradient after the last update is not recorded"


# ---------------------------------------------------------------- the simulator, where timing decides nothing

settings = partial(Settings, steps=NUM_STEPS, batch_size=3, optimizer=tiny.momentum, seed=3)


def train_own_loop(algorithm: Algorithm, how: Settings) -> torch.Tensor | None:
    """The samples and first weights of a run, in a loop. Parameters at the end; None on a server."""
    rank, num_ranks = here()
    problem = tiny.problem()
    torch.manual_seed(derive_seed(how.seed, "initial-weights"))
    model = problem.model()
    optimizer = tiny.momentum(model.parameters())
    if rank not in algorithm.roles(num_ranks).computing:
        serve(model, optimizer, algorithm, timeout_s=30)  # type: ignore[arg-type]  # it has servers
        return None
    sampler = sampler_of(problem.train_source(), 3, algorithm.roles(num_ranks).num_computing, how.seed)
    x, y = tiny.data()
    with Trainer(model, optimizer, algorithm, timeout_s=30) as trainer:
        for step in range(how.steps or 0):
            mine = sampler.share(step, rank)
            trainer.step(
                (lambda part=mine: nn.functional.cross_entropy(model(x[part]), y[part])) if len(mine) else None,
                len(mine) or None,
            )
    return parameters(model)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    ("algorithm", "num_ranks"),
    [
        (ParameterServerSGD(shards=2), 2),
        (ParameterServerSGD(shards=2, dedicated=True), 4),
        (AsyncSGD(dedicated=True), 2),
        (DelayCompensatedSGD(dedicated=True), 2),
    ],
    ids=str,
)
def test_a_loop_is_the_simulated_run_if_timing_decides_nothing(
    runtime: str, algorithm: ServerAlgorithm, num_ranks: int
) -> None:
    """Counted samples weight a short last batch."""
    expected = train("simulated", num_ranks, algorithm, tiny.problem(), settings()).final
    for found in shared_pool(runtime, num_ranks, compiler=True).run(train_own_loop, algorithm, settings()):
        if found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------- the servers' parameters while others train


def evaluate_alone(algorithm: ServerAlgorithm, folder: str) -> dict[str, Any]:
    """Rank 1 trains alone; then rank 0 looks, before and after its only step."""
    rank, num_ranks = here()
    torch.manual_seed(0)
    model = tiny.mlp()
    optimizer = tiny.momentum(model.parameters())
    there = Path(folder)
    if rank not in algorithm.roles(num_ranks).computing:
        serve(model, optimizer, algorithm, timeout_s=30)
        return {}
    seen = {"begin": parameters(model)}
    with Trainer(model, optimizer, algorithm, timeout_s=30) as trainer:
        if rank == 0:
            (there / "ready").touch() if algorithm.dedicated else None
            with trainer.evaluating():  # before any step: begins the servers beside this rank
                seen["first"] = parameters(model)
            (there / "ready").touch()
            while not (there / "trained").exists():
                time.sleep(0.01)
            with trainer.evaluating() as shown:
                assert not shown.training
                seen["trained"] = parameters(model)
            seen["own"] = parameters(model)
            trainer.step(closure(model, batch(0, 0, 2)))
            (there / "looked").touch()
        else:
            while not (there / "ready").exists():
                time.sleep(0.01)
            for step in range(4):
                trainer.step(closure(model, batch(step, 1, 2)))
            seen["trained"] = parameters(model)
            (there / "trained").touch()
            while not (there / "looked").exists():
                time.sleep(0.01)
            with trainer.evaluating():
                seen["moved"] = parameters(model)
            seen["own"] = parameters(model)
    return {**seen, "end": parameters(model)}


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    "algorithm",
    [AsyncSGD(), SoftsyncSGD(splits=2), DelayCompensatedSGD(), StaleSynchronousSGD(bound=9, dedicated=True)],
    ids=str,
)
def test_a_rank_sees_the_servers_parameters_alone(runtime: str, algorithm: ServerAlgorithm, tmp_path: Path) -> None:
    pool = shared_pool(runtime, 3 if algorithm.dedicated else 2, compiler=True)
    zero, one = pool.run(evaluate_alone, algorithm, str(tmp_path))[:2]
    if not algorithm.dedicated:
        assert torch.equal(zero["first"], zero["begin"])
    assert torch.equal(zero["trained"], one["trained"]) and not torch.equal(zero["trained"], zero["begin"])
    assert torch.equal(zero["own"], zero["begin"]), "its own parameters are back"
    assert torch.equal(one["own"], one["trained"]) and not torch.equal(one["moved"], one["own"])
    assert torch.equal(zero["end"], one["end"]) and torch.equal(one["end"], one["moved"])


# ---------------------------------------------------------------- checkpoints


def train_in_parts(algorithm: ServerAlgorithm, num_steps: list[int], folder: str, part: str) -> dict[str, Any]:
    """All steps, or half of them and a checkpoint, or those that follow from it; or all with a checkpoint on the way."""
    rank, num_ranks = here()
    torch.manual_seed(0 if part != "rest" else 99)
    model = tiny.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if rank not in algorithm.roles(num_ranks).computing:
        serve(model, optimizer, algorithm, timeout_s=30)
        return {}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    begin, own, loaded = 0, None, None
    with Trainer(model, optimizer, algorithm, timeout_s=30) as trainer:
        if part == "rest":
            begin, own = trainer.load(folder)
            scheduler.load_state_dict(own["scheduler"])
            loaded = parameters(model)
        for step in range(begin, num_steps[rank]):
            if step == num_steps[rank] // 2 and part in ("first", "on the way"):
                trainer.save(folder, {"scheduler": scheduler.state_dict(), "rank": rank})
                if part == "first":
                    break
            trainer.step(closure(model, batch(step, rank, 2)))
            scheduler.step()
    return {"begin": begin, "own": own, "loaded": loaded, "end": parameters(model)}


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    ("algorithm", "num_ranks"),
    [(ParameterServerSGD(shards=2), 2), (ParameterServerSGD(dedicated=True), 3), (AsyncSGD(dedicated=True), 2)],
    ids=str,
)
def test_a_loop_goes_on_from_its_checkpoint_to_the_last_bit(
    runtime: str, algorithm: ServerAlgorithm, num_ranks: int, tmp_path: Path
) -> None:
    pool, steps = shared_pool(runtime, num_ranks, compiler=True), [NUM_STEPS] * num_ranks
    whole = pool.run(train_in_parts, algorithm, steps, "", "whole")
    on_the_way = pool.run(train_in_parts, algorithm, steps, str(tmp_path / "way"), "on the way")
    pool.run(train_in_parts, algorithm, steps, str(tmp_path / "kept"), "first")
    rest = pool.run(train_in_parts, algorithm, steps, str(tmp_path / "kept"), "rest")
    for rank in algorithm.roles(num_ranks).computing:
        assert (rest[rank]["begin"], rest[rank]["own"]["rank"]) == (NUM_STEPS // 2, rank)
        assert torch.equal(on_the_way[rank]["end"], whole[rank]["end"])
        assert torch.equal(rest[rank]["end"], whole[rank]["end"])


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("algorithm", [AsyncSGD(), BackupSGD(backups=1), SoftsyncSGD()], ids=str)
def test_ranks_at_different_steps_keep_one_checkpoint(runtime: str, algorithm: ServerAlgorithm, tmp_path: Path) -> None:
    pool, steps = shared_pool(runtime, 3, compiler=True), [4, 10, 6]
    first = pool.run(train_in_parts, algorithm, steps, str(tmp_path), "first")
    rest = pool.run(train_in_parts, algorithm, steps, str(tmp_path), "rest")
    for rank in range(3):
        assert (rest[rank]["begin"], rest[rank]["own"]["rank"]) == (steps[rank] // 2, rank)
        assert torch.equal(rest[rank]["loaded"], first[0]["end"]), "the servers' last parameters"
        assert torch.equal(rest[rank]["end"], rest[0]["end"])
    for said in shared_pool(runtime, 2, compiler=True).run(load_on_fewer, algorithm, str(tmp_path)):
        assert f"ranks of {type(algorithm).__name__} are at different steps. Resume it on 3 ranks" in said


def load_on_fewer(algorithm: ServerAlgorithm, folder: str) -> str:
    model = tiny.mlp()
    try:
        Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), algorithm).load(folder)
    except (ConfigError, PeerFailed) as error:
        return str(error)
    return ""


# ---------------------------------------------------------------- ends


def use_wrongly(case: str, dedicated: bool) -> tuple[str, str, float]:
    """Two workers, of which one does something else, and the error with which each rank ends."""
    rank, num_ranks = here()
    torch.manual_seed(0)
    model, algorithm = tiny.mlp(), AsyncSGD(dedicated=dedicated)
    optimizer: torch.optim.Optimizer = Failing(model.parameters(), lr=0.1)
    optimizer = optimizer if case == "server" else torch.optim.SGD(model.parameters(), lr=0.1)
    begin = time.monotonic()
    try:
        if rank not in algorithm.roles(num_ranks).computing and case != "not served":
            serve(model, optimizer, algorithm, timeout_s=30)
            return "", "", 0.0
        if case == "served twice":
            serve(model, optimizer, algorithm, timeout_s=30)
        with Trainer(model, optimizer, algorithm, timeout_s=30) as trainer:
            for step in range(4):
                if (rank, step, case) == (1, 2, "killed"):
                    die()
                fails = (rank, step, case) == (1, 2, "closure")
                trainer.step((lambda: 1 / 0) if fails else closure(model, batch(step, rank, 2)))  # type: ignore[arg-type, return-value]
            if case == "saves alone" and rank == 0:
                trainer.save("unused")
            if case == "loses":
                trainer.step(lambda: model(torch.ones(1, 6, dtype=torch.float64)).sum() * float("nan"))
    except (ConfigError, Diverged, PeerFailed, RankMismatch, ZeroDivisionError, FloatingPointError) as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", 0.0


@final
class Failing(torch.optim.SGD):
    """Fails at its third step, wherever that is."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        type(self).num_steps += 1
        if type(self).num_steps == 3:
            type(self).num_steps = 0
            raise FloatingPointError("the third update")
        return super().step(closure)


CASES = {
    "closure": ("PeerFailed: rank 1 failed at step 2: ZeroDivisionError", "ZeroDivisionError: division by zero"),
    "saves alone": (r"RankMismatch: rank 0 calls save\(\), but rank 1 calls finish\(\)",) * 2,
    "loses": ("(PeerFailed|Diverged): .*the loss of rank",) * 2,
}


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("dedicated", [False, True], ids=["beside", "dedicated"])
@pytest.mark.parametrize("case", CASES)
def test_a_failing_rank_ends_all(runtime: str, dedicated: bool, case: str) -> None:
    outcomes = shared_pool(runtime, 2 + dedicated, compiler=True).run(use_wrongly, case, dedicated)
    for (name, words, _), expected in zip(outcomes, CASES[case], strict=False):
        assert re.search(expected, f"{name}: {words}"), outcomes
    if dedicated:
        assert outcomes[2][0] in ("PeerFailed", "RankMismatch"), outcomes
    assert max(seconds for *_, seconds in outcomes) < 25, "below the time-out"


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("dedicated", [False, True], ids=["beside", "dedicated"])
def test_a_failing_server_ends_all(runtime: str, dedicated: bool) -> None:
    outcomes = shared_pool(runtime, 2 + dedicated, compiler=True).run(use_wrongly, "server", dedicated)
    server = 2 if dedicated else 0
    for rank, (name, words, seconds) in enumerate(outcomes):
        assert name == ("FloatingPointError" if rank == server else "PeerFailed"), outcomes
        assert "the third update" in words
        assert seconds < 25


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_wrong_half_of_the_program_is_named_with_the_fix(runtime: str) -> None:
    outcomes = shared_pool(runtime, 3, compiler=True).run(use_wrongly, "not served", True)
    assert all(re.search(r"rank 2 is a server of .*call workbench\.serve\(", words) for _, words, _ in outcomes), (
        outcomes
    )
    outcomes = shared_pool(runtime, 3, compiler=True).run(use_wrongly, "served twice", True)
    assert all(re.search(r"rank [01] computes gradients .*make a Trainer", words) for _, words, _ in outcomes), outcomes


def test_a_worker_that_is_killed_is_named() -> None:
    with contextlib.closing(RankPool("torch", 3, compiler=True)) as pool:
        found = pool.outcomes([(use_wrongly, ("killed", True))] * 3, may_die=True)
    for rank in (0, 2):
        assert found[rank].error is None, found[rank].trace
        name, words, seconds = found[rank].value
        assert (name, "rank 1's process is gone at step " in words) == ("PeerFailed", True), words
        assert seconds < 25


def count_on_one_rank() -> str:
    rank, _ = here()
    model = tiny.mlp()
    try:
        with Trainer(model, tiny.sgd(model.parameters()), AsyncSGD(), timeout_s=30) as trainer:
            trainer.step(closure(model, batch(0, rank, 2)), 4 if rank else None)
    except RankMismatch as error:
        return str(error)
    return ""


def test_samples_that_only_one_rank_counts_are_refused() -> None:
    for said in shared_pool("torch", 2, compiler=True).run(count_on_one_rank):
        assert said.startswith("num_samples was given on ranks [1] and not on all"), said
