"""Images from a user's folder, and random images of the same shapes. Nothing is downloaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import final

import numpy as np
import torch
from torch import Tensor

from workbench.errors import DataMissing
from workbench.problems.torchvision_door import torchvision
from workbench.rng import generator


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A public data set as torchvision stores it: `<folder>/<place>/<file>`."""

    class_name: str  # in torchvision.datasets
    image: tuple[int, int, int]  # channels, height, width
    num_classes: int
    mean: tuple[float, ...]  # of the training images, by channel, in [0, 1]
    std: tuple[float, ...]
    place: str
    files: tuple[str, ...]
    origin: str  # where to get it


SOURCES = MappingProxyType(
    {
        "mnist": Source(
            class_name="MNIST",
            image=(1, 28, 28),
            num_classes=10,
            mean=(0.1307,),
            std=(0.3081,),
            place="MNIST/raw",
            files=(
                "train-images-idx3-ubyte",
                "train-labels-idx1-ubyte",
                "t10k-images-idx3-ubyte",
                "t10k-labels-idx1-ubyte",
            ),
            origin="the four .gz files of the MNIST page, unpacked with gunzip",
        ),
        "cifar10": Source(
            class_name="CIFAR10",
            image=(3, 32, 32),
            num_classes=10,
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
            place="cifar-10-batches-py",
            files=(*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"),
            origin="cifar-10-python.tar.gz of the CIFAR page, unpacked with tar xzf",
        ),
        "cifar100": Source(
            class_name="CIFAR100",
            image=(3, 32, 32),
            num_classes=100,
            mean=(0.5071, 0.4865, 0.4409),
            std=(0.2673, 0.2564, 0.2762),
            place="cifar-100-python",
            files=("train", "test", "meta"),
            origin="cifar-100-python.tar.gz of the CIFAR page, unpacked with tar xzf",
        ),
    }
)


def find_folder(name: str, folder: str | Path | None) -> str:
    """Return the absolute folder that holds the data set's `place`.

    `folder` may also be the `place` folder itself, or a folder between the two.

    Raises:
        DataMissing: no folder was given, or files are missing.
    """
    source = SOURCES[name]
    if folder is None:
        raise DataMissing(f"{name}: set folder= to the folder with the files. {_advice(name, 'FOLDER')}")
    given = Path(folder).expanduser().absolute()
    place = Path(source.place).parts
    inner = [depth for depth in range(1, len(place) + 1) if given.parts[-depth:] == place[:depth]]
    roots = [given, *(given.parents[depth - 1] for depth in inner)]
    missing = {root: [file for file in source.files if not (root / source.place / file).is_file()] for root in roots}
    root = min(roots, key=lambda root: len(missing[root]))
    if missing[root]:
        if not given.is_dir():
            found = "the folder does not exist"
        elif any((root / source.place / f"{file}.gz").is_file() for file in missing[root]):
            found = f"{source.place} holds packed .gz files: unpack them with gunzip"
        elif len(missing[root]) == len(source.files):
            found = f"{source.place} is not in it"
        else:
            found = f"{source.place} lacks {', '.join(missing[root])}"
        raise DataMissing(f"{name}: looked in {given}: {found}. {_advice(name, str(given))}")
    return str(root)


def _advice(name: str, folder: str) -> str:
    source = SOURCES[name]
    download = f"torchvision().datasets.{source.class_name}({folder!r}, download=True)"
    command = f"from workbench.problems.torchvision_door import torchvision; {download}"
    return (
        f"Expected are {folder}/{source.place}/ with {', '.join(source.files)}: {source.origin}; "
        f'where the network allows: python -c "{command}". '
        f"To try the code without the data: synthetic=True, for random images of the same shapes"
    )


Part = Callable[[], tuple[Tensor, Tensor]]


def folder_images(name: str, folder: str) -> tuple[Part, Part]:
    """Return functions that load the training and the test part from a folder that `find_folder` found."""
    return partial(load_images, name, folder, True), partial(load_images, name, folder, False)


def random_images(image: tuple[int, ...], num_classes: int, samples: int) -> tuple[Part, Part]:
    """Return functions that make `samples` training images and a quarter as many test images."""
    make = partial(synthetic_images, image, num_classes)
    return partial(make, samples, "train"), partial(make, -(-samples // 4), "test")


def random_image_moments(num_channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of synthetic images by channel: sums of two uniform numbers in [0, 127]."""
    return (127 / 255,) * num_channels, (math.sqrt((128**2 - 1) / 6) / 255,) * num_channels


@lru_cache(maxsize=2)
def load_images(name: str, folder: str, train: bool) -> tuple[Tensor, Tensor]:
    """Return images (N, C, H, W) uint8 and labels (N,) int64 of the training or the test part.

    Raises:
        DataMissing: files are missing or damaged (torchvision compares CIFAR's with their published checksums).
    """
    source = SOURCES[name]
    root = find_folder(name, folder)
    try:
        data = getattr(torchvision().datasets, source.class_name)(root, train=train, download=False)
    except (RuntimeError, ValueError, AssertionError, EOFError) as error:
        damage = f"files in {root}/{source.place} are damaged or incomplete ({error})"
        raise DataMissing(f"{name}: {damage}: unpack or download them again") from error
    images = torch.as_tensor(data.data)
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
    return images, torch.as_tensor(data.targets, dtype=torch.int64)


@lru_cache(maxsize=2)
def synthetic_images(image: tuple[int, ...], num_classes: int, samples: int, part: str) -> tuple[Tensor, Tensor]:
    """Return images (samples, *image) uint8 and labels (samples,) int64: a random picture per class, plus noise."""
    pictures = generator(0, "synthetic-pictures").integers(0, 128, (num_classes, *image), dtype=np.uint8)
    random = generator(0, f"synthetic-{part}")
    labels = random.integers(0, num_classes, samples)
    images = pictures[labels]
    images += random.integers(0, 128, images.shape, dtype=np.uint8)
    return torch.from_numpy(images), torch.from_numpy(labels)
