"""Describes a site for publication: without host names and paths."""

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

from workbench.config import value_of
from workbench.errors import ConfigError
from workbench.machine import num_cores

SITE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
ASK_S = 10.0
BUSY_LOAD = 0.25  # load average of one minute for each core, above which measured times are in doubt


def site_name(given: str | None = None) -> str:
    """Return the site's name in records: the given one, else that of `workbench config`, the Slurm cluster's, or "N-cores".

    Raises:
        ConfigError: the name cannot be part of a file's name.
    """
    name = given or value_of("site")
    if name:
        if not SITE.fullmatch(name):
            raise ConfigError(f"site {name!r}: use a-z, 0-9 and hyphens, such as lab-8-gpus")
        return name
    cluster = os.environ.get("SLURM_CLUSTER_NAME") if os.environ.get("SLURM_JOB_ID") else None
    if cluster:
        return "slurm-" + re.sub(r"[^a-z0-9]+", "-", cluster.lower()).strip("-")
    return f"{num_cores()}-cores"


def machine() -> dict[str, Any]:
    """Return the number of cores, the memory in GiB, the processor's model, and the GPUs, if there are any."""
    import psutil

    found: dict[str, Any] = {
        "cores": num_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "cpu": _cpu(),
    }
    gpus = _gpus()
    return {**found, "gpus": gpus} if gpus else found


def busy_machine() -> str:
    """Return a sentence if other processes load this machine; empty if not. Call it before you start processes."""
    load, cores = os.getloadavg()[0], num_cores()
    if load <= BUSY_LOAD * cores:
        return ""
    return (
        f"Before the start this machine was busy: load {load:.1f} on {cores} cores. So measured times may be wrong. "
        "Repeat them on an idle machine, with --again."
    )


def without_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters for a record. Of a path, only the last part is kept.

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
