"""Fingerprints: short digests of the package and of data, to compare them between ranks (see also `content`)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from workbench.content import digest
from workbench.problems.loading import IndexedSource, Source
from workbench.resources import PACKAGE
from workbench.units import MIB

MAX_BYTES = 64 * MIB  # larger data, and data loaded item by item, are digested by a sample
NUM_ROWS, NUM_ITEMS = 1024, 8
NUM_TWICE = 2  # items that are loaded twice, to detect random ones


@cache
def package_digest() -> str:
    """Digest of this package's source files on this rank's disk."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return digest(
        *(part for path in paths for part in (path.relative_to(PACKAGE).as_posix().encode(), path.read_bytes()))
    )


def source_digest(source: Source | None, *, whole: bool = False) -> str:
    """Digest of a problem's samples. Streams are not compared, because each rank may read its own."""
    if source is None:
        return "none"
    return data_digest(source.data, whole=whole) if isinstance(source, IndexedSource) else "a stream"


def data_digest(data: Dataset[Any] | None, *, whole: bool = False) -> str:
    """Digest of a data set: of all its tensors if they are small or `whole`, else of items spread evenly over it.

    If there is no digest, the text says why.
    """
    if data is None:
        return "none"
    if isinstance(data, TensorDataset):
        size = sum(tensor.numel() * tensor.element_size() for tensor in data.tensors)
        rows = slice(None) if whole or size <= MAX_BYTES else _spread(len(data), NUM_ROWS)
        return digest(*(part for tensor in data.tensors for part in _bytes_of(tensor[rows])))
    places = _spread(len(data), NUM_ITEMS)  # type: ignore[arg-type]  # it has a length
    try:
        with _own_randomness():
            first, again = (
                [digest(*_bytes_of(data[place])) for place in some] for some in (places, places[:NUM_TWICE])
            )
    except Exception as error:  # noqa: BLE001 - an error of the user's data: ranks compare its text; training raises it
        return f"cannot be read ({type(error).__name__}: {error})"
    return digest(*map(str.encode, first)) if again == first[:NUM_TWICE] else "unknown: its items are random"


def _spread(length: int, number: int) -> list[int]:
    """Evenly spread positions from the first to the last.

    >>> _spread(5, 3), _spread(2, 3)
    ([0, 2, 4], [0, 1])
    """
    return sorted({round(place) for place in np.linspace(0, length - 1, min(length, number))})


def _bytes_of(item: Any) -> Iterator[bytes]:
    if isinstance(item, Tensor):
        yield f"{tuple(item.shape)} {item.dtype}".encode()
        yield item.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(item, dict):
        for key, value in item.items():
            yield repr(key).encode()
            yield from _bytes_of(value)
    elif isinstance(item, list | tuple):
        for value in item:
            yield from _bytes_of(value)
    elif hasattr(item, "tobytes"):  # an array, a picture
        yield item.tobytes()
    elif isinstance(item, str | bytes | int | float | complex | None):
        yield repr(item).encode()
    else:
        yield type(item).__qualname__.encode()


@contextmanager
def _own_randomness() -> Iterator[None]:
    """Restore the state of all random generators at the end of the block."""
    plain, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002 - a data set may draw from it
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(arrays)  # noqa: NPY002
