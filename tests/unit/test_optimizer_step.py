"""Steps of torch's optimizers without its compiler: the same numbers, hooks and schedules, and each start is two seconds shorter."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from workbench.errors import ConfigError
from workbench.gradients import build_layout, trainable
from workbench.optimizers import LARS
from workbench.replica.optimizer_step import OptimizerWrapper, check_per_parameter, uncompiled

LAMBDA = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda update: 1 / (1 + update))
TRAINS = """
import sys
from workbench.cli.main import main
for more in (["synchronous-sgd", "--optimizer", "adam"], ["async-sgd"]):
    assert main(["train", *more, "--runtime", "simulated", "--steps", "2"]) == 0
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


@pytest.fixture
def compiler_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process without compilation, after any earlier test in this one; torch's own way fails."""
    monkeypatch.setattr("workbench.replica.optimizer_step.compiler_is_loaded", lambda: False)
    monkeypatch.setattr("torch._dynamo.graph_break", lambda *_: pytest.fail("a step called the compiler"))
    for name in ("add_param_group", "state_dict", "load_state_dict"):
        monkeypatch.delattr(getattr(torch.optim.Optimizer, name).__wrapped__, "__dynamo_disable", raising=False)
    monkeypatch.setattr(
        "torch._dynamo.disable", lambda *_, **__: pytest.fail("the compiler was kept out by loading it")
    )


def wrapped(optimizer: Any, schedule: Any = None) -> OptimizerWrapper:
    model = nn.Linear(3, 2)
    for param in model.parameters():
        nn.init.constant_(param, 0.5)
    named = trainable(model)
    made = optimizer(model.parameters())
    return OptimizerWrapper(made, [param for _, param in named], build_layout(named), schedule=schedule, clip_norm=None)


def steps(of: OptimizerWrapper, num: int) -> None:
    for step in range(num):
        for param in of._parameters:
            param.grad = torch.full_like(param, 0.1 * step - 0.25)
        of.step(None, 1.0)
        of.advance_schedule()


@pytest.mark.usefixtures("runs")
def test_a_training_does_not_import_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.usefixtures("compiler_unseen")
def test_nor_does_a_checkpoint() -> None:
    with uncompiled():
        here = wrapped(torch.optim.SGD)
    here.load(deepcopy(here.state()))


@pytest.mark.parametrize("schedule", [None, LAMBDA], ids=["constant", "schedule"])
@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, momentum=0.9, nesterov=True),
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
    ],
    ids=["sgd", "adam", "adamw", "rmsprop", "adagrad"],
)
def test_its_steps_are_torchs_own(optimizer: Any, schedule: Any, request: pytest.FixtureRequest) -> None:
    """Bit-identical; and torch's schedules do not warn that no step was taken."""
    theirs = wrapped(partial(optimizer, lr=0.1), schedule)
    theirs._uncompiled_step = None
    steps(theirs, 4)
    request.getfixturevalue("compiler_unseen")
    with uncompiled():
        ours = wrapped(partial(optimizer, lr=0.1), schedule)
    seen: list[str] = []
    ours.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    ours.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    steps(ours, 4)
    assert seen == ["before", "after"] * 4
    for mine, other in zip(ours._parameters, theirs._parameters, strict=True):
        assert torch.equal(mine, other)


def test_a_step_that_somebody_has_replaced_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            taken.append("class")
            return super().step(closure)

    def counted(self: torch.optim.Optimizer, closure: Any = None) -> None:
        taken.append("instance")

    made = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    made.step = MethodType(counted, made)  # type: ignore[method-assign]
    for here in (wrapped(Counting), wrapped(lambda _: made)):
        monkeypatch.setattr("workbench.replica.optimizer_step.compiler_is_loaded", lambda: False)
        here.step(None, 1.0)
    assert taken == ["class", "instance"]


# -- settings that an optimizer changes in its step -------------------------------------------------------------


class Doubling(torch.optim.Optimizer):
    """Doubles its learning rate, and halves its first beta, after each step."""

    def __init__(self, params: Any, lr: Any = 0.5) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.8, 0.5)})
        self.used: list[float] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.used.append(float(group["lr"]))
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(2)
            else:
                group["lr"] *= 2
            group["betas"] = (group["betas"][0] / 2, group["betas"][1])


def lr_of(of: OptimizerWrapper) -> float:
    return float(of.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)], ids=["a number", "a tensor"])
@pytest.mark.parametrize("lr_scale", [1.0, 0.25])
def test_what_a_step_changes_stays_and_what_the_step_was_given_is_undone(lr_scale: float, lr: Any) -> None:
    here = wrapped(partial(Doubling, lr=deepcopy(lr)))
    rate = here.optimizer.param_groups[0]["lr"]
    for _ in range(3):
        here.step(None, lr_scale)
    assert here.optimizer.used == [0.5 * lr_scale, lr_scale, 2 * lr_scale]  # type: ignore[attr-defined]
    assert lr_of(here) == 4.0
    assert here.optimizer.param_groups[0]["betas"] == (0.1, 0.5)
    assert not isinstance(lr, torch.Tensor) or here.optimizer.param_groups[0]["lr"] is rate


def test_a_setting_of_a_later_gradient_changes_with_it() -> None:
    """A delay of one: the optimizer doubles its rate at each update, and the loop multiplies it by 0.1 once."""
    here = wrapped(Doubling)
    here.remember(0)
    for step in range(1, 5):
        if step == 2:
            here.optimizer.param_groups[0]["lr"] *= 0.1
        here.remember(step)
        here.step(None, 1.0, of=step - 1)
        del here.of_step[step - 1]
    assert here.optimizer.used == pytest.approx([0.5, 1.0, 0.2, 0.4])  # type: ignore[attr-defined]
    assert lr_of(here) == pytest.approx(0.8)


def test_an_error_in_a_step_leaves_no_setting_of_that_step() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise KeyError("state")

    here = wrapped(partial(Failing, lr=0.5))
    with pytest.raises(KeyError):
        here.step(None, 0.1)
    assert lr_of(here) == 0.5
    assert len(here.optimizer.param_groups[0]["params"]) == 2


# -- steps for each bucket --------------------------------------------------------------------------------------


class Unknown(torch.optim.SGD):
    """A class that inherits from one of torch's and may do anything."""


class Declared(torch.optim.SGD):
    per_parameter = True


class Inherits(Declared):
    """It declares nothing itself."""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (torch.optim.RAdam, ""),
        (torch.optim.Adafactor, ""),
        (LARS, ""),
        (Declared, ""),
        (Unknown, "Unknown once for each bucket, and it may need all parameters"),
        (Inherits, "Or declare per_parameter = True in the class"),
    ],
)
def test_an_optimizer_steps_for_each_bucket_only_if_that_is_known_to_be_the_same(kind: Any, words: str) -> None:
    made = kind([nn.Parameter(torch.ones(2))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(made, 2)
    if words:
        with pytest.raises(ConfigError, match=words):
            check_per_parameter(made)
        return
    check_per_parameter(made)
    made.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r"and it has step_post_hook: use an algorithm that applies the whole"):
        check_per_parameter(made)
