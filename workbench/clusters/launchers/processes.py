"""Ranks of this machine without MPI: processes with the variables of torchrun (RANK, WORLD_SIZE, ...)."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any, final

from ipyparallel.cluster.launcher import LocalEngineSetLauncher
from traitlets.config import Config

from workbench.clusters.launchers.base import Launcher
from workbench.machine import is_running, num_cores


@final
class ProcessSet(LocalEngineSetLauncher):  # type: ignore[misc]  # ipyparallel ships no types
    """One engine per rank, with the rank's number."""

    def start(self, n: int) -> list[Any]:
        """Start all engines."""
        self.n = n
        started = []
        for rank in range(n):
            world = {"RANK": rank, "WORLD_SIZE": n, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": n}
            engine = self.launchers[str(rank)] = self.launcher_class(
                work_dir=self.work_dir,
                parent=self,
                log=self.log,
                profile_dir=self.profile_dir,
                cluster_id=self.cluster_id,
                environment={**self.environment, **{name: str(value) for name, value in world.items()}},
                identifier=str(rank),
                output_file=os.path.join(self.profile_dir, "log", f"rank-{rank:05d}.log"),
            )
            engine.engine_cmd = copy.deepcopy(self.engine_cmd)
            engine.engine_args = [*self.engine_args, f"--IPEngine.id={rank}"]
            engine.on_stop(self._notice_engine_stopped)
            started.append(engine.start())
        self.notify_start(started)
        return started


@final
class ProcessLauncher(Launcher):
    """Starts processes that communicate by torch.distributed."""

    engine_set = ProcessSet
    is_mpi = False
    starts_at_once = True
    forks_engines = True

    @property
    def title(self) -> str:
        return "torch.distributed processes"

    def variables(self, num_ranks: int) -> dict[str, str]:
        return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cores() // num_ranks))}

    def configure(self, config: Config, num_ranks: int, environment: dict[str, str], folder: Path) -> None:
        config.ProcessSet.environment = {**environment, **self.variables(num_ranks)}

    def alive(self, engine_set: Any) -> bool:
        """Return True if all engines are alive."""
        if engine_set is None:
            return False
        engines = list(engine_set.launchers.values())
        return len(engines) == engine_set.n and all(
            engine.state == "running" and is_running(engine.process) for engine in engines
        )

    def last_output(self, engine_set: Any) -> str:
        """Return the output of all ranks, each line after its rank's number."""
        if engine_set is None:
            return ""
        lines = []
        for rank in range(engine_set.n):
            path = Path(engine_set.profile_dir, "log", f"rank-{rank:05d}.log")
            if path.is_file():
                output = path.read_text(errors="replace")
            else:
                output = engine_set.outputs.get(str(rank)) or ""  # kept for an engine that has ended
            lines += [f"[{rank}] {line}" for line in output.splitlines()]
        return "\n".join(lines)
