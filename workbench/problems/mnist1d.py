"""MNIST-1D (Greydanus and Kobak 2024, arXiv 2011.14439): ten classes of distorted one-dimensional patterns.

The samples are generated from a seed; nothing is downloaded. Each digit has a pattern of 12 points, which is padded,
stretched, scaled, shifted, covered with noise and sheared, then sampled at 40 points. The settings are those of the
paper. Accuracy does not saturate as on the digits: the paper reports 32 % for logistic regression, 68 % for an MLP and
94 % for a CNN. The samples are not the paper's file: they follow the same procedure with another random generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from workbench.errors import ConfigError
from workbench.problems.base import Problem
from workbench.problems.models import check_dtype, cnn1d, mlp, positive_ints
from workbench.rng import generator

NUM_POINTS, NUM_CLASSES = 40, 10
STRETCHED = 72  # points of a signal before it is sampled at NUM_POINTS
PADDING = (36, 60)  # least and most zeros after the pattern
MAX_SHIFT = 47
SCALE, SHEAR = 0.4, 0.75  # widths of the ranges of the two factors
SMOOTH_NOISE, WHITE_NOISE = 0.25, 0.02  # standard deviations; the first before smoothing
SMOOTHING = 2.0  # standard deviation of the Gaussian filter, in points
MEAN, STD = -0.0060, 0.1547  # of a signal's points, measured on a million signals
BLOCK = 1000  # samples that share a generator: the first samples do not depend on the number of samples
RESOLUTION = (
    4096  # values are multiples of 1 / RESOLUTION, to hide rounding errors of exp and log that differ between machines
)

# One row for each digit, as in the paper, which standardises each row, shifts it to begin at 0 and divides it by 6.
PATTERNS = np.array(
    [
        [5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5],
        [5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5],
        [5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5],
        [5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5],
        [5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5],
        [5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5],
        [5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5],
        [5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5],
        [5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5],
        [5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5],
    ]
)
TEMPLATES = (PATTERNS - PATTERNS[:, :1]) / PATTERNS.std(1, keepdims=True) / 6

Floats = NDArray[np.float64]


def mnist1d_softmax(
    *, samples: int = 4000, test_samples: int = 10_000, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Problem:
    """Softmax regression (one linear layer) on MNIST-1D: convex. 410 parameters. Arguments: see `mnist1d_cnn`."""
    model = partial(mlp, NUM_POINTS, (), NUM_CLASSES, dtype)
    return _mnist1d("mnist1d-softmax", model, samples, test_samples, seed, dtype, lr=0.025)


def mnist1d_mlp(
    *,
    samples: int = 4000,
    test_samples: int = 10_000,
    seed: int = 0,
    hidden: Sequence[int] = (100, 100),
    dtype: torch.dtype = torch.float32,
) -> Problem:
    """Fully connected ReLU network on MNIST-1D. 15,210 parameters by default, as in the paper.

    The paper's network also has a skip connection.

    Args:
        samples, test_samples, seed, dtype: see `mnist1d_cnn`.
        hidden: widths of the inner layers.
    """
    model = partial(mlp, NUM_POINTS, positive_ints("hidden", hidden), NUM_CLASSES, dtype)
    return _mnist1d("mnist1d-mlp", model, samples, test_samples, seed, dtype, lr=0.025)


def mnist1d_cnn(
    *,
    samples: int = 4000,
    test_samples: int = 10_000,
    seed: int = 0,
    channels: Sequence[int] = (25, 25, 25),
    dtype: torch.dtype = torch.float32,
) -> Problem:
    """The paper's CNN on MNIST-1D: one-dimensional convolutions of stride 2, then one linear layer.

    5,210 parameters by default.

    Args:
        samples, test_samples: number of training samples (the paper's by default) and of test samples. With 10,000 test
            samples, the standard error of an accuracy of 90 % is 0.3 percentage points.
        seed: seed of the samples. A smaller set is the beginning of a larger one. Training and test samples use
            different random numbers.
        channels: channels of the convolutions.
        dtype: dtype of data and parameters.

    Example:
        >>> mnist1d_cnn(samples=50_000).num_samples()
        50000
    """
    model = partial(cnn1d, NUM_POINTS, positive_ints("channels", channels), NUM_CLASSES, dtype)
    return _mnist1d("mnist1d-cnn", model, samples, test_samples, seed, dtype, lr=0.05)


def _mnist1d(
    name: str,
    model: Callable[[], nn.Module],
    samples: int,
    test_samples: int,
    seed: int,
    dtype: torch.dtype,
    *,
    lr: float,
) -> Problem:
    positive_ints("samples and test_samples", [samples, test_samples])
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ConfigError(f"seed={seed!r}: give a whole number")
    check_dtype(dtype)
    return Problem(
        name=name,
        model=model,
        loss=cross_entropy,
        train=partial(make_samples, samples, "train", seed, dtype),
        test=partial(make_samples, test_samples, "test", seed, dtype),
        optimizer=partial(torch.optim.SGD, lr=lr, momentum=0.9),
    )


@lru_cache(maxsize=4)
def make_samples(
    num_samples: int, part: Literal["train", "test"], seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return signals (num_samples, 1, 40) of mean 0 and variance 1, and labels (num_samples,) int64, in random order.

    The data are the same on every machine. In each block of a thousand samples, the classes are equally frequent.
    """
    blocks = [_block(part, seed, number) for number in range(-(-num_samples // BLOCK))]
    signals, labels = (np.concatenate(parts)[:num_samples] for parts in zip(*blocks, strict=True))
    return torch.tensor(signals, dtype=dtype).unsqueeze(1), torch.tensor(labels, dtype=torch.int64)


def _block(part: str, seed: int, number: int) -> tuple[Floats, NDArray[np.int64]]:
    """Return BLOCK signals and labels."""
    random = generator(seed, f"mnist1d-{part}", step=number)
    labels = random.permutation(np.arange(BLOCK) % NUM_CLASSES)
    signals = distort(
        TEMPLATES[labels],
        padding_N=random.integers(PADDING[0], PADDING[1] + 1, BLOCK),
        scale_N=1 + SCALE * (random.random(BLOCK) - 0.5),
        shift_N=random.integers(0, MAX_SHIFT + 1, BLOCK),
        shear_N=SHEAR * (random.random(BLOCK) - 0.5),
        smooth_noise_NT=smooth(SMOOTH_NOISE * random.standard_normal((BLOCK, STRETCHED))),
        white_noise_NT=WHITE_NOISE * random.standard_normal((BLOCK, STRETCHED)),
    )
    return np.round((signals - MEAN) / STD * RESOLUTION) / RESOLUTION, labels


def distort(
    templates_ND: Floats,
    *,
    padding_N: NDArray[np.int64],
    scale_N: Floats,
    shift_N: NDArray[np.int64],
    shear_N: Floats,
    smooth_noise_NT: Floats,
    white_noise_NT: Floats,
) -> Floats:
    """Return the signals that the paper's procedure makes of N templates with these random numbers, (N, 40).

    D is the number of points of a template, T = 72 that of a stretched signal. Smooth noise covers only the padding,
    white noise the whole signal.
    """
    num_samples, width = templates_ND.shape
    padded = np.concatenate([templates_ND, np.zeros((num_samples, PADDING[1] + 1))], axis=1)
    place_NT = np.arange(STRETCHED) * (width + padding_N[:, None] - 1) / (STRETCHED - 1)
    stretched_NT = scale_N[:, None] * _interpolate(padded, place_NT)
    origin_NT = (np.arange(STRETCHED) - shift_N[:, None]) % STRETCHED
    shifted_NT = np.take_along_axis(stretched_NT, origin_NT, axis=1)
    is_pattern_NT = np.take_along_axis(place_NT < width, origin_NT, axis=1)
    noisy_NT = np.where(is_pattern_NT, shifted_NT, smooth_noise_NT) + white_noise_NT
    sheared_NT = noisy_NT - shear_N[:, None] * np.linspace(-0.5, 0.5, STRETCHED)
    sampled = np.arange(NUM_POINTS) * (STRETCHED - 1) / (NUM_POINTS - 1)
    return _interpolate(sheared_NT, np.broadcast_to(sampled, (num_samples, NUM_POINTS)))


def _interpolate(values: Floats, places: Floats) -> Floats:
    """Return each row's values at real-valued `places` in that row, linearly between neighbours."""
    left = np.minimum(places.astype(np.int64), values.shape[1] - 2)
    share = places - left
    found: Floats = (
        np.take_along_axis(values, left, axis=1) * (1 - share) + np.take_along_axis(values, left + 1, axis=1) * share
    )
    return found


def smooth(noise_NT: Floats) -> Floats:
    """Filter each row with a Gaussian, as `scipy.ndimage.gaussian_filter1d` does.

    The filter is cut at four standard deviations, and the ends of the row are mirrored. The sum is a loop, because a
    matrix product adds in an order that depends on the machine.
    """
    radius = round(4 * SMOOTHING)
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / SMOOTHING) ** 2)
    mirrored = np.pad(noise_NT, ((0, 0), (radius, radius)), mode="symmetric")
    length = noise_NT.shape[1]
    total = np.zeros_like(noise_NT)
    for start, weight in enumerate(weights / weights.sum()):
        total += weight * mirrored[:, start : start + length]
    return total
