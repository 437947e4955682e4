"""Settings of a running algorithm: which may change, and the algorithm with the change.

No algorithm has code for this. Its program is closed at a step's end. A program with the new settings begins from the
state in the `EndStep`, as in a resumed run: gradients in flight are completed and kept. A change of the learning rate
alone does not close the program.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from sys import float_info
from typing import Any

from workbench import codecs, collectives
from workbench.collectives import Collective, Native, with_codec
from workbench.errors import ConfigError, WorkbenchError
from workbench.naming import build, check_kinds, did_you_mean
from workbench.program import Algorithm, Restart
from workbench.runtimes.execution.progress import check_lanes

LAID_OUT = ("bucket_bytes", "shards", "dedicated", "fragments")  # layout of gradients, and serving ranks: fixed


def changeable(algorithm: Algorithm) -> list[str]:
    """Return the names of the settings that can change while the algorithm runs.

    >>> from workbench.algorithms import PipeSGD
    >>> changeable(PipeSGD(width=2))
    ['lr', 'width', 'warmup_steps', 'first', 'collective', 'lanes', 'codec', 'delay']
    """
    if algorithm.restart != Restart.ANYWHERE:
        return ["lr"]
    own = [item.name for item in fields(algorithm) if item.name not in LAID_OUT]
    more = ["codec"] if isinstance(getattr(algorithm, "collective", None), Collective) and "codec" not in own else []
    delayed = "delay" not in own and any(name in own for name in ("width", "staleness", "max_delay"))
    return ["lr", *own, *more, *(["delay"] if delayed else [])]


def changed(
    algorithm: Algorithm, changes: dict[str, Any], num_ranks: int, progress: str = "auto"
) -> tuple[Algorithm, float | None]:
    """Return the algorithm with other settings, and the new learning rate if there is one.

    Args:
        changes: names of `changeable`, and their values. An object may be a text, as from `encoded`. `codec` replaces
            the codec of the collective. `delay` is d = K - 1 of Pipe-SGD, the constant staleness of `StaleSGD`, or the
            bound of `AdaptiveDelaySGD`.

    Raises:
        ConfigError: the name or the value cannot be set. The message says what can be set.
    """
    if not changes:
        raise ConfigError(f"nothing to set: give one of {', '.join(changeable(algorithm))}")
    values = {name: _read(algorithm, name, value) for name, value in changes.items()}
    _check_names(algorithm, values)
    lr = values.pop("lr", None)
    if "lr" in changes and (isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 < lr <= float_info.max):
        raise ConfigError(f"lr={lr!r}: give a finite number above 0")
    if not values:
        return algorithm, float(lr)
    new = _replaced(algorithm, values)
    new.check(num_ranks)
    check_lanes(new, progress)
    collective = getattr(new, "collective", None)
    if progress == "library" and collective is not None and not isinstance(collective, Native):
        raise ConfigError(
            f"{collective}: with progress={progress!r} only Native() is possible; train again with progress='thread'"
        )
    if _laid_out(new, num_ranks) != _laid_out(algorithm, num_ranks):
        raise ConfigError(
            f"{_format_changes(changes)} would change the layout of gradients, or how they are applied. This is not "
            "possible during a run: start another run"
        )
    return new, None if lr is None else float(lr)


def _laid_out(algorithm: Algorithm, num_ranks: int) -> tuple[Any, ...]:
    """Return what is fixed when ranks begin: the layout of gradients, what is applied, how, and by which ranks."""
    requires = algorithm.requires
    return requires.buckets, requires.servers, algorithm.update, algorithm.asynchronous, algorithm.roles(num_ranks)


def encoded(algorithm: Algorithm | None, changes: dict[str, Any]) -> dict[str, Any]:
    """Return changes as plain values for a line of JSON. An object becomes a text, such as "Ring(codec=TopK(k=5))".

    Args:
        algorithm: None if only the run's ranks know it.

    Raises:
        ConfigError: an object that the ranks could not read back.
    """
    plain: dict[str, Any] = {}
    for name, value in changes.items():
        if value is None or isinstance(value, bool | int | float | str):
            plain[name] = value if value is None or isinstance(value, bool | int | float) else str(value)
            continue
        try:
            json.dumps(value)
            same = isinstance(value, list)
            plain[name] = value
        except TypeError:
            plain[name] = repr(value)
            same = _read(algorithm, name, repr(value)) == value
        if not same:
            raise ConfigError(f"{name}={value!r}: only workbench's own objects can be set during a run")
    return plain


def _read(algorithm: Algorithm | None, name: str, value: Any) -> Any:
    """Return a value. A text such as "Ring()" becomes the object."""
    if not (isinstance(value, str) and value.endswith(")")):
        return value
    known: dict[str, Callable[..., Any]] = {}
    # The module of the present value is last, so that its classes replace others of the same name.
    for module in (collectives, codecs, sys.modules[type(getattr(algorithm, name, None)).__module__]):
        classes = {
            key: item
            for key, item in vars(module).items()
            if isinstance(item, type) and hasattr(item, "__dataclass_fields__")
        }
        known |= {
            key: item
            for key, item in classes.items()
            if key in getattr(module, "__all__", ()) or item.__module__ == module.__name__
        }
    return build(value, known)


def _check_names(algorithm: Algorithm, values: dict[str, Any]) -> None:
    can, class_name = changeable(algorithm), type(algorithm).__name__
    for name in values:
        if name in can:
            continue
        meant = did_you_mean(name, can, cutoff=0.6)
        if algorithm.restart != Restart.ANYWHERE:
            raise ConfigError(
                f"{name} of {class_name}: only lr can change while it runs. To change other settings, stop() the "
                "run, and train with resume="
            )
        why = (
            "cannot change while it runs: ranks began with it"
            if name in LAID_OUT
            else "is not a setting that can change while it runs"
        )
        raise ConfigError(f"{name} of {class_name} {why}: {meant}There are {', '.join(can)}")


def _replaced(algorithm: Algorithm, values: dict[str, Any]) -> Algorithm:
    own = {item.name for item in fields(algorithm)}
    values = dict(values)
    if "delay" in values and "delay" not in own:
        ((name, value),) = _delayed(algorithm, values.pop("delay")).items()
        if name in values:
            raise ConfigError(f"delay and {name} are the same setting of {type(algorithm).__name__}: give one of them")
        values[name] = value
    if "codec" in values and "codec" not in own:
        values["collective"] = _coded(
            values.get("collective", getattr(algorithm, "collective", None)), values.pop("codec")
        )
    check_kinds(type(algorithm).__name__, type(algorithm), values)
    try:
        return replace(algorithm, **values)
    except WorkbenchError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{_format_changes(values)}: {error}") from error


def _delayed(algorithm: Algorithm, delay: Any) -> dict[str, Any]:
    if isinstance(delay, bool) or not isinstance(delay, int) or delay < 0:
        raise ConfigError(f"delay={delay!r}: give a number of steps, 0 (synchronous) or more")
    settings: Any = algorithm
    if hasattr(settings, "width"):
        return {"width": delay + 1}
    if hasattr(settings, "staleness"):
        return {"staleness": _read(algorithm, "staleness", f"Constant({delay})")}
    return {"max_delay": delay}


def _coded(collective: Any, codec: Any) -> Collective:
    """Return the collective with another codec; None removes it from the messages."""
    if codec is not None and not isinstance(codec, codecs.Codec | codecs.ErrorFeedback):
        raise ConfigError(
            f"codec={codec!r}: give one of {', '.join(codecs.names())}, such as Truncate16(), or None for none"
        )
    try:
        return with_codec(collective, codec)  # type: ignore[arg-type]  # None takes a codec out, and one with feedback is for Once
    except ConfigError as error:
        raise ConfigError(f"codec={codec!r}: {error}; set the collective too, such as collective=Ring()") from None


def _format_changes(changes: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in changes.items())
