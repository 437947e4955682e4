"""Log a run to TensorBoard while it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, final

from workbench.callbacks.base import Callback, Row
from workbench.callbacks.scalars import began_s, scalars
from workbench.errors import ConfigError
from workbench.trace.run import Run


@final
class TensorBoard(Callback):
    """Writes event files: `tensorboard --logdir FOLDER` shows them.

    Args:
        folder: a folder for each run is made in it; None: `tensorboard` in the run's own folder.
    """

    may_stop: ClassVar[bool] = False

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = folder
        self._writer: Any = None
        self._began_s = 0.0

    def on_begin(self, run: Run) -> None:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError:
            raise ConfigError("TensorBoard is missing: pip install 'sgd-workbench[tensorboard]'") from None
        if self.folder is None and run.folder is None:
            raise ConfigError("a simulated run has no folder: give one, as TensorBoard('logs')")
        place = Path(self.folder) / run.id if self.folder is not None else Path(str(run.folder)) / "tensorboard"
        self._writer, self._began_s = EventFileWriter(str(place)), began_s(run.info)

    def on_step(self, row: Row) -> None:
        self._write(row)

    def on_evaluation(self, row: Row) -> None:
        self._write(row)
        self._writer.flush()

    def on_end(self, run: Run) -> None:
        self._writer.close()

    def _write(self, row: Row) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(row).items()]
        self._writer.add_event(
            Event(wall_time=self._began_s + row["seconds"], step=row["step"], summary=Summary(value=values))
        )
