"""Collectives and codecs in a Hugging Face `Trainer`, which keeps its loop."""

from __future__ import annotations

from typing import Any, final

from torch import nn

from workbench.adapters.hooks import register_hook_on
from workbench.errors import ConfigError
from workbench.runtimes.user_loop.ddp_hook import DDPHook

try:
    import transformers
except ImportError:
    raise ConfigError("transformers is missing: pip install 'sgd-workbench[huggingface]'") from None


def add_hook(trainer: transformers.Trainer, **options: Any) -> HookCallback:
    """Average gradients with the workbench in this Trainer: `workbench.ddp_hook(**options)`, from `train()` on.

    Call it on every rank, before `trainer.train()`. With one process there is nothing to average. Out of scope: FSDP,
    DeepSpeed, tensor and pipeline parallelism.

    Args:
        options: those of `ddp_hook`, such as `codec=Truncate16()` or `collective=PowerSGD(start_step=2)`.

    Returns:
        The callback. Its `state` has `bytes_sent`, and `state_dict()` for a codec with memory, of each rank.

    Raises:
        ConfigError: in `train()`: the model is divided among ranks.

    Example:
        >>> def train(trainer, codec):
        ...     add_hook(trainer, codec=codec)
        ...     trainer.train()
    """
    callback = HookCallback(trainer, options)
    trainer.add_callback(callback)
    return callback


@final
class HookCallback(transformers.TrainerCallback):
    """Registers the hook when training begins: the Trainer wraps its model only then.

    Attributes:
        state: the hook's state; None before the training, or with one process.
    """

    def __init__(self, trainer: transformers.Trainer, options: dict[str, Any]) -> None:
        self._trainer, self._options = trainer, options
        self._model: nn.Module | None = None  # with the hook
        self.state: DDPHook | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Register the hook, once for each wrapped model."""
        model = self._trainer.model_wrapped
        if model is not self._model:
            self._model, self.state = model, register_hook_on(model, self._options)
