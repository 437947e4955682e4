"""Commands to a running training: an append-only file in its folder, one JSON line a command.

| command | what it asks for |
|---|---|
| {"set": {name: value}} | continue with other settings |
| {"pause": true}, {"resume": true} | wait at a step's end; continue |
| {"stop": true} | stop at a step's end, with a checkpoint |
| {"join": rank} | admit a process in the place of a rank that left (`runtimes.elastic.admission`) |

The number of a command is its line number, from 1. So two writers cannot use the same number.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, final

from workbench.trace.files.text import LINE_BYTES, open_file, parse_value

Command = dict[str, Any]
CONTROL_NAME = "control.jsonl"
MAX_LINE = 64 * 1024  # characters of a command
STOP: Command = {"stop": True}
PAUSE: Command = {"pause": True}
RESUME: Command = {"resume": True}


def write_command(folder: Path, command: Command) -> None:
    """Append a command in one write, so that the commands of several writers do not mix."""
    line = (json.dumps(command) + "\n").encode()
    file = os.open(Path(folder) / CONTROL_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def read_commands(folder: Path) -> list[Command]:
    """Return all commands so far."""
    reader = CommandReader(folder)
    reader.poll()
    return reader.commands


@final
class CommandReader:
    """Reads the file as it grows. A poll without a new command costs one call to the file system.

    Attributes:
        commands: read so far. A line that is no command of the table above counts as {}, so that all readers give each
            command the same number.
    """

    def __init__(self, folder: Path) -> None:
        self.commands: list[Command] = []
        self._path = Path(folder) / CONTROL_NAME
        self._offset = 0

    def poll(self) -> int:
        """Read new lines, and return how many commands there are.

        An incomplete line is left for the next poll.
        """
        try:
            if os.stat(self._path).st_size <= self._offset:
                return len(self.commands)
            with open_file(self._path) as file:
                file.seek(self._offset)
                new = file.read(LINE_BYTES)
        except OSError:  # not there yet
            return len(self.commands)
        whole = new[: new.rfind(b"\n") + 1] or (new if len(new) == LINE_BYTES else b"")
        self._offset += len(whole)
        self.commands.extend(map(_command, whole.decode(errors="replace").split("\n")[:-1]))
        return len(self.commands)


def _command(line: str) -> Command:
    """Return the parts of a line that are a command. They go into the record, and to the algorithm as settings."""
    try:
        command = parse_value(line) if len(line) <= MAX_LINE else {}
    except ValueError:
        return {}
    if not isinstance(command, dict):
        return {}
    found: Command = {name: True for name in ("stop", "pause", "resume") if command.get(name) is True}
    if type(command.get("join")) is int:
        found["join"] = command["join"]
    return found | ({"set": command["set"]} if isinstance(command.get("set"), dict) else {})
