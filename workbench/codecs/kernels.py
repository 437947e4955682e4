"""Selects what encodes float32 values: Triton's kernels on a GPU, compiled ones on a CPU, or torch's operations.

All give the same bits, so ranks with different ones may be mixed. A codec has its formula in torch's operations, and
first asks here for a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

import torch
from torch import Tensor

from workbench.codecs import compiled, compiler, gpu

MOST_THREADS = 2  # torch's operations use all threads, a compiled kernel uses one: with more of them torch is as fast

_TORCH_ONLY = ContextVar("torch_only", default=False)


def of(values: Tensor) -> ModuleType | None:
    """Return the kernels for levels and halves, `triton_kernels` or `compiled`; None: use torch's operations."""
    if values.dtype != torch.float32 or not values.is_contiguous() or _TORCH_ONLY.get():
        return None
    if values.is_cuda:
        return gpu.tried(values.device)
    return compiled if torch.get_num_threads() <= MOST_THREADS and on_cpu(values) else None


def on_cpu(values: Tensor) -> bool:
    """Return True if `compiled` can process these values."""
    return (
        values.device.type == "cpu"
        and values.dtype == torch.float32
        and values.is_contiguous()
        and not _TORCH_ONLY.get()
        and compiler.library().functions is not None
    )


@contextmanager
def torch_only() -> Iterator[None]:
    """Use torch's operations within the block, as on a machine without a C compiler: to compare the two."""
    token = _TORCH_ONLY.set(True)
    try:
        yield
    finally:
        _TORCH_ONLY.reset(token)
