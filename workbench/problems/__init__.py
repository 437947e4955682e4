"""Problems to train (model, loss and data): your own `Problem`, or one of this package, by function or by name.

Importing this package imports neither PyTorch nor any data; the first use of a problem does.

- `base`: `Problem`, and the sampler that gives each rank its samples. `loading`: how they are read. `metrics`: the
  user's own. `shards` skews the data.
- Data without a download: `digits`, `mnist1d`, `text`. Data from a folder, or random: `vision`, `imagenet`,
  `image_data`.
- Networks: `models` (small ones), `pixels` (PixelCNN), `torchvision_door` (torchvision's). For timing only:
  `gpt2`, `wide`.
- Tables: `tuned_rates`, `summaries`.

Imports `program`, `settings` and what lies below. Used by `replica`, `runtimes` and layers above. Begin with `base`,
then `digits`.
"""

from __future__ import annotations

import importlib
import inspect
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from workbench.errors import ConfigError
from workbench.naming import call_checked, unknown
from workbench.user_file import is_defined_in_user_file, is_in_user_file, load

if TYPE_CHECKING:
    from workbench.problems.base import Problem as Problem

# Name on the command line and in records -> (module of this package, function). In reading order.
REGISTRY = MappingProxyType(
    {
        "digits-softmax": ("digits", "digits_softmax"),
        "digits-mlp": ("digits", "digits_mlp"),
        "digits-cnn": ("digits", "digits_cnn"),
        "digits-pixelcnn": ("pixels", "digits_pixelcnn"),
        "mnist1d-softmax": ("mnist1d", "mnist1d_softmax"),
        "mnist1d-mlp": ("mnist1d", "mnist1d_mlp"),
        "mnist1d-cnn": ("mnist1d", "mnist1d_cnn"),
        "text-transformer": ("text", "text_transformer"),
        "library-transformer": ("text", "library_transformer"),
        "mnist5k-cnn": ("digits", "mnist5k_cnn"),
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

# Functions without a name: networks of the true shape, for timing. They are too large for training on most machines.
_BY_SHAPE = MappingProxyType({"gpt2_synthetic": ("gpt2", "gpt2_synthetic")})
_PUBLIC = MappingProxyType(
    {
        "Problem": ("base", "Problem"),
        "Metric": ("metrics", "Metric"),
        **{function: (module, function) for module, function in REGISTRY.values()},
        **_BY_SHAPE,
    }
)

__all__ = [*_PUBLIC, "describe", "get", "names"]  # noqa: PLE0604  (names are all strings)


def names() -> tuple[str, ...]:
    """Return the names that `get` accepts.

    >>> "digits-mlp" in names()
    True
    """
    return tuple(REGISTRY)


def get(name: str, **options: Any) -> Problem:
    """Return the problem with this name; `options` are its function's keyword arguments, `dtype` also as a string.

    `path/to/file.py:name` is a `Problem` in your own file, or a function there that returns one. The file is executed
    like a script.

    >>> get("digits-mlp", hidden=[32], dtype="float64").name
    'digits-mlp'

    Raises:
        ConfigError: unknown name or option; the message lists the known ones.
        DataMissing: the problem's data are missing.
    """
    if is_in_user_file(name):
        return _of_file(name, options)
    plain = name.lower().replace("_", "-")
    if plain not in REGISTRY:
        error = unknown("problem", name, REGISTRY)
        raise ConfigError(
            f"{error}; for your own problem, give file.py:name, where name is a Problem or a function that returns one"
        )
    if isinstance(options.get("dtype"), str):
        options["dtype"] = _dtype(options["dtype"])
    problem: Problem = call_checked(plain, _load(*REGISTRY[plain]), options)
    return problem


def describe(name: str) -> str:
    """Describe a problem: its function's docstring, options and tuned rates; for `file.py:name` the problem itself.

    Raises:
        ConfigError: unknown name.
    """
    plain = name.lower().replace("_", "-")
    if plain not in REGISTRY:
        return str(get(name))
    function = _load(*REGISTRY[plain])
    options = ", ".join(str(option) for option in inspect.signature(function).parameters.values())
    rates = "".join(f"\n  {rate.lr:<8g} {rate}" for rate in _load("tuned_rates", "rates_of")(plain))
    tuned = f"\n\nTuned learning rates (--lr tuned):{rates}" if rates else ""
    return f"{plain}\n\n{inspect.getdoc(function)}\n\nOptions (--option NAME=VALUE): {options or 'none'}{tuned}"


def _of_file(name: str, options: dict[str, Any]) -> Problem:
    """Return a problem from a user's file, or the result of a function in it."""
    from workbench.problems.base import Problem as Kind

    value = load(name, "problem", lambda value: isinstance(value, Kind) or is_defined_in_user_file(value))
    if isinstance(value, Kind):
        if options:
            raise ConfigError(
                f"{name} is a Problem and takes no options: leave --option out, or make it a function that takes them"
            )
        return value
    if not callable(value):
        raise ConfigError(
            f"{name} is a {type(value).__name__}: name a workbench.Problem, or a function that returns one"
        )
    made = call_checked(name, value, options)
    if not isinstance(made, Kind):
        raise ConfigError(f"{name}() returned a {type(made).__name__}: return a workbench.Problem")
    return made


def _dtype(name: str) -> Any:
    torch = importlib.import_module("torch")  # imported here: listing the names must stay cheap

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype={name!r}: PyTorch has no such type; use float32 or float64")
    return dtype


def _load(module: str, attribute: str) -> Any:
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _load(*_PUBLIC[name])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
