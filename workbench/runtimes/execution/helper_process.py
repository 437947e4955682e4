"""A process beside a rank that takes its sums: it needs neither the rank's interpreter lock nor its attention.

The rank's gradient buffers lie in files that both map (in memory, where the system has /dev/shm). The helpers of all ranks
form a gloo group of their own. Commands go down a pipe, one line each; a line comes back for each when it is done.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from workbench.errors import ConfigError, LaunchError
from workbench.runtimes.transport.base import Deadline, Handle, Transport
from workbench.units import MIB

START_S = 60.0


@final
class Helper:
    """This rank's helper process, and the memory it shares with it.

    Args:
        store: a file that all helpers can reach; they meet there.
        timeout_s: how long helpers wait for each other.
    """

    def __init__(self, rank: int, num_workers: int, store: Path, timeout_s: float) -> None:
        place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._folder = tempfile.TemporaryDirectory(prefix="workbench-helper-", dir=place)
        self._maps: dict[int, str] = {}  # address of a shared buffer, which lives as long as this does -> its file
        self._buffers: list[Tensor] = []
        self._copies: list[Tensor] = []  # free ones, for memory that is not shared
        self._under_way: deque[HelperHandle] = deque()
        self._text = b""
        command = [sys.executable, "-m", "workbench.runtimes.execution.helper_process", str(rank), str(num_workers), str(store)]
        command += [repr(timeout_s), self._folder.name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._heard = selectors.DefaultSelector()  # not select, which refuses numbers above 1,023: groups left alone keep theirs
        assert self._process.stdout is not None
        self._heard.register(self._process.stdout, selectors.EVENT_READ)
        self._wait_for_start()

    def _wait_for_start(self) -> None:
        deadline = time.monotonic() + START_S
        while b"ready\n" not in self._text:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise LaunchError("the helper processes did not find each other: use progress='auto', or see this rank's error output")
            self._read(0.1)
        self._text = self._text.split(b"ready\n", 1)[1]

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor whose memory the helper sees too."""
        path = str(Path(self._folder.name) / f"buffer-{len(self._buffers)}")
        _check_room(Path(self._folder.name), numel * dtype.itemsize)
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, numel * dtype.itemsize))  # else it fails at the first use, by SIGBUS
        flat = torch.from_file(path, shared=True, size=numel, dtype=dtype)
        self._buffers.append(flat)
        self._maps[flat.untyped_storage().data_ptr()] = path
        return flat

    def start_all_reduce(self, flat: Tensor) -> HelperHandle:
        """Sum a part of a shared buffer over all ranks, in the helper; other memory goes through a buffer of its own."""
        copy = None
        if flat.untyped_storage().data_ptr() not in self._maps:
            copy = self._copy_of(flat)
        source = flat if copy is None else copy
        path = self._maps[source.untyped_storage().data_ptr()]
        words = (path, source.untyped_storage().nbytes() // source.element_size(), source.storage_offset(), source.numel(), source.dtype)
        handle = HelperHandle(self, None if copy is None else (flat, copy))
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((" ".join(map(str, words)) + "\n").encode())
            self._process.stdin.flush()
        except OSError as error:
            handle.error = RuntimeError(f"the helper process is gone ({error}): use progress='auto'")
            return handle
        self._under_way.append(handle)
        return handle

    def _copy_of(self, flat: Tensor) -> Tensor:
        found = next((copy for copy in self._copies if (copy.numel(), copy.dtype) == (flat.numel(), flat.dtype)), None)
        if found is None:
            found = self.allocate(flat.numel(), flat.dtype)
        else:
            self._copies = [copy for copy in self._copies if copy is not found]
        return found.copy_(flat)

    def give_back(self, copy: Tensor) -> None:
        """A copy is free again."""
        self._copies.append(copy)

    def look(self) -> None:
        """Take note of what has been done since."""
        self._read(0.0)
        while b"\n" in self._text:
            line, self._text = self._text.split(b"\n", 1)
            handle = self._under_way.popleft()
            if line == b"done":
                handle.finish()
            else:
                handle.error = RuntimeError(f"the helper process failed: {line.decode(errors='replace')}")

    def _read(self, seconds: float) -> None:
        assert self._process.stdout is not None
        if self._heard.select(seconds):
            data = os.read(self._process.stdout.fileno(), 65536)
            if not data:
                for handle in self._under_way:
                    handle.error = RuntimeError("the helper process is gone: see this rank's error output, or use progress='auto'")
            self._text += data

    def close(self) -> None:
        """End the process and forget the memory."""
        with contextlib.suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._heard.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._folder.cleanup()


def _check_room(folder: Path, num_bytes: int) -> None:
    """Raise `ConfigError` unless so much more fits where ranks and helpers share their memory."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise ConfigError(
            f"progress='process' needs {num_bytes / MIB:.0f} MiB more of shared memory for this rank's gradients, and {folder.parent} has "
            f"{free / MIB:.0f} MiB free: enlarge it (mount -o remount,size=4G /dev/shm; docker run --shm-size=4g), or use progress='thread'"
        )


@final
class HelperHandle(Handle):
    """A sum that the helper takes."""

    def __init__(self, helper: Helper, back: tuple[Tensor, Tensor] | None) -> None:
        self.started_s = time.perf_counter()
        self.error: BaseException | None = None
        self._helper, self._back = helper, back

    def finish(self) -> None:
        """It is done."""
        if self._back is not None:
            self._back[0].copy_(self._back[1])
            self._helper.give_back(self._back[1])
        self.finished_s = time.perf_counter()

    def poll(self) -> bool:
        if self.finished_s is None and self.error is None:
            self._helper.look()
        if self.error is not None:
            raise self.error
        return self.finished_s is not None

    def wait(self, deadline: Deadline) -> None:
        while not self.poll():
            deadline.pause()


def start_helper(transport: Transport, folder: Path | None, timeout_s: float) -> Helper:
    """This rank's helper; every rank must call it. They meet in `folder`, or in one that rank 0 makes and all can reach.

    Raises:
        ConfigError: on a GPU.
    """
    if transport.device.type != "cpu":
        raise ConfigError("progress='process' shares gradients in host memory, and this rank trains on a GPU: use progress='auto'")
    deadline = Deadline("all ranks to start their helpers", transport.peer_failure, timeout_s)
    mine = str(folder or tempfile.mkdtemp(prefix="workbench-helpers-")) if transport.rank == 0 else ""
    where = Path(transport.gather_texts(mine, deadline)[0])
    helper = Helper(transport.rank, transport.num_workers, where / "helpers", timeout_s)
    if folder is None:
        transport.barrier(deadline)
        if transport.rank == 0:
            shutil.rmtree(where, ignore_errors=True)
    return helper


def main(arguments: list[str]) -> None:
    """The helper process: join the others, then sum what the rank names until it hangs up."""
    from datetime import timedelta

    import torch.distributed as dist

    rank, num_workers, store_path, timeout_s = int(arguments[0]), int(arguments[1]), arguments[2], float(arguments[3])
    threading.Thread(target=_leave_with, args=(os.getppid(), arguments[4]), daemon=True).start()
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, num_workers)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_workers, timeout=timedelta(seconds=timeout_s))
    output = sys.stdout.buffer
    output.write(b"ready\n")
    output.flush()
    maps: dict[str, Any] = {}
    for line in sys.stdin:
        path, total, offset, numel, dtype = line.split()
        if path not in maps:
            maps[path] = torch.from_file(path, shared=True, size=int(total), dtype=getattr(torch, dtype.removeprefix("torch.")))
        try:
            dist.all_reduce(maps[path][int(offset) : int(offset) + int(numel)])
            output.write(b"done\n")
        except RuntimeError as error:
            output.write(f"{error}".replace("\n", " ").encode() + b"\n")
        output.flush()
    shutil.rmtree(arguments[4], ignore_errors=True)  # the rank has hung up, or was killed and can give nothing back itself
    os._exit(0)  # the others may be gone already


def _leave_with(parent: int, folder: str) -> None:
    """End with the rank, however it ends, and give the shared memory back."""
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
