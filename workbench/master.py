"""A server's copy of the parameters, with an optimizer of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import Tensor, nn

from workbench.gradients import CONTROL, USED, WEIGHT, Gradient, Layout
from workbench.packing import Average, pack
from workbench.settings import ScheduleFactory
from workbench.updater import Updater


@final
class Master:
    """Parameters that gradients are applied to but never taken at: a worker may compute beside it with those it has read.

    Made as a copy of a replica's parameters. A server updates the buckets it owns; the optimizer keeps state of those alone.

    Args:
        parameters: the replica's, in the layout's order.
        make_optimizer: parameters -> optimizer.
        schedule: made for the optimizer; advanced at each update of the bucket that was updated first.
        ema_decay: keep an exponential moving average for evaluation.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        layout: Layout,
        make_optimizer: Callable[[list[nn.Parameter]], Any],
        *,
        schedule: ScheduleFactory | None = None,
        ema_decay: float | None = None,
    ) -> None:
        self.layout = layout
        self.parameters = [nn.Parameter(param.detach().clone()) for param in parameters]
        self.updater = Updater(make_optimizer(self.parameters), self.parameters, layout, schedule=schedule, clip_norm=None)
        self.updates = [0] * len(layout.buckets)
        self.control_seen = 0
        self.average = Average(self.parameters, ema_decay) if ema_decay is not None else None
        self._clock: int | None = None  # the bucket whose updates the schedule counts

    @property
    def lr(self) -> float:
        return float(self.updater.optimizer.param_groups[0]["lr"])

    def apply(self, gradient: Gradient, lr_scale: float) -> int:
        """One optimizer step with a sum of shares; returns the largest staleness of what was summed, by the gradient's version."""
        buckets = range(len(self.updates)) if gradient.bucket is None else (gradient.bucket,)
        staleness = max(self.updates[bucket] for bucket in buckets) - gradient.version
        touched = []
        for part, flat in gradient.slices():
            tail = gradient.tail(part.index).tolist()
            self.control_seen = max(self.control_seen, int(tail[CONTROL]))
            if tail[WEIGHT] > 0:
                flat.div_(tail[WEIGHT])  # sum of shares -> mean over the samples that were there
            for slot, num_users in zip(part.slots, tail[USED:], strict=True):
                param = self.parameters[slot.index]
                param.grad = gradient.view(slot).to(param.dtype) if num_users > 0 else None
                touched.append(param)
        self.updater.step(gradient.bucket, lr_scale)
        for param in touched:
            param.grad = None
        for bucket in buckets:
            self.updates[bucket] += 1
        self._clock = buckets[0] if self._clock is None else self._clock
        if self._clock in buckets:
            self.updater.advance_schedule()
            if self.average is not None:
                self.average.update()
        return staleness

    def pack(self, bucket: int | None) -> Gradient:
        """The parameters as they are now; the word of control that gradients brought goes with them."""
        return pack(self.parameters, self.layout, bucket, self.control_seen, max(self.updates) if bucket is None else self.updates[bucket])

    def state(self) -> dict[str, Any]:
        """All that a resumed server needs."""
        kept = {"parameters": [param.detach() for param in self.parameters], **self.updater.state(), "updates": list(self.updates)}
        return {**kept, "clock": self._clock, "average": self.average.state() if self.average else None}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state()`."""
        for param, value in zip(self.parameters, state["parameters"], strict=True):
            param.data.copy_(value)
        self.updater.load(state)
        self.updates, self._clock = list(state["updates"]), state["clock"]
        if self.average is not None and state["average"] is not None:
            self.average.load(state["average"])
