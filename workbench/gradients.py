"""Flat gradient buffers: the layout of a module's parameters in one contiguous tensor, cut into buckets.

One gradient is one buffer. Its parameters are in reverse order of registration, the order in which backward
finishes them. A bucket is therefore a contiguous slice, and bucket 0 is ready first. After its parameters, every
bucket has a short tail of the same dtype,

    [weight, control, used_0, ..., used_k, setting_0, ...]

which the all-reduce sums together with the gradients:

- `weight` is the rank's share of the nominal global batch. Its sum is the weight of the ranks that contributed.
- `control` is rank 0's control value: a request to stop or change. All ranks receive it at the same step, without
  another message.
- `used` counts, for each parameter, the ranks that used it. If no rank used a parameter, its gradient is None, not
  zero: momentum and weight decay would move it.
- `setting`: settings of the optimizer, times the weight. Only if servers update with them (`SentSettings`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from workbench.errors import ConfigError

WEIGHT, CONTROL, USED = 0, 1, 2  # positions in a bucket's tail


@final
@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter in the flat buffer: `flat[offset : offset + numel]`."""

    index: int  # position among the trainable parameters, in order of registration
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    numel: int
    bucket: int
    dtype: torch.dtype

    def view(self, flat: Tensor) -> Tensor:
        """Return the slot as a tensor with the parameter's shape and strides; it shares memory with `flat`."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


@final
@dataclass(frozen=True, slots=True)
class BucketSlice:
    """A contiguous slice of the flat buffer: some parameters, then their tail."""

    index: int
    slots: tuple[Slot, ...]
    start: int
    tail: int  # where the tail begins
    stop: int

    @property
    def num_params(self) -> int:
        return len(self.slots)


@final
@dataclass(frozen=True)
class Layout:
    """The layout of a module's trainable parameters in one flat buffer of `numel` elements of `dtype`."""

    slots: tuple[Slot, ...]  # in order of registration
    buckets: tuple[BucketSlice, ...]  # in order of readiness: bucket 0 holds the last parameters
    numel: int
    dtype: torch.dtype
    device: torch.device
    num_settings: int = 0  # at the end of each tail

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def message_bytes(self) -> int:
        """Bytes of one complete gradient on the wire, with tails."""
        return self.numel * self.itemsize

    @property
    def parameter_numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    def bucket_bytes(self, bucket: int) -> int:
        """Return the bytes of one bucket on the wire, with its tail."""
        piece = self.buckets[bucket]
        return (piece.stop - piece.start) * self.itemsize

    def describe(self) -> list[str]:
        """Return one line for each parameter: ranks must agree on them before they exchange data."""
        return [f"{slot.name}: {tuple(slot.shape)} {slot.dtype} bucket {slot.bucket}" for slot in self.slots]


def trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the module's trainable parameters with their names: a shared one once, no frozen ones."""
    return [(name, param) for name, param in module.named_parameters() if param.requires_grad]


def build_layout(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    bucket_bytes: float | None = None,
    num_buckets: int | None = None,
    num_settings: int = 0,
) -> Layout:
    """Lay parameters out in buckets of at most `bucket_bytes` (None: one bucket; 0: one bucket for each parameter).

    A bucket has at least one parameter, so a parameter larger than `bucket_bytes` is its own bucket. With
    `num_buckets`, that many buckets of about equal size are made instead; fewer if there are fewer parameters. The
    buffer has the widest dtype of the parameters, at least float32: 16-bit parameters are summed in float32.

    Raises:
        ConfigError: there is nothing to train, parameters are on several devices, or one is not floating point.
    """
    named = list(named_parameters)
    if not named:
        raise ConfigError("the model has no trainable parameter: every requires_grad is False, or it has no parameters")
    devices = {param.device for _, param in named}
    if len(devices) > 1:
        raise ConfigError(
            f"the model's parameters are on several devices ({', '.join(map(str, devices))}): move it to one"
        )
    dtype = torch.float32
    for name, param in named:
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ConfigError(f"parameter {name} has no shape yet: run the lazy model once on a batch before training")
        if not param.dtype.is_floating_point:
            raise ConfigError(
                f"parameter {name} is {param.dtype}: only real floating-point parameters can be trained here"
            )
        dtype = torch.promote_types(dtype, param.dtype)
    if bucket_bytes is not None and bucket_bytes < 0:
        raise ConfigError(
            f"bucket_bytes is {bucket_bytes}: use None for one bucket, 0 for one bucket a parameter, or a size in bytes"
        )

    sizes = [param.numel() * dtype.itemsize for _, param in named]
    groups = _cut(sizes, bucket_bytes) if num_buckets is None else _cut_evenly(sizes, num_buckets)

    slots: dict[int, Slot] = {}
    buckets: list[BucketSlice] = []
    offset = 0
    for number, group in enumerate(groups):
        start = offset
        for index in group:
            name, param = named[index]
            slots[index] = Slot(
                index=index,
                name=name,
                shape=tuple(param.shape),
                stride=_dense_strides(param),
                offset=offset,
                numel=param.numel(),
                bucket=number,
                dtype=param.dtype,
            )
            offset += param.numel()
        tail = offset
        offset += USED + len(group) + num_settings
        buckets.append(BucketSlice(number, tuple(slots[index] for index in group), start, tail, offset))
    in_order = tuple(slots[index] for index in range(len(named)))
    return Layout(in_order, tuple(buckets), offset, dtype, named[0][1].device, num_settings)


def _cut(sizes: list[int], bucket_bytes: float | None) -> list[list[int]]:
    """Return the positions of the parameters of each bucket, last parameter first."""
    groups: list[list[int]] = []
    filled = 0.0
    for index in reversed(range(len(sizes))):
        if not groups or (bucket_bytes is not None and filled + sizes[index] > bucket_bytes):
            groups.append([])
            filled = 0.0
        groups[-1].append(index)
        filled += sizes[index]
    return groups


def _cut_evenly(sizes: list[int], num_buckets: int) -> list[list[int]]:
    """Return the positions of the parameters of `num_buckets` buckets of about equal size, last parameter first."""
    groups: list[list[int]] = []
    left, index = sum(sizes), len(sizes) - 1
    for bucket in range(min(num_buckets, len(sizes))):
        remaining = num_buckets - bucket
        group, filled = [index], sizes[index]
        index -= 1
        while index >= remaining - 1 and (
            remaining == 1 or abs(filled + sizes[index] - left / remaining) <= abs(filled - left / remaining)
        ):
            group.append(index)
            filled += sizes[index]
            index -= 1
        left -= filled
        groups.append(group)
    return groups


def _dense_strides(param: Tensor) -> tuple[int, ...]:
    """Return the parameter's strides if it fills its memory without gaps (channels_last), else contiguous ones."""
    return tuple(torch.empty_like(param, device="meta").stride())  # empty_like keeps such strides


@final
@dataclass(slots=True)
class Gradient:
    """One rank's gradient, one bucket of it, or their sum over ranks: a flat tensor with its layout.

    Attributes:
        flat: 1-D buffer (`layout.numel` elements, or one bucket's slice), with tails. On the meta device in a
            timing-only simulation.
        layout: the place of each parameter.
        bucket: number of the bucket; None for the complete gradient.
        step: the step of its minibatch.
        version: number of updates in the parameters from which it was computed; staleness is counted from there.
        ready: on a GPU, the event after which the values are complete, if another stream computed them (`streams`).
        total_weight: sum of all ranks' weights if it is known in advance; otherwise None.
    """

    flat: Tensor
    layout: Layout
    step: int
    version: int
    bucket: int | None = None
    ready: Any = field(default=None, repr=False)
    owner: Gradient | None = field(default=None, repr=False)  # the gradient whose buffer this bucket is a slice of
    total_weight: float | None = None

    @property
    def message_bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    def slices(self) -> Iterator[tuple[BucketSlice, Tensor]]:
        """Yield each bucket of this gradient with its slice of `flat` (parameters and tail)."""
        if self.bucket is not None:
            yield self.layout.buckets[self.bucket], self.flat
            return
        for piece in self.layout.buckets:
            yield piece, self.flat[piece.start : piece.stop]

    def body(self, bucket: int | None = None) -> Tensor:
        """Return the values of one bucket, without its tail; it shares memory."""
        piece = self.layout.buckets[self.bucket if self.bucket is not None else (bucket or 0)]
        base = piece.start if self.bucket is not None else 0
        return self.flat[piece.start - base : piece.tail - base]

    def tail(self, bucket: int | None = None) -> Tensor:
        """Return the tail of one bucket, [weight, control, used..., setting...]; it shares memory."""
        piece = self.layout.buckets[self.bucket if self.bucket is not None else (bucket or 0)]
        base = piece.start if self.bucket is not None else 0
        return self.flat[piece.tail - base : piece.stop - base]

    def view(self, slot: Slot) -> Tensor:
        """Return the part of one parameter, in its shape; it shares memory."""
        base = self.layout.buckets[self.bucket].start if self.bucket is not None else 0
        flat = self.flat
        return flat.as_strided(slot.shape, slot.stride, flat.storage_offset() + slot.offset - base)

    def copy(self) -> Gradient:
        """Return a copy of the values, for use after `Apply` has consumed this gradient."""
        return Gradient(
            self.flat.clone(), self.layout, self.step, self.version, self.bucket, total_weight=self.total_weight
        )

    def bucket_view(self, bucket: int) -> Gradient:
        """Return one bucket of a complete gradient; it shares memory."""
        piece = self.layout.buckets[bucket]
        return Gradient(
            self.flat[piece.start : piece.stop],
            self.layout,
            self.step,
            self.version,
            bucket,
            owner=self,
            total_weight=self.total_weight,
        )


class BufferPool:
    """Reused gradient buffers. Each backward takes one, and the update that consumes it gives it back.

    A synchronous algorithm uses one, and Pipe-SGD of width K uses K. A buffer in use is never handed out again.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        # a runtime may replace it
        self.allocate: Callable[[], Tensor] = partial(
            torch.empty, layout.numel, dtype=layout.dtype, device=layout.device
        )
        self._free: list[Tensor] = []
        self._out: set[int] = set()
        self._all: list[Tensor] = []  # kept alive, so that ids are unique

    @property
    def num_allocated(self) -> int:
        """Largest number of buffers in use at one time."""
        return len(self._all)

    def take(self) -> Tensor:
        """Return a buffer of `layout.numel` elements with undefined content."""
        if self._free:
            flat = self._free.pop()
        else:
            flat = self.allocate()
            self._all.append(flat)
        self._out.add(id(flat))
        return flat

    def owns(self, flat: Tensor) -> bool:
        """Return whether this is one of the pool's buffers."""
        return any(flat is buffer for buffer in self._all)

    def give_back(self, flat: Tensor) -> None:
        """Give a buffer back. Giving it back twice, or a foreign one, is an internal error."""
        assert id(flat) in self._out, "a gradient buffer was given back that is not in use"
        self._out.remove(id(flat))
        self._free.append(flat)


def whole(buckets: list[Gradient]) -> Gradient:
    """Return the complete gradient of these buckets, which must come from one backward."""
    owner = buckets[0].owner
    assert owner is not None and all(bucket.owner is owner for bucket in buckets), "buckets of different gradients"
    return owner


def block_bounds(numel: int, num_blocks: int) -> list[int]:
    """Return where each of `num_blocks` nearly equal blocks begins, and where the last one ends.

    >>> block_bounds(7, 3)
    [0, 3, 5, 7]
    """
    small, extra = divmod(numel, num_blocks)
    return [block * small + min(block, extra) for block in range(num_blocks + 1)]
