"""A user's optimizer on servers: a copy of it, and the settings that each gradient brings for its update."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, final

import torch
from torch import Tensor

from workbench.errors import ConfigError
from workbench.replica.optimizer_step import SCHEDULED, added_to, carried, uncompiled

FIX = "give the Trainer an optimizer whose constructor takes (params, **defaults), as those of torch.optim do"


def copy_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], copies: Sequence[Tensor]
) -> torch.optim.Optimizer:
    """Make an optimizer of the same class, settings, groups and state for copies of the parameters.

    It is made as `type(optimizer)(groups, **optimizer.defaults)`. Parameters that are not in `parameters` are left out.

    Args:
        parameters, copies: each parameter, and the tensor that takes its place.

    Raises:
        ConfigError: it cannot be made so, or would differ; names the part that cannot be copied.
    """
    copy_of = {id(param): copy for param, copy in zip(parameters, copies, strict=True)}
    groups = [
        {
            **{name: deepcopy(value) for name, value in group.items() if name not in ("params", "param_names")},
            "params": [copy_of[id(param)] for param in group["params"] if id(param) in copy_of],
        }
        for group in optimizer.param_groups
    ]
    _check_plain(optimizer)
    try:
        taken = inspect.signature(type(optimizer)).parameters
        every = any(item.kind == inspect.Parameter.VAR_KEYWORD for item in taken.values())
        defaults = {name: value for name, value in optimizer.defaults.items() if every or name in taken}
        with uncompiled():
            copied = type(optimizer)(groups, **deepcopy(defaults))
    except Exception as error:  # a constructor of the user's may raise any error
        raise ConfigError(f"{_subject(optimizer)} ({type(error).__name__}: {error}): {FIX}") from error
    differing = _differences(optimizer, copied)
    if differing:
        raise ConfigError(f"{_subject(optimizer)}: {', '.join(differing)} would differ: {FIX}")
    for param, copy in zip(parameters, copies, strict=True):
        if param in optimizer.state:
            copied.state[copy] = deepcopy(optimizer.state[param])
    return copied


def _subject(optimizer: torch.optim.Optimizer) -> str:
    return f"servers update with a copy of the optimizer, and {type(optimizer).__name__} cannot be copied"


def _check_plain(optimizer: torch.optim.Optimizer) -> None:
    """Raise `ConfigError` for what was added to the object: the copy would lack it."""
    added = added_to(optimizer)
    if added:
        raise ConfigError(
            f"{_subject(optimizer)}: it has {', '.join(added)}, which servers would not call: remove it, or use an "
            "algorithm without servers"
        )


def _differences(optimizer: torch.optim.Optimizer, copied: torch.optim.Optimizer) -> list[str]:
    """Names of settings and of plain attributes that a copy does not have equally."""
    pairs = [(optimizer.defaults, copied.defaults), *zip(optimizer.param_groups, copied.param_groups, strict=True)]
    found = [
        name
        for mine, theirs in pairs
        for name, value in mine.items()
        if name not in ("params", "param_names") and str(theirs.get(name)) != str(value)
    ]
    theirs = vars(copied)
    found += [
        name
        for name, value in vars(optimizer).items()
        if not name.startswith("_") and isinstance(value, int | float | str) and theirs.get(name) != value
    ]
    return list(dict.fromkeys(found))


@final
class SentSettings:
    """The learning rate, momentum, betas and weight decay of a worker's step, as numbers in its gradient's tail.

    A number is sent as its difference from the value that the optimizer had at the start. So a setting that does not
    change is exact, in whatever precision gradients are sent. An update with several gradients uses the mean over
    their samples.

    Attributes:
        num: how many numbers a tail holds.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._at_start = _numbers(optimizer)
        self.num = len(self._at_start)

    def differences(self) -> list[float]:
        """The present settings, minus those at the start.

        Raises:
            ConfigError: a parameter group was added, or a hook of `step()`.
        """
        _check_plain(self._optimizer)
        present = _numbers(self._optimizer)
        if len(present) != self.num:
            raise ConfigError(
                "the optimizer got a parameter group after the Trainer was made, and servers made their optimizers "
                "then: add groups before"
            )
        return [now - before for now, before in zip(present, self._at_start, strict=True)]

    def set(
        self, optimizer: torch.optim.Optimizer, differences: Sequence[float], last: Sequence[float] | None = None
    ) -> list[float]:
        """Give a server's optimizer the settings of a gradient. What its own steps changed in them stays.

        Args:
            last: what this function returned for the last gradient; None for the first one.

        Returns:
            The settings in the gradient.
        """
        sent = [before + change for before, change in zip(self._at_start, differences, strict=True)]
        present = _numbers(optimizer)
        values = iter(map(carried, present, self._at_start if last is None else last, sent))
        for group in optimizer.param_groups:
            for name in SCHEDULED:
                if name not in group:
                    continue
                present = group[name]
                if isinstance(present, tuple | list):
                    group[name] = type(present)([next(values) for _ in present])
                elif isinstance(present, Tensor):
                    present.fill_(next(values))
                else:
                    group[name] = next(values)
        return sent


def _numbers(optimizer: torch.optim.Optimizer) -> list[float]:
    found: list[float] = []
    for group in optimizer.param_groups:
        for name in SCHEDULED:
            value: Any = group.get(name, ())
            found += map(float, value if isinstance(value, tuple | list) else (value,))
    return found
