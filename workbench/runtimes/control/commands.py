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


def write_word(folder: Path, word: Word) -> None:
    """Add a word, in one write: writers on several machines do not mix."""
    line = (json.dumps(word) + "\n").encode()
    file = os.open(Path(folder) / CONTROL_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def read_words(folder: Path) -> list[Word]:
    """All words said so far."""
    reader = WordReader(folder)
    reader.look()
    return reader.words


@final
class WordReader:
    """Reads the file as it grows: as long as nobody says anything, a look costs one question to the file system.

    Attributes:
        words: read so far. A line that is no word of the table above is kept as {}, so that every reader counts alike.
    """

    def __init__(self, folder: Path) -> None:
        self.words: list[Word] = []
        self._path = Path(folder) / CONTROL_NAME
        self._offset = 0

    def look(self) -> int:
        """Read what is new; how many words there are. A line that is still being written is left for the next look."""
        try:
            if os.stat(self._path).st_size <= self._offset:
                return len(self.words)
            with open_file(self._path) as file:
                file.seek(self._offset)
                new = file.read(LINE_BYTES)
        except OSError:  # not there yet
            return len(self.words)
        whole = new[: new.rfind(b"\n") + 1] or (new if len(new) == LINE_BYTES else b"")
        self._offset += len(whole)
        self.words.extend(map(_word, whole.decode(errors="replace").split("\n")[:-1]))
        return len(self.words)


def _word(line: str) -> Word:
    """Of a line, what is a word: it goes into the record beside entries of ours, and to the method as settings."""
    try:
        word = parse_value(line) if len(line) <= MOST_LINE else {}
    except ValueError:
        return {}
    if not isinstance(word, dict):
        return {}
    said: Word = {name: True for name in ("stop", "pause", "resume") if word.get(name) is True}
    if type(word.get("join")) is int:
        said["join"] = word["join"]
    return said | ({"set": word["set"]} if isinstance(word.get("set"), dict) else {})
