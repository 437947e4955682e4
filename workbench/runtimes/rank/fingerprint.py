"""Fingerprints: short digests of code and data, to compare them between ranks."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from workbench.problems.loading import IndexedSource, Source
from workbench.resources import PACKAGE
from workbench.units import MIB

MAX_BYTES = 64 * MIB  # larger data, and data loaded item by item, are digested by a sample
NUM_ROWS, NUM_ITEMS = 1024, 8
NUM_TWICE = 2  # items that are loaded twice, to detect random ones


def _digest(*parts: bytes) -> str:
    found = hashlib.blake2b(digest_size=6)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()


@cache
def package_digest() -> str:
    """Digest of this package's source files on this rank's disk."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return _digest(
        *(part for path in paths for part in (path.relative_to(PACKAGE).as_posix().encode(), path.read_bytes()))
    )


def code_digest(*functions: Any) -> str:
    """Digest of the code of functions, methods, partials, classes and callables, without the values of closures."""
    return _digest(*(part for function in functions for part in _code_of(function)))


def _code_of(function: Any) -> Iterator[bytes]:
    if isinstance(function, partial):
        yield from _code_of(function.func)
        return
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is not None:
        yield from _parts_of(code)
        return
    kind = function if isinstance(function, type) else type(function)
    yield kind.__qualname__.encode()
    for name, method in sorted(vars(kind).items()):
        if hasattr(method, "__code__"):
            yield name.encode()
            yield from _parts_of(method.__code__)


def _parts_of(code: CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield repr((code.co_names, code.co_varnames)).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts_of(constant)
        elif not isinstance(constant, frozenset):  # its order differs between processes
            yield repr(constant).encode()


def source_digest(source: Source | None) -> str:
    """Digest of a problem's samples. Streams are not compared, because each rank may read its own."""
    if source is None:
        return "none"
    return data_digest(source.data) if isinstance(source, IndexedSource) else "a stream"


def data_digest(data: Dataset[Any] | None) -> str:
    """Digest of a data set: of all its tensors if they are small, else of items spread evenly over it.

    If there is no digest, the text says why.
    """
    if data is None:
        return "none"
    if isinstance(data, TensorDataset):
        size = sum(tensor.numel() * tensor.element_size() for tensor in data.tensors)
        rows = slice(None) if size <= MAX_BYTES else _spread(len(data), NUM_ROWS)
        return _digest(*(part for tensor in data.tensors for part in _bytes_of(tensor[rows])))
    places = _spread(len(data), NUM_ITEMS)  # type: ignore[arg-type]  # it has a length
    try:
        with _own_randomness():
            first, again = (
                [_digest(*_bytes_of(data[place])) for place in some] for some in (places, places[:NUM_TWICE])
            )
    except Exception as error:  # noqa: BLE001 - an error of the user's data: ranks compare its text; training raises it
        return f"cannot be read ({type(error).__name__}: {error})"
    return _digest(*map(str.encode, first)) if again == first[:NUM_TWICE] else "unknown: its items are random"


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
