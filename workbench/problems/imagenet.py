"""The large networks of the papers, on ImageNet (or photographs sorted by class) from a folder, or on synthetic images.

Photographs are read when a minibatch needs them. In training, a random part of each is cut out, and half of the parts
are mirrored. In tests, the middle part is used. The networks are torchvision's and differ from the papers' in some
details: its AlexNet is that of one GPU (61.1 million parameters), and its GoogLeNet has batch normalisation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from workbench.errors import ConfigError, DataMissing
from workbench.problems.base import Problem
from workbench.problems.image_data import random_image_moments, random_images
from workbench.problems.loading import Batch
from workbench.problems.models import positive_ints
from workbench.problems.torchvision_door import torchvision
from workbench.problems.vision import SYNTHETIC_NOTE, Folder, network, with_input_layers

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's training images, by channel, in [0, 1]
CLASSES, SAMPLES, SIDE = 1000, 128, 224
RESIZED = 256 / 224  # photographs are resized to this multiple of the side that is cut out
# weight of each auxiliary loss, as in torchvision
AUXILIARY_WEIGHT = MappingProxyType({"googlenet": 0.3, "inception_v3": 0.4})


def imagenet_alexnet(
    *, folder: Folder = None, synthetic: bool = False, classes: int = CLASSES, samples: int = SAMPLES
) -> Problem:
    """AlexNet: five convolutions and three fully connected layers, which hold 96 % of the 61.1 million parameters.

    Args:
        folder: holds `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`.
        synthetic: use random images of the network's shape, `samples` for training and a quarter as many for tests.
        classes: number of classes of synthetic images; in a folder, the number of folders in `train`.
        samples: number of synthetic training images.

    Raises:
        DataMissing: the folder does not exist, or has another layout; the message says what is expected.
    """
    optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=5e-4)
    return _imagenet("alexnet", folder, synthetic, classes, samples, optimizer)


def imagenet_googlenet(
    *,
    folder: Folder = None,
    synthetic: bool = False,
    classes: int = CLASSES,
    samples: int = SAMPLES,
    auxiliary: bool = True,
) -> Problem:
    """GoogLeNet: 13.0 million parameters, with its two auxiliary classifiers in training.

    Args:
        folder: holds `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`.
        synthetic: use random images of the network's shape, `samples` for training and a quarter as many for tests.
        classes: number of classes of synthetic images; in a folder, the number of folders in `train`.
        samples: number of synthetic training images.
        auxiliary: train with the auxiliary classifiers. Their losses have weight 0.3 each, in training only. Without
            them, the network has 6.6 million parameters.

    Raises:
        DataMissing: the folder does not exist, or has another layout; the message says what is expected.
    """
    optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=2e-4)
    return _imagenet("googlenet", folder, synthetic, classes, samples, optimizer, auxiliary=auxiliary)


def imagenet_resnet18(
    *, folder: Folder = None, synthetic: bool = False, classes: int = CLASSES, samples: int = SAMPLES
) -> Problem:
    """ResNet-18, 11.7 million parameters. Its ranks read photographs themselves, without loader processes.

    Args:
        folder: holds `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`.
        synthetic: use random images of the network's shape, `samples` for training and a quarter as many for tests.
        classes: number of classes of synthetic images; in a folder, the number of folders in `train`.
        samples: number of synthetic training images.

    Raises:
        DataMissing: the folder does not exist, or has another layout; the message says what is expected.
    """
    return _imagenet(
        "resnet18",
        folder,
        synthetic,
        classes,
        samples,
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4),
    )


def imagenet_resnet50(
    *, folder: Folder = None, synthetic: bool = False, classes: int = CLASSES, samples: int = SAMPLES
) -> Problem:
    """ResNet-50, 25.6 million parameters. Its ranks read photographs themselves, without loader processes.

    Args:
        folder: holds `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`.
        synthetic: use random images of the network's shape, `samples` for training and a quarter as many for tests.
        classes: number of classes of synthetic images; in a folder, the number of folders in `train`.
        samples: number of synthetic training images.

    Raises:
        DataMissing: the folder does not exist, or has another layout; the message says what is expected.
    """
    return _imagenet(
        "resnet50",
        folder,
        synthetic,
        classes,
        samples,
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4),
    )


def imagenet_inception_v3(
    *,
    folder: Folder = None,
    synthetic: bool = False,
    classes: int = CLASSES,
    samples: int = SAMPLES,
    auxiliary: bool = True,
) -> Problem:
    """Inception v3 on images of 299 x 299: 27.2 million parameters, with its auxiliary classifier in training.

    RMSProp with decay and momentum 0.9 and a rate of 0.045 is from chen2016revisiting. The epsilon of 1 is not given in
    the paper.

    Args:
        folder: holds `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`.
        synthetic: use random images of the network's shape, `samples` for training and a quarter as many for tests.
        classes: number of classes of synthetic images; in a folder, the number of folders in `train`.
        samples: number of synthetic training images.
        auxiliary: train with the auxiliary classifier. Its loss has weight 0.4, in training only. Without it, the
            network has 23.8 million parameters.

    Raises:
        DataMissing: the folder does not exist, or has another layout; the message says what is expected.
    """
    optimizer = partial(torch.optim.RMSprop, lr=0.045, alpha=0.9, momentum=0.9, eps=1.0)
    return _imagenet("inception_v3", folder, synthetic, classes, samples, optimizer, side=299, auxiliary=auxiliary)


def _imagenet(
    model_name: str,
    folder: Folder,
    synthetic: bool,
    classes: int,
    samples: int,
    optimizer: Callable[..., torch.optim.Optimizer],
    *,
    side: int = SIDE,
    auxiliary: bool = False,
) -> Problem:
    positive_ints("classes and samples", [classes, samples])
    if synthetic and folder is not None:
        raise ConfigError(
            f"folder={str(folder)!r} and synthetic=True: real images or synthetic ones: give one of the two"
        )
    train: Any
    test: Any
    if synthetic:  # not more pictures (one per class) than images: a thousand take 150 MB on every rank
        train, test = random_images((3, side, side), min(classes, samples), samples)
        mean, std = random_image_moments(3)
    else:
        root = find_images(folder)
        classes = len(class_names(Path(root) / "train"))
        train, test = partial(image_files, root, "train", side), partial(image_files, root, "val", side)
        mean, std = MEAN, STD
    plain_name = model_name.replace("_", "-")
    return Problem(
        name=f"imagenet-{plain_name}" + ("-synthetic" if synthetic else ""),
        model=partial(with_input_layers, partial(network, model_name, classes, auxiliary=auxiliary), mean, std, False),
        loss=partial(auxiliary_loss, AUXILIARY_WEIGHT[model_name]) if auxiliary else cross_entropy,
        whole_batch=auxiliary,
        train=train,
        test=test,
        optimizer=optimizer,
        note=SYNTHETIC_NOTE if synthetic else "",
    )


def auxiliary_loss(weight: float, model: nn.Module, batch: Batch) -> Tensor:
    """Return cross-entropy; in training, plus `weight` times that of each auxiliary output."""
    images, labels = batch
    output = model(images)
    if isinstance(output, Tensor):
        return cross_entropy(output, labels)
    scores, *auxiliary = output
    return (
        cross_entropy(scores, labels) + weight * torch.stack([cross_entropy(more, labels) for more in auxiliary]).sum()
    )


def find_images(folder: Folder) -> str:
    """Return the absolute folder with `train` and `val`.

    Raises:
        DataMissing: no folder was given, or it has another layout.
    """
    layout = "train/CLASS/*.JPEG and val/CLASS/*.JPEG, one folder for each class and the same ones in both"
    advice = (
        f"Expected are FOLDER/{layout}. To try the code without the data: synthetic=True, for random images of "
        "the same shapes"
    )
    if folder is None:
        raise DataMissing(f"imagenet: set folder= to the folder with the photographs. {advice}")
    root = Path(folder).expanduser().absolute()
    if not root.is_dir():
        raise DataMissing(f"imagenet: looked in {root}: the folder does not exist. {advice}")
    found = {part: class_names(root / part) for part in ("train", "val")}
    for part, names in found.items():
        if not names:
            flat = (root / part).is_dir() and any((root / part).iterdir())
            trouble = (
                f"the files in {part} are not sorted into folders by class"
                if flat
                else f"{part} is not in it, or empty"
            )
            raise DataMissing(f"imagenet: looked in {root}: {trouble}. {advice}")
    different = sorted({*found["train"]} ^ {*found["val"]})
    if different:
        raise DataMissing(
            f"imagenet: looked in {root}: {', '.join(different[:3])} is in only one of train and val. {advice}"
        )
    return str(root)


def class_names(folder: Path) -> list[str]:
    """Return the folders in a folder, in the order of class numbers; none if it does not exist."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


@lru_cache(maxsize=4)
def image_files(root: str, part: str, side: int) -> ImageFiles:
    """Return the photographs of `root/part`. Listing a million files takes time, so it is done once.

    Raises:
        DataMissing: a class has no photographs.
    """
    vision = torchvision()
    look = vision.transforms
    if part == "train":
        cut = [look.RandomResizedCrop(side), look.RandomHorizontalFlip()]
    else:
        cut = [look.Resize(round(side * RESIZED)), look.CenterCrop(side)]
    try:
        return ImageFiles(vision.datasets.ImageFolder(f"{root}/{part}", look.Compose([*cut, look.PILToTensor()])))
    except FileNotFoundError as error:
        raise DataMissing(f"imagenet: {error}") from error


@final
class ImageFiles(Dataset[Any]):
    """(image (3, side, side) uint8, class number) of each file, read on access.

    The random part of an image is drawn from PyTorch's default generator, which is seeded for each rank and step.
    """

    def __init__(self, files: Any) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            image, label = self._files[index]
        except OSError as error:  # also if it is not an image
            raise DataMissing(
                f"imagenet: {self._files.samples[index][0]} cannot be read ({error}): copy it again or remove it"
            ) from error
        return image, label
