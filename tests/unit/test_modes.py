"""Modules keep their own modes through evaluations: what a model's constructor froze stays frozen."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from tests.laws import tiny
from workbench.algorithms import SynchronousSGD
from workbench.replica.replica import evaluation_mode
from workbench.runtimes.simulator.simulate import simulate


def test_batch_norm_that_a_constructor_froze_stays_frozen_after_an_evaluation() -> None:
    made: list[nn.Module] = []

    def model() -> nn.Module:
        module = tiny.batchnorm_mlp()
        module[1].eval()
        made.append(module)
        return module

    simulate(SynchronousSGD(), replace(tiny.problem(), model=model), workers=1, steps=4, evaluate_every=1)
    for module in made:
        assert [part.training for part in module] == [True, False, True, True]
        assert torch.equal(module[1].running_mean, torch.zeros_like(module[1].running_mean)), "frozen statistics moved"


def test_a_model_that_is_made_in_evaluation_mode_trains() -> None:
    made: list[nn.Module] = []

    def model() -> nn.Module:
        made.append(tiny.batchnorm_mlp().eval())
        return made[-1]

    simulate(SynchronousSGD(), replace(tiny.problem(), model=model), workers=1, steps=2, evaluate_every=1)
    assert all(bool(module[1].running_mean.any()) for module in made)


def test_an_error_in_an_evaluation_gives_the_modes_back() -> None:
    module = tiny.batchnorm_mlp()
    module[0].eval()
    try:
        with evaluation_mode(module) as inside:
            assert not any(part.training for part in inside.modules())
            raise ArithmeticError
    except ArithmeticError:
        pass
    assert [part.training for part in module] == [False, True, True, True]
