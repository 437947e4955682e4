"""What this process uses of its machine: cores, memory and GPU. Written into its heartbeat once a second."""

from __future__ import annotations

import importlib
import sys
import time
from contextlib import suppress
from typing import Any, final

import psutil

SHORTEST_S = 0.2  # processor time is counted in units of 10 ms


@final
class Usage:
    """Measures this process between two calls of `row`. A call takes less than a millisecond without a GPU.

    The GPU is read through NVML, if nvidia-ml-py is installed and this process has used a GPU.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()  # later calls measure since this one
        self._cpu_cores: float | None = None
        self._measured_s = time.monotonic()
        self._gpu: Any = None  # NVML and its device, once known
        self._has_no_nvml = False

    def row(self) -> dict[str, Any]:
        """Return entries of the heartbeat.

        Returns:
            `cpu_cores`: seconds of processor time per second since the last call; None at first.
            `memory_bytes`: resident memory, with what this process has reserved on its GPU.
            `gpu`: None, or `name`, `share` (of the time in which a kernel of any process ran), `used_bytes` and
            `total_bytes` (of all processes).
        """
        now_s = time.monotonic()
        if now_s - self._measured_s > SHORTEST_S:
            self._cpu_cores, self._measured_s = self._process.cpu_percent() / 100, now_s
        return {"cpu_cores": self._cpu_cores, "memory_bytes": memory_bytes(), "gpu": self._gpu_row()}

    def _gpu_row(self) -> dict[str, Any] | None:
        device = gpu_of_this_process()
        if device is None or self._has_no_nvml:
            return None
        cuda = sys.modules["torch"].cuda
        try:
            if self._gpu is None:
                nvml = importlib.import_module("pynvml")
                nvml.nvmlInit()
                # not by number: CUDA_VISIBLE_DEVICES changes numbers
                handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{cuda.get_device_properties(device).uuid}")
                self._gpu = (nvml, handle)
            nvml, handle = self._gpu
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            row = {"name": cuda.get_device_name(device), "share": None}
            row |= {"used_bytes": int(memory.used), "total_bytes": int(memory.total)}
            with suppress(nvml.NVMLError):  # a part of a GPU (MIG) has no utilisation
                row["share"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        except Exception:  # noqa: BLE001 - no pynvml, another module of this name, an older driver, a lost device
            self._has_no_nvml = True
            return None
        return row


def gpu_of_this_process() -> int | None:
    """Return the number of the GPU on which this process has reserved most memory; None if it has used no GPU.

    Not the current device: each thread has its own.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return max(range(torch.cuda.device_count()), key=torch.cuda.memory_reserved)


def memory_bytes() -> int:
    """Return the bytes that this process holds in the machine's memory, and on its GPU if it has one."""
    held = int(psutil.Process().memory_info().rss)
    device = gpu_of_this_process()
    return held if device is None else held + int(sys.modules["torch"].cuda.memory_reserved(device))
