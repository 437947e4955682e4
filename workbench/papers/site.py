"""Where something ran, in words that may be published: no names of hosts, no paths."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError
from workbench.machine import num_cores

SITE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
VARIABLE = "WORKBENCH_SITE"
ASK_S = 10.0


def site_name(given: str | None = None) -> str:
    """What records call this site: as given, or as $WORKBENCH_SITE says, or by the Slurm cluster's name, or by its cores.

    Raises:
        ConfigError: a name that would not do in a file's name.
    """
    name = given or os.environ.get(VARIABLE)
    if name:
        if not SITE.fullmatch(name):
            raise ConfigError(f"site {name!r}: a-z, 0-9 and hyphens, such as lab-8-gpus")
        return name
    cluster = os.environ.get("SLURM_CLUSTER_NAME") if os.environ.get("SLURM_JOB_ID") else None
    if cluster:
        return "slurm-" + re.sub(r"[^a-z0-9]+", "-", cluster.lower()).strip("-")
    return f"{num_cores()}-cores"


def machine() -> dict[str, Any]:
    """Cores, memory in GiB, the processor's model, and GPUs where there are some."""
    import psutil

    found: dict[str, Any] = {"cores": num_cores(), "memory_gib": round(psutil.virtual_memory().total / 2**30), "cpu": _cpu()}
    gpus = _gpus()
    return {**found, "gpus": gpus} if gpus else found


def without_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as a record may keep them: of a folder of data its last part alone.

    >>> without_paths({"folder": "~/data/imagenet", "epochs": 2})
    {'folder': '.../imagenet', 'epochs': 2}
    """
    return {
        name: f".../{Path(value).name}" if isinstance(value, str) and value.startswith(("/", "~")) else value
        for name, value in values.items()
    }


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
        return done.stdout.split("\n")[:-1] if done.returncode == 0 else []
    return []
