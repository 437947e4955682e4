"""The kernel's commands as IPython's magics, so that they are completed, listed by `%lsmagic` and explained by `?`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.kernel.cells import CELL_COMMANDS, COMMANDS


def register_commands(shell: Any, run: Callable[[str, str], None] | None = None) -> None:
    """Register the commands on a shell.

    Args:
        shell: an IPython shell: of a rank, or of the notebook.
        run: runs a command (name, argument); None on ranks, where a command below other code is an error.
    """
    for name, text in COMMANDS.items():
        shell.register_magic_function(_magic(name, text, run), "line", name)
    for name, text in CELL_COMMANDS.items():
        shell.register_magic_function(_magic(f"%{name}", text, None), "cell", name)


def unregister_commands(shell: Any) -> None:
    """Undo `register_commands`."""
    for kind, names in (("line", COMMANDS), ("cell", CELL_COMMANDS)):
        for name in names:
            shell.magics_manager.magics[kind].pop(name, None)


def _magic(name: str, text: str, run: Callable[[str, str], None] | None) -> Callable[..., None]:
    from IPython.core.error import UsageError

    def magic(line: str, _: str = "") -> None:  # a cell magic has the cell, too
        if run is None:
            raise UsageError(f"%{name} must stand above the code of a cell, or alone")
        run(name, line.strip())

    magic.__doc__ = text
    return magic
