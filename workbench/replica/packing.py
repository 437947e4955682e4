"""Parameters in the layout of a gradient, so that they can be sent and averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from workbench.gradients import CONTROL, WEIGHT, Gradient, Layout


@torch.no_grad()
def pack(
    parameters: Sequence[Tensor], layout: Layout, bucket: int | None, control: int, version: int, step: int = -1
) -> Gradient:
    """Copy the parameters of a bucket, or all, into a new gradient with tails of weight 1."""
    piece = None if bucket is None else layout.buckets[bucket]
    numel = layout.numel if piece is None else piece.stop - piece.start
    packed = Gradient(torch.empty(numel, dtype=layout.dtype, device=layout.device), layout, step, version, bucket)
    for part, _ in packed.slices():
        for slot in part.slots:
            packed.view(slot).copy_(parameters[slot.index])
        tail = packed.tail(part.index)
        tail.fill_(1.0)
        tail[CONTROL] = control
    return packed


@torch.no_grad()
def unpack(packed: Gradient, parameters: Sequence[Tensor]) -> int:
    """Overwrite parameters by packed ones, divided by their weight; return the control value that came with them."""
    control = 0
    for part, _ in packed.slices():
        tail = packed.tail(part.index).tolist()
        control = max(control, int(tail[CONTROL]))
        for slot in part.slots:
            value = packed.view(slot)
            parameters[slot.index].copy_(value if tail[WEIGHT] == 1.0 else value / tail[WEIGHT])
    return control


@final
class Average:
    """Exponential moving average of parameters, for evaluation: a[t] = decay a[t-1] + (1 - decay) w[t] for each update.

    w[t] are the parameters at the end of the step with update t, so they include what an algorithm writes after the
    optimizer, such as a mean over ranks or an outer step. If another update comes first, because a step has several, or
    if the run ends, they are the parameters just before that.

    Paper: chen2016revisiting, section 2 (decay 0.9999).
    """

    def __init__(self, parameters: Sequence[Tensor], decay: float) -> None:
        self._values = [param.detach().clone() for param in parameters]
        self._parameters = parameters
        self._decay = decay
        self._is_due = False  # an update is not yet in the average

    def note_update(self) -> None:
        """The parameters were updated. `catch_up` follows at the end of the step."""
        self._is_due = True

    @torch.no_grad()
    def catch_up(self) -> None:
        """Advance the average if an update is not yet in it."""
        if self._is_due:
            self._is_due = False
            torch._foreach_lerp_(self._values, [param.detach() for param in self._parameters], 1.0 - self._decay)

    @property
    def values(self) -> list[Tensor]:
        """The average of all updates until now."""
        self.catch_up()
        return self._values

    def state(self) -> list[Tensor]:
        """Return the state for a checkpoint."""
        return list(self.values)

    def load(self, state: Any) -> None:
        """Restore `state()`."""
        torch._foreach_copy_(self._values, list(state))
        self._is_due = False
