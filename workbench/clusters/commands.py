"""Words to a run under way, from a notebook or a shell: looked at here, so that what cannot be is refused before it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench import algorithms
from workbench.errors import ConfigError
from workbench.naming import did_you_mean
from workbench.program import Algorithm
from workbench.runtimes.control.commands import Command, read_commands, write_command
from workbench.runtimes.control.reconfigure import changed, encoded
from workbench.trace.processes import OVER, with_true_status
from workbench.trace.store import read_info


def check_goes_on(folder: Path, what: str) -> dict[str, Any]:
    """The `run.json` of a run that can be told something.

    Raises:
        ConfigError: it is over, or simulated.
    """
    info = with_true_status(folder, read_info(folder))
    if info.get("status") in OVER:
        raise ConfigError(f"{what}: the run {folder.name} is over ({info['status']}), nothing hears it any more: start another one")
    if info.get("runtime") == "simulated":
        raise ConfigError(f"{what}: the run {folder.name} is simulated, and its settings are its inputs: simulate again with other ones")
    return info


def say(folder: Path, word: Command) -> None:
    """Pause, resume or stop a run.

    Raises:
        ConfigError: it is over, or simulated.
    """
    check_goes_on(folder, next(iter(word)))
    write_command(folder, word)


def say_set(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Ask a run to go on with other settings; returns them as they were written.

    Raises:
        ConfigError: nothing is written; says what cannot be, and what can.
    """
    info = check_goes_on(folder, "set")
    method, objects = info.get("method") or {}, algorithms.named(changes)
    algorithm = algorithms.recorded(method)
    if algorithm is None:
        _check_names(str(method.get("name")), ["lr", *(method.get("settings") or {})], objects)
        plain = encoded(None, objects)
    else:
        more = (int(info["num_workers"]), str(info.get("runtime", "mpi")), str((info.get("settings") or {}).get("progress", "auto")))
        algorithm = _as_it_is_now(algorithm, read_commands(folder), more)
        plain = encoded(algorithm, objects)
        changed(algorithm, plain, *more)
    write_command(folder, {"set": plain})
    return plain


def _as_it_is_now(algorithm: Algorithm, words: list[Command], more: tuple[int, str, str]) -> Algorithm:
    """The method with all that was set before, taken by the ranks or not yet."""
    for word in words:
        try:
            algorithm, _ = changed(algorithm, word.get("set") or {}, *more)
        except ConfigError:
            continue  # the ranks refuse it too
    return algorithm


def _check_names(method: str, names: list[str], changes: dict[str, Any]) -> None:
    """All that can be told of a method that is known to its ranks alone: they look at the values, and refuse what cannot be."""
    if not changes:
        raise ConfigError(f"nothing to set: give one of {', '.join(names)}")
    for name in changes:
        if name not in names:
            meant = did_you_mean(name, names, cutoff=0.6)
            raise ConfigError(f"{name} is no setting of {method}: {meant}There are {', '.join(names)}")
