"""Log a run to MLflow while it trains."""

from __future__ import annotations

from typing import Any, ClassVar, final

from workbench.callbacks.base import Callback, Row
from workbench.callbacks.scalars import config, scalars
from workbench.errors import ConfigError
from workbench.trace.run import Run


@final
class MLflow(Callback):
    """Logs parameters once, and losses, accuracy and metrics against the step.

    Args:
        experiment: name of the experiment; it is made if missing.
        tracking_uri: server or database, such as "sqlite:///mlflow.db"; None: MLflow's own default.
    """

    may_stop: ClassVar[bool] = False

    def __init__(self, experiment: str = "workbench", tracking_uri: str | None = None) -> None:
        self.experiment, self.tracking_uri = experiment, tracking_uri
        self._client: Any = None
        self._id = ""

    def on_begin(self, run: Run) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ModuleNotFoundError:
            raise ConfigError("MLflow is missing: pip install 'sgd-workbench[mlflow]'") from None
        self._client = MlflowClient(tracking_uri=self.tracking_uri)
        known = self._client.get_experiment_by_name(self.experiment)
        number = self._client.create_experiment(self.experiment) if known is None else known.experiment_id
        self._id = self._client.create_run(number, run_name=run.id).info.run_id
        for name, value in config(run.info).items():
            self._client.log_param(self._id, name, value)

    def on_step(self, row: Row) -> None:
        self._log(row)

    def on_evaluation(self, row: Row) -> None:
        self._log(row)

    def on_end(self, run: Run) -> None:
        done = run.info.get("status") in ("finished", "stopped")
        self._client.set_terminated(self._id, status="FINISHED" if done else "FAILED")

    def _log(self, row: Row) -> None:
        for tag, value in scalars(row).items():
            self._client.log_metric(self._id, tag, value, step=row["step"])
