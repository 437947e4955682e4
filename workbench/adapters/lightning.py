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
from workbench.problems.torchvision_door import repair_torchvision
from workbench.program import Algorithm
from workbench.runtimes.user_loop.ddp_hook import DDPHook
from workbench.runtimes.user_loop.trainer import Trainer

repair_torchvision()  # lightning imports it, by torchmetrics
try:
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.callbacks import (
        BaseFinetuning,
        GradientAccumulationScheduler,
        StochasticWeightAveraging,
        WeightAveraging,
    )
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError:
    raise ConfigError("lightning is missing: pip install 'sgd-workbench[lightning]'") from None

ACCUMULATION_FIX = "use accumulate_grad_batches=1 and larger batches, or HookStrategy"
READ_FIX = "read gradients in on_train_batch_end, with AlgorithmStrategy(..., keep_gradients=True)"
CLIP_FIX = "clip with AlgorithmStrategy(..., clip_norm=...)"
# Hooks that see or change gradients between backward and update, where the workbench communicates -> the fix.
GRADIENT_HOOKS = {
    "backward": "change the loss in training_step, or use HookStrategy",
    "on_after_backward": f"{READ_FIX}; {CLIP_FIX}; or use HookStrategy",
    "on_before_optimizer_step": f"{READ_FIX}; {CLIP_FIX}; or use HookStrategy",
    "configure_gradient_clipping": f"{CLIP_FIX}, or use HookStrategy",
    "clip_gradients": f"{CLIP_FIX}, or use HookStrategy",
    "optimizer_zero_grad": "leave it out: each step begins with gradients of 0; or use HookStrategy",
}


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
    it as from weights. `gradient_clip_val` clips the norm of the mean gradient.

    Hooks are called in Lightning's order: `optimizer_step`, `on_before_zero_grad` (which sees no gradients),
    `on_before_backward` and `lr_scheduler_step` too. `on_train_batch_end` sees the mean gradient of the update with
    `keep_gradients=True`.

    Needs automatic optimization with one optimizer. Refused are hooks of the module and of callbacks that see or change
    gradients between backward and update (`GRADIENT_HOOKS`), accumulated gradients, clipping by value, callbacks that
    unfreeze parameters, 16-bit precision with a loss scale (use "bf16-mixed", or `precision="fp16"` here), and
    dedicated servers. Callbacks that average weights need an algorithm whose steps are complete
    (`Algorithm.complete_after_step`).

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
        self._is_in_step = False  # the loop takes a step
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
        clipped = {"clip_norm": float(trainer.gradient_clip_val)} if trainer.gradient_clip_val else {}
        self.loop = Trainer(self.model, self.optimizers[0], self._algorithm, **{**clipped, **self._of_trainer})
        trainer.callbacks.insert(0, _LoopEnd(self))  # so that the other callbacks see the finished model

    def _check(self, trainer: Any, module: Any) -> None:
        """Raise `ConfigError` for what Lightning would do between a gradient and its update."""
        fix = _fix_of_hooks(trainer, module)
        if not module.automatic_optimization or len(self.optimizers) != 1:
            fix = "use automatic optimization with one optimizer, or workbench.Trainer in your own loop"
        elif trainer.accumulate_grad_batches != 1:
            fix = ACCUMULATION_FIX
        elif trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            fix = "it clips by norm: use gradient_clip_algorithm='norm', or HookStrategy"
        elif not self._algorithm.complete_after_step and (averaging := _averaging(trainer)):
            fix = (
                f"{averaging} reads weights after a step, when updates are in flight or weights differ between ranks: "
                "leave it out, or use SynchronousSGD() or HookStrategy"
            )
        elif isinstance(self.precision_plugin, MixedPrecision) and self.precision_plugin.scaler is not None:
            fix = "use precision='bf16-mixed', or AlgorithmStrategy(..., precision='fp16'), in place of '16-mixed'"
        elif getattr(self._algorithm, "dedicated", False):
            fix = "Lightning trains on all ranks: use dedicated=False"
        if fix:
            raise ConfigError(f"AlgorithmStrategy({self._algorithm}) takes the step itself: {fix}")

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Keep the loss: the workbench runs its backward.

        Raises:
            ConfigError: no step is taken, so gradients are to be accumulated.
        """
        if not self._is_in_step:
            raise ConfigError(
                f"AlgorithmStrategy({self._algorithm}) takes the step itself, and this batch is without one (gradients "
                f"are to be accumulated): {ACCUMULATION_FIX}"
            )
        assert self.lightning_module is not None
        self._loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        return closure_loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take a step of the algorithm with Lightning's closure, which runs `training_step`."""
        assert self.loop is not None and self.lightning_module is not None
        if self.lightning_module.trainer.accumulate_grad_batches != 1:
            # A pass without backward, for the statistics of an averaged model. `backward` refuses any other.
            return closure()
        result = None

        def loss() -> Tensor:
            nonlocal result
            result = closure()
            if self._loss is None:
                raise ConfigError("training_step() returned no loss: with AlgorithmStrategy each rank returns one")
            value, self._loss = self._loss, None
            return value

        self._is_in_step = True
        try:
            self.loop.step(loss)
        finally:
            self._is_in_step = False
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

    def finish(self) -> None:
        """Apply gradients in flight, and make the replicas equal."""
        if self.loop is not None:
            self.loop.finish()
            self.loop = None

    def teardown(self) -> None:
        module: Any = self.lightning_module
        if module is not None:
            callbacks = module.trainer.callbacks
            callbacks[:] = [callback for callback in callbacks if not isinstance(callback, _LoopEnd)]
        super().teardown()

    def fail(self, exception: BaseException) -> None:
        """End the other ranks, too."""
        self._hide()
        if self.loop is not None:
            self.loop.__exit__(type(exception), exception, exception.__traceback__)
            self.loop = None


@final
class _LoopEnd(Callback):
    """Ends the loop of an `AlgorithmStrategy`."""

    def __init__(self, strategy: AlgorithmStrategy) -> None:
        self._strategy = strategy

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._strategy.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._strategy.fail(exception)


def _fix_of_hooks(trainer: Any, module: Any) -> str:
    """Return what to use in place of a hook or callback that the workbench cannot serve; "" if there is none."""
    owners = [(module, LightningModule), *((callback, Callback) for callback in trainer.callbacks)]
    for owner, base in owners:
        for hook, fix in GRADIENT_HOOKS.items():
            if hasattr(base, hook) and is_overridden(hook, owner, base):
                return f"{type(owner).__name__}.{hook} acts on gradients before the ranks have exchanged them: {fix}"
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler) and callback.going_to_accumulate_grad_batches():
            return f"GradientAccumulationScheduler accumulates gradients: {ACCUMULATION_FIX}"
        if isinstance(callback, BaseFinetuning):
            return (
                f"{type(callback).__name__} gives the optimizer more parameters during training, and the workbench "
                "communicates those that it has at the beginning: use HookStrategy"
            )
    return ""


def _averaging(trainer: Any) -> str:
    """Return the class of a callback that averages the weights; "" if there is none."""
    kinds = (StochasticWeightAveraging, WeightAveraging)
    return next((type(callback).__name__ for callback in trainer.callbacks if isinstance(callback, kinds)), "")
