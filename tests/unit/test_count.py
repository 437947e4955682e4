"""Compute that is counted: against numbers one can do in the head, published ones, and what is measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from workbench import problems
from workbench.costs import count_compute
from workbench.errors import ConfigError


def chain() -> problems.Problem:
    """Linear layers 10 -> 20 -> 30, which take 200 and 600 multiplications a sample."""
    return problems.Problem(
        model=lambda: nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 30)),
        loss=cross_entropy,
        train=(torch.zeros(3, 10), torch.zeros(3, dtype=torch.int64)),
    )


def test_linear_layers_are_counted_as_in_the_head() -> None:
    found = count_compute(chain(), 4, flops_per_s=8.0)
    assert found.forward_s == 2 * 4 * 800 / 8
    assert found.backward_s == 2 * 4 * (200 + 2 * 600) / 8, "the first layer's inputs need no gradient"
    assert found.forward_shares == pytest.approx(
        [200 / 800 * 200 / 220, 200 / 800 * 20 / 220, 600 / 800 * 600 / 630, 600 / 800 * 30 / 630]
    )
    assert sum(found.backward_shares[:2]) == pytest.approx(200 / 1400)
    assert sum(found.backward_shares) == pytest.approx(1)


@pytest.mark.parametrize("tied", [False, True])
def test_layers_behind_an_embedding_need_gradients_of_their_inputs(tied: bool) -> None:
    """Also where the embedding is the last layer's weight too, whose operations are then the first of backward, not the last."""

    def model() -> nn.Module:
        layers = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 10, bias=False))
        if tied:
            layers[2].weight = layers[0].weight
        return layers

    batch = (torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    found = count_compute(problems.Problem(model=model, loss=cross_entropy, train=batch), 2, flops_per_s=1.0)
    assert found.forward_s == 2 * 2 * (16 + 40)
    assert found.backward_s == 2 * found.forward_s
    shares = [0, 1] if tied else [0, 16 / 56, 40 / 56]
    assert found.forward_shares == pytest.approx(shares) and found.backward_shares == pytest.approx(shares)


@pytest.mark.parametrize(
    ("model", "giga"),
    [("alexnet", 0.71), ("googlenet", 1.50), ("resnet18", 1.81), ("resnet50", 4.09), ("vit_b_16", 17.56)],
)
def test_published_counts_of_networks_are_met(model: str, giga: float) -> None:
    """The documentation of torchvision lists these billions of multiplications of one image of 224 x 224."""
    problem = problems.synthetic(model_name=model, image=(3, 224, 224), classes=1000, samples=2)
    found = count_compute(problem, 1 if "vit" in model else 2, flops_per_s=2e9)
    images = 1 if "vit" in model else 2
    assert found.forward_s / images == pytest.approx(giga, rel=0.02)
    assert 1.8 < found.backward_s / found.forward_s < 2


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(ConfigError, match="both must be above 0"):
        count_compute(chain(), 4, flops_per_s=0)
    with pytest.raises(ConfigError, match="a batch of dict"):
        count_compute(
            problems.Problem(
                model=lambda: nn.Linear(1, 2), loss=cross_entropy, train=[{"x": torch.zeros(1)}] * 2, whole_batch=True
            ),
            flops_per_s=1,
        )
