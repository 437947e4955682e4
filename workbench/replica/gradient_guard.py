"""Bad gradients: found on the rank that computes them, before they are sent, and reported by rank and parameter.

A gradient is bad if it is not finite, or if its norm is above `max_grad_norm`. A rank checks its own gradient, bucket
by bucket, when the bucket is final and before it is encoded or sent. One pass over the buffer is enough; a second one
follows only if something is wrong.

Ranks need no message to agree. A gradient that is left out is sent as zeros with weight 0 and no used parameter, as a
rank without samples sends it. It does not count in the sum, and replicas stay equal. Every rank also checks the sum
before it applies it: all ranks hold the same sum, so all make the same decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor

from workbench.errors import ConfigError, Diverged
from workbench.gradients import USED, WEIGHT, BucketSlice, Gradient, Slot
from workbench.replica.replica import Replica
from workbench.settings import Settings

MAX_NAMED = 3
SKIP_HINT = "on_bad_gradient='skip' leaves out a rank's whole gradient of such a step, with all its micro-batches"
NO_LABELS_HINT = (
    "a mean over no labels is NaN: divide the sum by max(number of labels, 1), and such a micro-batch adds nothing to "
    "the others"
)
MIN_SCALE = 1.0  # below this loss scale, a sum that is not finite is no 16-bit overflow


@final
class GradientGuard:
    """Checks one rank's gradients, and the sums that it applies.

    Args:
        replica: the rank's replica.
        policy: "stop" raises `Diverged`. "skip" leaves the gradient out. "clip" scales it to `max_norm`, or leaves it
            out if it is not finite.
        rank: the rank that errors name.
        max_norm: a larger global norm of the gradient (the mean over the rank's samples) is also bad. Buckets are then
            sent after backward.
        deferred: do not wait for the device. With any policy, a bad gradient is then left out, and reported later.
            None: True on a GPU.
    """

    def __init__(
        self, replica: Replica, policy: str, rank: int, max_norm: float | None = None, *, deferred: bool | None = None
    ) -> None:
        self.rank = rank
        self.whole = max_norm is not None
        self._replica = replica
        self._policy = policy
        self._max_norm = max_norm
        self._layout = replica.layout
        self._deferred_checks = self._layout.device.type == "cuda" if deferred is None else deferred
        self._found: list[GradientReport] = []
        self._step = 0
        self._left_out = False
        self._pending: DeferredCheck | None = None
        self._keeps_buffers = policy != "stop" or self._deferred_checks
        # their values before the forward pass: a bad batch would spoil BatchNorm's statistics
        self._kept: list[Tensor] = []

    def take_reports(self) -> tuple[GradientReport, ...]:
        """Return the reports since the last call."""
        found, self._found = tuple(self._found), []
        return found

    # -- one rank's own gradient -------------------------------------------------------------------------------

    def reports_overflow(self) -> bool:
        """Return whether a gradient that is not finite is a bad one, because the loss is, or the scale is too small.

        The loss scale then stays. On a GPU it waits for the loss.
        """
        bad_loss = self._left_out or (self._pending is not None and not bool(self._pending.ok))
        return bad_loss or self._checks_values

    @property
    def _checks_values(self) -> bool:
        """Return whether this rank's gradient must be finite.

        A loss scale handles an overflow: of the sum, or of this rank's gradient until the scale is too small.
        """
        replica = self._replica
        if replica.loss_scale is None:
            return True
        return replica.leaves_out_overflow and replica.loss_scale.value < MIN_SCALE

    def begin_step(self, step: int) -> None:
        """Prepare for the forward pass of a step."""
        self._step = step
        self._left_out = False
        self._kept = [buffer.clone() for buffer in self._replica.module_state.buffers] if self._keeps_buffers else []
        if self._deferred_checks:
            self._pending = DeferredCheck(self.rank, step, self._policy, self._layout.device, self._advice)
            self._found.append(self._pending)

    def check_loss(self, loss: Tensor) -> None:
        """Check the loss of a micro-batch, before its backward."""
        if self._pending is not None:
            self._pending.add_loss(loss.detach())
        elif not self._left_out and not math.isfinite(value := float(loss.detach())):
            self._report(
                f"loss {value}", f"the loss of rank {self.rank} is {value} at step {self._step}{self._cause(value)}"
            )

    def check_norm(self, gradient: Gradient, weight: float) -> None:
        """Check the norm of the gradient, if there is a limit. All parameters are final; no tail is written yet."""
        if self._max_norm is None or not weight or self._left_out:
            return
        norms = torch._foreach_norm([gradient.view(slot) for slot in self._layout.slots])
        norm = torch.linalg.vector_norm(torch.stack(norms)) / weight  # as in torch's `clip_grad_norm_`
        scale = torch.clamp(self._max_norm / (norm + 1e-6), max=1.0)
        if self._pending is not None:
            self._pending.norm = norm
            self._pending.too_large = norm > self._max_norm
            if self._policy == "clip":
                gradient.flat.mul_(torch.where(torch.isfinite(norm), scale, 1.0))
            else:
                self._pending.ok &= ~self._pending.too_large
            return
        value = float(norm)
        if value <= self._max_norm or not (self._checks_values or math.isfinite(value)):
            return
        if any(self._is_bad(gradient, piece) for piece in self._layout.buckets):
            return
        if self._policy == "clip" and math.isfinite(value):
            gradient.flat.mul_(scale)
            self._found.append(GradientFault(self.rank, "norm", value))
            return
        largest = max(self._layout.slots, key=lambda slot: float(gradient.view(slot).norm()))
        fault = f"norm {value:g}, above {self._max_norm:g}, largest in {largest.name}"
        self._report(fault, f"the gradient of rank {self.rank} at step {self._step} has {fault} (max_grad_norm)")

    def check_bucket(self, gradient: Gradient, bucket: int) -> None:
        """Check a bucket before it is sent; its tail is written.

        From the first bad bucket on, buckets become zeros with weight 0.
        """
        piece = self._layout.buckets[bucket]
        body, tail = self._body(gradient, piece), gradient.flat[piece.tail : piece.stop]
        if self._pending is not None:
            if self._checks_values:
                self._pending.add_bucket(piece, [gradient.view(slot) for slot in piece.slots])
            self._mask(body, tail, self._pending.ok)
            return
        if self._left_out or self._is_bad(gradient, piece):
            body.zero_()
            tail[WEIGHT], tail[USED:] = 0.0, 0.0

    def restore_buffers(self) -> None:
        """Restore the buffers if the gradient was left out. Call it after backward, which may need their new values."""
        if not self._kept or (self._pending is None and not self._left_out):
            return
        for buffer, kept in zip(self._replica.module_state.buffers, self._kept, strict=True):
            buffer.copy_(kept if self._pending is None else torch.where(self._pending.ok, buffer, kept))

    def is_plain(self, flat: Tensor, loss: float, share: float) -> bool:
        """Return whether a gradient with zero tails, computed elsewhere (`simulator.lockstep`), is good."""
        if not math.isfinite(loss) or (self._checks_values and not _is_finite(flat)):
            return False
        return self._max_norm is None or not share or float(flat.norm()) / share <= self._max_norm * (1 - 1e-3)

    def _is_bad(self, gradient: Gradient, piece: BucketSlice) -> bool:
        """Return whether a bucket's parameters are not finite, and report it."""
        if not self._checks_values or _is_finite(self._body(gradient, piece)):
            return False
        where = _where(gradient, piece.slots)
        fault = f"the gradient of rank {self.rank} is not finite at step {self._step}: {where}"
        scale = self._replica.loss_scale
        self._report(where, fault if scale is None else f"{fault}. {_fallen(scale.value)}")
        return True

    def _body(self, gradient: Gradient, piece: BucketSlice) -> Tensor:
        return gradient.flat[piece.start : piece.tail]

    def _mask(self, body: Tensor, tail: Tensor, ok: Tensor) -> None:
        body.masked_fill_(~ok, 0.0)
        tail[WEIGHT].masked_fill_(~ok, 0.0)
        tail[USED:].masked_fill_(~ok, 0.0)

    def _report(self, found: str, fault: str) -> None:
        """Raise for the policy "stop"; otherwise leave this gradient out."""
        if self._policy == "stop":
            raise Diverged(f"{fault}. {self._advice()}; {SKIP_HINT}")
        self._left_out = True
        broken = self._broken()
        if broken:
            raise Diverged(
                f"{fault}, and so are its parameters ({broken[0]}): leaving gradients out does not help. "
                f"{self._advice()}"
            )
        self._found.append(GradientFault(self.rank, found))

    def _broken(self) -> list[str]:
        """Names of parameters that are not finite."""
        pairs = zip(self._layout.slots, self._replica.parameters, strict=True)
        return [slot.name for slot, param in pairs if not _is_finite(param.detach())]

    def _cause(self, loss: float) -> str:
        broken = self._broken()
        if not broken:
            hint = f"; {NO_LABELS_HINT}" if math.isnan(loss) else ""
            return f" (its parameters are finite: check its batch, and the loss{hint})"
        return f" (its parameters are not finite: {named(broken)})"

    def _advice(self) -> str:
        lr = self._replica.lr
        return (
            f"Training diverged: lower the learning rate (now {lr:g}), clip gradients (clip_norm=1.0), or use "
            "less delay or momentum"
        )

    # -- what is applied ---------------------------------------------------------------------------------------

    def accepts_sum(self, gradient: Gradient) -> bool:
        """Return whether a sum is finite. All ranks hold the same sum, so all make the same decision.

        With a loss scale, the scale handles an overflow, unless it is too small to cause one. On a server it does not:
        each worker has left out its own.
        """
        scale = None if self._replica.leaves_out_overflow else self._replica.loss_scale
        others = self._deferred_checks if scale is None else scale.value >= MIN_SCALE
        if others:  # the loss scale decides, or a check would wait for the device
            return True
        why = "Each rank's gradient was finite, so the sum overflowed" if scale is None else _fallen(scale.value)
        for piece, flat in gradient.slices():
            if not _is_finite(flat[: piece.tail - piece.start]):
                where = _where(gradient, piece.slots)
                if self._policy == "stop":
                    fault = (
                        f"the sum of gradients that rank {self.rank} applies, of step {gradient.step}, is not "
                        f"finite: {where}"
                    )
                    raise Diverged(f"{fault}. {why}. {self._advice()}")
                self._found.append(GradientFault(self.rank, f"{where} of the sum"))
                return False
        return True


def guard_of(replica: Replica, settings: Settings, rank: int) -> GradientGuard | None:
    """Return the guard of a run's settings; None if gradients are not checked."""
    if settings.on_bad_gradient == "ignore":
        return None
    return GradientGuard(replica, settings.on_bad_gradient, rank, settings.max_grad_norm)


def _fallen(scale: float) -> str:
    return f"The loss scale has fallen to {scale:g} because of it"


def _is_finite(values: Tensor) -> bool:
    """Return whether all values are finite.

    If their sum is finite, they are; otherwise the sum may only be too large, so look at each.
    """
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def _where(gradient: Gradient, slots: Sequence[Slot]) -> str:
    """Describe which gradients are not finite: "nan in 3 of 42 values of 0.weight"."""
    found = []
    for slot in slots:
        view = gradient.view(slot)
        number = int((~torch.isfinite(view)).sum())
        if number:
            found.append(
                f"{'nan' if bool(torch.isnan(view).any()) else 'inf'} in {number} of {slot.numel} values of {slot.name}"
            )
    return named(found)


class GradientReport(Protocol):
    """A check of a gradient. On a GPU its result is known when the device has finished."""

    @property
    def rank(self) -> int:
        """The rank whose gradient it is."""

    def read(self) -> GradientFault | None:
        """Return the fault; None if the gradient is good. Raises `Diverged` if the run must stop."""


@final
@dataclass(frozen=True, slots=True)
class GradientFault:
    """What was wrong with a gradient, and whether it was clipped or left out.

    Attributes:
        description: what is wrong, and the parameter: "nan in 0.weight".
        norm: its global norm, if it was clipped; None if it was left out.
    """

    rank: int
    description: str
    norm: float | None = None

    def read(self) -> GradientFault:
        return self


@final
class DeferredCheck:
    """A check that runs on the device. Its result is read later."""

    def __init__(self, rank: int, step: int, policy: str, device: torch.device, advice: Callable[[], str]) -> None:
        self.rank = rank
        self._step = step
        self._policy = policy
        self._advice = advice
        self.ok = torch.ones((), dtype=torch.bool, device=device)
        self.too_large = torch.zeros((), dtype=torch.bool, device=device)
        self.norm: Tensor | None = None
        self._losses: list[Tensor] = []
        # for each bucket, the largest absolute value of each parameter
        self._largest: list[tuple[BucketSlice, Tensor]] = []

    def add_loss(self, loss: Tensor) -> None:
        """Include the loss of a micro-batch."""
        self._losses.append(loss)
        self.ok &= torch.isfinite(loss)

    def add_bucket(self, piece: BucketSlice, views: list[Tensor]) -> None:
        """Include a bucket's parameters."""
        largest = torch.stack(torch._foreach_norm(views, math.inf))
        self._largest.append((piece, largest))
        self.ok &= torch.isfinite(largest).all()

    def read(self) -> GradientFault | None:
        if bool(self.ok):
            return (
                GradientFault(self.rank, "norm", float(self.norm))
                if self.norm is not None and bool(self.too_large)
                else None
            )
        fault = self._find_fault()
        if self._policy == "stop":
            raise Diverged(
                f"the gradient of rank {self.rank} at step {self._step} cannot be used: {fault}. {self._advice()}; "
                f"{SKIP_HINT}"
            )
        return GradientFault(self.rank, fault)

    def _find_fault(self) -> str:
        bad = next((value for loss in self._losses if not math.isfinite(value := float(loss))), None)
        if bad is not None:
            return f"loss {bad}"
        for piece, largest in self._largest:
            values = largest.tolist()
            bad_ones = [
                f"{value} in {slot.name}"
                for slot, value in zip(piece.slots, values, strict=True)
                if not math.isfinite(value)
            ]
            if bad_ones:
                return named(bad_ones)
        assert self.norm is not None, "a good gradient was left out"
        return f"norm {float(self.norm):g}, above max_grad_norm"


def entries_of(found: Sequence[GradientReport], loss: float | None) -> dict[str, Any]:
    """Return entries of a metrics row: the loss (None if a bad gradient explains it), and what was skipped or clipped.

    Raises:
        Diverged: the run must stop.
    """
    faults = [fault for item in found if (fault := item.read()) is not None]
    skipped = [fault.description for fault in faults if fault.norm is None]
    clipped = [fault.norm for fault in faults if fault.norm is not None]
    entries: dict[str, Any] = {"loss": None if skipped and loss is not None and not math.isfinite(loss) else loss}
    if skipped:
        entries["skipped"] = "; ".join(skipped)
    if clipped:
        entries["clipped"] = clipped[-1]
    return entries


@final
class LossWatch:
    """Ends a run if a loss is not finite, or too large compared with the first one.

    Args:
        ratio: largest allowed loss divided by the rank's first loss; None for no limit.
        lr: the current learning rate, for the message.
    """

    def __init__(self, ratio: float | None, lr: Callable[[], float]) -> None:
        self._ratio = ratio
        self._lr = lr
        self._first: dict[int, float] = {}  # rank -> its first loss

    def first(self, rank: int) -> float | None:
        """Return the first loss of a rank, if there was one."""
        return self._first.get(rank)

    def begin(self, rank: int, first: float | None) -> None:
        """Set the first loss of a rank that has a new number, or that continues another rank's part."""
        self._first = {} if first is None else {rank: first}

    def check(self, value: float | None, step: int, rank: int) -> None:
        """Raise `Diverged` if a rank's loss is not finite, or too large."""
        if value is None:
            return
        advice = (
            f"Lower the learning rate (now {self._lr():g}), clip gradients (clip_norm=1.0), or use less delay or "
            "momentum"
        )
        if not math.isfinite(value):
            raise Diverged(f"the loss of rank {rank} is {value} at step {step}: training diverged. {advice}")
        if self._ratio is None:
            return
        first = self._first.setdefault(rank, value)
        if first <= 0:
            raise ConfigError(
                f"divergence_ratio={self._ratio:g} needs a first loss above 0, and that of rank {rank} is {first:g}: "
                "leave divergence_ratio out"
            )
        if value > self._ratio * first:
            raise Diverged(
                f"the loss of rank {rank} is {value:g} at step {step}, more than {self._ratio:g} times its first loss "
                f"{first:g} "
                f"(divergence_ratio): training diverged. {advice}"
            )


def named(names: Sequence[str]) -> str:
    """Return the first few names, and the number of the remaining ones."""
    more = f", and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
