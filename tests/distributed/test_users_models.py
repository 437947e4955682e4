"""Models of users, in a loop of their own: ten steps on two ranks give what torch DDP gives.

A model may read its parameters anywhere, keep state that is no parameter, be several models, or be changed between two
steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from tests.distributed.pool import shared_pool
from tests.laws import tiny
from tests.laws.train import train
from tests.laws.variants import name_of
from workbench.algorithms import DeAR, LayerwiseSGD, LocalSGD, ParameterServerSGD, PipeSGD, SynchronousSGD
from workbench.errors import ConfigError
from workbench.program import Algorithm, shares_buffers
from workbench.runtimes.user_loop.trainer import Trainer, serve
from workbench.settings import Settings

NUM_STEPS = 10
WIDTH = 4
Loss = Callable[[Tensor, Tensor], Tensor]


def nothing() -> None:
    """Between two steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    """A user's models.

    Attributes:
        models: each has an optimizer and a Trainer.
        losses: one for each model, of inputs and targets.
        between: what the user does after each step.
    """

    models: Sequence[nn.Module]
    losses: Sequence[Loss]
    between: Callable[[], None] = nothing


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def mean_square(model: Callable[[Tensor], Tensor]) -> Loss:
    return lambda x, y: (model(x) - y).square().mean()


def alone(model: nn.Module) -> Users:
    """A model that is called."""
    model.double()
    return Users(models=[model], losses=[mean_square(model)])


# -- models that read parameters anywhere ---------------------------------------------------------------------------


def tied() -> Users:
    model = nn.ModuleDict({"first": linear(), "second": linear()}).double()
    model["second"].weight = model["first"].weight
    return Users(
        models=[model],
        losses=[mean_square(lambda x: model["second"](model["first"](x)).tanh() @ model["first"].weight.T)],
    )


def pruned() -> Users:
    return alone(nn.Sequential(prune.l1_unstructured(linear(), "weight", amount=0.5), nn.Tanh(), linear()))


def old_weight_norm() -> Users:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return alone(nn.Sequential(nn.utils.weight_norm(linear()), nn.Tanh(), linear()))


def weight_norm() -> Users:
    return alone(nn.Sequential(parametrizations.weight_norm(linear()), nn.Tanh(), linear()))


def spectral_norm() -> Users:
    """Its buffers depend on the weights, and the forward pass on its buffers."""
    return alone(nn.Sequential(parametrizations.spectral_norm(linear()), nn.Tanh(), linear()))


class Equalised(nn.Linear):
    """A hook computes the weight from a parameter, as the equalised rates of GANs do."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.original = nn.Parameter(self.weight.detach().clone())
        del self.weight
        self.register_forward_pre_hook(lambda module, inputs: setattr(module, "weight", 0.5 * module.original))


def equalised() -> Users:
    return alone(nn.Sequential(Equalised(), nn.Tanh(), linear()))


def temperature() -> Users:
    """CLIP's `logit_scale`: the loss reads it outside its module."""
    model = linear().double()
    model.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    return Users(models=[model], losses=[mean_square(lambda x: model(x) * model.scale.exp())])


def views() -> Users:
    """The forward pass reads a view that was made before training."""
    model = linear().double()
    flat = model.weight.view(-1)
    return Users(models=[model], losses=[mean_square(lambda x: model(x) * flat[:WIDTH])])


def transformer() -> Users:
    return alone(nn.Sequential(nn.Unflatten(0, (1, 3)), nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0), nn.Flatten(0, 1)))


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        result: Tensor = super().forward(x)[0]
        return result


def recurrent() -> Users:
    return alone(Recurrent(WIDTH, WIDTH))


def functional() -> Users:
    model = linear().double()
    called = partial(torch.func.functional_call, model)
    return Users(models=[model], losses=[mean_square(lambda x: called(dict(model.named_parameters()), (x,)))])


def checkpointed() -> Users:
    model = nn.Sequential(linear(), nn.Tanh(), linear()).double()
    return Users(models=[model], losses=[mean_square(lambda x: checkpoint(model, x, use_reentrant=False))])


def penalised() -> Users:
    """The loss reads all weights, and those of the step before."""
    model = nn.Sequential(linear(), nn.Tanh(), linear()).double()
    before = [param.detach().clone() for param in model.parameters()]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        moved = sum((param - old).square().sum() for param, old in zip(model.parameters(), before, strict=True))
        return (model(x) - y).square().mean() + 0.1 * moved

    def remember() -> None:
        for param, old in zip(model.parameters(), before, strict=True):
            old.copy_(param.detach())

    return Users(models=[model], losses=[loss], between=remember)


def clipped() -> Users:
    """A critic whose weights are clipped after each step."""
    model = nn.Sequential(linear(), nn.Tanh(), linear()).double()

    def clip() -> None:
        for param in model.parameters():
            param.data.clamp_(-0.3, 0.3)

    return Users(models=[model], losses=[mean_square(model)], between=clip)


def adversaries() -> Users:
    """A generator and a critic, each with a Trainer; the loss of each reads the other's weights."""
    generator, critic = linear().double(), nn.Sequential(linear(), nn.Tanh(), nn.Linear(WIDTH, 1)).double()
    return Users(
        models=[critic, generator],
        losses=[
            lambda x, y: critic(generator(x).detach()).mean() - critic(y).mean(),
            lambda x, y: -critic(generator(x)).mean(),
        ],
    )


def two_losses() -> Users:
    """Two losses with a head each, on one trunk, in one step."""
    model = nn.ModuleDict({name: linear() for name in ("trunk", "left", "right")}).double()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        left = (model["left"](model["trunk"](x)) - y).square().mean()
        return left + (model["right"](model["trunk"](x).tanh()) + y).square().mean()

    return Users(models=[model], losses=[loss])


def frozen() -> Users:
    body = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH)).requires_grad_(False).eval()
    return alone(nn.Sequential(body, linear()))


# -- state that is no parameter ---------------------------------------------------------------------------------------


class Statistics(nn.Module):
    """Float statistics that the training forward uses, integers that it uses, and buffers that nothing reads."""

    def __init__(self, *, flag_is_saved: bool = False) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("code", torch.zeros(WIDTH, dtype=torch.int64))
        self.register_buffer("flag", torch.zeros((), dtype=torch.bool), persistent=flag_is_saved)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("narrow", torch.zeros(2, dtype=torch.float16))
        self.register_buffer("positions", torch.arange(WIDTH).expand(1, -1))
        self.register_buffer("columns", torch.zeros(WIDTH, 2).t())

    def forward(self, x: Tensor) -> Tensor:
        shifted = self.layer(x - self.mean) * (1 + 0.1 * self.code) + self.flag
        with torch.no_grad():
            self.mean = self.mean.lerp(x.mean(0), 0.3)  # another tensor, and not the same one with other values
            self.code.copy_((x.sum(0) > 0).long() + self.code)
            self.flag.copy_(x.sum() > 0)
            self.narrow += 1
            self.columns += x.sum()
        return shifted


def statistics() -> Users:
    return alone(Statistics())


def batch_norm() -> Users:
    return alone(nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear()))


def only_empty() -> Users:
    model = linear()
    model.register_buffer("empty", torch.zeros(0))
    return alone(model)


MODELS = [
    tied,
    pruned,
    old_weight_norm,
    weight_norm,
    spectral_norm,
    equalised,
    temperature,
    views,
    transformer,
    recurrent,
    functional,
    checkpointed,
    penalised,
    clipped,
    adversaries,
    two_losses,
    frozen,
    batch_norm,
    only_empty,
    statistics,
]
ALGORITHMS = [
    SynchronousSGD(),
    LayerwiseSGD(bucket_bytes=0, apply="any"),
    DeAR(bucket_bytes=0),
    PipeSGD(width=2),
    LocalSGD(every=1),
]


def data(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = (torch.randn(3, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    return x, y


def rank_here() -> int:
    return int(torch.distributed.get_rank())


def made(build: Callable[[], Users], seed: int) -> tuple[Users, list[torch.optim.Optimizer]]:
    torch.manual_seed(seed)
    users = build()
    return users, [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5) for model in users.models]


def state_of_all(users: Users) -> dict[str, Tensor]:
    """All parameters and buffers, also those that no state dict has."""
    named = [(f"{number}.{name}", value.detach().clone()) for number, model in enumerate(users.models)
             for name, value in (*model.named_parameters(), *model.named_buffers())]  # fmt: skip
    return dict(named)


def with_trainer(builds: Sequence[Callable[[], Users]], algorithm: Algorithm) -> dict[str, dict[str, Tensor]]:
    found = {}
    for build in builds:
        users, optimizers = made(build, seed=rank_here())  # rank 0's values must reach all
        trainers = [Trainer(*pair, algorithm) for pair in zip(users.models, optimizers, strict=True)]
        for step in range(NUM_STEPS):
            x, y = data(rank_here(), step)
            for trainer, loss in zip(trainers, users.losses, strict=True):
                trainer.step(lambda loss=loss, x=x, y=y: loss(x, y))
            users.between()
        found[build.__name__] = state_of_all(users)
        for trainer in trainers:
            trainer.finish()
    return found


class Computed(nn.Module):
    """DDP must call the whole loss as a module's forward pass."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(x, y)


def with_ddp(builds: Sequence[Callable[[], Users]]) -> dict[str, dict[str, Tensor]]:
    from torch.nn.parallel import DistributedDataParallel

    found = {}
    for build in builds:
        users, optimizers = made(build, seed=rank_here())
        wrapped = [
            DistributedDataParallel(Computed(model, loss), find_unused_parameters=True)
            for model, loss in zip(users.models, users.losses, strict=True)
        ]
        for step in range(NUM_STEPS):
            x, y = data(rank_here(), step)
            for module, optimizer in zip(wrapped, optimizers, strict=True):
                optimizer.zero_grad()
                module(x, y).backward()
                optimizer.step()
            users.between()
        found[build.__name__] = state_of_all(users)
    return found


def one_late(builds: Sequence[Callable[[], Users]]) -> dict[str, dict[str, Tensor]]:
    """A plain loop whose update is that of the step before."""
    found = {}
    for build in builds:
        users, optimizers = made(build, seed=rank_here())
        for value in [value for model in users.models for value in (*model.parameters(), *model.buffers())]:
            torch.distributed.broadcast(value.detach(), 0)
        waiting: dict[int, list[Tensor | None]] = {}
        for step in range(NUM_STEPS):
            x, y = data(rank_here(), step)
            for number, (model, loss, optimizer) in enumerate(zip(users.models, users.losses, optimizers, strict=True)):
                params = [param for param in model.parameters() if param.requires_grad]
                grads = [*torch.autograd.grad(loss(x, y), params, allow_unused=True)]
                for grad in grads:
                    if grad is not None:
                        torch.distributed.all_reduce(grad)
                        grad /= 2
                for param, grad in zip(params, waiting.get(number, [None] * len(params)), strict=True):
                    param.grad = grad
                if number in waiting:
                    optimizer.step()
                waiting[number] = grads
            users.between()
        found[build.__name__] = state_of_all(users)
    return found


@cache
def expected_state(*, late: bool) -> list[dict[str, dict[str, Tensor]]]:
    return shared_pool("torch", 2, compiler=True).run(one_late if late else with_ddp, MODELS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
def test_ten_steps_are_those_of_ddp(algorithm: Algorithm) -> None:
    pool = shared_pool("torch", 2, compiler=True)
    builds = [build for build in MODELS if build is not statistics or shares_buffers(algorithm)]
    expected = expected_state(late=isinstance(algorithm, PipeSGD))
    found = pool.run(with_trainer, builds, algorithm)
    wrong = [
        f"{name}, rank {rank}, {key}: off by {(value.double() - found[rank][name][key].double()).abs().max()}"
        for rank in range(2)
        for name in found[rank]
        for key, value in expected[rank][name].items()
        if not torch.allclose(value.double(), found[rank][name][key].double(), rtol=1e-9, atol=1e-12)
    ]
    assert not wrong, "\n".join(wrong)


def with_server(builds: Sequence[Callable[[], Users]]) -> dict[str, dict[str, Tensor]]:
    """Rank 0 is the only worker, and rank 1 serves."""
    found, algorithm = {}, ParameterServerSGD(dedicated=True)
    for build in builds:
        users, optimizers = made(build, seed=0)
        if rank_here():
            serve(users.models[0], optimizers[0], algorithm)
            continue
        with Trainer(users.models[0], optimizers[0], algorithm) as trainer:
            for step in range(NUM_STEPS):
                x, y = data(0, step)
                trainer.step(lambda x=x, y=y, loss=users.losses[0]: loss(x, y))
        found[build.__name__] = state_of_all(users)
    return found


def alone_here(builds: Sequence[Callable[[], Users]]) -> dict[str, dict[str, Tensor]]:
    """A plain loop with rank 0's samples."""
    found = {}
    for build in builds:
        users, (optimizer,) = made(build, seed=0)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            users.losses[0](*data(0, step)).backward()
            optimizer.step()
        found[build.__name__] = state_of_all(users)
    return found


@pytest.mark.filterwarnings("ignore")
def test_one_worker_and_its_server_are_a_plain_loop() -> None:
    builds = [build for build in MODELS if build not in (penalised, clipped, adversaries)]  # change between steps
    found, expected = shared_pool("torch", 2, compiler=True).run(with_server, builds)[0], alone_here(builds)
    for build in builds:
        torch.testing.assert_close(found[build.__name__], expected[build.__name__], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("build", [clipped])
def test_weights_that_are_changed_between_steps_are_refused_with_servers(build: Callable[[], Users]) -> None:
    """The servers would not see the change, and would undo it."""
    users, (optimizer,) = made(build, seed=0)
    trainer = Trainer(users.models[0], optimizer, ParameterServerSGD())
    trainer.step(lambda: users.losses[0](*data(0, 0)))
    users.between()
    with pytest.raises(ConfigError, match=r"0\.weight was changed between two steps.*servers have their own copy"):
        trainer.step(lambda: users.losses[0](*data(0, 1)))


class Reader(nn.Module):
    """Reads its parameters in all ways at once, as no module's hook can see."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies = nn.ModuleList(build().models[0] for build in (pruned, old_weight_norm, equalised, recurrent))
        self.attention = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0).double()
        self.table = nn.Linear(WIDTH, tiny.NUM_FEATURES).double()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.head = nn.Linear(tiny.NUM_FEATURES, tiny.NUM_CLASSES).double()
        self.flat = self.head.weight.view(-1)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.table.weight
        for body in self.bodies:
            x = x + body(x)
        x = self.attention(x[None])[0] * self.scale.exp() + self.flat[:WIDTH]
        result: Tensor = self.head(self.table(x))
        return result


@pytest.mark.filterwarnings("ignore")
def test_a_run_with_dear_reads_no_old_weights() -> None:
    """In a run, updates come during the next forward pass, each before its first read."""
    problem, settings = tiny.problem(Reader), Settings(steps=NUM_STEPS, evaluate_every=0, lr=0.05)
    ours, expected = (
        train("torch", 2, algorithm, problem, settings).final for algorithm in (DeAR(bucket_bytes=0), SynchronousSGD())
    )
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


# -- state that no parameter is, elsewhere in a loop ------------------------------------------------------------------


class Factor(nn.Module):
    """Extra state that the forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Statistics(flag_is_saved=True)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x) * self.factor
        self.factor += 0.1 * float(x.mean())
        return result

    def get_extra_state(self) -> dict[str, float]:
        return {"factor": self.factor}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.factor = state["factor"]


def evaluated_and_saved(algorithm: Algorithm, folder: str) -> tuple[list[float], list[float], list[float]]:
    """This rank's losses of ten steps: without anything else, with evaluations, and with a stop in the middle."""

    def train(steps: range, *, evaluates: bool = False, saves: bool = False, loads: bool = False) -> list[float]:
        users, (optimizer,) = made(lambda: alone(Factor()), seed=rank_here())
        losses = []
        with Trainer(users.models[0], optimizer, algorithm) as trainer:
            if loads:
                trainer.load(folder)
            for step in steps:
                x, y = data(rank_here(), step)
                losses.append(float(trainer.step(lambda x=x, y=y: users.losses[0](x, y))))
                if evaluates:
                    with trainer.evaluating() as shown:
                        shown(x)
            if saves:
                trainer.save(folder)
        return losses

    half = NUM_STEPS // 2
    whole, seen = train(range(NUM_STEPS)), train(range(NUM_STEPS), evaluates=True)
    in_parts = [*train(range(half), saves=True), *train(range(half, NUM_STEPS), loads=True)]
    return whole, seen, in_parts


@pytest.mark.parametrize("algorithm", [*ALGORITHMS[:-1], LocalSGD(every=2)], ids=name_of)
def test_evaluations_and_checkpoints_have_all_state_and_change_none(algorithm: Algorithm, tmp_path: Path) -> None:
    pool = shared_pool("torch", 2, compiler=True)
    for whole, seen, in_parts in pool.run(evaluated_and_saved, algorithm, str(tmp_path)):
        assert seen == whole
        assert in_parts == whole


class Unsavable(Factor):
    def get_extra_state(self) -> object:  # type: ignore[override]
        return object()


class Unloadable(nn.Linear):
    def get_extra_state(self) -> int:
        return 1


def with_buffer(buffer: Tensor) -> nn.Module:
    model = nn.Sequential(linear())
    model[0].register_buffer("mask", buffer)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (with_buffer(torch.eye(3).to_sparse()), r"buffer 0\.mask .* is sparse.*make the sparse tensor in forward"),
        (with_buffer(torch.ones(1).expand(3)), r"buffer 0\.mask .* expand\(\).*contiguous\(\)"),
        (nn.Sequential(Unsavable()), r"^0 of the model returns extra state .* plain values"),
        (nn.Sequential(Unloadable(1, 1)), r"^0 of the model has get_extra_state\(\) and no set_extra_state"),
    ],
)
def test_state_that_cannot_be_copied_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), SynchronousSGD())
