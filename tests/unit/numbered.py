"""Gradients for the reference runtime: some whose parameters can be computed by hand, and one of a quadratic."""

from __future__ import annotations

import torch
from torch import Tensor


def numbered(parameters: Tensor) -> Tensor:
    """Return 1, 2, 3, ... for coordinates 0, 1, 2, ...

    A gradient that is a multiple of it differs between coordinates. A test then sees a wrong coordinate.
    """
    return torch.arange(1.0, len(parameters) + 1, dtype=parameters.dtype)


def common_factor(parameters: Tensor) -> float:
    """Return c, where the parameters are c, 2 c, 3 c, ...; raise AssertionError if they are not.

    Parameters that start at 0 have this form if every gradient is a multiple of `numbered`.
    """
    factors = parameters / numbered(parameters)
    assert torch.allclose(factors, factors[0].expand_as(factors), rtol=1e-12, atol=1e-14), (
        f"coordinates are not 1, 2, 3, ... times one number: {parameters.tolist()}"
    )
    return float(factors[0])


def pull(rank: int, step: int, parameters: Tensor) -> Tensor:
    """Return the gradient of a quadratic with its minimum at `rank`, and another curvature in each coordinate."""
    return torch.linspace(0.5, 1.5, len(parameters), dtype=torch.float64) * (parameters - rank)
