"""What the forward pass reads is updated first, whatever reads it: a module, a function, a view, an element."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from workbench.errors import ConfigError
from workbench.replica.backward import Hooks, MicroBatch
from workbench.replica.replica import Replica

X = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).reshape(3, 4)
Loss = Callable[[], Tensor]


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(linear())


def applied(module: nn.Module) -> tuple[nn.Module, Loss]:
    """A module that is called."""
    model = module.double()
    return model, lambda: model(X).square().mean()


def pruned() -> tuple[nn.Module, Loss]:
    return applied(prune.l1_unstructured(linear(), "weight", amount=0.5))


def equalised() -> tuple[nn.Module, Loss]:
    """A hook computes the weight from another parameter, as the equalised rates of GANs do."""

    class Equalised(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.original = nn.Parameter(self.weight.detach().clone())
            del self.weight
            self.register_forward_pre_hook(lambda module, inputs: setattr(module, "weight", 0.5 * module.original))

    return applied(Equalised())


def transformer() -> tuple[nn.Module, Loss]:
    return applied(nn.Sequential(nn.Unflatten(0, (1, 3)), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)))


def recurrent() -> tuple[nn.Module, Loss]:
    model = nn.LSTM(4, 4).double()
    return model, lambda: model(X)[0].square().mean()


def tied() -> tuple[nn.Module, Loss]:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4)).double()
    ids = torch.tensor([0, 3])
    return model, lambda: (model(ids) @ model[0].weight.T).square().mean()


def temperature() -> tuple[nn.Module, Loss]:
    """A parameter of no module that is called, as CLIP's `logit_scale`."""
    model = linear().double()
    model.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    return model, lambda: (model(X) * model.scale.exp()).square().mean()


def views() -> tuple[nn.Module, Loss]:
    """Views that were made before training, and `.data`."""
    model = linear().double()
    flat, data = model.weight.view(-1), model.bias.data
    return model, lambda: (model(X) + flat[:4] * data).square().mean()


def nested() -> tuple[nn.Module, Loss]:
    model = linear().double()
    return model, lambda: torch.cat([param.reshape(-1) for param in model.parameters()]).square().mean()


def keyword() -> tuple[nn.Module, Loss]:
    model = linear().double()
    return model, lambda: nn.functional.linear(input=X, weight=model.weight, bias=model.bias).square().mean()


def number() -> tuple[nn.Module, Loss]:
    """Values that leave torch."""
    model = linear().double()
    return model, lambda: model(X).square().mean() * (float(model.weight[0, 0]) + model.bias.detach().numpy().sum())


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] * weight.sum(), (grads[0] * x).sum().expand_as(weight)


def own_function() -> tuple[nn.Module, Loss]:
    model = linear().double()
    return model, lambda: Scaled.apply(model(X), model.weight).square().mean()


def functional() -> tuple[nn.Module, Loss]:
    model = linear().double()
    return model, lambda: torch.func.functional_call(model, dict(model.named_parameters()), (X,)).square().mean()


def vectorised() -> tuple[nn.Module, Loss]:
    model = linear().double()
    return model, lambda: torch.vmap(lambda row: row @ model.weight)(X).square().mean() + model.bias.sum()


def checkpointed() -> tuple[nn.Module, Loss]:
    model = nn.Sequential(linear(), nn.Tanh(), linear()).double()
    return model, lambda: checkpoint(model, X, use_reentrant=False).square().mean()


def scripted() -> tuple[nn.Module, Loss]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return applied(nn.Sequential(torch.jit.script(linear()), nn.Tanh(), linear()))


def compiled() -> tuple[nn.Module, Loss]:
    return applied(nn.Sequential(torch.compile(linear(), backend="aot_eager"), nn.Tanh(), linear()))


def compiled_function() -> tuple[nn.Module, Loss]:
    """Nothing in the model says that it is compiled."""
    model = linear().double()
    loss = torch.compile(lambda x: (x @ model.weight + model.bias).square().mean(), backend="aot_eager")
    loss(X)
    return model, lambda: loss(X)


def kept_averages() -> tuple[nn.Module, Loss]:
    """A teacher that follows the weights without a graph."""
    model = linear().double()
    teacher = torch.zeros(4, 4, dtype=torch.float64)

    def loss() -> Tensor:
        with torch.inference_mode():
            target = (teacher + model.weight) @ torch.ones(4, dtype=torch.float64)
        return (model(X) - target.clone()).square().mean()

    return model, loss


READERS = [
    lambda: applied(nn.Sequential(linear(), nn.BatchNorm1d(4), linear())),
    lambda: applied(old_weight_norm()),
    lambda: applied(parametrizations.weight_norm(linear())),
    pruned,
    equalised,
    transformer,
    recurrent,
    tied,
    temperature,
    views,
    nested,
    keyword,
    number,
    own_function,
    functional,
    vectorised,
    checkpointed,
    scripted,
    compiled,
    compiled_function,
    kept_averages,
]
NAMES = ["modules", "old weight_norm", "weight_norm", *(reader.__name__ for reader in READERS[3:])]


def gradient(build: Callable[[], tuple[nn.Module, Loss]], *, early: bool) -> tuple[Tensor, float, int]:
    """Gradient and loss at changed parameters, and the number of updates when the model's first function was called.

    Args:
        early: change all parameters before the forward pass, and not each when it is needed.
    """
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, loss = build()
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_bytes=0)
    updated: list[int] = []

    @torch.no_grad()
    def update(bucket: int) -> None:
        updated.append(bucket)
        for slot in replica.layout.buckets[bucket].slots:
            replica.parameters[slot.index].mul_(1.5).add_(0.25)

    if early:
        for bucket in range(len(replica.layout.buckets)):
            update(bucket)
    at_first: list[int] = []

    def closure() -> Tensor:
        at_first.append(len(updated))
        return loss()

    hooks = Hooks(need=None if early else update)
    found, value = replica.backward(0, [MicroBatch(closure, 1.0, 3)], hooks)
    assert value is not None and sorted(updated) == list(range(len(replica.layout.buckets)))
    return found.flat.clone(), float(value), at_first[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("build", READERS, ids=NAMES)
def test_a_read_waits_for_its_update(build: Callable[[], tuple[nn.Module, Loss]]) -> None:
    """As if all had been updated before; only what runs no Python waits for all at the start."""
    expected, loss, _ = gradient(build, early=True)
    found, value, at_first = gradient(build, early=False)
    assert value == pytest.approx(loss, rel=1e-13)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert at_first == 0 or build in (scripted, compiled)


def test_a_read_that_torch_does_not_show_is_refused() -> None:
    """A scripted function that is no part of the model: no call of the forward pass has the weight as its argument."""
    model = linear().double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apart = torch.jit.script(model)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_bytes=0)
    micro = MicroBatch(lambda: apart(X).square().mean(), 1.0, 3)
    with pytest.raises(ConfigError, match=r"bias was read before its update was applied.*LayerwiseSGD"):
        replica.backward(0, [micro], Hooks(need=lambda bucket: None))
