"""Words to a run under way: a file in its folder, one JSON line a word, that is only ever added to.

| word | what it asks |
|---|---|
| {"set": {name: value}} | go on with other settings |
| {"pause": true}, {"resume": true} | hold at a step's end; go on |
| {"stop": true} | end at a step's end, with a checkpoint |

A word's number is that of its line, from 1 on, so two writers cannot give one number twice.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, final

Word = dict[str, Any]
CONTROL_NAME = "control.jsonl"
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
        words: read so far. A line that is no word is kept as {}, so that every reader counts alike.
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
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return len(self.words)
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.words.extend(map(_word, whole.decode(errors="replace").split("\n")[:-1]))
        return len(self.words)


def _word(line: str) -> Word:
    try:
        word = json.loads(line)
    except ValueError:
        return {}
    return word if isinstance(word, dict) else {}
