"""Reads a part of a checkpoint and believes nothing of it: it is a tree as `take_checkpoint` makes it, or the file is `Damaged`.

`torch.load(weights_only=True)` runs nothing, but it unpacks what is packed and takes memory as the file says. Parts of ours are not packed,
so a file whose entries are larger than itself is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor

from workbench.runtimes.checkpoint.files import Damaged

KINDS: dict[str, type] = {
    "step": int,
    "method": str,
    "num_workers": int,
    "layout": list,
    "replica": dict,
    "program": dict,
    "memory": dict,
}
IN_REPLICA = ("model", "updates", "loss_scale", "master")
AND_ALIKE = ("optimizer", "schedule", "average")  # and parameters; or "alike", a sum of them, where rank 0's part holds them for all
MOST_WORDS = 300  # characters of another's error


def save_part(tree: dict[str, Any], file: BinaryIO) -> None:
    """Write what a rank keeps, for `write_part`, which sums up all bytes: torch's sums of each tensor would cost as much again."""
    if not hasattr(torch.serialization, "set_crc32_options"):  # before torch 2.6
        torch.save(tree, file)
        return
    chosen = torch.serialization.get_crc32_options()  # this thread's
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tree, file)
    finally:
        torch.serialization.set_crc32_options(chosen)


def read_part(path: Path) -> dict[str, Any]:
    """What a rank kept.

    Raises:
        Damaged: the file holds something else; says what.
    """
    if not path.is_file():
        raise Damaged(f"{path} is not there, or is no file")
    try:
        with ZipFile(path) as archive:
            entries = archive.infolist()
        if any(entry.compress_type != ZIP_STORED for entry in entries) or sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise Damaged(f"{path} unpacks to more than it is: it was not written by workbench")
        saved = torch.load(path, weights_only=True, map_location="cpu")
        flaw = next(flaws_of(saved), None)
    except Damaged:
        raise
    except Exception as error:  # a file that was made for it can raise nearly everything
        raise Damaged(f"{path} cannot be read as a checkpoint ({said_by(error)})") from error
    if flaw is not None:
        raise Damaged(f"{path} is no checkpoint of a rank: {flaw}")
    return dict(saved)


def said_by(error: BaseException) -> str:
    """An error of another library, in few words."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:MOST_WORDS]}{'...' if len(text) > MOST_WORDS else ''}"


def flaws_of(saved: Any) -> Iterator[str]:
    """What is not as in a checkpoint."""
    if not isinstance(saved, dict):
        yield f"it holds a {type(saved).__name__}"
        return
    for name, kind in KINDS.items():
        if not isinstance(saved.get(name), kind) or isinstance(saved[name], bool):
            yield f"its {name!r} is no {kind.__name__}"
            return
    if saved["step"] < -1 or saved["num_workers"] < 1:  # -1: a server that takes no steps
        yield f"step {saved['step']} of {saved['num_workers']} ranks"
    needed = IN_REPLICA if isinstance(saved["replica"].get("alike"), int) else (*IN_REPLICA, *AND_ALIKE)
    if missing := [name for name in needed if name not in saved["replica"]]:
        yield f"its 'replica' lacks {missing[0]!r}"
    if not isinstance(saved["replica"].get("model"), dict):
        yield "its 'replica' has no model"
    if not {"kind", "fields"} <= saved["program"].keys():
        yield "its 'program' holds what is no state of an algorithm"
    if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in saved["memory"].items()):
        yield "its 'memory' holds what no codec remembers"
    data = saved.get("data")
    if data is not None and not _is_position(data):
        yield "its 'data' are no place in the data"
    if any(_is_inflated(tensor) for tensor in _tensors(saved)):
        yield "a tensor of it is larger than its memory"


def _is_position(data: Any) -> bool:
    if not isinstance(data, dict) or not isinstance(data.get("origin"), list) or len(data["origin"]) != 2:
        return False
    numbers = [data.get("samples"), data.get("global_batch"), *data["origin"]]
    return all(isinstance(number, int) and number >= 0 for number in numbers)


def _is_inflated(tensor: Tensor) -> bool:
    """Whether a copy of it takes more memory than the file had for it, as a tensor of strides 0 does."""
    return tensor.layout == torch.strided and tensor.nbytes > tensor.untyped_storage().nbytes()


def _tensors(tree: Any) -> Iterator[Tensor]:
    """All tensors in a tree; not by recursion, of which a deep one has too much."""
    waiting, seen = [tree], set[int]()
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, dict | list | tuple) and id(item) not in seen:  # one that holds itself would have no end
            seen.add(id(item))
            waiting.extend(item.values() if isinstance(item, dict) else item)


def leaves(item: Any) -> Iterator[Tensor | bytes]:
    """Of a tree of tensors and plain values: its tensors, and bytes that tell each from others; functions are left out."""
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


def octets_of(tensor: Tensor) -> Tensor:
    """Its memory as (bytes,) uint8; copied only where it has gaps."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
