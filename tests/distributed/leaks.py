"""What ranks may leave at their end: shared memory, temporary folders, network namespaces, interfaces, threads, open files."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

import psutil

SHARED, NAMESPACES, INTERFACES = Path("/dev/shm"), Path("/run/netns"), Path("/sys/class/net")


def names(folder: Path) -> frozenset[str]:
    """Names of all files in a folder; none if it does not exist."""
    return frozenset(os.listdir(folder)) if folder.is_dir() else frozenset()


def mapped() -> str:
    """The memory maps of all processes that can be read, as one text."""
    parts = []
    for process in psutil.process_iter():
        with suppress(OSError):
            parts.append(Path(f"/proc/{process.pid}/maps").read_text(errors="replace"))
    return "\n".join(parts)


@final
@dataclass(frozen=True, slots=True)
class Snapshot:
    """The present state of this machine and of this process. Other processes may use the machine too."""

    shared: frozenset[str]
    namespaces: frozenset[str]
    interfaces: frozenset[str]
    threads: frozenset[str]
    num_files: int
    listening: frozenset[int]

    @classmethod
    def now(cls) -> Self:
        """Return the present state."""
        process = psutil.Process()
        ports = {int(item.laddr.port) for item in process.net_connections() if item.status == psutil.CONN_LISTEN}
        threads = frozenset(thread.name for thread in threading.enumerate() if thread.name.startswith("workbench"))
        return cls(names(SHARED), names(NAMESPACES), names(INTERFACES), threads, process.num_fds(), frozenset(ports))

    def left(self, temporary: Path, *, more_files: int = 8, within_s: float = 15.0) -> list[str]:
        """What has come since and belongs to nobody: in words; [] if nothing. Ends may take a while.

        Args:
            temporary: the folder for temporary files that only the ranks used; it must be empty.
            more_files: that this process may have open.
        """
        deadline = time.monotonic() + within_s
        while True:
            found = self._look(temporary, more_files)
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.5)

    def _look(self, temporary: Path, more_files: int) -> list[str]:
        now = Snapshot.now()
        found = [f"folder {name} in the place for temporary files" for name in sorted(names(temporary))]
        if new := now.shared - self.shared:
            used = mapped()
            found += [f"shared memory {name}" for name in sorted(new) if name not in used]
        found += [f"network namespace {name}" for name in sorted(now.namespaces - self.namespaces)]
        found += [f"thread {name}" for name in sorted(now.threads - self.threads)]
        found += [f"port {port}" for port in sorted(now.listening - self.listening)]
        if now.num_files > self.num_files + more_files:
            found.append(f"{now.num_files - self.num_files} open files")
        return found
