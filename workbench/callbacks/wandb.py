"""Log a run to Weights & Biases while it trains."""

from __future__ import annotations

from typing import Any, ClassVar, final

from workbench.callbacks.base import Callback, Row
from workbench.callbacks.scalars import config, scalars
from workbench.errors import ConfigError
from workbench.trace.run import Run


@final
class WandB(Callback):
    """Logs losses, accuracy and metrics against the step.

    Args:
        project: name of the project.
        options: more arguments of `wandb.init`, such as `mode="offline"`, `entity=`, `tags=`.
    """

    may_stop: ClassVar[bool] = False

    def __init__(self, project: str, **options: Any) -> None:
        self.project, self.options = project, options
        self._run: Any = None

    def on_begin(self, run: Run) -> None:
        try:
            import wandb
        except ModuleNotFoundError:
            raise ConfigError("Weights & Biases is missing: pip install 'sgd-workbench[wandb]'") from None
        where = {} if run.folder is None else {"dir": str(run.folder)}
        self._run = wandb.init(project=self.project, name=run.id, config=config(run.info), **{**where, **self.options})
        self._run.define_metric("*", step_metric="step")

    def on_step(self, row: Row) -> None:
        self._log(row)

    def on_evaluation(self, row: Row) -> None:
        self._log(row)

    def on_end(self, run: Run) -> None:
        self._run.finish(exit_code=0 if run.info.get("status") in ("finished", "stopped") else 1)

    def _log(self, row: Row) -> None:
        self._run.log({**scalars(row), "step": row["step"], "seconds": row["seconds"]})
