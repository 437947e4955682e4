"""Objects that are called with what happens in a run: after each step and evaluation, and at the end.

- `base`: `Callback`, to write your own, and `Notifier`, which calls them from a run's records.
- Loggers: `tensorboard`, `wandb`, `mlflow`. `scalars` names what they log.

Imports `trace` and what lies below. Used by `runtimes`, which runs them on rank 0, and by `analysis`. Begin with
`base`.
"""

from workbench.callbacks.base import Callback
from workbench.callbacks.mlflow import MLflow
from workbench.callbacks.tensorboard import TensorBoard
from workbench.callbacks.wandb import WandB

__all__ = ["Callback", "MLflow", "TensorBoard", "WandB"]
