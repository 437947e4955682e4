"""Write and read a rank file: a tree from `take_checkpoint`. Other contents raise `CorruptFile`.

`torch.load(weights_only=True)` runs no code of the file. But it decompresses the file, and allocates the sizes that the
file names. Our files are not compressed, so a file with entries larger than itself is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor

from workbench.runtimes.checkpoint.files import CorruptFile

KINDS: dict[str, type] = {
    "step": int,
    "algorithm": str,
    "num_workers": int,
    "layout": list,
    "replica": dict,
    "program": dict,
    "memory": dict,
}
IN_REPLICA = ("model", "updates", "loss_scale", "master")
# Entries in addition to the parameters. The key "alike" holds a checksum in their place if rank 0's file has them.
REPLICATED = ("optimizer", "schedule", "average")
MAX_ERROR_LENGTH = 300  # characters of a library's error


def save_rank_file(tree: dict[str, Any], file: BinaryIO) -> None:
    """Write a rank's state, for `write_rank_file`.

    `write_rank_file` checksums the whole file, so torch's checksum of each tensor is switched off.
    """
    if not hasattr(torch.serialization, "set_crc32_options"):  # before torch 2.6
        torch.save(tree, file)
        return
    chosen = torch.serialization.get_crc32_options()  # this thread's
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tree, file)
    finally:
        torch.serialization.set_crc32_options(chosen)


def read_rank_file(path: Path) -> dict[str, Any]:
    """Read a rank's state.

    Raises:
        CorruptFile: the file has other contents; the message names them.
    """
    if not path.is_file():
        raise CorruptFile(f"{path} does not exist, or is not a file")
    try:
        with ZipFile(path) as archive:
            entries = archive.infolist()
        if (
            any(entry.compress_type != ZIP_STORED for entry in entries)
            or sum(entry.file_size for entry in entries) > path.stat().st_size
        ):
            raise CorruptFile(f"{path} unpacks to more than its size: it was not written by workbench")
        saved = torch.load(path, weights_only=True, map_location="cpu")
        flaw = next(find_errors(saved), None)
    except CorruptFile:
        raise
    except Exception as error:  # a crafted file can raise nearly any exception
        raise CorruptFile(f"{path} cannot be read as a checkpoint ({brief_error(error)})") from error
    if flaw is not None:
        raise CorruptFile(f"{path} is not a rank's checkpoint: {flaw}")
    return dict(saved)


def brief_error(error: BaseException) -> str:
    """A library's error as one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:MAX_ERROR_LENGTH]}{'...' if len(text) > MAX_ERROR_LENGTH else ''}"


def find_errors(saved: Any) -> Iterator[str]:
    """Yield each difference from the tree of a checkpoint."""
    if not isinstance(saved, dict):
        yield f"it holds a {type(saved).__name__}"
        return
    for name, kind in KINDS.items():
        if not isinstance(saved.get(name), kind) or isinstance(saved[name], bool):
            yield f"its {name!r} is no {kind.__name__}"
            return
    needed = IN_REPLICA if isinstance(saved["replica"].get("alike"), int) else (*IN_REPLICA, *REPLICATED)
    if missing := [name for name in needed if name not in saved["replica"]]:
        yield f"its 'replica' lacks {missing[0]!r}"
    if not isinstance(saved["replica"].get("model"), dict):
        yield "its 'replica' has no model"
    if any(_is_inflated(tensor) for tensor in _tensors(saved)):
        yield "a tensor in it is larger than its storage"


def _is_inflated(tensor: Tensor) -> bool:
    """Return True if a copy of the tensor needs more memory than its storage in the file, as with strides of 0."""
    return tensor.layout == torch.strided and tensor.nbytes > tensor.untyped_storage().nbytes()


def _tensors(tree: Any) -> Iterator[Tensor]:
    """All tensors in a tree. Not recursive, because a file may nest deeply."""
    waiting, seen = [tree], set[int]()
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, dict | list | tuple) and id(item) not in seen:  # a tree may contain itself
            seen.add(id(item))
            waiting.extend(item.values() if isinstance(item, dict) else item)


def leaves(item: Any) -> Iterator[Tensor | bytes]:
    """Yield the tensors of a tree, and bytes that identify each leaf. Functions are left out."""
    match item:
        case Tensor():
            yield f"{item.dtype}{tuple(item.shape)}".encode()
            yield item
        case dict():
            for key, value in item.items():
                yield repr(key).encode()
                yield from leaves(value)
        case list() | tuple():
            for value in item:
                yield from leaves(value)
        case None | bool() | int() | float() | str():
            yield repr(item).encode()
        case _:
            pass


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's memory as (bytes,) uint8; copied only if it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
