"""Gradients that cannot be used: found where they are computed, before anything of them is sent, and named by rank and parameter.

A rank looks at its own gradient, bucket by bucket, when it is final and before it is encoded or sent: once through the buffer, and more
closely only where something is wrong. What is then done needs no word with the others. A gradient that is left out travels as zeros
of weight 0 that used no parameter, which is what a rank without samples sends: it counts nothing in the sum, and replicas stay equal.
The sum, which all ranks hold alike, is looked at once more before it is applied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from workbench.errors import Diverged
from workbench.gradients import USED, WEIGHT, BucketSlice, Gradient, Slot
from workbench.replica.gradient_report import LEFT_OUT, DeferredCheck, Finding, GradientReport, named
from workbench.replica.replica import Replica
from workbench.settings import Settings

LEAST_SCALE = 1.0  # of a loss: an overflow of 16 bits that even this one does not end is none


@final
class GradientGuard:
    """Looks at one rank's gradients, and at the sums that it applies.

    Args:
        replica: whose.
        policy: "stop" raises `Diverged`, "skip" leaves the gradient out, "clip" scales it to `max_norm` where it is finite, and leaves it
            out where it is not.
        rank: of whom errors speak.
        max_norm: a gradient (the mean over the rank's samples) of a larger global norm is a bad one too; the whole of it must then be
            known before any bucket leaves.
        lagging: do not wait for the device: a bad gradient is left out whatever the policy, and told when it is read.
    """

    def __init__(self, replica: Replica, policy: str, rank: int, max_norm: float | None = None, *, lagging: bool | None = None) -> None:
        self.rank = rank
        self.whole = max_norm is not None
        self._replica, self._policy, self._max_norm = replica, policy, max_norm
        self._layout = replica.layout
        self._lagging = self._layout.device.type == "cuda" if lagging is None else lagging
        self._scaled = replica.loss_scale is not None  # an overflow is then what the loss scale waits for
        self._found: list[GradientReport] = []
        self._step = 0
        self._left_out = False
        self._suspect: DeferredCheck | None = None
        self._buffers = replica.float_buffers() if policy != "stop" or self._lagging else []
        self._kept: list[Tensor] = []  # what they held before the forward pass: BatchNorm's statistics take in what is wrong with a batch

    def take(self) -> tuple[GradientReport, ...]:
        """What was found since the last time."""
        found, self._found = tuple(self._found), []
        return found

    # -- one rank's own gradient -------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """A forward pass of that step comes."""
        self._step, self._left_out = step, False
        self._kept = [buffer.clone() for buffer in self._buffers]
        if self._lagging:
            self._suspect = DeferredCheck(self.rank, step, self._policy, self._layout.device, self._advice)
            self._found.append(self._suspect)

    def hear(self, loss: Tensor) -> None:
        """A micro-batch's loss, before its backward."""
        if self._suspect is not None:
            self._suspect.hear(loss.detach())
        elif not self._left_out and not math.isfinite(value := float(loss.detach())):
            self._report(f"loss {value}", f"the loss of rank {self.rank} is {value} at step {self._step}{self._cause()}")

    def measure(self, gradient: Gradient, weight: float) -> None:
        """Where the whole must be known: its norm; all of its parameters are final, and its tails are not written yet."""
        if self._max_norm is None or not weight or self._left_out:
            return
        norms = torch._foreach_norm([gradient.view(slot) for slot in self._layout.slots])
        norm = torch.linalg.vector_norm(torch.stack(norms)) / weight  # as torch's `clip_grad_norm_` takes it
        scale = torch.clamp(self._max_norm / (norm + 1e-6), max=1.0)
        if self._suspect is not None:
            self._suspect.norm, self._suspect.too_large = norm, norm > self._max_norm
            if self._policy == "clip":
                gradient.flat.mul_(torch.where(torch.isfinite(norm), scale, 1.0))
            else:
                self._suspect.ok &= ~self._suspect.too_large
            return
        value = float(norm)
        if value <= self._max_norm or (self._scaled and not math.isfinite(value)):
            return
        if any(self._is_bad(gradient, piece) for piece in self._layout.buckets):
            return
        if self._policy == "clip" and math.isfinite(value):
            gradient.flat.mul_(scale)
            self._found.append(Finding(self.rank, "norm", value))
            return
        largest = max(self._layout.slots, key=lambda slot: float(gradient.view(slot).norm()))
        words = f"norm {value:g}, above {self._max_norm:g}, the most of it in {largest.name}"
        self._report(words, f"the gradient of rank {self.rank} has at step {self._step} a {words} (max_grad_norm)")

    def look(self, gradient: Gradient, bucket: int) -> None:
        """A bucket that is about to leave, its tail written: it, and those behind it, count nothing from the first bad one on."""
        piece = self._layout.buckets[bucket]
        body, tail = self._body(gradient, piece), gradient.flat[piece.tail : piece.stop]
        if self._suspect is not None:
            if not self._scaled:
                self._suspect.look(piece, [gradient.view(slot) for slot in piece.slots])
            self._mask(body, tail, self._suspect.ok)
            return
        if self._left_out or self._is_bad(gradient, piece):
            body.zero_()
            tail[WEIGHT], tail[USED:] = 0.0, 0.0

    def end(self) -> None:
        """Of a gradient that was left out put back what the forward pass took in; backward may have needed it until now."""
        if self._suspect is None and not self._left_out:
            return
        for buffer, kept in zip(self._buffers, self._kept, strict=True):
            buffer.copy_(kept if self._suspect is None else torch.where(self._suspect.ok, buffer, kept))

    def is_plain(self, flat: Tensor, loss: float, share: float) -> bool:
        """Whether nothing is wrong with this gradient, of zero tails, that was computed elsewhere (`simulator.lockstep`)."""
        if not math.isfinite(loss) or not (self._scaled or _is_finite(flat)):
            return False
        return self._max_norm is None or not share or float(flat.norm()) / share <= self._max_norm * (1 - 1e-3)

    def _is_bad(self, gradient: Gradient, piece: BucketSlice) -> bool:
        """Whether a bucket's parameters are not finite, which is then reported."""
        if self._scaled or _is_finite(self._body(gradient, piece)):
            return False
        where = _where(gradient, piece.slots)
        self._report(where, f"the gradient of rank {self.rank} is not finite at step {self._step}: {where}")
        return True

    def _body(self, gradient: Gradient, piece: BucketSlice) -> Tensor:
        return gradient.flat[piece.start : piece.tail]

    def _mask(self, body: Tensor, tail: Tensor, ok: Tensor) -> None:
        body.masked_fill_(~ok, 0.0)
        tail[WEIGHT].masked_fill_(~ok, 0.0)
        tail[USED:].masked_fill_(~ok, 0.0)

    def _report(self, found: str, words: str) -> None:
        """Stop, or leave this gradient out."""
        if self._policy == "stop":
            raise Diverged(f"{words}. {self._advice()}; {LEFT_OUT}")
        self._left_out = True
        broken = self._broken()
        if broken:
            raise Diverged(f"{words}, and so are its parameters ({broken[0]}): to leave gradients out helps no more. {self._advice()}")
        self._found.append(Finding(self.rank, found))

    def _broken(self) -> list[str]:
        """Names of parameters that are not finite."""
        pairs = zip(self._layout.slots, self._replica.parameters, strict=True)
        return [slot.name for slot, param in pairs if not _is_finite(param.detach())]

    def _cause(self) -> str:
        broken = self._broken()
        if not broken:
            return " (its parameters are finite: look at its batch, and at the loss)"
        return f" (its parameters are not finite any more: {named(broken)})"

    def _advice(self) -> str:
        lr = self._replica.lr
        return f"Training diverged: lower the learning rate (now {lr:g}), clip gradients (clip_norm=1.0), or use less delay or momentum"

    # -- what is applied ---------------------------------------------------------------------------------------

    def accepts(self, gradient: Gradient) -> bool:
        """Whether a sum is finite, which each rank's part of it was; all ranks hold the same sum, so all decide alike.

        With a loss scale that is the scale's to say, until it has fallen so far that it cannot be what is wrong.
        """
        scale = self._replica.loss_scale
        others = self._lagging if scale is None else scale.value >= LEAST_SCALE
        if others:  # look, or nobody can without waiting for the device
            return True
        why = (
            "Each rank's own was, so it overflowed on the way"
            if scale is None
            else f"The loss scale has fallen to {scale.value:g} because of it"
        )
        for piece, flat in gradient.slices():
            if not _is_finite(flat[: piece.tail - piece.start]):
                where = _where(gradient, piece.slots)
                if self._policy == "stop":
                    words = f"the sum of gradients that rank {self.rank} applies, of step {gradient.step}, is not finite: {where}"
                    raise Diverged(f"{words}. {why}. {self._advice()}")
                self._found.append(Finding(self.rank, f"{where} of the sum"))
                return False
        return True


def guard_of(replica: Replica, settings: Settings, rank: int) -> GradientGuard | None:
    """That of a run's settings; None where nobody looks."""
    if settings.on_bad_gradient == "ignore":
        return None
    return GradientGuard(replica, settings.on_bad_gradient, rank, settings.max_grad_norm)


def _is_finite(values: Tensor) -> bool:
    """Whether all are: a sum of which one is not is not finite, and one that is not may only be too large."""
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def _where(gradient: Gradient, slots: Sequence[Slot]) -> str:
    """What of these parameters' gradients is not finite: "nan in 3 of 42 values of 0.weight"."""
    found = []
    for slot in slots:
        view = gradient.view(slot)
        number = int((~torch.isfinite(view)).sum())
        if number:
            found.append(f"{'nan' if bool(torch.isnan(view).any()) else 'inf'} in {number} of {slot.numel} values of {slot.name}")
    return named(found)
