"""Writes a rank's checkpoint files: the state is copied at a step's end, and written during the next steps."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, final

from workbench.logs import LOG
from workbench.ops import EndStep
from workbench.program import Algorithm
from workbench.replica.local_training import LocalTraining
from workbench.runtimes.checkpoint.files import rank_file_path, remove_old_rank_files, write_rank_file
from workbench.runtimes.checkpoint.rank_state import random_state, take_checkpoint
from workbench.runtimes.checkpoint.reader import save_rank_file
from workbench.runtimes.checkpoint.replicated import is_replicated, without_replicated
from workbench.runtimes.checkpoint.staging import StagingBuffers
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.liveness.membership import LEFT_TEXT
from workbench.trace.store import read_info, update_run

POLL_S = 0.05


@final
class CheckpointWriter:
    """Writes the files of one rank, one at a time, on a thread. The next checkpoint waits until the file is written."""

    def __init__(self, worker: LocalTraining, interpreter: Interpreter, folder: Path) -> None:
        self._worker, self._interpreter, self._folder = worker, interpreter, folder
        self._transport = interpreter.transport
        self._every = worker.settings.checkpoint_every
        self._staging = StagingBuffers()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._notes: list[str] = []
        self._waited_s = self._written_s = 0.0

    def keep(self, algorithm: Algorithm, end: EndStep, place: int | None) -> None:
        """Begin to write what this rank needs to continue after that step. For a stop, return when it is written.

        If a rank has left, its file would be missing. Then nothing is written, and the record says so.

        Args:
            place: the step in the checkpoint's name, which is the same on all ranks. None: the checkpoint of a stop.

        Raises:
            OSError: a stop's checkpoint cannot be written.
        """
        self._interpreter.complete_all(end.state)
        with self._interpreter.clock.doing("keeping a checkpoint"):
            self.finish_writing()
            if self._transport.members is not None and (missing := self._transport.members.missing()):
                self._notes.append(f"rank {missing[0]} left, and no checkpoint was kept since: earlier ones are valid")
                return
            self._copy_and_write(algorithm, end, place)
            if place is None:
                self.finish_writing()
                if self._error is not None:
                    raise self._error

    def _copy_and_write(self, algorithm: Algorithm, end: EndStep, place: int | None) -> None:
        """Copy this rank's state, and start the thread that writes the copy."""
        interpreter, replica = self._interpreter, self._worker.replica
        begin = interpreter.clock.now()
        memory = interpreter.context.memory if interpreter.context else {}
        saved = take_checkpoint(algorithm, replica, self._transport.num_workers, end, memory, self._worker.sampler)
        saved["random"] = random_state(self._transport.device)
        tree = self._staging.take(saved)
        path = rank_file_path(self._folder, place, self._transport.rank)
        self._error = None
        facts = {
            "step": end.step,
            "rank": self._transport.rank,
            "num_workers": saved["num_workers"],
            "run": self._folder.name,
        }
        interpreter.recorder.event(
            {"task": -1, "checkpoint": end.step, "place": place, "copied_s": interpreter.clock.now() - begin}
        )
        parameters = frozenset(dict(replica.model.named_parameters(remove_duplicate=False)))
        lacks = parameters if self._transport.rank and is_replicated(algorithm) else None
        self._thread = threading.Thread(
            target=self._write, args=(path, tree, facts, place, lacks), name="checkpoint", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait until the last file is written, and record the failures of all ranks. All ranks call it."""
        self.finish_writing()
        notes = self._notes
        if self._every is not None:
            deadline = self._interpreter.clock.deadline("all ranks to have their checkpoints on the disk")
            texts = self._transport.gather_texts(json.dumps([self._waited_s, *self._notes]), deadline)
            reports = [json.loads(text) for text in texts if text != LEFT_TEXT]
            notes = [note for one in reports for note in one[1:]]
            if (slowest_s := max(one[0] for one in reports)) > POLL_S:
                notes.append(
                    f"training waited {slowest_s:.2g} s for checkpoints that were still being written: raise "
                    "checkpoint_every"
                )
        if notes and self._transport.rank == 0:
            update_run(self._folder, notes=[*read_info(self._folder).get("notes", []), *dict.fromkeys(notes)])

    def finish_writing(self) -> None:
        """Wait until no file is being written."""
        thread, clock = self._thread, self._interpreter.clock
        if thread is None:
            return
        begin, deadline = clock.now(), clock.deadline("a checkpoint to be on the disk")
        while thread.is_alive():
            thread.join(POLL_S)
            deadline.check()
        self._thread = None
        self._waited_s += clock.now() - begin
        clock.recorder.event({"task": -1, "written_s": self._written_s})

    def _write(
        self, path: Path, tree: dict[str, Any], facts: dict[str, Any], place: int | None, lacks: frozenset[str] | None
    ) -> None:
        """Write a file.

        Args:
            lacks: parameters that rank 0 writes for all ranks, together with the optimizer. None: this rank writes its
                own parameters and optimizer.
        """
        begin = time.perf_counter()
        try:
            if lacks is not None:
                tree = without_replicated(tree, lacks)
            write_rank_file(path, partial(save_rank_file, tree), facts)
            if place is not None:
                keep = self._worker.settings.keep_checkpoints
                remove_old_rank_files(self._folder, facts["rank"], facts["num_workers"], keep, place)
        except Exception as error:  # noqa: BLE001 - no failure to write may end the training
            self._error = error
            note = (
                f"rank {facts['rank']} could not write its checkpoint of step {facts['step']} ({error}): earlier "
                "ones are valid"
            )
            self._notes.append(note)
            LOG.warning("%s", note)
        self._written_s = time.perf_counter() - begin
