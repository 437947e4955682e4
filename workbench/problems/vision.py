"""Image classification: MNIST and CIFAR from a user's folder, and torchvision's networks on synthetic images."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from workbench.errors import ConfigError
from workbench.naming import unknown
from workbench.problems.base import Problem
from workbench.problems.image_data import SOURCES, find_folder, folder_images, random_image_moments, random_images
from workbench.problems.models import CropAndFlip, Standardise, cnn, mlp, positive_ints
from workbench.problems.torchvision_door import torchvision

SYNTHETIC_NOTE = "synthetic data: shapes only, accuracy means nothing"
SYNTHETIC_SAMPLES = 2048

ModelFactory = Callable[[], nn.Module]
Folder = str | Path | None


def mnist_mlp(*, folder: Folder = None, synthetic: bool = False, hidden: Sequence[int] = (256, 128)) -> Problem:
    """Fully connected ReLU network on MNIST (60,000 images of handwritten digits). 235,146 parameters by default.

    Args:
        folder: the folder with `MNIST/raw/train-images-idx3-ubyte` and its three siblings.
        synthetic: use random images of MNIST's shape.
        hidden: widths of the inner layers.

    Raises:
        DataMissing: the files are not in `folder`; the message says which are expected, and where to get them.
    """
    network = partial(mlp, 28 * 28, positive_ints("hidden", hidden), SOURCES["mnist"].num_classes)
    return _from_source(
        "mnist", "mlp", network, folder, synthetic, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5)
    )


def mnist_cnn(
    *, folder: Folder = None, synthetic: bool = False, channels: Sequence[int] = (16, 32), hidden: int = 128
) -> Problem:
    """3x3 convolutions and a hidden layer on MNIST, 809,034 parameters by default.

    See `mnist_mlp` for the arguments.
    """
    source = SOURCES["mnist"]
    network = partial(
        cnn, source.image, positive_ints("channels", channels), positive_ints("hidden", hidden)[0], source.num_classes
    )
    return _from_source(
        "mnist", "cnn", network, folder, synthetic, optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.5)
    )


def cifar10_cnn(
    *,
    folder: Folder = None,
    synthetic: bool = False,
    augment: bool = False,
    channels: Sequence[int] = (32, 64, 64),
    hidden: int = 128,
) -> Problem:
    """3x3 convolutions and a hidden layer on CIFAR-10, 582,026 parameters by default.

    See `cifar10_resnet18` for the arguments.
    """
    source = SOURCES["cifar10"]
    network = partial(
        cnn, source.image, positive_ints("channels", channels), positive_ints("hidden", hidden)[0], source.num_classes
    )
    return _from_source(
        "cifar10", "cnn", network, folder, synthetic, augment, optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.5)
    )


def cifar10_resnet18(
    *, folder: Folder = None, synthetic: bool = False, augment: bool = True, small_stem: bool = True
) -> Problem:
    """ResNet-18 on CIFAR-10 (50,000 colour images of 32 x 32, ten classes).

    Args:
        folder: the folder with `cifar-10-batches-py/`, as unpacked from the published archive.
        synthetic: use random images of the same shape.
        augment: shift and mirror training images at random (`CropAndFlip`).
        small_stem: begin with a 3x3 convolution of stride 1 without pooling, as is usual for 32 x 32. False:
            torchvision's own 7x7 stem of stride 2 with pooling, made for 224 x 224. It reduces 32 x 32 to 1 x 1.

    Raises:
        DataMissing: the files are not in `folder`; the message says which are expected, and where to get them.
    """
    return _resnet18("cifar10", folder, synthetic, augment, small_stem)


def cifar100_resnet18(
    *, folder: Folder = None, synthetic: bool = False, augment: bool = True, small_stem: bool = True
) -> Problem:
    """ResNet-18 on CIFAR-100 (`cifar-100-python/` in the folder); arguments as for `cifar10_resnet18`."""
    return _resnet18("cifar100", folder, synthetic, augment, small_stem)


def cifar100_softmax(*, folder: Folder = None, synthetic: bool = False) -> Problem:
    """Softmax regression (one linear layer) on CIFAR-100: convex. 307,300 parameters.

    Arguments: `cifar10_resnet18`.
    """
    source = SOURCES["cifar100"]
    network = partial(mlp, math.prod(source.image), (), source.num_classes)
    return _from_source("cifar100", "softmax", network, folder, synthetic, optimizer=partial(torch.optim.SGD, lr=0.01))


def synthetic(
    *,
    model_name: str = "resnet18",
    image: Sequence[int] = (3, 32, 32),
    classes: int = 10,
    samples: int = SYNTHETIC_SAMPLES,
    small_stem: bool = False,
) -> Problem:
    """Any of torchvision's classification networks on synthetic images: for speed and traffic, not for accuracy.

    Args:
        model_name: as in `torchvision.models`: "resnet18", "alexnet", "vgg16", "vit_b_16", ...
        image: channels, height, width.
        classes, samples: number of classes and of training images.
        small_stem: see `cifar10_resnet18`; only for resnets.

    Raises:
        ConfigError: the network is unknown, or does not take images of this shape.
    """
    shape = positive_ints("image", image)
    if len(shape) != 3:
        raise ConfigError(f"image={tuple(image)}: give (channels, height, width), such as (3, 32, 32)")
    positive_ints("classes and samples", [classes, samples])
    _check_network(model_name, shape, classes, small_stem)
    train, test = random_images(shape, classes, samples)
    make = partial(network, model_name, classes, small_stem)
    return Problem(
        name=f"{model_name.replace('_', '-')}-synthetic",
        model=partial(with_input_layers, make, *random_image_moments(shape[0]), False),
        loss=cross_entropy,
        train=train,
        test=test,
        optimizer=partial(torch.optim.SGD, lr=0.02, momentum=0.9),
        note=SYNTHETIC_NOTE,
    )


def network(model_name: str, num_classes: int, small_stem: bool = False, *, auxiliary: bool = False) -> nn.Module:
    """Return a torchvision classification network with fresh weights; `small_stem` as in `cifar10_resnet18`.

    `auxiliary`: in training, GoogLeNet and Inception v3 also return auxiliary outputs.
    """
    extra = {"aux_logits": auxiliary, "init_weights": True} if model_name in ("googlenet", "inception_v3") else {}
    module = torchvision().models.get_model(model_name, weights=None, num_classes=num_classes, **extra)
    if small_stem:
        module.conv1 = nn.Conv2d(3, module.conv1.out_channels, kernel_size=3, padding=1, bias=False)
        # as in torchvision's ResNet
        nn.init.kaiming_normal_(module.conv1.weight, mode="fan_out", nonlinearity="relu")
        module.maxpool = nn.Identity()
    return cast(nn.Module, module)


def with_input_layers(make: ModelFactory, mean: Sequence[float], std: Sequence[float], augment: bool) -> nn.Module:
    """Return the network, preceded by layers that convert bytes to numbers with mean 0 and variance 1."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if augment:
        layers["augment"] = CropAndFlip()
    layers["standardise"] = Standardise(mean, std)
    layers["network"] = make()
    return nn.Sequential(layers)


def _resnet18(name: str, folder: Folder, synthetic: bool, augment: bool, small_stem: bool) -> Problem:
    make = partial(network, "resnet18", SOURCES[name].num_classes, small_stem)
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4)
    return _from_source(name, "resnet18", make, folder, synthetic, augment, optimizer=optimizer)


def _from_source(
    name: str,
    network_name: str,
    make: ModelFactory,
    folder: Folder,
    synthetic: bool,
    augment: bool = False,
    *,
    optimizer: Callable[..., torch.optim.Optimizer],
) -> Problem:
    """Return a network on a public data set, or on random images of its shape."""
    source = SOURCES[name]
    mean, std = random_image_moments(source.image[0]) if synthetic else (source.mean, source.std)
    if not synthetic:
        train, test = folder_images(name, find_folder(name, folder))
    elif folder is None:
        train, test = random_images(source.image, source.num_classes, SYNTHETIC_SAMPLES)
    else:
        raise ConfigError(
            f"folder={str(folder)!r} and synthetic=True: real images or synthetic ones: give one of the two"
        )
    return Problem(
        name=f"{name}-{network_name}" + ("-synthetic" if synthetic else ""),
        model=partial(with_input_layers, make, mean, std, augment),
        loss=cross_entropy,
        train=train,
        test=test,
        optimizer=optimizer,
        note=SYNTHETIC_NOTE if synthetic else "",
    )


def _check_network(model_name: str, image: tuple[int, ...], classes: int, small_stem: bool) -> None:
    """Raise `ConfigError` unless the network exists and takes such images. The meta device makes the check cheap."""
    known = torchvision().models.list_models(module=torchvision().models)
    if model_name not in known:
        raise unknown("classification network of torchvision", model_name, known)
    if small_stem and not model_name.startswith(("resnet", "resnext", "wide_resnet")):
        raise ConfigError(
            f"small_stem=True changes the first layers of a resnet; {model_name} has others: leave it out"
        )
    with torch.device("meta"):
        module = network(model_name, classes, small_stem)
        try:
            module.train()(torch.empty(2, *image))
        except (RuntimeError, ValueError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{model_name} does not take images of {image} ({reason}): try image=(3, 224, 224)"
            ) from error
