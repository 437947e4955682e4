"""Compiles `compiled.c` once for each machine, keeps the library in the user's cache folder, and loads it."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

from workbench import config
from workbench.logs import LOG

SETTING = "compiled_codecs"
SOURCE = Path(__file__).with_name("compiled.c")
COMPILERS = ("cc", "gcc", "clang")
# Without a fused multiply-add, or the bits would be others than those of torch's operations.
FLAGS = ("-std=c11", "-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")
WIDE = ("-mprefer-vector-width=512",)  # only known on this architecture
LIMIT_S = 60.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The library of compiled kernels, or the reason why there is none.

    Attributes:
        functions: its functions; None if there are none.
        message: where it is, or why there is none.
        fix: what to do for it; empty if there is nothing to do.
    """

    functions: ctypes.CDLL | None
    message: str
    fix: str = ""


@cache
def library() -> Library:
    """Return the library. If the cache folder does not have it, compile it, in about a second.

    Raises:
        ConfigError: the setting `compiled_codecs` is neither "on" nor "off".
    """
    if not config.is_on(SETTING):
        return Library(functions=None, message=f"turned off by the setting {SETTING}")
    if sys.byteorder != "little":
        return Library(functions=None, message="this processor is big-endian")
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        return Library(functions=None, message="no C compiler", fix="apt install gcc")
    command = [found, *FLAGS, *(WIDE if platform.machine() in ("x86_64", "AMD64") else ())]
    try:
        path = folder() / f"codecs-{_digest(command)}.so"
        made = Library(functions=_load(command, path), message=str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: also without a home folder
        fix = f"run {shlex.join([*command, str(SOURCE)])}, and remove {folder()}"
        made = Library(functions=None, message=f"{found} made no library: {error}", fix=fix)
        LOG.debug("codecs use torch's operations: %s", made.message)
    return made


def folder() -> Path:
    """Return the folder of compiled libraries; $XDG_CACHE_HOME moves it."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "workbench" / "compiled"


def _digest(command: list[str]) -> str:
    """Return a name for what the library depends on: the source, the compiler, its flags and the processor."""
    compiler = Path(command[0]).resolve()
    stat = compiler.stat()
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    features = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    parts = (SOURCE.read_text(), *command, compiler, stat.st_size, stat.st_mtime_ns, platform.platform(), *features)
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def _load(command: list[str], path: Path) -> ctypes.CDLL:
    """Load the library; if it is missing or damaged, compile it first."""
    if path.exists():
        with suppress(OSError):
            return ctypes.CDLL(str(path))
        path.unlink()
    _compile(command, path)
    return ctypes.CDLL(str(path))


def _compile(command: list[str], path: Path) -> None:
    """Compile into the cache. Ranks that start at once wait for the first one; the last step is a rename."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _lock(path.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=path.parent) as room:
        if path.exists():
            return
        made = Path(room, path.name)
        done = subprocess.run(
            [*command, "-o", str(made), str(SOURCE)], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(done.stderr.strip() or f"exit status {done.returncode}")
        with made.open("rb") as file:
            os.fsync(file.fileno())  # or a crash of the machine could leave a part of it
        os.replace(made, path)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock, where the folder's file system has locks: without one, each rank compiles."""
    with path.open("w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
