"""The use and the size of each problem: a table that needs neither PyTorch nor any data."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Summary:
    """A problem with its default options: the number of its parameters and of its training samples, and its use."""

    parameters: int
    samples: int
    use: str


SUMMARIES = MappingProxyType(
    {
        "digits-softmax": Summary(650, 1_437, "convex; a training takes about a second"),
        "digits-mlp": Summary(17_226, 1_437, "the default: quick; 98 % correct with or without delays"),
        "digits-cnn": Summary(38_282, 1_437, "a small CNN on the digits"),
        "digits-pixelcnn": Summary(5_489, 1_437, "a generative model of the digits"),
        "mnist1d-softmax": Summary(410, 4_000, "convex; far from 100 % correct"),
        "mnist1d-mlp": Summary(15_210, 4_000, "shows in accuracy what delays cost"),
        "mnist1d-cnn": Summary(5_210, 4_000, "shows in accuracy what delays cost; the most sensitive to them"),
        "text-transformer": Summary(437_760, 5_624, "a small language model on Python's help"),
        "library-transformer": Summary(1_298_880, 30_993, "a language model; 0.14 s of a core for a gradient"),
        "mnist5k-cnn": Summary(54_458, 4_000, "5,000 real MNIST images without a download (extra `mnist`)"),
        "mnist-mlp": Summary(235_146, 60_000, "MNIST from a folder"),
        "mnist-cnn": Summary(809_034, 60_000, "MNIST from a folder"),
        "cifar10-cnn": Summary(582_026, 50_000, "CIFAR-10 from a folder"),
        "cifar10-resnet18": Summary(11_173_962, 50_000, "CIFAR-10 from a folder"),
        "cifar10-pixelcnn": Summary(830_808, 50_000, "a generative model of CIFAR-10, from a folder"),
        "cifar100-softmax": Summary(307_300, 50_000, "CIFAR-100 from a folder; convex"),
        "cifar100-resnet18": Summary(11_220_132, 50_000, "CIFAR-100 from a folder"),
        "imagenet-alexnet": Summary(61_100_840, 1_281_167, "ImageNet from a folder"),
        "imagenet-googlenet": Summary(13_004_888, 1_281_167, "ImageNet from a folder"),
        "imagenet-resnet18": Summary(11_689_512, 1_281_167, "ImageNet from a folder"),
        "imagenet-resnet50": Summary(25_557_032, 1_281_167, "ImageNet from a folder"),
        "imagenet-inception-v3": Summary(27_161_264, 1_281_167, "ImageNet from a folder"),
        "resnet18-synthetic": Summary(11_181_642, 2_048, "a large network on random images, to measure speed"),
        "wide-mlp": Summary(12_494_415, 4_096, "a gradient of a chosen size, to measure speed"),
    }
)


def table() -> str:
    """Return the names, sizes and uses as lines of text."""
    rows = [(name, f"{one.parameters:,}", f"{one.samples:,}", one.use) for name, one in SUMMARIES.items()]
    head = ("problem", "parameters", "samples", "for")
    return "\n".join(
        f"{name:21}  {parameters:>10}  {samples:>9}  {use}" for name, parameters, samples, use in [head, *rows]
    )
