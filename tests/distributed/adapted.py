"""Trainings by other libraries' loops, on the ranks of torchrun: `python -m tests.distributed.adapted LIBRARY FOLDER`.

Each rank writes what it found as JSON: name of a case -> values.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from workbench.algorithms import AsyncSGD, LocalSGD, ParameterServerSGD, PipeSGD, SynchronousSGD
from workbench.codecs import Truncate16
from workbench.collectives import Ring
from workbench.errors import ConfigError
from workbench.program import Algorithm
from workbench.runtimes.user_loop.trainer import Trainer

NUM_SAMPLES, BATCH, FEATURES, CLASSES = 48, 4, 6, 3
LR, MOMENTUM = 0.1, 0.9
ALGORITHMS: dict[str, Algorithm] = {
    "synchronous": SynchronousSGD(),
    "pipe": PipeSGD(width=2),
    "local": LocalSGD(every=2),
    "servers": ParameterServerSGD(),
}


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(NUM_SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
        self.y = self.x[:, :CLASSES].argmax(1)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class Net(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.body(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def weights(model: nn.Module) -> list[float]:
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()]).tolist()


def train_by_hand(algorithm: Algorithm, batches: list[dict[str, Tensor]]) -> list[float]:
    """These batches by a `workbench.Trainer` in a plain loop."""
    model = Net()
    with Trainer(model, sgd(model), algorithm) as trainer:
        for one in batches:
            trainer.step(lambda one=one: model(**one)["loss"])
    return weights(model)


# ---------------------------------------------------------------- accelerate


def accelerate(folder: Path) -> dict[str, Any]:
    from accelerate import Accelerator

    from workbench.adapters.accelerate import register_hook

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Samples(), batch_size=BATCH, shuffle=False))

    def train(options: dict[str, Any] | None) -> tuple[list[float], float]:
        model = Net()
        model, optimizer = accelerator.prepare(model, sgd(model))
        state = None if options is None else register_hook(model, **options)
        for one in loader:
            optimizer.zero_grad()
            accelerator.backward(model(**one)["loss"])
            optimizer.step()
        return weights(model), state.bytes_sent if state else 0.0

    def train_accumulated(options: dict[str, Any] | None) -> list[float]:
        """Three micro-batches a step, clipped, with a saved state in the middle that is loaded again."""
        accumulating = Accelerator(cpu=True, gradient_accumulation_steps=3)
        model = Net()
        model, optimizer = accumulating.prepare(model, sgd(model))
        if options is not None:
            register_hook(model, **options)
        kept = str(folder / f"state-{options is None}")
        for part in (list(loader)[:3], list(loader)[3:]):
            for one in part:
                with accumulating.accumulate(model):
                    accumulating.backward(model(**one)["loss"])
                    if accumulating.sync_gradients:
                        accumulating.clip_grad_norm_(model.parameters(), 0.05)
                    optimizer.step()
                    optimizer.zero_grad()
            accumulating.save_state(kept)
            accumulating.wait_for_everyone()
            accumulating.load_state(kept)
        return weights(model)

    def train_whole(algorithm: Algorithm) -> list[float]:
        model = Net()
        with Trainer(model, sgd(model), algorithm) as trainer:
            for one in loader:
                trainer.step(lambda one=one: model(**one)["loss"])
        return weights(model)

    return {
        "plain": train(None),
        "hook": train({}),
        "ring": train({"collective": Ring()}),
        "codec": train({"codec": Truncate16()}),
        "accumulated": [train_accumulated(None), train_accumulated({})],
        "whole": {
            name: (train_whole(algorithm), train_by_hand(algorithm, list(loader)))
            for name, algorithm in ALGORITHMS.items()
        },
    }


# ---------------------------------------------------------------- Hugging Face's Trainer


def huggingface(folder: Path) -> dict[str, Any]:
    import safetensors.torch
    import transformers

    from workbench.adapters.huggingface import AlgorithmTrainer, add_hook

    class Seeing(AlgorithmTrainer):
        """Keeps its batches, and its weights during evaluations."""

        def __init__(self, *given: Any, **more: Any) -> None:
            self.seen: list[dict[str, Tensor]] = []
            self.evaluated: list[list[float]] = []
            self.training: list[bool] = []
            super().__init__(*given, **more)

        def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], **more: Any) -> Any:
            if torch.is_grad_enabled():
                self.seen.append(inputs)
                self.training.append(model.training)
            elif not self.evaluated or self.evaluated[-1] != weights(model):
                self.evaluated.append(weights(model))
            return super().compute_loss(model, inputs, **more)

    def whole(
        name: str,
        algorithm: Algorithm,
        model: nn.Module | None = None,
        options: dict[str, Any] | None = None,
        kind: type[Seeing] = Seeing,
        callbacks: list[Any] | None = None,
        **changed: Any,
    ) -> Seeing:
        model = model or Net()
        data = Samples()
        given: dict[str, Any] = {
            "output_dir": str(folder / name),
            "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": BATCH,
            "num_train_epochs": 1,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "use_cpu": True,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "remove_unused_columns": False,
            **changed,
        }
        trainer = kind(
            model,
            transformers.TrainingArguments(**given),
            train_dataset=data,
            eval_dataset=data,
            optimizers=(sgd(model), None),
            algorithm=algorithm,
            options=options,
            callbacks=callbacks,
        )
        trainer.train()
        return trainer

    def against_by_hand(name: str, algorithm: Algorithm) -> tuple[list[float], list[float]]:
        trainer = whole(name, algorithm)
        return weights(trainer.model), train_by_hand(algorithm, trainer.seen)

    def shown(name: str, algorithm: Algorithm) -> dict[str, Any]:
        """Two epochs, each with an evaluation and a checkpoint, against one."""
        one = whole(f"{name}-one", algorithm)
        two = whole(f"{name}-two", algorithm, num_train_epochs=2, eval_strategy="epoch", save_strategy="epoch")
        saved = Net()
        state = safetensors.torch.load_file(
            folder / f"{name}-two" / f"checkpoint-{one.state.global_step}" / "model.safetensors"
        )
        saved.load_state_dict(state)
        return {
            "one epoch": weights(one.model),
            "in evaluation": two.evaluated[0],
            "kept": weights(saved),
            "training": all(two.training),
            "undisturbed": (weights(two.model), train_by_hand(algorithm, two.seen)),
        }

    def best_kept(algorithm: Algorithm) -> tuple[list[float], list[float]]:
        """The model after the training, and the checkpoint of the best model."""
        options = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}
        model = Net()
        trainer = whole("best", algorithm, model, num_train_epochs=2, metric_for_best_model="loss", **options)
        best = safetensors.torch.load_file(Path(trainer.state.best_model_checkpoint or "") / "model.safetensors")
        kept = Net()
        kept.load_state_dict(best)
        return weights(model), weights(kept)

    def as_library(kind: type[transformers.Trainer], name: str, **changed: Any) -> tuple[list[float], list[Any]]:
        """Weights and log of a training with this Trainer: transformers' own, with DDP, or the workbench's."""
        more = {} if kind is transformers.Trainer else {"algorithm": ALGORITHMS["synchronous"]}
        own = {"resume_from_checkpoint", "model"}
        given: dict[str, Any] = {
            "output_dir": str(folder / f"{name}-{kind.__name__}"),
            "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": BATCH,
            "num_train_epochs": 1,
            "max_grad_norm": 0.0,
            "use_cpu": True,
            "report_to": [],
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
            "remove_unused_columns": False,
            **{key: value for key, value in changed.items() if key not in own},
        }
        model = changed.get("model", Net)()
        trainer = kind(
            model,
            transformers.TrainingArguments(**given),
            train_dataset=Samples(),
            eval_dataset=Samples(),
            optimizers=(sgd(model), None),
            callbacks=[Steps()],
            **more,
        )
        resume = changed.get("resume_from_checkpoint")
        trainer.train(resume_from_checkpoint=resume and f"{given['output_dir']}/{resume}")
        logged = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
        rows = [
            [row.get(key, -1.0) for key in logged] for row in trainer.state.log_history if "train_runtime" not in row
        ]
        return weights(model), [
            *rows,
            *next(one for one in trainer.callback_handler.callbacks if type(one) is Steps).rows,
        ]

    class Configured(Net):
        config = transformers.PretrainedConfig()

    class Steps(transformers.TrainerCallback):
        """The sum of the weights at each call around the optimizer's step."""

        def __init__(self) -> None:
            self.rows: list[list[Any]] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.rows.append(["begin", state.global_step, sum(weights(more["model"]))])

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.rows.append(["stepped", state.global_step, sum(weights(more["model"]))])

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.rows.append(["end", state.global_step, sum(weights(more["model"]))])

    in_the_middle = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    cases: dict[str, dict[str, Any]] = {
        "in the middle": in_the_middle,
        "clipped": {"max_grad_norm": 0.5},
        "smoothed": {"label_smoothing_factor": 0.2, "model": Configured},
        "bfloat16": {"bf16": True},
        "best": {**in_the_middle, "load_best_model_at_end": True, "metric_for_best_model": "loss"},
    }

    def compared() -> dict[str, Any]:
        kinds = (transformers.Trainer, AlgorithmTrainer)
        rows = {name: [as_library(kind, name, **options) for kind in kinds] for name, options in cases.items()}
        resumed = {**in_the_middle, "resume_from_checkpoint": "checkpoint-4"}
        return rows | {"resumed": [as_library(kind, "in the middle", **resumed) for kind in kinds]}

    def failure() -> str:
        """One rank's loss raises an error in its third step."""

        class Failing(Seeing):
            def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], **more: Any) -> Any:
                if os.environ["RANK"] == "1" and len(self.seen) == 2:
                    raise ValueError("this batch cannot be used")
                return super().compute_loss(model, inputs, **more)

        given = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "remove_unused_columns": False}
        trainer = Failing(
            Net(),
            transformers.TrainingArguments(
                output_dir=str(folder / "fails"), per_device_train_batch_size=BATCH, **given
            ),
            train_dataset=Samples(),
            algorithm=ALGORITHMS["synchronous"],
            options={"timeout_s": 60},
        )
        try:
            trainer.train()
        except Exception as error:  # noqa: BLE001 - the test looks at any
            takes_steps = "step" not in vars(trainer.optimizer)
            return f"{type(error).__name__}: {error}; the optimizer takes steps again: {takes_steps}"
        return "no error"

    def refusal(algorithm: Algorithm = ALGORITHMS["synchronous"], **changed: Any) -> str:
        try:
            whole("refused", algorithm, **changed)
        except ConfigError as error:
            return str(error)
        return ""

    def train(name: str, options: dict[str, Any] | None, **arguments: Any) -> tuple[list[float], float]:
        model = Net()
        given = transformers.TrainingArguments(
            output_dir=str(folder / name),
            per_device_train_batch_size=BATCH,
            num_train_epochs=1,
            lr_scheduler_type="linear",
            max_grad_norm=0.5,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            **arguments,
        )
        trainer = transformers.Trainer(model, given, train_dataset=Samples(), optimizers=(sgd(model), None))
        callback = None if options is None else add_hook(trainer, **options)
        trainer.train()
        state = callback and callback.state
        return weights(model), state.bytes_sent if state else 0.0

    def train_bert(options: dict[str, Any] | None) -> tuple[list[float], float]:
        """A model of the library itself, of 3,000 numbers."""
        torch.manual_seed(0)
        shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        config = transformers.BertConfig(vocab_size=50, max_position_embeddings=16, num_labels=2, **shape)
        model = transformers.BertForSequenceClassification(config)
        generator = torch.Generator().manual_seed(1)
        words = torch.randint(50, (16, 7), generator=generator)
        data = [{"input_ids": row, "attention_mask": torch.ones(7), "labels": row[0] % 2} for row in words]
        given = transformers.TrainingArguments(
            output_dir=str(folder / "bert"),
            per_device_train_batch_size=2,
            max_steps=3,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
            gradient_accumulation_steps=2,
        )
        trainer = transformers.Trainer(model, given, train_dataset=data)
        callback = None if options is None else add_hook(trainer, **options)
        trainer.train()
        trainer.train()  # on the same wrapped model: the hook is registered once
        state = callback and callback.state
        return weights(model), state.bytes_sent if state else 0.0

    return {
        "plain": train("plain", None),
        "hook": train("hook", {}),
        "ring": train("ring", {"collective": Ring()}, gradient_accumulation_steps=2),
        "plain accumulated": train("plain", None, gradient_accumulation_steps=2),
        "codec": train("codec", {"codec": Truncate16()}),
        "bert plain": train_bert(None),
        "bert hook": train_bert({}),
        "whole": {name: against_by_hand(name, algorithm) for name, algorithm in ALGORITHMS.items()},
        "clipped": weights(
            whole(
                "clipped",
                ALGORITHMS["synchronous"],
                options={"keep_gradients": True},  # which no other code may apply again
                max_grad_norm=0.5,
                lr_scheduler_type="linear",
            ).model
        ),
        "unclipped": weights(
            whole("unclipped", ALGORITHMS["synchronous"], options={"clip_norm": None}, max_grad_norm=0.5).model
        ),
        "validated": {name: shown(name, ALGORITHMS[name]) for name in ("pipe", "local")},
        "best": best_kept(ALGORITHMS["pipe"]),
        "as ddp": compared(),
        "refused": {
            "accumulation": refusal(gradient_accumulation_steps=2),
            "clipping": refusal(ALGORITHMS["servers"], max_grad_norm=1.0),
            "dedicated": refusal(AsyncSGD(dedicated=True)),
            "batch size": refusal(auto_find_batch_size=True),
            "callback": refusal(callbacks=[type("Sees", (Steps,), {"on_pre_optimizer_step": Steps.on_step_end})()]),
            "step": refusal(kind=type("Steps", (Seeing,), {"training_step": lambda *_: None})),
        },
        "failed": failure(),  # last, because the ranks' connection may be gone
    }


# ---------------------------------------------------------------- Lightning


def lightning(folder: Path) -> dict[str, Any]:
    from workbench.adapters.lightning import (  # isort: skip  # before lightning: repairs torchvision
        GRADIENT_HOOKS,
        AlgorithmStrategy,
        HookStrategy,
    )
    import lightning as L
    from lightning.pytorch.callbacks import (
        BackboneFinetuning,
        EMAWeightAveraging,
        GradientAccumulationScheduler,
        LambdaCallback,
        ModelCheckpoint,
        StochasticWeightAveraging,
    )
    from lightning.pytorch.strategies import DDPStrategy

    class Module(L.LightningModule):
        def __init__(self, manual: bool = False) -> None:
            super().__init__()
            self.net = Net()
            self.automatic_optimization = not manual
            self.validated: list[list[float]] = []
            self.modes: list[bool] = []
            self.seen: list[dict[str, Tensor]] = []

        @property
        def backbone(self) -> nn.Module:
            return self.net.body[0]

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            self.modes.append(self.net.training)
            self.seen.append(batch)
            return self.net(**batch)["loss"]

        def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
            if index == 0 and not self.trainer.sanity_checking:
                self.validated.append(weights(self.net))
            assert not self.net.training

        def configure_optimizers(self) -> Any:
            optimizer = sgd(self.net)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    class Statistics(Module):
        """With BatchNorm, whose statistics an averaged model needs again."""

        def __init__(self, manual: bool = False) -> None:
            super().__init__(manual)
            self.net.body.insert(1, nn.BatchNorm1d(8, dtype=torch.float64))

    def train(
        strategy: DDPStrategy, epochs: int = 1, validate: bool = False, kind: type[Module] = Module, **options: Any
    ) -> Module:
        module = kind(options.pop("manual", False))
        ckpt_path = options.pop("ckpt_path", None)
        loader = DataLoader(Samples(), batch_size=BATCH, shuffle=False)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_epochs=epochs,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"enable_checkpointing": False, "limit_val_batches": 1 if validate else 0, **options},
        )
        trainer.fit(module, loader, loader if validate else None, ckpt_path=ckpt_path, weights_only=False)
        return module

    class CallsHooks(Module):
        """Notes the calls of its hooks, and warms up the learning rate."""

        def __init__(self, manual: bool = False) -> None:
            super().__init__(manual)
            self.calls: list[str] = []

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            self.calls.append("training_step")
            return super().training_step(batch, index)

        def on_before_backward(self, loss: Tensor) -> None:
            self.calls.append(f"on_before_backward {float(loss):.6f}")

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.calls.append(f"on_before_zero_grad {sum(weights(self.net)):.6f}")

        def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
            self.calls.append("optimizer_step")
            for group in optimizer.param_groups:
                group["lr"] = LR * min(1.0, (self.trainer.global_step + 1) / 4)
            optimizer.step(closure=closure)
            self.calls.append(f"stepped {sum(weights(self.net)):.6f}")

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            self.calls.append("lr_scheduler_step")
            scheduler.step()

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.calls.append(f"on_train_batch_end {float(outputs['loss']):.6f} {self.grad_sum()}")

        def grad_sum(self) -> str:
            grads = [param.grad for param in self.net.parameters()]
            return "none" if grads[0] is None else f"{sum(float(grad.sum()) for grad in grads):.6f}"

    class AccumulatesByHand(Module):
        """Steps every second batch, as the documentation of `optimizer_step` shows."""

        def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
            if index % 2:
                optimizer.step(closure=closure)
            else:
                closure()

    def overriding(owner: str, hook: str) -> dict[str, Any]:
        """Options of a training in which an object has this hook."""

        def own(self: Any, *given: Any, **more: Any) -> None:
            raise AssertionError("never called")

        if owner == "module":
            return {"kind": type("Overrides", (Module,), {hook: own})}
        callback = LambdaCallback(**{hook: own}) if owner == "lambda" else type("Sees", (L.Callback,), {hook: own})()
        return {"callbacks": [callback]}

    def hooks_of(strategy: Any, **options: Any) -> tuple[list[str], list[float]]:
        module = train(strategy, kind=CallsHooks, **options)
        return module.calls, weights(module.net)

    def trained(strategy: Any, **options: Any) -> list[float]:
        given = {name: value() if name == "callbacks" else value for name, value in options.items()}
        return weights(train(strategy, **given).net)

    def resumed(strategy: Any, name: str) -> list[float]:
        """One epoch, and a second one from its checkpoint."""
        path = folder / f"resumed-{name}-{type(strategy).__name__}"
        keeps = ModelCheckpoint(path, save_on_train_epoch_end=True)
        train(strategy, enable_checkpointing=True, callbacks=[keeps])
        path = next(path.glob("*.ckpt"))
        return weights(train(type(strategy)(*made[type(strategy)]), 2, ckpt_path=str(path)).net)

    made: dict[type, tuple[Any, ...]] = {DDPStrategy: (), AlgorithmStrategy: (SynchronousSGD(),)}
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "hooks": (hooks_of, {"validate": True, "val_check_interval": 2}),
        "clipped by norm": (trained, {"gradient_clip_val": 0.05}),
        "averaged": (
            trained,
            {"epochs": 4, "callbacks": lambda: [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)]},
        ),
        "moving average": (
            trained,
            {"epochs": 2, "validate": True, "callbacks": lambda: [EMAWeightAveraging(decay=0.5)]},
        ),
        "averaged with statistics": (
            trained,
            {
                "epochs": 3,
                "kind": Statistics,
                "validate": True,  # which clears gradients: Lightning would apply them once more in the last epoch
                "callbacks": lambda: [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)],
            },
        ),
        "bfloat16": (trained, {"precision": "bf16-mixed"}),
        "resumed": (resumed, {"name": "synchronous"}),
    }

    def hooked(**options: Any) -> tuple[list[float], float]:
        strategy = HookStrategy(**options)
        module = train(strategy)
        assert strategy.hook_state is not None
        return weights(module.net), strategy.hook_state.bytes_sent

    def refusal(algorithm: Algorithm = ALGORITHMS["synchronous"], **options: Any) -> str:
        try:
            train(AlgorithmStrategy(algorithm), **options)
        except ConfigError as error:
            return str(error)
        return ""

    found: dict[str, Any] = {
        "plain": (weights(train(DDPStrategy()).net), 0.0),
        "hook": hooked(),
        "ring": hooked(collective=Ring()),
        "codec": hooked(codec=Truncate16()),
        "refused": {
            "accumulation": refusal(accumulate_grad_batches=2),
            "clipping": refusal(gradient_clip_val=1.0, gradient_clip_algorithm="value"),
            "manual": refusal(manual=True),
            "dedicated": refusal(AsyncSGD(dedicated=True)),
            "scheduled": refusal(callbacks=[GradientAccumulationScheduler({1: 2})]),
            "accumulated by hand": refusal(kind=AccumulatesByHand),
            "unfrozen": refusal(callbacks=[BackboneFinetuning()]),
            "averaged": refusal(PipeSGD(width=2), callbacks=[StochasticWeightAveraging(swa_lrs=0.05)]),
            "moving average": refusal(LocalSGD(every=2), callbacks=[EMAWeightAveraging(decay=0.5)]),
            **{
                f"{owner} {hook}": refusal(**overriding(owner, hook))
                for owner, hooks in (
                    ("module", GRADIENT_HOOKS),
                    ("callback", ("on_after_backward", "on_before_optimizer_step")),
                    ("lambda", ("on_after_backward",)),
                )
                for hook in hooks
            },
        },
        "as ddp": {
            name: [
                run(strategy, **options)
                for strategy in (DDPStrategy(), AlgorithmStrategy(SynchronousSGD(), keep_gradients=name == "hooks"))
            ]
            for name, (run, options) in cases.items()
        },
        "whole": {},
        "validated": {},
    }
    for name, algorithm in ALGORITHMS.items():
        module = train(AlgorithmStrategy(algorithm))
        found["whole"][name] = (weights(module.net), train_by_hand(algorithm, module.seen))
    for name, algorithm in ALGORITHMS.items():
        keeps = ModelCheckpoint(folder / f"kept-{name}", save_top_k=-1, save_on_train_epoch_end=True)
        module = train(AlgorithmStrategy(algorithm), 2, True, enable_checkpointing=True, callbacks=[keeps])
        kept = torch.load(folder / f"kept-{name}" / "epoch=0-step=6.ckpt", weights_only=False)["state_dict"]
        first = weights(train(AlgorithmStrategy(algorithm)).net)
        found["validated"][name] = {
            "in validation": module.validated[0],
            "kept": torch.cat([value.reshape(-1) for value in kept.values()]).tolist(),
            "one epoch": first,
            "training": all(module.modes),
        }
    return found


LIBRARIES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "accelerate": accelerate,
    "huggingface": huggingface,
    "lightning": lightning,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    library, folder = sys.argv[1], Path(sys.argv[2])
    result = partial(LIBRARIES[library], folder)()
    (folder / f"{library}-{os.environ['RANK']}.json").write_text(json.dumps(result))
    from workbench.runtimes.rank.main import leave_world

    leave_world()
