"""The workbench in a Lightning `Trainer`, which keeps its loop: as strategies.

- `HookStrategy`: DDP, with collectives and codecs as its communication hook.
- `AlgorithmStrategy`: any algorithm that a `workbench.Trainer` runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.adapters.hooks import check_whole_model, register_hook_on
from workbench.codecs import Codec
from workbench.collectives import Collective
from workbench.errors import ConfigError
from workbench.program import Algorithm
from workbench.runtimes.user_loop.ddp_hook import DDPHook
from workbench.runtimes.user_loop.trainer import Trainer

try:
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError:
    raise ConfigError("lightning is missing: pip install 'sgd-workbench[lightning]'") from None


@final
class HookStrategy(DDPStrategy):
    """Lightning's DDP with `workbench.ddp_hook(**options)` as its communication hook, on CPUs too.

    (`DDPStrategy(ddp_comm_hook=)` takes a hook that exists before the process group, and registers none on CPUs.) Out
    of scope: FSDP, DeepSpeed, tensor and pipeline parallelism.

    Args:
        collective, codec, seed, timeout_s: see `ddp_hook`.
        options: those of `DDPStrategy`, such as `find_unused_parameters=True`.

    Attributes:
        hook_state: the hook's state, once training has begun: `bytes_sent`, and `state_dict()` for a codec with memory.

    Example:
        >>> from workbench.codecs import Truncate16
        >>> strategy = HookStrategy(codec=Truncate16())  # for lightning.Trainer(strategy=strategy)
    """

    def __init__(
        self,
        *,
        collective: Collective | None = None,
        codec: Codec | None = None,
        seed: int = 0,
        timeout_s: float | None = 120.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._of_hook = {"collective": collective, "codec": codec, "seed": seed, "timeout_s": timeout_s}
        self.hook_state: DDPHook | None = None

    def _register_ddp_hooks(self) -> None:
        assert self.model is not None
        self.hook_state = register_hook_on(self.model, self._of_hook)


@final
class AlgorithmStrategy(DDPStrategy):
    """Trains a LightningModule by an algorithm of the workbench, in place of DDP: a `workbench.Trainer` takes each step.

    Validation and Lightning's checkpoints have the model as the end of training would leave it (`Trainer.evaluating`).
    A checkpoint has no gradients in flight, no replicas of other ranks and no state of servers: training continues from
    it as from weights. The module's hooks around backward and the optimizer's step are not called.

    Needs automatic optimization with one optimizer. Refused are `accumulate_grad_batches` above 1, gradient clipping
    (give `clip_norm` here), 16-bit precision with a loss scale (use "bf16-mixed", or `precision="fp16"` here), and
    dedicated servers.

    Args:
        algorithm: the algorithm, such as `PipeSGD(width=2)`.
        options: those of `workbench.Trainer`, such as `clip_norm=1.0`.

    Attributes:
        loop: the `workbench.Trainer`, during training.

    Example:
        >>> from workbench.algorithms import PipeSGD
        >>> strategy = AlgorithmStrategy(PipeSGD(width=2))  # for lightning.Trainer(strategy=strategy)
    """

    def __init__(self, algorithm: Algorithm, **options: Any) -> None:
        super().__init__()
        self._algorithm, self._of_trainer = algorithm, options
        self._loss: Tensor | None = None  # of the closure that runs
        self._shown, self._is_shown = ExitStack(), False  # the model as the end would leave it, during validation
        self.loop: Trainer | None = None

    def configure_ddp(self) -> None:
        """Do not wrap the model: no other code may average its gradients."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        module = self.lightning_module
        assert module is not None and isinstance(self.model, nn.Module)
        check_whole_model(self.model)
        self._check(trainer, module)
        self.loop = Trainer(self.model, self.optimizers[0], self._algorithm, **self._of_trainer)

    def _check(self, trainer: Any, module: Any) -> None:
        """Raise `ConfigError` for what Lightning would do between a gradient and its update."""
        fix = ""
        if not module.automatic_optimization or len(self.optimizers) != 1:
            fix = "use automatic optimization with one optimizer, or workbench.Trainer in your own loop"
        elif trainer.accumulate_grad_batches != 1:
            fix = "use accumulate_grad_batches=1 and larger batches, or HookStrategy"
        elif trainer.gradient_clip_val:
            fix = "give AlgorithmStrategy(..., clip_norm=...) in place of gradient_clip_val"
        elif isinstance(self.precision_plugin, MixedPrecision) and self.precision_plugin.scaler is not None:
            fix = "use precision='bf16-mixed', or AlgorithmStrategy(..., precision='fp16'), in place of '16-mixed'"
        elif getattr(self._algorithm, "dedicated", False):
            fix = "Lightning trains on all ranks: use dedicated=False"
        if fix:
            raise ConfigError(f"AlgorithmStrategy({self._algorithm}) takes the step itself: {fix}")

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Keep the loss: the workbench runs its backward."""
        self._loss = closure_loss
        return closure_loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take a step of the algorithm with Lightning's closure, which runs `training_step`."""
        assert self.loop is not None
        result = None

        def loss() -> Tensor:
            nonlocal result
            result = closure()
            if self._loss is None:
                raise ConfigError("training_step() returned no loss: with AlgorithmStrategy each rank returns one")
            value, self._loss = self._loss, None
            return value

        self.loop.step(loss)
        return result

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self.loop is not None:
            self._shown.enter_context(self.loop.evaluating())
            self._is_shown = True

    def on_validation_end(self) -> None:
        self._hide()
        super().on_validation_end()

    def _hide(self) -> None:
        self._is_shown = False
        self._shown.close()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state for a checkpoint. Lightning calls it on all ranks."""
        if self.loop is None or self._is_shown:
            return super().lightning_module_state_dict()
        with self.loop.evaluating():
            return {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in super().lightning_module_state_dict().items()
            }

    def on_train_end(self) -> None:
        """Apply gradients in flight, and make the replicas equal."""
        super().on_train_end()
        if self.loop is not None:
            self.loop.finish()
            self.loop = None

    def on_exception(self, exception: BaseException) -> None:
        """End the other ranks, too."""
        self._hide()
        if self.loop is not None:
            self.loop.__exit__(type(exception), exception, exception.__traceback__)
            self.loop = None
        super().on_exception(exception)
