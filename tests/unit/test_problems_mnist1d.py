"""MNIST-1D: the same data from a seed on every machine, made by the paper's procedure; a plain twin makes one signal at a time."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.interpolate import interp1d
from scipy.ndimage import gaussian_filter1d

from workbench import problems
from workbench.problems.mnist1d import TEMPLATES, distort, make_samples, smooth


def digest(num_samples: int, part: str, seed: int) -> str:
    signals, labels = make_samples(num_samples, part, seed)
    return hashlib.sha256(signals.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()[:16]


def test_the_samples_of_a_seed_are_these_on_every_machine() -> None:
    assert digest(4000, "train", 0) == "8f26c2759458630d"
    assert len({digest(1000, part, seed) for part in ("train", "test") for seed in (0, 1)}) == 4


def test_shapes_moments_and_equal_classes() -> None:
    signals, labels = make_samples(4000, "train", 0)
    assert signals.shape == (4000, 1, 40) and signals.dtype == torch.float32 and labels.dtype == torch.int64
    assert np.bincount(labels.numpy()).tolist() == [400] * 10
    assert abs(signals.mean()) < 0.02 and abs(signals.std() - 1) < 0.02
    assert torch.equal(signals * 4096, (signals * 4096).round()), "coarse enough to hide rounding errors"


@pytest.mark.parametrize("smaller", [1, 999, 1000, 1500])
def test_more_samples_leave_the_first_ones_as_they_are(smaller: int) -> None:
    for few, many in zip(make_samples(smaller, "train", 3), make_samples(2100, "train", 3), strict=True):
        assert len(few) == smaller and torch.equal(few, many[:smaller])


def one_signal(
    template: NDArray[np.float64],
    padding: int,
    scale: float,
    shift: int,
    shear: float,
    smooth_noise: NDArray[np.float64],
    white_noise: NDArray[np.float64],
) -> NDArray[np.float64]:
    """The paper's steps, in its order: pad, stretch to 72 points, scale, shift in a circle, noise, shear, sample at 40 points."""

    def resample(values: NDArray[np.float64], number: int) -> NDArray[np.float64]:
        return interp1d(np.linspace(0, 1, len(values)), values)(np.linspace(0, 1, number))

    # A small number marks the pattern: where the signal is exactly 0, there is padding.
    signal = resample(np.concatenate([template + 1e-8, np.zeros(padding)]), 72) * scale
    signal = np.roll(signal, shift)
    signal = np.where(signal != 0, signal, smooth_noise) + white_noise
    return resample(signal - shear * np.linspace(-0.5, 0.5, 72), 40)


def test_all_signals_at_once_are_those_of_the_plain_twin() -> None:
    random = np.random.default_rng(7)
    number = 50
    templates = TEMPLATES[np.arange(number) % 10]
    padding, shift = random.integers(36, 61, number), np.arange(number) % 48
    scale, shear = random.uniform(0.8, 1.2, number), random.uniform(-0.4, 0.4, number)
    smooth_noise, white_noise = random.normal(size=(2, number, 72))
    found = distort(
        templates,
        padding_N=padding,
        scale_N=scale,
        shift_N=shift,
        shear_N=shear,
        smooth_noise_NT=smooth_noise,
        white_noise_NT=white_noise,
    )
    expected = [
        one_signal(*arguments)
        for arguments in zip(templates, padding, scale, shift, shear, smooth_noise, white_noise, strict=True)
    ]
    # 1e-8 marks the twin's pattern, and is added to its values.
    assert np.allclose(found, expected, atol=1e-7)


def test_the_filter_is_scipys() -> None:
    noise = np.random.default_rng(1).normal(size=(5, 72))
    assert np.allclose(smooth(noise), gaussian_filter1d(noise, 2.0, axis=1), atol=1e-12)


def test_the_networks_have_the_papers_sizes() -> None:
    sizes = [
        sum(param.numel() for param in problems.get(f"mnist1d-{name}").model().parameters())
        for name in ("softmax", "mlp", "cnn")
    ]
    assert sizes == [410, 15_210, 5_210]
