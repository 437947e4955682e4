"""ipyparallel's configuration for a cluster."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from traitlets.config import Config

from workbench.clusters.engines.engine_server import SOCKET, can_fork_engines, forked_command
from workbench.clusters.launchers.base import LOOPBACK, Launcher

HEARTBEAT_MS = 500  # a new engine is known after one heartbeat; ipyparallel's 3 s would be half of the start
HEARTBEAT_MISSES = 240  # two minutes, for an overloaded machine
REGISTER_S = 60
ENGINE = (sys.executable, "-m", "workbench.clusters.engines.engine_process")


def new_cluster(launcher: Launcher, num_ranks: int) -> dict[str, Any]:
    """Return the arguments of `ipyparallel.Cluster` that only a new cluster needs."""
    return {
        "engines": launcher.engine_set,
        "controller": launcher.controller,
        "n": num_ranks,
        "controller_ip": launcher.controller_ip(),
        "delay": 0.0,
        "send_engines_connection_env": not launcher.starts_at_once,
    }


def options(launcher: Launcher, num_ranks: int, cluster_id: str, mark: str, folder: Path) -> dict[str, Any]:
    """Return the arguments of `ipyparallel.Cluster` for a new cluster and for one to attach to."""
    log = logging.getLogger("workbench.clusters")
    log.setLevel(logging.ERROR)  # below that level, a normal stop prints lines that look like errors
    return {
        "config": _config(launcher, num_ranks, {mark: "1", "IPYTHONDIR": str(folder)}, folder),
        "log": log,
        "load_profile": False,
        "shutdown_atexit": False,
        "cluster_id": cluster_id,
        "profile_dir": str(folder),
    }


def engine_command(launcher: Launcher, folder: Path) -> list[str]:
    """Return the command of an engine, without its options."""
    return forked_command(folder / SOCKET) if forks_engines(launcher) else list(ENGINE)


def forks_engines(launcher: Launcher) -> bool:
    """Return whether the cluster's engines are forked by an engine server."""
    return launcher.forks_engines and can_fork_engines()


def _config(launcher: Launcher, num_ranks: int, everywhere: dict[str, str], folder: Path) -> Config:
    config = Config()
    config.EngineLauncher.engine_cmd = engine_command(launcher, folder)
    config.EngineLauncher.engine_args = [f"--IPEngine.timeout={REGISTER_S}"]
    launcher.configure(config, num_ranks, everywhere, folder)
    config.LocalControllerLauncher.environment = everywhere
    config.ControllerLauncher.controller_args = [
        f"--HeartMonitor.period={HEARTBEAT_MS}",
        f"--HeartMonitor.max_heartmonitor_misses={HEARTBEAT_MISSES}",
        "--IPController.broadcast_scheduler_depth=0",
        f"--IPController.enable_curve={launcher.controller_ip() != LOOPBACK}",
    ]
    return config
