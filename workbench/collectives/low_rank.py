"""PowerSGD: sends each matrix of a gradient as the product of two thin matrices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import final

import torch
from torch import Tensor

from workbench.arguments import check_flag, check_whole
from workbench.codecs.feedback import add_share
from workbench.collectives.base import Collective, Native
from workbench.collectives.memory import LOW_RANK_RESIDUAL, count_sum, outcome_of, remember_weight, share_of, spans_of
from workbench.collectives.once import check_inner
from workbench.errors import ConfigError
from workbench.gradients import BucketSlice, Gradient, Layout, Slot
from workbench.ops import AllReduce, Local, Program, Value
from workbench.program import Context
from workbench.rng import derive_seed


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PowerSGD(Collective):
    """Sums two thin factors of each matrix M_i = g_i + e_i (n x m) of rank i, with Q (m x r) of the step before:

        P = orth(sum_i M_i orth(Q));   Q_i = M_i^T P,  Q = sum_i Q_i;   sum_i M_i ~ P Q^T;   e_i = M_i - P Q_i^T

    This is one step of power iteration, warm-started: (n + m) r numbers instead of n m. A tensor with more dimensions
    is the matrix (first, rest). Tensors that would not get smaller (biases, thin matrices) are summed uncompressed, in
    one message with P and the tail. `alternate` sends one factor a step, in turns, in one message:

        even t:  P = sum_i M_i orth(Q),  sum_i M_i ~ P orth(Q)^T;      odd t:  Q = sum_i M_i^T orth(P),  sum_i M_i ~ orth(P) Q^T

    orth is Householder QR: a zero or rank-deficient factor has a basis too. A sum of rank r or less is exact (with
    `alternate` and a constant sum, each pair of an even and an odd step is). `ctx.memory` keeps Q, P and e_i by
    parameter. A NaN or an infinity reaches every rank, and is not kept. e_i is the loss of this rank's own M_i, not an
    equal share of the loss of the sum. The sum over the ranks is the same, but equal shares would grow without limit if
    the ranks' gradients differ. Residuals are in units of the applied mean (`collectives.memory`). With `alternate`, t
    counts the sums of a bucket, not steps.

    Attributes:
        rank: r, number of columns of the factors, at most a matrix's smaller side; more lose less and send more.
        alternate: send one of the two factors in a step, in turns (ACP-SGD); needs error feedback.
        error_feedback: add what a step loses to the next gradient; otherwise it is lost.
        start_step: number of uncompressed steps at the beginning of the run.
        inner: sums the factors; lossless.

    Paper: vogels2019powersgd, algorithms 1 and 2; zhang2023acpsgd (alternate).
    """

    rank: int = 2
    alternate: bool = False
    error_feedback: bool = True
    start_step: int = 0
    inner: Collective = Native()

    def __post_init__(self) -> None:
        check_whole("rank", self.rank, 1)
        check_whole("start_step", self.start_step, 0)
        check_flag("alternate", self.alternate)
        check_flag("error_feedback", self.error_feedback)
        if self.alternate and not self.error_feedback:
            raise ConfigError(
                "alternate=True needs error_feedback=True: one factor a step sees only part of a gradient"
            )
        check_inner(self.inner)

    @property
    def lossy(self) -> bool:
        return True

    @property
    def exact(self) -> Collective:
        return self.inner

    @property
    def uncorrected(self) -> str:
        return "" if self.error_feedback else "error_feedback=False"

    @property
    def keeps_residual(self) -> bool:
        return self.error_feedback

    @property
    def calls_library(self) -> bool:
        return self.inner.calls_library

    @property
    def needs_link(self) -> bool:
        return self.inner.needs_link

    def check(self, num_workers: int) -> None:
        self.inner.check(num_workers)

    def all_reduce(self, ctx: Context, value: Value) -> Program:
        if not isinstance(value, Gradient):
            raise ConfigError(
                "PowerSGD needs the shapes of a gradient's parameters, and was given a plain tensor: sum tensors with "
                "its inner collective"
            )
        for piece, flat in value.slices():
            matrices = self.matrices(piece)
            if value.step < self.start_step or not matrices:
                yield AllReduce(flat, self.inner)
            else:
                yield from self._compressed(ctx, value, piece, matrices)
        return value

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        """Return the bytes of an uncompressed step (before `start_step`).

        `bytes_of` has the compressed ones, which depend on shapes.
        """
        return self.inner.bytes_sent(rank, num_workers, numel, itemsize)

    def bytes_of(self, rank: int, num_workers: int, layout: Layout) -> float:
        """Return the bytes of a step from `start_step` on; with `alternate`, the mean of an even and an odd one."""
        total = 0.0
        inner = partial(self.inner.bytes_sent, rank, num_workers)
        for piece in layout.buckets:
            matrices = self.matrices(piece)
            raw = piece.stop - piece.start - sum(slot.numel for slot in matrices)
            left, right = (sum(prod(self.factor_shape(slot, side)) for slot in matrices) for side in "pq")
            if self.alternate and matrices:
                total += (inner(left + raw, layout.itemsize) + inner(right + raw, layout.itemsize)) / 2
            else:
                total += inner(left + raw, layout.itemsize) + inner(right, layout.itemsize)
        return total

    def matrices(self, piece: BucketSlice) -> list[Slot]:
        """Return the parameters of a bucket that are sent as factors: those whose factors have fewer numbers."""
        return [slot for slot in piece.slots if sum(prod(self.factor_shape(slot, side)) for side in "pq") < slot.numel]

    def factor_shape(self, slot: Slot, side: str) -> tuple[int, int]:
        """Return the shape of P, (n, r), or of Q, (m, r)."""
        rows = slot.shape[0] if slot.shape else 1
        columns = slot.numel // max(rows, 1)
        return (rows if side == "p" else columns, min(rows, columns, self.rank))

    # -- one bucket --------------------------------------------------------------------------------------------

    def _compressed(self, ctx: Context, value: Gradient, piece: BucketSlice, slots: list[Slot]) -> Program:
        nbytes = sum(slot.numel for slot in slots) * value.flat.element_size()
        sides = ("pq"[self._turn(ctx, piece)],) if self.alternate else ("p", "q")
        share = share_of(ctx, f"bucket-{piece.index}", value.tail(piece.index), value.total_weight)
        raw = [value.view(slot) for slot in piece.slots if slot not in slots] + [value.tail(piece.index)]
        matrices = yield Local("encode", nbytes, partial(self._matrices, ctx, value, slots, share))
        bases: list[Tensor] = []
        factors: list[Tensor] = []
        own: list[Tensor] = []
        for side in sides:
            others = (
                [self._factor(ctx, slot, "q" if side == "p" else "p", value.flat) for slot in slots]
                if side == sides[0]
                else factors
            )
            message, own, bases = yield Local(
                "encode", nbytes, partial(_project, side, matrices, others, raw if side == sides[0] else [])
            )
            message = yield AllReduce(message, self.inner)
            factors = self._unpack(message, side, slots, raw if side == sides[0] else [])
        for slot, factor in zip(slots, factors, strict=True):  # a factor that is not finite would never recover
            before = self._factor(ctx, slot, sides[-1], value.flat)
            ctx.memory[_name(sides[-1], slot)] = torch.where(factor.isfinite().all(), factor, before)
        products = [
            _Product(side=sides[-1], slot=slot, matrix=matrix, factor=factor, own=mine, basis=basis)
            for slot, matrix, factor, mine, basis in zip(slots, matrices, factors, own, bases, strict=True)
        ]
        yield Local("decode", nbytes, partial(self._restore, ctx, value, piece, products, share))

    def _turn(self, ctx: Context, piece: BucketSlice) -> int:
        """Return 0 and 1 in turns, for each sum of this bucket on this lane.

        The step's number cannot be used: with two lanes, one of them has all the even steps.
        """
        return count_sum(ctx.memory, f"low-rank.sums/{piece.index}") % 2

    def _matrices(self, ctx: Context, value: Gradient, slots: list[Slot], share: float | Tensor) -> list[Tensor]:
        """Return M_i, n x m each; they share memory with the gradient where its strides allow."""
        if self.error_feedback:
            for slot in slots:
                add_share(value.view(slot), self._residual(ctx, slot, value.flat), share)
        return [value.view(slot).reshape(slot.shape[0], -1) for slot in slots]

    def _residual(self, ctx: Context, slot: Slot, flat: Tensor) -> Tensor:
        name = f"{LOW_RANK_RESIDUAL}/{slot.index}"
        if name not in ctx.memory:
            ctx.memory[name] = torch.zeros(slot.shape, dtype=flat.dtype, device=flat.device)
        return ctx.memory[name]

    def _factor(self, ctx: Context, slot: Slot, side: str, flat: Tensor) -> Tensor:
        """Return the last step's factor, or at first normal numbers that are equal on all ranks."""
        name, shape = _name(side, slot), self.factor_shape(slot, side)
        if name not in ctx.memory or ctx.memory[name].shape != shape:  # r has changed: begin with new factors
            if flat.is_meta:
                ctx.memory[name] = flat.new_empty(shape)
            else:
                noise = torch.Generator().manual_seed(derive_seed(ctx.seed, f"low-rank/{side}", step=slot.index))
                ctx.memory[name] = torch.randn(shape, generator=noise, dtype=flat.dtype).to(flat.device)
        return ctx.memory[name]

    def _unpack(self, message: Tensor, side: str, slots: list[Slot], raw: list[Tensor]) -> list[Tensor]:
        """Return the summed factors, in new memory, and fill the `raw` tensors."""
        shapes = [self.factor_shape(slot, side) for slot in slots]
        parts = message.split([prod(shape) for shape in shapes] + [tensor.numel() for tensor in raw])
        for tensor, part in zip(raw, parts[len(slots) :], strict=True):
            tensor.copy_(part.view(tensor.shape))
        return [part.view(shape).clone() for part, shape in zip(parts[: len(slots)], shapes, strict=True)]

    def _restore(
        self,
        ctx: Context,
        value: Gradient,
        piece: BucketSlice,
        products: list[_Product],
        share: float | Tensor,
    ) -> None:
        """Write the approximate sums into the gradient, and their errors into memory."""
        errors: list[Tensor] = []
        for product in products:
            if self.error_feedback:
                errors.append(product.error())  # before the sum: the matrix may share its memory
            value.view(product.slot).copy_(product.total())
        if not self.error_feedback:
            return
        flat = value.flat if value.bucket is not None else value.flat[piece.start : piece.stop]
        outcome = outcome_of(value.tail(piece.index), flat[: piece.tail - piece.start], spans_of(piece))
        for slot, error in zip((product.slot for product in products), errors, strict=True):
            residual = self._residual(ctx, slot, value.flat)
            outcome.update_residual(residual, error, share, begin=slot.offset - piece.start)
        if value.total_weight is None:
            remember_weight(ctx, f"bucket-{piece.index}", value.tail(piece.index), share)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """A parameter's approximate sum: P @ basis.T if the side is "p", basis @ Q.T if it is "q".

    Attributes:
        matrix: (n, m) this rank's gradient with its residual.
        factor, own: P or Q, summed over the ranks, and of this rank alone.
        basis: the other factor, with orthonormal columns, equal on all ranks.
    """

    side: str
    slot: Slot
    matrix: Tensor
    factor: Tensor
    own: Tensor
    basis: Tensor

    def total(self) -> Tensor:
        """Return the sum over the ranks, in the parameter's shape."""
        product = self.factor @ self.basis.T if self.side == "p" else self.basis @ self.factor.T
        return product.view(self.slot.shape)

    def error(self) -> Tensor:
        """Return what this rank's product leaves of its matrix, in the parameter's shape."""
        first, second = (self.own, self.basis) if self.side == "p" else (self.basis, self.own)
        return torch.addmm(self.matrix, first, second.T, alpha=-1).view(self.slot.shape)


def _name(side: str, slot: Slot) -> str:
    return f"low-rank.{side}/{slot.index}"


def _project(
    side: str, matrices: list[Tensor], others: list[Tensor], raw: list[Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return (message of P or Q of all matrices and the raw tensors, this rank's P or Q, bases of the other factor)."""
    bases = [torch.linalg.qr(other).Q for other in others]
    factors = [(matrix if side == "p" else matrix.T) @ basis for matrix, basis in zip(matrices, bases, strict=True)]
    return torch.cat([item.reshape(-1) for item in (*factors, *raw)]), factors, bases
