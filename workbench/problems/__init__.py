"""What is minimised: a model, a loss and data. Yours (`Problem`), or one of these, by function or by name.

Importing this package imports neither PyTorch nor any data; the first use of a problem does.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from workbench.errors import ConfigError
from workbench.naming import call_checked, unknown

if TYPE_CHECKING:
    from workbench.problems.base import Problem as Problem

# Name on the command line and in records -> (module of this package, function). In reading order.
REGISTRY = MappingProxyType(
    {
        "digits-softmax": ("digits", "digits_softmax"),
        "digits-mlp": ("digits", "digits_mlp"),
        "digits-cnn": ("digits", "digits_cnn"),
        "digits-pixelcnn": ("pixels", "digits_pixelcnn"),
        "text-transformer": ("text", "text_transformer"),
        "mnist-mlp": ("vision", "mnist_mlp"),
        "mnist-cnn": ("vision", "mnist_cnn"),
        "cifar10-cnn": ("vision", "cifar10_cnn"),
        "cifar10-resnet18": ("vision", "cifar10_resnet18"),
        "cifar10-pixelcnn": ("pixels", "cifar10_pixelcnn"),
        "cifar100-softmax": ("vision", "cifar100_softmax"),
        "cifar100-resnet18": ("vision", "cifar100_resnet18"),
        "imagenet-alexnet": ("imagenet", "imagenet_alexnet"),
        "imagenet-googlenet": ("imagenet", "imagenet_googlenet"),
        "imagenet-resnet18": ("imagenet", "imagenet_resnet18"),
        "imagenet-resnet50": ("imagenet", "imagenet_resnet50"),
        "imagenet-inception-v3": ("imagenet", "imagenet_inception_v3"),
        "resnet18-synthetic": ("vision", "synthetic"),
        "wide-mlp": ("wide", "wide_mlp"),
    }
)

# Without a name: networks of true shape that are too large to be trained everywhere, for timing.
_BY_SHAPE = MappingProxyType({"gpt2_synthetic": ("gpt2", "gpt2_synthetic")})
_PUBLIC = MappingProxyType(
    {"Problem": ("base", "Problem"), **{function: (module, function) for module, function in REGISTRY.values()}, **_BY_SHAPE}
)

__all__ = [*_PUBLIC, "get", "names"]  # noqa: PLE0604  (names are all strings)


def names() -> tuple[str, ...]:
    """The names that `get` knows.

    >>> "digits-mlp" in names()
    True
    """
    return tuple(REGISTRY)


def get(name: str, **options: Any) -> Problem:
    """The problem of that name; `options` are its function's keyword arguments, `dtype` also as a string.

    >>> get("digits-mlp", hidden=[32], dtype="float64").name
    'digits-mlp'

    Raises:
        ConfigError: no such name, or no such option; says what there is.
        DataMissing: its data are not where they were looked for.
    """
    plain = name.lower().replace("_", "-")
    if plain not in REGISTRY:
        raise unknown("problem", name, REGISTRY)
    if isinstance(options.get("dtype"), str):
        options["dtype"] = _dtype(options["dtype"])
    problem: Problem = call_checked(plain, _load(*REGISTRY[plain]), options)
    return problem


def _dtype(name: str) -> Any:
    torch = importlib.import_module("torch")  # not at the top: listing the names must stay cheap

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype={name!r}: PyTorch has no such type; float32 and float64 are usual")
    return dtype


def _load(module: str, attribute: str) -> Any:
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _load(*_PUBLIC[name])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
