"""Check commands to a running training, from a notebook or a shell, and write them.

Pause, resume and stop need no algorithm. The Jupyter server gives them too, and must not load torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import ConfigError
from workbench.naming import did_you_mean
from workbench.runtimes.control.commands import Command, read_commands, write_command
from workbench.trace.processes import ENDED, with_true_status
from workbench.trace.store import read_info

if TYPE_CHECKING:
    from workbench.program import Algorithm

WITHOUT_SETTINGS = ("pause", "resume", "stop")  # the commands that `send_command` gives


def check_steerable(folder: Path, what: str) -> dict[str, Any]:
    """Return the `run.json` of a run that accepts commands.

    Args:
        folder: the run's folder.
        what: name of the command, for the message.

    Raises:
        ConfigError: the run has ended, it is simulated, or it is a loop that the user wrote.
    """
    info = with_true_status(folder, read_info(folder))
    if info.get("status") in ENDED:
        raise ConfigError(f"{what}: the run {folder.name} has ended ({info['status']}): start another one")
    if info.get("runtime") == "simulated":
        raise ConfigError(
            f"{what}: the run {folder.name} is simulated, so its settings are fixed: simulate again with other settings"
        )
    if info.get("runtime") not in (None, "mpi", "torch"):
        raise ConfigError(
            f"{what}: the run {folder.name} is the record of your own loop, which reads no commands: change or end the "
            "loop itself"
        )
    return info


def send_command(folder: Path, command: Command) -> None:
    """Pause, resume or stop a run.

    Raises:
        ConfigError: the run has ended, or it is simulated.
    """
    check_steerable(folder, next(iter(command)))
    write_command(folder, command)


def send_settings(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Ask a run to continue with other settings. Return them in the form in which they were written.

    Raises:
        ConfigError: a setting cannot be changed, and nothing is written; the message names the settings that can be.
    """
    from workbench import algorithms
    from workbench.runtimes.control.reconfigure import changed, encoded

    info = check_steerable(folder, "set")
    recorded, objects = info.get("algorithm") or {}, algorithms.named(changes)
    algorithm = algorithms.recorded(recorded)
    if algorithm is None:
        _check_names(str(recorded.get("name")), ["lr", *(recorded.get("settings") or {})], objects)
        plain = encoded(None, objects)
    else:
        progress = str((info.get("settings") or {}).get("progress", "auto"))
        context = (int(info["num_workers"]), progress)
        algorithm = _current_algorithm(algorithm, read_commands(folder), context)
        plain = encoded(algorithm, objects)
        changed(algorithm, plain, *context)
    write_command(folder, {"set": plain})
    return plain


def _current_algorithm(algorithm: Algorithm, commands: list[Command], context: tuple[int, str]) -> Algorithm:
    """Return the algorithm with all earlier changes, even if the ranks have not applied them yet."""
    from workbench.runtimes.control.reconfigure import changed

    for command in commands:
        try:
            algorithm, _ = changed(algorithm, command.get("set") or {}, *context)
        except ConfigError:
            continue  # the ranks also refuse this command
    return algorithm


def _check_names(algorithm: str, names: list[str], changes: dict[str, Any]) -> None:
    """Check the names of settings, for an algorithm that is not part of this package. The ranks check the values."""
    if not changes:
        raise ConfigError(f"nothing to set: give one of {', '.join(names)}")
    for name in changes:
        if name not in names:
            meant = did_you_mean(name, names, cutoff=0.6)
            raise ConfigError(f"{name} is no setting of {algorithm}. {meant}There are {', '.join(names)}")
