"""Operations counted on shapes: numbers one can do in the head, and AlexNet's, which are known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from workbench.calibration.nominal import count_operations, counted
from workbench.errors import ConfigError


def test_layers_share_by_their_operations() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5, bias=False))
    found = counted(model, torch.zeros(3, 10))
    assert found.forward == 2 * (10 * 20 + 20 * 5)
    assert found.backward == 2 * (10 * 20 + 2 * 20 * 5)  # no gradient of the input
    assert found.shares == pytest.approx((200 / 300 * 200 / 220, 200 / 300 * 20 / 220, 100 / 300))
    compute = found.compute(4, 1e3, update_bytes_per_s=1e4)
    assert compute.forward_s == pytest.approx(4 * found.forward / 1e3)
    assert compute.update_s == pytest.approx(4 * (200 + 20 + 100) / 1e4)


def test_alexnet_and_googlenet() -> None:
    alexnet, googlenet = count_operations("alexnet"), count_operations("googlenet")
    assert alexnet.shapes.num_bytes == 4 * 61_100_840
    assert alexnet.forward == pytest.approx(1.43e9, rel=0.01)
    assert googlenet.forward / alexnet.forward == pytest.approx(2.1, rel=0.02)
    assert sum(alexnet.shares) == pytest.approx(1)
    assert sum(alexnet.shares[:10]) > 0.75, "convolutions take the time"


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(ConfigError, match="no product"):
        counted(nn.BatchNorm1d(3), torch.zeros(4, 3))
    with pytest.raises(ConfigError, match="alexnet"):
        count_operations("alexnett")
    with pytest.raises(ConfigError, match="above 0"):
        counted(nn.Linear(2, 2), torch.zeros(1, 2)).compute(4, 0)
