"""Digests of content: of values, of functions with all that they use, of classes and of objects.

A cache or a record that must know a function again uses these digests, and never the function's name. Two lambdas have
one name.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
NO_CONTENT = frozenset(  # of a class: written by Python, and the same content again
    """
    __abstractmethods__ __annotate__ __annotate_func__ __annotations__ __annotations_cache__ __dataclass_fields__
    __dataclass_params__ __dict__ __doc__ __firstlineno__ __match_args__ __module__ __qualname__ __slotnames__
    __static_attributes__ __weakref__ _abc_impl
    """.split()  # noqa: SIM905 - a list of strings would take a line each
)
LOADS = ("LOAD_GLOBAL", "LOAD_NAME")


class UnreadableContent(Exception):
    """The content of an object cannot be read; the message names the object."""


def content_digest(*values: Any) -> str:
    """Return a digest of values: equal in all processes, and different if a call could have another result.

    A function counts by its code, its defaults, its closure and the globals that it uses; a partial by its function and
    its arguments; a bound method by its object. A class counts by its members and bases, an object by its class and by
    what `pickle` would keep of it. Only what an installed package defines counts by name and version.

    >>> def scaled(factor):
    ...     return lambda x: factor * x
    >>> content_digest(scaled(2)) == content_digest(scaled(2)), content_digest(scaled(2)) == content_digest(scaled(3))
    (True, False)

    Raises:
        UnreadableContent: a part is neither Python code nor data, such as an open file or a compiled function.
    """
    reader = _Reader()
    for value in values:
        reader.add(value)
    return reader.digest()


def digest_of(value: Any, *, logs: bool = True) -> str | None:
    """Return the `content_digest` of a value; None if its content cannot be read.

    Args:
        logs: whether the content of a list, dictionary or set counts that a function uses by name. False for a digest
            that is compared after the function has run: it may keep a log there.
    """
    reader = _Reader(logs=logs)
    try:
        reader.add(value)
    except UnreadableContent:
        return None
    return reader.digest()


def code_digest(*functions: Any) -> str:
    """Digest of the code of functions, methods, partials, classes and callables, without the values of closures."""
    return digest(*(part for function in functions for part in _code_of(function)))


def digest(*parts: bytes) -> str:
    """Return twelve hexadecimal digits that differ if a part differs."""
    found = hashlib.blake2b(digest_size=6)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()


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
        elif isinstance(constant, frozenset):  # its order differs between processes
            yield repr(sorted(map(repr, constant))).encode()
        else:
            yield repr(constant).encode()


@final
class _Reader:
    """Reads values, each object once: a second mention, as in a cycle, counts by its number.

    Args:
        logs: see `digest_of`.
    """

    def __init__(self, *, logs: bool = True) -> None:
        self._logs = logs
        self._hash = hashlib.blake2b(digest_size=6)
        self._seen: dict[int, tuple[int, Any]] = {}  # with the object, so that no other one gets its id

    def digest(self) -> str:
        return self._hash.hexdigest()

    def add(self, value: Any) -> None:
        if isinstance(value, PLAIN):
            self._write(type(value).__name__, repr(value))
            return
        if id(value) in self._seen:
            self._write("again", str(self._seen[id(value)][0]))
            return
        self._seen[id(value)] = (len(self._seen), value)
        installed = _installed_name(value)
        if installed is not None:
            self._write("installed", installed)
            return
        try:
            self._add_parts(value)
        except UnreadableContent:
            raise
        except Exception as error:
            raise UnreadableContent(f"{_name_of(value)} ({type(error).__name__}: {error})") from error

    def _write(self, *words: str | bytes) -> None:
        for word in words:
            part = word.encode() if isinstance(word, str) else word
            self._hash.update(len(part).to_bytes(8, "little"))
            self._hash.update(part)

    def _add_parts(self, value: Any) -> None:
        match value:
            case Tensor():
                data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                self._write("tensor", str(tuple(value.shape)), str(value.dtype), data.tobytes())
            case np.ndarray() | np.generic() if not value.dtype.hasobject:
                self._write("array", str(value.shape), value.dtype.str, value.tobytes())
            case torch.Generator():
                self._write("generator", str(value.initial_seed()))
            case list() | tuple() if type(value) in (list, tuple):
                self._write(type(value).__name__, str(len(value)))
                self._add_all(value)
            case dict() | MappingProxyType() if type(value) in (dict, MappingProxyType):
                self._write("mapping", str(len(value)))
                self._add_all(item for pair in value.items() for item in pair)
            case set() | frozenset():
                self._write(type(value).__name__, *sorted(content_digest(item) for item in value))
            case partial():
                self._write("partial")
                self._add_all((value.func, value.args, dict(sorted(value.keywords.items())), vars(value)))
            case FunctionType():
                self._add_function(value)
            case MethodType():
                self._write("method")
                self._add_all((value.__func__, value.__self__))
            case staticmethod() | classmethod():
                self._write(type(value).__name__)
                self.add(value.__func__)
            case property():
                self._write("property")
                self._add_all((value.fget, value.fset, value.fdel))
            case functools.cached_property():
                self._write("cached property")
                self.add(value.func)
            case type():
                self._add_class(value)
            case MemberDescriptorType() | GetSetDescriptorType():
                self._write("slot", value.__name__)
            case BuiltinFunctionType() if not isinstance(value.__self__, ModuleType | type(None)):
                self._write("method", value.__name__)
                self.add(value.__self__)
            case BuiltinFunctionType() | ModuleType():
                raise UnreadableContent(_name_of(value))
            case _ if hasattr(value, "__wrapped__"):  # of a decorator in C, such as functools.lru_cache
                self._write(type(value).__qualname__)
                self.add(value.__wrapped__)
            case _:
                self._add_object(value)

    def _add_all(self, values: Any) -> None:
        for value in values:
            self.add(value)

    def _add_function(self, function: FunctionType) -> None:
        self._write("function", *_parts_of(function.__code__))
        self._add_all((function.__defaults__, function.__kwdefaults__))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._write(name)
            if name == "__class__":  # of `super()`: the class that is being read
                continue
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self._add_used(content)
        self._add_globals(function.__code__, function.__globals__)
        self._add_all(item for pair in sorted(vars(function).items()) for item in pair)

    def _add_globals(self, code: CodeType, known: dict[str, Any]) -> None:
        """Add what a function's code, and that of the functions in it, reads by name."""
        for loaded in dict.fromkeys(step.argval for step in dis.get_instructions(code) if step.opname in LOADS):
            if loaded not in known:
                continue  # a builtin, or not defined
            self._write(loaded)
            if isinstance(known[loaded], ModuleType):
                self._add_module(known[loaded], code)
            else:
                self._add_used(known[loaded])
        for imported in (step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"):
            module = sys.modules.get(imported)
            if module is None and _installed_version(imported) is None:
                raise UnreadableContent(f"{imported}, which {code.co_qualname} imports")
            if module is not None:
                self._write(imported)
                self._add_module(module, code)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._add_globals(constant, known)

    def _add_module(self, module: ModuleType, code: CodeType) -> None:
        """Add a module: an installed one by its version, one of the user by those of its members that the code names."""
        version = _installed_version(module.__name__)
        if version is not None:
            self._write(module.__name__, version)
            return
        for name in code.co_names:
            if name in vars(module):
                self._write(name)
                member = vars(module)[name]
                self._add_module(member, code) if isinstance(member, ModuleType) else self._add_used(member)

    def _add_used(self, value: Any) -> None:
        """Add what a function uses by name."""
        if self._logs or not isinstance(value, list | dict | set):
            self.add(value)
        else:
            self._write(type(value).__name__)

    def _add_class(self, kind: type) -> None:
        self._write("class", kind.__qualname__)
        self._add_all(kind.__mro__[1:])
        for name, member in sorted(vars(kind).items()):
            if name not in NO_CONTENT:
                self._write(name)
                self.add(member)

    def _add_object(self, value: Any) -> None:
        """Add what `pickle` would keep of an object."""
        reduced = value.__reduce_ex__(4)
        if isinstance(reduced, str):  # a global, such as torch.float32
            self.add(type(value))
            self._write("global", reduced)
            return
        self._write("object")
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        self._add_all((make, arguments, state))
        self._add_all(items or ())
        self._add_all(item for pair in pairs or () for item in pair)


def _installed_name(value: Any) -> str | None:
    """Return module, name and version of a function or class that an installed package defines by this name."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, ModuleType | type(None)):
        name = value.__name__
        module = _module_of(value)
    if not isinstance(module, str) or not isinstance(name, str) or module not in sys.modules:
        return None
    defined: Any = sys.modules[module]
    for part in name.split("."):
        defined = getattr(defined, part, None)
    version = _installed_version(module)
    return f"{module}.{name} {version}" if defined is value and version is not None else None


def _module_of(function: BuiltinFunctionType) -> str | None:
    """Return the installed module that has a function of C, which does not always name one, such as torch.relu."""
    having = [
        name
        for name, module in list(sys.modules.items())
        if getattr(module, "__dict__", {}).get(function.__name__) is function and _installed_version(name) is not None
    ]
    return min(having, key=lambda name: (len(name), name), default=None)


@cache
def _installed_version(module: str) -> str | None:
    """Return the version of the installed package that a module is of; None for a user's module."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return f"Python {sys.version_info.major}.{sys.version_info.minor}"
    package = sys.modules.get(top)
    path = getattr(package, "__file__", None) or next(iter(getattr(package, "__path__", ())), None)
    installed = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    here = path is not None and any(Path(path).is_relative_to(folder) for folder in installed)
    if top != __name__.partition(".")[0] and not here:
        return None
    return str(getattr(package, "__version__", ""))


def _name_of(value: Any) -> str:
    """Return how a message calls an object."""
    return getattr(value, "__qualname__", None) or f"an object of {type(value).__qualname__}"
