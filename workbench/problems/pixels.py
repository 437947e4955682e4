"""A generative model of images, after PixelCNN (van den Oord and others, 2016): each pixel given the pixels before it.

An image's likelihood is a product over pixels. Each factor is a softmax over the pixel's levels, given all pixels
above it and to its left, and its own previous colours. Convolutions with masked kernels compute all factors at once.
The loss is the negative log-likelihood per dimension in nats (divide by ln 2 for bits). "accuracy" is the share of
pixels for which the model gives the true level the highest probability.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, cross_entropy, relu

from workbench.errors import ConfigError
from workbench.problems.base import Problem
from workbench.problems.digits import pixel_levels
from workbench.problems.image_data import SOURCES, find_folder, load_images, synthetic_images
from workbench.problems.models import check_dtype, positive_ints
from workbench.problems.vision import SYNTHETIC_NOTE, SYNTHETIC_SAMPLES, Folder

DIGIT_LEVELS = 17
# Decay, momentum and rate are from chen2016revisiting. There, the rate of 1e-4 falls to 3e-6 after 200,000 updates of
# a far larger model.
RMSPROP = partial(torch.optim.RMSprop, alpha=0.95, momentum=0.9)


def digits_pixelcnn(
    *, width: int = 24, blocks: int = 2, kernel: int = 5, dtype: torch.dtype = torch.float32
) -> Problem:
    """PixelCNN of the 8 x 8 digits, 17 levels of grey. 5,489 parameters by default.

    Args:
        width: channels of the residual stream; even, because blocks work on half of them.
        blocks: residual blocks.
        kernel: size of the first convolution, odd. Convolutions in blocks are 3 x 3.
        dtype: dtype of the parameters.
    """
    check_dtype(dtype)
    return _pixelcnn("digits-pixelcnn", _network(1, DIGIT_LEVELS, width, blocks, kernel, dtype), digit_levels, lr=1e-3)


def cifar10_pixelcnn(
    *,
    folder: Folder = None,
    synthetic: bool = False,
    levels: int = 256,
    width: int = 120,
    blocks: int = 15,
    kernel: int = 7,
) -> Problem:
    """PixelCNN of CIFAR-10: red, green and blue of each pixel in turn, 256 levels each. 830,808 parameters by default.

    Args:
        folder: as for `cifar10_resnet18`.
        synthetic: use random images of the same shape.
        levels: number of levels to which the 256 levels of a colour are merged, a divisor of 256. Fewer levels are
            learnt faster.
        width, blocks, kernel: see `digits_pixelcnn`. The width is a multiple of 6.

    Raises:
        DataMissing: the files are not in `folder`; the message says which are expected, and where to get them.
    """
    positive_ints("levels", levels)
    if levels < 2 or 256 % levels:
        raise ConfigError(f"levels={levels}: give a divisor of 256, 2 or more")
    if synthetic and folder is not None:
        raise ConfigError(
            f"folder={str(folder)!r} and synthetic=True: real images or synthetic ones: give one of the two"
        )
    where = None if synthetic else find_folder("cifar10", folder)
    load = partial(colour_levels, where, levels)
    name = "cifar10-pixelcnn" + ("-synthetic" if synthetic else "")
    make = _network(3, levels, width, blocks, kernel, torch.float32)
    return _pixelcnn(name, make, load, lr=1e-4, note=SYNTHETIC_NOTE if synthetic else "")


def _network(channels: int, levels: int, width: int, blocks: int, kernel: int, dtype: torch.dtype) -> partial[PixelCNN]:
    positive_ints("width, blocks and kernel", [width, blocks, kernel])
    if width % (2 * channels):
        raise ConfigError(
            f"width={width} is not a multiple of {2 * channels}: choose "
            f"width={max(1, width // (2 * channels)) * 2 * channels}"
        )
    if kernel % 2 == 0:
        raise ConfigError(f"kernel={kernel}: give an odd size, such as {kernel + 1}")
    return partial(PixelCNN, channels, levels, width, blocks, kernel, dtype)


def _pixelcnn(
    name: str, make: partial[PixelCNN], load: Callable[[bool], tuple[Tensor, Tensor]], *, lr: float, note: str = ""
) -> Problem:
    return Problem(
        name=name,
        model=make,
        loss=cross_entropy,
        train=partial(load, True),
        test=partial(load, False),
        batch_size=4,  # as in the paper
        optimizer=partial(RMSPROP, lr=lr),
        note=note,
    )


@final
class MaskedConv2d(nn.Module):
    """A convolution over earlier pixels, and earlier colours of the same pixel ("A"), or also the same colour ("B").

    Channels come in `groups` equal groups, one for each colour, in the order of the colours.
    """

    mask: Tensor

    def __init__(
        self, kind: Literal["A", "B"], num_in: int, num_out: int, kernel: int, groups: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.padding = kernel // 2
        self.weight = nn.Parameter(torch.empty(num_out, num_in, kernel, kernel, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(num_out, dtype=dtype))
        mask = torch.zeros(num_out, num_in, kernel, kernel, dtype=dtype)
        mask[:, :, : self.padding] = 1
        mask[:, :, self.padding, : self.padding] = 1
        of_output, of_input = (torch.arange(num) * groups // num for num in (num_out, num_in))
        before = of_input[None, :] < of_output[:, None] if kind == "A" else of_input[None, :] <= of_output[:, None]
        mask[:, :, self.padding, self.padding] = before.to(dtype)
        self.register_buffer("mask", mask, persistent=False)
        seen = max(1.0, float(mask.sum()) / num_out)  # the mean fan-in, without masked weights
        nn.init.normal_(self.weight, std=(2 / seen) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return conv2d(x, self.weight * self.mask, self.bias, padding=self.padding)


@final
class _Block(nn.Module):
    """x + f(x), with f through half as many channels; f is initially 0."""

    def __init__(self, width: int, groups: int, dtype: torch.dtype) -> None:
        super().__init__()
        half = width // 2
        self.down = MaskedConv2d("B", width, half, 1, groups, dtype)
        self.middle = MaskedConv2d("B", half, half, 3, groups, dtype)
        self.up = MaskedConv2d("B", half, width, 1, groups, dtype)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.up(relu(self.middle(relu(self.down(relu(x))))))
        return out


@final
class PixelCNN(nn.Module):
    """Plain (not gated) PixelCNN with residual blocks: integer levels (B, C, H, W) -> scores (B, levels, C, H, W)."""

    def __init__(
        self, channels: int, levels: int, width: int, blocks: int, kernel: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.channels = channels
        self.levels = levels
        self.first = MaskedConv2d("A", channels, width, kernel, channels, dtype)
        self.blocks = nn.ModuleList(_Block(width, channels, dtype) for _ in range(blocks))
        self.inner = MaskedConv2d("B", width, width, 1, channels, dtype)
        self.last = MaskedConv2d("B", width, channels * levels, 1, channels, dtype)
        nn.init.zeros_(self.last.weight)  # initially all levels are equally likely

    def forward(self, levels: Tensor) -> Tensor:
        x = self.first(levels.to(self.first.weight.dtype) * (2 / (self.levels - 1)) - 1)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.last(relu(self.inner(relu(x)))).unflatten(1, (self.channels, self.levels)).transpose(1, 2)
        return scores


@lru_cache(maxsize=2)
def digit_levels(train: bool) -> tuple[Tensor, Tensor]:
    """Return levels 0 to 16 of the digits (N, 1, 8, 8) int64, as input and as target."""
    levels = pixel_levels(train)
    return levels, levels


@lru_cache(maxsize=2)
def colour_levels(folder: str | None, levels: int, train: bool) -> tuple[Tensor, Tensor]:
    """Return levels of CIFAR-10's colours (N, 3, 32, 32), as uint8 and as int64; synthetic images without a folder."""
    if folder is None:
        source = SOURCES["cifar10"]
        samples = SYNTHETIC_SAMPLES // (1 if train else 4)
        images = synthetic_images(source.image, source.num_classes, samples, "train" if train else "test")[0]
    else:
        images = load_images("cifar10", folder, train)[0]
    merged = images // (256 // levels)
    return merged, merged.long()
