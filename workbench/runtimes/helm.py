"""One rank's side of being steered: it hears what was said, agrees with the others on it, and does it.

Words take effect where all ranks are at one place, and so all take the same ones: at the end of one step where ranks go in
step, else where all their programs have ended early and begin again.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, final

from workbench.errors import ConfigError
from workbench.program import Algorithm
from workbench.replica import Replica
from workbench.runtimes.interpreter import Interpreter
from workbench.runtimes.steering import changed
from workbench.runtimes.words import Word, WordReader
from workbench.settings import Settings
from workbench.trace.recorder import Recorder
from workbench.trace.store import update_run

BEAT_S = 0.5  # how often held ranks hear of each other
LOOK_S = 0.02


@final
class Helm:
    """Kept by a session.

    Attributes:
        algorithm: the method as it is now.
        num_taken: words that all ranks have taken.
    """

    def __init__(
        self, algorithm: Algorithm, settings: Settings, interpreter: Interpreter, recorder: Recorder, folder: Path, runtime: str
    ) -> None:
        self.algorithm = algorithm
        self.num_taken = 0
        self._settings, self._interpreter, self._recorder, self._folder = settings, interpreter, recorder, folder
        self._runtime = runtime
        self._transport = interpreter.transport
        self._replica: Replica = interpreter.replica
        self._reader = WordReader(folder)
        self._taken: list[dict[str, Any]] = []  # for `run.json`
        self._num_meetings = 0

    def heard(self) -> int:
        """How many words this rank has heard of."""
        return max(self._reader.look(), self.num_taken)

    def take(self, step: int, *, left: bool = True) -> tuple[bool, bool]:
        """Agree on what was said, and do it; while the run is paused, hold. All ranks call it at one place.

        Args:
            step: the next one of this rank.
            left: whether this rank has steps left.

        Returns:
            Whether something was said after which any rank goes on with steps; whether the run is to stop.
        """
        stop = paused = False
        before, self._num_meetings = self.num_taken, self._num_meetings + 1
        try:
            while True:
                new, where = self._agree(step, left)
                for word in new:
                    stop = stop or bool(word.get("stop"))
                    paused = (paused or bool(word.get("pause"))) and not word.get("resume")
                    self._do(word, step, where)
                if new:
                    self._show("paused" if paused and not stop else "running")
                if stop or not paused:
                    break
                self._hold_a_beat()
        finally:
            self._interpreter.ledger.hold(False)
        more = any(rank["left"] for rank in where)
        return self.num_taken > before and more and not stop, stop and more

    def _agree(self, step: int, left: bool) -> tuple[list[Word], list[dict[str, Any]]]:
        """The words that no rank has taken yet, by who has read furthest (a shared file may lag); and where each rank is."""
        self._reader.look()
        versions = self._replica.master.updates if self._replica.has_master else None
        mine = {"words": self._reader.words[self.num_taken :], "step": step, "left": left, "versions": versions}
        patience = self._interpreter.ledger.patience("all ranks to agree on what was asked of the run")
        where = [json.loads(text) for text in self._transport.gather_texts(json.dumps(mine), patience)]
        words: list[Word] = max((rank.pop("words") for rank in where), key=len)
        return words, where

    def _do(self, word: Word, step: int, where: list[dict[str, Any]]) -> None:
        """Book one word; change what it changes."""
        self.num_taken += 1
        row: dict[str, Any] = {"number": self.num_taken, **word}
        if isinstance(word.get("set"), dict):
            try:
                self._set(word["set"])
            except ConfigError as error:  # on all ranks alike: whoever wrote it did not ask whether it can be
                row["refused"] = str(error)
        self._recorder.event({"strand": 0, "steer": self.num_taken, "step": step, **word})
        if self.algorithm.asynchronous:
            row |= {"meeting": self._num_meetings, "steps": [rank["step"] for rank in where]}
            row |= {"versions": {number: rank["versions"] for number, rank in enumerate(where) if rank["versions"]}}
        else:
            row["step"] = step
        self._taken.append(row)

    def _set(self, changes: dict[str, Any]) -> None:
        num_ranks, progress = self._transport.num_workers, self._settings.progress
        self.algorithm, lr = changed(self.algorithm, changes, num_ranks, self._runtime, progress)
        if lr is not None:
            self._replica.set_lr(lr)

    def _hold_a_beat(self) -> None:
        """Until somebody says something, or a short while: then ranks hear of each other again."""
        self._interpreter.ledger.hold(True)
        deadline = time.monotonic() + BEAT_S
        while self._reader.look() <= self.num_taken and time.monotonic() < deadline:
            time.sleep(LOOK_S)

    def _show(self, status: str) -> None:
        if self._transport.rank == 0:
            update_run(self._folder, status=status, steering=self._taken)
        self._recorder.end_step()
