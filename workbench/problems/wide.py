"""A network with a given size in megabytes, to measure throughput."""

from __future__ import annotations

import math
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from workbench.errors import ConfigError
from workbench.problems.base import Problem
from workbench.problems.models import check_dtype, mlp, positive_ints
from workbench.rng import derive_seed
from workbench.units import MB

NUM_INPUTS, NUM_CLASSES = 512, 10


def wide_mlp(
    *, megabytes: float = 50.0, layers: int = 4, samples: int = 4096, dtype: torch.dtype = torch.float32
) -> Problem:
    """ReLU network of `layers` equally wide inner layers and `megabytes` (1e6 bytes) of parameters, on synthetic data.

    Inputs are normal random numbers; the label is the largest of ten fixed random projections of them.

    Raises:
        ConfigError: the size is too small for this number of layers.
    """
    positive_ints("layers and samples", [layers, samples])
    check_dtype(dtype)
    width = width_for(megabytes * MB / dtype.itemsize, layers)
    if width < 1:
        raise ConfigError(f"megabytes={megabytes} is too small for {layers} layers of one unit each: give more")
    return Problem(
        name="wide-mlp",
        model=partial(mlp, NUM_INPUTS, (width,) * layers, NUM_CLASSES, dtype),
        loss=cross_entropy,
        train=partial(make_data, samples, "train", dtype),
        test=partial(make_data, max(1, samples // 8), "test", dtype),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        note=f"synthetic data: a network of {megabytes:g} MB for measuring speed, accuracy means nothing",
    )


def width_for(num_parameters: float, layers: int) -> int:
    """Return the width w of the inner layers with which the network has about this number of parameters.

    Solve num_parameters = inputs * w + (layers - 1) * w**2 + layers * w + w * classes + classes for w. The result is
    0 if w is below 1.
    """
    linear, constant = NUM_INPUTS + layers + NUM_CLASSES, NUM_CLASSES - num_parameters
    if layers == 1:
        return max(0, round(-constant / linear))
    square = layers - 1
    discriminant = linear**2 - 4 * square * constant
    return max(0, round((math.sqrt(max(discriminant, 0)) - linear) / (2 * square)))


@lru_cache(maxsize=2)
def make_data(samples: int, part: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return inputs (samples, 512) and labels (samples,) int64."""
    teacher = torch.randn(
        NUM_INPUTS, NUM_CLASSES, generator=torch.Generator().manual_seed(derive_seed(0, "wide-teacher"))
    )
    inputs = torch.randn(samples, NUM_INPUTS, generator=torch.Generator().manual_seed(derive_seed(0, f"wide-{part}")))
    return inputs.to(dtype), (inputs @ teacher).argmax(1)
