"""Objects that are told what happens in a run: after each step and evaluation, and at the end.

- `base`: `Callback`, to write your own, and `Notifier`, which calls them from a run's records.
- Loggers: `tensorboard`, `wandb`, `mlflow`. `scalars` names what they log.

Imports `trace` and what lies below. Used by `runtimes`, which runs them on rank 0, and by `analysis`. Begin with `base`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "base": ["Callback"],
        "tensorboard": ["TensorBoard"],
        "wandb": ["WandB"],
        "mlflow": ["MLflow"],
    },
)
