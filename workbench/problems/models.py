"""Small networks, and the input layers of the image problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.errors import ConfigError


def mlp(num_inputs: int, hidden: Sequence[int], num_classes: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Fully connected ReLU network, for inputs with `num_inputs` elements a sample: (B, ...) -> (B, num_classes)."""
    layers: list[nn.Module] = [nn.Flatten()]
    for wide, narrow in zip([num_inputs, *hidden], hidden, strict=False):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    layers.append(nn.Linear(hidden[-1] if hidden else num_inputs, num_classes))
    return he_init(nn.Sequential(*layers)).to(dtype)


def cnn(
    image: tuple[int, int, int],
    channels: Sequence[int],
    hidden: int,
    num_classes: int,
    dtype: torch.dtype = torch.float32,
) -> nn.Sequential:
    """Stacked 3x3 convolutions, of stride 2 except the first, and a hidden layer: (B, C, H, W) -> (B, num_classes)."""
    layers: list[nn.Module] = []
    num_channels, height, width = image
    for index, num_out in enumerate(channels):
        stride = 1 if index == 0 else 2
        layers += [nn.Conv2d(num_channels, num_out, kernel_size=3, padding=1, stride=stride), nn.ReLU()]
        num_channels, height, width = num_out, -(-height // stride), -(-width // stride)
    layers += [
        nn.Flatten(),
        nn.Linear(num_channels * height * width, hidden),
        nn.ReLU(),
        nn.Linear(hidden, num_classes),
    ]
    return he_init(nn.Sequential(*layers)).to(dtype)


def cnn1d(length: int, channels: Sequence[int], num_classes: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """One-dimensional convolutions of stride 2, then one linear layer: (B, 1, T) -> (B, num_classes).

    The first kernel has 5 points, the others 3.
    """
    layers: list[nn.Module] = []
    num_channels = 1
    for index, num_out in enumerate(channels):
        kernel = 5 if index == 0 else 3
        layers += [nn.Conv1d(num_channels, num_out, kernel, stride=2, padding=1), nn.ReLU()]
        num_channels, length = num_out, (length + 2 - kernel) // 2 + 1
    layers += [nn.Flatten(), nn.Linear(num_channels * length, num_classes)]
    return he_init(nn.Sequential(*layers)).to(dtype)


def he_init(module: nn.Sequential) -> nn.Sequential:
    """Initialise weights ~ N(0, 2 / fan_in) and biases 0, which keeps the signal's size through ReLU layers.

    PyTorch's own initialisation is smaller by a factor of sqrt(6). With it, these networks need several more epochs.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return module


@final
class Standardise(nn.Module):
    """`(images / 255 - mean) / std`, by channel: uint8 (B, C, H, W) -> floating point.

    It is part of the model, so that a rank stores and moves images as bytes, a quarter of their size as float32.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        scale = 1 / (255 * torch.tensor(std))
        self.register_buffer("scale", scale.reshape(-1, 1, 1), persistent=False)
        self.register_buffer("shift", (255 * torch.tensor(mean) * scale).reshape(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return images.to(self.scale.dtype) * self.scale - self.shift


@final
class CropAndFlip(nn.Module):
    """In training, shift each image by up to `padding` pixels (the new border is black), and mirror half of them.

    It draws from PyTorch's default generator, as dropout does. Any dtype, (B, C, H, W) -> the same.
    """

    def __init__(self, padding: int = 4) -> None:
        super().__init__()
        self.padding = padding

    def forward(self, images: Tensor) -> Tensor:
        if not self.training:
            return images
        num_images, _, height, width = images.shape
        device = images.device
        top, left = torch.randint(0, 2 * self.padding + 1, (2, num_images, 1), device=device)
        mirrored = torch.rand(num_images, 1, device=device) < 0.5
        rows = top + torch.arange(height, device=device)
        columns = torch.arange(width, device=device)
        columns = left + torch.where(mirrored, columns.flip(0), columns)
        padded = F.pad(images, (self.padding,) * 4)
        which = torch.arange(num_images, device=device)
        return padded[which[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def check_dtype(dtype: object) -> None:
    """Raise `ConfigError` unless parameters can have this dtype."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype={dtype!r}: give a floating-point torch dtype, such as torch.float64")


def positive_ints(name: str, values: int | Sequence[int]) -> tuple[int, ...]:
    """Return `values`, one or several, as a tuple of whole numbers above 0.

    Raises:
        ConfigError: a value is not a whole number above 0.
    """
    several = values if isinstance(values, list | tuple) else (values,)
    for value in several:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name}: {value!r} is not a whole number of 1 or more")
    return tuple(several)
