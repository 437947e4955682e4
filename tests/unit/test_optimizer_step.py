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

from workbench.gradients import build_layout, trainable
from workbench.replica.optimizer_step import OptimizerWrapper, uncompiled

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
