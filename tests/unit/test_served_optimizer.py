"""The copy of a user's optimizer for servers, and the options of a `Trainer` that servers refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import pytest
import torch
from torch import nn

from workbench.algorithms import AsyncSGD, SoftsyncSGD
from workbench.errors import ConfigError
from workbench.replica.served_optimizer import SentSettings, copy_optimizer
from workbench.runtimes.user_loop.trainer import Trainer

Maker = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Maker] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.8, dampening=0.1, weight_decay=0.01),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.01, betas=(0.8, 0.95), amsgrad=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.02)),
    "NAdam": lambda groups: torch.optim.NAdam(groups, decoupled_weight_decay=True),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.5, centered=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, initial_accumulator_value=0.1),
    "ASGD": torch.optim.ASGD,
    "Rprop": lambda groups: torch.optim.Rprop(groups, etas=(0.4, 1.3)),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, d=1.5),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, begin: int = 0) -> list[torch.Tensor]:
    for step in range(begin, begin + num_steps):
        optimizer.zero_grad()
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(x).square().mean().backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("name", MAKERS)
def test_a_copy_takes_the_steps_of_the_original(name: str) -> None:
    """From its state on: both after three steps."""
    one, two = model(), model()
    first, second = one[0], one[2]
    optimizer = MAKERS[name]([{"params": first.parameters()}, {"params": second.parameters(), "lr": 0.003}])
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    steps(one, optimizer, 3)
    two.load_state_dict(one.state_dict())
    copied = copy_optimizer(optimizer, list(one.parameters()), list(two.parameters()))
    assert type(copied) is type(optimizer)
    for mine, theirs in zip(steps(one, optimizer, 3, 3), steps(two, copied, 3, 3), strict=True):
        assert torch.equal(mine, theirs)


def test_frozen_parameters_and_names_are_left_out() -> None:
    one = model()
    one[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(one.named_parameters(), lr=0.1)
    kept = [param for param in one.parameters() if param.requires_grad]
    copies = [nn.Parameter(param.detach().clone()) for param in kept]
    (group,) = copy_optimizer(optimizer, kept, copies).param_groups
    assert [id(param) for param in group["params"]] == [id(param) for param in copies]


@final
class WithModel(torch.optim.SGD):
    """Its constructor takes another argument."""

    def __init__(self, params: Any, model: nn.Module, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.model = model


@final
class WithSetting(torch.optim.SGD):
    """A setting that is not in its defaults."""

    def __init__(self, params: Any, lr: float = 0.1, period: int = 5) -> None:
        super().__init__(params, lr=lr)
        self.period = period


def with_hook(one: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *arguments: None)
    return optimizer


def with_other_step(one: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, misc]
    return optimizer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda one: WithModel(one.parameters(), one), r"WithModel cannot be copied \(TypeError: .*'model'\)"),
        (lambda one: WithSetting(one.parameters(), period=9), "WithSetting cannot be copied: period would differ"),
        (with_hook, "SGD cannot be copied: it has step_post_hook"),
        (with_other_step, r"SGD cannot be copied: it has another step\(\)"),
    ],
)
def test_what_cannot_be_copied_is_named_before_the_first_step(make: Callable[..., Any], words: str) -> None:
    one = model()
    with pytest.raises(ConfigError, match=words):
        Trainer(one, make(one), AsyncSGD())


def test_settings_are_sent_as_differences_and_set_exactly() -> None:
    one, two = model(), model()
    optimizer = torch.optim.AdamW([{"params": one.parameters()}], lr=torch.tensor(0.1), betas=(0.9, 0.999))
    sent = SentSettings(optimizer)
    assert sent.differences() == [0.0] * 4
    copied = copy_optimizer(optimizer, list(one.parameters()), list(two.parameters()))
    optimizer.param_groups[0].update(lr=0.05, betas=(0.9, 0.99))
    sent.set(copied, sent.differences())
    (group,) = copied.param_groups
    assert float(group["lr"]) == pytest.approx(0.05) and isinstance(group["lr"], torch.Tensor)
    assert group["betas"] == (0.9, 0.99) and group["weight_decay"] == 0.01
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ConfigError, match="got a parameter group after the Trainer was made"):
        sent.differences()


def test_a_hook_that_is_registered_between_two_steps_is_refused() -> None:
    one = model()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    trainer = Trainer(one, optimizer, AsyncSGD())
    trainer.step(lambda: one(torch.ones(2, 3, dtype=torch.float64)).mean())
    optimizer.register_step_post_hook(lambda *arguments: None)
    with pytest.raises(ConfigError, match="SGD cannot be copied: it has step_post_hook, which servers would not call"):
        trainer.step(lambda: one(torch.ones(2, 3, dtype=torch.float64)).mean())


def test_what_a_servers_steps_change_in_its_settings_stays() -> None:
    """Its optimizer doubles its own rate. Then the worker's loop halves the rate: both factors apply."""
    worker, server = (torch.optim.SGD(model().parameters(), lr=0.1) for _ in range(2))
    sent, rates = SentSettings(worker), []
    last = None
    for step in range(4):
        if step == 2:
            worker.param_groups[0]["lr"] = 0.05
        last = sent.set(server, sent.differences(), last)
        rates.append(server.param_groups[0]["lr"])
        if step == 0:
            server.param_groups[0]["lr"] *= 2
    assert rates == pytest.approx([0.1, 0.2, 0.1, 0.1])


@pytest.mark.parametrize("options", [{"clip_norm": 1.0}, {"keep_gradients": True}], ids=str)
def test_options_that_need_the_mean_gradient_are_refused(options: dict[str, Any]) -> None:
    one = model()
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name}=.*only a server of"):
        Trainer(one, torch.optim.SGD(one.parameters(), lr=0.1), SoftsyncSGD(), **options)


def test_one_process_with_its_server_is_the_plain_loop() -> None:
    """With a scheduler, and with a rank's step without samples."""
    one, two = model(), model()
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (one, two)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.7) for each in optimizers]
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with Trainer(one, optimizers[0], AsyncSGD(shards=2)) as trainer:
        for step in range(5):
            trainer.step(None if step == 2 else lambda: one(x).square().mean())
            schedulers[0].step()
        assert trainer.num_updates == 5
    for step in range(5):
        optimizers[1].zero_grad()
        if step != 2:
            two(x).square().mean().backward()
            optimizers[1].step()
        schedulers[1].step()
    for mine, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
