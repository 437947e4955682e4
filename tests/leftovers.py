"""What a test can leave in its process for the next one: a picture of the process, and what differs from it later.

A picture is taken around each test in the test's own process (`tests/conftest.py`), and around the calls of a pool's
ranks (`tests/distributed/ranks.py`).
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, final

import numpy as np
import torch

ENDS_S = 3.0  # what has been asked to end may need so long, on a busy machine
LOOK_S = 0.02
# Without SIGALRM, which is pytest-timeout's.
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGCHLD", "SIGUSR1", "SIGUSR2")

# Modules besides ours whose functions tests replace.
THEIRS = {
    *(
        "builtins",
        "os",
        "posixpath",
        "random",
        "shutil",
        "signal",
        "socket",
        "subprocess",
        "tempfile",
        "threading",
        "time",
    ),
    *("torch", "torch.cuda", "torch.distributed", "torch.distributed.distributed_c10d"),
}

# Variables that pytest, torch and scikit-learn set themselves, when they are first used.
OF_LIBRARIES = {
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "KMP_DUPLICATE_LIB_OK",
    "_RJEM_MALLOC_CONF",  # of polars
    "KMP_INIT_AT_FORK",
}


@final
class Picture:
    """The present state of this process."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.folder = os.getcwd()
        self.paths = _paths()
        self.values = dict(_values())
        self.threads = set(threading.enumerate())
        self.files = _files()

    def differences(self) -> list[str]:
        """Differences from that state, a line each; threads and processes that are about to end have a moment for it."""
        deadline = time.monotonic() + ENDS_S
        while (still := [*self._threads(), *self._open_files()]) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(LOOK_S)
        return [*still, *self._environment(), *self._values()]

    def restore(self) -> None:
        """Put back what can be put back, so that the tests that follow do not fail as well."""
        for name in os.environ.keys() - self.environment.keys() - OF_LIBRARIES:
            del os.environ[name]
        os.environ.update({name: value for name, value in self.environment.items() if name not in OF_LIBRARIES})
        os.chdir(self.folder)
        sys.path[:] = self.paths
        torch.set_default_dtype(self.values["torch.get_default_dtype"])
        torch.set_grad_enabled(self.values["torch.is_grad_enabled"])
        torch.use_deterministic_algorithms(
            self.values["torch.are_deterministic_algorithms_enabled"],
            warn_only=self.values["torch.is_deterministic_algorithms_warn_only_enabled"],
        )
        if torch.distributed.is_initialized() and self.values.get("default process group") is None:
            torch.distributed.destroy_process_group()

    def _threads(self) -> list[str]:
        """Without daemons, of which the library and Jupyter have some that end when they next look."""
        return [
            f"thread {one.name} runs"
            for one in threading.enumerate()
            if one not in self.threads and not one.daemon and not one.name.startswith("asyncio_")
        ]

    def _open_files(self) -> list[str]:
        return [f"{name} is open" for name in sorted(_files() - self.files)]

    def _environment(self) -> Iterator[str]:
        names = (self.environment.keys() | os.environ.keys()) - OF_LIBRARIES
        for name in sorted(names):
            before, now = self.environment.get(name), os.environ.get(name)
            if before != now:
                yield f"environment variable {name}: {before!r} became {now!r}"
        if (folder := _folder()) != self.folder:
            yield f"working directory: {self.folder} became {folder}"
        if (paths := _paths()) != self.paths:
            yield f"sys.path: {self.paths} became {paths}"

    def _values(self) -> Iterator[str]:
        for name, now in _values():
            before = self.values.get(name, now)
            if before is not now and before != now and not _of_torch(now):
                yield f"{name}: {before!r:.300} became {now!r:.300}"


@final
class Definitions:
    """What names of modules and classes stand for, so that a replaced function is found.

    To make it takes milliseconds: one is kept.
    """

    def __init__(self) -> None:
        self._known: dict[ModuleType | type, dict[str, Any]] = {}
        self._num_imported = 0
        self.changes()

    def changes(self) -> list[str]:
        """What stands for something else since the last call, a line each.

        What is imported or computed late is new, and not replaced.
        """
        lines = []
        for owner, before in self._known.items():
            if _differ([*vars(owner).values()], [*before.values()]):  # takes less time than dictionaries do
                lines += _replaced(owner, before)
                self._known[owner] = dict(vars(owner))
        if len(sys.modules) != self._num_imported:
            self._num_imported = len(sys.modules)
            for module in _modules():
                for owner in [module, *_classes(module)]:
                    self._known.setdefault(owner, dict(vars(owner)))
        return lines


def _paths() -> list[str]:
    """Where modules are looked for; torch.compile adds the folder of what it compiled, and setuptools its own."""
    return [path for path in sys.path if "torchinductor" not in path and not path.endswith("_vendor")]


def _values() -> Iterator[tuple[str, Any]]:
    """Settings of a process that tests may change."""
    yield "torch.get_default_dtype", torch.get_default_dtype()
    yield "torch.get_default_device", torch.get_default_device()
    yield "torch.is_grad_enabled", torch.is_grad_enabled()
    yield "torch.is_inference_mode_enabled", torch.is_inference_mode_enabled()
    yield "torch.is_anomaly_enabled", torch.is_anomaly_enabled()
    yield "torch.are_deterministic_algorithms_enabled", torch.are_deterministic_algorithms_enabled()
    yield "torch.is_deterministic_algorithms_warn_only_enabled", torch.is_deterministic_algorithms_warn_only_enabled()
    yield "torch.backends.cudnn.deterministic", torch.backends.cudnn.deterministic
    yield "torch.backends.cudnn.benchmark", torch.backends.cudnn.benchmark
    yield "torch's profiler", torch.autograd._profiler_enabled()
    yield from _process_groups()
    yield "sys.gettrace", sys.gettrace()
    yield "sys.getprofile", sys.getprofile()
    yield "threading.gettrace", threading.gettrace()
    yield "sys.excepthook", sys.excepthook
    yield "sys.displayhook", sys.displayhook
    yield "sys.getrecursionlimit", max(2000, sys.getrecursionlimit())  # torch.compile raises it to that
    yield "sys.getswitchinterval", sys.getswitchinterval()
    yield "tracemalloc.is_tracing", tracemalloc.is_tracing()
    yield "gc.isenabled", gc.isenabled()
    yield "gc.get_threshold", gc.get_threshold()
    yield "np.geterr", np.geterr()
    for name in SIGNALS:
        yield f"what {name} does", signal.getsignal(getattr(signal, name))
    yield "signals that are held back", frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    yield "logging.root.level", logging.root.level
    yield "logging.root.manager.disable", logging.root.manager.disable
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "workbench":
            yield f"logger {name}", (logger.level, logger.disabled, logger.propagate, len(logger.handlers))
    if (drawing := sys.modules.get("plotly.io")) is not None:
        yield "plotly.io.templates.default", drawing.templates.default
        yield "plotly.io.renderers.default", drawing.renderers.default
    if (drawing := sys.modules.get("matplotlib")) is not None:
        yield "matplotlib.rcParams", dict(drawing.rcParams)


def _process_groups() -> Iterator[tuple[str, Any]]:
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None and torch.distributed.is_available():
        yield "default process group", c10d._world.default_pg


def num_groups() -> int:
    """Of torch.distributed, the default one included."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return 0 if c10d is None or not torch.distributed.is_available() else len(c10d._world.pg_map)


def _files() -> set[str]:
    """Paths of regular files that are open. Sockets and pipes come and go with libraries."""
    found = set()
    with suppress(OSError):  # no such folder on other systems
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{number}")
                if path.startswith("/") and Path(path).is_file() and not path.startswith(("/dev/", "/proc/")):
                    found.add(path)
    return found


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "one that has been removed"


def _modules() -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (name.partition(".")[0] == "workbench" or name in THEIRS):
            yield module


def _classes(module: ModuleType) -> Iterator[type]:
    """By `type`, because `isinstance` reads the class of a deprecated name, which warns."""
    if module.__name__.partition(".")[0] != "workbench":
        return iter(())
    return (one for one in vars(module).values() if issubclass(type(one), type) and one.__module__ == module.__name__)


def _of_torch(value: Any) -> bool:
    """A function by which torch replaces one of its own, or a hook of the interpreter's, when a part of it is first used."""
    return isinstance(value, FunctionType) and value.__module__.partition(".")[0] == "torch"


def _differ(now: list[Any], before: list[Any]) -> bool:
    try:
        return now != before
    except Exception:  # noqa: BLE001 - a value of which it cannot be said whether it is another, as a tensor
        return True


def _replaced(owner: ModuleType | type, before: dict[str, Any]) -> Iterator[str]:
    """What a name stood for is a function, a class or a plain value: caches may grow and counters count."""
    now = vars(owner)
    where = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
    ours = where.partition(".")[0] == "workbench"
    for name, value in before.items():
        if name.startswith(("__", "_abc_")):
            continue
        if name not in now:
            yield f"{where}.{name} is missing"
        elif now[name] is value or _of_torch(now[name]):
            continue
        elif callable(value) or (ours and isinstance(value, str | float | tuple) and now[name] != value):
            yield f"{where}.{name}: {value!r:.100} became {now[name]!r:.100}"


def peak_bytes() -> int:
    """The most memory that this process had resident so far; 0 where that is not said."""
    with suppress(OSError):  # getrusage would say what the process had that this one was started from
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
