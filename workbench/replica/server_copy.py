"""A server's copy of the parameters, with its own optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, final

from torch import Tensor, nn

from workbench.gradients import CONTROL, USED, WEIGHT, Gradient, Layout
from workbench.replica.backward import GradientGuard
from workbench.replica.optimizer_step import OptimizerWrapper
from workbench.replica.packing import Average, pack
from workbench.replica.served_optimizer import SentSettings
from workbench.settings import ScheduleFactory


@final
class ServerCopy:
    """A server's parameters. Gradients are applied to them, but computed at a worker's replica.

    They begin as a copy of a replica's parameters. Each bucket has its own optimizer, because two shards on one rank
    may have had different numbers of updates, and so be at different places of the schedule.

    Args:
        parameters: the replica's parameters, in the layout's order.
        make_optimizer: parameters -> optimizer.
        schedule: made for each bucket's optimizer; it advances at each update of the bucket.
        ema_decay: keep an exponential moving average for evaluation, with one bucket for all parameters; it advances
            at each update.
        settings: update with the settings in the tails of gradients; None: with those of the optimizers.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        layout: Layout,
        make_optimizer: Callable[[list[nn.Parameter]], Any],
        *,
        schedule: ScheduleFactory | None = None,
        ema_decay: float | None = None,
        settings: SentSettings | None = None,
    ) -> None:
        self.layout = layout
        self.parameters = [nn.Parameter(param.detach().clone()) for param in parameters]
        self._make_optimizer = make_optimizer
        self._schedule = schedule
        self._settings = settings
        self._sent: dict[int, list[float]] = {}  # bucket -> settings in its last gradient
        self._optimizers: dict[int, OptimizerWrapper] = {}  # bucket -> its optimizer, made at its first update
        self.updates = [0] * len(layout.buckets)
        # Steps of the run that the updates complete: see `runtimes.execution.evaluation_schedule`
        self.progress = [0.0] * len(layout.buckets)
        self.control_seen = 0
        self._lr: float | None = None  # set during the run
        self.guard: GradientGuard | None = None  # checks sums before they are applied
        self._updating = Lock()  # a server updates on its own thread
        self.average = Average(self.parameters, ema_decay) if ema_decay is not None else None

    @property
    def lr(self) -> float:
        made = [wrapper.optimizer for wrapper in list(self._optimizers.values())]
        if not made and self._lr is not None:
            return self._lr
        return float((made or [self._make_optimizer(self.parameters)])[0].param_groups[0]["lr"])

    @property
    def used_lr(self) -> float | None:
        """The first group's learning rate in this server's last update; None before the first."""
        used = [wrapper.used_lr for wrapper in list(self._optimizers.values()) if wrapper.used_lr is not None]
        return float(used[0]) if used else None

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of later updates: see `OptimizerWrapper.set_lr`."""
        self._lr = lr
        for wrapper in self._optimizers.values():
            wrapper.set_lr(lr)

    def _optimizer(self, bucket: int) -> OptimizerWrapper:
        if bucket not in self._optimizers:
            optimizer = self._make_optimizer(self.parameters)  # keeps state only for parameters that it updates
            self._optimizers[bucket] = OptimizerWrapper(
                optimizer, self.parameters, self.layout, schedule=self._schedule, clip_norm=None
            )
            if self._lr is not None:
                self._optimizers[bucket].set_lr(self._lr)
        return self._optimizers[bucket]

    def apply(self, gradient: Gradient, lr_scale: float) -> int:
        """Take one optimizer step with a sum of shares; return its largest staleness, by the gradient's version."""
        with self._updating:
            return self._apply(gradient, lr_scale)

    def evaluated(self) -> list[Tensor]:
        """Return a copy of the parameters to evaluate: the averages if they are kept. Safe while a server updates."""
        with self._updating:
            values = self.average.values if self.average is not None else self.parameters
            return [value.detach().clone() for value in values]

    def evaluated_shard(self, bucket: int) -> dict[int, Tensor]:
        """Return the same for one shard: parameter number -> copy."""
        with self._updating:
            values = self.average.values if self.average is not None else self.parameters
            return {slot.index: values[slot.index].detach().clone() for slot in self.layout.buckets[bucket].slots}

    def _apply(self, gradient: Gradient, lr_scale: float) -> int:
        buckets = range(len(self.updates)) if gradient.bucket is None else (gradient.bucket,)
        staleness = max(self.updates[bucket] for bucket in buckets) - gradient.version
        touched, accepted = [], self.guard is None or self.guard.accepts_sum(gradient)
        for part, flat in gradient.slices():
            tail = gradient.tail(part.index).tolist()
            self.control_seen = max(self.control_seen, int(tail[CONTROL]))
            if tail[WEIGHT] > 0:
                flat.div_(tail[WEIGHT])  # sum of shares -> mean over the contributing samples
            num_settings = self.layout.num_settings
            if self._settings is not None and tail[WEIGHT] > 0:
                sent = [number / tail[WEIGHT] for number in tail[len(tail) - num_settings :]]
                optimizer = self._optimizer(part.index).optimizer
                self._sent[part.index] = self._settings.set(optimizer, sent, self._sent.get(part.index))
            for slot, num_users in zip(part.slots, tail[USED : len(tail) - num_settings], strict=True):
                param = self.parameters[slot.index]
                param.grad = gradient.view(slot).to(param.dtype) if num_users > 0 else None
                touched.append(param)
        for bucket in buckets:
            if accepted:
                self._optimizer(bucket).step(bucket, lr_scale)
            self._optimizer(bucket).advance_schedule()
            self.updates[bucket] += 1
        for param in touched:
            param.grad = None
        if self.average is not None:
            self.average.note_update()
            self.average.catch_up()
        return staleness

    def pack(self, bucket: int | None) -> Gradient:
        """Return the present parameters, with the control value that gradients brought."""
        return pack(
            self.parameters,
            self.layout,
            bucket,
            self.control_seen,
            max(self.updates) if bucket is None else self.updates[bucket],
        )

    def state(self) -> dict[str, Any]:
        """Return all state that a resumed server needs."""
        optimizers = {bucket: wrapper.state() for bucket, wrapper in self._optimizers.items()}
        kept: dict[str, Any] = {
            "parameters": [param.detach() for param in self.parameters],
            "optimizers": optimizers,
            "updates": list(self.updates),
        }
        kept["progress"] = list(self.progress)
        kept["sent"] = dict(self._sent)
        return {**kept, "average": self.average.state() if self.average else None}

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state()`."""
        for param, value in zip(self.parameters, state["parameters"], strict=True):
            param.data.copy_(value)
        for bucket, kept in state["optimizers"].items():
            self._optimizer(bucket).load(kept)
        self._sent = {bucket: list(sent) for bucket, sent in state.get("sent", {}).items()}
        self.updates = list(state["updates"])
        self.progress = [float(number) for number in state.get("progress", self.updates)]
        if self.average is not None and state["average"] is not None:
            self.average.load(state["average"])
