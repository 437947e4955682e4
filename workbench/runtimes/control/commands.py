"""Words to a run under way: a file in its folder, one JSON line a word, that is only ever added to.

| word | what it asks |
|---|---|
| {"set": {name: value}} | go on with other settings |
| {"pause": true}, {"resume": true} | hold at a step's end; go on |
| {"stop": true} | end at a step's end, with a checkpoint |
| {"join": rank} | take a process in that has come in the place of a rank that left (`runtimes.elastic.admission`) |

A word's number is that of its line, from 1 on, so two writers cannot give one number twice.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, final

from workbench.trace.text import LINE_BYTES, open_file, parse_value

Word = dict[str, Any]
CONTROL_NAME = "control.jsonl"
MOST_LINE = 64 * 1024  # characters of a word
STOP: Word = {"stop": True}
PAUSE: Word = {"pause": True}
RESUME: Word = {"resume": True}


def write_command(folder: Path, command: Word) -> None:
    """Add a word, in one write: writers on several machines do not mix."""
    line = (json.dumps(command) + "\n").encode()
    file = os.open(Path(folder) / CONTROL_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def read_commands(folder: Path) -> list[Word]:
    """All words said so far."""
    reader = CommandReader(folder)
    reader.look()
    return reader.commands


@final
class CommandReader:
    """Reads the file as it grows: as long as nobody says anything, a look costs one question to the file system.

    Attributes:
        words: read so far. A line that is no word of the table above is kept as {}, so that every reader counts alike.
    """

    def __init__(self, folder: Path) -> None:
        self.commands: list[Word] = []
        self._path = Path(folder) / CONTROL_NAME
        self._offset = 0

    def look(self) -> int:
        """Read what is new; how many words there are. A line that is still being written is left for the next look."""
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
        self.commands.extend(map(_word, whole.decode(errors="replace").split("\n")[:-1]))
        return len(self.commands)


def _word(line: str) -> Word:
    """Of a line, what is a word: it goes into the record beside entries of ours, and to the method as settings."""
    try:
        command = parse_value(line) if len(line) <= MOST_LINE else {}
    except ValueError:
        return {}
    if not isinstance(command, dict):
        return {}
    said: Word = {name: True for name in ("stop", "pause", "resume") if command.get(name) is True}
    if type(command.get("join")) is int:
        said["join"] = command["join"]
    return said | ({"set": command["set"]} if isinstance(command.get("set"), dict) else {})
