"""On each rank: reads the commands to a run, agrees on them with the other ranks, and changes settings.

Commands take effect where all ranks meet, so all ranks carry out the same commands. Synchronous ranks meet at the end
of a step. Asynchronous ranks meet when all their programs have ended. `generations` decides what follows there.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from workbench.errors import ConfigError
from workbench.ops import EndStep
from workbench.program import Algorithm, record_of
from workbench.replica.replica import Replica
from workbench.runtimes.control.commands import Command, CommandReader
from workbench.runtimes.control.generations import Agreed
from workbench.runtimes.control.reconfigure import changed
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.liveness.membership import LEFT_TEXT
from workbench.settings import Settings
from workbench.trace.recorder import Recorder
from workbench.trace.store import read_info, update_run

PAUSED_POLL_S = 0.5  # between two meetings of paused ranks
COMMAND_POLL_S = 0.02
RETRY_JOIN = "another process asked for the same rank: ask again"
# (rank, number of earlier requests for its place) -> why the process was not admitted, or None
Admit = Callable[[int, int], str | None]
DEPARTED_REPORT: dict[str, Any] = {"commands": [], "step": None, "left": False, "versions": None}


@final
class RunController:
    """One rank's view of the commands.

    Attributes:
        algorithm: with its present settings.
        num_taken: commands that all ranks have carried out.
    """

    def __init__(
        self, algorithm: Algorithm, settings: Settings, interpreter: Interpreter, recorder: Recorder, folder: Path
    ) -> None:
        self.algorithm = algorithm
        self.num_taken = 0
        self._settings, self._interpreter, self._recorder, self._folder = settings, interpreter, recorder, folder
        self._transport = interpreter.transport
        self._replica: Replica = interpreter.replica
        self._reader = CommandReader(folder)
        self._taken: list[dict[str, Any]] = []  # for `run.json`
        self._first_row = 0  # index in `_taken` of the first command since the ranks last met
        self._num_meetings = 0

    def num_commands_read(self) -> int:
        """Return how many commands this rank has read."""
        return max(self._reader.poll(), self.num_taken)

    def agree(self, end: EndStep, *, left: bool) -> Agreed:
        """Agree on the commands that no rank has carried out, and adopt changed settings.

        All ranks call it at the same point.

        Args:
            end: the last step of this rank.
            left: whether this rank has steps left.
        """
        self._num_meetings += 1
        self._first_row = len(self._taken)
        return self._exchange_commands(Agreed(end=end, algorithm=self.algorithm), left=left)

    def pause(self, agreed: Agreed, *, left: bool) -> Agreed:
        """Wait for more commands, at most `PAUSED_POLL_S`, and agree again. Time-outs do not count the wait."""
        self._interpreter.clock.set_paused(True)
        try:
            self._wait_for_command()
            return self._exchange_commands(agreed, left=left)
        finally:
            self._interpreter.clock.set_paused(False)

    def answer_requests(self, admit: Admit) -> None:
        """Answer each process that has asked to join since the ranks last met.

        One may join (`Agreed.joining`); the others are to ask again, because two new processes would not know of each
        other.

        Args:
            admit: admits a process as a rank, or makes it wait.
        """
        joining = self._joining()
        for row, request in self._requests():
            refused = admit(*request) if request == joining else RETRY_JOIN
            if refused is not None:
                row["refused"] = refused
            self._show("running")

    def _requests(self) -> list[tuple[dict[str, Any], tuple[int, int]]]:
        """Return the requests to join since the ranks last met: row, and (rank, number of earlier requests for it)."""
        found: list[tuple[dict[str, Any], tuple[int, int]]] = []
        asked = Counter[int]()
        for index, row in enumerate(self._taken):
            if "join" in row:
                if index >= self._first_row:
                    found.append((row, (row["join"], asked[row["join"]])))
                asked[row["join"]] += 1
        return found

    def _joining(self) -> tuple[int, int] | None:
        """Return the first of these requests that is the newest for its rank: processes of earlier ones have ended."""
        requests = [request for _, request in self._requests()]
        newest = dict(requests)  # rank -> number
        return next(((rank, number) for rank, number in requests if newest[rank] == number), None)

    def refuse(self, rank: int, why: str) -> None:
        """Refuse a process that was to join as that rank, and record why."""
        next(row for row in reversed(self._taken) if row.get("join") == rank)["refused"] = why
        self._show("running")

    def catch_up(self, num_taken: int, num_meetings: int, *, trained: bool) -> None:
        """On a rank that joins: take over the commands that the other ranks have carried out.

        Whether they refused a command is in the record: it may depend on the number of ranks at that time.

        Args:
            trained: this rank has copied the optimizer of another rank, and so its learning rate.
        """
        self._read(num_taken)
        self._taken = read_info(self._folder).get("steering", [])
        refused = {row.get("number") for row in self._taken if "refused" in row}
        for number, command in enumerate(self._reader.commands[:num_taken], 1):
            if isinstance(command.get("set"), dict) and number not in refused:
                self._set(command["set"], keeps_lr=trained)
        self.num_taken, self._num_meetings = num_taken, num_meetings

    def follow(self, num_taken: int, step: int) -> None:
        """Carry out commands that the other ranks agreed on in a meeting that failed on this rank only."""
        self._read(num_taken)
        for command in self._reader.commands[self.num_taken : num_taken]:
            self._do(command, step, [])

    def _read(self, number: int) -> None:
        """Read until this rank knows `number` commands. Other ranks have read them; a shared file may lag."""
        deadline = self._interpreter.clock.deadline("the run's commands to be readable here")
        while self._reader.poll() < number:
            deadline.pause()

    @property
    def place(self) -> tuple[int, int]:
        """Return what `catch_up` takes."""
        return self.num_taken, self._num_meetings

    def _exchange_commands(self, agreed: Agreed, *, left: bool) -> Agreed:
        """Carry out the commands that are new to all ranks; return what is agreed after them."""
        step = agreed.end.step + 1
        new, where = self._gather(step, left)
        for command in new:
            self._do(command, step, where)
        agreed = agreed.after(
            new,
            self.algorithm,
            any_left=any(rank["left"] for rank in where),
            joining=self._joining(),
            steps=tuple(rank["step"] for rank in where if rank["step"] is not None),
        )
        if new:
            self._show("paused" if agreed.holds else "running")
        return agreed

    def _gather(self, step: int, left: bool) -> tuple[list[Command], list[dict[str, Any]]]:
        """Return the new commands, and each rank's state.

        The commands are those of the rank that has read most: a shared file may lag.
        """
        self._reader.poll()
        versions = self._replica.server_copy.updates if self._replica.has_server_copy else None
        mine = {"commands": self._reader.commands[self.num_taken :], "step": step, "left": left, "versions": versions}
        deadline = self._interpreter.clock.deadline("all ranks to agree on the commands")
        texts = self._transport.gather_texts(json.dumps(mine), deadline)
        where = [dict(DEPARTED_REPORT) if text == LEFT_TEXT else json.loads(text) for text in texts]
        commands: list[Command] = max((rank.pop("commands") for rank in where), key=len)
        return commands, where

    def _do(self, command: Command, step: int, where: list[dict[str, Any]]) -> None:
        """Record one command, and change settings if it sets some."""
        self.num_taken += 1
        row: dict[str, Any] = {"number": self.num_taken, **command}
        if isinstance(command.get("set"), dict):
            try:
                row["became"] = self._set(command["set"])
            except ConfigError as error:  # on all ranks: the command was written without a check
                row["refused"] = str(error)
        self._recorder.event({"task": 0, "steer": self.num_taken, "step": step, **command})
        if self.algorithm.asynchronous:
            row |= {"meeting": self._num_meetings, "steps": [rank["step"] for rank in where]}
            row |= {"versions": {number: rank["versions"] for number, rank in enumerate(where) if rank["versions"]}}
        else:
            row["step"] = step
        self._taken.append(row)

    def _set(self, changes: dict[str, Any], *, keeps_lr: bool = False) -> dict[str, Any]:
        """Adopt changed settings. Return those that are new, as in the record of the algorithm."""
        num_ranks, progress = self._transport.num_workers, self._settings.progress
        before = record_of(self.algorithm)
        self.algorithm, lr = changed(self.algorithm, changes, num_ranks, progress)
        if lr is not None and not keeps_lr:
            self._replica.set_lr(lr)
        new = {name: value for name, value in record_of(self.algorithm).items() if value != before[name]}
        return new if lr is None else {"lr": lr, **new}

    def _wait_for_command(self) -> None:
        """Return at a new command, or after a short time. The next meeting then shows that all ranks are alive."""
        deadline = time.monotonic() + PAUSED_POLL_S
        with self._interpreter.clock.doing("paused"):
            while self._reader.poll() <= self.num_taken and time.monotonic() < deadline:
                time.sleep(COMMAND_POLL_S)

    def _show(self, status: str) -> None:
        if self._transport.rank == 0:
            update_run(self._folder, status=status, steering=self._taken)
        self._recorder.end_step()
