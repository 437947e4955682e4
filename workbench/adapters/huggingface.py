"""The workbench in a Hugging Face `Trainer`, which keeps its loop.

- `add_hook`: DDP, with collectives and codecs as its communication hook.
- `AlgorithmTrainer`: any algorithm that a `workbench.Trainer` runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from workbench.adapters.hooks import check_whole_model, register_hook_on
from workbench.errors import ConfigError
from workbench.problems.torchvision_door import repair_torchvision
from workbench.program import Algorithm, clipping_refusal
from workbench.runtimes.user_loop.ddp_hook import DDPHook
from workbench.runtimes.user_loop.trainer import Trainer

repair_torchvision()  # transformers imports it for its Trainer
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


class AlgorithmTrainer(transformers.Trainer):
    """A Hugging Face Trainer that trains by an algorithm of the workbench, in place of DDP.

    A `workbench.Trainer` takes each step: forward, backward, communication and the optimizer's update. `evaluate` and
    checkpoints have the model as the end of training would leave it (`Trainer.evaluating`). A checkpoint has no
    gradients in flight, no replicas of other ranks and no state of servers: training continues from it as from weights.
    The mean gradient is clipped to `args.max_grad_norm`, as usual.

    The mean gradient's norm is logged, as usual, unless no rank has the mean gradient of an update.

    Refused are `gradient_accumulation_steps` above 1, `fp16` (use `bf16`, or `options={"precision": "fp16"}`),
    `auto_find_batch_size`, several GPUs in one process, DeepSpeed and FSDP, dedicated servers, and what acts on
    gradients between backward and update: `on_pre_optimizer_step` of a callback, `training_step` of a subclass. A
    subclass may override `compute_loss`.

    Args:
        arguments: those of `transformers.Trainer`.
        algorithm: the algorithm, such as `PipeSGD(width=2)`.
        options: those of `workbench.Trainer`, such as `{"record": True}`.

    Attributes:
        loop: the `workbench.Trainer`, during training.

    Example:
        >>> from workbench.algorithms import PipeSGD
        >>> def train(model, args, data):
        ...     AlgorithmTrainer(model, args, train_dataset=data, algorithm=PipeSGD(width=2)).train()
    """

    def __init__(
        self, *arguments: Any, algorithm: Algorithm, options: Mapping[str, Any] | None = None, **more: Any
    ) -> None:
        self._algorithm, self._of_trainer = algorithm, dict(options or {})
        self._last_loss = torch.zeros(())
        self._is_shown = False  # the model as the end would leave it
        self.loop: Trainer | None = None
        super().__init__(*arguments, **more)
        self.callback_handler.callbacks.insert(0, _Loop(self))  # so that the other callbacks see the finished model

    def create_accelerator_and_postprocess(self) -> None:
        """As usual, but without DDP, and without clipping after the update."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.accelerator.clip_grad_norm_ = self._norm

    def train(self, *arguments: Any, **more: Any) -> Any:
        """As usual. An error ends the training on the other ranks too."""
        self._check()
        try:
            return super().train(*arguments, **more)
        except BaseException as error:
            if self.loop is not None:
                self.loop.__exit__(type(error), error, error.__traceback__)
            raise
        finally:
            self.loop = None
            self._restore_step()

    def _check(self) -> None:
        """Raise `ConfigError` for what the library would do between a gradient and its update."""
        fix = ""
        if self.args.gradient_accumulation_steps != 1:
            fix = "use gradient_accumulation_steps=1 and larger batches, or add_hook"
        elif self.args.fp16:
            fix = "use bf16=True, or options={'precision': 'fp16'}, in place of fp16=True"
        elif self.args.n_gpu > 1:
            fix = "start one process for each GPU, with torchrun"
        elif self.args.auto_find_batch_size:
            fix = "auto_find_batch_size begins the training again: use a per_device_train_batch_size that fits"
        elif changed := self._changed_step():
            fix = f"{changed} would come after the update: use compute_loss, on_step_begin or on_step_end, or add_hook"
        elif self.is_deepspeed_enabled or self.is_fsdp_enabled:
            fix = "turn DeepSpeed and FSDP off: each rank has the whole model"
        elif getattr(self._algorithm, "dedicated", False):
            fix = "all ranks train here: use dedicated=False"
        elif self.args.max_grad_norm and (refusal := clipping_refusal(self._algorithm)):
            fix = f"use max_grad_norm=0, because {refusal}"
        if fix:
            raise ConfigError(f"AlgorithmTrainer({self._algorithm}) takes the step itself: {fix}")

    def _changed_step(self) -> str:
        """Return the name of a method between backward and update that a subclass or a callback has; "" for none."""
        for callback in self.callback_handler.callbacks:
            if type(callback).on_pre_optimizer_step is not transformers.TrainerCallback.on_pre_optimizer_step:
                return f"{type(callback).__name__}.on_pre_optimizer_step"
        own = type(self).training_step is not AlgorithmTrainer.training_step
        return f"{type(self).__name__}.training_step" if own else ""

    def begin(self) -> None:
        """Make the loop, when model and optimizer are prepared."""
        model, prepared = self.model, cast("Any", self.optimizer)
        assert isinstance(model, nn.Module)
        check_whole_model(model)
        optimizer = getattr(prepared, "optimizer", prepared)  # accelerate has wrapped it
        prepared.step = lambda *_: None  # the loop has taken the step
        self.loop = Trainer(model, optimizer, self._algorithm, **{**self._clipping(), **self._of_trainer})

    def _clipping(self) -> dict[str, float]:
        """Return the option that clips the gradient, or only measures its norm if that is possible."""
        if self.args.max_grad_norm:
            return {"clip_norm": self.args.max_grad_norm}
        measurable = not clipping_refusal(self._algorithm) and not self._algorithm.requires.buckets.applied_singly
        return {"clip_norm": math.inf} if measurable else {}

    def finish(self) -> None:
        """Apply gradients in flight, and make the replicas equal."""
        if self.loop is not None:
            self.loop.finish()
            self.loop = None
            self._restore_step()

    def _restore_step(self) -> None:
        """Let the optimizer take steps again. It may not exist, because the training failed before."""
        if self.optimizer is not None:
            vars(self.optimizer).pop("step", None)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Take a step of the algorithm with the loss of `compute_loss`."""
        assert self.loop is not None
        model.train()
        train_mode = getattr(self.optimizer, "train", None)  # of an optimizer without a schedule
        if callable(train_mode):
            train_mode()
        inputs = self._prepare_inputs(inputs)

        def loss() -> Tensor:
            with self.compute_loss_context_manager():
                return cast("Tensor", self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch))

        found = self.loop.step(loss)
        if found is not None:  # else this rank was too late for the step
            self._last_loss = found
        return self._last_loss.to(self.args.device)

    def evaluate(self, *arguments: Any, **more: Any) -> Any:
        with self._as_the_end_leaves_it():
            return super().evaluate(*arguments, **more)

    def predict(self, *arguments: Any, **more: Any) -> Any:
        with self._as_the_end_leaves_it():
            return super().predict(*arguments, **more)

    def save_model(self, *arguments: Any, **more: Any) -> None:
        with self._as_the_end_leaves_it():
            super().save_model(*arguments, **more)

    def _load_best_model(self) -> None:
        self.finish()  # else the updates in flight would go to the best model
        super()._load_best_model()

    @contextmanager
    def _as_the_end_leaves_it(self) -> Iterator[None]:
        if self.loop is None or self._is_shown:
            yield
            return
        self._is_shown = True
        try:
            with self.loop.evaluating():
                yield
        finally:
            self._is_shown = False

    def _norm(self, *_: Any, **__: Any) -> Tensor | None:
        """The norm of the mean gradient before the loop clipped it; None if it is not measured."""
        wrapper = None if self.loop is None else self.loop.replica.optimizer_wrapper
        if self.loop is None or wrapper is None or not (wrapper.clips or wrapper.keeps):
            return None
        norm = self.loop.grad_norm
        return None if norm is None else torch.tensor(norm, dtype=torch.float64)


@final
class _Loop(transformers.TrainerCallback):
    """Begins and ends the loop of an `AlgorithmTrainer`."""

    def __init__(self, trainer: AlgorithmTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.finish()
