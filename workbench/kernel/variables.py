"""The variables of all ranks in one table: what each is, and whether the ranks have the same value."""

from __future__ import annotations

import hashlib
import html
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, final

from workbench.analysis.table import num_bytes
from workbench.kernel.cells import format_ranks

COMPARED_BYTES = 1 << 30  # a larger value is not read
SUMMARY_CHARS = 40
GIVEN = frozenset({"rank", "world_size", "wb", "MPI", "mpi_rank", "mpi_size"})  # names that the kernel gives
FIELDS = ("type", "shape", "dtype", "device", "memory", "value")
PLAIN = (bool, int, float, complex, str, bytes, type(None))


@final
@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of one rank.

    Attributes:
        type: name of its class.
        shape, dtype, device: of a tensor or array; "" for others.
        num_bytes: memory of its elements; of a module, of its parameters and buffers; of others, of the object alone.
        value: text of a plain value; "" for others.
        digest: equal on two ranks if the values are; "" if they cannot be compared.
    """

    type: str
    shape: str = ""
    dtype: str = ""
    device: str = ""
    num_bytes: int = 0
    value: str = ""
    digest: str = ""

    @property
    def memory(self) -> str:
        """Memory with a unit."""
        return num_bytes(self.num_bytes)


def describe(value: object) -> Variable:
    """Describe a value. A tensor of a GPU is copied to the CPU to be compared.

    >>> describe(3).value
    '3'
    """
    kind = type(value).__name__
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        num_bytes = value.numel() * value.element_size()
        about = (str(tuple(value.shape)), str(value.dtype).removeprefix("torch."), str(value.device))
        text = f"{value.item():.6g}" if value.numel() == 1 and not value.is_complex() else ""
        return Variable(kind, *about, num_bytes, text, _digest_of_tensors({"": value}))
    if torch is not None and isinstance(value, torch.nn.Module):
        state = {**dict(value.named_parameters()), **dict(value.named_buffers())}
        num_bytes = sum(each.numel() * each.element_size() for each in state.values())
        devices = ", ".join(sorted({str(each.device) for each in state.values()}))
        dtypes = ", ".join(sorted({str(each.dtype).removeprefix("torch.") for each in state.values()}))
        shape = f"{len(state)} tensors"
        return Variable(kind, shape, dtypes, devices, num_bytes, "", _digest_of_tensors(state))
    if numpy is not None and isinstance(value, numpy.ndarray):
        digest = _digest_of_array(value)
        return Variable(kind, str(value.shape), str(value.dtype), "cpu", value.nbytes, "", digest)
    shape = f"{len(value)} items" if isinstance(value, list | tuple | dict | set | frozenset) else ""
    text = repr(value)[:SUMMARY_CHARS] if isinstance(value, PLAIN) else ""
    return Variable(kind, shape, num_bytes=sys.getsizeof(value), value=text, digest=_digest_of_object(value))


def _digest_of_tensors(tensors: Mapping[str, Any]) -> str:
    if sum(each.numel() * each.element_size() for each in tensors.values()) > COMPARED_BYTES:
        return ""
    digest = hashlib.blake2b(digest_size=16)
    try:
        for name, each in tensors.items():
            digest.update(f"{name} {each.dtype} {tuple(each.shape)}".encode())
            elements = each.detach().cpu().contiguous().reshape(-1)
            digest.update(memoryview(elements.view(sys.modules["torch"].uint8).numpy()))
    except (RuntimeError, TypeError, NotImplementedError):  # sparse, quantised or without memory
        return ""
    return digest.hexdigest()


def _digest_of_array(array: Any) -> str:
    if array.nbytes > COMPARED_BYTES or array.dtype.hasobject:
        return ""
    digest = hashlib.blake2b(f"{array.dtype} {array.shape}".encode(), digest_size=16)
    digest.update(array.tobytes())
    return digest.hexdigest()


def _digest_of_object(value: object) -> str:
    """Digest of a plain value, or of a list, tuple or dictionary of plain values; "" for others."""
    try:
        plain = _is_plain(value)
    except RecursionError:
        return ""
    return hashlib.blake2b(repr(value).encode(errors="replace"), digest_size=16).hexdigest() if plain else ""


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(type(key) in PLAIN and _is_plain(each) for key, each in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    return type(value) in PLAIN


def rank_variables(names: Sequence[str] = ()) -> dict[str, tuple[Any, ...]]:
    """Return this rank's variables: name -> the fields of `Variable`. Runs on the rank.

    Args:
        names: which; empty for all that a cell has made, without modules.
    """
    from IPython import get_ipython

    shell = get_ipython()
    wanted = set(names)
    found = {}
    for name, value in list(shell.user_ns.items()):
        hidden = name.startswith("_") or name in GIVEN or name in shell.user_ns_hidden or isinstance(value, ModuleType)
        if name in wanted or (not wanted and not hidden):
            try:
                about = describe(value)
            except Exception:  # noqa: BLE001 - an object's own methods may raise anything
                about = Variable(type(value).__name__)
            found[name] = tuple(getattr(about, field) for field in Variable.__slots__)
    return found


@final
class VariablesTable:
    """The variables of some ranks.

    Args:
        of_ranks: for each rank: what `rank_variables` returned.
    """

    def __init__(self, of_ranks: Sequence[Mapping[str, Sequence[Any]]]) -> None:
        self._of_ranks = [{name: Variable(*about) for name, about in found.items()} for found in of_ranks]

    @property
    def rows(self) -> list[dict[str, str]]:
        """One row for each variable: its name, the fields, and `equal`.

        A field that differs between ranks lists its values after the ranks' numbers.
        """
        names = sorted({name for found in self._of_ranks for name in found})
        return [{"name": name, **self._fields(name), "equal": self._equal(name)} for name in names]

    def _fields(self, name: str) -> dict[str, str]:
        have = {rank: found[name] for rank, found in enumerate(self._of_ranks) if name in found}
        return {field: _merged({rank: getattr(each, field) for rank, each in have.items()}) for field in FIELDS}

    def _equal(self, name: str) -> str:
        have = {rank: found[name] for rank, found in enumerate(self._of_ranks) if name in found}
        if len(have) < len(self._of_ranks):
            return f"only on {format_ranks(list(have))}"
        if len({(each.type, each.shape, each.dtype) for each in have.values()}) > 1:
            return "no"
        digests = {rank: each.digest for rank, each in have.items()}
        if not all(digests.values()):
            return "not compared"
        groups = _groups(digests)
        return "yes" if len(groups) == 1 else "no: " + " | ".join(map(format_ranks, groups.values()))

    def __repr__(self) -> str:
        rows = self.rows
        if not rows:
            return "no variables yet"
        columns = ["name", *FIELDS, "equal"]
        widths = {each: max(len(each), *(len(row[each]) for row in rows)) for each in columns}
        lines = [{each: each for each in columns}, *rows]
        return "\n".join("  ".join(line[each].ljust(widths[each]) for each in columns).rstrip() for line in lines)

    def _repr_html_(self) -> str:
        rows = self.rows
        if not rows:
            return "<p>no variables yet</p>"
        columns = ["name", *FIELDS, "equal"]
        head = "".join(f"<th>{each}</th>" for each in columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(row[each])}</td>" for each in columns) + "</tr>" for row in rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _groups(values: Mapping[int, str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return groups


def _merged(values: Mapping[int, str]) -> str:
    groups = _groups(values)
    if len(groups) == 1:
        return next(iter(groups))
    return ", ".join(f"[{format_ranks(ranks)}] {value or '-'}" for value, ranks in groups.items())
