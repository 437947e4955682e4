"""A user's hooks and optimizers: ten steps of one algorithm of each family, compared with torch DDP or a plain loop.

Synchronous algorithms are compared with DistributedDataParallel on the same ranks. Late and local ones are compared with
a loop of one process that has both ranks' models. A case is right, or refused by one error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.pool import shared_pool
from tests.laws import tiny
from tests.laws.train import train
from workbench.algorithms import (
    DPSGD,
    DeAR,
    LayerwiseSGD,
    LocalSGD,
    ParameterServerSGD,
    PipeSGD,
    SynchronousSGD,
)
from workbench.errors import ConfigError, RankMismatch
from workbench.program import Algorithm
from workbench.replica.backward import SMALL_BYTES
from workbench.replica.replica import compute_threads
from workbench.runtimes.user_loop.trainer import Trainer
from workbench.settings import Settings
from workbench.topologies import Complete

NUM_RANKS, NUM_STEPS = 2, 10
Log = dict[str, float]  # what a user's code counts, on one rank


class Net(nn.Module):
    """Small layers, a large one, and a parameter whose gradient must be converted."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = SMALL_BYTES // 64
        layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, width + 8), nn.Tanh(), nn.Linear(width + 8, 3), nn.Tanh()]
        self.layers = nn.Sequential(*layers, nn.Linear(3, 1)).double()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * self.scale)  # type: ignore[no-any-return]


def loss_of(model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
    """The loss of one micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    return (model(x) - x.sum(dim=1, keepdim=True)).square().mean()


# -- hooks of parameters and modules: (model, log) -> None ------------------------------------------------------


def each(model: nn.Module, hook: Callable[[Tensor], None]) -> None:
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)


def replaces(model: nn.Module, log: Log) -> None:
    def normalise(param: Tensor) -> None:
        assert param.grad is not None
        param.grad = param.grad / (param.grad.norm() + 0.1)

    each(model, normalise)


def replaces_one(model: nn.Module, log: Log) -> None:
    """A small gradient within a bucket."""

    def normalise(param: Tensor) -> None:
        assert param.grad is not None
        param.grad = param.grad / (param.grad.norm() + 0.1)

    model.layers[4].bias.register_post_accumulate_grad_hook(normalise)


def clamps(model: nn.Module, log: Log) -> None:
    def clamp(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.clamp_(-0.05, 0.05)

    each(model, clamp)


def scales(model: nn.Module, log: Log) -> None:
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 0.5 if grad.abs().max() < 0.1 else grad / grad.norm())


def counts(model: nn.Module, log: Log) -> None:
    """And sums what it sees, which depends on how micro-batches accumulate."""

    def count(param: Tensor) -> None:
        log["hooks"] = log.get("hooks", 0) + 1
        log["seen"] = log.get("seen", 0.0) + float(param.grad.sum())

    for layer in (model.layers[0], model.layers[2], model.layers[4]):
        layer.bias.register_post_accumulate_grad_hook(count)
        layer.weight.register_post_accumulate_grad_hook(count)


def clears(model: nn.Module, log: Log) -> None:
    """Under DDP a cleared gradient counts as zeros in the mean."""

    def clear(param: Tensor) -> None:
        param.grad = None

    model.layers[0].bias.register_post_accumulate_grad_hook(clear)
    model.layers[2].weight.register_post_accumulate_grad_hook(clear)


def reads_others(model: nn.Module, log: Log) -> None:
    """The norm of all gradients that have arrived when the first layer's does."""

    def scale(param: Tensor) -> None:
        arrived = [other.grad for name, other in model.named_parameters() if name != "scale"]
        assert param.grad is not None
        param.grad = param.grad / sum(float(grad.norm()) for grad in arrived if grad is not None)

    model.scale.register_post_accumulate_grad_hook(scale)


def of_modules(model: nn.Module, log: Log) -> None:
    def scale(module: nn.Module, grad_input: tuple[Tensor, ...], grad_output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        log["calls"] = log.get("calls", 0) + 1
        return tuple(grad.clamp(-0.02, 0.02) for grad in grad_input)

    model.layers[3].register_full_backward_hook(scale)
    model.layers[5].register_full_backward_pre_hook(lambda module, grads: tuple(2 * grad for grad in grads))


def nothing(model: nn.Module, log: Log) -> None:
    """Register no hook."""


# -- optimizers: parameters -> optimizer ------------------------------------------------------------------------


class Own(torch.optim.Optimizer):
    """An optimizer as users write them. `factor` says by what its learning rate is multiplied in a step."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    def factor(self) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        factor = self.factor()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] * factor)


class Hypergradient(Own):
    """Its learning rate follows the product of two gradients: a statistic that it leaves in its groups."""

    def factor(self) -> float:
        for group in self.param_groups:
            product = 0.0
            for param in group["params"]:
                if param.grad is not None:
                    before = self.state[param].get("before")
                    product += 0.0 if before is None else float((param.grad * before).sum())
                    self.state[param]["before"] = param.grad.clone()
            group["lr"] += 0.01 * product / (1 + abs(product))
        return 1.0


class Counter(Own):
    """The bias correction of a fused Adam: a counter in its groups."""

    def factor(self) -> float:
        for group in self.param_groups:
            group["count"] += 1
        return 1 / (1 - 0.9 ** self.param_groups[0]["count"])


class Statistic(Own):
    """A norm over all parameters, as in D-Adaptation."""

    def factor(self) -> float:
        grads = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
        return 1 / (0.1 + float(torch.stack([grad.double().norm() for grad in grads]).norm()))


class Declared(Own):
    """An update that needs one parameter only, and says so."""

    per_parameter = True


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, with the same groups: slow weights follow every third step."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, dict(base.defaults))
        self.base, self.count = base, 0
        self.base.param_groups = self.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("slow", param.clone())
        self.base.step()
        self.count += 1
        for param, state in self.state.items():
            if self.count % 3 == 0:
                param.copy_(state["slow"].lerp_(param, 0.5))


SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
Register = Callable[[torch.optim.Optimizer, nn.Module, Log], None]


def before_step(optimizer: torch.optim.Optimizer, model: nn.Module, log: Log) -> None:
    """Clip the mean gradient."""

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    optimizer.register_step_pre_hook(clip)


def after_step(optimizer: torch.optim.Optimizer, model: nn.Module, log: Log) -> None:
    """An exponential average that forgets by the number of its calls."""

    def average(*_: Any) -> None:
        log["steps"] = log.get("steps", 0) + 1
        log["average"] = 0.9 * log.get("average", 0.0) + 0.1 * float(model.layers[0].weight.detach().sum())

    optimizer.register_step_post_hook(average)


def no_hook(optimizer: torch.optim.Optimizer, model: nn.Module, log: Log) -> None:
    """Register no hook."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One user's code.

    Attributes:
        late: its hooks are registered after the Trainer (or DDP) is made.
        whole: its optimizer needs all parameters in one step.
        copied: a server can make a copy of its optimizer.
    """

    hooks: Callable[[nn.Module, Log], None] = nothing
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = SGD
    register: Register = no_hook
    num_micro: int = 1
    late: bool = False
    whole: bool = False
    copied: bool = True

    def make(self) -> tuple[nn.Module, torch.optim.Optimizer, Log]:
        model, log = Net(), {}
        optimizer = self.optimizer(model.parameters())
        if not self.late:
            self.hooks(model, log)
        self.register(optimizer, model, log)
        return model, optimizer, log


CASES = {
    **{
        f"{hooks.__name__}, {num_micro} micro-batches{', late' * late}": Case(
            hooks=hooks, num_micro=num_micro, late=late
        )
        for hooks in (replaces, replaces_one, clamps, scales, counts, clears, reads_others, of_modules)
        for num_micro, late in ((1, False), (3, True))
    },
    "foreach": Case(optimizer=partial(torch.optim.AdamW, lr=0.01, foreach=True)),
    "fused": Case(optimizer=partial(torch.optim.Adam, lr=0.01, fused=True)),
    "a tensor as rate": Case(optimizer=partial(torch.optim.Adam, lr=torch.tensor(0.01), foreach=False)),
    "an optional closure": Case(optimizer=partial(torch.optim.NAdam, lr=0.01, foreach=False)),
    "per parameter": Case(optimizer=Declared),
    "rate in groups": Case(optimizer=Hypergradient, whole=True),
    "rate in groups, replaced gradients": Case(optimizer=Hypergradient, hooks=replaces, whole=True),
    "counter in groups": Case(optimizer=Counter, whole=True),
    "global statistic": Case(optimizer=Statistic, whole=True),
    "an optimizer around another": Case(optimizer=lambda params: Lookahead(SGD(params)), whole=True, copied=False),
    "hook before the step": Case(register=before_step, whole=True, copied=False),
    "hook after the step": Case(register=after_step, whole=True, copied=False),
}
SYNCHRONOUS = [
    SynchronousSGD(),
    LayerwiseSGD(bucket_bytes=500, apply="backward"),
    DeAR(bucket_bytes=500),
    ParameterServerSGD(),
    ParameterServerSGD(shards=2),
]
OTHERS = [PipeSGD(width=2), LocalSGD(every=3), DPSGD(topology=Complete(), overlap=False)]


def refusal(algorithm: Algorithm, case: Case) -> str:
    """A part of the error; "" if the case must be right."""
    buckets = algorithm.requires.buckets
    by_bucket = buckets.applied_singly or (algorithm.requires.servers and buckets.count != 1)
    if by_bucket and case.whole:
        return r"ConfigError: this algorithm updates bucket by bucket, so it would call step\(\)"
    if algorithm.requires.servers and not case.copied:
        return "ConfigError: .* cannot be copied"
    return ""


# -- loops ------------------------------------------------------------------------------------------------------


def values_of(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().double().reshape(-1) for param in model.parameters()])


def with_trainer(algorithm: Algorithm) -> dict[str, tuple[Tensor, Log] | str]:
    """Each case's parameters and log on this rank, or its error."""
    from workbench.runtimes.rank.main import world_here

    rank, _ = world_here()
    found: dict[str, tuple[Tensor, Log] | str] = {}
    for name, case in CASES.items():
        model, optimizer, log = case.make()
        try:
            with Trainer(model, optimizer, algorithm, timeout_s=30) as trainer:
                if case.late:
                    case.hooks(model, log)
                for step in range(NUM_STEPS):
                    trainer.step([partial(loss_of, model, step, rank, micro) for micro in range(case.num_micro)])
        except Exception as error:  # noqa: BLE001 - the test compares it with the refusal that it expects
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = values_of(model), log
    return found


def backward(model: nn.Module, case: Case, step: int, rank: int, wrapped: Any = None) -> None:
    """Accumulate a step's gradient, as PyTorch's documentation does it."""
    for micro in range(case.num_micro):
        last = micro == case.num_micro - 1
        with wrapped.no_sync() if wrapped is not None and not last else nullcontext():
            (loss_of(wrapped or model, step, rank, micro) / case.num_micro).backward()


def with_ddp() -> dict[str, tuple[Tensor, Log]]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    found = {}
    for name, case in CASES.items():
        model, optimizer, log = case.make()
        wrapped = DistributedDataParallel(model)
        if case.late:
            case.hooks(model, log)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            backward(model, case, step, dist.get_rank(), wrapped)
            optimizer.step()
        found[name] = values_of(model), log
    return found


def alone(algorithm: Algorithm, case: Case) -> list[tuple[Tensor, Log]]:
    """The algorithm's rule in one process, which has the model and the optimizer of each rank."""
    ranks = [case.make() for _ in range(NUM_RANKS)]
    if case.late:
        for model, _, log in ranks:
            case.hooks(model, log)
    late: list[list[list[Tensor]]] = []

    def update(gradients: list[list[Tensor]]) -> None:
        """Take one step on each rank with its gradient."""
        for (model, optimizer, _), gradient in zip(ranks, gradients, strict=True):
            for param, grad in zip(model.parameters(), gradient, strict=True):
                param.grad = grad.clone()
            optimizer.step()

    @torch.no_grad()
    def average() -> None:
        for params in zip(*(model.parameters() for model, _, _ in ranks), strict=True):
            mean = torch.stack([param.double() for param in params]).mean(dim=0)
            for param in params:
                param.copy_(mean)

    for step in range(NUM_STEPS):
        gradients = []
        for rank, (model, optimizer, _) in enumerate(ranks):
            optimizer.zero_grad()
            backward(model, case, step, rank)
            # zeros for a cleared gradient, as of a DistributedDataParallel of one rank
            gradients.append(
                [torch.zeros_like(param) if param.grad is None else param.grad for param in model.parameters()]
            )
        match algorithm:
            case PipeSGD():
                mean = [
                    torch.stack([grad.double() for grad in grads]).mean(dim=0) for grads in zip(*gradients, strict=True)
                ]
                params = list(ranks[0][0].parameters())
                late.append([[grad.to(param.dtype) for grad, param in zip(mean, params, strict=True)]] * NUM_RANKS)
                if step:
                    update(late.pop(0))
            case LocalSGD():
                update(gradients)
                if (step + 1) % algorithm.every == 0:
                    average()
            case DPSGD():  # a complete graph of two ranks: the mean
                update(gradients)
                average()
    for gradients in late:
        update(gradients)
    average()
    return [(values_of(model), log) for model, _, log in ranks]


def check(algorithm: Algorithm, rank: int, expected: dict[str, tuple[Tensor, Log]], found: dict[str, Any]) -> None:
    wrong = []
    for name, case in CASES.items():
        words, outcome = refusal(algorithm, case), found[name]
        if words or isinstance(outcome, str):
            if not (words and isinstance(outcome, str) and re.search(words, outcome)):
                wrong.append(f"{name}: {outcome if isinstance(outcome, str) else 'not refused'}")
            continue
        (values, log), (right, right_log) = outcome, expected[name]
        difference = float((values - right).abs().max())
        if difference > 1e-6 or log != pytest.approx(right_log, rel=1e-5, abs=1e-6):
            wrong.append(f"{name}: off by {difference:.3g}, {log} and not {right_log}")
    assert not wrong, f"{algorithm}, rank {rank}:\n" + "\n".join(wrong)


@pytest.fixture(scope="module")
def of_ddp() -> list[dict[str, tuple[Tensor, Log]]]:
    return shared_pool("torch", NUM_RANKS, compiler=True).run(with_ddp)


@pytest.mark.parametrize("algorithm", SYNCHRONOUS, ids=str)
def test_synchronous_algorithms_train_as_ddp_does(algorithm: Algorithm, of_ddp: Any) -> None:
    found = shared_pool("torch", NUM_RANKS, compiler=True).run(with_trainer, algorithm)
    for rank in range(NUM_RANKS):
        check(algorithm, rank, of_ddp[rank], found[rank])


@pytest.mark.parametrize("algorithm", OTHERS, ids=str)
def test_late_and_local_algorithms_train_as_a_plain_loop_does(algorithm: Algorithm) -> None:
    found = shared_pool("torch", NUM_RANKS, compiler=True).run(with_trainer, algorithm)
    with compute_threads(1):
        expected = {name: alone(algorithm, case) for name, case in CASES.items()}
    for rank in range(NUM_RANKS):
        check(algorithm, rank, {name: both[rank] for name, both in expected.items()}, found[rank])


# -- what is refused --------------------------------------------------------------------------------------------


def of_this_rank(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def steps_in_hook(algorithm: Algorithm) -> str:
    """Fused backward: each parameter has its optimizer, which steps as soon as its gradient is there."""
    model = of_this_rank(0)
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def step(param: Tensor) -> None:
        optimizers[param].step()  # type: ignore[index]
        optimizers[param].zero_grad()  # type: ignore[index]

    each(model, step)
    with Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm, timeout_s=30) as trainer:
        trainer.step(lambda: model(torch.ones(2, 3)).mean())
    return "not refused"


def optimizers_differ(settings: bool) -> str:
    from workbench.runtimes.rank.main import world_here

    rank, _ = world_here()
    model = of_this_rank(0)
    kind = torch.optim.SGD if settings or rank == 0 else torch.optim.AdamW
    with Trainer(model, kind(model.parameters(), lr=0.1 + 0.1 * rank), SynchronousSGD(), timeout_s=30):
        return "not refused"


def max_norm(algorithm: Algorithm) -> str:
    model = nn.Sequential(nn.Embedding(5, 2, max_norm=1.0), nn.Linear(2, 1))
    with Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm, timeout_s=30):
        return "not refused"


@pytest.mark.parametrize("algorithm", [SynchronousSGD(), DeAR(bucket_bytes=0), LocalSGD(every=2)], ids=str)
def test_an_optimizer_step_in_a_gradient_hook_is_refused(algorithm: Algorithm) -> None:
    with pytest.raises(ConfigError, match=r"0.weight changed during the backward pass.*does a gradient hook step"):
        shared_pool("torch", NUM_RANKS, compiler=True).run(steps_in_hook, algorithm)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (False, "optimizer is 'torch.optim.sgd.SGD' on rank 0, and 'torch.optim.adamw.AdamW' on rank 1"),
        (True, "group 0, lr is '0.1' on rank 0, and '0.2' on rank 1"),
    ],
    ids=["class", "settings"],
)
def test_different_optimizers_on_two_ranks_are_refused(settings: bool, words: str) -> None:
    with pytest.raises(RankMismatch, match=words):
        shared_pool("torch", NUM_RANKS, compiler=True).run(optimizers_differ, settings)


def test_a_forward_pass_that_changes_parameters_is_refused_if_replicas_must_be_equal() -> None:
    pool = shared_pool("torch", NUM_RANKS, compiler=True)
    for algorithm in (SynchronousSGD(), ParameterServerSGD()):
        with pytest.raises(ConfigError, match=r"0 has max_norm=1: .*torch.renorm"):
            pool.run(max_norm, algorithm)
    assert pool.run(max_norm, LocalSGD(every=2)) == ["not refused"] * NUM_RANKS
    problem = tiny.problem(lambda: nn.Sequential(nn.Embedding(5, 2, max_norm=1.0), nn.Flatten(), nn.Linear(6, 3)))
    with pytest.raises(ConfigError, match=r"0 has max_norm=1"):
        train("simulated", 2, SynchronousSGD(), problem, Settings(steps=1))


# -- micro-batches that read a loop's variables -----------------------------------------------------------------


def step_with(make: Callable[[nn.Module, list[Tensor]], list[Callable[[], Tensor]]]) -> Tensor:
    """Return the parameters after one step of one process."""
    model = of_this_rank(0)
    with Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), SynchronousSGD()) as trainer:
        trainer.step(make(model, [torch.full((2, 3), float(number)) for number in range(4)]))
    return values_of(model)


def of_a_loop(model: nn.Module, batches: list[Tensor]) -> list[Callable[[], Tensor]]:
    losses = []
    for x in batches:
        losses.append(lambda: model(x).square().mean())  # noqa: B023 - the mistake
    return losses


def of_a_list(model: nn.Module, batches: list[Tensor]) -> list[Callable[[], Tensor]]:
    return [lambda: model(x).square().mean() for x in batches]  # noqa: B023 - the mistake


def of_indices(model: nn.Module, batches: list[Tensor]) -> list[Callable[[], Tensor]]:
    return [lambda: model(batches[number]).square().mean() for number in range(4)]  # noqa: B023 - the mistake


def bound(model: nn.Module, batches: list[Tensor]) -> list[Callable[[], Tensor]]:
    return [lambda x=x: model(x).square().mean() for x in batches]  # type: ignore[misc]


def partials(model: nn.Module, batches: list[Tensor]) -> list[Callable[[], Tensor]]:
    return [partial(lambda x: model(x).square().mean(), x) for x in batches]


def of_a_function(model: nn.Module, batches: list[Tensor]) -> list[Callable[[], Tensor]]:
    def loss(x: Tensor) -> Callable[[], Tensor]:
        return lambda: model(x).square().mean()

    return list(map(loss, batches))


def of_an_iterator(model: nn.Module, batches: list[Tensor]) -> list[Callable[[], Tensor]]:
    rest, factor = iter(batches), 1.0
    return [lambda: factor * model(next(rest)).square().mean() for _ in range(4)]


def one_function(model: nn.Module, batches: list[Tensor]) -> list[Callable[[], Tensor]]:
    waiting = list(batches)
    return [lambda: model(waiting.pop(0)).square().mean()] * 4


@pytest.mark.parametrize("make", [of_a_loop, of_a_list, of_indices])
def test_micro_batches_that_read_a_loops_last_batch_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"same function of the same variables \(.*(x|number)\).*lambda x=x"):
        step_with(make)


@pytest.mark.parametrize("make", [bound, partials, of_a_function, of_an_iterator, one_function])
def test_micro_batches_with_a_batch_each_are_accumulated(make: Any) -> None:
    model = of_this_rank(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.cat([torch.full((2, 3), float(number)) for number in range(4)])).square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(step_with(make), values_of(model), rtol=1e-6, atol=1e-6)
